//! What is computed out of weights before they are bound: concatenated projections, transpositions, casts.

use bytes::Bytes;
use sdrun_abi::{Error, Result, WeightSource, WeightSpec};
use sdrun_graph::{
    Graph, Initializer, Tensor, ValueId, eval,
    passes::{PreparationStep, preparation_steps},
};
use sdrun_provider_common::{graph_error, weight};
use std::collections::HashMap;

/// A graph from weights to parameters of a program; see [`sdrun_graph::passes::prepare_weights`].
#[derive(Default)]
pub(crate) struct Preparation {
    graph: Graph,
    steps: Vec<PreparationStep>,
}

impl Preparation {
    pub(crate) fn new(graph: Graph) -> Self {
        let steps = preparation_steps(&graph);
        Preparation { graph, steps }
    }

    /// Its steps that need one of the weights for which `changed` answers true.
    pub(crate) fn steps(&self, changed: impl Fn(&str) -> bool) -> impl Iterator<Item = &PreparationStep> {
        self.steps.iter().filter(move |step| step.weights.iter().any(|name| changed(name)))
    }

    /// The parameter a step makes.
    pub(crate) fn name(&self, step: &PreparationStep) -> &str {
        &self.graph.value(step.output).name
    }

    /// Computes a step. At most its weights and what is made of them is in memory.
    pub(crate) fn compute(&self, step: &PreparationStep, source: &dyn WeightSource) -> Result<Tensor> {
        let mut last_use: HashMap<ValueId, usize> = HashMap::new();
        for index in &step.nodes {
            last_use.extend(self.graph.nodes[*index].inputs.iter().flatten().map(|id| (*id, *index)));
        }
        let mut values: HashMap<ValueId, Tensor> = HashMap::new();
        for index in &step.nodes {
            let node = &self.graph.nodes[*index];
            for id in node.inputs.iter().flatten() {
                if let Some(initializer) = self.graph.initializers.get(id)
                    && !values.contains_key(id)
                {
                    values.insert(*id, self.initializer(*id, initializer, source)?);
                }
            }
            let inputs: Vec<Option<&Tensor>> =
                node.inputs.iter().map(|id| id.and_then(|id| values.get(&id))).collect();
            let outputs = eval::evaluate(node, self.graph.opset(), &inputs)
                .map_err(|e| Error::unsupported(format!("cannot prepare `{}`: {e}", self.name(step))))?;
            let outputs = node.outputs.iter().zip(outputs).filter_map(|(id, tensor)| Some(((*id)?, tensor)));
            values.extend(outputs);
            values.retain(|id, _| *id == step.output || last_use.get(id).is_some_and(|last| last > index));
        }
        values.remove(&step.output).ok_or_else(|| {
            Error::internal(format!("the preparation of `{}` does not make it", self.name(step)))
        })
    }

    fn initializer(&self, id: ValueId, stored: &Initializer, source: &dyn WeightSource) -> Result<Tensor> {
        match stored {
            Initializer::Constant(tensor) => Ok(tensor.clone()),
            Initializer::Weight(place) => {
                let name = self.graph.value(id).name.clone();
                let spec = WeightSpec { name, dtype: place.dtype, shape: place.shape.clone() };
                let weight = weight(source, &spec)?;
                let data = Bytes::copy_from_slice(weight.data());
                Tensor::new(spec.dtype, spec.shape, data).map_err(graph_error)
            }
        }
    }
}
