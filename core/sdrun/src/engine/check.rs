//! Checks between graphs, weights, engines and inputs.

use super::BuildOptions;
use crate::{Error, Result, Tensors};
use sdrun_abi::{
    Capabilities, DType, EngineInfo, Error as AbiError, Hint, TensorSpec, TensorView, WeightSource,
    WeightSpec, shape_fits,
};
use sdrun_graph::Graph;
use sdrun_weights::{Cast, check_complete};
use std::collections::HashMap;

/// Specifications of a graph's weights.
pub(crate) fn weight_specs(graph: &Graph) -> Vec<WeightSpec> {
    graph
        .weights()
        .map(|(name, w)| WeightSpec { name: name.to_string(), dtype: w.dtype, shape: w.shape.clone() })
        .collect()
}

/// Checks that `weights` has all weights of a graph with matching shapes; types may differ, since they are converted.
/// Reads no values.
///
/// Errors: those of [`check_complete`](sdrun_weights::check_complete).
pub fn check_weights(graph: &Graph, weights: &dyn WeightSource) -> Result<()> {
    let specs = weight_specs(graph);
    Ok(check_complete(&specs, &Cast::new(weights, &specs))?)
}

/// XXH3-128 over the names and bytes of all weights, for engines that contain them.
pub(super) fn fingerprint(specs: &[WeightSpec], weights: &dyn WeightSource) -> Result<String> {
    let mut names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    names.sort_unstable();
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for name in names {
        hash.update(name.as_bytes());
        hash.update(&[0]);
        hash.update(weights.get(name)?.data());
    }
    Ok(format!("{:032x}", hash.digest128()))
}

/// `Unimplemented` if the options exceed what the provider can do on the device.
pub(crate) fn check_options(id: &str, offered: &Capabilities, options: &BuildOptions) -> Result<()> {
    let device = &options.device.name;
    options.precision.check_offered(&offered.precisions, device).map_err(Error::of(id))?;
    let refuse = |why: String, hint: Hint| Err(Error::of(id)(AbiError::unsupported(why).with_hint(hint)));
    let leave_out = |option: &str| Hint::LeaveOut { option: option.into() };
    if options.bake && !offered.bake {
        return refuse("cannot store weights in an engine".into(), leave_out("bake"));
    }
    if !options.open_shapes.is_empty() && !offered.dynamic_shapes {
        let input = options.open_shapes.keys().next().cloned();
        return refuse("makes engines for one shape of each input".into(), Hint::GiveShape { input });
    }
    if options.vram_budget.is_some() && !offered.streaming {
        let why = format!("cannot leave weights out of the memory of {device}");
        return refuse(why, leave_out("vram_budget"));
    }
    Ok(())
}

/// Checks that an engine has the inputs and outputs of the graph that the provider received.
pub(super) fn check_info(id: &str, info: &EngineInfo, graph: &Graph) -> Result<()> {
    let names = |ids: &[sdrun_graph::ValueId]| -> Vec<String> {
        ids.iter().map(|id| graph.value(*id).name.clone()).collect()
    };
    let stated = |specs: &[TensorSpec]| -> Vec<String> { specs.iter().map(|s| s.name.clone()).collect() };
    if stated(&info.inputs) != names(&graph.inputs) || stated(&info.outputs) != names(&graph.outputs) {
        return Err(Error::of(id)(AbiError::internal(
            "the engine's inputs and outputs are not those of the graph: the plugin breaks the ABI",
        )));
    }
    Ok(())
}

pub(super) fn has_its_weights() -> Error {
    AbiError::precondition("this engine has baked-in weights and accepts no others")
        .with_hint(Hint::LeaveOut { option: "bake".into() })
        .into()
}

/// Versions of a session's weights, as far as the source has them.
pub(super) fn versions(specs: &[WeightSpec], weights: &dyn WeightSource) -> HashMap<String, u128> {
    specs.iter().filter_map(|spec| Some((spec.name.clone(), weights.version(&spec.name)?))).collect()
}

/// Checks that tensors match the types and shapes of the inputs with the same names. Inputs may be missing.
///
/// # Errors
/// `InvalidArgument` that names the first tensor that does not match or has no input.
pub fn check_inputs(inputs: &[TensorSpec], given: &Tensors) -> Result<()> {
    for (name, tensor) in given {
        check_input(find_input(inputs, name)?, tensor.dtype(), tensor.shape())?;
    }
    Ok(())
}

/// The input called `name`.
///
/// # Errors
/// `InvalidArgument` with the names of all inputs if there is none of this name.
pub fn find_input<'a>(inputs: &'a [TensorSpec], name: &str) -> sdrun_abi::Result<&'a TensorSpec> {
    inputs.iter().find(|spec| spec.name == name).ok_or_else(|| {
        let known: Vec<&str> = inputs.iter().map(|spec| spec.name.as_str()).collect();
        AbiError::invalid(format!("there is no input called {name:?} (inputs: {})", known.join(", ")))
    })
}

/// The inputs in the engine's order. Fails if one is missing, unknown, or has the wrong type or shape.
pub(super) fn views<'t>(info: &EngineInfo, inputs: &'t Tensors) -> Result<Vec<TensorView<'t>>> {
    let names = || inputs.keys().map(String::as_str);
    let mut views = Vec::with_capacity(info.inputs.len());
    for spec in &info.inputs {
        let tensor = inputs.get(&spec.name).ok_or_else(|| wrong_names(info, names()))?;
        check_input(spec, tensor.dtype(), tensor.shape())?;
        views.push(tensor.view());
    }
    if inputs.len() != views.len() {
        return Err(wrong_names(info, names()).into());
    }
    Ok(views)
}

pub(super) fn wrong_names<'n>(info: &EngineInfo, given: impl Iterator<Item = &'n str>) -> AbiError {
    let want: Vec<&str> = info.inputs.iter().map(|s| s.name.as_str()).collect();
    let got: Vec<&str> = given.collect();
    AbiError::invalid(format!(
        "the inputs given are [{}]; the engine takes [{}]",
        got.join(", "),
        want.join(", ")
    ))
}

/// Checks that a tensor of this type and shape may be the input.
///
/// # Errors
/// `InvalidArgument` with both types and shapes.
pub fn check_input(spec: &TensorSpec, dtype: DType, shape: &[usize]) -> sdrun_abi::Result<()> {
    if spec.dtype == dtype && shape_fits(&spec.shape, shape) {
        return Ok(());
    }
    let dims: Vec<String> = spec.shape.iter().map(|d| d.map_or("?".into(), |d| d.to_string())).collect();
    Err(AbiError::invalid(format!(
        "input {:?} is {dtype} {shape:?} and has to be {} [{}]",
        spec.name,
        spec.dtype,
        dims.join(", ")
    ))
    .with_hint(Hint::AnyOf(vec![
        "convert the tensor".into(),
        Hint::GiveShape { input: Some(spec.name.clone()) },
    ])))
}
