use super::is_random;
use crate::{Graph, Initializer, Node, Tensor, eval, scope};

/// Largest tensor that folding creates. Above this size, computing is cheaper than storing.
const MAX_RESULT_BYTES: usize = 16 << 20;

/// How much folding may still do for a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldBudget {
    /// Bytes of constants to add, including intermediate results.
    pub bytes: usize,
    /// Elementary steps, of about a nanosecond each.
    pub work: u64,
}

impl Default for FoldBudget {
    /// For a whole graph: half a gigabyte, and a few tenths of a second.
    fn default() -> Self {
        FoldBudget { bytes: 512 << 20, work: 1 << 28 }
    }
}

/// Replaces nodes by the constants they compute: nodes with only constant inputs, and `Shape` and `Size` of values of
/// known shape. Weights are not constants. Shapes must be inferred: a node of unknown output size stays, and so does one that takes
/// more than the `budget`, which shrinks by what is done. Returns the number of removed nodes.
pub fn fold_constants(graph: &mut Graph, budget: &mut FoldBudget) -> usize {
    let nodes = std::mem::take(&mut graph.nodes);
    let before = nodes.len();
    for node in nodes {
        let Some(tensors) = fold(graph, &node, budget) else {
            graph.nodes.push(node);
            continue;
        };
        for (id, tensor) in node.outputs.iter().zip(tensors) {
            let Some(id) = *id else { continue };
            budget.bytes = budget.bytes.saturating_sub(tensor.data().len());
            let value = graph.value_mut(id);
            value.dtype = Some(tensor.dtype());
            value.shape = Some(tensor.shape().iter().map(|d| crate::Dim::Known(*d)).collect());
            graph.initializers.insert(id, Initializer::Constant(tensor));
        }
    }
    before - graph.nodes.len()
}

/// The outputs of a node, if they can and should be computed now.
fn fold(graph: &Graph, node: &Node, budget: &mut FoldBudget) -> Option<Vec<Tensor>> {
    if node.domain.is_empty() && matches!(&*node.op_type, "Shape" | "Size") {
        let shape = graph.value(node.input(0)?).known_shape()?;
        return Some(vec![if node.op_type == "Shape" { shape_of(node, &shape) } else { size_of(&shape)? }]);
    }
    if is_random(node) || scope::bodies(node).next().is_some() {
        return None;
    }
    let mut inputs = Vec::with_capacity(node.inputs.len());
    for id in &node.inputs {
        inputs.push(match id {
            Some(id) => Some(graph.constant(*id)?),
            None => None,
        });
    }
    let opset = graph.opsets.get(&node.domain).copied()?;
    if !eval::supports(node, opset) {
        return None;
    }
    let shapes = shapes_that_fit(graph, node, budget.bytes)?;
    let sizes = inputs.iter().map(|input| input.map(Tensor::shape));
    let Some(left) = budget.work.checked_sub(eval::work(node, sizes, shapes.iter().map(Vec::as_slice)))
    else {
        tracing::debug!(node = node.name, "not folded: it takes too long");
        return None;
    };
    budget.work = left;
    match eval::evaluate(node, opset, &inputs) {
        Ok(tensors) => Some(tensors),
        Err(error) => {
            tracing::debug!(node = node.name, %error, "not folded");
            None
        }
    }
}

/// The shapes of the outputs, if they are known and small enough.
fn shapes_that_fit(graph: &Graph, node: &Node, budget: usize) -> Option<Vec<Vec<usize>>> {
    let mut total = 0usize;
    let mut shapes = Vec::with_capacity(node.outputs.len());
    for id in node.outputs.iter().flatten() {
        let value = graph.value(*id);
        let shape = value.known_shape()?;
        let bytes = value.dtype?.bytes_of(&shape).filter(|bytes| *bytes <= MAX_RESULT_BYTES)?;
        total += bytes;
        shapes.push(shape);
    }
    (total <= budget).then_some(shapes)
}

/// `Shape`, with the attributes `start` and `end` of opset 15. Negative values count from the end, and both are
/// clamped to the rank.
fn shape_of(node: &Node, shape: &[usize]) -> Tensor {
    let rank = shape.len() as i64;
    let clamp = |axis: i64| (if axis < 0 { axis.saturating_add(rank) } else { axis }).clamp(0, rank) as usize;
    let (start, end) = (clamp(node.int_or("start", 0)), clamp(node.int_or("end", rank)));
    let dims: Vec<i64> = shape[start.min(end)..end].iter().map(|d| *d as i64).collect();
    Tensor::from_i64s(&dims)
}

/// `Size`; `None` on overflow.
fn size_of(shape: &[usize]) -> Option<Tensor> {
    let elements = shape.iter().try_fold(1i64, |n, d| n.checked_mul(i64::try_from(*d).ok()?))?;
    Some(Tensor::scalar(elements))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute,
        infer::infer_shapes,
        testing::{Model, model, ramp},
    };
    use sdrun_abi::DType;

    /// The folded graph, and the bytes that were added.
    fn folded(file: Model, bytes: usize) -> (Graph, usize) {
        let (graph, left) = folded_within(file, FoldBudget { bytes, ..FoldBudget::default() });
        (graph, bytes - left.bytes)
    }

    /// The folded graph, and what is left of the budget.
    fn folded_within(file: Model, mut budget: FoldBudget) -> (Graph, FoldBudget) {
        let mut graph = file.graph();
        infer_shapes(&mut graph).unwrap();
        let before = graph.nodes.len();
        let gone = fold_constants(&mut graph, &mut budget);
        assert_eq!(gone, before - graph.nodes.len());
        (graph, budget)
    }

    const FOLD_BUDGET: usize = 512 << 20;

    fn constant(graph: &Graph, name: &str) -> Option<Vec<i64>> {
        graph.constant(graph.find(name).unwrap())?.to_i64s()
    }

    #[test]
    fn known_shapes_become_constants() {
        let between = |start: i64, end: i64| [("start", Attribute::Int(start)), ("end", Attribute::Int(end))];
        let file = model(17)
            .input("x", DType::F32, "2 3 4")
            .input("open", DType::F32, "n 3")
            .initializer("w", &ramp(&[5, 6]))
            .node("Relu", &["x"], &["r"])
            .node("Shape", &["r"], &["all"])
            .node_with("Shape", &["x"], &["middle"], between(-2, -1))
            .node_with("Shape", &["x"], &["clamped"], between(-9, 9))
            .node_with("Shape", &["x"], &["none"], between(2, 1))
            .node("Size", &["x"], &["size"])
            .node("Shape", &["w"], &["of_weight"])
            .node("Shape", &["open"], &["unknown"])
            .output("r", "2 3 4")
            .output("unknown", "2");
        let (graph, used) = folded(file, FOLD_BUDGET);
        assert_eq!(constant(&graph, "all"), Some(vec![2, 3, 4]));
        assert_eq!(constant(&graph, "middle"), Some(vec![3]));
        assert_eq!(constant(&graph, "clamped"), Some(vec![2, 3, 4]));
        assert_eq!(constant(&graph, "none"), Some(vec![]));
        assert_eq!(constant(&graph, "size"), Some(vec![24]));
        assert_eq!(constant(&graph, "of_weight"), Some(vec![5, 6]));
        assert_eq!(constant(&graph, "unknown"), None);
        assert_eq!(graph.value(graph.find("size").unwrap()).known_shape(), Some(vec![]));
        assert_eq!(used, 8 * (3 + 1 + 3 + 1 + 2));
    }

    #[test]
    fn chains_of_constants_are_computed_in_one_go() {
        let mut graph = chain().graph();
        fold_constants(&mut graph, &mut FoldBudget::default());
        assert_eq!(constant(&graph, "s"), Some(vec![2, 3]));
        assert_eq!(graph.nodes.len(), 3, "sizes of the others are not inferred yet");
        let (graph, _) = folded(chain(), FOLD_BUDGET);
        assert_eq!(constant(&graph, "c"), Some(vec![4, 6, 2, 3]));
        assert_eq!(graph.nodes.iter().map(|n| n.op_type.as_str()).collect::<Vec<_>>(), ["Relu"]);
    }

    fn chain() -> Model {
        model(17)
            .input("x", DType::F32, "2 3")
            .initializer("two", &Tensor::from_i64s(&[2, 2]))
            .node("Shape", &["x"], &["s"])
            .node("Mul", &["s", "two"], &["m"])
            .node_with("Concat", &["m", "s"], &["c"], [("axis", Attribute::Int(0))])
            .node("Relu", &["x"], &["y"])
            .output("y", "?")
            .output("c", "?")
    }

    #[test]
    fn weights_and_random_values_are_left_alone() {
        let file = model(17)
            .initializer("w", &ramp(&[2]))
            .initializer("shape", &Tensor::from_i64s(&[2]))
            .node("Neg", &["w"], &["a"])
            .node_with("RandomNormal", &[], &["b"], [("shape", Attribute::Ints(vec![2]))])
            .node("Bernoulli", &["literal"], &["c"])
            .node_with("Constant", &[], &["literal"], [("value_floats", Attribute::Floats(vec![0.5, 0.5]))])
            .output("a", "2")
            .output("b", "2")
            .output("c", "2");
        let (graph, used) = folded(file, FOLD_BUDGET);
        assert_eq!((graph.nodes.len(), used), (3, 0));
    }

    #[test]
    fn large_results_are_left_to_the_engine() {
        let filled = |n: i64| {
            model(17)
                .initializer("shape", &Tensor::from_i64s(&[n]))
                .node("ConstantOfShape", &["shape"], &["y"])
                .output("y", "?")
        };
        let most = (MAX_RESULT_BYTES / 4) as i64;
        assert_eq!(folded(filled(most), FOLD_BUDGET).0.nodes.len(), 0);
        assert_eq!(folded(filled(most + 1), FOLD_BUDGET).0.nodes.len(), 1);
        assert_eq!(folded(filled(1 << 60), FOLD_BUDGET).0.nodes.len(), 1);
        assert_eq!(folded(filled(100), 399).0.nodes.len(), 1, "the budget limits folding");
        assert_eq!(folded(filled(100), 400).0.nodes.len(), 0);
    }

    /// A small file must not keep the host busy: what takes too long is left to the engine.
    #[test]
    fn work_is_limited() {
        let square = |n: i64, products: usize| {
            let mut file = model(17).initializer("shape", &Tensor::from_i64s(&[n, n])).node(
                "ConstantOfShape",
                &["shape"],
                &["a0"],
            );
            for k in 1..=products {
                let (before, after) = (format!("a{}", k - 1), format!("a{k}"));
                file = file.node("MatMul", &[&before, &before], &[&after]);
            }
            file.output(&format!("a{products}"), "?")
        };
        let steps = |n: u64| n * n * n + 3 * n * n;
        let made = 9 * 10 * 10 + 2;
        let budget = FoldBudget { work: made + 3 * steps(10), ..FoldBudget::default() };
        let (graph, left) = folded_within(square(10, 3), budget);
        assert_eq!((graph.nodes.len(), left.work), (0, 0));
        let (graph, left) = folded_within(square(10, 5), budget);
        assert_eq!((graph.nodes.len(), left.work), (2, 0), "the budget is for the whole graph");
        let (graph, _) = folded_within(square(2000, 1), FoldBudget::default());
        assert_eq!(graph.nodes.len(), 1, "eight billion products");
    }
}
