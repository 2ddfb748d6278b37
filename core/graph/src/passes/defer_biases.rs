use super::{
    eliminate_dead,
    prepare_weights::made_of_weights,
    rewrite::{Names, computing},
    uses::is_op,
};
use crate::{Dim, Graph, Node, Tensor, Value, ValueId, infer::dims};
use std::collections::{BTreeSet, HashMap};

/// Moves weight terms to the end of sums: `(x·w + b) + r` becomes `(x·w + r) + b`, and `(y + a) + b` becomes
/// `y + (a + b)`. [`prepare_weights`](super::prepare_weights) then moves the sum `a + b` out. Thus all biases along a
/// residual stream become one bias, added where the stream is read, and a matrix product only adds the residual.
///
/// The bias of a convolution is split off in the same way if the result goes into a sum.
///
/// Compilers do this themselves if the weights are constants. Sums round differently afterwards. Shapes must be
/// inferred. Returns the number of changed additions.
pub fn defer_biases(graph: &mut Graph) -> usize {
    let mut names = Names::of(graph);
    split_convolutions(graph, &mut names);
    let (mut changed, made) = (0, made_of_weights(graph));
    let mut sums: HashMap<ValueId, Sum> = HashMap::new();
    for node in std::mem::take(&mut graph.nodes) {
        let Some((operands, y)) = operands(&node).filter(|(_, y)| !made.contains(y)) else {
            graph.nodes.push(node);
            continue;
        };
        let (rests, fixed) = split(operands, &sums, &made);
        let sum = match (&rests[..], &fixed[..]) {
            ([rest], [fixed]) => {
                graph.nodes.push(node);
                Sum { rest: *rest, fixed: *fixed }
            }
            (rests, [first, more @ ..]) if !rests.is_empty() && same_shape(graph, rests) => {
                changed += 1;
                let rest =
                    rests[1..].iter().fold(rests[0], |sum, rest| add(graph, &mut names, sum, *rest, None));
                let fixed = more.iter().fold(*first, |sum, fixed| add(graph, &mut names, sum, *fixed, None));
                add(graph, &mut names, rest, fixed, Some(y));
                Sum { rest, fixed }
            }
            _ => {
                graph.nodes.push(node);
                continue;
            }
        };
        if same_shape(graph, &[sum.rest, y]) {
            sums.insert(y, sum);
        }
    }
    eliminate_dead(graph);
    changed
}

/// Turns the bias of each convolution into an addition if the result is added to a value of the same shape.
fn split_convolutions(graph: &mut Graph, names: &mut Names) {
    let made = made_of_weights(graph);
    let mut added = BTreeSet::new();
    for (operands, _) in graph.nodes.iter().filter_map(operands) {
        if same_shape(graph, &operands) && operands.iter().all(|id| !made.contains(id)) {
            added.extend(operands);
        }
    }
    for mut node in std::mem::take(&mut graph.nodes) {
        let parts = node
            .output(0)
            .zip(node.input(2))
            .filter(|(y, bias)| is_op(&node, "Conv") && added.contains(y) && made.contains(bias));
        if let Some((y, bias)) = parts {
            let value = graph.value(y).clone();
            let rank = value.shape.as_ref().map_or(0, Vec::len);
            node.inputs.truncate(2);
            let plain = names.add_value(graph, Value { name: format!("{}_plain", value.name), ..value });
            node.outputs = vec![Some(plain)];
            graph.nodes.push(node);
            let along = along_channels(graph, names, bias, rank);
            add(graph, names, plain, along, Some(y));
        } else {
            graph.nodes.push(node);
        }
    }
}

/// Reshapes a bias so that it can be added to the result of a convolution.
fn along_channels(graph: &mut Graph, names: &mut Names, bias: ValueId, rank: usize) -> ValueId {
    let Value { name, dtype, shape } = graph.value(bias).clone();
    let mut dims = vec![Dim::Known(1); rank];
    let mut target = vec![1; rank];
    if let (Some([channels]), true) = (shape.as_deref(), rank > 1) {
        dims[1] = channels.clone();
        target[1] = -1;
    }
    let named = |suffix: &str| format!("{name}_{suffix}");
    let target = names.add_constant(graph, named("target"), Tensor::from_i64s(&target));
    let along = names.add_value(graph, Value { name: named("along"), dtype, shape: Some(dims) });
    let reshape = computing(graph, "Reshape", &[bias, target], along);
    graph.nodes.push(reshape);
    along
}

/// A value as a sum.
struct Sum {
    rest: ValueId,
    /// Computed from weights.
    fixed: ValueId,
}

/// The operands of an addition, and its result.
fn operands(node: &Node) -> Option<([ValueId; 2], ValueId)> {
    is_op(node, "Add").then_some(())?;
    Some(([node.input(0)?, node.input(1)?], node.output(0)?))
}

/// Splits the operands of a sum into those not computed from weights and those that are.
fn split(
    operands: [ValueId; 2],
    sums: &HashMap<ValueId, Sum>,
    made: &BTreeSet<ValueId>,
) -> (Vec<ValueId>, Vec<ValueId>) {
    let (mut rests, mut fixed) = (Vec::new(), Vec::new());
    for id in operands {
        match sums.get(&id) {
            Some(sum) => {
                rests.push(sum.rest);
                fixed.push(sum.fixed);
            }
            None if made.contains(&id) => fixed.push(id),
            None => rests.push(id),
        }
    }
    (rests, fixed)
}

fn same_shape(graph: &Graph, ids: &[ValueId]) -> bool {
    let shape = |id: &ValueId| graph.value(*id).known_shape();
    ids.iter().all(|id| shape(id).is_some() && shape(id) == shape(&ids[0]))
}

/// Appends an addition to the graph; its result is `y` or a new value.
fn add(graph: &mut Graph, names: &mut Names, a: ValueId, b: ValueId, y: Option<ValueId>) -> ValueId {
    let y = y.unwrap_or_else(|| {
        let (left, right) = (graph.value(a), graph.value(b));
        let shape = left.shape.as_ref().zip(right.shape.as_ref());
        let shape = shape.and_then(|(left, right)| dims::broadcast(left, right).ok());
        let value = Value { name: format!("{}_deferred", right.name), dtype: left.dtype, shape };
        names.add_value(graph, value)
    });
    let sum = computing(graph, "Add", &[a, b], y);
    graph.nodes.push(sum);
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        passes::{
            Prepare, prepare_weights,
            testing::{check, noise, ops},
        },
        testing::model,
    };
    use sdrun_abi::DType;

    #[test]
    fn biases_of_a_residual_stream_are_merged() {
        let file = model(17)
            .input("x", DType::F32, "2 3 4")
            .initializer("position", &noise(&[1, 3, 4], 1))
            .initializer("w1", &noise(&[4, 4], 2))
            .initializer("w2", &noise(&[4, 4], 3))
            .initializer("b1", &noise(&[4], 4))
            .initializer("b2", &noise(&[4], 5))
            .node("Add", &["x", "position"], &["s0"])
            .node("Tanh", &["s0"], &["t0"])
            .node("MatMul", &["t0", "w1"], &["p1"])
            .node("Add", &["b1", "p1"], &["a1"])
            .node("Add", &["s0", "a1"], &["s1"])
            .node("Tanh", &["s1"], &["t1"])
            .node("MatMul", &["t1", "w2"], &["p2"])
            .node("Add", &["p2", "b2"], &["a2"])
            .node("Add", &["a2", "s1"], &["y"])
            .output("y", "2 3 4");
        let mut graph = check(&file, defer_biases, 2);
        let preparation = prepare_weights(&mut graph, Prepare::Everything);
        assert_eq!(ops(&preparation), ["Add", "Add"]);
        // Each product only adds its residual. Readers of the stream add all biases at once.
        let rest = ["Add", "Tanh", "MatMul", "Add", "Add", "Tanh", "MatMul", "Add", "Add"];
        assert_eq!(ops(&graph), rest);
    }

    #[test]
    fn biases_of_convolutions_are_merged_too() {
        let file = model(17)
            .input("x", DType::F32, "2 3 4 5")
            .initializer("w1", &noise(&[3, 3, 1, 1], 1))
            .initializer("w2", &noise(&[3, 3, 1, 1], 2))
            .initializer("w3", &noise(&[3, 3, 1, 1], 3))
            .initializer("b1", &noise(&[3], 4))
            .initializer("b2", &noise(&[3], 5))
            .initializer("b3", &noise(&[3], 6))
            .node("Conv", &["x", "w1", "b1"], &["stream"])
            .node("Tanh", &["stream"], &["t"])
            .node("Conv", &["t", "w2", "b2"], &["inner"])
            .node("Tanh", &["inner"], &["u"])
            .node("Conv", &["u", "w3", "b3"], &["h"])
            .node("Add", &["stream", "h"], &["y"])
            .output("y", "2 3 4 5");
        let mut graph = check(&file, defer_biases, 1);
        let preparation = prepare_weights(&mut graph, Prepare::Everything);
        assert_eq!(ops(&preparation), ["Reshape", "Reshape", "Add"]);
        assert_eq!(ops(&graph), ["Conv", "Add", "Tanh", "Conv", "Tanh", "Conv", "Add", "Add"]);
        let biased = graph.nodes.iter().filter(|n| n.op_type == "Conv" && n.inputs.len() == 3);
        assert_eq!(biased.count(), 1, "the one in the middle");
    }

    #[test]
    fn sums_of_other_shapes_stay() {
        let file = model(17)
            .input("x", DType::F32, "2 3 4")
            .input("row", DType::F32, "4")
            .initializer("b1", &noise(&[4], 1))
            .initializer("b2", &noise(&[2, 3, 4], 2))
            .node("Add", &["x", "b1"], &["a"])
            .node("Add", &["a", "row"], &["s"])
            .node("Add", &["row", "b2"], &["wide"])
            .node("Add", &["wide", "s"], &["y"])
            .output("y", "2 3 4");
        check(&file, defer_biases, 0);
    }
}
