//! Weights as users name them: a checkpoint of any layout, a model, or files of tensors, plus adapters and embeddings.

use crate::{EngineManifest, Model, Paths, Result};
use sdrun_abi::{Error as AbiError, ErrorCode, Flow, Hint, Host};
use sdrun_graph::{OpenOptions, WeightsPolicy};
use sdrun_weights::{
    Adapter, AdapterUse, Binding, Checkpoint, Component, EmbeddingReport, LayerReport, SafetensorsWeights,
    WeightStack, adapter::DoraRule, builtin, checkpoint::Unread, embedding::Embedding,
};
use serde::Serialize;
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

/// The weights for a model or an engine. [`of_model`](WeightFiles::of_model) and
/// [`of_engine`](WeightFiles::of_engine) open them.
#[derive(Clone, Debug, Default)]
pub struct WeightFiles {
    /// Weights instead of the model's own: a checkpoint of any layout (`.safetensors`, `.gguf`, a diffusers folder), an
    /// `.onnx` file, the name of a built-in model, or `.safetensors` files whose tensors have the model's weight names. If
    /// there are several, the first one that contains this model's part of the pipeline is used.
    pub base: Vec<PathBuf>,
    /// Which part of a pipeline the model is. `None` if names and shapes tell.
    pub component: Option<Component>,
    /// Adapters to apply, in this order.
    pub adapters: Vec<AdapterFile>,
    /// Learned tokens for a text encoder.
    pub embeddings: Vec<EmbeddingFile>,
    /// Use the averaged (EMA) weights of a checkpoint instead of the trained ones.
    pub ema: bool,
    /// Skip what does not fit instead of failing: parts of an adapter, and tensors of a checkpoint that change the result but
    /// that the model does not read.
    pub lenient: bool,
    /// Rule for DoRA adapters; `None` follows the names in each file.
    pub dora: Option<DoraRule>,
    /// Follow symbolic and hard links of external weight files.
    pub allow_links: bool,
}

/// An adapter (LoRA and its relatives) and its strength.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterFile {
    /// The file.
    pub file: PathBuf,
    /// Strength; 1 is the strength it was trained for.
    pub strength: f32,
    /// Strength in text encoders.
    pub text_encoder_strength: f32,
}

/// An embedding (textual inversion) and its token ids.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingFile {
    /// The file.
    pub file: PathBuf,
    /// The token id of its first vector; further vectors take the ids after it.
    pub token: usize,
}

/// Opened weights. Nothing is read before a session asks for it.
pub struct Weights {
    /// The weights.
    pub stack: WeightStack,
    /// The model that the weights come from, if they come from a model. It can generate inputs.
    pub model: Option<Box<Model>>,
    /// Where the base weights come from.
    pub base: String,
}

/// What happened to the checkpoint, the adapters and the embeddings.
#[derive(Clone, Debug, Serialize)]
pub struct WeightReport {
    /// Where the base weights come from.
    pub base: String,
    /// Tensors of the checkpoint that the model does not read.
    pub unread: Unread,
    /// Number of weights of the graph that adapters and embeddings change.
    pub changed: usize,
    /// The adapters.
    pub adapters: Vec<LayerReport>,
    /// The embeddings.
    pub embeddings: Vec<EmbeddingReport>,
}

impl Weights {
    /// Reports what happened to the files.
    pub fn report(&self) -> WeightReport {
        WeightReport {
            base: self.base.clone(),
            unread: self.stack.unread().clone(),
            changed: self.stack.changed(),
            adapters: self.stack.reports().cloned().collect(),
            embeddings: self.stack.embeddings().cloned().collect(),
        }
    }
}

/// What needs the weights.
struct Target<'a> {
    binding: Binding,
    /// Names of the graph's weights.
    names: Vec<&'a str>,
}

impl WeightFiles {
    /// The weights of one checkpoint or model.
    pub fn of(base: impl Into<PathBuf>) -> Self {
        WeightFiles { base: vec![base.into()], ..Self::default() }
    }

    /// Adds an adapter with the same strength for all parts of the pipeline.
    pub fn adapter(mut self, file: impl Into<PathBuf>, strength: f32) -> Self {
        self.adapters.push(AdapterFile { file: file.into(), strength, text_encoder_strength: strength });
        self
    }

    /// Whether the model's own weights are needed.
    pub fn policy(&self) -> WeightsPolicy {
        if self.base.is_empty() { WeightsPolicy::Required } else { WeightsPolicy::MayBeAbsent }
    }

    /// Whether the user named any files.
    pub fn is_given(&self) -> bool {
        !self.base.is_empty() || self.is_changing()
    }

    /// Whether adapters or embeddings change the base.
    pub fn is_changing(&self) -> bool {
        !self.adapters.is_empty() || !self.embeddings.is_empty()
    }

    /// The weights for `model`; its own if no base is named. `host` receives the name of each file before it is read, and
    /// can cancel between files. A built-in model's weights are first generated below `paths`.
    ///
    /// # Errors
    /// `NotFound` if a file does not exist or has no weights for this part of the pipeline; `InvalidArgument` if a file does
    /// not fit the model; errors of reading files.
    pub fn of_model(&self, model: &Model, paths: &Paths, host: &dyn Host) -> Result<Weights> {
        let names = model.graph().weights().map(|(name, _)| name).collect();
        let mut target = Target { binding: model.binding()?, names };
        target.binding.component = self.component.or(target.binding.component);
        let own = || Weights {
            stack: WeightStack::of_model(target.binding.clone(), model.weights()),
            model: None,
            base: model.name().to_string(),
        };
        let weights = if self.base.is_empty() { own() } else { self.base(&target, paths, host)? };
        self.change(weights, host)
    }

    /// The weights for an engine; `None` if no base is named, because a stripped engine has none.
    ///
    /// # Errors
    /// As [`of_model`](WeightFiles::of_model).
    pub fn of_engine(
        &self,
        engine: &EngineManifest,
        paths: &Paths,
        host: &dyn Host,
    ) -> Result<Option<Weights>> {
        if self.base.is_empty() {
            return Ok(None);
        }
        let names = engine.info.weights.iter().map(|weight| weight.name.as_str()).collect();
        let target = Target { binding: engine.binding.clone(), names };
        let weights = self.base(&target, paths, host)?;
        self.change(weights, host).map(Some)
    }

    /// Applies the adapters and embeddings to a base that is already open, such as the [pristine](WeightStack::pristine) weights of
    /// a session.
    ///
    /// # Errors
    /// `InvalidArgument` if a file does not fit; errors of reading files.
    pub fn change(&self, mut weights: Weights, host: &dyn Host) -> Result<Weights> {
        for AdapterFile { file, strength, text_encoder_strength } in &self.adapters {
            begin(host, file)?;
            let how = AdapterUse {
                strength: *strength,
                text_encoder_strength: *text_encoder_strength,
                lenient: self.lenient,
                dora: self.dora,
            };
            weights.stack = weights.stack.with_adapter(&Adapter::open(file)?, how)?;
        }
        for EmbeddingFile { file, token } in &self.embeddings {
            begin(host, file)?;
            let with = weights.stack.with_embedding(&Embedding::open(file)?, *token);
            weights.stack = with.map_err(|error| error.with_file(file))?;
        }
        Ok(weights)
    }

    /// The base weights, before adapters and embeddings.
    fn base(&self, target: &Target<'_>, paths: &Paths, host: &dyn Host) -> Result<Weights> {
        let base = self.base.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
        let of = |stack, model| Weights { stack, model, base: base.clone() };
        let plain = |what: &str| match self.ema {
            true => Err(AbiError::invalid(format!("{what} has no averaged (EMA) weights"))
                .with_hint(Hint::LeaveOut { option: "ema".into() })),
            false => Ok(()),
        };
        if let [file] = &*self.base {
            let what = file.to_string_lossy();
            if has_ending(file, "onnx") || (!file.exists() && builtin::find(&what).is_some()) {
                plain(&what)?;
                let options = OpenOptions { allow_links: self.allow_links, ..OpenOptions::default() };
                let model = Model::find(&what, paths, &options, host)?;
                let stack = WeightStack::of_model(target.binding.clone(), model.weights());
                return Ok(of(stack, Some(Box::new(model))));
            }
        }
        if let Some(own) = self.named_as_in_the_model(&target.names)? {
            plain("a file with the names of the model")?;
            return Ok(of(WeightStack::of_graph(target.binding.clone(), Box::new(own)), None));
        }
        let mut worst: Option<AbiError> = None;
        for file in &self.base {
            begin(host, file)?;
            match self.checkpoint(file, &target.binding) {
                Ok(stack) => return Ok(of(stack, None)),
                // A file that has this part but does not fit gives the more useful error.
                Err(error) => {
                    let absent = |error: &AbiError| error.code == ErrorCode::NotFound;
                    if worst.as_ref().is_none_or(|worst| absent(worst) && !absent(&error)) {
                        worst = Some(error);
                    }
                }
            }
        }
        Err(worst.unwrap_or_else(|| AbiError::not_found("no weights are given")).into())
    }

    fn checkpoint(&self, file: &Path, binding: &Binding) -> sdrun_abi::Result<WeightStack> {
        let checkpoint = Checkpoint::open(file)?;
        let checkpoint = if self.ema { checkpoint.with_ema()? } else { checkpoint };
        match self.lenient {
            true => WeightStack::of_checkpoint_lenient(binding.clone(), &checkpoint),
            false => WeightStack::of_checkpoint(binding.clone(), &checkpoint),
        }
    }

    /// Safetensors files that have every weight of the graph under the graph's own name for it.
    fn named_as_in_the_model(&self, names: &[&str]) -> Result<Option<SafetensorsWeights>> {
        let is_file = |file: &PathBuf| has_ending(file, "safetensors") && file.is_file();
        if names.is_empty() || !self.base.iter().all(is_file) {
            return Ok(None);
        }
        let weights = SafetensorsWeights::open(&self.base)?;
        let has: HashSet<&str> = weights.names().into_iter().collect();
        Ok(names.iter().all(|name| has.contains(name)).then_some(weights))
    }
}

/// Whether a path ends in `.ending`, in upper or lower case.
fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending))
}

/// Reports the next file to read.
fn begin(host: &dyn Host, file: &Path) -> Result<()> {
    let flow = host.progress(&format!("reading {}", file.display()), 0, 0);
    if flow == Flow::Cancel || host.cancelled() {
        return Err(AbiError::new(ErrorCode::Cancelled, "cancelled").into());
    }
    Ok(())
}
