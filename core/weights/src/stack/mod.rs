//! A checkpoint with adapters, as the weights of one graph.

mod source;

use crate::{
    Adapter, Binding, Checkpoint, Component, OnnxWeights, StateDict,
    adapter::{self, Delta, DoraRule, Target},
    checkpoint::Unread,
    embedding::Embedding,
    fit, keys,
    memory::Buffers,
    token_rows::{EmbeddingReport, TokenRows},
    unique,
};
use sdrun_abi::{Error, Result, WeightSource};
use serde::Serialize;
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex},
};

/// The weights of a graph: those of a checkpoint, or the graph's own, changed by any number of adapters.
///
/// Each tensor is computed on demand from the pristine base: converted to f32, all changes added in the order they were
/// given, rounded once to the graph's type. A tensor that no adapter changes is delivered as its file holds it, in blocks too
/// ([`WeightSource::encoded`]). A stack is immutable, so `A`, then `B`, then `A` again gives the bits of `A`. A clone is
/// cheap and shares the base. [`WeightSource::version`] tells a session which tensors differ between two stacks.
#[derive(Clone)]
pub struct WeightStack {
    binding: Arc<Binding>,
    /// Numbers of the binding's entries by initializer name.
    index: Arc<HashMap<String, usize>>,
    base: Arc<Base>,
    unread: Arc<Unread>,
    /// What adapters are resolved against; `None` where the graph is no part of a diffusion pipeline.
    target: Arc<Option<Target>>,
    layers: Vec<Layer>,
    /// By state-dict name: changes in the order of their layers, with strengths.
    deltas: BTreeMap<String, Vec<(Delta, f32)>>,
    token_rows: Vec<TokenRows>,
    buffers: Buffers,
}

/// What adapters change.
struct Base {
    id: u64,
    weights: BaseWeights,
    /// The [`largest`](adapter::largest) magnitudes that are known, by state-dict name.
    largest: Mutex<HashMap<String, Option<f32>>>,
}

enum BaseWeights {
    /// A component of a checkpoint, by state-dict name.
    Checkpoint(Box<dyn StateDict>),
    /// Weights by initializer name: those of the model file.
    Graph(Box<dyn WeightSource + Send>),
}

/// An adapter in a stack.
#[derive(Clone)]
struct Layer {
    id: u64,
    strength: f32,
    dora: Option<DoraRule>,
    report: LayerReport,
}

/// How strongly an adapter is applied, and how strictly it is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterUse {
    /// Factor on its changes to UNets, transformers, VAEs; may be negative. 0 leaves every bit as it is.
    pub strength: f32,
    /// The factor for text encoders.
    pub text_encoder_strength: f32,
    /// Skip modules that do not fit instead of refusing the adapter.
    pub lenient: bool,
    /// The rule for DoRA. `None` follows the file's spelling: ComfyUI's rule for names of kohya and LyCORIS, PEFT's for its
    /// own.
    pub dora: Option<DoraRule>,
}

impl AdapterUse {
    /// The same strength everywhere, strict.
    pub fn at(strength: f32) -> Self {
        AdapterUse { strength, text_encoder_strength: strength, lenient: false, dora: None }
    }
}

/// Reports how one adapter was applied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// Its file.
    pub file: PathBuf,
    /// The factor that was used.
    pub strength: f32,
    /// How its modules were applied.
    #[serde(flatten)]
    pub modules: adapter::Report,
}

impl WeightStack {
    /// The weights of a checkpoint: of the component that `binding` names, or else of the only component that has all
    /// tensors of the graph.
    ///
    /// `NotFound` where the checkpoint has no such component. `InvalidArgument` where it belongs to another model, where
    /// shapes differ, or where the component has tensors that change the result and that the graph does not read (a guidance
    /// embedding, more blocks). The hint names the built-in models that fit. Missing and unreadable tensors are reported
    /// when the weight is read.
    pub fn of_checkpoint(binding: Binding, checkpoint: &Checkpoint) -> Result<Self> {
        Self::checked(binding, checkpoint, false)
    }

    /// As [`of_checkpoint`](WeightStack::of_checkpoint), but accepts unread tensors that change the result;
    /// [`unread`](WeightStack::unread) lists them.
    pub fn of_checkpoint_lenient(binding: Binding, checkpoint: &Checkpoint) -> Result<Self> {
        Self::checked(binding, checkpoint, true)
    }

    fn checked(binding: Binding, checkpoint: &Checkpoint, lenient: bool) -> Result<Self> {
        let component = fit::component_of(&binding, checkpoint)?;
        let weights = checkpoint.component(component)?;
        let unread = fit::check(&binding, component, &*weights, checkpoint, lenient)?;
        Ok(WeightStack { unread: Arc::new(unread), ..Self::of_state_dict(binding, weights) })
    }

    /// The tensors of the checkpoint's component that the graph does not read. Empty for weights of another kind.
    pub fn unread(&self) -> &Unread {
        &self.unread
    }

    /// The weights of one component, by the names of its state dict.
    pub fn of_state_dict(binding: Binding, weights: Box<dyn StateDict>) -> Self {
        Self::new(binding, BaseWeights::Checkpoint(weights))
    }

    /// The weights stored with a model.
    pub fn of_model(binding: Binding, weights: OnnxWeights) -> Self {
        Self::of_graph(binding, Box::new(weights))
    }

    /// Any weights, by initializer name.
    pub fn of_graph(binding: Binding, weights: Box<dyn WeightSource + Send>) -> Self {
        Self::new(binding, BaseWeights::Graph(weights))
    }

    fn new(binding: Binding, weights: BaseWeights) -> Self {
        let index = binding.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        let target = target(&binding, &weights);
        WeightStack {
            binding: Arc::new(binding),
            index: Arc::new(index),
            base: Arc::new(Base { id: unique::id(), weights, largest: Mutex::default() }),
            unread: Arc::default(),
            target: Arc::new(target),
            layers: Vec::new(),
            deltas: BTreeMap::new(),
            token_rows: Vec::new(),
            buffers: Buffers::default(),
        }
    }

    /// Which part of a pipeline the graph is, if known.
    pub fn component(&self) -> Option<Component> {
        self.binding.component
    }

    /// The base without any adapter or embedding.
    pub fn pristine(&self) -> Self {
        WeightStack { layers: Vec::new(), deltas: BTreeMap::new(), token_rows: Vec::new(), ..self.clone() }
    }

    /// Whether there is no adapter and no embedding.
    pub fn is_pristine(&self) -> bool {
        self.layers.is_empty() && self.token_rows.is_empty()
    }

    /// Adds an adapter on top.
    ///
    /// `FailedPrecondition` where the graph is no part of a diffusion pipeline. `InvalidArgument` where no module of the
    /// adapter fits, or, unless [`AdapterUse::lenient`], where a module that should fit does not. The error says what the
    /// adapter was made for, if that is known.
    pub fn with_adapter(mut self, adapter: &Adapter, how: AdapterUse) -> Result<Self> {
        let target = (*self.target).as_ref().ok_or_else(|| {
            Error::precondition("this model is no known part of a diffusion pipeline, so no adapter fits it")
                .with_file(adapter.path())
        })?;
        let resolution = adapter.resolve_with(target, how.dora);
        adapter::check(adapter, &[(target, &resolution)], how.lenient)?;
        let strength = match target.component() {
            Component::TextEncoder | Component::TextEncoder2 | Component::TextEncoder3 => {
                how.text_encoder_strength
            }
            Component::Denoiser | Component::Vae | Component::ControlNet | Component::Upscaler => {
                how.strength
            }
        };
        if !strength.is_finite() {
            return Err(Error::invalid(format!("an adapter cannot have strength {strength}")));
        }
        if strength != 0.0 {
            for (tensor, deltas) in resolution.deltas {
                self.deltas.entry(tensor).or_default().extend(deltas.into_iter().map(|d| (d, strength)));
            }
        }
        let report = LayerReport { file: adapter.path().to_owned(), strength, modules: resolution.report };
        self.layers.push(Layer { id: adapter.id(), strength, dora: how.dora, report });
        Ok(self)
    }

    /// Adds a learned word: its vectors replace the rows of the token table from `token` on, after any adapters. The caller
    /// chooses tokens that no prompt contains otherwise.
    ///
    /// `FailedPrecondition` where the graph is no text encoder. `InvalidArgument` where the embedding has no vectors for it or
    /// the table has no such rows.
    pub fn with_embedding(mut self, embedding: &Embedding, token: usize) -> Result<Self> {
        let rows = TokenRows::new(embedding, self.binding.component, &self.binding.tensors, token)?;
        self.token_rows.push(rows);
        Ok(self)
    }

    /// Where each embedding is in the token table, in the order they were added.
    pub fn embeddings(&self) -> impl Iterator<Item = &EmbeddingReport> {
        self.token_rows.iter().map(|rows| &rows.report)
    }

    /// How each adapter was applied, in the order they were added.
    pub fn reports(&self) -> impl Iterator<Item = &LayerReport> {
        self.layers.iter().map(|layer| &layer.report)
    }

    /// How many initializers of the graph the adapters and embeddings change.
    pub fn changed(&self) -> usize {
        self.binding.tensors.iter().filter(|tensor| self.is_changed(tensor)).count()
    }
}

/// What adapters are resolved against, if the graph is part of a pipeline.
fn target(binding: &Binding, weights: &BaseWeights) -> Option<Target> {
    let component = binding.component?;
    let mut tensors: Vec<(String, Vec<usize>)> = Vec::with_capacity(binding.tensors.len());
    for bound in &binding.tensors {
        match (&*bound.sources, weights) {
            ([name], _) => tensors.push((name.clone(), bound.source_shape.clone())),
            // Only the checkpoint knows how many rows each has.
            (names, BaseWeights::Checkpoint(checkpoint)) => tensors.extend(
                names.iter().filter_map(|name| Some((name.clone(), checkpoint.describe(name).ok()?.1))),
            ),
            (_, BaseWeights::Graph(_)) => {}
        }
    }
    let names = || tensors.iter().map(|(name, _)| name.as_str());
    let pairs =
        keys::identify_network(names()).map(|(network, _)| keys::pairs(network, names())).unwrap_or_default();
    Some(Target::new(component, tensors.clone(), &pairs))
}
