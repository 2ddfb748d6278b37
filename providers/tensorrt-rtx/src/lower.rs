//! Decomposes operators whose decomposition by the library would make their weights constant.

use crate::table::Transform;
use sdrun_abi::DType;
use sdrun_graph::{
    Dim, Graph, GraphError, Initializer, Node, Value, ValueId, WeightData, WeightRef, infer::infer_shapes,
    passes::eliminate_dead,
};
use std::collections::BTreeMap;

/// Writes batch normalizations as `x * scale' + bias'` with two new weights, and returns how to compute them. The
/// parser would fold the four weights in the same way, but cannot make the result refittable, and without a GPU the
/// library cannot compute with weights alone.
///
/// # Errors
/// Returns the errors of shape inference.
pub(crate) fn lower_batch_norms(graph: &mut Graph) -> Result<BTreeMap<String, Transform>, GraphError> {
    let mut made = BTreeMap::new();
    if !graph.nodes.iter().any(|node| node.op_type == "BatchNormalization") {
        return Ok(made);
    }
    let mut nodes = Vec::with_capacity(graph.nodes.len());
    for node in std::mem::take(&mut graph.nodes) {
        let rank = node.input(0).and_then(|x| graph.value(x).shape.as_ref().map(Vec::len));
        let output = node.output(0).filter(|_| node.outputs.iter().skip(1).flatten().next().is_none());
        let sources: Option<Vec<ValueId>> =
            (1..5).map(|i| node.input(i).filter(|id| is_weight(graph, *id))).collect();
        match (&*node.op_type, node.input(0), rank, output, sources) {
            ("BatchNormalization", Some(x), Some(rank @ 2..), Some(y), Some(sources)) => {
                let names: Vec<String> = sources.iter().map(|id| graph.value(*id).name.clone()).collect();
                let Ok(sources) = <[String; 4]>::try_from(names) else { continue };
                let epsilon = node.float("epsilon").unwrap_or(1e-5);
                let scale = Transform::BatchNormScale { sources: sources.clone(), epsilon };
                let bias = Transform::BatchNormBias { sources, epsilon };
                let like = graph.value(x).clone();
                let [scale, bias] = [scale, bias].map(|transform| {
                    let id = new_weight(graph, &node, rank);
                    made.insert(graph.value(id).name.clone(), transform);
                    id
                });
                let scaled = graph.add_value(Value { name: unique(graph, &node.name, "scaled"), ..like });
                nodes.push(elementwise(&node, "Mul", x, scale, scaled));
                nodes.push(elementwise(&node, "Add", scaled, bias, y));
            }
            _ => nodes.push(node),
        }
    }
    graph.nodes = nodes;
    eliminate_dead(graph);
    infer_shapes(graph)?;
    Ok(made)
}

fn is_weight(graph: &Graph, id: ValueId) -> bool {
    matches!(graph.initializers.get(&id), Some(Initializer::Weight(_)))
}

/// A new weight with one number per channel, to broadcast over dimension 1 of `rank`.
fn new_weight(graph: &mut Graph, node: &Node, rank: usize) -> ValueId {
    let value = |i: usize| node.input(i).map(|id| graph.value(id));
    let dtype = value(1).and_then(|v| v.dtype).unwrap_or(DType::F32);
    let channels =
        value(1).and_then(Value::known_shape).and_then(|shape| shape.first().copied()).unwrap_or(1);
    let shape: Vec<usize> = [channels].into_iter().chain(std::iter::repeat_n(1, rank - 2)).collect();
    let name = unique(graph, &node.name, "folded");
    let dims = shape.iter().map(|d| Dim::Known(*d)).collect();
    let id = graph.add_value(Value { name: name.clone(), dtype: Some(dtype), shape: Some(dims) });
    let data = WeightData::Absent { location: name, offset: 0 };
    graph.initializers.insert(id, Initializer::Weight(WeightRef { dtype, shape, data }));
    id
}

fn unique(graph: &Graph, node: &str, what: &str) -> String {
    let taken = |name: &String| graph.values.iter().any(|value| value.name == *name);
    let names = (0..).map(|i| format!("{node}/{what}_{i}"));
    names.into_iter().find(|name| !taken(name)).unwrap_or_default()
}

fn elementwise(of: &Node, op: &str, a: ValueId, b: ValueId, y: ValueId) -> Node {
    Node {
        name: format!("{}/{op}", of.name),
        domain: String::new(),
        op_type: op.into(),
        inputs: vec![Some(a), Some(b)],
        outputs: vec![Some(y)],
        attributes: BTreeMap::new(),
        metadata: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Entry;
    use sdrun_abi::{Error, Weight, WeightSource, WeightSpec};
    use sdrun_graph::{Tensor, eval};

    struct Given<'a>(&'a BTreeMap<&'a str, Tensor>);

    impl WeightSource for Given<'_> {
        fn get(&self, name: &str) -> sdrun_abi::Result<Weight<'_>> {
            let tensor = self.0.get(name).ok_or_else(|| Error::not_found(name.to_string()))?;
            Weight::new(tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())
        }
    }

    fn evaluate(graph: &Graph, given: &BTreeMap<&str, Tensor>) -> Tensor {
        let mut values: BTreeMap<ValueId, Tensor> = BTreeMap::new();
        for (index, value) in graph.values.iter().enumerate() {
            let id = ValueId(index as u32);
            let constant = graph.constant(id).cloned();
            values.extend(given.get(&*value.name).cloned().or(constant).map(|tensor| (id, tensor)));
        }
        for node in &graph.nodes {
            let inputs: Vec<Option<&Tensor>> =
                node.inputs.iter().map(|id| id.map(|id| &values[&id])).collect();
            let outputs = eval::evaluate(node, graph.opset(), &inputs).unwrap();
            values.extend(node.outputs.iter().flatten().copied().zip(outputs));
        }
        values[&graph.outputs[0]].clone()
    }

    #[test]
    fn a_lowered_batch_norm_computes_the_same() {
        let mut graph = Graph { ir_version: 8, ..Default::default() };
        graph.opsets.insert(String::new(), 17);
        let mut value = |name: &str, shape: &[usize]| {
            let shape = shape.iter().map(|d| Dim::Known(*d)).collect();
            graph.add_value(Value { name: name.into(), dtype: Some(DType::F32), shape: Some(shape) })
        };
        let ids = [
            value("x", &[2, 3, 2, 2]),
            value("s", &[3]),
            value("b", &[3]),
            value("m", &[3]),
            value("v", &[3]),
        ];
        let y = value("y", &[2, 3, 2, 2]);
        for (id, name) in ids.iter().zip(["x", "s", "b", "m", "v"]).skip(1) {
            let data = WeightData::Absent { location: name.into(), offset: 0 };
            let weight = WeightRef { dtype: DType::F32, shape: vec![3], data };
            graph.initializers.insert(*id, Initializer::Weight(weight));
        }
        graph.inputs.push(ids[0]);
        graph.outputs.push(y);
        graph.nodes.push(Node {
            name: "bn".into(),
            domain: String::new(),
            op_type: "BatchNormalization".into(),
            inputs: ids.iter().copied().map(Some).collect(),
            outputs: vec![Some(y)],
            attributes: BTreeMap::new(),
            metadata: BTreeMap::new(),
        });
        let tensor = |shape: &[usize], from: f32| {
            let n = shape.iter().product::<usize>();
            let values: Vec<f32> = (0..n).map(|i| from + i as f32 * 0.37).collect();
            Tensor::from_elements(shape.to_vec(), &values).unwrap()
        };
        let given = BTreeMap::from([
            ("x", tensor(&[2, 3, 2, 2], -1.0)),
            ("s", tensor(&[3], 0.5)),
            ("b", tensor(&[3], -0.2)),
            ("m", tensor(&[3], 0.1)),
            ("v", tensor(&[3], 0.9)),
        ]);
        let expected = evaluate(&graph, &given).to_f32s().unwrap();
        let made = lower_batch_norms(&mut graph).unwrap();
        let ops: Vec<&str> = graph.nodes.iter().map(|node| node.op_type.as_str()).collect();
        assert_eq!((ops, graph.weights().count(), made.len()), (vec!["Mul", "Add"], 2, 2));
        let spec = |name: &str| WeightSpec { name: name.into(), dtype: DType::F32, shape: vec![3] };
        let specs = ["s", "b", "m", "v"].map(spec);
        let specs: BTreeMap<&str, &WeightSpec> =
            specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
        let mut lowered = BTreeMap::from([("x", given["x"].clone())]);
        for (name, transform) in &made {
            let entry =
                Entry { name: name.clone(), dtype: DType::F32, count: 3, transform: transform.clone() };
            let bytes = entry.values(&specs, &Given(&given)).unwrap().bytes().to_vec();
            lowered.insert(name, Tensor::new(DType::F32, vec![3, 1, 1], bytes).unwrap());
        }
        let found = evaluate(&graph, &lowered);
        assert_eq!(found.shape(), [2, 3, 2, 2]);
        let worst =
            found.to_f32s().unwrap().iter().zip(&expected).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst < 1e-6, "{worst}");
    }
}
