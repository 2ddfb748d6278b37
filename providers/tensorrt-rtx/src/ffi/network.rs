//! Compiles an ONNX model into a plan.

use super::{
    HostMemory, Library,
    bridge::{self, Stage},
    log, thrown,
};
use crate::faults::{self, Fault};
use sdrun_abi::{Error, ErrorCode, Flow, Hint, Host, LogLevel, Result};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

pub(crate) use bridge::ffi::{Range, Record, Request, WeightBytes};

/// Receives the parser's findings. The parser calls it on the build's thread.
pub(super) struct Findings<'a> {
    refittable: &'a dyn Fn(&Record) -> bool,
    records: &'a mut Vec<Record>,
    faults: Vec<Fault>,
}

/// Reports progress to the host. The library calls it from its own threads.
pub(super) struct Watch<'a> {
    host: &'a dyn Host,
    /// Phases in progress, with their number of steps.
    phases: Mutex<Vec<(String, u64)>>,
    cancelled: AtomicBool,
}

const fn is_shared_by_threads<T: Sync>() {}
const _: () = is_shared_by_threads::<Watch<'_>>();

/// Parses a model and compiles it into a plan. Blocks for seconds to minutes. `refittable` decides which weights can be
/// refitted. `records` receives the weights that the parser reports, before the long part starts.
///
/// Errors: `Cancelled`; `Unimplemented` if TensorRT lacks an operator or this form of it; `InvalidArgument` for a range of
/// shapes that does not match; `Internal` otherwise.
pub(crate) fn build(
    library: &Library,
    request: &Request<'_>,
    refittable: &dyn Fn(&Record) -> bool,
    records: &mut Vec<Record>,
    host: &dyn Host,
) -> Result<HostMemory> {
    // Builds run one at a time: the compiler keeps its target in process-wide state, so concurrent builds for two
    // targets mix them up ("Target SM 80 is not found in the accelerator list", seen with 1.7.1).
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut findings = Findings { refittable, records, faults: Vec::new() };
    let watch = Watch { host, phases: Mutex::default(), cancelled: false.into() };
    let create_builder = library.symbol("createInferBuilder_INTERNAL")?;
    let create_parser = library.create_parser()?;
    log::deliver(host);
    // SAFETY: the addresses are those of the entry points.
    let built = unsafe {
        bridge::build(create_builder, create_parser, &library.logger, request, &mut findings, &watch)
    };
    // The library logs several lines for each node it rejects; the error lists all of these nodes.
    let logged = match findings.faults.is_empty() {
        true => log::deliver(host),
        false => log::deliver_as(Some(LogLevel::Debug), host),
    };
    if watch.cancelled.into_inner() {
        return Err(Error::new(ErrorCode::Cancelled, "the build was cancelled"));
    }
    let built = built.map_err(thrown)?;
    if let Some(plan) = HostMemory::of(built.plan) {
        return Ok(plan);
    }
    faults::complete(&mut findings.faults, logged.as_deref());
    for fault in &findings.faults {
        host.log(LogLevel::Info, "tensorrt-rtx", &fault.line());
    }
    Err(failure(built.stage, &built.subject, &findings.faults, logged))
}

/// Makes one error from the messages of the parser and the library.
fn failure(stage: Stage, subject: &str, faults: &[Fault], logged: Option<String>) -> Error {
    let logged = logged.map(|line| shorten(&line));
    let first = faults.first().map(|fault| fault.words.clone());
    let words = first.or(logged.clone()).unwrap_or_else(|| "no reason is given".into());
    let error = match stage {
        Stage::Target => Error::unsupported(format!("TensorRT-RTX cannot build for this target: {words}"))
            .with_hint(Hint::UseDevice(Vec::new())),
        Stage::Load | Stage::Parse => faults::refusal(faults, logged.as_deref()),
        Stage::Weight => Error::internal(format!("TensorRT-RTX rejects the weight `{subject}`: {words}")),
        Stage::Mark => {
            Error::unsupported(format!("TensorRT-RTX cannot leave the weight `{subject}` open: {words}"))
        }
        Stage::Profile => {
            Error::invalid(format!("TensorRT-RTX rejects the range of shapes of input `{subject}`: {words}"))
        }
        Stage::Builder => Error::internal(format!("TensorRT-RTX cannot start the build: {words}")),
        _ if words.contains("graph_jit") => Error::unsupported(
            "TensorRT-RTX needs a CUDA driver to leave the weights of this model out of the engine"
                .to_string(),
        )
        .with_hint(Hint::AnyOf(vec![Hint::Bake, "build it on a machine with an NVIDIA GPU".into()])),
        _ if words.contains("optimization profile") => Error::invalid(
            "the model has inputs with open dimensions, but no range of sizes is given".to_string(),
        )
        .with_hint(
            Hint::GiveShape { input: None }
                .with_note("one shape, or the least, the usual and the greatest of each input"),
        ),
        _ => Error::unsupported(format!("TensorRT-RTX cannot compile the model: {words}")),
    };
    match logged {
        Some(line) if line != words => error.with_native(line),
        _ => error,
    }
}

/// Cleans a message of the library: removes source files, internal error codes, and the complaint about a missing CUDA
/// driver that follows every error on a machine without one.
fn shorten(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.contains("checkMacros.cpp")).map(|line| {
        let line = line.find(" at /_src").map_or(line, |end| {
            let line = &line[..end];
            // "In FUNCTION at FILE:LINE)"
            line.rfind("In ").map_or(line, |at| &line[..at])
        });
        let line = line
            .rsplit_once("Error Code ")
            .map_or(line, |(_, rest)| rest.split_once(": ").map_or(rest, |(_, words)| words));
        let line = line.trim().trim_start_matches("API Usage Error (").trim_start_matches("Internal Error (");
        line.trim_end_matches(['.', ' ', ')']).to_string()
    });
    let words: Vec<String> = lines.filter(|line| !line.is_empty()).collect();
    words.join(": ").chars().take(600).collect()
}

// A panic must not reach the vendor's code, and cxx would end the process.
fn contained<T>(callback: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(callback)).ok()
}

impl Findings<'_> {
    /// Receives a weight that the parser reports; true makes it refittable.
    pub(super) fn record(&mut self, record: Record) -> bool {
        contained(|| {
            let refittable = (self.refittable)(&record);
            self.records.push(record);
            refittable
        })
        .unwrap_or(false)
    }

    /// Receives an error of the parser. Operator and node may be empty.
    pub(super) fn fault(&mut self, code: i32, op: String, node: String, text: String) {
        contained(|| self.faults.push(Fault { code, op, node, words: shorten(&text) }));
    }
}

impl Watch<'_> {
    /// Receives the progress of a phase. `total` is 0 after the first step; `step` is negative at the end. Returning false
    /// stops the build.
    pub(super) fn progress(&self, phase: String, step: i32, total: i32) -> bool {
        let tell = || {
            let mut phases = self.phases.lock().unwrap_or_else(PoisonError::into_inner);
            if total > 0 {
                phases.push((phase.clone(), total as u64));
            }
            let steps = phases.iter().rfind(|(name, _)| *name == phase).map_or(0, |(_, steps)| *steps);
            if step < 0 {
                phases.retain(|(name, _)| *name != phase);
            }
            drop(phases);
            let step = if step < 0 { steps } else { step as u64 };
            let flow = self.host.progress(&phase, step.min(steps), steps);
            self.cancelled.fetch_or(flow == Flow::Cancel, Relaxed);
            !self.cancelled.load(Relaxed)
        };
        contained(tell).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_the_parser_rejects_is_unsupported() {
        for stage in [Stage::Load, Stage::Parse, Stage::Mark, Stage::Compile, Stage::Target] {
            let fault =
                Fault { code: 8, op: "Foo".into(), node: "q".into(), words: "node `q`: false".into() };
            let error = failure(stage, "", &[fault], None);
            assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
            assert!(error.message.contains("`q`"), "{error}");
        }
    }

    #[test]
    fn the_librarys_words_are_shortened() {
        let text = "Invalid Node - node_of_y\nINetworkDefinition::setWeightsName: Error Code 3: API Usage Error \
                    (Parameter check failed, condition: a == b. Weights differ. In setWeightsName at \
                    /_src/optimizer/api/network.cpp:4384)\n[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda \
                    Runtime (In catchCudaError at /_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: x))";
        let expected = "Invalid Node - node_of_y: Parameter check failed, condition: a == b. Weights differ";
        assert_eq!(shorten(text), expected);
        assert_eq!(shorten("plain words"), "plain words");
    }
}
