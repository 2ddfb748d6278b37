//! Sessions.

use crate::{
    engine::{Recipe, Target},
    ffi::OrtSession,
    log,
};
use sdrun_abi::{
    DeviceTensor, EngineInfo, Error, Host, Input, MemoryReport, OutputSink, OutputSpec, RefitReport, Result,
    Session, TensorSpec, TensorView, WeightSource,
};
use sdrun_provider_common::{baked_in, checks::Checks, rebuilt, unsupported};
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
    /// How to make another session; `None` if the weights are baked in.
    recipe: Option<Arc<Recipe>>,
}

impl RunningSession {
    pub(crate) fn new(
        session: OrtSession,
        info: &EngineInfo,
        checks: &Checks,
        target: Target,
        recipe: Option<Arc<Recipe>>,
    ) -> Self {
        let fixed = checks.with_outputs(&info.outputs).iter().map(fixed_output).collect();
        let (checks, counts) = (checks.clone(), checks.counts());
        RunningSession { session, checks, counts, fixed, last_run: None, target, recipe }
    }

    /// The host, if it should watch the next run to cancel it.
    fn watching<'h>(&self, host: &'h dyn Host) -> Option<&'h dyn Host> {
        self.last_run.is_none_or(|took| took > WATCHED_FROM).then_some(host)
    }
}

/// The buffers of the host for the outputs of the model, then those of the checks, for outputs of these types and shapes.
fn buffers<'b>(
    specs: &[OutputSpec],
    outputs: &'b mut dyn OutputSink,
    counts: &'b mut [[u8; 4]],
) -> Result<Vec<&'b mut [u8]>> {
    let own = specs.len() - counts.len();
    let counts = counts.iter_mut().map(|count| &mut count[..]);
    Ok(outputs.allocate(&specs[..own])?.into_iter().chain(counts).collect())
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
        let recipe = self.recipe.clone().ok_or_else(baked_in)?;
        let session = recipe.session(weights, host);
        log::deliver(host);
        // Everything that can fail is done. Only now replace the old weights.
        *self =
            RunningSession::new(session?, &recipe.info, &recipe.checks, self.target, Some(recipe.clone()));
        Ok(rebuilt(&recipe.info))
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        self.checks.inputs(inputs)?;
        let watching = self.watching(host);
        let start = Instant::now();
        let counts = &mut self.counts;
        let result = match &self.fixed {
            Some(specs) => {
                let buffers = buffers(specs, outputs, counts)?;
                let mut targets: Vec<(&OutputSpec, &mut [u8])> = specs.iter().zip(buffers).collect();
                self.session.run(inputs, &mut targets, watching)
            }
            None => self.session.run_into_own(inputs, watching, |specs| buffers(specs, outputs, counts)),
        };
        log::deliver(host);
        result.map_err(unsupported)?;
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
        self.checks.inputs_anywhere(inputs)?;
        let watching = self.watching(host);
        let start = Instant::now();
        let counts = &mut self.counts;
        let kept =
            self.session.run_on_device((device, self.target.environment), inputs, keep, watching, |specs| {
                buffers(specs, outputs, counts)
            });
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
