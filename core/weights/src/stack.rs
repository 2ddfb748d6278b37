//! A checkpoint with adapters, as the weights of one graph.

use crate::{
    Adapter, Binding, BoundTensor, Checkpoint, Component, OnnxWeights, StateDict, Transform,
    adapter::{self, Delta, DoraRule, Merge, Target},
    checkpoint::Unread,
    embedding::Embedding,
    fit, identity, keys,
    layout::{same_but_for_ones, transpose},
    memory::{Buffer, Buffers},
    words::{EmbeddingReport, Word},
};
use sdrun_abi::{DType, Error, Hint, Result, Weight, WeightSource};
use serde::Serialize;
use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    sync::Arc,
};

/// The weights of a graph: those of a checkpoint, or the graph's own, changed by any number of adapters.
///
/// Every tensor is made when it is asked for, from the pristine base: converted to f32, all changes added in the order in
/// which they were given, rounded once to the graph's type. What no adapter touches is handed on as it lies in its file.
/// A stack never changes, so `A`, then `B`, then `A` again gives the bits of `A`; a clone is cheap and shares the base,
/// and [`WeightSource::version`] tells a session which tensors differ between two stacks.
#[derive(Clone)]
pub struct WeightStack {
    binding: Arc<Binding>,
    /// Numbers of the binding's entries by initializer name.
    index: Arc<HashMap<String, usize>>,
    base: Arc<Base>,
    unread: Arc<Unread>,
    /// For finding the modules of adapters; `None` where the graph is no part of a diffusion pipeline.
    target: Arc<Option<Target>>,
    layers: Vec<Layer>,
    /// By state-dict name: changes in the order of their layers, with strengths.
    deltas: BTreeMap<String, Vec<(Delta, f32)>>,
    words: Vec<Word>,
    buffers: Buffers,
}

/// What adapters change.
struct Base {
    id: u64,
    weights: BaseWeights,
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
    /// Leave out modules that do not fit instead of refusing the adapter.
    pub lenient: bool,
    /// The rule for DoRA; `None`: that of the program whose spelling the file has, ComfyUI's for kohya's and LyCORIS' names,
    /// PEFT's for its own.
    pub dora: Option<DoraRule>,
}

impl AdapterUse {
    /// The same strength everywhere, strict.
    pub fn at(strength: f32) -> Self {
        AdapterUse { strength, text_encoder_strength: strength, lenient: false, dora: None }
    }
}

/// What became of one adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// Its file.
    pub file: PathBuf,
    /// The factor that was used.
    pub strength: f32,
    /// What became of its modules.
    #[serde(flatten)]
    pub modules: adapter::Report,
}

impl WeightStack {
    /// The weights of a checkpoint: of the component that `binding`'s graph is, or, where that is not known, of the only
    /// component that has all its tensors.
    ///
    /// `NotFound` where the checkpoint has no such component. `InvalidArgument` where it is of another model, where
    /// tensors have other shapes, or where the component has tensors that the graph does not read and that change the
    /// result (a guidance embedding, further blocks). The hint names the built-in models that fit. Tensors that are
    /// missing or cannot be read are reported when the weight is read.
    pub fn of_checkpoint(binding: Binding, checkpoint: &Checkpoint) -> Result<Self> {
        Self::checked(binding, checkpoint, false)
    }

    /// As [`of_checkpoint`](WeightStack::of_checkpoint), and tensors that the graph does not read are left out even
    /// where they change the result; [`unread`](WeightStack::unread) lists them.
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
            base: Arc::new(Base { id: identity::next(), weights }),
            unread: Arc::default(),
            target: Arc::new(target),
            layers: Vec::new(),
            deltas: BTreeMap::new(),
            words: Vec::new(),
            buffers: Buffers::default(),
        }
    }

    /// The part of the pipeline the graph is, where that is known.
    pub fn component(&self) -> Option<Component> {
        self.binding.component
    }

    /// The base without any adapter or embedding.
    pub fn pristine(&self) -> Self {
        WeightStack { layers: Vec::new(), deltas: BTreeMap::new(), words: Vec::new(), ..self.clone() }
    }

    /// Whether there is no adapter and no embedding.
    pub fn is_pristine(&self) -> bool {
        self.layers.is_empty() && self.words.is_empty()
    }

    /// Puts an adapter on top.
    ///
    /// `FailedPrecondition` where the graph is no part of a diffusion pipeline; `InvalidArgument` where nothing of the
    /// adapter fits, or, unless [`AdapterUse::lenient`], where something that should fit does not. The error says what
    /// the adapter was made for, as far as that can be told.
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
            Component::Denoiser | Component::Vae | Component::ControlNet => how.strength,
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

    /// Has tokens stand for a learned word: the rows of the token table from `token` on become its vectors, whatever adapters
    /// do to that table. Which tokens, only whoever turns prompts into tokens can say: ones that no prompt contains otherwise.
    ///
    /// `FailedPrecondition` where the graph is no text encoder; `InvalidArgument` where the embedding has no vectors for it or
    /// the tokens are not there.
    pub fn with_embedding(mut self, embedding: &Embedding, token: usize) -> Result<Self> {
        self.words.push(Word::new(embedding, self.binding.component, &self.binding.tensors, token)?);
        Ok(self)
    }

    /// Where the words of each embedding are, in order.
    pub fn embeddings(&self) -> impl Iterator<Item = &EmbeddingReport> {
        self.words.iter().map(|word| &word.report)
    }

    /// What became of each adapter, in order.
    pub fn reports(&self) -> impl Iterator<Item = &LayerReport> {
        self.layers.iter().map(|layer| &layer.report)
    }

    /// How many initializers of the graph the adapters and embeddings change.
    pub fn changed(&self) -> usize {
        self.binding.tensors.iter().filter(|tensor| self.is_changed(tensor)).count()
    }

    /// The entry of an initializer; `None` where only the graph's own weights have it.
    fn bound(&self, name: &str) -> Result<Option<&BoundTensor>> {
        match (self.index.get(name), &self.base.weights) {
            (Some(i), _) => Ok(Some(&self.binding.tensors[*i])),
            (None, BaseWeights::Graph(_)) => Ok(None),
            (None, BaseWeights::Checkpoint(_)) => Err(Error::not_found(format!(
                "weight {name:?} of the graph is in no binding table, so that no checkpoint has it"
            ))
            .with_hint(Hint::BindByValue)),
        }
    }

    fn is_changed(&self, bound: &BoundTensor) -> bool {
        let words = |name: &String| self.words.iter().any(|word| word.table == *name);
        bound.sources.iter().any(|name| self.deltas.contains_key(name) || words(name))
    }

    /// A tensor of the checkpoint, checked against what the graph wants of it.
    fn checkpoint_shape(
        &self,
        checkpoint: &dyn StateDict,
        bound: &BoundTensor,
        name: &str,
    ) -> Result<(DType, usize)> {
        let (dtype, shape) = checkpoint.describe(name)?;
        let rows = shape.first().copied().unwrap_or(1);
        let fits = match bound.sources.len() {
            1 => same_but_for_ones(&shape, &bound.source_shape),
            _ => shape.get(1..) == bound.source_shape.get(1..),
        };
        if fits {
            return Ok((dtype, rows));
        }
        let message = format!(
            "tensor {name:?} of the checkpoint has shape {shape:?}, the engine takes {:?}",
            bound.source_shape
        );
        Err(Error::invalid(message).with_hint("the checkpoint is of another architecture than the engine"))
    }

    /// One tensor in the layout of the state dict, or transposed, changed, in the graph's type.
    fn merge(
        &self,
        name: &str,
        shape: &[usize],
        base: (DType, &[u8]),
        (dtype, out): (DType, &mut [u8]),
        transposed: bool,
    ) -> Result<()> {
        let deltas: Vec<(&Delta, f32)> =
            self.deltas.get(name).into_iter().flatten().map(|(delta, strength)| (delta, *strength)).collect();
        let merge = Merge::new(shape, &deltas)?;
        let done = match transposed {
            true => merge.transposed(base, (dtype, out)),
            false => merge.tensor(base, (dtype, out)),
        };
        done.map_err(|error| Error { message: format!("weight {name:?}: {}", error.message), ..error })?;
        // A table of tokens is never transposed.
        self.words.iter().filter(|word| word.table == name).try_for_each(|word| word.write(dtype, out))
    }

    /// The weight that one tensor of the state dict makes, changed.
    fn changed_weight(
        &self,
        bound: &BoundTensor,
        name: &str,
        base: (DType, &[u8]),
    ) -> Result<Weight<'static>> {
        let mut data = self.buffers.take(bytes_of(bound.dtype, &bound.source_shape)?)?;
        let transposed = bound.transform == Transform::Transpose && bound.source_shape.len() == 2;
        self.merge(name, &bound.source_shape, base, (bound.dtype, &mut data), transposed)?;
        Weight::new(bound.dtype, bound.shape.clone(), data)
    }

    fn transposed(&self, data: &[u8], dtype: DType, shape: &[usize]) -> Result<Buffer> {
        let mut out = self.buffers.take(data.len())?;
        transpose(data, dtype.size(), shape, &mut out);
        Ok(out)
    }

    fn weight_of_checkpoint<'s>(
        &'s self,
        checkpoint: &'s dyn StateDict,
        bound: &BoundTensor,
    ) -> Result<Weight<'s>> {
        if let ([name], false) = (&*bound.sources, self.is_changed(bound)) {
            self.checkpoint_shape(checkpoint, bound, name)?;
            let mut weight = checkpoint.get(name)?;
            return match bound.transform {
                Transform::Identity | Transform::Reshape => {
                    weight.shape.clone_from(&bound.shape);
                    Ok(weight)
                }
                Transform::Transpose => {
                    let data = self.transposed(weight.data(), weight.dtype, &bound.source_shape)?;
                    Weight::new(weight.dtype, bound.shape.clone(), data)
                }
            };
        }
        if let [name] = &*bound.sources {
            self.checkpoint_shape(checkpoint, bound, name)?;
            let weight = checkpoint.get(name)?;
            return self.changed_weight(bound, name, (weight.dtype, weight.data()));
        }
        let mut data = self.buffers.take(bytes_of(bound.dtype, &bound.source_shape)?)?;
        let mut rest = &mut data[..];
        for name in &bound.sources {
            let (_, rows) = self.checkpoint_shape(checkpoint, bound, name)?;
            let weight = checkpoint.get(name)?;
            let mut shape = bound.source_shape.clone();
            if let Some(first) = shape.first_mut() {
                *first = rows;
            }
            let (part, after) = rest
                .split_at_mut_checked(bytes_of(bound.dtype, &shape)?)
                .ok_or_else(|| rows_differ(bound, rows))?;
            self.merge(name, &shape, (weight.dtype, weight.data()), (bound.dtype, part), false)?;
            rest = after;
        }
        if !rest.is_empty() {
            return Err(rows_differ(bound, bound.sources.len()));
        }
        let data = match bound.transform {
            Transform::Identity | Transform::Reshape => data,
            Transform::Transpose => self.transposed(&data, bound.dtype, &bound.source_shape)?,
        };
        Weight::new(bound.dtype, bound.shape.clone(), data)
    }

    /// A weight of the graph itself: back to the layout of the state dict, changed, and to that of the graph.
    fn weight_of_graph<'s>(&'s self, graph: &'s dyn WeightSource, bound: &BoundTensor) -> Result<Weight<'s>> {
        let weight = graph.get(&bound.name)?;
        if !self.is_changed(bound) {
            return Ok(weight);
        }
        let restored;
        let base = match bound.transform {
            Transform::Identity | Transform::Reshape => weight.data(),
            Transform::Transpose => {
                restored = self.transposed(weight.data(), weight.dtype, &bound.shape)?;
                &restored
            }
        };
        let [name] = &*bound.sources else {
            return Err(Error::unsupported(format!(
                "weight {:?} of the graph is several tensors of a checkpoint in one; adapters change it only with a checkpoint",
                bound.name
            ))
            .with_hint(Hint::GiveWeights));
        };
        self.changed_weight(bound, name, (weight.dtype, base))
    }
}

fn bytes_of(dtype: DType, shape: &[usize]) -> Result<usize> {
    dtype.bytes_of(shape).ok_or_else(|| Error::invalid(format!("a {dtype} tensor {shape:?} is too large")))
}

fn rows_differ(bound: &BoundTensor, rows: usize) -> Error {
    Error::invalid(format!(
        "the tensors {:?} of the checkpoint have {rows} rows, the engine takes {:?}",
        bound.sources, bound.source_shape
    ))
}

impl WeightSource for WeightStack {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        match (&self.base.weights, self.bound(name)?) {
            (BaseWeights::Graph(graph), None) => graph.get(name),
            (BaseWeights::Graph(graph), Some(bound)) => self.weight_of_graph(&**graph, bound),
            (BaseWeights::Checkpoint(checkpoint), Some(bound)) => {
                self.weight_of_checkpoint(&**checkpoint, bound)
            }
            (BaseWeights::Checkpoint(_), None) => {
                Err(Error::internal("a checkpoint without a binding table"))
            }
        }
    }

    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        match (&self.base.weights, self.bound(name)?) {
            (BaseWeights::Graph(graph), Some(bound)) if self.is_changed(bound) => {
                graph.describe(name)?;
                Ok((bound.dtype, bound.shape.clone()))
            }
            (BaseWeights::Graph(graph), _) => graph.describe(name),
            (BaseWeights::Checkpoint(checkpoint), Some(bound)) => {
                let mut found = bound.dtype;
                let mut rows = 0;
                for source in &bound.sources {
                    let part = self.checkpoint_shape(&**checkpoint, bound, source)?;
                    (found, rows) = (part.0, rows + part.1);
                }
                if bound.sources.len() > 1 && bound.source_shape.first() != Some(&rows) {
                    return Err(rows_differ(bound, rows));
                }
                let whole = bound.sources.len() > 1 || self.is_changed(bound);
                Ok((if whole { bound.dtype } else { found }, bound.shape.clone()))
            }
            (BaseWeights::Checkpoint(_), None) => {
                Err(Error::internal("a checkpoint without a binding table"))
            }
        }
    }

    fn version(&self, name: &str) -> Option<u128> {
        let bound = self.index.get(name).map(|i| &self.binding.tensors[*i]);
        let adapters = self.layers.iter().filter(|layer| layer.strength != 0.0);
        let adapters = adapters.map(|layer| (layer.id, layer.strength.to_bits(), layer.dora));
        let words = self.words.iter().map(|word| (word.id, 0, None));
        let changes: Vec<(u64, u32, Option<DoraRule>)> =
            match bound.is_some_and(|bound| self.is_changed(bound)) {
                true => adapters.chain(words).collect(),
                false => Vec::new(),
            };
        let half = |salt: u64| {
            let mut hasher = DefaultHasher::new();
            (salt, self.base.id, &changes).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        Some(half(0) << 64 | half(1))
    }
}

/// What adapters are resolved against, where the graph is part of a pipeline.
fn target(binding: &Binding, weights: &BaseWeights) -> Option<Target> {
    let component = binding.component?;
    let mut tensors: Vec<(String, Vec<usize>)> = Vec::with_capacity(binding.tensors.len());
    for bound in &binding.tensors {
        match (&*bound.sources, weights) {
            ([name], _) => tensors.push((name.clone(), bound.source_shape.clone())),
            // How many rows each has, only the checkpoint knows.
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
