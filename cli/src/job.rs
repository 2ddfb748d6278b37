//! A model with its shapes and inputs, where `run` and `verify` start.

use crate::{context::Context, model::ModelArgs, tensors::InputArgs};
use sdrun::{
    Model, Shapes, Tensors,
    abi::TensorSpec,
    check_inputs,
    graph::{Dim, Graph, ValueId, WeightsPolicy},
    inputs,
};

pub(crate) struct Job {
    pub(crate) model: Model,
    pub(crate) shapes: Shapes,
    pub(crate) inputs: Tensors,
}

impl Job {
    /// Names of the model's outputs.
    pub(crate) fn output_names(&self) -> Vec<String> {
        let graph = self.model.graph();
        graph.outputs.iter().map(|id| graph.value(*id).name.clone()).collect()
    }
}

/// Opens the model, reads the given inputs and generates the others.
pub(crate) fn prepare(
    what: &str,
    model_args: &ModelArgs,
    input_args: &InputArgs,
    weights: WeightsPolicy,
    context: &Context,
) -> anyhow::Result<Job> {
    let mut shapes = model_args.shapes()?;
    let model = model_args.open(what, weights, context)?;
    let named = |mut spec: TensorSpec| {
        if let Some(shape) = shapes.get(&spec.name) {
            spec.shape = shape.iter().copied().map(Some).collect();
        }
        spec
    };
    let specs: Vec<TensorSpec> = model.inputs().into_iter().map(|(spec, _)| named(spec)).collect();
    let mut inputs = input_args.read(&specs, model.builtin())?;
    let missing = input_args.missing(&specs, &inputs, Some(&model))?;
    for (name, tensor) in &inputs {
        shapes.entry(name.clone()).or_insert_with(|| tensor.shape().to_vec());
    }
    // Shapes and inputs that do not fit are reported before a provider is opened.
    let bound = model.bound(&shapes)?;
    check_inputs(&specs_of(&bound), &inputs)?;
    if !missing.is_empty() {
        fill(&model, &bound, &mut inputs, input_args.seed)?;
    }
    Ok(Job { model, shapes, inputs })
}

/// The inputs of a graph.
fn specs_of(graph: &Graph) -> Vec<TensorSpec> {
    let spec = |id: &ValueId| {
        let value = graph.value(*id);
        let shape = value.shape.iter().flatten().map(Dim::known).collect();
        Some(TensorSpec { name: value.name.clone(), dtype: value.dtype?, shape })
    };
    graph.inputs.iter().filter_map(spec).collect()
}

/// Generates the missing inputs. Built-in models do this by default, with seed 0.
pub(crate) fn fill(
    model: &Model,
    bound: &Graph,
    inputs: &mut Tensors,
    seed: Option<u64>,
) -> sdrun::Result<()> {
    for (name, tensor) in inputs::seeded(model, bound, seed.unwrap_or(0))? {
        inputs.entry(name).or_insert(tensor);
    }
    Ok(())
}
