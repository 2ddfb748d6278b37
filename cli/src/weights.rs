//! Arguments that replace or change a model's weights: a checkpoint, adapters, embeddings.

use crate::{
    context::Context,
    format,
    model::open_model,
    parse::{EmbeddingArg, LoraArg},
};
use clap::{Args, ValueEnum};
use sdrun::{
    Model,
    abi::{Error, ErrorCode},
    graph::{OpenOptions, WeightsPolicy},
    weights::{
        Adapter, AdapterUse, Binding, Checkpoint, EmbeddingReport, LayerReport, SafetensorsWeights,
        WeightStack, adapter::DoraRule, builtin, checkpoint::Unread, embedding::Embedding,
    },
};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

#[derive(Args)]
#[command(next_help_heading = "Weights")]
pub(crate) struct WeightArgs {
    /// Use these weights instead of the model's own: a checkpoint in any layout (.safetensors, .gguf, a diffusers folder), an .onnx
    /// file, a built-in model, or .safetensors files with tensors named as in the model (repeatable; the first file that contains
    /// the model's part of the pipeline is used)
    #[arg(long, value_name = "FILE")]
    pub(crate) weights: Vec<PathBuf>,

    /// Apply an adapter (LoRA and its relatives) with this strength, or with TEXT to text encoders [default: 1] (repeatable,
    /// applied in the given order)
    #[arg(long = "lora", value_name = "FILE[:STRENGTH[:TEXT]]")]
    pub(crate) loras: Vec<LoraArg>,

    /// Put an embedding (textual inversion) of a text encoder in place of this token; further vectors replace the tokens after it
    /// (repeatable)
    #[arg(long = "embedding", value_name = "FILE:TOKEN")]
    pub(crate) embeddings: Vec<EmbeddingArg>,

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

/// The weights of a run.
pub(crate) struct Weights {
    pub(crate) stack: WeightStack,
    /// The model they come from, if it is one. It can generate inputs.
    pub(crate) model: Option<Box<Model>>,
}

/// How the checkpoint, the adapters and the embeddings were used.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WeightReport {
    /// Source of the weights below the adapters.
    pub(crate) base: String,
    /// Tensors of the checkpoint that the model does not read.
    pub(crate) unread: Unread,
    /// Weights of the graph that adapters and embeddings change.
    pub(crate) changed: usize,
    pub(crate) adapters: Vec<LayerReport>,
    pub(crate) embeddings: Vec<EmbeddingReport>,
}

impl WeightArgs {
    /// Whether the model's own weights are needed.
    pub(crate) fn policy(&self) -> WeightsPolicy {
        if self.weights.is_empty() { WeightsPolicy::Required } else { WeightsPolicy::MayBeAbsent }
    }

    /// Whether any of these arguments is given.
    pub(crate) fn is_given(&self) -> bool {
        !self.weights.is_empty() || self.is_changing()
    }

    /// Whether an adapter or embedding changes the weights.
    pub(crate) fn is_changing(&self) -> bool {
        !self.loras.is_empty() || !self.embeddings.is_empty()
    }

    /// Source of the base weights, for reports.
    fn base(&self, own: &str) -> String {
        match &*self.weights {
            [] => own.to_string(),
            files => files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", "),
        }
    }

    /// Reports what was done to the weights of the model or engine called `own`.
    pub(crate) fn report(&self, own: &str, stack: &WeightStack) -> WeightReport {
        let adapters = stack.reports().cloned().collect();
        let embeddings = stack.embeddings().cloned().collect();
        let (base, unread) = (self.base(own), stack.unread().clone());
        WeightReport { base, unread, changed: stack.changed(), adapters, embeddings }
    }

    /// The weights, with adapters, of a graph that has this binding table and these weight `names`: from `--weights`, else from
    /// `model`. `None` if there are neither.
    pub(crate) fn open(
        &self,
        binding: Binding,
        names: &[&str],
        model: Option<&Model>,
        allow_links: bool,
        context: &Context,
    ) -> anyhow::Result<Option<Weights>> {
        let mut weights = match (&*self.weights, model) {
            ([], Some(model)) => {
                Weights { stack: WeightStack::of_model(binding, model.weights()), model: None }
            }
            ([], None) => return Ok(None),
            (files, _) => self.read(files, binding, names, allow_links, context)?,
        };
        for lora in &self.loras {
            let task = context.task(&format!("reading {}", lora.file.display()));
            let adapter = Adapter::open(&lora.file)?;
            drop(task);
            let how = AdapterUse {
                strength: lora.strength,
                text_encoder_strength: lora.text_encoder_strength,
                lenient: self.lenient,
                dora: self.dora.map(DoraRule::from),
            };
            weights.stack = weights.stack.with_adapter(&adapter, how)?;
            context.go_on()?;
        }
        for EmbeddingArg { file, token } in &self.embeddings {
            let embedding = Embedding::open(file)?;
            let with = weights.stack.with_embedding(&embedding, *token);
            weights.stack = with.map_err(|error| error.with_file(file))?;
        }
        Ok(Some(weights))
    }

    /// The weights below the adapters.
    fn read(
        &self,
        files: &[PathBuf],
        binding: Binding,
        names: &[&str],
        allow_links: bool,
        context: &Context,
    ) -> anyhow::Result<Weights> {
        let plain = |what: &str| match self.ema {
            true => Err(Error::invalid(format!("{what} has no averaged (EMA) weights"))
                .with_hint("leave out `--ema`, which is for checkpoints")),
            false => Ok(()),
        };
        if let [file] = files {
            let what = file.to_string_lossy();
            if crate::model::has_ending(file, "onnx") || (!file.exists() && builtin::find(&what).is_some()) {
                plain(&what)?;
                let options = OpenOptions { allow_links, ..OpenOptions::default() };
                let model = open_model(&what, &options, context)?;
                let stack = WeightStack::of_model(binding, model.weights());
                return Ok(Weights { stack, model: Some(Box::new(model)) });
            }
        }
        if let Some(own) = named_as_in_the_model(files, names)? {
            plain("a file with the names of the model")?;
            return Ok(Weights { stack: WeightStack::of_graph(binding, Box::new(own)), model: None });
        }
        let stack_of = |file: &PathBuf| {
            let checkpoint = Checkpoint::open(file)?;
            let checkpoint = if self.ema { checkpoint.with_ema()? } else { checkpoint };
            match self.lenient {
                true => WeightStack::of_checkpoint_lenient(binding.clone(), &checkpoint),
                false => WeightStack::of_checkpoint(binding.clone(), &checkpoint),
            }
        };
        let mut worst: Option<Error> = None;
        for file in files {
            match stack_of(file) {
                Ok(stack) => return Ok(Weights { stack, model: None }),
                // The error of a file that has the part and does not fit says more than that of a file without the part.
                Err(error) => {
                    let absent = |error: &Error| error.code == ErrorCode::NotFound;
                    if worst.as_ref().is_none_or(|worst| absent(worst) && !absent(&error)) {
                        worst = Some(error);
                    }
                }
            }
        }
        Err(worst.unwrap_or_else(|| Error::invalid("no weights are given")).into())
    }
}

/// Safetensors files that contain every weight of the graph under its own name.
fn named_as_in_the_model(files: &[PathBuf], names: &[&str]) -> anyhow::Result<Option<SafetensorsWeights>> {
    let is_file = |file: &PathBuf| crate::model::has_ending(file, "safetensors") && Path::is_file(file);
    if names.is_empty() || !files.iter().all(is_file) {
        return Ok(None);
    }
    let weights = SafetensorsWeights::open(files)?;
    let has: std::collections::HashSet<&str> = weights.names().into_iter().collect();
    Ok(names.iter().all(|name| has.contains(name)).then_some(weights))
}

impl WeightReport {
    /// Prints nothing if the weights are the model's own and there is no adapter.
    pub(crate) fn show(&self, out: &mut dyn Write, own: &str) -> io::Result<()> {
        if self.base != own {
            writeln!(out, "  weights of {}", self.base)?;
        }
        for (reason, names) in &self.unread.harmless {
            writeln!(out, "  not read, without effect: {} ({reason})", few(names))?;
        }
        if !self.unread.left_out.is_empty() {
            writeln!(out, "  warning: left out, which changes the result: {}", few(&self.unread.left_out))?;
        }
        for EmbeddingReport { name, token, vectors } in &self.embeddings {
            match vectors {
                1 => writeln!(out, "  {name} is token {token}")?,
                _ => writeln!(out, "  {name} is tokens {token} to {}", token + vectors - 1)?,
            }
        }
        for adapter in &self.adapters {
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
}

/// The number of tensors, and the names of a few.
pub(crate) fn few(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let tensors = if names.len() == 1 { "tensor" } else { "tensors" };
    let rest = if names.len() > SHOWN { ", …" } else { "" };
    format!("{} {tensors}: {}{rest}", names.len(), format::list(names.iter().take(SHOWN)))
}
