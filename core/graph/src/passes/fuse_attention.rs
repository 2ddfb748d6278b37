use super::{
    rewrite::{Fresh, fused_node, node, rewrite},
    uses::{Uses, is_op, pairs, permutation, same_dim},
};
use crate::{Attribute, Dim, Graph, Node, ValueId, fused};
use sdrun_abi::DType;

/// Fuses `MatMul`, `Softmax`, `MatMul` into `Attention`, including scalar factors on queries, keys or scores, a mask
/// added to the scores, and casts around the softmax. Three-dimensional operands have one head; four-dimensional ones
/// are [batch, heads, length, size]. Returns the number of fused nodes.
pub fn fuse_attention(graph: &mut Graph) -> usize {
    rewrite(graph, attention)
}

fn attention(uses: &Uses<'_>, fresh: &mut Fresh, n: &Node) -> Option<Vec<Node>> {
    is_op(n, "MatMul").then_some(())?;
    let (probabilities, v) = (n.input(0)?, n.input(1)?);
    let softmax = uses.made_by(uses.before_casts(probabilities), "Softmax")?;
    // The probabilities must have no other user.
    uses.is_used_once(probabilities).then_some(())?;
    let scores = softmax.input(0)?;
    let rank = uses.rank(scores)? as i64;
    let last = match uses.graph.opset() {
        13.. => softmax.int_or("axis", -1),
        _ => softmax.int_or("axis", 1),
    };
    (matches!(rank, 3 | 4) && (last == -1 || last == rank - 1)).then_some(())?;

    let scores = Scores::find(uses, scores)?;
    let (q, q_scale) = without_factors(uses, scores.q);
    let (kt, k_scale) = without_factors(uses, scores.kt);
    let rank = rank as usize;
    let alike =
        [q, kt, v].into_iter().all(|id| uses.rank(id) == Some(rank) && uses.dtype(id) == uses.dtype(q));
    let stacks = (0..rank - 2).all(|axis| {
        let dim = |id| uses.shape(id).map(|shape: &[Dim]| &shape[axis]);
        matches!((dim(q), dim(kt), dim(v)), (Some(a), Some(b), Some(c)) if same_dim(a, b) && same_dim(b, c))
    });
    (alike && stacks && uses.dtype(n.output(0)?) == uses.dtype(q)).then_some(())?;
    // If the softmax computes in another type, the mask has that type too.
    let mask = scores.mask.map(|mask| match uses.dtype(mask) == uses.dtype(q) {
        true => mask,
        false => uses.before_casts(mask),
    });
    if let Some(mask) = mask {
        let fits = uses.dtype(mask) == uses.dtype(q)
            && uses.shape(mask)?.len() <= rank
            && rank == 4
            && same_dim(uses.shape(mask)?.last()?, &uses.shape(kt)?[3]);
        fits.then_some(())?;
    }

    let mut nodes = Vec::new();
    // Keys must be in the operator's layout: [.., length, size].
    let mut swapped: Vec<usize> = (0..rank).collect();
    swapped.swap(rank - 1, rank - 2);
    let mut shape = uses.shape(kt)?.to_vec();
    shape.swap(rank - 1, rank - 2);
    let k = fresh.value(uses.dtype(kt), Some(shape));
    let perm = Attribute::Ints(swapped.iter().map(|axis| *axis as i64).collect());
    nodes.push(node(n, "Transpose", &[kt], Some(k), [("perm", perm)]));

    let mut inputs = vec![q, k, v];
    inputs.extend(mask);
    let scale = ("scale", Attribute::Float(scores.scale * q_scale * k_scale));
    let mut fused = fused_node(n, "Attention", &inputs, [scale]);
    if uses.dtype(softmax.input(0)?) == Some(DType::F32) && uses.dtype(q) != Some(DType::F32) {
        fused.attributes.insert("softmax_precision".into(), Attribute::Int(1));
    }
    if rank == 3 {
        fused.attributes.insert("q_num_heads".into(), Attribute::Int(1));
        fused.attributes.insert("kv_num_heads".into(), Attribute::Int(1));
    }
    nodes.push(fused);
    Some(nodes)
}

/// The input of the softmax: `scale · (q · kt) + mask`.
struct Scores {
    q: ValueId,
    kt: ValueId,
    scale: f32,
    mask: Option<ValueId>,
}

impl Scores {
    fn find(uses: &Uses<'_>, id: ValueId) -> Option<Self> {
        let mut id = uses.before_casts(id);
        let mut mask = None;
        if let Some(sum) = uses.made_once_by(id, "Add") {
            // Only one of the two is a product.
            let [first, second] = pairs(sum)?;
            let ends = |(scores, _): &(ValueId, ValueId)| product(uses, *scores).is_some();
            let (scores, other) = [first, second].into_iter().find(ends)?;
            mask = Some(other);
            id = scores;
        }
        let (matmul, scale) = product(uses, id)?;
        Some(Scores { q: matmul.input(0)?, kt: matmul.input(1)?, scale, mask })
    }
}

/// Finds the product behind a value, and its scalar factor, through casts. Intermediate values must have no other
/// users.
fn product<'g>(uses: &Uses<'g>, id: ValueId) -> Option<(&'g Node, f32)> {
    let id = uses.before_casts(id);
    let (source, scale) = without_factors(uses, id);
    let matmul = uses.made_once_by(uses.before_casts(source), "MatMul")?;
    Some((matmul, scale))
}

/// Strips scalar factors from a value; returns their product.
fn without_factors(uses: &Uses<'_>, mut id: ValueId) -> (ValueId, f32) {
    let mut scale = 1.0;
    while let Some((source, factor)) = uses.producer(id).and_then(|n| uses.scaled(n)) {
        (id, scale) = (source, scale * factor);
    }
    (id, scale)
}

/// Passes the operands of `Attention` as [batch, length, heads · size], the layout that linear layers produce, where
/// they are transposes to [batch, heads, length, size]. The output takes the same layout. Returns the number of
/// changed nodes.
pub fn absorb_heads(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, fresh, n| {
        let ours = n.domain.is_empty() || n.domain == fused::DOMAIN;
        (ours && n.op_type == "Attention").then_some(())?;
        // No caches and no further outputs.
        (n.outputs.iter().flatten().count() == 1 && n.inputs.iter().skip(4).flatten().count() == 0)
            .then_some(())?;
        let (y, mut nodes) = (n.output(0)?, Vec::new());
        let mut inputs = n.inputs.clone();
        let (mut heads, mut size) = ([0; 3], 0);
        for i in 0..3 {
            let id = n.input(i)?;
            let transpose = uses.made_by(id, "Transpose")?;
            (uses.rank(id)? == 4 && permutation(transpose, 4)? == [0, 2, 1, 3]).then_some(())?;
            let x = transpose.input(0)?;
            (heads[i], size) = (uses.dim(x, 2)?, uses.dim(x, 3)?);
            let wide = heads[i].checked_mul(size)?;
            let mut shape = uses.shape(x)?[..2].to_vec();
            shape.push(Dim::Known(wide));
            let target = fresh.shape(&[0, 0, i64::try_from(wide).ok()?]);
            let joined = fresh.value(uses.dtype(x), Some(shape));
            nodes.push(node(n, "Reshape", &[x, target], Some(joined), []));
            inputs[i] = Some(joined);
        }
        (heads[1] == heads[2] && heads[1] > 0).then_some(())?;
        let (joined, split) = {
            let shape = uses.shape(y)?;
            let [batch, _, length, _] = shape else { return None };
            let rows = vec![batch.clone(), length.clone()];
            let wide = Dim::Known(heads[0].checked_mul(size)?);
            let parts = [Dim::Known(heads[0]), Dim::Known(size)];
            ([rows.clone(), vec![wide]].concat(), [rows, parts.to_vec()].concat())
        };
        let flat = fresh.value(uses.dtype(y), Some(joined));
        let mut attention = Node { inputs, outputs: vec![Some(flat)], ..n.clone() };
        attention.domain = fused::DOMAIN.to_owned();
        attention.attributes.insert("q_num_heads".into(), Attribute::Int(heads[0] as i64));
        attention.attributes.insert("kv_num_heads".into(), Attribute::Int(heads[1] as i64));
        nodes.push(attention);
        let target = fresh.shape(&[0, 0, heads[0] as i64, size as i64]);
        let apart = fresh.value(uses.dtype(y), Some(split));
        nodes.push(node(n, "Reshape", &[flat, target], Some(apart), []));
        let perm = Attribute::Ints(vec![0, 2, 1, 3]);
        nodes.push(node(n, "Transpose", &[apart], Some(y), [("perm", perm)]));
        Some(nodes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        passes::{
            cancel_transposes, collapse_reshapes, sink_scales,
            testing::{check, ops},
        },
        testing::{Model, model},
    };

    fn perm(p: [i64; 4]) -> [(&'static str, Attribute); 1] {
        [("perm", Attribute::Ints(p.to_vec()))]
    }

    /// q, k and v as linear layers produce them, split into heads.
    fn heads(mask: bool) -> Model {
        let mut file = model(17)
            .input("q", DType::F32, "n l 12")
            .input("k", DType::F32, "n m 12")
            .input("v", DType::F32, "n m 12")
            .initializer("heads", &Tensor::from_i64s(&[0, -1, 3, 4]))
            .initializer("joined", &Tensor::from_i64s(&[0, -1, 12]))
            .initializer("root", &Tensor::scalar(0.5f32.sqrt()))
            .initializer("scale", &Tensor::scalar(0.5f32));
        if mask {
            file = file.input("mask", DType::F32, "n 1 l m");
        }
        for name in ["q", "k", "v"] {
            file = file.node("Reshape", &[name, "heads"], &[&format!("{name}r")]);
        }
        file.node_with("Transpose", &["qr"], &["qt"], perm([0, 2, 1, 3])).node_with(
            "Transpose",
            &["vr"],
            &["vt"],
            perm([0, 2, 1, 3]),
        )
    }

    fn rest(file: Model) -> Model {
        file.node_with("Softmax", &["s"], &["p"], [("axis", Attribute::Int(-1))])
            .node("MatMul", &["p", "vt"], &["o"])
            .node_with("Transpose", &["o"], &["ot"], perm([0, 2, 1, 3]))
            .node("Reshape", &["ot", "joined"], &["y"])
            .output("y", "n l 12")
    }

    fn all(graph: &mut Graph) -> usize {
        sink_scales(graph);
        cancel_transposes(graph);
        let fused = fuse_attention(graph);
        cancel_transposes(graph);
        absorb_heads(graph);
        cancel_transposes(graph);
        collapse_reshapes(graph);
        fused
    }

    #[test]
    fn queries_and_keys_scaled_as_torchscript_exports_it() {
        let file = heads(false)
            .node_with("Transpose", &["kr"], &["kt"], perm([0, 2, 3, 1]))
            .node("Mul", &["qt", "root"], &["qs"])
            .node("Mul", &["kt", "root"], &["ks"])
            .node("MatMul", &["qs", "ks"], &["s"]);
        let graph = check(&rest(file), all, 1);
        assert_eq!(ops(&graph), ["Attention"]);
        let scale = graph.nodes[0].float("scale").unwrap();
        assert!((scale - 0.5).abs() < 1e-6, "{scale}");
    }

    #[test]
    fn scores_scaled_and_masked() {
        let file = heads(true)
            .node_with("Transpose", &["kr"], &["kt"], perm([0, 2, 3, 1]))
            .node("MatMul", &["qt", "kt"], &["raw"])
            .node("Div", &["raw", "scale"], &["scaled"])
            .node("Add", &["mask", "scaled"], &["s"]);
        let graph = check(&rest(file), all, 1);
        assert_eq!(ops(&graph), ["Attention"]);
        assert_eq!(graph.nodes[0].float("scale"), Some(2.0));
    }

    #[test]
    fn queries_scaled_before_the_heads_and_keys_transposed_as_a_batch() {
        let file = heads(false)
            .initializer("batch", &Tensor::from_i64s(&[-1, 5, 4]))
            .initializer("back", &Tensor::from_i64s(&[2, 3, 4, 5]));
        let mut file = file
            .node_with("Transpose", &["kr"], &["kh"], perm([0, 2, 1, 3]))
            .node("Reshape", &["kh", "batch"], &["kb"])
            .node_with("Transpose", &["kb"], &["kbt"], [("perm", Attribute::Ints(vec![0, 2, 1]))])
            .node("Reshape", &["kbt", "back"], &["kt"])
            .node("MatMul", &["qt", "kt"], &["s"]);
        let graph = file.graph_mut();
        graph.input[1] = crate::testing::value("k", DType::F32, "2 5 12");
        graph.input[2] = crate::testing::value("v", DType::F32, "2 5 12");
        graph.input[0] = crate::testing::value("q", DType::F32, "2 l 12");
        graph.node[0].input[0] = "qs".into();
        graph.node.insert(0, crate::testing::node("Mul", &["scale", "q"], &["qs"]));
        let graph = check(&rest(file), all, 1);
        assert_eq!(ops(&graph), ["Attention"]);
    }

    #[test]
    fn scores_with_other_users_and_a_factor_after_the_mask_stay() {
        let shown = heads(false).node_with("Transpose", &["kr"], &["kt"], perm([0, 2, 3, 1])).node(
            "MatMul",
            &["qt", "kt"],
            &["s"],
        );
        check(&rest(shown).output("s", "n 3 l m"), all, 0);
        let behind = heads(true)
            .node_with("Transpose", &["kr"], &["kt"], perm([0, 2, 3, 1]))
            .node("MatMul", &["qt", "kt"], &["raw"])
            .node("Add", &["raw", "mask"], &["sum"])
            .node("Mul", &["sum", "scale"], &["s"]);
        check(&rest(behind), all, 0);
    }

    #[test]
    fn one_head_without_a_head_axis() {
        let file = model(17)
            .input("q", DType::F32, "n l 4")
            .input("k", DType::F32, "n m 4")
            .input("v", DType::F32, "n m 6")
            .node_with("Transpose", &["k"], &["kt"], [("perm", Attribute::Ints(vec![0, 2, 1]))])
            .node("MatMul", &["q", "kt"], &["s"])
            .node_with("Softmax", &["s"], &["p"], [("axis", Attribute::Int(2))])
            .node("MatMul", &["p", "v"], &["y"])
            .output("y", "n l 6");
        assert_eq!(ops(&check(&file, all, 1)), ["Attention"]);
    }
}
