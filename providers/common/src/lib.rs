//! Code shared by the providers of vendor runtimes.
//!
//! * [`locate`], [`check_image`], [`open`]: go from the folder that a host names to a loaded library. Every failure is
//!   an ordinary error, and no vendor code runs before [`open`]. [`Loaded`] keeps the runtime for the lifetime of the
//!   process.
//! * [`read_graph`], [`describe`]: the model that a host passes, and its [`EngineInfo`](sdrun_abi::EngineInfo).
//! * [`weight`], [`WeightFiles`]: one weight from a source, checked against the graph's declaration, and the file that
//!   holds it. [`converted`] converts it to another type. [`rebuilt`] reports a refit that loaded all weights again.
//!   [`Preparation`] computes the tensors that an engine reads in place of weights.
//! * [`checks`]: checks indices and other values for runtimes that do not. [`refused`]: refuses nodes that a runtime gets wrong;
//!   [`nodes`] helps to rewrite them. [`openvino`]: workarounds for OpenVINO's wrong results, for both providers that run it.
//! * [`payload`]: an engine as bytes. [`demand`] refuses one that cannot be used here, [`baked_in`] a refit of one with weights.
//! * [`refuse_options`], [`phase`], [`failure`], [`unsupported`], [`IO_DTYPES`]: small helpers that every provider needs.

pub mod checks;
mod describe;
mod image;
mod load;
mod loaded;
mod locate;
pub mod nodes;
pub mod openvino;
pub mod payload;
mod preparation;
pub mod refused;
mod weights;

pub use describe::{describe, graph_error, read_graph};
pub use image::check_image;
pub use load::open;
pub use loaded::Loaded;
pub use locate::{extension_spec, locate, runtime_spec};
pub use preparation::Preparation;
pub use weights::{WeightFiles, converted, rebuilt, weight};

use sdrun_abi::{Compatibility, DType, Error, ErrorCode, Flow, Hint, Host, Result};
use std::collections::BTreeMap;

/// The error of a runtime that says what went wrong only in words. If the words are about memory, its code and hint are too.
pub fn failure(code: ErrorCode, message: String) -> Error {
    const WORDS: [&str; 4] = ["bad_alloc", "ut of memory", "Failed to allocate", "Cannot allocate memory"];
    match WORDS.iter().any(|words| message.contains(words)) {
        true => Error::new(ErrorCode::ResourceExhausted, message).with_hint(Hint::FreeMemory { bytes: None }),
        false => Error::new(code, message),
    }
}

/// Turns a general failure of a runtime into `Unimplemented`: the host has already read and checked graph and inputs, so they are valid and
/// the runtime does not support them.
pub fn unsupported(mut error: Error) -> Error {
    if error.code == ErrorCode::Internal {
        (error.code, error.hint) = (ErrorCode::Unimplemented, Some(Hint::UseProvider(None)));
    }
    error
}

/// Input and output types of a runtime that supports all types but f8.
pub const IO_DTYPES: [DType; 13] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F64,
    DType::I8,
    DType::U8,
    DType::I16,
    DType::U16,
    DType::I32,
    DType::U32,
    DType::I64,
    DType::U64,
    DType::Bool,
];

/// Refuses options given to a provider that has none.
pub fn refuse_options(provider: &str, options: &BTreeMap<String, String>) -> Result<()> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => Err(Error::invalid(format!("{provider} has no option `{key}`"))
            .with_hint(format!("{provider} takes no options; leave it out"))),
    }
}

/// Refuses a stored engine that cannot be used here, as a provider's check judges it.
///
/// # Errors
/// `FailedPrecondition` with the reason.
pub fn demand(verdict: Compatibility) -> Result<()> {
    match verdict {
        Compatibility::Unsupported(why) => {
            Err(Error::precondition(format!("the engine cannot be used here: {why}"))
                .with_hint("build it again"))
        }
        Compatibility::Optimal | Compatibility::PreferRecompile(_) => Ok(()),
    }
}

/// The error of a refit of an engine that holds its weights.
pub fn baked_in() -> Error {
    Error::precondition("the weights of this engine are baked in and cannot be changed")
        .with_hint("build the engine without baking")
}

/// Reports a phase to the host; `Cancelled` if the host wants to stop.
pub fn phase(host: &dyn Host, name: &str, step: u64, total: u64) -> Result<()> {
    match host.progress(name, step, total) {
        Flow::Continue => Ok(()),
        Flow::Cancel => Err(Error::new(ErrorCode::Cancelled, format!("cancelled in phase `{name}`"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_option_is_named() {
        assert!(refuse_options("openvino", &BTreeMap::new()).is_ok());
        let options = BTreeMap::from([("speed".to_string(), "11".to_string())]);
        let error = refuse_options("openvino", &options).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.contains("openvino") && error.message.contains("`speed`"), "{error}");
    }

    #[test]
    fn a_cancelled_phase_is_named() {
        struct Stop;
        impl Host for Stop {
            fn log(&self, _: sdrun_abi::LogLevel, _: &str, _: &str) {}
            fn progress(&self, phase: &str, _: u64, _: u64) -> Flow {
                if phase == "compile" { Flow::Cancel } else { Flow::Continue }
            }
            fn cancelled(&self) -> bool {
                false
            }
        }
        assert!(phase(&Stop, "read", 0, 1).is_ok());
        let error = phase(&Stop, "compile", 0, 1).unwrap_err();
        assert_eq!(error.code, ErrorCode::Cancelled);
        assert!(error.message.contains("compile"));
    }
}
