//! Measurements of `cargo xtask bench tensorrt-rtx` with the real library; one model per process.

use crate::{
    compile::{self, Filled, Zeros},
    devices,
    options::Options,
    runtime,
};
use sdrun_abi::{InitConfig, NoHost, Precision, WeightSource};
use sdrun_graph::{ExternalBase, Graph, OpenDims, simplify};
use sdrun_weights::{Cast, builtin};
use std::{collections::BTreeMap, env, fs, time::Instant};

/// Peak resident bytes since the last reset.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

/// `SDRUN_FIGURES` is MODEL PRECISION stripped|full [ROUNDS]. Builds once as the provider does and once through the
/// library's calls alone, alternating if there is more than one round, and prints JSON.
#[test]
#[ignore = "measures; run by `cargo xtask bench tensorrt-rtx`"]
fn figures() {
    let text = env::var("SDRUN_FIGURES").expect("SDRUN_FIGURES=\"MODEL PRECISION stripped|full [ROUNDS]\"");
    let words: Vec<&str> = text.split_whitespace().collect();
    let precision: Precision = words[1].parse().unwrap();
    let strip = words[2] == "stripped";
    let rounds: usize = words.get(3).map_or(1, |n| n.parse().unwrap());
    let config = InitConfig {
        runtime_dir: env::var_os("SDRUN_TENSORRT_RTX_DIR").map(Into::into),
        ..InitConfig::default()
    };
    runtime::init(&config).unwrap();
    let runtime = runtime::get().unwrap();
    let place = devices::find(runtime, "sm89").unwrap();
    let options = Options::default();

    let model = builtin::find(words[0]).unwrap();
    let bytes = model.graph_bytes().unwrap();
    let mut graph = Graph::from_bytes(bytes.into(), model.name, ExternalBase::Stripped).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> =
        model.inputs.iter().map(|i| (i.name.to_string(), i.shape.to_vec())).collect();
    simplify(&mut graph, &shapes, OpenDims::Refuse).unwrap();
    let onnx = graph.to_onnx_stripped().unwrap();
    drop(graph);
    let synthetic = model.weights().unwrap();

    let network = compile::prepare(&onnx, precision, strip).unwrap();
    let weight_bytes: u64 =
        network.graph.weights().map(|(_, w)| w.dtype.bytes_of(&w.shape).unwrap() as u64).sum();
    // With a single round there is no second build in memory.
    let network = (rounds > 1).then_some(network);
    let (mut ours, mut bare, mut engine_bytes) = (Vec::new(), Vec::new(), 0);
    // An uncounted warm-up build, which loads the library's code from disk.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    for _ in 0..rounds {
        let spec = super::spec("sm89");
        let spec = sdrun_abi::BuildSpec { precision, bake: !strip, ..spec };
        let specs = compile::prepare(&onnx, precision, false).unwrap().weights;
        let source: &dyn WeightSource = &Cast::new(&synthetic, &specs);
        let started = Instant::now();
        let (description, plan) =
            compile::compile(runtime, &onnx, &spec, &place, &options, source, &NoHost).unwrap();
        engine_bytes = crate::payload::write(&description, &plan).unwrap().len();
        ours.push(started.elapsed().as_secs_f64());
        drop(plan);
        if let Some(network) = &network {
            let zeros = Zeros::of(&network.graph);
            let filled = (!strip).then(|| Filled::of(network, source, &NoHost).unwrap());
            let list = filled.as_ref().map_or_else(|| zeros.list(), Filled::list);
            let started = Instant::now();
            compile::bare(runtime, network, &place, &options, strip, &list, &NoHost).unwrap();
            bare.push(started.elapsed().as_secs_f64());
        }
    }
    let figures = serde_json::json!({
        "model": words[0], "precision": words[1], "kind": words[2], "seconds": ours, "bare_seconds": bare,
        "engine_bytes": engine_bytes, "weight_bytes": weight_bytes, "peak_bytes": peak(),
    });
    println!("\n{figures}");
}
