//! Sessions.

use crate::{
    engine::{Recipe, cancelled_error},
    ffi::{OrtSession, Terminator},
    log,
    watch::watched,
};
use sdrun_abi::{
    EngineInfo, Error, Host, MemoryReport, OutputSink, OutputSpec, RefitReport, Result, Session, TensorSpec,
    TensorView, WeightSource,
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
    /// How to make another session; `None` if the weights are baked in.
    recipe: Option<Arc<Recipe>>,
}

impl RunningSession {
    pub(crate) fn new(
        session: OrtSession,
        info: &EngineInfo,
        checks: &Checks,
        recipe: Option<Arc<Recipe>>,
    ) -> Self {
        let counts = vec![[0; 4]; checks.outputs().count()];
        let fixed =
            info.outputs.iter().cloned().chain(checks.outputs()).map(|spec| fixed_output(&spec)).collect();
        RunningSession { session, checks: checks.clone(), counts, fixed, last_run: None, recipe }
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
        let recipe = self.recipe.clone().ok_or_else(|| {
            Error::precondition("the weights of this engine are baked in and cannot be changed")
                .with_hint("build the engine without baking")
        })?;
        let session = recipe.session(weights, host);
        log::deliver(host);
        // Everything that can fail is done. Only now replace the old weights.
        *self = RunningSession::new(session?, &recipe.info, &recipe.checks, Some(recipe.clone()));
        Ok(rebuilt(&recipe.info))
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        self.checks.inputs(inputs)?;
        let watch = self.last_run.is_none_or(|took| took > WATCHED_FROM);
        let run = |terminator: &Terminator<'_>, work: &mut dyn FnMut() -> Result<()>| {
            if !watch {
                return work();
            }
            let (result, cancelled) = watched(host, || terminator.terminate(), work);
            result.map_err(|e| if cancelled { cancelled_error(e) } else { e })
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

    fn memory(&self) -> Result<MemoryReport> {
        // ONNX Runtime reports the size of its arena, but not the share of one session.
        Ok(MemoryReport::default())
    }
}
