//! The tensors of one module of an adapter, put together to one typed change of a weight.

use super::{
    key::{Path, Place, Slot},
    metadata::Hints,
};
use crate::{
    SafetensorsWeights,
    convert::{self, BLOCK, is_convertible},
};
use sdrun_abi::{DType, Error, Result, WeightSource};
use serde::Serialize;
use std::{collections::BTreeMap, fmt};

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
    /// A whole weight, bias, or norm to be added.
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
    /// The first dimension; 1 of a scalar.
    pub(super) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }
    /// All dimensions but the first, as one. Saturates, since files can claim anything for empty tensors.
    pub(super) fn columns(&self) -> usize {
        product(self.shape.get(1..).unwrap_or_default())
    }
    pub(super) fn elements(&self) -> usize {
        product(&self.shape)
    }
    /// The dimensions behind the second.
    fn kernel(&self) -> &[usize] {
        self.shape.get(2..).unwrap_or_default()
    }

    /// All values, row-major.
    pub(super) fn values(&self, source: &SafetensorsWeights) -> Result<Vec<f32>> {
        let weight = source.get(&self.key)?;
        if !is_convertible(weight.dtype) {
            let message = format!("{:?} is {}, which adapters do not come in", self.key, weight.dtype);
            return Err(Error::unsupported(message));
        }
        let mut values = vec![0f32; self.elements()];
        for (bytes, block) in weight.data().chunks(BLOCK * weight.dtype.size()).zip(values.chunks_mut(BLOCK))
        {
            convert::load(bytes, weight.dtype, DType::F32, block);
        }
        Ok(values)
    }

    /// The only value, of any number type (trainers store `alpha` as they hold it).
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

pub(super) fn product(shape: &[usize]) -> usize {
    shape.iter().fold(1, |n, d| n.saturating_mul(*d))
}

/// A matrix `[rows, columns]`: a factor, or a product of two, maybe with a core between them.
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
    fn factors(&self) -> Vec<&Factor> {
        match self {
            Product::Full(factor) => vec![factor],
            Product::Two(a, b) => vec![a, b],
            Product::Tucker { core, a, b } => vec![core, a, b],
        }
    }
    /// The rank, where there is one.
    fn rank(&self) -> Option<usize> {
        match self {
            Product::Full(_) => None,
            Product::Two(_, b) | Product::Tucker { b, .. } => Some(b.rows()),
        }
    }
    /// Whether inner dimensions agree.
    fn fits(&self) -> bool {
        match self {
            Product::Full(_) => true,
            Product::Two(a, b) => a.columns() == b.rows() && !a.shape.is_empty() && !b.shape.is_empty(),
            Product::Tucker { core, a, b } => {
                core.shape.len() >= 2 && core.shape[0] == a.rows() && core.shape[1] == b.rows()
            }
        }
    }
}

/// What a module does to a weight.
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

    /// The shape of the weight it was made for; what it cannot tell is `None`.
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

    fn factors(&self) -> Vec<&Factor> {
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

    /// Whether a row of the change needs only its own row of the weight, in any order and number of rows.
    pub(super) fn is_row_local(&self) -> bool {
        !matches!(self, Change::Oft { .. })
    }
}

/// A module of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Module {
    /// As the file spells it.
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) path: Path,
    /// To the weight, in this order.
    pub(super) weight: Vec<Change>,
    /// DoRA's magnitudes, renormalizing the weight after its changes; `true`: one per output, whatever the shape.
    pub(super) magnitude: Option<(Factor, bool)>,
    /// Values added to the bias, and their factor.
    pub(super) bias: Vec<(Factor, f64)>,
    /// Why it cannot be used.
    pub(super) fault: Option<Fault>,
}

/// Why a module is of no use, whatever the network.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Fault {
    Incomplete(String),
    Empty(String),
    Unsupported(String),
}

/// The tensors of a module by what they are.
pub(super) type Slots = BTreeMap<Slot, Factor>;

/// Makes a module of its tensors.
pub(super) fn assemble(
    name: String,
    place: Place,
    path: Path,
    mut slots: Slots,
    hints: &Hints,
    source: &SafetensorsWeights,
) -> Result<Module> {
    let mut module = Module { name, place, path, weight: vec![], magnitude: None, bias: vec![], fault: None };
    module.fault = fill(&mut module, &mut slots, hints, source)?.err();
    Ok(module)
}

/// Takes from `slots` all that belongs together. What is left over, or does not fit, is a fault.
fn fill(
    module: &mut Module,
    slots: &mut Slots,
    hints: &Hints,
    source: &SafetensorsWeights,
) -> Result<Result<(), Fault>> {
    if let Some(what) = slots.keys().find_map(|s| if let Slot::Unsupported(w) = s { Some(*w) } else { None })
    {
        return Ok(Err(Fault::Unsupported(what.into())));
    }
    let mut numbers = [None; 2];
    for (slot, number) in [Slot::Alpha, Slot::Scale].into_iter().zip(&mut numbers) {
        if let Some(factor) = slots.remove(&slot) {
            *number = factor.scalar(source)?;
            if number.is_none() {
                let why = format!("{:?} is {} {:?} and no number", factor.key, factor.dtype, factor.shape);
                return Ok(Err(Fault::Unsupported(why)));
            }
        }
    }
    let [mut alpha, fixed] = numbers;
    if alpha.is_none() && slots.contains_key(&Slot::Up) {
        alpha = hints.alpha(module.place, &module.path);
    }
    let rank_stabilized = hints.is_rank_stabilized(module.place);
    let scale = |rank: usize| fixed.unwrap_or_else(|| scale(alpha, rank, rank_stabilized));

    let mut take = |slot| slots.remove(&slot);
    match (take(Slot::Up), take(Slot::Down)) {
        (Some(up), Some(down)) => {
            let scale = scale(down.rows());
            if let Some(bias) = take(Slot::UpBias) {
                module.bias.push((bias, scale));
            }
            module.weight.push(Change::Lora { up, down, mid: take(Slot::Mid), scale });
        }
        (Some(_), None) => return Ok(Err(Fault::Incomplete("the down factor is missing".into()))),
        (None, Some(_)) => return Ok(Err(Fault::Incomplete("the up factor is missing".into()))),
        (None, None) => {}
    }
    let mut product = |full: Option<Slot>, a, b, core: Option<Slot>| match (
        full.and_then(&mut take),
        take(a),
        take(b),
        core.and_then(&mut take),
    ) {
        (Some(full), None, None, None) => Ok(Some(Product::Full(full))),
        (None, Some(a), Some(b), None) => Ok(Some(Product::Two(a, b))),
        (None, Some(a), Some(b), Some(core)) => Ok(Some(Product::Tucker { core, a, b })),
        (None, None, None, None) => Ok(None),
        _ => Err(()),
    };
    let hada = (
        product(None, Slot::HadaW1A, Slot::HadaW1B, Some(Slot::HadaT1)),
        product(None, Slot::HadaW2A, Slot::HadaW2B, Some(Slot::HadaT2)),
    );
    match hada {
        (Ok(Some(w1)), Ok(Some(w2))) => {
            let scale = scale(w1.rank().unwrap_or(0));
            module.weight.push(Change::Loha { w1, w2, scale });
        }
        (Ok(None), Ok(None)) => {}
        _ => return Ok(Err(Fault::Incomplete("a factor of LoHa is missing".into()))),
    }
    let lokr = (
        product(Some(Slot::LokrW1), Slot::LokrW1A, Slot::LokrW1B, None),
        product(Some(Slot::LokrW2), Slot::LokrW2A, Slot::LokrW2B, Some(Slot::LokrT2)),
    );
    match lokr {
        (Ok(Some(w1)), Ok(Some(w2))) => {
            // Nothing is divided by a rank where nothing has one; LyCORIS then stores alpha all the same.
            let scale = w2.rank().or(w1.rank()).map_or(fixed.unwrap_or(1.0), scale);
            module.weight.push(Change::Lokr { w1, w2, scale });
        }
        (Ok(None), Ok(None)) => {}
        _ => return Ok(Err(Fault::Incomplete("a factor of LoKr is missing or there twice".into()))),
    }
    match [Slot::A1, Slot::A2, Slot::B1, Slot::B2].map(&mut take) {
        [Some(a1), Some(a2), Some(b1), Some(b2)] => match glora(a1, a2, b1, b2) {
            Ok((change, rank)) => module.weight.push(change.scaled(scale(rank))),
            Err(why) => return Ok(Err(Fault::Unsupported(why))),
        },
        [None, None, None, None] => {}
        _ => return Ok(Err(Fault::Incomplete("a factor of GLoRA is missing".into()))),
    }
    for slot in [Slot::Diff, Slot::NormWeight] {
        module.weight.extend(take(slot).map(|values| Change::Diff { values }));
    }
    module.bias.extend([Slot::DiffBias, Slot::NormBias].into_iter().filter_map(&mut take).map(|b| (b, 1.0)));
    if let Some(w) = take(Slot::Ia3) {
        let Some(flag) = take(Slot::OnInput) else {
            return Ok(Err(Fault::Incomplete("IA3's on_input is missing".into())));
        };
        let on_input = flag.scalar(source)?.is_some_and(|flag| flag != 0.0);
        module.weight.push(Change::Ia3 { w, on_input });
    }
    if let Some(blocks) = take(Slot::OftBlocks) {
        if !matches!(*blocks.shape, [_, m, n] if m == n) {
            let what = if blocks.shape.len() == 4 { "BOFT" } else { "OFT with blocks that are not square" };
            return Ok(Err(Fault::Unsupported(what.into())));
        }
        let rescale = take(Slot::Rescale);
        module.weight.push(Change::Oft { blocks, rescale, constraint: alpha.unwrap_or(0.0) });
    }
    let per_output = take(Slot::Magnitude).map(|m| (m, true));
    module.magnitude = per_output.or(take(Slot::DoraScale).map(|m| (m, false)));
    Ok(check(module, slots))
}

/// `alpha / rank`, or by its root (rank-stabilized LoRA, Kalajdzievski, 2023). No alpha: 1. An alpha of 0 means
/// the rank (LyCORIS).
fn scale(alpha: Option<f64>, rank: usize, rank_stabilized: bool) -> f64 {
    let rank = rank as f64;
    match alpha {
        None => 1.0,
        Some(_) if rank == 0.0 => 0.0,
        Some(alpha) => {
            let alpha = if alpha == 0.0 { rank } else { alpha };
            alpha / if rank_stabilized { rank.sqrt() } else { rank }
        }
    }
}

impl Change {
    fn scaled(mut self, by: f64) -> Self {
        if let Change::Glora { scale, .. } = &mut self {
            *scale = by;
        }
        self
    }
}

/// Tells today's factors of GLoRA, `a1 [in, r]`, `a2 [r, in]`, `b1 [out, r]`, `b2 [r, in]`, from those of the first
/// LyCORIS, where the names were exchanged within a pair. Where both readings fit (r = in = out) it is today's.
fn glora(a1: Factor, a2: Factor, b1: Factor, b2: Factor) -> Result<(Change, usize), String> {
    let equal = |sizes: [usize; 4]| sizes.iter().all(|n| *n == sizes[0]).then_some(sizes[0]);
    let today = equal([a1.columns(), a2.rows(), b1.columns(), b2.rows()])
        .filter(|_| a1.rows() == a2.columns() && a1.rows() == b2.shape.get(1).copied().unwrap_or(1));
    let first = equal([a1.rows(), a2.columns(), b1.rows(), b2.columns()])
        .filter(|_| a2.rows() == a1.columns() && a2.rows() == b1.shape.get(1).copied().unwrap_or(1));
    let Some(rank) = today.or(first) else {
        let shapes = [&a1, &a2, &b1, &b2].map(|f| format!("{:?}", f.shape)).join(", ");
        return Err(format!("GLoRA with factors of shapes {shapes}"));
    };
    Ok((Change::Glora { a1, a2, b1, b2, first: today.is_none(), scale: 1.0 }, rank))
}

/// What is left, what is empty, and what does not fit together.
fn check(module: &Module, left: &Slots) -> Result<(), Fault> {
    if let Some(factor) = left.values().next() {
        return Err(Fault::Incomplete(format!("nothing belongs to {:?}", factor.key)));
    }
    let weights = module.weight.iter().flat_map(Change::factors);
    let others = module.bias.iter().map(|(b, _)| b).chain(module.magnitude.as_ref().map(|(m, _)| m));
    for factor in weights.chain(others) {
        if factor.elements() == 0 {
            return Err(Fault::Empty(format!("{:?} has shape {:?}", factor.key, factor.shape)));
        }
        if !is_convertible(factor.dtype) {
            return Err(Fault::Unsupported(format!("{:?} of type {}", factor.key, factor.dtype)));
        }
    }
    for change in &module.weight {
        let fits = match change {
            Change::Lora { up, down, mid: None, .. } => up.columns() == down.rows() && !down.shape.is_empty(),
            Change::Lora { up, down, mid: Some(mid), .. } => {
                mid.shape.len() >= 2 && mid.shape[0] == up.columns() && mid.shape[1] == down.rows()
            }
            Change::Loha { w1, w2, .. } => w1.fits() && w2.fits() && w1.shape() == w2.shape(),
            Change::Lokr { w1, w2, .. } => w1.fits() && w2.fits() && w1.shape().len() == 2,
            Change::Oft { blocks, rescale, .. } => {
                rescale.as_ref().is_none_or(|r| r.elements() == blocks.rows() * blocks.shape[1])
            }
            Change::Glora { .. } | Change::Ia3 { .. } | Change::Diff { .. } => true,
        };
        if !fits {
            let shapes: Vec<String> =
                change.factors().iter().map(|f| format!("{:?} {:?}", f.key, f.shape)).collect();
            return Err(Fault::Unsupported(format!(
                "factors that do not fit together: {}",
                shapes.join(", ")
            )));
        }
    }
    if module.magnitude.is_some() {
        if module.weight.is_empty() {
            return Err(Fault::Incomplete("DoRA's magnitudes have no LoRA".into()));
        }
        if module
            .weight
            .iter()
            .any(|c| !matches!(c.kind(), Kind::Lora | Kind::Tucker | Kind::Loha | Kind::Lokr))
        {
            return Err(Fault::Unsupported("DoRA of anything but LoRA, LoHa and LoKr".into()));
        }
    }
    if module.weight.is_empty() && module.bias.is_empty() {
        return Err(Fault::Incomplete("it has no factors".into()));
    }
    Ok(())
}
