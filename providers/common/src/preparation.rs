//! Tensors computed from weights when weights are loaded: concatenated projections, folded normalizations, dequantized
//! filters.

use crate::{converted, graph_error, weight};
use bytes::Bytes;
use sdrun_abi::{DType, Error, Result, WeightSource, WeightSpec};
use sdrun_graph::{
    Graph, Initializer, Tensor, ValueId, eval,
    passes::{PreparationStep, convert_precision, preparation_steps},
};
use std::collections::{BTreeMap, HashMap};

/// A graph that computes the tensors an engine reads in place of weights; see [`sdrun_graph::passes::prepare_weights`].
#[derive(Default)]
pub struct Preparation {
    graph: Graph,
    steps: Vec<PreparationStep>,
    /// The step that computes each output.
    by_name: BTreeMap<String, usize>,
    /// The weights it reads, in their source's types and shapes.
    weights: BTreeMap<ValueId, WeightSpec>,
}

impl Preparation {
    /// Computes in the types of the graph.
    pub fn new(graph: Graph) -> Self {
        let steps = preparation_steps(&graph);
        let name = |step: &PreparationStep| graph.value(step.output).name.clone();
        let by_name = steps.iter().enumerate().map(|(index, step)| (name(step), index)).collect();
        let spec = |(id, initializer): (&ValueId, &Initializer)| match initializer {
            Initializer::Constant(_) => None,
            Initializer::Weight(w) => {
                let name = graph.value(*id).name.clone();
                Some((*id, WeightSpec { name, dtype: w.dtype, shape: w.shape.clone() }))
            }
        };
        let weights = graph.initializers.iter().filter_map(spec).collect();
        Preparation { steps, by_name, weights, graph }
    }

    /// Computes in f32 and rounds once, to the type of each output.
    pub fn in_f32(graph: Graph) -> Self {
        let Preparation { mut graph, weights, .. } = Preparation::new(graph);
        convert_precision(&mut graph, DType::F32);
        Preparation { weights, ..Preparation::new(graph) }
    }

    /// The weights it reads.
    pub fn weights(&self) -> impl Iterator<Item = &WeightSpec> {
        self.weights.values()
    }

    /// Names, types and shapes of its outputs.
    pub fn outputs(&self) -> impl Iterator<Item = WeightSpec> {
        let spec = |step: &PreparationStep| {
            let value = self.graph.value(step.output);
            Some(WeightSpec { name: value.name.clone(), dtype: value.dtype?, shape: value.known_shape()? })
        };
        self.steps.iter().filter_map(spec)
    }

    /// The steps that read a weight for which `changed` returns true.
    pub fn steps(&self, changed: impl Fn(&str) -> bool) -> impl Iterator<Item = &PreparationStep> {
        self.steps.iter().filter(move |step| step.weights.iter().any(|name| changed(name)))
    }

    /// The step that computes the output of this name.
    pub fn step(&self, name: &str) -> Option<&PreparationStep> {
        self.by_name.get(name).map(|index| &self.steps[*index])
    }

    /// The name of a step's output.
    pub fn name(&self, step: &PreparationStep) -> &str {
        &self.graph.value(step.output).name
    }

    /// Computes a step. Keeps only the step's weights and intermediate results in memory.
    ///
    /// # Errors
    /// The errors of `source`; `InvalidArgument` for a weight of another type or shape; `Unimplemented` if an operator is
    /// not supported.
    pub fn compute(&self, step: &PreparationStep, source: &dyn WeightSource) -> Result<Tensor> {
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
        match (stored, self.weights.get(&id)) {
            (Initializer::Constant(tensor), _) => Ok(tensor.clone()),
            (Initializer::Weight(place), Some(spec)) => {
                let weight = converted(weight(source, spec)?, &spec.name, place.dtype)?;
                let data = Bytes::copy_from_slice(weight.data());
                Tensor::new(weight.dtype, weight.shape, data).map_err(graph_error)
            }
            (Initializer::Weight(_), None) => {
                Err(Error::internal(format!("weight `{}` has no specification", self.graph.value(id).name)))
            }
        }
    }
}
