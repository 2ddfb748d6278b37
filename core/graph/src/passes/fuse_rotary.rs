use super::{
    rewrite::{fused_node, rewrite},
    uses::{Uses, is_op, pairs},
};
use crate::{Graph, ValueId};

/// Fuses rotary position embeddings of neighbours, x · cos + turned · sin, into `RotatePairs`. `turned` has the neighbours (a, b) of the
/// last axis of x as (−b, a), by two slices. Both may be widened by casts. cos and sin have all elements of that axis. Returns the number of
/// fused nodes.
pub fn fuse_rotary(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        is_op(n, "Add").then_some(())?;
        let inputs = pairs(n)?.into_iter().find_map(|(plain, turned)| {
            let (plain, turned) = (uses.made_by(plain, "Mul")?, uses.made_by(turned, "Mul")?);
            let products = pairs(plain)?.into_iter().flat_map(|a| Some(pairs(turned)?.map(|b| (a, b))));
            products.flatten().find_map(|((x, cos), (y, sin))| {
                let origin = turned_neighbours(uses, before_cast(uses, y))?;
                let same = origin == before_cast(uses, x) && uses.dtype(x) == uses.dtype(y);
                let fits = uses.is_float(x) && uses.same_shape(x, n.output(0)?);
                let whole_rows = [cos, sin].iter().all(|factor| uses.last_dim(*factor) == uses.last_dim(x));
                (same && fits && whole_rows).then_some([x, cos, sin])
            })
        })?;
        Some(vec![fused_node(n, "RotatePairs", &inputs, [])])
    })
}

/// The value before one cast between floating-point types.
fn before_cast(uses: &Uses<'_>, id: ValueId) -> ValueId {
    let from = uses.made_by(id, "Cast").and_then(|cast| cast.input(0));
    from.filter(|from| uses.is_float(*from) && uses.is_float(id)).unwrap_or(id)
}

/// The value that `id` turns: its neighbours (a, b) along the last axis become (−b, a).
fn turned_neighbours(uses: &Uses<'_>, id: ValueId) -> Option<ValueId> {
    let joined = uses.made_by(uses.made_by(id, "Reshape")?.input(0)?, "Concat")?;
    let &[Some(first), Some(second)] = &joined.inputs[..] else { return None };
    let negated = uses.made_by(alone(uses, first)?, "Neg")?.input(0)?;
    let (origin, rank) = (every_other(uses, negated, 1)?, uses.rank(id)?);
    let is_last = joined.int("axis").is_some_and(|axis| axis == -1 || axis == rank as i64);
    let fits =
        is_last && every_other(uses, alone(uses, second)?, 0)? == origin && uses.same_shape(origin, id);
    fits.then_some(origin)
}

/// The value to which an `Unsqueeze` adds a last axis.
fn alone(uses: &Uses<'_>, id: ValueId) -> Option<ValueId> {
    let node = uses.made_by(id, "Unsqueeze")?;
    let (x, axes) = (node.input(0)?, uses.ints(node, 1)?);
    (axes == [-1] || axes == [uses.rank(x)? as i64]).then_some(x)
}

/// The value from which `id` takes every other element of the last axis, starting at `first`. That axis must have an even length.
fn every_other(uses: &Uses<'_>, id: ValueId, first: i64) -> Option<ValueId> {
    let slice = uses.made_by(id, "Slice")?;
    let x = slice.input(0)?;
    let [start, end, axis, step] = [1, 2, 3, 4].map(|i| uses.ints(slice, i).filter(|ints| ints.len() == 1));
    let (len, rank) = (uses.last_dim(x)?, uses.rank(x)? as i64);
    let last = [-1, rank - 1].contains(&axis?[0]);
    (last && start?[0] == first && end?[0] >= len as i64 && step?[0] == 2 && len.is_multiple_of(2))
        .then_some(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute, Tensor,
        passes::testing::{check, ops},
        testing::{Model, model},
    };
    use sdrun_abi::DType;

    /// The rotation as PyTorch's exporter writes it. `x` has the type of the input, and the rotation computes in f32.
    fn file(dtype: DType, second: i64, cos: &str) -> Model {
        let ints = |values: &[i64]| Tensor::from_i64s(values);
        let mut file = model(17).input("x", dtype, "1 n 3 8").output("y", "1 n 3 8");
        file = file.input("cos", DType::F32, cos).input("sin", DType::F32, "1 n 1 8");
        for (name, value) in
            [("zero", 0), ("one", 1), ("two", 2), ("three", 3), ("last", -1), ("end", i64::MAX)]
        {
            file = file.initializer(name, &ints(&[value]));
        }
        let start = if second == 0 { "zero" } else { "one" };
        file.initializer("shape", &ints(&[1, -1, 3, 8]))
            .node("Slice", &["x", start, "end", "three", "two"], &["odd"])
            .node("Slice", &["x", "zero", "end", "three", "two"], &["even"])
            .node("Neg", &["odd"], &["negated"])
            .node("Unsqueeze", &["negated", "last"], &["a"])
            .node("Unsqueeze", &["even", "last"], &["b"])
            .node_with("Concat", &["a", "b"], &["joined"], [("axis", Attribute::Int(-1))])
            .node("Reshape", &["joined", "shape"], &["turned"])
            .node_with("Cast", &["x"], &["wide"], [("to", Attribute::Int(1))])
            .node_with("Cast", &["turned"], &["turned wide"], [("to", Attribute::Int(1))])
            .node("Mul", &["wide", "cos"], &["p"])
            .node("Mul", &["sin", "turned wide"], &["q"])
            .node("Add", &["q", "p"], &["y"])
    }

    #[test]
    fn rotations_of_neighbours() {
        for dtype in [DType::F32, DType::F16] {
            let graph = check(&file(dtype, 1, "1 n 1 8"), fuse_rotary, 1);
            assert_eq!(ops(&graph), ["Cast", "RotatePairs"], "{dtype}");
        }
    }

    #[test]
    fn what_only_looks_like_one() {
        // The same neighbours twice, factors that enlarge x, and one factor for all elements.
        check(&file(DType::F32, 0, "1 n 1 8"), fuse_rotary, 0);
        check(&file(DType::F32, 1, "5 n 1 8"), fuse_rotary, 0);
        check(&file(DType::F32, 1, "1 n 1 1"), fuse_rotary, 0);
    }
}
