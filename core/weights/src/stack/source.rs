//! The tensors of a stack, made on demand.

use super::{BaseWeights, WeightStack};
use crate::{
    BoundTensor, StateDict, Transform,
    adapter::{Delta, DoraRule, Merge, largest},
    layout::{same_but_for_ones, transpose},
    memory::{Buffer, lock},
};
use sdrun_abi::{DType, EncodedWeight, Error, Hint, Result, TRANSPOSED, TakeRows, Weight, WeightSource};
use std::hash::{DefaultHasher, Hash, Hasher};

impl WeightStack {
    /// The binding of an initializer; `None` where only the graph's own weights have it.
    fn bound(&self, name: &str) -> Result<Option<&BoundTensor>> {
        match (self.index.get(name), &self.base.weights) {
            (Some(i), _) => Ok(Some(&self.binding.tensors[*i])),
            (None, BaseWeights::Graph(_)) => Ok(None),
            (None, BaseWeights::Checkpoint(_)) => Err(Error::not_found(format!(
                "weight {name:?} of the graph has no binding, so no checkpoint has it"
            ))
            .with_hint(Hint::BindByValue)),
        }
    }

    /// Whether an adapter or an embedding changes it.
    pub(super) fn is_changed(&self, bound: &BoundTensor) -> bool {
        let embedded = |name: &String| self.token_rows.iter().any(|rows| rows.table == *name);
        bound.sources.iter().any(|name| self.deltas.contains_key(name) || embedded(name))
    }

    /// Type and rows of a tensor of the checkpoint, whose shape is checked against the graph's.
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

    /// What adapters change in a tensor of this shape.
    fn merge_of(&self, name: &str, shape: &[usize]) -> Result<Merge> {
        let deltas = self.deltas.get(name).into_iter().flatten();
        let deltas: Vec<(&Delta, f32)> = deltas.map(|(delta, strength)| (delta, *strength)).collect();
        Merge::new(shape, &deltas)
    }

    /// Writes one tensor, changed, in the graph's type, in the layout of the state dict or transposed.
    fn merge(
        &self,
        name: &str,
        shape: &[usize],
        base: (DType, &[u8]),
        (dtype, out): (DType, &mut [u8]),
        transposed: bool,
    ) -> Result<()> {
        let merge = self.merge_of(name, shape)?;
        let done = match transposed {
            true => merge.transposed(base, (dtype, out)),
            false => merge.tensor(base, (dtype, out)),
        };
        done.map_err(|error| Error { message: format!("weight {name:?}: {}", error.message), ..error })?;
        // A token table is never transposed.
        self.token_rows.iter().filter(|rows| rows.table == name).try_for_each(|rows| rows.write(dtype, out))
    }

    /// The weight that comes from one tensor of the state dict, changed.
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

    /// Whether [`get`](WeightSource::get) is sure to deliver a weight of a checkpoint, or a changed one of the graph, from bounds on its
    /// values. False says nothing. The first call reads the tensors that the weight comes from, but computes none.
    fn surely_fits(&self, bound: &BoundTensor) -> Result<bool> {
        self.describe(&bound.name)?;
        let (whole, changed) = (bound.sources.len() == 1, self.is_changed(bound));
        for name in &bound.sources {
            let (base, base_name): (&dyn WeightSource, _) = match &self.base.weights {
                BaseWeights::Graph(_) if !whole => return Ok(false),
                BaseWeights::Graph(graph) => (&**graph, &bound.name),
                BaseWeights::Checkpoint(checkpoint) => (&**checkpoint, name),
            };
            if whole && !changed {
                return base.get(base_name).map(|_| true);
            }
            if self.token_rows.iter().any(|rows| rows.table == *name) {
                return Ok(false);
            }
            let known = lock(&self.base.largest).get(name).copied();
            let weight = if known.is_none() { Some(base.get(base_name)?) } else { None };
            let find = || {
                let found = weight.and_then(|weight| largest(weight.data(), weight.dtype));
                *lock(&self.base.largest).entry(name.clone()).or_insert(found)
            };
            let (dtype, shape) = base.describe(base_name)?;
            let shape = if whole { &bound.source_shape } else { &shape };
            if !self.merge_of(name, shape)?.surely_fits(dtype, bound.dtype, || known.unwrap_or_else(find)) {
                return Ok(false);
            }
        }
        Ok(true)
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

    /// A weight of the graph itself: changed in the layout of the state dict, then put back into that of the graph.
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
                "weight {:?} of the graph fuses several tensors of a checkpoint; adapters need the checkpoint to change it",
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

    fn check(&self, name: &str) -> Result<()> {
        match (&self.base.weights, self.bound(name)?) {
            (BaseWeights::Graph(graph), bound) if !bound.is_some_and(|bound| self.is_changed(bound)) => {
                graph.check(name)
            }
            (_, Some(bound)) if self.surely_fits(bound)? => Ok(()),
            _ => self.get(name).map(drop),
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

    /// Where the graph's initializer is one whole tensor of the checkpoint that nothing changes, or its transpose: the blocks of the
    /// file, or its plain values.
    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        let bound = self.bound(name)?;
        if bound.is_some_and(|bound| self.is_changed(bound)) {
            return Ok(None);
        }
        let (checkpoint, bound) = match (&self.base.weights, bound) {
            (BaseWeights::Graph(graph), _) => return graph.encoded(name, encodings),
            (BaseWeights::Checkpoint(checkpoint), Some(bound)) => (checkpoint, bound),
            (BaseWeights::Checkpoint(_), None) => return Ok(None),
        };
        let ([source], &[rows, columns]) = (&*bound.sources, &*bound.source_shape) else { return Ok(None) };
        let transposed = bound.transform == Transform::Transpose && bound.shape == [columns, rows];
        if !transposed && bound.shape != bound.source_shape {
            return Ok(None);
        }
        let fits = |name: &&str| name.ends_with(TRANSPOSED) == transposed;
        let names: Vec<&str> =
            encodings.iter().copied().filter(fits).map(|name| name.trim_end_matches(TRANSPOSED)).collect();
        let (dtype, _) = self.checkpoint_shape(&**checkpoint, bound, source)?;
        let blocks = checkpoint.encoded(source, &names)?.filter(|weight| weight.shape == bound.source_shape);
        let weight = match blocks {
            None if names.contains(&dtype.name()) => Some(EncodedWeight::plain(checkpoint.get(source)?)),
            blocks => blocks,
        };
        Ok(weight.map(|mut weight| {
            if transposed {
                weight.encoding.push_str(TRANSPOSED);
            }
            weight.shape.clone_from(&bound.shape);
            weight
        }))
    }

    /// Delivers an initializer that adapters change, if it is one whole tensor of the checkpoint or its transpose.
    fn rows(&self, name: &str, transposed: bool, step: usize, take: TakeRows<'_>) -> Result<bool> {
        let (BaseWeights::Checkpoint(checkpoint), Some(bound)) = (&self.base.weights, self.bound(name)?)
        else {
            return Ok(false);
        };
        let turned = bound.transform == Transform::Transpose;
        let mut shape = if turned { bound.source_shape.clone() } else { bound.shape.clone() };
        let ([source], Some(rows)) = (&*bound.sources, shape.first().copied()) else { return Ok(false) };
        if !self.deltas.contains_key(source)
            || self.token_rows.iter().any(|rows| rows.table == *source)
            || turned != transposed
            || turned && bound.shape.len() != 2
            || bound.source_shape.first() != Some(&rows)
        {
            return Ok(false);
        }
        self.checkpoint_shape(&**checkpoint, bound, source)?;
        let weight = checkpoint.get(source)?;
        let row = bytes_of(bound.dtype, &shape)? / rows.max(1);
        self.merge_of(source, &bound.source_shape)?
            .strips((weight.dtype, weight.data()), bound.dtype, step, &mut |first, strip| {
                shape[0] = strip.len() / row.max(1);
                take(first, Weight::new(bound.dtype, shape.clone(), strip)?)
            })
            .map_err(|error| Error { message: format!("weight {source:?}: {}", error.message), ..error })
    }

    fn version(&self, name: &str) -> Option<u128> {
        let bound = self.index.get(name).map(|i| &self.binding.tensors[*i]);
        let adapters = self.layers.iter().filter(|layer| layer.strength != 0.0);
        let adapters = adapters.map(|layer| (layer.id, layer.strength.to_bits(), layer.dora));
        let embeddings = self.token_rows.iter().map(|rows| (rows.id, 0, None));
        let changes: Vec<(u64, u32, Option<DoraRule>)> =
            match bound.is_some_and(|bound| self.is_changed(bound)) {
                true => adapters.chain(embeddings).collect(),
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
