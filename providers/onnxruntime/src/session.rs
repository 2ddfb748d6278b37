//! Sessions.

use crate::{
    engine::{Recipe, Target, cancelled_error},
    ffi::{OrtSession, Terminator},
    log,
    watch::watched,
};
use ort::environment::Environment;
use sdrun_abi::{
    DType, DeviceTensor, EngineInfo, Error, Host, Input, MemoryReport, OutputSink, OutputSpec, RefitReport,
    Result, Session, TensorSpec, TensorView, WeightSource,
};
use sdrun_provider_common::{indices::Checks, rebuilt};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// If the last run took longer than this, the next one is watched for cancellation. Shorter runs end soon enough, and
/// avoid the cost of the watching thread.
const WATCHED_FROM: Duration = Duration::from_millis(100);

/// A session with weights.
pub(crate) struct RunningSession {
    session: OrtSession,
    checks: Checks,
    /// The outputs for `checks`, after those of the model.
    counts: Vec<[u8; 4]>,
    /// Types and shapes of the outputs if all shapes are fixed. Then ONNX Runtime writes directly into the sink's
    /// buffers.
    fixed: Option<Vec<OutputSpec>>,
    /// Duration of the last run; `None` before the first.
    last_run: Option<Duration>,
    target: Target,
    environment: &'static Environment,
    /// How to make another session; `None` if the weights are baked in.
    recipe: Option<Arc<Recipe>>,
}

impl RunningSession {
    pub(crate) fn new(
        session: OrtSession,
        info: &EngineInfo,
        checks: &Checks,
        (target, environment): (Target, &'static Environment),
        recipe: Option<Arc<Recipe>>,
    ) -> Self {
        let counts = vec![[0; 4]; checks.outputs().count()];
        let fixed =
            info.outputs.iter().cloned().chain(checks.outputs()).map(|spec| fixed_output(&spec)).collect();
        RunningSession {
            session,
            checks: checks.clone(),
            counts,
            fixed,
            last_run: None,
            target,
            environment,
            recipe,
        }
    }

    /// Whether to watch the next run for cancellation.
    fn watched(&self) -> bool {
        self.last_run.is_none_or(|took| took > WATCHED_FROM)
    }

    /// Checks indices in inputs, for which those on the device are copied.
    fn check_inputs(&self, inputs: &[Input<'_>]) -> Result<()> {
        let mut copies = Vec::new();
        for input in inputs {
            let (dtype, shape) = input.spec();
            let mut copy = Vec::new();
            if let (Input::Device(tensor), DType::I64 | DType::I32) = (input, dtype) {
                copy = vec![0; dtype.bytes_of(shape).unwrap_or(0)];
                tensor.read(&mut copy)?;
            }
            copies.push(copy);
        }
        let views: Vec<TensorView<'_>> = inputs
            .iter()
            .zip(&copies)
            .map(|(input, copy)| match *input {
                Input::Host(view) => view,
                Input::Device(tensor) => {
                    let spec = tensor.spec();
                    TensorView { dtype: spec.dtype, shape: &spec.shape, data: copy }
                }
            })
            .collect();
        self.checks.inputs(&views)
    }
}

/// Does the work of a run. The host can stop it if it is watched.
fn terminable(
    watch: bool,
    host: &dyn Host,
    terminator: &Terminator<'_>,
    work: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    if !watch {
        return work();
    }
    let (result, cancelled) = watched(host, || terminator.terminate(), work);
    result.map_err(|e| if cancelled { cancelled_error(e) } else { e })
}

fn fixed_output(spec: &TensorSpec) -> Option<OutputSpec> {
    Some(OutputSpec { dtype: spec.dtype, shape: spec.shape.iter().copied().collect::<Option<_>>()? })
}

impl Session for RunningSession {
    fn refit(
        &mut self,
        _changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let recipe = self.recipe.clone().ok_or_else(|| {
            Error::precondition("the weights of this engine are baked in and cannot be changed")
                .with_hint("build the engine without baking")
        })?;
        let session = recipe.session(weights, host);
        log::deliver(host);
        // Everything that can fail is done. Only now replace the old weights.
        let place = (self.target, self.environment);
        *self = RunningSession::new(session?, &recipe.info, &recipe.checks, place, Some(recipe.clone()));
        Ok(rebuilt(&recipe.info))
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        self.checks.inputs(inputs)?;
        let watch = self.watched();
        let run = |terminator: &Terminator<'_>, work: &mut dyn FnMut() -> Result<()>| {
            terminable(watch, host, terminator, work)
        };
        let start = Instant::now();
        let counts = self.counts.iter_mut().map(|count| &mut count[..]);
        let result = match &self.fixed {
            Some(specs) => {
                let own = specs.len() - counts.len();
                let buffers = outputs.allocate(&specs[..own])?.into_iter().chain(counts);
                let mut targets: Vec<(&OutputSpec, &mut [u8])> = specs.iter().zip(buffers).collect();
                self.session.run(inputs, &mut targets, run)
            }
            None => self.session.run_into_own(inputs, run, |specs| {
                let own = specs.len() - counts.len();
                Ok(outputs.allocate(&specs[..own])?.into_iter().chain(counts).collect())
            }),
        };
        log::deliver(host);
        result?;
        self.checks.computed(&self.counts)?;
        self.last_run = Some(start.elapsed());
        Ok(())
    }

    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        let device =
            self.target.device.ok_or_else(|| Error::unsupported("cannot keep tensors on its device"))?;
        self.check_inputs(inputs)?;
        let watch = self.watched();
        let start = Instant::now();
        let counts = &mut self.counts;
        let kept = self.session.run_on_device(
            (device, self.environment),
            inputs,
            keep,
            |terminator, work| terminable(watch, host, terminator, work),
            |specs| {
                let own = specs.len() - counts.len();
                let counts = counts.iter_mut().map(|count| &mut count[..]);
                Ok(outputs.allocate(&specs[..own])?.into_iter().chain(counts).collect())
            },
        );
        log::deliver(host);
        let kept = kept?;
        self.checks.computed(&self.counts)?;
        self.last_run = Some(start.elapsed());
        Ok(kept.into_iter().map(|tensor| Box::new(tensor) as Box<dyn DeviceTensor>).collect())
    }

    fn memory(&self) -> Result<MemoryReport> {
        // ONNX Runtime reports the size of its arena, but not the share of one session.
        Ok(MemoryReport::default())
    }
}
