//! Passes that reduce the number of transposes and reshapes.

use super::{
    eliminate_identity,
    rewrite::{Fresh, node, rewrite},
    uses::{Uses, is_op, permutation, same_dim},
};
use crate::{Attribute, Dim, Graph, Node, ValueId, fused};

/// Merges each `Reshape`, `Flatten`, `Squeeze` and `Unsqueeze` with such a node before it, and removes chains that
/// restore the original shape. Shapes may have one unknown dimension. Returns the number of merged nodes.
pub fn collapse_reshapes(graph: &mut Graph) -> usize {
    let merged = rewrite(graph, |uses, fresh, n| {
        is_reshape(n).then_some(())?;
        let (x, y) = (n.input(0)?, n.output(0)?);
        let mut origin = x;
        while let Some(before) = uses.producer(origin).filter(|before| is_reshape(before)) {
            origin = before.input(0)?;
        }
        if uses.same_shape(origin, y) {
            return Some(vec![node(n, "Identity", &[origin], Some(y), [])]);
        }
        (origin != x).then_some(())?;
        let target = target(uses.shape(y)?, uses.shape(origin)?)?;
        let target = fresh.shape(&target);
        Some(vec![node(n, "Reshape", &[origin, target], Some(y), [])])
    });
    eliminate_identity(graph);
    merged
}

fn is_reshape(n: &Node) -> bool {
    n.domain.is_empty() && ["Reshape", "Flatten", "Squeeze", "Unsqueeze"].contains(&&*n.op_type)
}

/// The shape constant of a Reshape from `from` to `to`: sizes, 0 for a copied dimension, and at most one -1.
fn target(to: &[Dim], from: &[Dim]) -> Option<Vec<i64>> {
    let copied = |i: usize, d: &Dim| from.get(i).is_some_and(|f| same_dim(f, d));
    let dims: Vec<i64> = to
        .iter()
        .enumerate()
        .map(|(i, d)| match d {
            Dim::Known(n) => i64::try_from(*n).unwrap_or(-1),
            d if copied(i, d) => 0,
            _ => -1,
        })
        .collect();
    // A size of 0 would be read as a copy.
    let zero = to.contains(&Dim::Known(0));
    (dims.iter().filter(|d| **d == -1).count() <= 1 && !zero).then_some(dims)
}

/// Turns each `GatherND` that takes all elements in order into a Reshape; exporters write it for `repeat_interleave`.
/// Returns the number of replaced nodes.
pub fn collapse_gathers(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, fresh, n| {
        (is_op(n, "GatherND") && n.int_or("batch_dims", 0) == 0).then_some(())?;
        let (x, y) = (n.input(0)?, n.output(0)?);
        let (shape, indices) = (uses.shape(x)?, uses.constant(n.input(1)?)?);
        let axes = *indices.shape().last()?;
        let taken: Vec<usize> = shape.get(..axes)?.iter().map(Dim::known).collect::<Option<_>>()?;
        let count = taken.iter().try_fold(1, |n: usize, dim| n.checked_mul(*dim))?;
        (count * axes == indices.len() && count > 0).then_some(())?;
        let in_order = |(row, indices): (usize, &[i64])| {
            let mut rest = row;
            indices.iter().zip(&taken).rev().all(|(index, dim)| {
                let expected = rest % dim;
                rest /= dim;
                *index == expected as i64 || *index == expected as i64 - *dim as i64
            })
        };
        indices.to_few_i64s()?.chunks_exact(axes).enumerate().all(in_order).then_some(())?;
        let target = fresh.shape(&target(uses.shape(y)?, shape)?);
        Some(vec![node(n, "Reshape", &[x, target], Some(y), [])])
    })
}

/// Composes chains of `Transpose`, and removes those that cancel. A transpose of two axes while the outer axes are
/// merged (exporters transpose attention keys this way) counts as one. Returns the number of changed nodes.
pub fn cancel_transposes(graph: &mut Graph) -> usize {
    let changed = rewrite(graph, |uses, _, n| {
        if is_op(n, "Reshape") {
            return batched_transpose(uses, n);
        }
        let (source, perm) = transpose(uses, n)?;
        let (mut origin, mut total) = (source, perm);
        while let Some((before, inner)) = uses.producer(origin).and_then(|before| transpose(uses, before)) {
            total = total.into_iter().map(|axis| inner[axis]).collect();
            origin = before;
        }
        if total.is_sorted() {
            return Some(vec![node(n, "Identity", &[origin], n.output(0), [])]);
        }
        (origin != source).then_some(())?;
        Some(vec![transposed(n, origin, &total, n.output(0))])
    });
    eliminate_identity(graph);
    changed
}

/// The input and permutation of a Transpose.
fn transpose(uses: &Uses<'_>, n: &Node) -> Option<(ValueId, Vec<usize>)> {
    is_op(n, "Transpose").then_some(())?;
    let x = n.input(0)?;
    Some((x, permutation(n, uses.rank(x)?)?))
}

fn transposed(like: &Node, x: ValueId, perm: &[usize], output: Option<ValueId>) -> Node {
    let perm = Attribute::Ints(perm.iter().map(|axis| *axis as i64).collect());
    node(like, "Transpose", &[x], output, [("perm", perm)])
}

/// [a, b, m, n] → [a·b, m, n] → [a·b, n, m] → [a, b, n, m] is a transpose of the last two axes.
fn batched_transpose(uses: &Uses<'_>, n: &Node) -> Option<Vec<Node>> {
    let (source, perm) = transpose(uses, uses.made_by(n.input(0)?, "Transpose")?)?;
    (perm == [0, 2, 1]).then_some(())?;
    let x = uses.made_by(source, "Reshape")?.input(0)?;
    let (whole, matrix, result) = (uses.shape(x)?, uses.shape(source)?, uses.shape(n.output(0)?)?);
    let ([a, b, m, k], [_, matrix_m, matrix_k]) = (whole, matrix) else { return None };
    let back = [a, b, k, m];
    let fits = same_dim(m, matrix_m)
        && same_dim(k, matrix_k)
        && result.len() == 4
        && result.iter().zip(back).all(|(found, expected)| same_dim(found, expected));
    fits.then(|| vec![transposed(n, x, &[0, 1, 3, 2], n.output(0))])
}

/// Moves transposes after operators that commute with them: a `Concat` of equal transposes, elementwise operators
/// with one operand, and normalisations of a last axis that stays last. There they meet other transposes and cancel.
/// Returns the number of nodes that swapped with a transpose.
pub fn sink_transposes(graph: &mut Graph) -> usize {
    let mut moved = 0;
    // Each round moves every transpose past one node; chains in real graphs are short.
    for _ in 0..8 {
        match rewrite(graph, sink) {
            0 => break,
            n => moved += n,
        }
    }
    moved
}

fn sink(uses: &Uses<'_>, fresh: &mut Fresh, n: &Node) -> Option<Vec<Node>> {
    let y = n.output(0)?;
    (n.outputs.len() == 1).then_some(())?;
    let before = |id: ValueId| {
        let (x, perm) = transpose(uses, uses.producer(id).filter(|_| uses.is_used_once(id))?)?;
        Some((x, perm))
    };
    let (inputs, perm, axis) = if is_op(n, "Concat") {
        let mut sources = Vec::with_capacity(n.inputs.len());
        let (_, perm) = before(n.input(0)?)?;
        for id in &n.inputs {
            let (x, other) = before((*id)?)?;
            (other == perm).then_some(())?;
            sources.push(Some(x));
        }
        let axis = n.int("axis")?;
        let axis = usize::try_from(if axis < 0 { axis + perm.len() as i64 } else { axis }).ok()?;
        let axis = *perm.get(axis)? as i64;
        (sources, perm, Some(axis))
    } else {
        moves(uses, n).then_some(())?;
        let (x, perm) = before(n.input(0)?)?;
        if is_last_axis_norm(n) {
            (perm.last() == Some(&(perm.len() - 1))).then_some(())?;
        }
        let mut inputs = n.inputs.clone();
        inputs[0] = Some(x);
        (inputs, perm, None)
    };
    let shape = uses.shape(y).map(|shape| {
        let mut source = shape.to_vec();
        perm.iter().zip(shape).for_each(|(axis, dim)| source[*axis] = dim.clone());
        source
    });
    let inner = fresh.value(uses.dtype(y), shape);
    let mut first = Node { inputs, outputs: vec![Some(inner)], ..n.clone() };
    if let Some(axis) = axis {
        first.attributes.insert("axis".into(), Attribute::Int(axis));
    }
    Some(vec![first, transposed(n, inner, &perm, Some(y))])
}

/// Whether the node commutes with a transpose of input 0.
fn moves(uses: &Uses<'_>, n: &Node) -> bool {
    const UNARY: [&str; 16] = [
        "Abs",
        "Cast",
        "Cos",
        "Erf",
        "Exp",
        "Gelu",
        "HardSwish",
        "Log",
        "Neg",
        "Reciprocal",
        "Relu",
        "Sigmoid",
        "Sin",
        "Sqrt",
        "Swish",
        "Tanh",
    ];
    let known = n.domain.is_empty() || n.domain == fused::DOMAIN;
    let rows = || n.inputs[1..].iter().flatten().all(|id| uses.rank(*id) == Some(1));
    known && (UNARY.contains(&&*n.op_type) || (is_last_axis_norm(n) && rows()))
}

fn is_last_axis_norm(n: &Node) -> bool {
    ["LayerNormalization", "RMSNormalization"].contains(&&*n.op_type) && n.int_or("axis", -1) == -1
}

/// Moves multiplications by a scalar after `Reshape` and `Transpose`, so that attention fusion finds them at its
/// products. Returns the number of moved nodes.
pub fn sink_scales(graph: &mut Graph) -> usize {
    let mut moved = 0;
    for _ in 0..4 {
        match rewrite(graph, |uses, fresh, n| {
            (is_op(n, "Reshape") || is_op(n, "Transpose")).then_some(())?;
            let (x, y) = (n.input(0)?, n.output(0)?);
            let product = uses.producer(x).filter(|_| uses.is_used_once(x))?;
            let (source, _) = uses.scaled(product)?;
            let factor = product.inputs.iter().flatten().position(|id| *id != source)?;
            // The factor must not have a higher rank than the result.
            (uses.constant(product.input(factor)?)?.shape().len() <= uses.rank(y)?).then_some(())?;
            let inner = fresh.value(uses.dtype(y), uses.shape(y).map(<[Dim]>::to_vec));
            let mut first = Node { outputs: vec![Some(inner)], ..n.clone() };
            first.inputs[0] = Some(source);
            let mut second = Node { outputs: n.outputs.clone(), ..product.clone() };
            second.inputs[1 - factor] = Some(inner);
            Some(vec![first, second])
        }) {
            0 => break,
            n => moved += n,
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        passes::testing::{check, noise, ops},
        testing::model,
    };
    use sdrun_abi::DType;

    fn perm(p: &[i64]) -> [(&'static str, Attribute); 1] {
        [("perm", Attribute::Ints(p.to_vec()))]
    }

    #[test]
    fn reshapes_become_one_or_none() {
        let file = model(17)
            .input("x", DType::F32, "2 l 12")
            .initializer("heads", &Tensor::from_i64s(&[0, 0, 3, 4]))
            .initializer("joined", &Tensor::from_i64s(&[0, 0, 12]))
            .initializer("rows", &Tensor::from_i64s(&[-1, 6]))
            .initializer("first", &Tensor::from_i64s(&[0]))
            .node("Reshape", &["x", "heads"], &["h"])
            .node("Reshape", &["h", "joined"], &["j"])
            .node("Exp", &["j"], &["y"])
            .node("Unsqueeze", &["h", "first"], &["u"])
            .node("Reshape", &["u", "rows"], &["r"])
            .node("Exp", &["r"], &["z"])
            .output("y", "2 l 12")
            .output("z", "? 6");
        assert_eq!(ops(&check(&file, collapse_reshapes, 3)), ["Exp", "Reshape", "Exp"]);
    }

    #[test]
    fn gathers_of_all_elements_in_order_become_reshapes() {
        let indices = |shape: &[usize], all: &[i64]| Tensor::from_elements(shape.to_vec(), all).unwrap();
        let file = model(17)
            .input("x", DType::F32, "2 3 n")
            .initializer("order", &indices(&[6, 2], &[0, 0, 0, 1, 0, -1, 1, 0, -1, 1, 1, 2]))
            .initializer("part", &indices(&[5, 2], &[0, 0, 0, 1, 0, 2, 1, 0, 1, 1]))
            .initializer("turned", &indices(&[6, 2], &[0, 0, 1, 0, 0, 1, 1, 1, 0, 2, 1, 2]))
            .initializer("outer", &indices(&[1, 2, 1], &[0, 1]))
            .node("GatherND", &["x", "order"], &["a"])
            .node("GatherND", &["x", "part"], &["b"])
            .node("GatherND", &["x", "turned"], &["c"])
            .node("GatherND", &["x", "outer"], &["d"])
            .output("a", "6 n")
            .output("b", "5 n")
            .output("c", "6 n")
            .output("d", "1 2 3 n");
        let graph = check(&file, collapse_gathers, 2);
        assert_eq!(ops(&graph), ["Reshape", "GatherND", "GatherND", "Reshape"]);
    }

    #[test]
    fn transposes_compose_and_cancel() {
        let file = model(17)
            .input("x", DType::F32, "n 3 4 5")
            .node_with("Transpose", &["x"], &["a"], perm(&[0, 2, 3, 1]))
            .node_with("Transpose", &["a"], &["b"], perm(&[0, 3, 1, 2]))
            .node("Exp", &["b"], &["y"])
            .node_with("Transpose", &["a"], &["c"], perm(&[0, 1, 3, 2]))
            .node("Exp", &["c"], &["z"])
            .output("y", "n 3 4 5")
            .output("z", "n 4 3 5");
        let graph = check(&file, cancel_transposes, 2);
        assert_eq!(ops(&graph), ["Exp", "Transpose", "Exp"]);
        assert_eq!(graph.nodes[1].ints("perm"), Some(&[0, 2, 1, 3][..]));
    }

    #[test]
    fn transposes_sink_to_where_they_meet() {
        let swap = perm(&[0, 2, 1, 3]);
        let file = model(23)
            .input("a", DType::F32, "n 3 4 5")
            .input("b", DType::F32, "n 2 4 5")
            .initializer("w", &noise(&[5], 1))
            .node_with("Transpose", &["a"], &["at"], swap.clone())
            .node_with("RMSNormalization", &["at", "w"], &["an"], [("axis", Attribute::Int(-1))])
            .node("Abs", &["an"], &["as"])
            .node_with("Transpose", &["b"], &["bt"], swap.clone())
            .node("Neg", &["bt"], &["bn"])
            .node_with("Concat", &["as", "bn"], &["c"], [("axis", Attribute::Int(2))])
            .node_with("Transpose", &["c"], &["y"], swap)
            .output("y", "n 5 4 5");
        let both = |graph: &mut Graph| {
            let moved = sink_transposes(graph);
            cancel_transposes(graph);
            moved
        };
        assert_eq!(ops(&check(&file, both, 4)), ["RMSNormalization", "Abs", "Neg", "Concat"]);

        let other = model(23)
            .input("a", DType::F32, "n 3 4 5")
            .initializer("w", &noise(&[4], 1))
            .node_with("Transpose", &["a"], &["at"], perm(&[0, 1, 3, 2]))
            .node_with("RMSNormalization", &["at", "w"], &["y"], [("axis", Attribute::Int(-1))])
            .output("y", "n 3 5 4");
        check(&other, sink_transposes, 0);
    }

    #[test]
    fn factors_sink_below_layout_operators() {
        let file = model(17)
            .input("x", DType::F32, "n 12")
            .initializer("half", &Tensor::scalar(0.5f32))
            .initializer("heads", &Tensor::from_i64s(&[0, 3, 4]))
            .node("Mul", &["half", "x"], &["s"])
            .node("Reshape", &["s", "heads"], &["r"])
            .node_with("Transpose", &["r"], &["t"], perm(&[0, 2, 1]))
            .node("Exp", &["t"], &["y"])
            .output("y", "n 4 3");
        assert_eq!(ops(&check(&file, sink_scales, 2)), ["Reshape", "Transpose", "Mul", "Exp"]);
    }
}
