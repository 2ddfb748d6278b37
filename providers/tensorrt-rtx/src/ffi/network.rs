//! Compiles an ONNX model into a plan.

use super::{HostMemory, Library, c_name, log, raw, text};
use crate::faults::{self, Fault};
use sdrun_abi::{Error, ErrorCode, Flow, Host, LogLevel, Result};
use std::{
    ffi::{CString, c_char, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::null,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// The input of a build.
pub(crate) struct Request<'a> {
    /// An ONNX model; the values of external initializers come from `weights`.
    pub(crate) model: &'a [u8],
    /// `nvinfer1::ComputeCapability`; 0 selects the library's portable set.
    pub(crate) capability: i32,
    /// Whether the plan omits its refittable weights.
    pub(crate) strip: bool,
    /// Whether products of f32 matrices may be rounded to TF32.
    pub(crate) tf32: bool,
    /// Whether weights can be streamed from the host while the plan runs.
    pub(crate) streaming: bool,
    /// Bytes of every external initializer, by name.
    pub(crate) weights: &'a [(&'a str, &'a [u8])],
    /// Ranges of the inputs with open dimensions.
    pub(crate) inputs: &'a [Range<'a>],
    /// Decides which weights are refittable.
    pub(crate) refittable: &'a (dyn Fn(&Record) -> bool + Sync),
}

/// Smallest, usual and largest shape of an input.
pub(crate) struct Range<'a> {
    pub(crate) name: &'a str,
    pub(crate) min: &'a [i64],
    pub(crate) opt: &'a [i64],
    pub(crate) max: &'a [i64],
}

/// One weight of the parsed network: `nvonnxparser::RefitRecord`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    /// The weight's name in the plan.
    pub(crate) name: String,
    /// `RefitTransformKind`.
    pub(crate) kind: i32,
    /// ONNX element type of the sources.
    pub(crate) onnx_type: i32,
    /// `nvinfer1::DataType` of the weight.
    pub(crate) data_type: i32,
    /// Number of elements.
    pub(crate) count: u64,
    /// The initializers it is computed from.
    pub(crate) sources: Vec<String>,
    /// The epsilon of a folded batch normalization.
    pub(crate) epsilon: f32,
}

/// The state that a build's callbacks share.
struct Context<'a> {
    refittable: &'a (dyn Fn(&Record) -> bool + Sync),
    host: &'a dyn Host,
    records: &'a mut Vec<Record>,
    faults: Vec<Fault>,
    phases: Mutex<Vec<(String, u64)>>,
    cancelled: AtomicBool,
}

/// Parses a model and compiles it into a plan. Blocks for seconds to minutes. `records` receives the weights the parser
/// reports, before the long part starts.
///
/// Errors: `Cancelled`; `Unimplemented` if TensorRT lacks an operator or this form of it; `InvalidArgument` for a model
/// that contradicts itself; `Internal` otherwise.
pub(crate) fn build(
    library: &Library,
    request: &Request<'_>,
    records: &mut Vec<Record>,
    host: &dyn Host,
) -> Result<HostMemory> {
    let names: Vec<CString> = request.weights.iter().map(|(name, _)| c_name(name)).collect::<Result<_>>()?;
    let weights: Vec<raw::SdWeight> = names
        .iter()
        .zip(request.weights)
        .map(|(name, (_, bytes))| raw::SdWeight {
            name: name.as_ptr(),
            data: bytes.as_ptr().cast(),
            size: bytes.len(),
        })
        .collect();
    let input_names: Vec<CString> = request.inputs.iter().map(|i| c_name(i.name)).collect::<Result<_>>()?;
    let inputs: Vec<raw::SdInput> = input_names
        .iter()
        .zip(request.inputs)
        .map(|(name, range)| {
            debug_assert!(range.min.len() == range.opt.len() && range.opt.len() == range.max.len());
            raw::SdInput {
                name: name.as_ptr(),
                rank: range.opt.len() as i32,
                min: range.min.as_ptr(),
                opt: range.opt.as_ptr(),
                max: range.max.as_ptr(),
            }
        })
        .collect();
    let mut context = Context {
        refittable: request.refittable,
        host,
        records,
        faults: Vec::new(),
        phases: Default::default(),
        cancelled: false.into(),
    };
    // Builds run one at a time: the compiler keeps its target in process-wide state, so concurrent builds for two
    // targets mix them up ("Target SM 80 is not found in the accelerator list", seen with 1.7.1).
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut build = raw::SdBuild {
        create_builder: library.symbol("createInferBuilder_INTERNAL")?,
        create_parser: library.create_parser()?,
        logger: library.logger,
        model: request.model.as_ptr().cast(),
        model_size: request.model.len(),
        capability: request.capability,
        strip: request.strip.into(),
        tf32: request.tf32.into(),
        streaming: request.streaming.into(),
        weights: weights.as_ptr(),
        weight_count: weights.len(),
        inputs: if inputs.is_empty() { null() } else { inputs.as_ptr() },
        input_count: inputs.len(),
        context: (&raw mut context).cast(),
        record,
        fault,
        progress,
        subject: [0; 256],
        stage: 0,
    };
    log::deliver(host);
    // SAFETY: every pointer in `build` stays valid until the call ends. The callbacks receive `context` and contain
    // panics, and those that write to it run on this thread only.
    let plan = unsafe { raw::sd_build(&mut build) };
    // The library logs several lines for each node it rejects; the error lists all of these nodes.
    let logged = match context.faults.is_empty() {
        true => log::deliver(host),
        false => log::deliver_as(Some(LogLevel::Debug), host),
    };
    if context.cancelled.into_inner() {
        if !plan.is_null() {
            drop(HostMemory(plan));
        }
        return Err(Error::new(ErrorCode::Cancelled, "the build was cancelled"));
    }
    if !plan.is_null() {
        return Ok(HostMemory(plan));
    }
    // SAFETY: the shim wrote a 0 at the end.
    let subject = unsafe { text(build.subject.as_ptr()) };
    faults::complete(&mut context.faults, logged.as_deref());
    for fault in &context.faults {
        host.log(LogLevel::Info, "tensorrt-rtx", &fault.line());
    }
    Err(failure(build.stage, &subject, &context.faults, logged))
}

/// Makes one error from the messages of the parser and the library.
fn failure(stage: i32, subject: &str, faults: &[Fault], logged: Option<String>) -> Error {
    use raw::stage::*;
    let logged = logged.map(|line| shorten(&line));
    let first = faults.first().map(|fault| fault.words.clone());
    let words = first.or(logged.clone()).unwrap_or_else(|| "no reason is given".into());
    let error = match stage {
        TARGET => Error::unsupported(format!("TensorRT-RTX cannot build for this target: {words}"))
            .with_hint("`sdrun devices -p tensorrt-rtx` lists the targets"),
        LOAD | PARSE => faults::refusal(faults, logged.as_deref()),
        WEIGHT => Error::internal(format!("TensorRT-RTX rejects the weight `{subject}`: {words}")),
        MARK => Error::unsupported(format!("TensorRT-RTX cannot leave the weight `{subject}` open: {words}")),
        PROFILE => {
            Error::invalid(format!("TensorRT-RTX rejects the range of shapes of input `{subject}`: {words}"))
        }
        BUILDER => Error::internal(format!("TensorRT-RTX cannot start the build: {words}")),
        _ if words.contains("graph_jit") => Error::unsupported(
            "TensorRT-RTX needs a CUDA driver to leave the weights of this model out of the engine"
                .to_string(),
        )
        .with_hint("build with `--bake`, or on a machine with an NVIDIA GPU"),
        _ if words.contains("optimization profile") => Error::invalid(
            "the model has inputs with open dimensions, but no range of sizes is given".to_string(),
        )
        .with_hint(
            "give `--shape`, or a range as in `--option shape.sample=1x4x32x32:1x4x64x64:2x4x128x128`",
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

unsafe extern "C" fn record(context: *mut c_void, record: *const raw::SdRecord) -> i32 {
    let take = || {
        // SAFETY: `build` passes its context and waits; only this thread writes to it. The record and the data it
        // points to live during the call (NvOnnxParser.h, RefitRecord).
        let (context, found) = unsafe { (&mut *context.cast::<Context<'_>>(), &*record) };
        let sources = (0..found.source_count.max(0) as usize)
            // SAFETY: there are `source_count` pointers to strings.
            .map(|i| unsafe { text(*found.sources.add(i)) })
            .collect();
        let record = Record {
            // SAFETY: the string is 0-terminated.
            name: unsafe { text(found.name) },
            kind: found.kind,
            onnx_type: found.onnx_type,
            data_type: found.type_,
            count: found.count.max(0) as u64,
            sources,
            epsilon: found.epsilon,
        };
        let mark = (context.refittable)(&record);
        context.records.push(record);
        i32::from(mark)
    };
    catch_unwind(AssertUnwindSafe(take)).unwrap_or(0)
}

unsafe extern "C" fn fault(context: *mut c_void, fault: *const raw::SdFault) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as in `record`.
        let (context, fault) = unsafe { (&mut *context.cast::<Context<'_>>(), &*fault) };
        // SAFETY: each pointer is null or a 0-terminated string.
        let (op, node, words) = unsafe { (text(fault.op), text(fault.node), shorten(&text(fault.text))) };
        context.faults.push(Fault { code: fault.code, op, node, words });
    }));
}

unsafe extern "C" fn progress(
    context: *mut c_void,
    phase: *const c_char,
    parent: *const c_char,
    step: i32,
    total: i32,
) -> i32 {
    let tell = || {
        // SAFETY: `build` passes its context and waits. The library's threads call this; all they use is shared (`Host`
        // is `Sync`) or locked.
        let (host, phases, cancelled) = unsafe {
            let context = context.cast::<Context<'_>>();
            ((*context).host, &(*context).phases, &(*context).cancelled)
        };
        // SAFETY: the strings are 0-terminated; `parent` may be null.
        let (phase, parent) = unsafe { (text(phase), text(parent)) };
        let mut phases = phases.lock().unwrap_or_else(PoisonError::into_inner);
        if total > 0 {
            phases.push((phase.clone(), total as u64));
        }
        let steps = phases.iter().rfind(|(name, _)| *name == phase).map_or(0, |(_, steps)| *steps);
        if step < 0 {
            phases.retain(|(name, _)| *name != phase);
        }
        drop(phases);
        let _ = parent;
        let step = if step < 0 { steps } else { step as u64 };
        let flow = host.progress(&phase, step.min(steps), steps);
        let stop = flow == Flow::Cancel || cancelled.load(Relaxed);
        cancelled.fetch_or(stop, Relaxed);
        i32::from(!stop)
    };
    catch_unwind(AssertUnwindSafe(tell)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
