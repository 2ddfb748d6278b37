//! Assembles the tensors of one module of an adapter into typed changes.

use super::{
    DoraRule,
    key::{Path, Place, Slot},
    metadata::Hints,
    module::{Change, Factor, Fault, Kind, Module, Product},
};
use crate::{SafetensorsWeights, convert::is_convertible};
use sdrun_abi::Result;
use std::collections::BTreeMap;

/// The tensors of a module by role.
pub(super) type Slots = BTreeMap<Slot, Factor>;

/// Makes a module from its tensors.
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

/// Takes matching tensors out of `slots`. Tensors that are left over or do not fit are faults.
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
    let [alpha, mut fixed] = numbers;
    if let (None, None, Some(config)) = (alpha, fixed, hints.peft(module.place)) {
        let ranked = [Slot::Down, Slot::HadaW1B, Slot::LokrW2B, Slot::LokrW1B];
        let rank = ranked.iter().find_map(|slot| slots.get(slot)).map(Factor::rows);
        // An empty factor has its own fault.
        match config.scale(&module.path, rank.filter(|rank| *rank > 0)) {
            Ok(scale) => fixed = Some(scale),
            Err(why) => return Ok(Err(Fault::Unsupported(why))),
        }
        if config.is_dora() && slots.contains_key(&Slot::Up) && !slots.contains_key(&Slot::Magnitude) {
            return Ok(Err(Fault::Incomplete("DoRA's magnitudes are missing".into())));
        }
    }
    let rank_stabilized = hints.is_rank_stabilized();
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
            // Without a rank there is no division; LyCORIS stores alpha all the same.
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
            // LyCORIS applies BOFT to the last dimension of the weight, ComfyUI to the first: not settled.
            let what = if blocks.shape.len() == 4 { "BOFT" } else { "OFT with blocks that are not square" };
            return Ok(Err(Fault::Unsupported(what.into())));
        }
        let rescale = take(Slot::Rescale);
        module.weight.push(Change::Oft { blocks, rescale, constraint: alpha.unwrap_or(0.0) });
    }
    let peft = take(Slot::Magnitude).map(|m| (m, DoraRule::Peft));
    module.magnitude = peft.or(take(Slot::DoraScale).map(|m| (m, DoraRule::ComfyUi)));
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

/// Tells the current factors of GLoRA, `a1 [in, r]`, `a2 [r, in]`, `b1 [out, r]`, `b2 [r, in]`, from those of the first
/// LyCORIS, which swapped the names within each pair. If both readings fit (r = in = out), the current one counts.
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

/// Reports tensors that are left over, empty, or do not fit together.
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
