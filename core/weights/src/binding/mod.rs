//! Maps each weight of a graph to its tensor in a checkpoint.
//!
//! An exporter keeps the state-dict names of most weights. But the matrices that it transposes and the normalisation
//! weights that it reshapes get names such as `onnx::MatMul_5647` or `val_28`, whose numbers mean nothing. Only the
//! names of the nodes that use them still contain the module's path. A [`Binding`] is the table of names, transforms and
//! shapes. It comes from one of three places:
//!
//! * [`Binding::from_map`]: a built-in model's weight map;
//! * [`Binding::infer`]: any export, by the names of its weights and nodes;
//! * [`Binding::infer_with_reference`]: the same, compared with the values of the checkpoint that the graph was exported from.
//!
//! | module | holds |
//! |---|---|
//! | `names` | the form of state-dict names; names of other versions and of wrappers; the component they belong to |
//! | `path` | the module path of a node, and an operand's name in that module |
//! | `export` | the component, by the folder of an export |
//! | `infer` | the table by names and paths |
//! | `reference` | the table compared with values |
//! | `report` | what was found and what was not |

mod export;
mod infer;
mod names;
mod path;
mod reference;
mod report;
#[cfg(test)]
mod tests;

pub use report::{Contradiction, ImportReport, Reason, Unbound};

use crate::{Component, Transform, WeightMap};
use sdrun_abi::{DType, Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// Largest rank of a bound tensor.
const MAX_RANK: usize = 8;

/// One weight of a graph and its tensor of the state dict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoundTensor {
    /// Initializer name in the graph.
    #[serde(rename = "init")]
    pub name: String,
    /// Name in the state dict, see [`StateDict`](crate::StateDict). Several are concatenated along the first dimension,
    /// in this order.
    #[serde(rename = "src")]
    pub sources: Vec<String>,
    /// From the state dict's tensor (the concatenated one) to the graph's.
    #[serde(rename = "op")]
    pub transform: Transform,
    /// Shape in the state dict (of the concatenated tensor).
    #[serde(rename = "src_shape")]
    pub source_shape: Vec<usize>,
    /// Shape in the graph.
    pub shape: Vec<usize>,
    /// Element type in the graph.
    pub dtype: DType,
}

/// Maps the weights of one graph to a state dict. Weights that are in no state dict or were not recognised are not listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binding {
    /// Which part of a pipeline the graph is, if its weights show it. Those of T5 and unknown architectures do not.
    pub component: Option<Component>,
    /// The weights, in the graph's order.
    pub tensors: Vec<BoundTensor>,
}

impl Binding {
    /// The table of a built-in model.
    pub fn from_map(map: &WeightMap) -> Self {
        let tensors = map.tensors.iter().map(|tensor| BoundTensor {
            name: tensor.name.clone(),
            sources: vec![tensor.source.clone()],
            transform: tensor.transform,
            source_shape: tensor.source_shape.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
        });
        let mut binding = Binding { component: None, tensors: tensors.collect() };
        binding.component = names::canonicalise(&mut binding.tensors);
        binding
    }

    /// Reads a table from JSON. `DataLoss` if it does not have this format, shapes and transforms contradict one
    /// another, or one initializer is listed twice.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let damaged =
            |why: String| Error::new(ErrorCode::DataLoss, format!("the binding table is damaged: {why}"));
        let binding: Binding = serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))?;
        let mut names = HashSet::new();
        for tensor in &binding.tensors {
            let wrong = |why: &str| damaged(format!("weight {:?} {why}", tensor.name));
            if !names.insert(&*tensor.name) {
                return Err(wrong("appears twice"));
            }
            if tensor.sources.is_empty() {
                return Err(wrong("has no source"));
            }
            if tensor.shape.len().max(tensor.source_shape.len()) > MAX_RANK {
                return Err(wrong("has too many dimensions"));
            }
            if !tensor.transform.fits(&tensor.source_shape, &tensor.shape) {
                return Err(wrong("does not have the shape its transform makes"));
            }
        }
        Ok(binding)
    }

    /// The table as JSON that [`parse`](Binding::parse) reads.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::internal(error.to_string()))
    }

    /// The entry of this initializer, by linear search.
    pub fn get(&self, name: &str) -> Option<&BoundTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}
