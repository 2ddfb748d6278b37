//! Compiles a graph into an engine.

use crate::{
    devices::Place,
    ffi::{
        HostMemory,
        cuda::Context,
        data_type,
        network::{self, Range, Record, Request, WeightBytes},
    },
    lower::lower_batch_norms,
    options::Options,
    payload::{Description, Requirements},
    runtime::Runtime,
    table::{self, Transform},
};
use bytes::Bytes;
use sdrun_abi::{
    BuildSpec, DType, EngineInfo, Error, Hint, Host, Precision, Result, TensorSpec, Weight, WeightSource,
    WeightSpec,
};
use sdrun_graph::{Graph, infer::infer_shapes, passes::convert_precision};
use sdrun_provider_common::{checks, converted, describe, graph_error, phase, read_graph, weight};
use std::collections::{BTreeMap, BTreeSet};

/// Compiles `model` for the target of `place`. Without `spec.bake` it reads no weights. Zeros that take no memory stand
/// in for them, and the plan omits them.
pub(crate) fn compile(
    runtime: &'static Runtime,
    model: &[u8],
    spec: &BuildSpec,
    place: &Place,
    options: &Options,
    weights: &dyn WeightSource,
    host: &dyn Host,
) -> Result<(Description, HostMemory)> {
    let network = prepare(model, spec.precision, !spec.bake)?;
    match spec.bake {
        false => {
            let zeros = Zeros::of(&network.graph);
            build(runtime, &network, place, options, true, &zeros.list(), host)
        }
        true => {
            let filled = Filled::of(&network, weights, host)?;
            build(runtime, &network, place, options, false, &filled.list(), host)
        }
    }
}

/// The input of a build.
pub(crate) struct Network {
    /// The graph in the requested precision.
    pub(crate) graph: Graph,
    /// The host's weights, in the types the plan expects.
    pub(crate) weights: Vec<WeightSpec>,
    /// Recipes for the graph's weights that the host does not provide directly.
    made: BTreeMap<String, Transform>,
}

/// Reads a model and converts it to a graph the library can build.
pub(crate) fn prepare(model: &[u8], precision: Precision, strip: bool) -> Result<Network> {
    let mut graph = read_graph(&Bytes::copy_from_slice(model))?;
    let mut weights = describe(&graph, String::new())?.weights;
    infer_shapes(&mut graph).map_err(graph_error)?;
    let made = if strip { lower_batch_norms(&mut graph).map_err(graph_error)? } else { BTreeMap::new() };
    let to =
        precision.float_type().ok_or_else(|| Error::unsupported(format!("no tensors are {precision}")))?;
    convert_precision(&mut graph, to);
    if strip {
        let types: BTreeMap<&str, DType> = graph.weights().map(|(name, w)| (name, w.dtype)).collect();
        for spec in &mut weights {
            spec.dtype = types.get(spec.name.as_str()).copied().unwrap_or(spec.dtype);
        }
    }
    Ok(Network { graph, weights, made })
}

/// Compiles a network with the weight bytes in `weights`. A stripped plan is the same for all bytes.
pub(crate) fn build(
    runtime: &'static Runtime,
    network: &Network,
    place: &Place,
    options: &Options,
    strip: bool,
    weights: &[(&str, &[u8])],
    host: &dyn Host,
) -> Result<(Description, HostMemory)> {
    if strip && options.vram_budget.is_some() && place.gpu.is_none() {
        return Err(Error::unsupported(
            "TensorRT-RTX cannot stream weights that an engine built without a GPU leaves out",
        )
        .with_hint(Hint::AnyOf(vec![Hint::Bake, Hint::LeaveOut { option: "vram_budget".into() }])));
    }
    let requirements = Requirements {
        tensorrt_rtx: runtime.library.version.clone(),
        target: place.target.name(),
        refit: strip,
    };
    let mut info = describe(&network.graph, requirements.text()?)?;
    check_types(&info)?;
    let checks = checks::of_inputs(&network.graph)?;
    let (plan, records) = run(runtime, network, &info, place, options, strip, weights, host);
    let plan = plan?;
    let table = match strip {
        true => table::of(&records, &network.graph, &network.made, &network.weights)?,
        false => Vec::new(),
    };
    info.weights = if strip { network.weights.clone() } else { Vec::new() };
    let plan_bytes = plan.len() as u64;
    Ok((Description { info, table, checks, plan_bytes }, plan))
}

/// Runs the library's build. Returns the plan and the weights the parser reported, also when the build fails.
#[allow(clippy::too_many_arguments)]
fn run(
    runtime: &'static Runtime,
    network: &Network,
    info: &EngineInfo,
    place: &Place,
    options: &Options,
    strip: bool,
    weights: &[(&str, &[u8])],
    host: &dyn Host,
) -> (Result<HostMemory>, Vec<Record>) {
    let mut records = Vec::new();
    let plan = network.graph.to_onnx_stripped().map_err(graph_error).and_then(|model| {
        phase(host, "read", 0, 1)?;
        // The library queries the current GPU while it builds.
        let gpu = place.gpu.as_ref().map(|gpu| Context::of(runtime.driver()?, gpu)).transpose()?;
        let ranges = ranges(&info.inputs, options)?;
        let names: BTreeSet<&str> = network.graph.weights().map(|(name, _)| name).collect();
        let weights: Vec<_> = weights.iter().map(|(name, bytes)| WeightBytes { name, bytes }).collect();
        let request = Request {
            model: &model,
            capability: place.target.capability(),
            strip,
            tf32: options.tf32,
            streaming: options.vram_budget.is_some(),
            weights: &weights,
            inputs: &ranges,
        };
        let refittable = |record: &Record| table::is_refittable(record, &names);
        let plan = network::build(&runtime.library, &request, &refittable, &mut records, host);
        drop(gpu);
        plan
    });
    (plan, records)
}

/// Makes the table of a stripped plan with the parser alone, without compiling.
#[cfg(test)]
pub(crate) fn table_of(
    runtime: &'static Runtime,
    network: &Network,
    place: &Place,
) -> Result<Vec<table::Entry>> {
    /// Stops the library as soon as it starts to compile.
    struct Parse;
    impl Host for Parse {
        fn log(&self, _: sdrun_abi::LogLevel, _: &str, _: &str) {}
        fn progress(&self, phase: &str, _: u64, _: u64) -> sdrun_abi::Flow {
            if phase == "read" { sdrun_abi::Flow::Continue } else { sdrun_abi::Flow::Cancel }
        }
        fn cancelled(&self) -> bool {
            false
        }
    }
    let info = describe(&network.graph, String::new())?;
    let zeros = Zeros::of(&network.graph);
    let options = Options::default();
    let (plan, records) = run(runtime, network, &info, place, &options, true, &zeros.list(), &Parse);
    match plan {
        Err(error) if error.code != sdrun_abi::ErrorCode::Cancelled => Err(error),
        _ => table::of(&records, &network.graph, &network.made, &network.weights),
    }
}

/// Only the library's calls.
#[cfg(test)]
pub(crate) fn bare(
    runtime: &'static Runtime,
    network: &Network,
    place: &Place,
    options: &Options,
    strip: bool,
    weights: &[(&str, &[u8])],
    host: &dyn Host,
) -> Result<HostMemory> {
    let info = describe(&network.graph, String::new())?;
    run(runtime, network, &info, place, options, strip, weights, host).0
}

fn check_types(info: &EngineInfo) -> Result<()> {
    let foreign = |spec: &&TensorSpec| data_type(spec.dtype).is_none();
    match info.inputs.iter().chain(&info.outputs).find(foreign) {
        None => Ok(()),
        Some(spec) => {
            Err(Error::unsupported(format!("TensorRT-RTX has no type {} (`{}`)", spec.dtype, spec.name)))
        }
    }
}

/// Checks the shape ranges of inputs with open dimensions against the graph.
fn ranges<'a>(inputs: &'a [TensorSpec], options: &'a Options) -> Result<Vec<Range<'a>>> {
    let mut ranges = Vec::new();
    for input in inputs {
        let open = input.is_open();
        let Some(shapes) = options.shapes.get(&input.name) else {
            if open {
                let dims: Vec<String> =
                    input.shape.iter().map(|d| d.map_or("?".into(), |d| d.to_string())).collect();
                return Err(Error::invalid(format!(
                    "input `{}` [{}] has open dimensions, but no range of sizes is given",
                    input.name,
                    dims.join(", ")
                ))
                .with_hint(
                    Hint::GiveShape { input: Some(input.name.clone()) }
                        .with_note("one shape, or the smallest, the usual and the largest"),
                ));
            }
            continue;
        };
        let fits = shapes.opt.len() == input.shape.len()
            && [&shapes.min, &shapes.opt, &shapes.max].iter().all(|shape| {
                shape.iter().zip(&input.shape).all(|(n, fixed)| fixed.is_none_or(|fixed| *n == fixed as i64))
            });
        if !fits {
            return Err(Error::invalid(format!(
                "the range of shapes of input `{}` does not fit the model, which states {:?}",
                input.name, input.shape
            )));
        }
        if open {
            ranges.push(Range { name: &input.name, min: &shapes.min, opt: &shapes.opt, max: &shapes.max });
        }
    }
    Ok(ranges)
}

/// Distance between the addresses of two zero weights.
const ALIGNMENT: usize = 64;

/// Zeros that stand in for weights. The memory is never written, so the system never commits it. Each weight has its
/// own address because the library treats weights at the same address as one.
pub(crate) struct Zeros {
    zeros: Vec<u8>,
    sizes: Vec<(String, usize)>,
}

impl Zeros {
    pub(crate) fn of(graph: &Graph) -> Self {
        let size = |(name, w): (&str, &sdrun_graph::WeightRef)| {
            (name.to_string(), w.dtype.bytes_of(&w.shape).unwrap_or(0))
        };
        let sizes: Vec<(String, usize)> = graph.weights().map(size).collect();
        let largest = sizes.iter().map(|(_, size)| *size).max().unwrap_or(0);
        Zeros { zeros: vec![0; largest + ALIGNMENT * sizes.len()], sizes }
    }

    pub(crate) fn list(&self) -> Vec<(&str, &[u8])> {
        let at = |index: usize, size: usize| &self.zeros[ALIGNMENT * index..][..size];
        self.sizes.iter().enumerate().map(|(i, (name, size))| (name.as_str(), at(i, *size))).collect()
    }
}

/// All weights in the types of the prepared graph.
pub(crate) struct Filled<'a>(Vec<(String, Weight<'a>)>);

impl<'a> Filled<'a> {
    pub(crate) fn of(network: &Network, source: &'a dyn WeightSource, host: &dyn Host) -> Result<Self> {
        let types: BTreeMap<&str, DType> = network.graph.weights().map(|(name, w)| (name, w.dtype)).collect();
        let mut held = Vec::with_capacity(network.weights.len());
        for (index, spec) in network.weights.iter().enumerate() {
            if index % 64 == 0 {
                phase(host, "weights", index as u64, network.weights.len() as u64)?;
            }
            let Some(wanted) = types.get(spec.name.as_str()) else { continue };
            held.push((spec.name.clone(), converted(weight(source, spec)?, &spec.name, *wanted)?));
        }
        Ok(Filled(held))
    }

    pub(crate) fn list(&self) -> Vec<(&str, &[u8])> {
        self.0.iter().map(|(name, weight)| (name.as_str(), weight.data())).collect()
    }
}
