//! A component's tensors under diffusers' names, made from the file's on demand.

use super::{container::Container, layout::Part};
use crate::{
    StateDict,
    keys::{Fusion, Naming, split_rows},
    layout::transpose,
    memory::zeroed,
};
use sdrun_abi::{DType, EncodedWeight, Error, Result, Weight, WeightSource};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::Arc,
};

/// Names that messages list before they count the rest.
const NAMED: usize = 5;

/// Where a tensor comes from.
#[derive(Clone, Debug)]
struct Source {
    /// Key in the file.
    key: String,
    fusion: Fusion,
    /// Index and number of the fused tensors.
    part: (usize, usize),
}

/// One component of a checkpoint.
#[derive(Debug)]
pub(super) struct ComponentWeights {
    container: Arc<dyn Container>,
    sources: BTreeMap<String, Source>,
    /// Other names of tensors.
    aliases: HashMap<String, String>,
    /// Describes the component in errors about missing tensors.
    lacks: String,
}

/// How a tensor is made from the one in the file.
enum Step {
    Whole,
    Reshaped,
    Rows(Range<usize>),
    Transposed,
    SwappedHalves,
}

impl ComponentWeights {
    pub(super) fn new(container: Arc<dyn Container>, part: &Part) -> Self {
        let mut sources = BTreeMap::new();
        for pair in &part.table.pairs {
            for (index, name) in pair.diffusers.iter().enumerate() {
                let (own, fusion, count) = match part.naming {
                    Naming::Original => (&pair.original, pair.fusion, pair.diffusers.len()),
                    // Some converters leave the autoencoder's attention as convolutions.
                    Naming::Diffusers if pair.fusion == Fusion::Conv1x1 => (name, pair.fusion, 1),
                    Naming::Diffusers => (name, Fusion::Same, 1),
                };
                if let Some(key) = part.keys.get(own) {
                    let source = Source { key: key.clone(), fusion, part: (index, count) };
                    sources.insert(name.clone(), source);
                }
            }
        }
        let missing = &part.table.missing;
        let lacks = if missing.is_empty() {
            String::new()
        } else {
            format!("; of the network it seems to be it lacks {}", first_few(missing))
        };
        ComponentWeights {
            container,
            sources,
            aliases: part.aliases(),
            lacks: format!("{}{lacks}", part.title()),
        }
    }

    /// Resolves another name of a tensor to its own.
    pub(super) fn canonical(&self, name: &str) -> Option<&str> {
        let entry = |name: &str| self.sources.get_key_value(name).map(|(name, _)| name.as_str());
        entry(name).or_else(|| entry(self.aliases.get(name)?))
    }

    fn find(&self, name: &str) -> Result<&Source> {
        self.canonical(name)
            .and_then(|name| self.sources.get(name))
            .ok_or_else(|| Error::not_found(format!("there is no tensor {name:?} in {}", self.lacks)))
    }

    /// The step that makes a tensor, with its type and shape.
    fn plan(&self, source: &Source) -> Result<(Step, DType, Vec<usize>)> {
        let (dtype, mut shape) = self.container.describe(&source.key)?;
        let wrong = |what: &str| {
            let (key, dims) = (&source.key, self.container.stored(&source.key).map(|(_, shape)| shape));
            Error::invalid(format!("tensor {key:?} has shape {:?}, which {what}", dims.unwrap_or_default()))
                .with_hint("the file is not of the layout its other keys have")
        };
        let step = match source.fusion {
            Fusion::Same => Step::Whole,
            Fusion::Conv1x1 => match &shape[..] {
                [o, i, 1, 1] => {
                    shape = vec![*o, *i];
                    Step::Reshaped
                }
                [_, _] => Step::Whole,
                _ => return Err(wrong("is no 1x1 convolution")),
            },
            Fusion::Transposed => match &mut shape[..] {
                [rows, columns] => {
                    std::mem::swap(rows, columns);
                    Step::Transposed
                }
                _ => return Err(wrong("is no matrix")),
            },
            Fusion::SwappedHalves => {
                if shape.first().is_none_or(|rows| rows % 2 != 0) {
                    return Err(wrong("has no halves"));
                }
                Step::SwappedHalves
            }
            Fusion::Rows => {
                let (index, count) = source.part;
                let total = shape.first().copied().unwrap_or(0);
                let range = split_rows(count, total, self.hidden(source, &shape))
                    .and_then(|ranges| ranges.into_iter().nth(index));
                let Some(range) = range else {
                    return Err(wrong(&format!("does not divide into {count} parts")));
                };
                if let Some(rows) = shape.first_mut() {
                    *rows = range.len();
                }
                Step::Rows(range)
            }
        };
        Ok((step, dtype, shape))
    }

    /// The model's width: the columns of the fused weight, also for its bias.
    fn hidden(&self, source: &Source, shape: &[usize]) -> Option<usize> {
        if let [_, columns] = shape {
            return Some(*columns);
        }
        let weight = format!("{}weight", source.key.strip_suffix("bias")?);
        self.container.stored(&weight).and_then(|(_, shape)| shape.get(1).copied())
    }

    /// The number of elements, and the number of tensors in the file by element type.
    pub(super) fn sizes(&self) -> (u64, BTreeMap<String, usize>) {
        let (mut elements, mut dtypes) = (0u64, BTreeMap::new());
        let mut keys: Vec<&str> = self.sources.values().map(|source| &*source.key).collect();
        keys.sort_unstable();
        keys.dedup();
        for (dtype, shape) in keys.into_iter().filter_map(|key| self.container.stored(key)) {
            elements = elements.saturating_add(shape.iter().fold(1, |n: u64, d| n.saturating_mul(*d as u64)));
            *dtypes.entry(dtype).or_default() += 1;
        }
        (elements, dtypes)
    }

    /// Names and shapes of all tensors whose shapes fit the layout.
    pub(super) fn shapes(&self) -> Vec<(&str, Vec<usize>)> {
        let shape = |(name, source)| Some((String::as_str(name), self.plan(source).ok()?.2));
        self.sources.iter().filter_map(shape).collect()
    }
}

/// `a, b, c, d, e and 3 more`.
pub(super) fn first_few(names: &[String]) -> String {
    let shown = names.iter().take(NAMED).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

impl WeightSource for ComponentWeights {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let source = self.find(name)?;
        let (step, dtype, shape) = self.plan(source)?;
        match step {
            Step::Whole => self.container.read(&source.key, None),
            // The same elements in the same order.
            Step::Reshaped => {
                let mut weight = self.container.read(&source.key, None)?;
                weight.shape = shape;
                Ok(weight)
            }
            Step::Rows(rows) => self.container.read(&source.key, Some(rows)),
            Step::Transposed => {
                let whole = self.container.read(&source.key, None)?;
                let mut data = zeroed(whole.data().len())?;
                transpose(whole.data(), dtype.size(), &whole.shape, &mut data);
                Weight::new(dtype, shape, data)
            }
            Step::SwappedHalves => {
                let whole = self.container.read(&source.key, None)?;
                let (first, second) = whole.data().split_at(whole.data().len() / 2);
                let mut data = zeroed(whole.data().len())?;
                let (front, back) = data.split_at_mut(second.len());
                front.copy_from_slice(second);
                back.copy_from_slice(first);
                Weight::new(dtype, shape, data)
            }
        }
    }

    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        self.plan(self.find(name)?).map(|(_, dtype, shape)| (dtype, shape))
    }

    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        let source = self.find(name)?;
        match self.plan(source)?.0 {
            Step::Whole => self.container.encoded(&source.key, None, encodings),
            Step::Rows(rows) => self.container.encoded(&source.key, Some(rows), encodings),
            Step::Reshaped | Step::Transposed | Step::SwappedHalves => Ok(None),
        }
    }
}

impl StateDict for ComponentWeights {
    fn names(&self) -> Vec<&str> {
        self.sources.keys().map(String::as_str).collect()
    }
}
