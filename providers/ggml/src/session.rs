//! A session: an engine's graph with memory and weights.

use crate::{
    ffi::{Program, Tensor},
    storage::{from_storage, into_storage, storage_type},
    translate::Translation,
    weights::{Placement, Source},
};
use sdrun_abi::{
    DType, EngineInfo, Error, ErrorCode, Flow, Host, LogLevel, MemoryReport, OutputSink, OutputSpec,
    RefitReport, Result, Session, TensorView, Weight, WeightSource, WeightSpec, WeightUpdate,
};
use std::collections::BTreeMap;

pub(crate) struct GgmlSession {
    program: Program,
    inputs: Vec<(Tensor, DType)>,
    outputs: Vec<(Tensor, DType)>,
    output_specs: Vec<OutputSpec>,
    /// Where each weight of the engine goes; nowhere, if no output depends on it.
    weights: BTreeMap<String, Slot>,
}

struct Slot {
    spec: WeightSpec,
    placements: Vec<Placement>,
}

impl GgmlSession {
    /// Allocates the graph's memory and fills it, one weight at a time.
    pub(crate) fn new(
        translation: Translation,
        info: &EngineInfo,
        threads: usize,
        source: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Self> {
        let Translation { builder, inputs, outputs, placements, .. } = translation;
        let tensors: Vec<Tensor> = outputs.iter().map(|(tensor, _)| *tensor).collect();
        let program = builder.finish(&tensors, threads)?;
        let output_specs = info
            .outputs
            .iter()
            .map(|spec| OutputSpec {
                dtype: spec.dtype,
                shape: spec.shape.iter().flatten().copied().collect(),
            })
            .collect();
        let slot =
            |spec: &WeightSpec| (spec.name.clone(), Slot { spec: spec.clone(), placements: Vec::new() });
        let weights = info.weights.iter().map(slot).collect();
        let mut session = GgmlSession { program, inputs, outputs, output_specs, weights };
        for placement in placements {
            match &placement.source {
                Source::Constant(constant) => {
                    let bytes = placement.arrange(constant.dtype(), constant.data())?;
                    session.program.write(placement.tensor, &bytes)?;
                }
                Source::Weight(name) => match session.weights.get_mut(name) {
                    Some(slot) => slot.placements.push(placement),
                    None => return Err(Error::internal(format!("{name:?} is not a weight of the engine"))),
                },
            }
        }
        let total = session.weights.len() as u64;
        for (step, slot) in session.weights.values().enumerate() {
            if host.progress("weights", step as u64, total) == Flow::Cancel {
                return Err(Error::new(ErrorCode::Cancelled, "loading the weights was cancelled"));
            }
            let weight = pull(source, &slot.spec)?;
            for placement in &slot.placements {
                session.program.write(placement.tensor, &placement.arrange(weight.dtype, weight.data())?)?;
            }
        }
        Ok(session)
    }

    /// Writes one weight and adds what it replaces to `undo`; returns the weight's bytes.
    fn replace(
        &mut self,
        name: &str,
        source: &dyn WeightSource,
        undo: &mut Vec<(Tensor, Vec<u8>)>,
    ) -> Result<u64> {
        let slot = self
            .weights
            .get(name)
            .ok_or_else(|| Error::not_found(format!("the engine has no weight {name:?}")))?;
        let weight = pull(source, &slot.spec)?;
        for placement in &slot.placements {
            let bytes = placement.arrange(weight.dtype, weight.data())?;
            let mut old = vec![0; self.program.size(placement.tensor)];
            self.program.read(placement.tensor, &mut old)?;
            self.program.write(placement.tensor, &bytes)?;
            undo.push((placement.tensor, old));
        }
        Ok(weight.data().len() as u64)
    }
}

impl Session for GgmlSession {
    /// In place. What is replaced is kept until all of `changed` has succeeded.
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let (mut undo, mut bytes) = (Vec::new(), 0);
        for (step, name) in changed.iter().enumerate() {
            let result = match host.progress("refit", step as u64, changed.len() as u64) {
                Flow::Continue => self.replace(name, weights, &mut undo),
                Flow::Cancel => Err(Error::new(ErrorCode::Cancelled, "the refit was cancelled")),
            };
            match result {
                Ok(len) => bytes += len,
                Err(error) => {
                    // Latest first, for a name may be listed twice.
                    for (tensor, old) in undo.into_iter().rev() {
                        self.program.write(tensor, &old)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(RefitReport { method: WeightUpdate::InPlace, tensors: changed.len(), bytes })
    }

    fn run(&mut self, inputs: &[TensorView<'_>], sink: &mut dyn OutputSink, host: &dyn Host) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::invalid(format!(
                "{} inputs given, {} expected",
                inputs.len(),
                self.inputs.len()
            )));
        }
        for (view, (tensor, dtype)) in inputs.iter().zip(&self.inputs) {
            if view.dtype != *dtype {
                return Err(Error::invalid(format!("an input is {}, expected {dtype}", view.dtype)));
            }
            self.program.write(*tensor, &into_storage(*dtype, view.data).map_err(Error::invalid)?)?;
        }
        let mut buffers = sink.allocate(&self.output_specs)?;
        if buffers.len() != self.outputs.len() {
            return Err(Error::internal(format!(
                "{} output buffers for {} outputs",
                buffers.len(),
                self.outputs.len()
            )));
        }
        self.program.compute(&|| host.cancelled())?;
        if let Some(table) = self.program.profile() {
            host.log(LogLevel::Info, "ggml", &table);
        }
        for (buffer, (tensor, dtype)) in buffers.iter_mut().zip(&self.outputs) {
            let Some(type_) = storage_type(*dtype) else {
                return Err(Error::internal(format!("an output is {dtype}")));
            };
            if type_.size() == dtype.size() {
                self.program.read(*tensor, buffer)?;
                continue;
            }
            let mut stored = vec![0; self.program.size(*tensor)];
            self.program.read(*tensor, &mut stored)?;
            let bytes = from_storage(*dtype, type_, &stored).map_err(Error::internal)?;
            if bytes.len() != buffer.len() {
                return Err(Error::internal(format!(
                    "{} bytes for an output of {}",
                    buffer.len(),
                    bytes.len()
                )));
            }
            buffer.copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn memory(&self) -> Result<MemoryReport> {
        let (weights, activations) = (self.program.weight_bytes(), self.program.activation_bytes());
        Ok(MemoryReport {
            weights: Some(weights),
            activations: Some(activations),
            device: Some(weights + activations),
        })
    }
}

/// A weight of the type and shape the graph states.
fn pull<'a>(source: &'a dyn WeightSource, spec: &WeightSpec) -> Result<Weight<'a>> {
    let weight = source.get(&spec.name)?;
    if weight.dtype != spec.dtype || weight.shape != spec.shape {
        return Err(Error::invalid(format!(
            "weight {:?} is {} {:?}, the graph has {} {:?}",
            spec.name, weight.dtype, weight.shape, spec.dtype, spec.shape
        )));
    }
    Ok(weight)
}
