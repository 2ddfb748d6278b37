//! Exit codes and error output.

use crate::{context::Context, format};
use sdrun::abi::{self, ErrorCode, Hint, Precision};
use sdrun_diffusion::{
    family::{Family, Vocabulary},
    pipeline,
};
use serde::Serialize;
use std::{
    io::{self, Write},
    process::ExitCode,
};

/// Exit code of a failed comparison, check or measurement.
pub(crate) const NO: u8 = 1;
const USAGE: u8 = 2;
/// Exit code when a time limit expired.
pub(crate) const EXPIRED: u8 = 9;
/// Exit code when a provider's process died.
const DIED: u8 = 11;
const INTERNAL: u8 = 70;
pub(crate) const CANCELLED: u8 = 130;

/// The exit code of a kind of error, as documented in the help of `sdrun`.
fn code_of(code: ErrorCode) -> u8 {
    match code {
        ErrorCode::NotFound => 3,
        ErrorCode::InvalidArgument | ErrorCode::OutOfRange | ErrorCode::AlreadyExists => 4,
        ErrorCode::FailedPrecondition => 5,
        ErrorCode::Unimplemented => 6,
        ErrorCode::ResourceExhausted => 7,
        ErrorCode::PermissionDenied => 8,
        ErrorCode::DeadlineExceeded => EXPIRED,
        ErrorCode::DataLoss => 10,
        ErrorCode::Unavailable => DIED,
        ErrorCode::Unknown | ErrorCode::Aborted | ErrorCode::Internal => INTERNAL,
        ErrorCode::Cancelled => CANCELLED,
    }
}

/// Which option gives a network that a model lacks, and where to get it.
fn missing(component: &str, family: &Family) -> String {
    let encoder = family.encoders.iter().find(|encoder| encoder.component == component);
    let (option, source) = match encoder.map(|encoder| encoder.vocabulary) {
        Some(Vocabulary::Clip) => ("--clip-l", "clip_l.safetensors of comfyanonymous/flux_text_encoders"),
        Some(Vocabulary::OpenClip) => {
            ("--clip-g", "clip_g.safetensors of Comfy-Org/stable-diffusion-3.5-fp8")
        }
        Some(Vocabulary::T5) => ("--t5xxl", "t5xxl_fp16.safetensors of comfyanonymous/flux_text_encoders"),
        Some(Vocabulary::Gemma) => {
            ("--llm", "the folder text_encoder of Efficient-Large-Model/Sana_1600M_1024px_diffusers")
        }
        None if component.starts_with("vae") => ("--vae", "the autoencoder in the model's own repository"),
        None => ("--diffusion-model", "the denoiser in the model's own repository"),
    };
    format!("give it with {option}, for example {source} on Hugging Face")
}

/// Words a hint with this program's commands and flags.
pub(crate) fn advice(hint: &Hint) -> String {
    hint.render(&|hint| {
        Some(match hint {
            Hint::Install { runtime } => format!("run `sdrun runtime install {runtime}`"),
            Hint::UsePrecision(precisions) => {
                let flags: Vec<String> =
                    precisions.iter().map(|p: &Precision| format!("`--precision {p}`")).collect();
                format!("use {}", flags.join(" or "))
            }
            Hint::UseProvider(None) => {
                "choose another provider with `--provider` (`sdrun providers` lists them)".into()
            }
            Hint::UseProvider(Some(id)) => format!("use `--provider {id}`"),
            Hint::UseDevice(ids) if ids.is_empty() => {
                "choose another device with `--device` (`sdrun devices` lists them)".into()
            }
            Hint::UseDevice(ids) => {
                let flags: Vec<String> = ids.iter().map(|id| format!("`--device {id}`")).collect();
                format!("use {}", flags.join(" or "))
            }
            Hint::GiveShape { input: None } => {
                "give a shape for each input, for example `--shape sample=1,4,64,64`".into()
            }
            Hint::GiveShape { input: Some(input) } => format!("give its shape with `--shape {input}=…`"),
            Hint::GiveModel => {
                "give a path to an .onnx file or the name of a built-in model (`sdrun models`)".into()
            }
            Hint::GiveWeights => "give a checkpoint with `--weights`".into(),
            Hint::Bake => "build it with `--bake`".into(),
            Hint::Rebuild => "build it again with `sdrun build`".into(),
            Hint::Isolate => "add `--isolate`".into(),
            Hint::LeaveOut { option } => format!("leave out `--{}`", option.replace('_', "-")),
            Hint::Lenient => "leave out what does not fit with `--lenient`".into(),
            Hint::Inspect => "`sdrun inspect` shows what is in it".into(),
            Hint::Build => "build it first with `sdrun build`".into(),
            Hint::ListProviders => {
                "`sdrun providers --explain` shows every provider that was found and what became of it".into()
            }
            Hint::CheckInstallation => "`sdrun doctor` tells what each provider needs".into(),
            Hint::BindByValue => "`sdrun import MODEL --reference CHECKPOINT` finds it by its values".into(),
            Hint::NamePart => "say which part the model is with `sdrun import MODEL --component PART`".into(),
            Hint::UseAsAdapter => "pass it with `--lora`".into(),
            Hint::FreeMemory { bytes: Some(bytes) } => format!("free {} of memory", format::bytes(*bytes)),
            _ => return None,
        })
    })
}

/// An error as the user sees it; `{"error": …}` with `--json`.
#[derive(Debug, PartialEq, Serialize)]
struct Failure {
    code: String,
    exit_code: u8,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    native_code: Option<String>,
}

#[derive(Serialize)]
struct Failed<'a> {
    /// `error` among lines of events, which all have a type.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    error: &'a Failure,
}

impl Failure {
    fn of(error: &anyhow::Error) -> Self {
        let pipeline = error.downcast_ref::<pipeline::Error>();
        let ours = error.downcast_ref::<sdrun::Error>().or(pipeline.and_then(|error| error.core()));
        let (code, plain) = if let Some(ours) = ours {
            let plain = match ours {
                sdrun::Error::Provider { error, .. } | sdrun::Error::Core(error) => Some(error),
                _ => None,
            };
            (ours.code(), plain)
        } else if let Some(plain) = error.downcast_ref::<abi::Error>() {
            (plain.code, Some(plain))
        } else {
            (pipeline.map_or(ErrorCode::Internal, |error| error.code()), None)
        };
        let hint = match (ours, pipeline) {
            (Some(ours), _) => ours.hint().as_ref().map(advice),
            (None, Some(pipeline::Error::Missing { component, family, .. })) => {
                Some(missing(component, family))
            }
            (None, _) => plain.and_then(|e| e.hint.as_ref()).map(advice),
        };
        Failure {
            // The name serde gives the code, for example `not_found`.
            code: serde_json::to_value(code)
                .ok()
                .and_then(|v| Some(v.as_str()?.to_owned()))
                .unwrap_or_default(),
            exit_code: code_of(code),
            message: error.to_string(),
            hint,
            file: plain.and_then(|e| e.file.clone()),
            native_code: plain.and_then(|e| e.native_code.clone()),
        }
    }

    /// Without more to tell.
    fn plain(code: &str, exit_code: u8, message: &str) -> Self {
        Failure {
            code: code.into(),
            exit_code,
            message: message.into(),
            hint: None,
            file: None,
            native_code: None,
        }
    }

    fn cancelled() -> Self {
        Self::plain("cancelled", CANCELLED, "cancelled")
    }

    fn expired(why: &str) -> Self {
        let hint = Some("allow it more time with `--time-limit`".into());
        Failure { hint, ..Self::plain("deadline_exceeded", EXPIRED, why) }
    }
}

/// Shows an error on stderr, and as JSON with `--json`.
pub(crate) fn report(error: &anyhow::Error, context: &Context) -> ExitCode {
    // After a cancel, any other error is a consequence of it.
    let failure = match context.expired() {
        Some(why) => Failure::expired(why),
        None if context.cancelled() => Failure::cancelled(),
        None => Failure::of(error),
    };
    let mut text = format!("error: {}\n", failure.message);
    if let Some(hint) = &failure.hint {
        text += &format!("hint: {hint}\n");
    }
    context.complain(&text);
    let kind = context.has_lines().then_some("error");
    // It may be the very error that is to be written.
    if let Err(e) = context.json_only(&Failed { kind, error: &failure })
        && e.to_string() != failure.message
    {
        context.complain(&format!("error: {e}\n"));
    }
    ExitCode::from(failure.exit_code)
}

/// Prints clap's output: help and version on stdout, a wrong command line on stderr (and as JSON if `--json` is among the
/// arguments).
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // If stdout or stderr is closed, there is nowhere to report it.
    let _ = error.print();
    if !error.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if std::env::args_os().any(|arg| arg == "--json") {
        let text = error.render().to_string();
        let first = text.lines().next().unwrap_or_default();
        let failure = Failure::plain("usage", USAGE, first.strip_prefix("error: ").unwrap_or(first));
        // As if the command had begun its lines of events.
        let has_lines = std::env::args_os().nth(1).is_some_and(|command| command == "generate");
        let failed = Failed { kind: has_lines.then_some("error"), error: &failure };
        let write = if has_lines { serde_json::to_string } else { serde_json::to_string_pretty };
        if let Ok(json) = write(&failed) {
            let _ = writeln!(io::stdout(), "{}", format::clean(&json));
        }
    }
    ExitCode::from(USAGE)
}

/// The error for output that cannot be written.
pub(crate) fn cannot_write(what: &str, error: &io::Error) -> abi::Error {
    abi::Error::io("write", what, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_keeps_its_code_and_hint() {
        let plain = abi::Error::not_found("no such thing").with_hint("look").with_file("x.onnx");
        let expected = |message: &str| Failure {
            code: "not_found".into(),
            exit_code: 3,
            message: message.into(),
            hint: Some("look".into()),
            file: Some("x.onnx".into()),
            native_code: None,
        };
        assert_eq!(Failure::of(&plain.clone().into()), expected("no such thing"));
        assert_eq!(Failure::of(&sdrun::Error::Core(plain.clone()).into()), expected("no such thing"));
        let of_provider = sdrun::Error::Provider { provider: "p".into(), error: plain };
        assert_eq!(Failure::of(&of_provider.into()), expected("p: no such thing"));
        let foreign = Failure::of(&anyhow::anyhow!("odd"));
        assert_eq!((foreign.code.as_str(), foreign.exit_code), ("internal", 70));
    }

    #[test]
    fn hints_name_flags() {
        for (hint, words) in [
            (Hint::LeaveOut { option: "vram_budget".into() }, "leave out `--vram-budget`"),
            (
                Hint::UsePrecision(vec![Precision::Fp32, Precision::Bf16]),
                "use `--precision fp32` or `--precision bf16`",
            ),
            (Hint::GiveShape { input: Some("x".into()) }, "give its shape with `--shape x=…`"),
            (Hint::AnyOf(vec![Hint::Bake, "be patient".into()]), "build it with `--bake`, or be patient"),
        ] {
            assert_eq!(advice(&hint), words);
        }
    }

    #[test]
    fn kinds_that_scripts_tell_apart_differ() {
        use ErrorCode::*;
        let codes = [NotFound, InvalidArgument, FailedPrecondition, Unimplemented, ResourceExhausted];
        let more = [PermissionDenied, DeadlineExceeded, DataLoss, Unavailable, Internal, Cancelled];
        let mut all: Vec<u8> = codes.iter().chain(&more).map(|c| code_of(*c)).collect();
        assert_eq!(all, [3, 4, 5, 6, 7, 8, 9, 10, 11, 70, 130]);
        all.extend([0, NO, USAGE]);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 14);
    }
}
