use super::{
    rewrite::{fused_node, rewrite},
    uses::{Uses, is_op, pairs},
};
use crate::{Attribute, Graph, Node, Tensor, ValueId};
use sdrun_abi::DType;

/// Fuses a decomposed layer normalisation into one node: subtract the mean, divide by the root of the mean square,
/// optionally `Mul` and `Add` along the last axis. Returns the number of fused nodes.
pub fn fuse_layer_norm(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, fresh, n| {
        let (x, epsilon, scale, bias) = layer_norm(uses, n)?;
        // It may be the beginning of a longer match.
        (!is_part(uses, n, |user| layer_norm(uses, user))).then_some(())?;
        let len = uses.last_dim(x)?;
        let scale = match scale {
            Some(scale) => scale,
            None => fresh.constant(ones(uses.dtype(n.output(0)?)?, len)?),
        };
        let mut inputs = vec![x, scale];
        inputs.extend(bias);
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(epsilon))];
        Some(vec![fused_node(n, "LayerNormalization", &inputs, attributes)])
    })
}

fn layer_norm(uses: &Uses<'_>, n: &Node) -> Option<LayerNorm> {
    let found = shifted(uses, n).or_else(|| scaled(uses, n)).or_else(|| plain(uses, n))?;
    (uses.dtype(found.0) == uses.dtype(n.output(0)?)).then_some(found)
}

/// Whether all users of a node, ignoring casts, are nodes that `longer` matches too.
fn is_part<T>(uses: &Uses<'_>, n: &Node, longer: impl Fn(&Node) -> Option<T>) -> bool {
    let mut user = n.output(0).and_then(|y| uses.only_user(y));
    while let Some(cast) = user.filter(|user| is_op(user, "Cast")) {
        user = cast.output(0).and_then(|y| uses.only_user(y));
    }
    user.is_some_and(|user| longer(user).is_some())
}

/// x, epsilon, scale and bias.
type LayerNorm = (ValueId, f32, Option<ValueId>, Option<ValueId>);

fn shifted(uses: &Uses<'_>, n: &Node) -> Option<LayerNorm> {
    is_op(n, "Add").then_some(())?;
    pairs(n)?.into_iter().find_map(|(y, bias)| {
        let (x, epsilon, scale, _) = scaled(uses, uses.producer(y)?)?;
        is_row(uses, bias, x).then_some((x, epsilon, scale, Some(bias)))
    })
}

fn scaled(uses: &Uses<'_>, n: &Node) -> Option<LayerNorm> {
    is_op(n, "Mul").then_some(())?;
    pairs(n)?.into_iter().find_map(|(y, scale)| {
        let (x, epsilon, _, _) = plain(uses, uses.producer(y)?)?;
        is_row(uses, scale, x).then_some((x, epsilon, Some(scale), None))
    })
}

fn plain(uses: &Uses<'_>, n: &Node) -> Option<LayerNorm> {
    let (centred, square, epsilon) = divided_by_root(uses, n)?;
    let difference = uses.made_by(centred, "Sub")?;
    let (x, mean) = (difference.input(0)?, difference.input(1)?);
    (uses.reduced_last_axis(uses.made_by(mean, "ReduceMean")?)? == x).then_some(())?;
    (squared(uses, square)? == centred).then_some((x, epsilon, None, None))
}

/// Fuses a decomposed root-mean-square normalisation into one node: `Pow`, `ReduceMean`, `Add`, `Sqrt`, division,
/// optionally `Mul` along the last axis. The node computes in f32 if the graph casts to f32. Returns the number of
/// fused nodes.
pub fn fuse_rms_norm(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, fresh, n| {
        let ((x, epsilon), scale) = match weighted(uses, n) {
            Some((norm, scale)) => (norm, Some(scale)),
            None if is_part(uses, n, |user| weighted(uses, user)) => return None,
            None => (root_mean_square(uses, n)?, None),
        };
        let dtype = uses.dtype(n.output(0)?)?;
        let scale = match scale {
            Some(scale) => scale,
            None => fresh.constant(ones(dtype, uses.last_dim(x)?)?),
        };
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(epsilon))];
        Some(vec![fused_node(n, "RMSNormalization", &[x, scale], attributes)])
    })
}

/// A normalised value times a factor with one element per element of its last axis.
fn weighted(uses: &Uses<'_>, n: &Node) -> Option<((ValueId, f32), ValueId)> {
    is_op(n, "Mul").then_some(())?;
    pairs(n)?.into_iter().find_map(|(y, scale)| {
        let norm = root_mean_square(uses, uses.producer(uses.before_casts(y))?)?;
        let fits = is_row(uses, scale, norm.0) && uses.dtype(scale) == uses.dtype(n.output(0)?);
        fits.then_some((norm, scale))
    })
}

/// x and epsilon of x / √(mean(x²) + epsilon). If x was cast for the computation, returns the value before the cast.
fn root_mean_square(uses: &Uses<'_>, n: &Node) -> Option<(ValueId, f32)> {
    let (x, square, epsilon) = divided_by_root(uses, n)?;
    let origin = uses.before_casts(x);
    (uses.before_casts(squared(uses, square)?) == origin).then_some(())?;
    // The fused node computes in f32, or in f64 for f64.
    (uses.dtype(x) == Some(DType::F32) || uses.dtype(x) == uses.dtype(origin)).then_some((origin, epsilon))
}

/// Matches x / √(mean(s) + epsilon) along the last axis: x, s and epsilon.
fn divided_by_root(uses: &Uses<'_>, n: &Node) -> Option<(ValueId, ValueId, f32)> {
    let (x, root) = match &*n.op_type {
        "Div" => (n.input(0)?, n.input(1)?),
        "Mul" => pairs(n)?.into_iter().find_map(|(x, inverse)| {
            let inverse = uses.producer(inverse)?;
            match &*inverse.op_type {
                "Reciprocal" => Some((x, inverse.input(0)?)),
                "Div" if uses.is_scalar(inverse.input(0)?, 1.0) => Some((x, inverse.input(1)?)),
                _ => None,
            }
        })?,
        _ => return None,
    };
    let root = uses.producer(root)?;
    let is_root = root.op_type == "Sqrt"
        || (root.op_type == "Pow" && root.input(1).is_some_and(|exponent| uses.is_scalar(exponent, 0.5)));
    is_root.then_some(())?;
    let sum = uses.made_by(root.input(0)?, "Add")?;
    let (mean, epsilon) = pairs(sum)?.into_iter().find_map(|(mean, e)| Some((mean, uses.scalar(e)?)))?;
    Some((x, uses.reduced_last_axis(uses.made_by(mean, "ReduceMean")?)?, epsilon))
}

/// If a value is a square: the value squared.
fn squared(uses: &Uses<'_>, id: ValueId) -> Option<ValueId> {
    let node = uses.producer(id)?;
    match &*node.op_type {
        "Pow" if uses.is_scalar(node.input(1)?, 2.0) => node.input(0),
        "Mul" if node.input(0) == node.input(1) => node.input(0),
        _ => None,
    }
}

/// Whether a value has one element per element of the last axis of `x`.
fn is_row(uses: &Uses<'_>, id: ValueId, x: ValueId) -> bool {
    uses.rank(id) == Some(1) && uses.last_dim(id).is_some() && uses.last_dim(id) == uses.last_dim(x)
}

fn ones(dtype: DType, len: usize) -> Option<Tensor> {
    match dtype {
        DType::F32 => Tensor::from_elements(vec![len], &vec![1f32; len]).ok(),
        DType::F16 => Tensor::from_elements(vec![len], &vec![half::f16::ONE; len]).ok(),
        DType::BF16 => Tensor::from_elements(vec![len], &vec![half::bf16::ONE; len]).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        passes::testing::{check, noise, ops},
        testing::{Model, model},
    };

    fn file(dtype: DType) -> Model {
        model(17)
            .input("x", dtype, "n l 8")
            .initializer("two", &Tensor::scalar(2f32))
            .initializer("one", &Tensor::scalar(1f32))
            .initializer("epsilon", &Tensor::scalar(1e-3f32))
            .initializer("w", &noise(&[8], 1))
            .initializer("b", &noise(&[8], 2))
            .output("y", "n l 8")
    }

    fn mean(file: Model, of: &str) -> Model {
        let axes = [("axes", Attribute::Ints(vec![-1]))];
        file.node_with("ReduceMean", &[of], &["mean"], axes).node("Add", &["mean", "epsilon"], &["sum"]).node(
            "Sqrt",
            &["sum"],
            &["root"],
        )
    }

    fn layer(affine: bool) -> Model {
        let centred = file(DType::F32)
            .node_with("ReduceMean", &["x"], &["m"], [("axes", Attribute::Ints(vec![2]))])
            .node("Sub", &["x", "m"], &["d"])
            .node("Pow", &["d", "two"], &["square"]);
        let root = mean(centred, "square");
        match affine {
            false => root.node("Div", &["d", "root"], &["y"]),
            true => root.node("Div", &["d", "root"], &["n"]).node("Mul", &["n", "w"], &["s"]).node(
                "Add",
                &["b", "s"],
                &["y"],
            ),
        }
    }

    #[test]
    fn layer_norm_from_its_parts() {
        for affine in [false, true] {
            let graph = check(&layer(affine), fuse_layer_norm, 1);
            assert_eq!(ops(&graph), ["LayerNormalization"]);
            assert_eq!(graph.nodes[0].inputs.len(), if affine { 3 } else { 2 });
        }
        // The factor is as long as the axis but lies along another one.
        let mut other = layer(true);
        other.graph_mut().initializer[3] = crate::testing::tensor("w", &noise(&[1, 1, 1], 1));
        assert_eq!(ops(&check(&other, fuse_layer_norm, 1)), ["LayerNormalization", "Mul", "Add"]);
    }

    #[test]
    fn rms_norm_from_its_parts() {
        for form in 0..3 {
            let squared = match form {
                0 => file(DType::F32).node("Pow", &["x", "two"], &["square"]),
                _ => file(DType::F32).node("Mul", &["x", "x"], &["square"]),
            };
            let root = mean(squared, "square");
            let file = match form {
                0 => root.node("Div", &["one", "root"], &["i"]).node("Mul", &["x", "i"], &["n"]),
                1 => root.node("Reciprocal", &["root"], &["i"]).node("Mul", &["i", "x"], &["n"]),
                _ => root.node("Div", &["x", "root"], &["y"]),
            };
            let file = if form < 2 { file.node("Mul", &["w", "n"], &["y"]) } else { file };
            assert_eq!(ops(&check(&file, fuse_rms_norm, 1)), ["RMSNormalization"], "form {form}");
        }
    }

    #[test]
    fn half_precision_computed_in_f32_stays_so() {
        let to = |dtype: DType| [("to", Attribute::Int(dtype as i64))];
        let squared = file(DType::F16).node_with("Cast", &["x"], &["x32"], to(DType::F32)).node(
            "Pow",
            &["x32", "two"],
            &["square"],
        );
        let mut file = mean(squared, "square")
            .node("Div", &["one", "root"], &["i"])
            .node_with("Cast", &["x"], &["again"], to(DType::F32))
            .node("Mul", &["again", "i"], &["n"])
            .node_with("Cast", &["n"], &["n16"], to(DType::F16))
            .node_with("Cast", &["w"], &["w16"], to(DType::F16))
            .node("Mul", &["n16", "w16"], &["y"]);
        file.graph_mut().output[0] = crate::testing::value("y", DType::F16, "n l 8");
        assert_eq!(ops(&check(&file, fuse_rms_norm, 1)), ["Cast", "RMSNormalization"]);
    }
}
