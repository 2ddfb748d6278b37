use super::{
    rewrite::{fused_node, node, rewrite},
    uses::{Uses, is_op, pairs},
};
use crate::{Attribute, Dim, Graph, Node, ValueId, fused, fused::Activation};
use sdrun_abi::DType;

/// Fuses matrix products with the bias added to them, and equivalent `Gemm`s, into `FusedMatMul`. Returns the number
/// of fused nodes.
pub fn fuse_bias(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        if is_op(n, "Gemm") {
            let plain =
                [("alpha", 1.0), ("beta", 1.0)].iter().all(|(name, v)| n.float(name).is_none_or(|f| f == *v));
            let bias = n.input(2);
            let (a, b) = (n.input(0)?, n.input(1)?);
            (plain && n.int_or("transA", 0) == 0 && bias.is_none_or(|bias| is_row_of(uses, bias, n)))
                .then_some(())?;
            let inputs: Vec<ValueId> = [a, b].into_iter().chain(bias).collect();
            let transposed = Attribute::Int(i64::from(n.int_or("transB", 0) != 0));
            return Some(vec![fused_node(n, "FusedMatMul", &inputs, [("transB", transposed)])]);
        }
        is_op(n, "Add").then_some(())?;
        let (product, bias) =
            pairs(n)?.into_iter().find_map(|(y, bias)| Some((uses.made_once_by(y, "MatMul")?, bias)))?;
        let (a, b) = (product.input(0)?, product.input(1)?);
        let matrix = uses.rank(b) == Some(2) && uses.rank(a)? >= 2;
        (matrix && is_row_of(uses, bias, product)).then_some(())?;
        Some(vec![fused_node(n, "FusedMatMul", &[a, b, bias], [])])
    })
}

/// Whether a value has one element for each column of a node's output.
fn is_row_of(uses: &Uses<'_>, id: ValueId, n: &Node) -> bool {
    let width = n.output(0).and_then(|y| uses.last_dim(y));
    uses.rank(id) == Some(1) && width.is_some() && uses.last_dim(id) == width
}

/// Turns a per-channel addend of a `Conv` without bias into its bias. Returns the number of fused nodes.
pub fn fuse_conv_bias(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, fresh, n| {
        is_op(n, "Add").then_some(())?;
        let (conv, bias) =
            pairs(n)?.into_iter().find_map(|(y, bias)| Some((uses.made_once_by(y, "Conv")?, bias)))?;
        let rank = uses.rank(conv.output(0)?)?;
        let channels = uses.dim(conv.input(1)?, 0)?;
        let shape: Vec<usize> = uses.shape(bias)?.iter().map(Dim::known).collect::<Option<_>>()?;
        let by_channel = (rank - 1..=rank).contains(&shape.len())
            && shape
                .iter()
                .enumerate()
                .all(|(i, d)| *d == if i + rank == shape.len() + 1 { channels } else { 1 });
        (conv.input(2).is_none() && by_channel).then_some(())?;
        let flat = fresh.shape(&[-1]);
        let vector = fresh.value(uses.dtype(bias), Some(vec![Dim::Known(channels)]));
        let reshape = node(n, "Reshape", &[bias, flat], Some(vector), []);
        let mut inputs = conv.inputs[..2].to_vec();
        inputs.push(Some(vector));
        Some(vec![reshape, Node { inputs, outputs: n.outputs.clone(), ..conv.clone() }])
    })
}

/// Fuses an addend into a `Conv` or `FusedMatMul`: a residual of the same shape or, for convolutions, anything that
/// broadcasts to it. Returns the number of fused nodes.
pub fn fuse_residual(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        is_op(n, "Add").then_some(())?;
        let (kernel, addend) = pairs(n)?
            .into_iter()
            .find_map(|(y, addend)| {
                let kernel = uses.producer(y).filter(|kernel| uses.is_used_once(y) && takes_more(kernel))?;
                let broadcasts = is_convolution(kernel) && broadcasts_onto(uses, addend, y);
                let fits = (broadcasts || uses.same_shape(addend, y)) && uses.same_shape(y, n.output(0)?);
                (fits && uses.dtype(addend) == uses.dtype(y)).then_some((kernel, addend, y))
            })
            .map(|(kernel, addend, y)| {
                let other = uses.producer(addend).filter(|other| {
                    uses.is_used_once(addend) && takes_more(other) && uses.same_shape(addend, y)
                });
                // If either of two kernels could take the other's result as its residual, choose the one whose input
                // has no other user. The other, on the shortcut of a residual block, can then run early, and its
                // input is freed sooner. Otherwise choose the later one.
                let alone = |kernel: &Node| kernel.input(0).is_some_and(|x| uses.is_used_once(x));
                match other {
                    Some(other) if (alone(other), uses.is_later(other, kernel)) > (alone(kernel), false) => {
                        (other, y)
                    }
                    _ => (kernel, addend),
                }
            })?;
        let mut fused = Node { outputs: n.outputs.clone(), ..kernel.clone() };
        if is_op(kernel, "Conv") {
            (fused.domain, fused.op_type) = (fused::DOMAIN.to_owned(), "FusedConv".into());
        }
        fused.inputs.resize(3, None);
        fused.inputs.push(Some(addend));
        Some(vec![fused])
    })
}

fn is_convolution(n: &Node) -> bool {
    is_op(n, "Conv") || (n.domain == fused::DOMAIN && n.op_type == "FusedConv")
}

/// Whether a residual can still be added to the node.
fn takes_more(n: &Node) -> bool {
    let fused = n.domain == fused::DOMAIN && ["FusedConv", "FusedMatMul"].contains(&&*n.op_type);
    (is_op(n, "Conv") || fused) && n.input(3).is_none() && !n.attributes.contains_key("activation")
}

/// Whether a value is known to broadcast to the shape of `y`, including the outer axes of `y`.
fn broadcasts_onto(uses: &Uses<'_>, id: ValueId, y: ValueId) -> bool {
    let (Some(from), Some(to)) = (uses.shape(id), uses.shape(y)) else { return false };
    from.len() <= to.len()
        && from
            .iter()
            .rev()
            .zip(to.iter().rev())
            .all(|(f, t)| *f == Dim::Known(1) || super::uses::same_dim(f, t))
}

/// Fuses an activation into the `Conv`, `FusedMatMul` or `GroupNormalization` before it, if nothing else uses that
/// result. Returns the number of fused nodes.
pub fn fuse_activation(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        let activation = activation(uses, n)?;
        let x = n.input(0)?;
        let kernel = uses.producer(x).filter(|_| uses.is_used_once(x))?;
        let ours = kernel.domain == fused::DOMAIN
            && ["FusedConv", "FusedMatMul", "GroupNormalization"].contains(&&*kernel.op_type);
        // Before opset 21 its factors are per group.
        let norm = is_op(kernel, "GroupNormalization") && uses.graph.opset() >= 21;
        ((ours || norm || is_op(kernel, "Conv")) && !kernel.attributes.contains_key("activation"))
            .then_some(())?;
        let mut fused =
            Node { outputs: n.outputs.clone(), domain: fused::DOMAIN.to_owned(), ..kernel.clone() };
        if is_op(kernel, "Conv") {
            fused.op_type = "FusedConv".into();
        }
        activation.write(&mut fused.attributes);
        Some(vec![fused])
    })
}

fn activation(uses: &Uses<'_>, n: &Node) -> Option<Activation> {
    let tanh = n.str("approximate") == Some("tanh");
    match (&*n.domain, &*n.op_type) {
        ("", "Relu") => Some(Activation::Relu),
        ("", "Clip") => {
            let bound = |i: usize, name: &str, open: f32| match n.input(i) {
                Some(id) => uses.scalar(id),
                None => Some(n.float(name).unwrap_or(open)),
            };
            Some(Activation::Clip(bound(1, "min", f32::MIN)?, bound(2, "max", f32::MAX)?))
        }
        ("" | fused::DOMAIN, "Swish") => Some(Activation::Swish(n.float("alpha").unwrap_or(1.0))),
        ("" | fused::DOMAIN, "Gelu") => Some(if tanh { Activation::GeluTanh } else { Activation::Gelu }),
        _ => None,
    }
}

/// Fuses half of a tensor's last axis times an activation of the other half into `GLU`. Returns the number of fused
/// nodes.
pub fn fuse_glu(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        is_op(n, "Mul").then_some(())?;
        let (x, gate, activation) = pairs(n)?.into_iter().find_map(|(value, gated)| {
            let gated = uses.producer(gated).filter(|_| uses.is_used_once(gated))?;
            let activation = activation(uses, gated)?;
            let ((x, value), (y, gate)) = (half(uses, value)?, half(uses, gated.input(0)?)?);
            (x == y && value != gate).then_some((x, gate, activation))
        })?;
        (uses.dtype(x) != Some(DType::F64)).then_some(())?;
        let mut fused = fused_node(n, "GLU", &[x], [("gate", Attribute::Int(gate))]);
        activation.write(&mut fused.attributes);
        Some(vec![fused])
    })
}

/// If a value is one half of another's last axis: that other value, and which half.
fn half(uses: &Uses<'_>, id: ValueId) -> Option<(ValueId, i64)> {
    let node = uses.producer(id).filter(|node| node.domain.is_empty())?;
    let x = node.input(0)?;
    let (rank, whole, part) = (uses.rank(x)? as i64, uses.last_dim(x)?, uses.last_dim(id)?);
    (whole == 2 * part).then_some(())?;
    let is_last = |axis: i64| axis == -1 || axis == rank - 1;
    match &*node.op_type {
        "Split" => {
            let at = node.outputs.iter().position(|output| *output == Some(id))? as i64;
            (node.outputs.len() == 2 && is_last(node.int_or("axis", 0))).then_some((x, at))
        }
        "Slice" => {
            let (starts, axes) = (uses.ints(node, 1)?, uses.ints(node, 3)?);
            let straight = node.input(4).is_none() || uses.ints(node, 4)? == [1];
            (straight && axes.len() == 1 && is_last(axes[0])).then_some(())?;
            match starts[..] {
                [0] => Some((x, 0)),
                [start] if start == part as i64 || start == -(part as i64) => Some((x, 1)),
                _ => None,
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        passes::{
            fuse_gelu, fuse_swish,
            testing::{check, noise, ops},
        },
        testing::{Model, model},
    };

    fn linear() -> Model {
        model(17)
            .input("x", DType::F32, "n l 4")
            .input("z", DType::F32, "n l 6")
            .initializer("w", &noise(&[4, 6], 1))
            .initializer("b", &noise(&[6], 2))
            .node("MatMul", &["x", "w"], &["m"])
            .node("Add", &["b", "m"], &["a"])
    }

    #[test]
    fn bias_residual_and_activation_fuse_into_a_product() {
        let all = |graph: &mut Graph| {
            fuse_swish(graph);
            fuse_bias(graph) + fuse_residual(graph) + fuse_activation(graph)
        };
        let file =
            linear().node("Add", &["a", "z"], &["s"]).node("Relu", &["s"], &["y"]).output("y", "n l 6");
        let graph = check(&file, all, 3);
        assert_eq!(ops(&graph), ["FusedMatMul"]);
        assert_eq!(graph.nodes[0].inputs.len(), 4);
        let file =
            linear().node("Sigmoid", &["a"], &["s"]).node("Mul", &["a", "s"], &["y"]).output("y", "n l 6");
        assert_eq!(ops(&check(&file, all, 2)), ["FusedMatMul"]);
        // An addend that enlarges the result, and one of another shape.
        let larger = linear()
            .input("q", DType::F32, "2 n l 6")
            .node("Add", &["a", "q"], &["y"])
            .output("y", "2 n l 6");
        assert_eq!(ops(&check(&larger, all, 1)), ["FusedMatMul", "Add"]);
    }

    #[test]
    fn gemm_is_a_product_with_bias() {
        let gemm = |alpha: f32| {
            let attributes = [("transB", Attribute::Int(1)), ("alpha", Attribute::Float(alpha))];
            model(17)
                .input("x", DType::F32, "n 4")
                .initializer("w", &noise(&[6, 4], 1))
                .initializer("b", &noise(&[6], 2))
                .node_with("Gemm", &["x", "w", "b"], &["y"], attributes)
                .output("y", "n 6")
        };
        assert_eq!(ops(&check(&gemm(1.0), fuse_bias, 1)), ["FusedMatMul"]);
        check(&gemm(0.5), fuse_bias, 0);
    }

    fn conv(bias: bool) -> Model {
        let inputs: &[&str] = if bias { &["x", "w", "b"] } else { &["x", "w"] };
        let file = model(17)
            .input("x", DType::F32, "n 3 5 5")
            .initializer("w", &noise(&[4, 3, 3, 3], 1))
            .initializer("b", &noise(&[4], 2));
        file.node_with("Conv", inputs, &["c"], [("pads", Attribute::Ints(vec![1; 4]))]).output("y", "n 4 5 5")
    }

    #[test]
    fn convolutions_fuse_with_the_nodes_after_them() {
        let channel = conv(false).initializer("v", &noise(&[4, 1, 1], 3)).node("Add", &["v", "c"], &["y"]);
        assert_eq!(ops(&check(&channel, fuse_conv_bias, 1)), ["Reshape", "Conv"]);
        let residual = conv(true)
            .input("t", DType::F32, "n 4 1 1")
            .initializer("low", &Tensor::scalar(0f32))
            .initializer("high", &Tensor::scalar(6f32))
            .node("Add", &["t", "c"], &["r"])
            .node("Clip", &["r", "low", "high"], &["y"]);
        let all = |graph: &mut Graph| fuse_residual(graph) + fuse_activation(graph);
        assert_eq!(ops(&check(&residual, all, 2)), ["FusedConv"]);
        let used = conv(true).node("Relu", &["c"], &["y"]).output("c", "n 4 5 5");
        check(&used, fuse_activation, 0);
    }

    #[test]
    fn the_later_of_two_kernels_takes_the_other_as_residual() {
        let file = conv(true)
            .node_with("Conv", &["c", "u"], &["d"], [("pads", Attribute::Ints(vec![1; 4]))])
            .node_with("Conv", &["x", "w"], &["e"], [("pads", Attribute::Ints(vec![1; 4]))])
            .initializer("u", &noise(&[4, 4, 3, 3], 5))
            .node("Add", &["e", "d"], &["y"]);
        let graph = check(&file, fuse_residual, 1);
        assert_eq!(ops(&graph), ["Conv", "Conv", "FusedConv"]);
    }

    #[test]
    fn gated_halves_fuse_into_one_node() {
        let one = |name: &str, v: i64| (name.to_owned(), Tensor::from_i64s(&[v]));
        let constants = [one("zero", 0), one("three", 3), one("end", i64::MAX), one("last", -1)];
        for gate in [0, 1] {
            let mut file = model(17).input("x", DType::F32, "n 6").output("y", "n 3");
            for (name, value) in &constants {
                file = file.initializer(name, value);
            }
            for (name, value) in [("root", 2f32.sqrt()), ("one", 1.0), ("half", 0.5)] {
                file = file.initializer(name, &Tensor::scalar(value));
            }
            let (value, gated) = if gate == 1 { ("a", "b") } else { ("b", "a") };
            let file = file
                .node("Slice", &["x", "zero", "three", "last"], &["a"])
                .node("Slice", &["x", "three", "end", "last"], &["b"])
                .node("Div", &[gated, "root"], &["d"])
                .node("Erf", &["d"], &["e"])
                .node("Add", &["e", "one"], &["s"])
                .node("Mul", &[gated, "s"], &["p"])
                .node("Mul", &["p", "half"], &["g"])
                .node("Mul", &[value, "g"], &["y"]);
            let all = |graph: &mut Graph| {
                fuse_gelu(graph);
                fuse_glu(graph)
            };
            let graph = check(&file, all, 1);
            assert_eq!(ops(&graph), ["GLU"]);
            assert_eq!(graph.nodes[0].int("gate"), Some(gate));
        }
        let split = model(17)
            .input("x", DType::F32, "n 6")
            .node_with("Split", &["x"], &["a", "b"], [("axis", Attribute::Int(1))])
            .node("Relu", &["b"], &["r"])
            .node("Mul", &["r", "a"], &["y"])
            .output("y", "n 3");
        assert_eq!(ops(&check(&split, fuse_glu, 1)), ["GLU"]);
        let same = model(17)
            .input("x", DType::F32, "n 6")
            .node_with("Split", &["x"], &["a", "b"], [("axis", Attribute::Int(1))])
            .node("Relu", &["b"], &["r"])
            .node("Mul", &["r", "b"], &["y"])
            .output("y", "n 3");
        check(&same, fuse_glu, 0);
    }
}
