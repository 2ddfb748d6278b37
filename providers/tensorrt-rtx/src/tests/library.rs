//! Tests with the real library that need the crate's internals. A process can load only one TensorRT-RTX, and the other
//! tests here load the test double, so each of these tests starts its own process.

use crate::{
    compile::{self, Filled, Zeros},
    devices,
    options::Options,
    runtime,
    table::Transform,
};
use sdrun_abi::{DType, Error, InitConfig, NoHost, Precision, Result, Weight, WeightSource};
use sdrun_graph::{ExternalBase, Graph, Initializer, OpenDims, simplify};
use sdrun_weights::builtin;
use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    path::PathBuf,
    process::Command,
};

/// Runs one of the tests below in a process of its own.
fn alone(test: &str) {
    let program = env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "--ignored", "--nocapture", &format!("tests::library::{test}")]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{words}");
}

fn real() -> (&'static runtime::Runtime, devices::Place) {
    let dir = env::var_os("SDRUN_TENSORRT_RTX_DIR").map(PathBuf::from);
    assert!(
        dir.is_some(),
        "SDRUN_TENSORRT_RTX_DIR must name the folder of the library; `cargo xtask test` installs it"
    );
    runtime::init(&InitConfig { runtime_dir: dir, ..InitConfig::default() }).unwrap();
    let runtime = runtime::get().unwrap();
    (runtime, devices::find(runtime, "sm89").unwrap())
}

/// A graph as the host passes it.
fn bound(bytes: Vec<u8>, name: &str, shapes: &BTreeMap<String, Vec<usize>>) -> (Graph, Vec<u8>) {
    let mut graph = Graph::from_bytes(bytes.into(), name, ExternalBase::Stripped).unwrap();
    simplify(&mut graph, shapes, OpenDims::Refuse).unwrap();
    let onnx = graph.to_onnx_stripped().unwrap();
    (graph, onnx)
}

fn builtin_graph(name: &str) -> (Graph, Vec<u8>) {
    let model = builtin::find(name).unwrap();
    let shapes = model.inputs.iter().map(|i| (i.name.to_string(), i.shape.to_vec())).collect();
    bound(model.graph_bytes().unwrap(), name, &shapes)
}

/// Noise that depends on `seed` and the name.
struct Noise<'a> {
    graph: &'a Graph,
    seed: u64,
}

impl WeightSource for Noise<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let (_, weight) = self
            .graph
            .weights()
            .find(|(n, _)| *n == name)
            .ok_or_else(|| Error::not_found(name.to_string()))?;
        let n: usize = weight.shape.iter().product();
        let mut state = xxhash_rust::xxh3::xxh3_64_with_seed(name.as_bytes(), self.seed);
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let values: Vec<f32> = (0..n).map(|_| next()).collect();
        let tensor = sdrun_graph::Tensor::from_elements(weight.shape.clone(), &values).unwrap();
        let tensor = tensor.to_float_type(weight.dtype).unwrap();
        Weight::new(weight.dtype, weight.shape.clone(), tensor.data().to_vec())
    }
}

#[test]
fn stripped_plans_do_not_depend_on_weights() {
    alone("plans_of_two_sets_of_weights");
}

/// The plan is the same for zeros and for two sets of numbers and contains none of them, and the plan names every
/// weight of the table.
#[test]
#[ignore = "run by the test above"]
fn plans_of_two_sets_of_weights() {
    let (runtime, place) = real();
    for (name, precision) in [("mobilenet-v2", Precision::Fp32), ("taesd/decoder", Precision::Fp16)] {
        let (_, onnx) = builtin_graph(name);
        let network = compile::prepare(&onnx, precision, true).unwrap();
        let options = Options::default();
        let plan = |weights: &[(&str, &[u8])]| {
            compile::build(runtime, &network, &place, &options, true, weights, &NoHost).unwrap()
        };
        let (description, zeros) = plan(&Zeros::of(&network.graph).list());
        for seed in [1, 2] {
            let noise = Noise { graph: &network.graph, seed };
            let filled = Filled::of(&network, &noise, &NoHost).unwrap();
            let (again, filled_plan) = plan(&filled.list());
            assert!(*filled_plan == *zeros, "{name}: the plan depends on weights");
            assert_eq!(again, description);
            for (weight, bytes) in filled.list().iter().filter(|(_, bytes)| bytes.len() >= 64) {
                let found = zeros.windows(64).any(|window| *window == bytes[..64]);
                assert!(!found, "{name}: the plan holds {weight}");
            }
        }
        for entry in &description.table {
            let named = zeros.windows(entry.name.len()).any(|window| window == entry.name.as_bytes());
            assert!(named, "{name}: the plan does not take {}", entry.name);
        }
    }
}

#[test]
fn tables_cover_every_float_initializer() {
    alone("tables_of_all_graphs");
}

/// Every built-in graph, in its own precision.
#[test]
#[ignore = "run by the test above"]
fn tables_of_all_graphs() {
    let (runtime, place) = real();
    for model in builtin::list() {
        let (graph, onnx) = builtin_graph(model.name);
        let half = graph.weights().any(|(_, w)| w.dtype == DType::F16);
        let precision = if half { Precision::Fp16 } else { Precision::Fp32 };
        let network = compile::prepare(&onnx, precision, true).unwrap();
        // The export casts to a type in PyTorch's numbering, which ONNX does not have.
        let foreign = |node: &sdrun_graph::Node| {
            node.op_type == "Cast" && node.int("to").is_none_or(|to| DType::from_onnx(to as i32).is_none())
        };
        let table = match compile::table_of(runtime, &network, &place) {
            Ok(table) => table,
            Err(error) if graph.nodes.iter().any(foreign) => {
                assert!(error.message.contains("operator Cast, node `/encoder"), "{error}");
                println!("{}: {error}", model.name);
                continue;
            }
            Err(error) => panic!("{}: {error}", model.name),
        };
        let covered: BTreeSet<&str> =
            table.iter().flat_map(|entry| entry.transform.sources()).map(String::as_str).collect();
        let floats = graph.initializers.iter().filter(|(_, i)| i.dtype().is_float());
        let mut weights = 0;
        for (id, initializer) in floats {
            let name = graph.value(*id).name.as_str();
            if matches!(initializer, Initializer::Weight(_)) {
                weights += 1;
                assert!(covered.contains(name), "{}: {name} is not in the table", model.name);
            }
        }
        let constants = table.iter().filter(|e| matches!(e.transform, Transform::Constant { .. })).count();
        println!("{}: {weights} weights, {} entries, {constants} constants", model.name, table.len());
        assert!(weights > 0 && table.len() >= weights, "{}", model.name);
    }
}
