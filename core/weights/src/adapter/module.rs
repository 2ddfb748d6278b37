//! Modules of an adapter: their tensors and how these change a weight.

use super::{
    DoraRule,
    key::{Path, Place},
};
use crate::{
    SafetensorsWeights,
    convert::{self, BLOCK, is_convertible},
};
use sdrun_abi::{DType, Error, Result, WeightSource};
use serde::Serialize;
use std::fmt;

/// A kind of adapter module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `ΔW = up · down` (Hu et al., 2021), also of convolutions (LoCon).
    Lora,
    /// LoRA with a core tensor between its factors (`lora_mid`; Tucker decomposition).
    Tucker,
    /// `ΔW = (w1a · w1b) ∘ (w2a · w2b)` (FedPara, Nam et al., 2021; LyCORIS).
    Loha,
    /// `ΔW = w1 ⊗ w2` (LyCORIS).
    Lokr,
    /// `ΔW = W · a1 · a2 + b1 · b2` (Chavan et al., 2023; LyCORIS).
    Glora,
    /// `W' = W ∘ (1 + w)`, along inputs or outputs (Liu et al., 2022; LyCORIS).
    Ia3,
    /// `W' = R · W`, R block-diagonal and orthogonal (Qiu et al., 2023; LyCORIS).
    Oft,
    /// A whole weight, bias or norm that is added.
    Diff,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Lora => "LoRA",
            Kind::Tucker => "LoRA (Tucker)",
            Kind::Loha => "LoHa",
            Kind::Lokr => "LoKr",
            Kind::Glora => "GLoRA",
            Kind::Ia3 => "IA3",
            Kind::Oft => "OFT",
            Kind::Diff => "difference",
        })
    }
}

/// A tensor of the adapter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Factor {
    pub(super) key: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

impl Factor {
    /// The first dimension; 1 for a scalar.
    pub(super) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }
    /// The product of all dimensions but the first. Saturates, since a file may state any shape for an empty tensor.
    pub(super) fn columns(&self) -> usize {
        product(self.shape.get(1..).unwrap_or_default())
    }
    pub(super) fn elements(&self) -> usize {
        product(&self.shape)
    }
    /// The dimensions after the second.
    fn kernel(&self) -> &[usize] {
        self.shape.get(2..).unwrap_or_default()
    }

    /// All values, row-major.
    pub(super) fn values(&self, source: &SafetensorsWeights) -> Result<Vec<f32>> {
        values(source, &self.key)
    }

    /// The only value, of any number type: trainers store `alpha` in various types.
    pub(super) fn scalar(&self, source: &SafetensorsWeights) -> Result<Option<f64>> {
        if self.elements() != 1 {
            return Ok(None);
        }
        let weight = source.get(&self.key)?;
        let integer = weight.data().iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
        Ok(match weight.dtype {
            DType::I64 => Some(integer as i64 as f64),
            DType::I32 => Some(f64::from(integer as i32)),
            DType::I16 => Some(f64::from(integer as i16)),
            DType::I8 => Some(f64::from(integer as i8)),
            DType::U8 | DType::Bool | DType::U16 | DType::U32 | DType::U64 => Some(integer as f64),
            dtype if is_convertible(dtype) => self.values(source)?.first().map(|v| f64::from(*v)),
            _ => None,
        })
    }
}

/// All values of a tensor, row-major. `Unimplemented` if adapters do not use its type.
pub(crate) fn values(source: &SafetensorsWeights, key: &str) -> Result<Vec<f32>> {
    let weight = source.get(key)?;
    if !is_convertible(weight.dtype) {
        let message = format!("{key:?} is {}, which adapters do not come in", weight.dtype);
        return Err(Error::unsupported(message));
    }
    let size = weight.dtype.size();
    let mut values = vec![0f32; weight.data().len() / size];
    for (bytes, block) in weight.data().chunks(BLOCK * size).zip(values.chunks_mut(BLOCK)) {
        convert::load(bytes, weight.dtype, DType::F32, block);
    }
    Ok(values)
}

pub(super) fn product(shape: &[usize]) -> usize {
    shape.iter().fold(1, |n, d| n.saturating_mul(*d))
}

/// A matrix `[rows, columns]`: a factor, or a product of two with or without a core between them.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Product {
    /// The factor itself, `[rows, …]`.
    Full(Factor),
    /// `a [rows, r] · b [r, …]`.
    Two(Factor, Factor),
    /// `Σ_ij core[i, j, k…] · a[i, rows] · b[j, in]`: the factors' ranks come first (LyCORIS, `rebuild_tucker`).
    Tucker { core: Factor, a: Factor, b: Factor },
}

impl Product {
    /// The shape of the product.
    pub(super) fn shape(&self) -> Vec<usize> {
        match self {
            Product::Full(factor) => factor.shape.clone(),
            Product::Two(a, b) => [&[a.rows()], b.shape.get(1..).unwrap_or_default()].concat(),
            Product::Tucker { core, a, b } => [&[a.columns(), b.columns()], core.kernel()].concat(),
        }
    }
    pub(super) fn factors(&self) -> Vec<&Factor> {
        match self {
            Product::Full(factor) => vec![factor],
            Product::Two(a, b) => vec![a, b],
            Product::Tucker { core, a, b } => vec![core, a, b],
        }
    }
    /// The rank, if it has one.
    pub(super) fn rank(&self) -> Option<usize> {
        match self {
            Product::Full(_) => None,
            Product::Two(_, b) | Product::Tucker { b, .. } => Some(b.rows()),
        }
    }
    /// Whether inner dimensions agree.
    pub(super) fn fits(&self) -> bool {
        match self {
            Product::Full(_) => true,
            Product::Two(a, b) => a.columns() == b.rows() && !a.shape.is_empty() && !b.shape.is_empty(),
            Product::Tucker { core, a, b } => {
                core.shape.len() >= 2 && core.shape[0] == a.rows() && core.shape[1] == b.rows()
            }
        }
    }
}

/// How a module changes a weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    /// `scale · up · down`; with `mid`, `scale · Σ_ij mid[i, j, k…] · up[out, i] · down[j, in]`.
    Lora { up: Factor, down: Factor, mid: Option<Factor>, scale: f64 },
    /// `scale · w1 ∘ w2`.
    Loha { w1: Product, w2: Product, scale: f64 },
    /// `scale · w1 ⊗ w2`.
    Lokr { w1: Product, w2: Product, scale: f64 },
    /// `scale · (W · a1 · a2 + b1 · b2)`; `first` marks the names of the first LyCORIS, `W · a2 · a1 + b2 · b1`.
    Glora { a1: Factor, a2: Factor, b1: Factor, b2: Factor, first: bool, scale: f64 },
    /// `W ∘ (1 + w)`.
    Ia3 { w: Factor, on_input: bool },
    /// `R · W`; blocks `[number, size, size]`.
    Oft { blocks: Factor, rescale: Option<Factor>, constraint: f64 },
    /// `+ values`.
    Diff { values: Factor },
}

impl Change {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Change::Lora { mid: None, .. } => Kind::Lora,
            Change::Lora { mid: Some(_), .. } => Kind::Tucker,
            Change::Loha { .. } => Kind::Loha,
            Change::Lokr { .. } => Kind::Lokr,
            Change::Glora { .. } => Kind::Glora,
            Change::Ia3 { .. } => Kind::Ia3,
            Change::Oft { .. } => Kind::Oft,
            Change::Diff { .. } => Kind::Diff,
        }
    }

    /// The shape of the weight it was made for; `None` for sizes that the module does not determine.
    pub(super) fn shape(&self) -> Vec<Option<usize>> {
        let known = |shape: Vec<usize>| shape.into_iter().map(Some).collect();
        match self {
            Change::Lora { up, down, mid: None, .. } => {
                known([&[up.rows()], down.shape.get(1..).unwrap_or_default()].concat())
            }
            Change::Lora { up, down, mid: Some(mid), .. } => {
                known([&[up.rows(), down.columns()], mid.kernel()].concat())
            }
            Change::Loha { w1, .. } => known(w1.shape()),
            Change::Lokr { w1, w2, .. } => {
                let (one, two) = (w1.shape(), w2.shape());
                let at = |shape: &[usize], i: usize| shape.get(i).copied().unwrap_or(1);
                let mut shape: Vec<usize> = (0..2).map(|i| at(&one, i).saturating_mul(at(&two, i))).collect();
                shape.extend(two.get(2..).unwrap_or_default());
                known(shape)
            }
            Change::Glora { b1, b2, first: false, .. } => {
                known([&[b1.rows()], b2.shape.get(1..).unwrap_or_default()].concat())
            }
            Change::Glora { b1, b2, first: true, .. } => {
                known([&[b2.rows()], b1.shape.get(1..).unwrap_or_default()].concat())
            }
            Change::Ia3 { w, on_input: true } => vec![None, Some(w.elements())],
            Change::Ia3 { w, on_input: false } => vec![Some(w.elements()), None],
            Change::Oft { blocks, .. } => vec![Some(blocks.rows().saturating_mul(blocks.shape[1])), None],
            Change::Diff { values } => known(values.shape.clone()),
        }
    }

    pub(super) fn factors(&self) -> Vec<&Factor> {
        match self {
            Change::Lora { up, down, mid, .. } => [up, down].into_iter().chain(mid).collect(),
            Change::Loha { w1, w2, .. } | Change::Lokr { w1, w2, .. } => {
                [w1.factors(), w2.factors()].concat()
            }
            Change::Glora { a1, a2, b1, b2, .. } => vec![a1, a2, b1, b2],
            Change::Ia3 { w, .. } => vec![w],
            Change::Oft { blocks, rescale, .. } => [blocks].into_iter().chain(rescale).collect(),
            Change::Diff { values } => vec![values],
        }
    }

    /// Whether each row of the change depends only on the same row of the weight.
    pub(super) fn is_row_local(&self) -> bool {
        !matches!(self, Change::Oft { .. })
    }
}

/// A module of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Module {
    /// Its name in the file.
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) path: Path,
    /// Changes of the weight, in this order.
    pub(super) weight: Vec<Change>,
    /// DoRA's magnitudes, and the rule that belongs to their spelling.
    pub(super) magnitude: Option<(Factor, DoraRule)>,
    /// Values added to the bias, and their factor.
    pub(super) bias: Vec<(Factor, f64)>,
    /// Why it is unusable.
    pub(super) fault: Option<Fault>,
}

impl Module {
    /// A whole tensor in place of the model's, which cannot be applied.
    pub(super) fn stray(key: &str, place: Place, path: Path) -> Self {
        let fault = Fault::Unsupported("a whole tensor in place of the model's".into());
        let name = key.to_owned();
        Module { name, place, path, weight: vec![], magnitude: None, bias: vec![], fault: Some(fault) }
    }
}

/// Why a module is unusable on any network.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Fault {
    Incomplete(String),
    Empty(String),
    Unsupported(String),
}
