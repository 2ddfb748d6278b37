//! Compiling a graph into a program.

use crate::{
    devices::Target,
    ffi::{CompileOptions, Layout, Program},
    runtime::Runtime,
};
use sdrun_abi::{
    DType, Error, Hint, Host, LogLevel, OpenShapes, Result, WeightSource, WeightSpec, shape_sets,
};
use sdrun_graph::{
    Graph, GraphError, Initializer, Node, OpenDims, Placement, Tensor, Value, ValueId, simplify,
};
use sdrun_provider_common::{graph_error, phase, weight};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    sync::mpsc::{RecvTimeoutError, channel},
    time::{Duration, Instant},
};

/// Name of the weights file, in the same folder as the model that MIGraphX reads.
const WEIGHTS_FILE: &str = "weights.bin";
/// Alignment of weights in that file, in bytes.
const ALIGNMENT: u64 = 64;
/// Interval of progress reports during a compilation. MIGraphX itself reports no progress.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Refuses graphs that MIGraphX would silently misread: it treats every open or empty dimension as 1.
fn check_shapes(graph: &Graph) -> Result<()> {
    for (what, ids) in [("input", &graph.inputs), ("output", &graph.outputs)] {
        for id in ids {
            let value = graph.value(*id);
            let name = &value.name;
            match value.known_shape() {
                None if what == "output" => {}
                None => {
                    return Err(Error::unsupported(format!(
                        "migraphx needs fixed shapes, but input `{name}` has open dimensions"
                    ))
                    .with_hint(Hint::GiveShape { input: Some(name.clone()) }));
                }
                Some(shape) if shape.contains(&0) => {
                    return Err(Error::unsupported(format!(
                        "migraphx has no empty tensors, and {what} `{name}` has the shape {shape:?}"
                    )));
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}

/// Returns one graph with fixed shapes for each set of input shapes.
pub(crate) fn for_each_shape(graph: Graph, open: &OpenShapes) -> Result<Vec<Graph>> {
    if open.is_empty() {
        check_shapes(&graph)?;
        return Ok(vec![graph]);
    }
    let sized = |set| {
        let mut graph = graph.clone();
        simplify(&mut graph, &set, OpenDims::Allow).map_err(graph_error)?;
        check_shapes(&graph)?;
        Ok(graph)
    };
    shape_sets(open).into_iter().map(sized).collect()
}

/// Rewrites axes that are computed at run time so that they count from the first dimension. MIGraphX 2.14 uses
/// negative axes as memory offsets: it then writes to arbitrary addresses or crashes.
pub(crate) fn count_axes_from_first(graph: &mut Graph) {
    let mut nodes = Vec::with_capacity(graph.nodes.len());
    for mut node in std::mem::take(&mut graph.nodes) {
        let rank = node.input(0).and_then(|id| graph.value(id).known_shape()).map(|shape| shape.len());
        let axes = node.input(1).filter(|axes| !graph.initializers.contains_key(axes));
        if let (true, Some(rank), Some(axes)) = (node.op_type.starts_with("Reduce"), rank, axes) {
            let ranks = Tensor::from_i64s(&[rank as i64]);
            let value = |part: &str| Value {
                name: format!("{}/{part}/{}", graph.value(axes).name, nodes.len()),
                dtype: Some(DType::I64),
                shape: graph.value(axes).shape.clone(),
            };
            let (ranks_value, sum, rest) = (value("rank"), value("above_zero"), value("from_first"));
            let ranks_value = graph.add_value(Value { shape: None, ..ranks_value });
            let (sum, rest) = (graph.add_value(sum), graph.add_value(rest));
            graph.initializers.insert(ranks_value, Initializer::Constant(ranks));
            for (op_type, first, output) in [("Add", axes, sum), ("Mod", sum, rest)] {
                nodes.push(Node {
                    name: String::new(),
                    domain: String::new(),
                    op_type: op_type.into(),
                    inputs: vec![Some(first), Some(ranks_value)],
                    outputs: vec![Some(output)],
                    attributes: BTreeMap::new(),
                    metadata: BTreeMap::new(),
                });
            }
            node.inputs[1] = Some(rest);
        }
        nodes.push(node);
    }
    graph.nodes = nodes;
}

/// Parses and compiles a graph for a device. If the graph still has weights, their values come from `weights` and
/// become part of the program. `step` of `steps` is this program's place in the progress of the whole build.
pub(crate) fn compile(
    runtime: &Runtime,
    target: &Target,
    graph: &Graph,
    options: CompileOptions,
    weights: Option<&dyn WeightSource>,
    (step, steps): (u64, u64),
    host: &dyn Host,
) -> Result<Program> {
    let folder = runtime.temporary_folder()?;
    let file = folder.path().join("model.onnx");
    let onnx = match weights {
        None => graph.to_onnx(|name, _| Err(GraphError::Invalid(format!("`{name}` is still a weight")))),
        Some(source) => with_weights(graph, source, &folder.path().join(WEIGHTS_FILE), host)?,
    };
    let onnx = onnx.map_err(graph_error)?;
    std::fs::write(&file, onnx).map_err(|e| Error::io("write", &file, &e))?;

    phase(host, "read", step, steps)?;
    let shapes: Vec<(&str, Vec<usize>)> = (graph.inputs.iter())
        .map(|id| graph.value(*id))
        .map(|value| (value.name.as_str(), value.known_shape().unwrap_or_default()))
        .collect();
    let shapes: Vec<(&str, &[usize])> = shapes.iter().map(|(name, shape)| (*name, &**shape)).collect();
    let mut program = Program::parse(&runtime.api, &file, &shapes)?;
    drop(folder);
    check_parameters(graph, &program.parameters(&runtime.api)?)?;
    phase(host, "compile", step, steps)?;
    target.select(runtime)?;
    with_heartbeat(host, (step, steps), || program.compile(&runtime.api, target.name(), options))?;
    phase(host, "compile", step + 1, steps)?;
    check_outputs(graph, &program.outputs(&runtime.api)?)?;
    Ok(program)
}

/// Returns the graph as ONNX and writes its weights to `file`.
fn with_weights(
    graph: &Graph,
    source: &dyn WeightSource,
    file: &Path,
    host: &dyn Host,
) -> Result<Result<Vec<u8>, GraphError>> {
    let cannot = |e: std::io::Error| Error::io("write", file, &e);
    let mut out = BufWriter::with_capacity(1 << 20, File::create_new(file).map_err(cannot)?);
    let (mut at, mut failed, total) = (0, None, graph.weights().count() as u64);
    let mut step = 0;
    let onnx = graph.to_onnx(|name, place| {
        let spec = WeightSpec { name: name.into(), dtype: place.dtype, shape: place.shape.clone() };
        let written =
            phase(host, "weights", step, total).and_then(|()| weight(source, &spec)).and_then(|weight| {
                out.write_all(weight.data()).map_err(cannot)?;
                let length = weight.data().len() as u64;
                let padding = length.next_multiple_of(ALIGNMENT) - length;
                out.write_all(&[0; ALIGNMENT as usize][..padding as usize]).map_err(cannot)?;
                Ok((length, padding))
            });
        step += 1;
        match written {
            Ok((length, padding)) => {
                let offset = at;
                at += length + padding;
                Ok(Placement::External { location: WEIGHTS_FILE.into(), offset, length })
            }
            Err(error) => {
                let words = error.to_string();
                failed.get_or_insert(error);
                Err(GraphError::Invalid(words))
            }
        }
    });
    match failed {
        Some(error) => Err(error),
        None => {
            out.flush().map_err(cannot)?;
            Ok(onnx)
        }
    }
}

/// Runs `body`, which may take minutes and cannot be stopped, and reports progress to the host meanwhile.
fn with_heartbeat<T: Send>(host: &dyn Host, (step, steps): (u64, u64), body: impl FnOnce() -> T + Send) -> T {
    let (done, over) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let started = Instant::now();
            while over.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                // The host's reply does not matter: a compilation cannot be stopped.
                host.progress("compile", step, steps);
                let seconds = started.elapsed().as_secs();
                if seconds.is_multiple_of(30) && seconds > 0 {
                    host.log(LogLevel::Info, "migraphx", &format!("compiling for {seconds} seconds"));
                }
            }
        });
        let value = body();
        drop(done);
        value
    })
}

/// Checks that MIGraphX's parameters are inputs of the graph, with the same type and shape. Unused inputs have no
/// parameter.
fn check_parameters(graph: &Graph, parameters: &[(String, Layout)]) -> Result<()> {
    for (name, layout) in parameters {
        let input = graph.inputs.iter().map(|id| graph.value(*id)).find(|value| value.name == *name);
        let Some(input) = input else {
            return Err(Error::internal(format!(
                "MIGraphX reads a parameter `{name}` that the graph does not have"
            )));
        };
        let stated = input.known_shape().unwrap_or_default();
        if input.dtype != Some(layout.dtype) || !same_shape(&stated, &layout.lengths) {
            return Err(Error::internal(format!(
                "MIGraphX reads the input `{name}` as {} {:?} where the graph states {stated:?}",
                layout.dtype, layout.lengths
            )));
        }
    }
    Ok(())
}

/// Checks the types and shapes of the outputs. MIGraphX's outputs have no names; they are in the graph's order.
fn check_outputs(graph: &Graph, outputs: &[Option<Layout>]) -> Result<()> {
    let stated: Vec<(ValueId, Option<DType>)> =
        graph.outputs.iter().map(|id| (*id, graph.value(*id).dtype)).collect();
    if stated.len() != outputs.len() {
        return Err(Error::internal(format!(
            "MIGraphX compiles {} outputs where the graph has {}",
            outputs.len(),
            stated.len()
        )));
    }
    for ((id, dtype), layout) in stated.into_iter().zip(outputs) {
        // If neither side knows the shape, every run checks the result instead.
        let value = graph.value(id);
        let (Some(layout), Some(shape)) = (layout, value.known_shape()) else { continue };
        if dtype != Some(layout.dtype) || !same_shape(&shape, &layout.lengths) {
            return Err(Error::internal(format!(
                "MIGraphX infers {} {:?} for the output `{}`, the graph states {} {shape:?}",
                layout.dtype,
                layout.lengths,
                value.name,
                dtype.map_or("nothing", DType::name)
            )));
        }
    }
    Ok(())
}

/// Whether MIGraphX's dimensions match the graph's. In MIGraphX a scalar has one dimension of size 1.
fn same_shape(stated: &[usize], found: &[usize]) -> bool {
    stated == found || (stated.is_empty() && found == [1])
}
