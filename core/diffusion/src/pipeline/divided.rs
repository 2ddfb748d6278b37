//! Networks in two pieces: what depends on the prompt or the step alone, and the rest. The first piece runs once for each prompt or step,
//! and its weights can leave the memory before the second is loaded.

use super::{
    Error, Result,
    inputs::Role,
    network::{InputShapes, Piece},
    parts::Part,
};
use sdrun::{
    Shapes,
    abi::DType,
    graph::{Cost, Division, Graph, ValueId},
};
use std::collections::BTreeSet;

/// A network as it is loaded.
pub(super) struct Pieces<'a> {
    /// What is computed before the steps, if that pays.
    pub(super) early: Option<EarlyPiece<'a>>,
    /// The rest, or all.
    pub(super) main: Piece<'a>,
    pub(super) shapes: InputShapes,
    /// Names and shapes of the outputs; no shape if it depends on the prompt.
    pub(super) outputs: Vec<(String, Option<Vec<usize>>)>,
}

/// The piece that is computed before the steps.
pub(super) struct EarlyPiece<'a> {
    pub(super) piece: Piece<'a>,
    pub(super) shapes: InputShapes,
    /// Whether it depends on the timestep.
    pub(super) by_step: bool,
}

/// The most bytes of outputs that are kept.
const MOST: usize = 512 << 20;

impl EarlyPiece<'_> {
    /// Names, types and shapes of its outputs.
    pub(super) fn outputs(&self) -> Vec<(String, DType, Vec<usize>)> {
        let graph = self.piece.model().graph();
        let values = graph.outputs.iter().map(|id| graph.value(*id));
        values.filter_map(|value| Some((value.name.clone(), value.dtype?, value.known_shape()?))).collect()
    }

    /// Bytes of its outputs.
    pub(super) fn bytes(&self) -> usize {
        self.outputs().iter().filter_map(|(_, dtype, shape)| dtype.bytes_of(shape)).sum()
    }

    /// How many runs' outputs are kept: at least one.
    pub(super) fn most(&self) -> usize {
        (MOST / self.bytes().max(1)).max(1)
    }
}

/// How often an input changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Pace {
    Prompt,
    Step,
    Always,
}

fn pace(role: Role) -> Pace {
    match role {
        Role::Latents | Role::Residual => Pace::Always,
        Role::Time => Pace::Step,
        _ => Pace::Prompt,
    }
}

/// The shares of weights and of work from which on dividing pays. Each piece takes a while to load, and passes its values through memory.
const LEAST_WEIGHTS: f64 = 0.1;
const LEAST_WORK: f64 = 0.02;

/// What is computed for each prompt is kept for all steps. It pays if it has more weights than outputs, or takes many times as long to
/// compute as to read (keys and values of attention to the prompt; the hint of a ControlNet).
fn pays_by_prompt(cost: Cost) -> bool {
    cost.weights >= cost.outputs || cost.work >= cost.outputs.saturating_mul(64)
}

/// What is computed for each step is kept for each, and takes as long as before. It pays if far more weights leave the memory (the layers
/// that turn a timestep into scales and shifts).
fn pays_by_step(cost: Cost) -> bool {
    cost.weights >= cost.outputs.saturating_mul(16)
}

/// Divides the network of a part if that pays. An engine for several shapes stays whole, and so does a network whose pieces would exchange
/// other values than floats.
pub(super) fn pieces<'a>(
    part: &'a Part,
    roles: &[(String, Role)],
    shapes: InputShapes,
) -> Result<Pieces<'a>> {
    let graph = part.model.bound_for(&shapes.fixed, &shapes.open).map_err(Error::of(&part.name))?;
    let outputs = graph.outputs.iter().map(|id| graph.value(*id));
    let outputs = outputs.map(|value| (value.name.clone(), value.known_shape())).collect();
    let Some((division, by_step)) = shapes.open.is_empty().then(|| best(&graph, roles)).flatten() else {
        return Ok(Pieces { early: None, main: part.into(), shapes, outputs });
    };
    let (early, late) = division.parts(&graph);
    let shapes = shapes_of(&late).into();
    let name = if by_step { "each step" } else { "each prompt" };
    let early =
        EarlyPiece { shapes: shapes_of(&early).into(), piece: Piece::of(part, Some(name), early), by_step };
    Ok(Pieces { early: Some(early), main: Piece::of(part, None, late), shapes, outputs })
}

/// The division that pays best, and whether its early part depends on the timestep.
fn best(graph: &Graph, roles: &[(String, Role)]) -> Option<(Division, bool)> {
    let slow = |most: Pace| -> BTreeSet<ValueId> {
        let named = |id: &ValueId| roles.iter().find(|(name, _)| *name == graph.value(*id).name);
        let is_slow = |id: &ValueId| named(id).is_some_and(|(_, role)| pace(*role) <= most);
        graph.inputs.iter().copied().filter(is_slow).collect()
    };
    let is_float = |id: &ValueId| graph.value(*id).dtype.is_some_and(DType::is_float);
    let divide = |most, pays: fn(Cost) -> bool| {
        graph.divide(&slow(most), pays).filter(|division| division.between.iter().all(is_float))
    };
    let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    let weights = |division: &Division| share(division.moved.weights, division.whole.weights);
    let work = |division: &Division| share(division.moved.work, division.whole.work);
    let by_prompt = divide(Pace::Prompt, pays_by_prompt)
        .filter(|division| weights(division) >= LEAST_WEIGHTS || work(division) >= LEAST_WORK);
    // Values for each step take more memory than values for each prompt, so they must free far more.
    let enough = by_prompt.as_ref().map_or(0.0, |division| 2.0 * weights(division));
    let by_step = divide(Pace::Step, pays_by_step)
        .filter(|division| weights(division) >= LEAST_WEIGHTS && weights(division) > enough);
    by_step.map(|division| (division, true)).or(by_prompt.map(|division| (division, false)))
}

/// The shapes of a graph's inputs. They must be known.
fn shapes_of(graph: &Graph) -> Shapes {
    let values = graph.inputs.iter().map(|id| graph.value(*id));
    values.filter_map(|value| Some((value.name.clone(), value.known_shape()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::inputs::role;
    use sdrun::{Paths, WeightFiles, abi::NoHost};

    /// What percentage of its weights a model moves to the early piece, and whether that runs for each step.
    fn moved(builtin: &str) -> Option<(u32, bool)> {
        let paths = Paths { data: "/nowhere".into(), cache: "/nowhere".into() };
        let part = Part::of_builtin("network", builtin, WeightFiles::default(), &paths, &NoHost).unwrap();
        let names = part.model.inputs().into_iter().map(|(spec, _)| spec.name);
        let roles: Vec<_> = names.map(|name| (name.clone(), role(&name).unwrap())).collect();
        let pieces = pieces(&part, &roles, part.model.shapes(&Shapes::new()).into()).unwrap();
        let early = pieces.early?;
        let of = |model: &sdrun::Model| -> f64 {
            model.graph().weights().map(|(_, w)| w.shape.iter().product::<usize>() as f64).sum()
        };
        let (moved, whole) = (of(early.piece.model()), of(&part.model));
        assert!((moved + of(pieces.main.model())) / whole < 1.01, "{builtin} has weights twice");
        Some(((100.0 * moved / whole).round() as u32, early.by_step))
    }

    #[test]
    fn models_are_divided_where_it_pays() {
        for (name, expected) in [
            ("sd15/unet", None),
            ("sd21/unet", None),
            ("chroma", None),
            // Keys and values of the prompt.
            ("sdxl/unet", Some((13, false))),
            ("sdxl/unet-inpainting", Some((13, false))),
            ("pixart/sigma", Some((13, false))),
            ("sana/1600m", Some((13, false))),
            // With the hint.
            ("sd15/controlnet", Some((3, false))),
            ("sdxl/controlnet", Some((14, false))),
            // Scales and shifts of the timestep.
            ("sd3/medium", Some((33, true))),
            ("sd35/medium", Some((31, true))),
            ("flux/dev", Some((28, true))),
            ("flux/schnell", Some((27, true))),
        ] {
            assert_eq!(moved(name), expected, "{name}");
        }
    }
}
