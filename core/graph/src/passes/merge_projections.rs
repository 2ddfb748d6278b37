use super::{prepare_weights::made_of_weights, rewrite::Names};
use crate::{Attribute, Dim, Graph, Node, Tensor, Value, ValueId};
use sdrun_abi::DType;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Merges matrix products of one value with several weights into one product: the projections Q, K and V of an
/// attention, or the K and V of every layer that attends to the same text. The biases added to them are merged too if
/// all products have one.
///
/// Compilers do this themselves if the weights are constants. Here the graph concatenates the weights, so they remain
/// weights under their names, and [`prepare_weights`](super::prepare_weights) moves that work out. Values that it can
/// move out count as weights. Shapes must be inferred. Returns the number of removed products.
pub fn merge_projections(graph: &mut Graph) -> usize {
    let mut users: HashMap<ValueId, usize> = HashMap::new();
    for id in graph.nodes.iter().flat_map(|n| n.inputs.iter().flatten()).chain(&graph.outputs) {
        *users.entry(*id).or_default() += 1;
    }
    for id in graph.captures().into_values().flatten() {
        *users.entry(id).or_default() += 1;
    }
    let made = made_of_weights(graph);
    // Nodes computed from weights come first, so that their results are available to every group.
    let is_made = |node: &Node| node.output(0).is_some_and(|id| made.contains(&id));
    graph.nodes.sort_by_key(|node| !is_made(node));
    let mut groups: BTreeMap<(ValueId, Key), Vec<Projection>> = BTreeMap::new();
    for index in 0..graph.nodes.len() {
        if let Some((source, key, projection)) = Projection::at(graph, index, &users, &made) {
            groups.entry((source, key)).or_default().push(projection);
        }
    }
    let (mut merged, mut gone) = (0, vec![false; graph.nodes.len()]);
    let (mut made, mut names) = (BTreeMap::<usize, Vec<Node>>::new(), Names::of(graph));
    for ((source, key), group) in groups.into_iter().filter(|(_, group)| group.len() > 1) {
        for projection in &group {
            gone[projection.product] = true;
            projection.sum.into_iter().for_each(|sum| gone[sum] = true);
        }
        merged += group.len() - 1;
        let first = group.iter().map(|projection| projection.product).min().unwrap_or_default();
        made.insert(first, replacement(graph, &mut names, source, &key, &group));
    }
    let old = std::mem::take(&mut graph.nodes);
    for (index, node) in old.into_iter().enumerate() {
        graph.nodes.extend(made.remove(&index).into_iter().flatten());
        if !gone[index] {
            graph.nodes.push(node);
        }
    }
    merged
}

/// What the projections of a group share besides their source.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    dtype: DType,
    /// Rows of the weights.
    inner: usize,
    biased: bool,
}

/// `source · weight`, or `source · weight + bias`.
struct Projection {
    product: usize,
    sum: Option<usize>,
    weight: ValueId,
    bias: Option<ValueId>,
    columns: usize,
    output: ValueId,
}

impl Projection {
    fn at(
        graph: &Graph,
        index: usize,
        users: &HashMap<ValueId, usize>,
        made: &BTreeSet<ValueId>,
    ) -> Option<(ValueId, Key, Self)> {
        let node = &graph.nodes[index];
        if node.op_type != "MatMul" || !node.domain.is_empty() {
            return None;
        }
        let (source, weight, product) = (node.input(0)?, node.input(1)?, node.output(0)?);
        let [inner, columns] = made.contains(&weight).then(|| graph.value(weight).known_shape())??[..] else {
            return None;
        };
        let rank = graph.value(source).known_shape()?.len();
        if made.contains(&source) || graph.initializers.contains_key(&source) || rank < 2 {
            return None;
        }
        let bias = (users.get(&product) == Some(&1))
            .then(|| bias_of(graph, index, product, columns, made))
            .flatten();
        let (sum, bias, output) = match bias {
            Some((sum, bias, output)) => (Some(sum), Some(bias), output),
            None => (None, None, product),
        };
        let key = Key { dtype: graph.value(weight).dtype?, inner, biased: bias.is_some() };
        Some((source, key, Projection { product: index, sum, weight, bias, columns, output }))
    }
}

/// The addition of a bias of `columns` elements to `product`, which has no other user.
fn bias_of(
    graph: &Graph,
    index: usize,
    product: ValueId,
    columns: usize,
    made: &BTreeSet<ValueId>,
) -> Option<(usize, ValueId, ValueId)> {
    let users = graph.nodes.iter().enumerate().skip(index + 1);
    let (sum, node) = users.into_iter().find(|(_, node)| node.inputs.contains(&Some(product)))?;
    let other = if node.input(0) == Some(product) { node.input(1)? } else { node.input(0)? };
    let bias = made.contains(&other).then(|| graph.value(other).known_shape())??;
    let plain = node.op_type == "Add" && node.domain.is_empty() && bias == [columns];
    plain.then_some((sum, other, node.output(0)?))
}

/// The nodes that compute a whole group at once.
fn replacement(
    graph: &mut Graph,
    names: &mut Names,
    source: ValueId,
    key: &Key,
    group: &[Projection],
) -> Vec<Node> {
    let base = graph.value(group[0].output).name.clone();
    let mut add = |suffix: &str, shape: Option<Vec<Dim>>| {
        let name = format!("{base}_merged_{suffix}");
        names.add_value(graph, Value { name, dtype: Some(key.dtype), shape })
    };
    let columns: usize = group.iter().map(|projection| projection.columns).sum();
    let known = |dims: &[usize]| Some(dims.iter().map(|d| Dim::Known(*d)).collect());
    let weight = add("weight", known(&[key.inner, columns]));
    let bias = key.biased.then(|| add("bias", known(&[columns])));
    let (product, sum) = (add("product", None), key.biased.then(|| add("sum", None)));
    let mut shape = graph.value(source).shape.clone().unwrap_or_default();
    if let Some(last) = shape.last_mut() {
        *last = Dim::Known(columns);
    }
    for id in [Some(product), sum].into_iter().flatten() {
        graph.value_mut(id).shape = Some(shape.clone());
    }
    let axis = shape.len() as i64 - 1;
    let sizes: Vec<i64> = group.iter().map(|projection| projection.columns as i64).collect();

    let node =
        |op: &str, inputs: Vec<ValueId>, outputs: Vec<ValueId>, attributes: &[(&str, Attribute)]| Node {
            name: format!("{base}_merged_{op}"),
            domain: String::new(),
            op_type: op.into(),
            inputs: inputs.into_iter().map(Some).collect(),
            outputs: outputs.into_iter().map(Some).collect(),
            attributes: attributes.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            metadata: BTreeMap::new(),
        };
    let along = |axis: i64| ("axis", Attribute::Int(axis));
    let weights = group.iter().map(|projection| projection.weight).collect();
    let mut nodes = vec![
        node("Concat", weights, vec![weight], &[along(1)]),
        node("MatMul", vec![source, weight], vec![product], &[]),
    ];
    let mut whole = product;
    if let (Some(bias), Some(sum)) = (bias, sum) {
        let biases = group.iter().filter_map(|projection| projection.bias).collect();
        nodes.push(node("Concat", biases, vec![bias], &[along(0)]));
        nodes.push(node("Add", vec![product, bias], vec![sum], &[]));
        whole = sum;
    }
    let outputs = group.iter().map(|projection| projection.output).collect();
    if graph.opset() < 13 {
        nodes.push(node("Split", vec![whole], outputs, &[along(axis), ("split", Attribute::Ints(sizes))]));
    } else {
        let split = names.add_constant(graph, format!("{base}_merged_sizes"), Tensor::from_i64s(&sizes));
        nodes.push(node("Split", vec![whole, split], outputs, &[along(axis)]));
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ExternalBase, OpenDims, Placement, simplify,
        testing::{Model, model, ramp, run},
    };

    /// Q, K and V of `x` with biases (one added from the left), two projections of `text`, and others that must not
    /// be merged.
    fn attention(opset: i64) -> Model {
        model(opset)
            .input("x", DType::F32, "2 5 4")
            .input("text", DType::F32, "3 4")
            .initializer("wq", &ramp(&[4, 6]))
            .initializer("wk", &ramp(&[4, 6]))
            .initializer("wv", &ramp(&[4, 3]))
            .initializer("bq", &ramp(&[6]))
            .initializer("bk", &ramp(&[6]))
            .initializer("bv", &ramp(&[3]))
            .initializer("wo", &ramp(&[4, 2]))
            .node("MatMul", &["x", "wq"], &["xq"])
            .node("Add", &["bq", "xq"], &["q"])
            .node("MatMul", &["x", "wk"], &["xk"])
            .node("Add", &["xk", "bk"], &["k"])
            .node("MatMul", &["text", "wq"], &["t1"])
            .node("MatMul", &["x", "wv"], &["xv"])
            .node("Add", &["xv", "bv"], &["v"])
            .node("MatMul", &["text", "wo"], &["t2"])
            .node("MatMul", &["x", "wo"], &["alone"])
            .node("Add", &["t1", "bq"], &["t3"])
            .node("Relu", &["t1"], &["t4"])
            .output("q", "2 5 6")
            .output("k", "2 5 6")
            .output("v", "2 5 3")
            .output("t2", "3 2")
            .output("alone", "2 5 2")
            .output("t3", "3 6")
            .output("t4", "3 6")
    }

    #[test]
    fn projections_of_one_value_become_one() {
        for opset in [11, 17] {
            let mut graph = attention(opset).graph();
            simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse).unwrap();
            let inputs = [("x", ramp(&[2, 5, 4])), ("text", ramp(&[3, 4]))];
            let expected = run(&graph, &inputs);
            assert_eq!(merge_projections(&mut graph), 3);
            let products = graph.nodes.iter().filter(|n| n.op_type == "MatMul").count();
            assert_eq!(products, 3, "Q, K, V; the text's two; and the one without a bias");
            // The result is a valid graph: it can be written, read and simplified again.
            let bytes = graph.to_onnx(|name, weight| Ok(Placement::Inline(weight.read(name)?))).unwrap();
            let mut reread = Graph::from_bytes(bytes.into(), "m", ExternalBase::Stripped).unwrap();
            simplify(&mut reread, &BTreeMap::new(), OpenDims::Refuse).unwrap();
            assert_eq!(run(&reread, &inputs), expected);
            let weights =
                |graph: &Graph| graph.weights().map(|(name, _)| name.to_string()).collect::<Vec<_>>();
            assert_eq!(weights(&reread), ["bk", "bq", "bv", "wk", "wo", "wq", "wv"]);
            let preparation = super::super::prepare_weights(&mut reread, super::super::Prepare::NotGrowing);
            assert!(preparation.nodes.iter().all(|n| n.op_type == "Concat") && preparation.nodes.len() == 3);
            assert!(reread.nodes.iter().all(|n| n.op_type != "Concat"));
            assert_eq!(merge_projections(&mut reread), 0);
        }
    }
}
