//! Sessions.

use crate::{
    engine::{Recipe, cancelled_error},
    ffi::{OrtSession, Terminator},
    log,
    watch::watched,
};
use sdrun_abi::{
    Host, MemoryReport, OutputSink, OutputSpec, RefitReport, Result, Session, TensorSpec, TensorView,
    WeightSource,
};
use sdrun_provider_common::rebuilt;
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
    /// The outputs for the recipe's checks, after those of the model.
    counts: Vec<[u8; 4]>,
    /// Types and shapes of the outputs if all shapes are fixed. Then ONNX Runtime writes directly into the sink's
    /// buffers.
    fixed: Option<Vec<OutputSpec>>,
    /// Duration of the last run; `None` before the first.
    last_run: Option<Duration>,
    recipe: Arc<Recipe>,
}

impl RunningSession {
    pub(crate) fn new(session: OrtSession, recipe: Arc<Recipe>) -> Self {
        let all = recipe.all_outputs();
        let counts = vec![[0; 4]; all.len() - recipe.info.outputs.len()];
        let fixed = all.iter().map(fixed_output).collect();
        RunningSession { session, counts, fixed, last_run: None, recipe }
    }
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
        let session = self.recipe.session(weights, host);
        log::deliver(host);
        // Everything that can fail is done. Only now replace the old weights.
        *self = RunningSession::new(session?, self.recipe.clone());
        Ok(rebuilt(&self.recipe.info))
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        self.recipe.checks.inputs(inputs)?;
        let watch = self.last_run.is_none_or(|took| took > WATCHED_FROM);
        let run = |terminator: &Terminator<'_>, work: &mut dyn FnMut() -> Result<()>| {
            if !watch {
                return work();
            }
            let (result, cancelled) = watched(host, || terminator.terminate(), work);
            result.map_err(|e| if cancelled { cancelled_error(e) } else { e })
        };
        let start = Instant::now();
        let own = self.recipe.info.outputs.len();
        let counts = self.counts.iter_mut().map(|count| &mut count[..]);
        let result = match &self.fixed {
            Some(specs) => {
                let buffers = outputs.allocate(&specs[..own])?.into_iter().chain(counts);
                let mut targets: Vec<(&OutputSpec, &mut [u8])> = specs.iter().zip(buffers).collect();
                self.session.run(inputs, &mut targets, run)
            }
            None => self.session.run_into_own(inputs, run, |specs| {
                Ok(outputs.allocate(&specs[..own])?.into_iter().chain(counts).collect())
            }),
        };
        log::deliver(host);
        result?;
        self.recipe.checks.computed(&self.counts)?;
        self.last_run = Some(start.elapsed());
        Ok(())
    }

    fn memory(&self) -> Result<MemoryReport> {
        // ONNX Runtime reports the size of its arena, but not the share of one session.
        Ok(MemoryReport::default())
    }
}
