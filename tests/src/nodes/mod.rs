//! The ONNX backend node tests (`onnx.backend.test` of the PyPI package `onnx`) against a provider.
//!
//! A test is a folder with `model.onnx` and data sets of inputs and expected outputs, each a serialized
//! `TensorProto`. Its model is opened, bound to the shapes of the inputs, built, run and compared the way any
//! host would. The provider lives in a worker, so that a crash fails one test and not the runner.

mod case;
mod compare;
mod snapshot;

pub use case::{Case, find};
pub use compare::same;
pub use snapshot::{Report, Snapshot};

use sdrun::{Isolation, Provider, Registry, worker::Limits};
use sdrun_abi::{Device, ErrorCode};
use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

/// Longest that any call into the provider may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Why a test did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Short and the same in every run: what stands in the snapshot.
    pub reason: String,
    /// With numbers, for whoever looks into it.
    pub detail: String,
    /// Whether the provider's process died or had to be killed.
    pub crashed: bool,
}

impl Failure {
    fn new(reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Failure { detail: reason.clone(), reason, crashed: false }
    }

    fn of(error: &sdrun::Error) -> Self {
        let detail = error.to_string();
        let crashed = matches!(error.code(), ErrorCode::Unavailable | ErrorCode::DeadlineExceeded);
        Failure { reason: snapshot::shorten(&detail), detail, crashed }
    }
}

/// Results by test name; `Ok` is passed.
pub type Outcomes = BTreeMap<String, Result<(), Failure>>;

/// Runs `cases` on provider `id`, `jobs` at a time, each job with a worker of its own.
pub fn run(registry: &Registry, id: &str, cases: &[Case], jobs: usize) -> sdrun::Result<Outcomes> {
    // Anything wrong with the provider as such is told once, not for every test.
    drop(open(registry, id)?);
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Outcomes::new()));
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                let mut opened = None;
                while let Some(case) = cases.get(next.fetch_add(1, Relaxed)) {
                    let outcome = run_one(registry, id, case, &mut opened);
                    outcomes.lock().unwrap_or_else(|e| e.into_inner()).insert(case.name.clone(), outcome);
                }
            });
        }
    });
    Ok(outcomes.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// Runs one test in the worker that is there, or a new one; a worker that got into trouble is not used again.
fn run_one(
    registry: &Registry,
    id: &str,
    case: &Case,
    opened: &mut Option<(Provider, Device)>,
) -> Result<(), Failure> {
    let (provider, device) = match opened {
        Some(opened) => opened,
        None => opened.insert(open(registry, id).map_err(|e| Failure::of(&e))?),
    };
    let outcome = case.run(provider, device);
    // A provider that answers after a failure is as good as new; one that panicked or died does not answer. One that has to be
    // isolated may have damaged its memory and answer all the same.
    if outcome.is_err() && (provider.manifest().isolate || provider.devices().is_err()) {
        *opened = None;
    }
    outcome
}

/// Why nothing can be run on the provider's first device: its hardware is not in this machine.
pub fn absent(registry: &Registry, id: &str) -> sdrun::Result<Option<String>> {
    Ok(open(registry, id)?.1.absent)
}

fn open(registry: &Registry, id: &str) -> sdrun::Result<(Provider, Device)> {
    let limits = Limits {
        init: Some(LIMIT),
        build: Some(LIMIT),
        session: Some(LIMIT),
        run: Some(LIMIT),
        cancel: Some(Duration::from_secs(2)),
    };
    let provider = registry.open(id, &Isolation::worker(limits))?;
    let device = provider.device(None)?;
    Ok((provider, device))
}
