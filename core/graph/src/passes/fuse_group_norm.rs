use super::{
    rewrite::{Fresh, fused_node, node, rewrite},
    uses::{Uses, is_op, pairs, same_dim},
};
use crate::{Attribute, Graph, Node, Tensor, ValueId};

/// Fuses the group normalisation that exporters write before opset 21 into one node: `Reshape` to one channel per
/// group, `InstanceNormalization`, `Reshape` back, per-channel `Mul` and `Add`. Returns the number of fused nodes.
pub fn fuse_group_norm(graph: &mut Graph) -> usize {
    rewrite(graph, group_norm)
}

fn group_norm(uses: &Uses<'_>, fresh: &mut Fresh, n: &Node) -> Option<Vec<Node>> {
    is_op(n, "Add").then_some(())?;
    let (normalised, scale, bias) = pairs(n)?.into_iter().find_map(|(product, bias)| {
        let product = uses.made_by(product, "Mul")?;
        let (back, scale) =
            pairs(product)?.into_iter().find(|(back, _)| uses.made_by(*back, "Reshape").is_some())?;
        Some((back, scale, bias))
    })?;
    let back = uses.made_by(normalised, "Reshape")?;
    let norm = uses.made_by(back.input(0)?, "InstanceNormalization")?;
    let regroup = uses.made_by(norm.input(0)?, "Reshape")?;
    let x = regroup.input(0)?;
    let (group_scale, group_bias) = (norm.input(1)?, norm.input(2)?);

    let (outer, inner) = (uses.shape(x)?, uses.shape(norm.input(0)?)?);
    let (channels, groups) = (outer.get(1)?.known()?, inner.get(1)?.known()?);
    let regroups = inner.len() == 3
        && outer.len() >= 3
        && keeps_batch(uses, regroup, x)
        && channels.is_multiple_of(groups.max(1));
    let restored = uses.same_shape(x, normalised) || is_shape_of(uses, back.input(1)?, x);
    let by_channel = |id| is_per_channel(uses, id, channels, outer.len());
    (regroups && restored && by_channel(scale) && by_channel(bias)).then_some(())?;

    let flat = fresh.shape(&[-1]);
    let mut nodes = Vec::new();
    let mut vector = |id: ValueId| {
        if uses.rank(id) == Some(1) {
            return id;
        }
        let output = fresh.value(uses.dtype(id), Some(vec![crate::Dim::Known(channels)]));
        nodes.push(node(n, "Reshape", &[id, flat], Some(output), []));
        output
    };
    let mut inputs = vec![x, vector(scale), vector(bias)];
    if !(is_filled(uses, group_scale, 1.0) && is_filled(uses, group_bias, 0.0)) {
        inputs.extend([group_scale, group_bias]);
    }
    let attributes = [
        ("num_groups", Attribute::Int(groups as i64)),
        ("epsilon", Attribute::Float(norm.float("epsilon").unwrap_or(1e-5))),
    ];
    nodes.push(fused_node(n, "GroupNormalization", &inputs, attributes));
    Some(nodes)
}

/// Whether a Reshape preserves the outermost dimension of `x`.
fn keeps_batch(uses: &Uses<'_>, reshape: &Node, x: ValueId) -> bool {
    let copied = reshape.int_or("allowzero", 0) == 0
        && uses.ints(reshape, 1).is_some_and(|target| target.first() == Some(&0));
    let first = |id| uses.shape(id).and_then(|shape: &[crate::Dim]| shape.first());
    copied
        || match (first(x), reshape.output(0).and_then(first)) {
            (Some(a), Some(b)) => same_dim(a, b),
            _ => false,
        }
}

/// Whether a value holds the full shape of `x`.
fn is_shape_of(uses: &Uses<'_>, id: ValueId, x: ValueId) -> bool {
    uses.made_by(id, "Shape").is_some_and(|shape| {
        shape.input(0) == Some(x) && shape.int_or("start", 0) == 0 && shape.int("end").is_none()
    })
}

/// Whether a value has one element per channel (axis 1 of `rank`) and broadcasts along the other axes.
fn is_per_channel(uses: &Uses<'_>, id: ValueId, channels: usize, rank: usize) -> bool {
    let Some(shape) = uses.shape(id) else { return false };
    let expected = |i: usize| if i + rank == shape.len() + 1 { channels } else { 1 };
    (rank - 1..=rank).contains(&shape.len())
        && shape.iter().enumerate().all(|(i, d)| d.known() == Some(expected(i)))
}

/// Whether every element of a constant equals `value`.
fn is_filled(uses: &Uses<'_>, id: ValueId, value: f32) -> bool {
    uses.constant(id).and_then(Tensor::to_f32s).is_some_and(|values| values.iter().all(|v| *v == value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        passes::testing::{check, noise, ops},
        testing::{Model, model},
    };
    use sdrun_abi::DType;

    /// Group normalisation of an image of open size, as TorchScript exports it. The group factors are weights or, as
    /// most exporters write them, constants.
    fn file(weights: bool, spatial: &str) -> Model {
        let filled = |v: f32| Tensor::from_elements(vec![3], &[v; 3]).unwrap();
        let file = model(17)
            .input("x", DType::F32, &format!("n 6 {spatial}"))
            .initializer("grouped", &Tensor::from_i64s(&[0, 3, -1]))
            .initializer("scale", &noise(&[6, 1, 1], 1))
            .initializer("bias", &noise(&[1, 6, 1, 1], 2));
        let file = match weights {
            true => file.initializer("s", &noise(&[3], 3)).initializer("b", &noise(&[3], 4)),
            false => file
                .node_with("Constant", &[], &["s"], [("value", Attribute::Tensor(filled(1.0)))])
                .node_with("Constant", &[], &["b"], [("value", Attribute::Tensor(filled(0.0)))]),
        };
        file.node("Shape", &["x"], &["shape"])
            .node("Reshape", &["x", "grouped"], &["g"])
            .node_with(
                "InstanceNormalization",
                &["g", "s", "b"],
                &["i"],
                [("epsilon", Attribute::Float(1e-4))],
            )
            .node("Reshape", &["i", "shape"], &["r"])
            .node("Mul", &["r", "scale"], &["m"])
            .node("Add", &["bias", "m"], &["y"])
            .output("y", &format!("n 6 {spatial}"))
    }

    #[test]
    fn exported_group_norm_is_one_node() {
        for (weights, spatial) in [(false, "h w"), (true, "h w"), (true, "5 7")] {
            let graph = check(&file(weights, spatial), fuse_group_norm, 1);
            assert_eq!(ops(&graph), ["Reshape", "Reshape", "GroupNormalization"]);
            let node = graph.nodes.last().unwrap();
            assert_eq!(node.inputs.len(), if weights { 5 } else { 3 });
            assert_eq!((node.int("num_groups"), node.float("epsilon")), (Some(3), Some(1e-4)));
        }
    }

    #[test]
    fn a_factor_along_the_width_is_not_per_channel() {
        let mut wrong = file(true, "6 6");
        wrong.graph_mut().initializer[1] = crate::testing::tensor("scale", &noise(&[6], 5));
        check(&wrong, fuse_group_norm, 0);
    }
}
