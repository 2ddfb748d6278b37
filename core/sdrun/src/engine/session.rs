//! Sessions: engines with weights, ready to run.

use super::{
    check::{check_input, has_its_weights, versions, views, wrong_names},
    finite,
};
use crate::{
    Engine, Error, Provider, Result, Tensors,
    tensor::{DeviceTensor, DeviceTensors, HostTensor, Outputs},
};
use sdrun_abi::{
    EngineInfo, Error as AbiError, Host, Input, MemoryReport, Precision, RefitReport,
    Session as DriverSession, TimingPlan, WeightSource, WeightUpdate,
};
use sdrun_weights::{Cast, check_complete};
use std::{collections::HashMap, time::Instant};

impl Engine {
    /// Loads weights and creates a session. Every weight of [`EngineInfo::weights`] must exist with its shape (types
    /// are converted). Otherwise the error lists the missing ones.
    pub fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Session> {
        let started = Instant::now();
        let specs = &self.inner.info().weights;
        let cast = Cast::new(weights, specs);
        check_complete(specs, &cast)?;
        let inner = self.inner.session(&cast, host).map_err(Error::of(self.provider.id()))?;
        Ok(Session {
            inner,
            versions: versions(specs, weights),
            provider: self.provider.clone(),
            info: self.inner.info().clone(),
            outputs: Outputs::default(),
            precision: self.manifest.spec.precision,
            finite: true,
            seconds: started.elapsed().as_secs_f64(),
        })
    }
}

/// An engine with weights, ready to run.
pub struct Session {
    inner: Box<dyn DriverSession>,
    /// [`WeightSource::version`] of the current weights.
    versions: HashMap<String, u128>,
    provider: Provider,
    info: EngineInfo,
    outputs: Outputs,
    /// Precision of the engine, for hints.
    precision: Precision,
    /// Whether outputs must be finite.
    finite: bool,
    seconds: f64,
}

impl Session {
    /// Accepts NaN and infinity in outputs, for models that produce them on purpose, for example in masks. Without
    /// this, a run with such an output fails, because an image decoded from it would be black.
    pub fn allow_non_finite(mut self) -> Self {
        self.finite = false;
        self
    }

    /// Inputs, outputs and weights.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }
    /// How long creating the session took, in seconds.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Runs one inference. `inputs` must have exactly one tensor per input, with its type and shape.
    ///
    /// # Errors
    /// `InvalidArgument` if the inputs do not match; `OutOfRange` if an output has NaN or infinity, unless the
    /// session [allows them](Session::allow_non_finite).
    pub fn run(&mut self, inputs: &Tensors, host: &dyn Host) -> Result<Tensors> {
        self.run_in_place(inputs, host)?;
        let tensors = std::mem::take(&mut self.outputs.tensors);
        Ok(self.info.outputs.iter().map(|s| s.name.clone()).zip(tensors).collect())
    }

    /// Runs one inference whose outputs stay in the session, in the order of [`EngineInfo::outputs`], until the next
    /// run. For loops: it allocates no memory.
    pub fn run_in_place(&mut self, inputs: &Tensors, host: &dyn Host) -> Result<&[HostTensor]> {
        let views = views(&self.info, inputs)?;
        self.inner.run(&views, &mut self.outputs, host).map_err(Error::of(self.provider.id()))?;
        if self.outputs.tensors.len() != self.info.outputs.len() {
            return Err(Error::of(self.provider.id())(AbiError::internal(format!(
                "gave {} outputs; the graph has {}",
                self.outputs.tensors.len(),
                self.info.outputs.len()
            ))));
        }
        if self.finite {
            let outputs = self.info.outputs.iter().zip(&self.outputs.tensors);
            for (spec, tensor) in outputs {
                finite::check(self.provider.id(), &spec.name, tensor, self.precision)?;
            }
        }
        Ok(&self.outputs.tensors)
    }

    /// Runs one inference with some inputs in main memory and others on the device. The outputs named in `keep` stay
    /// on the device, so tensors that one model passes to another, such as a ControlNet's residuals to the denoiser,
    /// are never copied. The other outputs are returned as in [`run`](Session::run). Each input is named once, in one
    /// of the two maps. Outputs that stay on the device are not checked for NaN and infinity; the outputs of the run
    /// that consumes them are.
    ///
    /// Errors: `Unimplemented` if the device does not have
    /// [`Capabilities::device_tensors`](sdrun_abi::Capabilities::device_tensors); `InvalidArgument` for a tensor on
    /// another device.
    pub fn run_on_device(
        &mut self,
        inputs: &Tensors,
        on_device: &DeviceTensors,
        keep: &[&str],
        host: &dyn Host,
    ) -> Result<(Tensors, DeviceTensors)> {
        let names = || inputs.keys().chain(on_device.keys()).map(String::as_str);
        let mut given = Vec::with_capacity(self.info.inputs.len());
        for spec in &self.info.inputs {
            let input = match (inputs.get(&spec.name), on_device.get(&spec.name)) {
                (Some(tensor), None) => Input::Host(tensor.view()),
                (None, Some(tensor)) => Input::Device(tensor.inner.as_ref()),
                _ => return Err(wrong_names(&self.info, names()).into()),
            };
            let (dtype, shape) = input.spec();
            check_input(spec, dtype, shape)?;
            given.push(input);
        }
        if names().count() != given.len() {
            return Err(wrong_names(&self.info, names()).into());
        }
        let outputs = || self.info.outputs.iter().map(|output| output.name.as_str());
        if let Some(unknown) = keep.iter().find(|name| !outputs().any(|output| output == **name)) {
            return Err(AbiError::invalid(format!(
                "there is no output {unknown:?} to keep; the engine has [{}]",
                outputs().collect::<Vec<_>>().join(", ")
            ))
            .into());
        }
        let stays: Vec<bool> = outputs().map(|name| keep.contains(&name)).collect();
        let mut sink = Outputs::default();
        let kept = self
            .inner
            .run_on_device(&given, &stays, &mut sink, host)
            .map_err(Error::of(self.provider.id()))?;
        let wanted = stays.iter().filter(|stays| **stays).count();
        if kept.len() != wanted || sink.tensors.len() != stays.len() - wanted {
            return Err(Error::of(self.provider.id())(AbiError::internal(format!(
                "gave {} outputs and kept {}; the graph has {}, of which {wanted} were to stay",
                sink.tensors.len(),
                kept.len(),
                stays.len()
            ))));
        }
        let (mut tensors, mut kept) = (sink.tensors.into_iter(), kept.into_iter());
        let (mut brought, mut left) = (Tensors::new(), DeviceTensors::new());
        for (output, stays) in self.info.outputs.iter().zip(stays) {
            let name = output.name.clone();
            match stays {
                true => left.extend(kept.next().map(|tensor| {
                    (name, DeviceTensor { inner: tensor.into(), provider: self.provider.clone() })
                })),
                false => brought.extend(tensors.next().map(|tensor| (name, tensor))),
            }
        }
        if self.finite {
            for (name, tensor) in &brought {
                finite::check(self.provider.id(), name, tensor, self.precision)?;
            }
        }
        Ok((brought, left))
    }

    /// Runs repeatedly and returns the duration of each counted run, in milliseconds. The times are measured next to
    /// the provider: in its worker, if it has one.
    pub fn time(&mut self, inputs: &Tensors, plan: &TimingPlan, host: &dyn Host) -> Result<Vec<f64>> {
        let views = views(&self.info, inputs)?;
        self.inner.time(&views, plan, host).map_err(Error::of(self.provider.id()))
    }

    /// Replaces the weights with a checkpoint, adapters, both ([`WeightStack`](sdrun_weights::WeightStack)), or any other
    /// complete source. The provider only receives weights that differ from the current ones, as far as
    /// [`WeightSource::version`] can tell for both sources. On error, the previous weights stay usable.
    pub fn refit(&mut self, weights: &dyn WeightSource, host: &dyn Host) -> Result<RefitReport> {
        let specs = &self.info.weights;
        if specs.is_empty() {
            return Err(has_its_weights());
        }
        let cast = Cast::new(weights, specs);
        check_complete(specs, &cast)?;
        let versions = versions(specs, weights);
        let same = |name: &str| versions.get(name).is_some_and(|new| self.versions.get(name) == Some(new));
        let changed: Vec<&str> = specs.iter().map(|w| w.name.as_str()).filter(|name| !same(name)).collect();
        if changed.is_empty() {
            return Ok(RefitReport::new(WeightUpdate::InPlace, 0, 0));
        }
        let report = self.inner.refit(&changed, &cast, host).map_err(Error::of(self.provider.id()))?;
        self.versions = versions;
        Ok(report)
    }

    /// Memory that the runtime uses for this session.
    pub fn memory(&self) -> Result<MemoryReport> {
        self.inner.memory().map_err(Error::of(self.provider.id()))
    }
}
