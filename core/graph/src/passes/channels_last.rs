use super::{
    rewrite::{node, rewrite},
    uses::{Uses, is_op},
};
use crate::{Attribute, Dim, Graph, Node, ValueId, fused};
use std::collections::{HashMap, HashSet};

/// Permutation from channels first to channels last, and its inverse.
const LAST: [i64; 4] = [0, 2, 3, 1];
const FIRST: [i64; 4] = [0, 3, 1, 2];

/// Converts chains of convolutions to `NhwcConv` between transposes; the transposes inside a chain then cancel
/// (`cancel_transposes`). A chain consists of depthwise convolutions between pointwise ones, the connected pointwise
/// ones, and an initial convolution with few input channels. With channels last, a depthwise convolution multiplies
/// contiguous runs of channels, and the others are matrix products. Returns the number of converted convolutions.
pub fn channels_last(graph: &mut Graph) -> usize {
    let chains = chains(&Uses::new(graph));
    if chains.is_empty() {
        return 0;
    }
    rewrite(graph, |uses, fresh, n| {
        let (x, y) = (n.input(0)?, n.output(0)?);
        chains.contains(&y).then_some(())?;
        let mut turned = |id: ValueId, perm: [i64; 4]| {
            let shape = uses.shape(id).map(|shape| perm.map(|axis| shape[axis as usize].clone()).to_vec());
            fresh.value(uses.dtype(id), shape)
        };
        let transpose = |from, perm: [i64; 4], to| {
            node(n, "Transpose", &[from], Some(to), [("perm", Attribute::Ints(perm.to_vec()))])
        };
        let (x_last, y_last) = (turned(x, LAST), turned(y, LAST));
        let mut nodes = vec![transpose(x, LAST, x_last)];
        let mut inputs = n.inputs.clone();
        inputs[0] = Some(x_last);
        if let Some(z) = n.input(3) {
            let z_last = turned(z, LAST);
            nodes.push(transpose(z, LAST, z_last));
            inputs[3] = Some(z_last);
        }
        nodes.push(Node {
            domain: fused::DOMAIN.to_owned(),
            op_type: "NhwcConv".to_owned(),
            inputs,
            outputs: vec![Some(y_last)],
            ..n.clone()
        });
        nodes.push(transpose(y_last, FIRST, y));
        Some(nodes)
    })
}

/// The outputs of the convolutions to convert.
fn chains(uses: &Uses<'_>) -> HashSet<ValueId> {
    let mut kinds: HashMap<ValueId, Kind> = HashMap::new();
    let mut edges: Vec<[ValueId; 2]> = Vec::new();
    for n in &uses.graph.nodes {
        let (Some(kind), Some(x), Some(y)) = (kind(uses, n), n.input(0), n.output(0)) else { continue };
        // Producers come before their users.
        if kinds.contains_key(&x) {
            edges.push([x, y]);
        }
        kinds.insert(y, kind);
    }
    let mut chains = HashSet::new();
    for [x, y] in edges.iter().filter(|[x, y]| kinds[x] != Kind::Depthwise && kinds[y] == Kind::Depthwise) {
        chains.extend(edges.iter().filter(|[from, to]| from == y && kinds[to] == Kind::Pointwise).flatten());
        if chains.contains(y) {
            chains.insert(*x);
        }
    }
    loop {
        let before = chains.len();
        for [x, y] in &edges {
            if chains.contains(x) || chains.contains(y) {
                chains.extend([*x, *y]);
            }
        }
        if chains.len() == before {
            return chains;
        }
    }
}

/// Maximum number of input channels of a converted convolution that is neither depthwise nor pointwise.
const FEW: usize = 4;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Depthwise,
    Pointwise,
    Stem,
}

/// The kind of a two-dimensional convolution, if it can be converted.
fn kind(uses: &Uses<'_>, n: &Node) -> Option<Kind> {
    let fused = n.domain == fused::DOMAIN && n.op_type == "FusedConv";
    (is_op(n, "Conv") || fused).then_some(())?;
    let (x, w) = (n.input(0)?, n.input(1)?);
    let image = |id: ValueId| uses.rank(id) == Some(4);
    (image(x) && image(n.output(0)?) && n.input(3).is_none_or(image)).then_some(())?;
    let filters: Vec<usize> = uses.shape(w)?.iter().map(Dim::known).collect::<Option<_>>()?;
    let group = usize::try_from(n.int_or("group", 1)).ok()?;
    let &[filters, channels, ref kernel @ ..] = &filters[..] else { return None };
    let all = |name, value| n.ints(name).is_none_or(|ints| ints.iter().all(|i| *i == value));
    if channels == 1 && group == filters && uses.dim(x, 1) == Some(group) {
        Some(Kind::Depthwise)
    } else {
        let pointwise = kernel == [1, 1] && all("strides", 1) && all("pads", 0);
        let kind = if pointwise { Kind::Pointwise } else { Kind::Stem };
        (group == 1 && (pointwise || channels <= FEW)).then_some(kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        passes::{
            cancel_transposes, fuse_activation, fuse_residual,
            testing::{check, noise, ops},
        },
        testing::{Model, model},
    };
    use sdrun_abi::DType;

    /// Attributes of a 3 x 3 depthwise convolution of six channels.
    fn depthwise(stride: i64) -> [(&'static str, Attribute); 3] {
        let ints = |value, count| Attribute::Ints(vec![value; count]);
        [("pads", ints(1, 4)), ("strides", ints(stride, 2)), ("group", Attribute::Int(6))]
    }

    /// An inverted residual block: expand, filter, project, add.
    fn block(stride: i64) -> Model {
        model(17)
            .input("x", DType::F32, "n 4 5 7")
            .initializer("expand", &noise(&[6, 4, 1, 1], 1))
            .initializer("filter", &noise(&[6, 1, 3, 3], 2))
            .initializer("project", &noise(&[4, 6, 1, 1], 3))
            .initializer("bias", &noise(&[6], 4))
            .initializer("low", &Tensor::scalar(0f32))
            .initializer("high", &Tensor::scalar(6f32))
            .node("Conv", &["x", "expand", "bias"], &["e"])
            .node("Clip", &["e", "low", "high"], &["a"])
            .node_with("Conv", &["a", "filter", "bias"], &["d"], depthwise(stride))
            .node("Relu", &["d"], &["b"])
            .node("Conv", &["b", "project"], &["p"])
    }

    fn all(graph: &mut Graph) -> usize {
        fuse_residual(graph);
        fuse_activation(graph);
        let changes = channels_last(graph);
        cancel_transposes(graph);
        changes
    }

    #[test]
    fn transposes_remain_only_around_a_chain() {
        let file = block(1).node("Add", &["p", "x"], &["y"]).output("y", "n 4 5 7");
        let graph = check(&file, all, 3);
        let expected = ["Transpose", "NhwcConv", "NhwcConv", "Transpose", "NhwcConv", "Transpose"];
        assert_eq!(ops(&graph), expected);
        // The intermediate result is also read in its original layout.
        let file = block(2).output("p", "n 4 3 4").output("b", "n 6 3 4");
        let graph = check(&file, all, 3);
        assert_eq!(graph.nodes.iter().filter(|n| n.op_type == "Transpose").count(), 3);
    }

    #[test]
    fn other_convolutions_stay_as_they_are() {
        let image = |dims| model(17).input("x", DType::F32, dims).initializer("w", &noise(&[6, 6, 1, 1], 1));
        // Pointwise ones alone, a depthwise one before another operator, and one of another rank.
        let file = image("n 6 5 5").node("Conv", &["x", "w"], &["a"]).node("Conv", &["a", "w"], &["y"]);
        check(&file.output("y", "n 6 5 5"), channels_last, 0);
        let file = image("n 6 5 5")
            .initializer("f", &noise(&[6, 1, 3, 3], 2))
            .node("Conv", &["x", "w"], &["a"])
            .node_with("Conv", &["a", "f"], &["b"], depthwise(1))
            .node("Exp", &["b"], &["c"])
            .node("Conv", &["c", "w"], &["y"])
            .output("y", "n 6 5 5");
        check(&file, channels_last, 0);
        let file = model(17)
            .input("x", DType::F32, "n 6 5")
            .initializer("f", &noise(&[6, 1, 3], 2))
            .initializer("w", &noise(&[6, 6, 1], 1))
            .node_with("Conv", &["x", "f"], &["a"], [("group", Attribute::Int(6))])
            .node("Conv", &["a", "w"], &["y"])
            .output("y", "n 6 3");
        check(&file, channels_last, 0);
    }
}
