//! Whole graphs through the evaluator of `sdrun-graph`, which knows single nodes.

use sdrun::graph::{Graph, Initializer, Tensor, ValueId, WeightData, eval};
use std::collections::BTreeMap;

/// All values of a graph whose weights are in its file. `None` if an input is missing, or if the evaluator does not support a node.
pub fn evaluate(graph: &Graph, input: impl Fn(&str) -> Option<Tensor>) -> Option<BTreeMap<ValueId, Tensor>> {
    let mut values = BTreeMap::new();
    for id in &graph.inputs {
        values.insert(*id, input(&graph.value(*id).name)?);
    }
    for (id, initializer) in &graph.initializers {
        let tensor = match initializer {
            Initializer::Constant(tensor) => tensor.clone(),
            Initializer::Weight(weight) => match &weight.data {
                WeightData::Inline(bytes) => {
                    Tensor::new(weight.dtype, weight.shape.clone(), bytes.clone()).ok()?
                }
                _ => return None,
            },
        };
        values.insert(*id, tensor);
    }
    for node in &graph.nodes {
        let inputs: Vec<Option<&Tensor>> =
            node.inputs.iter().map(|id| id.and_then(|id| values.get(&id))).collect();
        let outputs = eval::evaluate(node, graph.opset(), &inputs).ok()?;
        let named = node.outputs.iter().zip(outputs).filter_map(|(id, tensor)| Some(((*id)?, tensor)));
        values.extend(named);
    }
    Some(values)
}
