//! The ONNX backend node tests (`onnx.backend.test` of the PyPI package `onnx`) against a provider.
//!
//! A test is a folder with `model.onnx` and data sets of inputs and expected outputs, each a serialized `TensorProto`. The runner
//! opens its model, binds it to the shapes of the inputs, builds it, runs it and compares outputs, as any host would. The
//! provider runs in a worker, so a crash fails one test and not the runner.

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

/// Time limit for each call into the provider.
const LIMIT: Duration = Duration::from_secs(60);

/// Why a test did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Where it failed and how, as `STAGE/KIND` (see [`Snapshot`]). This part of a failure must stay the same.
    pub class: String,
    /// One short line that is the same in every run.
    pub reason: String,
    /// The whole message, with numbers.
    pub detail: String,
}

/// How far a test got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The test itself: its data, and what this runner supports.
    Test,
    /// `Model::open`.
    Open,
    /// `Provider::build`.
    Build,
    /// `Engine::session`.
    Session,
    /// `Session::run`.
    Run,
    /// The outputs differ from the expected ones.
    Outputs,
}

impl Failure {
    fn new(stage: Stage, kind: &str, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Failure {
            class: format!("{}/{kind}", format!("{stage:?}").to_lowercase()),
            reason: snapshot::shorten(&detail),
            detail,
        }
    }

    /// The failure for `error`. Its kind is the error's code; a dead worker is a `crash`.
    fn of(stage: Stage, error: &sdrun::Error) -> Self {
        let kind = match error.code() {
            ErrorCode::Unavailable => "crash".to_string(),
            ErrorCode::DeadlineExceeded => "timeout".to_string(),
            code => kebab(&format!("{code:?}")),
        };
        Failure::new(stage, &kind, error.to_string())
    }

    /// The failure at the same stage with another kind.
    fn kind(mut self, kind: &str) -> Self {
        if let Some((stage, _)) = self.class.split_once('/') {
            self.class = format!("{stage}/{kind}");
        }
        self
    }

    /// Marks the failure as a crash, because the provider no longer responds after the call.
    fn crashed(self) -> Self {
        if self.class.ends_with("/timeout") { self } else { self.kind("crash") }
    }
}

/// `InvalidArgument` as `invalid-argument`.
fn kebab(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push('-');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

/// Results by test name; `Ok` means passed.
pub type Outcomes = BTreeMap<String, Result<(), Failure>>;

/// What the tests run on.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// Where the provider is.
    pub registry: &'a Registry,
    /// Its id.
    pub id: &'a str,
    /// One of its devices; `None` is the first.
    pub device: Option<&'a str>,
    /// Whether engines contain their weights, and are saved and loaded again before they run.
    pub baked: bool,
}

/// Runs `cases`, `jobs` at a time. Each job has its own worker.
pub fn run(target: Target<'_>, cases: &[Case], jobs: usize) -> sdrun::Result<Outcomes> {
    // Report a general fault of the provider once, not for every test.
    drop(open(target)?);
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Outcomes::new()));
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                let mut opened = None;
                while let Some(case) = cases.get(next.fetch_add(1, Relaxed)) {
                    let outcome = run_one(target, case, &mut opened);
                    outcomes.lock().unwrap_or_else(|e| e.into_inner()).insert(case.name.clone(), outcome);
                }
            });
        }
    });
    Ok(outcomes.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// Runs one test in the open worker, or a new one. A worker that stops responding is not used again.
fn run_one(target: Target<'_>, case: &Case, opened: &mut Option<(Provider, Device)>) -> Result<(), Failure> {
    let (provider, device) = match opened {
        Some(opened) => opened,
        None => opened.insert(open(target).map_err(|e| Failure::of(Stage::Test, &e))?),
    };
    let failure = match case.run(provider, device, target.baked) {
        Ok(()) => return Ok(()),
        Err(failure) => failure,
    };
    // A plugin that panicked refuses every later call, and a dead worker cannot respond.
    let dead = provider.devices().is_err();
    // A provider that must be isolated may have damaged its memory and still respond.
    if dead || provider.manifest().isolate {
        *opened = None;
    }
    Err(if dead { failure.crashed() } else { failure })
}

/// Why nothing can run on the device, if its hardware is not in this machine.
pub fn absent(target: Target<'_>) -> sdrun::Result<Option<String>> {
    Ok(open(target)?.1.absent)
}

fn open(Target { registry, id, device, .. }: Target<'_>) -> sdrun::Result<(Provider, Device)> {
    let limits = Limits {
        init: Some(LIMIT),
        build: Some(LIMIT),
        session: Some(LIMIT),
        run: Some(LIMIT),
        cancel: Some(Duration::from_secs(2)),
    };
    let provider = registry.open(id, &Isolation::worker(limits))?;
    let device = provider.device(device)?;
    Ok((provider, device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::Error;

    #[test]
    fn classes_say_where_and_how() {
        let class = |code| {
            let error = sdrun::Error::Provider { provider: "p".into(), error: Error::new(code, "x") };
            Failure::of(Stage::Build, &error)
        };
        assert_eq!(class(ErrorCode::InvalidArgument).class, "build/invalid-argument");
        assert_eq!(class(ErrorCode::Unavailable).class, "build/crash");
        assert_eq!(class(ErrorCode::Internal).crashed().class, "build/crash");
        assert_eq!(class(ErrorCode::DeadlineExceeded).crashed().class, "build/timeout");
        assert_eq!(Failure::new(Stage::Outputs, "wrong-values", "x").class, "outputs/wrong-values");
    }
}
