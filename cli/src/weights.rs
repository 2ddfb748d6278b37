//! Arguments that replace or change a model's weights: a checkpoint, adapters, embeddings.

use crate::{
    context::Context,
    format,
    parse::{EmbeddingArg, LoraArg},
};
use clap::{Args, ValueEnum};
use sdrun::{
    AdapterFile, EmbeddingFile, EngineManifest, Model, WeightFiles, WeightReport, Weights,
    weights::{EmbeddingReport, adapter::DoraRule},
};
use std::{
    io::{self, Write},
    path::PathBuf,
};

#[derive(Args)]
#[command(next_help_heading = "Weights")]
pub(crate) struct WeightArgs {
    /// Use these weights instead of the model's own: a checkpoint in any layout (.safetensors, .gguf, a diffusers folder), an .onnx
    /// file, a built-in model, or .safetensors files with tensors named as in the model (repeatable; the first file that contains
    /// the model's part of the pipeline is used)
    #[arg(long, value_name = "FILE")]
    weights: Vec<PathBuf>,

    /// Apply an adapter (LoRA and its relatives) with this strength, or with TEXT to text encoders [default: 1] (repeatable,
    /// applied in the given order)
    #[arg(long = "lora", value_name = "FILE[:STRENGTH[:TEXT]]")]
    loras: Vec<LoraArg>,

    /// Put an embedding (textual inversion) of a text encoder in place of this token; further vectors replace the tokens after it
    /// (repeatable)
    #[arg(long = "embedding", value_name = "FILE:TOKEN")]
    embeddings: Vec<EmbeddingArg>,

    /// Use the averaged (EMA) weights of a checkpoint instead of the trained ones
    #[arg(long, requires = "weights")]
    ema: bool,

    /// Leave out what does not fit instead of refusing it: parts of an adapter, and checkpoint tensors that the model does not read
    /// although they change the result
    #[arg(long)]
    lenient: bool,

    /// Rule for DoRA adapters [default: comfyui for files with kohya's or LyCORIS' names, peft for files with PEFT's names]
    #[arg(long, value_name = "RULE")]
    dora: Option<Dora>,
}

/// [`DoraRule`], as an argument.
#[derive(Clone, Copy, ValueEnum)]
enum Dora {
    /// m · (W + s·ΔW) / ‖W + s·ΔW‖
    Peft,
    /// W + s · (m · (W + ΔW) / n − W); n is ‖W‖ for magnitudes per output, ‖W + ΔW‖ for magnitudes per input
    Comfyui,
}

impl From<Dora> for DoraRule {
    fn from(dora: Dora) -> Self {
        match dora {
            Dora::Peft => DoraRule::Peft,
            Dora::Comfyui => DoraRule::ComfyUi,
        }
    }
}

impl WeightArgs {
    /// The files as the library takes them.
    pub(crate) fn files(&self, allow_links: bool) -> WeightFiles {
        let adapter = |lora: &LoraArg| AdapterFile {
            file: lora.file.clone(),
            strength: lora.strength,
            text_encoder_strength: lora.text_encoder_strength,
        };
        let embedding = |arg: &EmbeddingArg| EmbeddingFile { file: arg.file.clone(), token: arg.token };
        WeightFiles {
            base: self.weights.clone(),
            component: None,
            adapters: self.loras.iter().map(adapter).collect(),
            embeddings: self.embeddings.iter().map(embedding).collect(),
            ema: self.ema,
            lenient: self.lenient,
            dora: self.dora.map(DoraRule::from),
            allow_links,
        }
    }
}

/// The weights for a model: those in the files, else its own.
pub(crate) fn of_model(files: &WeightFiles, model: &Model, context: &Context) -> anyhow::Result<Weights> {
    let task = context.task("opening the weights");
    Ok(files.of_model(model, &context.paths()?, &task.host(context.cancel_flag()))?)
}

/// The weights for an engine; `None` where no base is given.
pub(crate) fn of_engine(
    files: &WeightFiles,
    engine: &EngineManifest,
    context: &Context,
) -> anyhow::Result<Option<Weights>> {
    let task = context.task("opening the weights");
    Ok(files.of_engine(engine, &context.paths()?, &task.host(context.cancel_flag()))?)
}

/// Says what became of the files; nothing where the weights are those of the model `own` and no adapter is given.
pub(crate) fn show(report: &WeightReport, out: &mut dyn Write, own: &str) -> io::Result<()> {
    if report.base != own {
        writeln!(out, "  weights of {}", report.base)?;
    }
    for (reason, names) in &report.unread.harmless {
        writeln!(out, "  not read, without effect: {} ({reason})", few(names))?;
    }
    if !report.unread.left_out.is_empty() {
        writeln!(out, "  warning: left out, which changes the result: {}", few(&report.unread.left_out))?;
    }
    for EmbeddingReport { name, token, vectors } in &report.embeddings {
        match vectors {
            1 => writeln!(out, "  {name} is token {token}")?,
            _ => writeln!(out, "  {name} is tokens {token} to {}", token + vectors - 1)?,
        }
    }
    for adapter in &report.adapters {
        let (file, modules) = (adapter.file.display(), &adapter.modules);
        write!(out, "  {file} at {}: {} modules applied", adapter.strength, modules.applied.len())?;
        for rule in [DoraRule::Peft, DoraRule::ComfyUi] {
            match modules.applied.iter().filter(|module| module.dora == Some(rule)).count() {
                0 => {}
                n => write!(out, ", {n} of them DoRA by {rule}'s rule")?,
            }
        }
        let mut reasons: Vec<(String, usize)> = Vec::new();
        for skipped in &modules.skipped {
            let reason = skipped.reason.to_string();
            match reasons.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, count)) => *count += 1,
                None => reasons.push((reason, 1)),
            }
        }
        for (reason, count) in reasons {
            write!(out, ", {count} left out ({reason})")?;
        }
        match modules.dead_keys.len() {
            0 => writeln!(out)?,
            n => writeln!(
                out,
                ", {n} keys that change nothing ({})",
                format::list(&modules.dead_keys[..n.min(3)])
            )?,
        }
    }
    Ok(())
}

/// The number of tensors, and the names of a few.
pub(crate) fn few(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let tensors = if names.len() == 1 { "tensor" } else { "tensors" };
    let rest = if names.len() > SHOWN { ", …" } else { "" };
    format!("{} {tensors}: {}{rest}", names.len(), format::list(names.iter().take(SHOWN)))
}
