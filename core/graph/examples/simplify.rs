//! Opens an ONNX model, binds its inputs, simplifies it, and writes it with its weights inline.
//!
//! `cargo run -p sdrun-graph --example simplify -- IN.onnx OUT.onnx sample=2,4,64,64 timestep=2 …`
//! A scalar input needs no shape. Inputs not listed keep their open dimensions.

use sdrun_graph::{Graph, OpenDims, OpenOptions, Placement, simplify};
use std::{collections::BTreeMap, env, error::Error, fs, process::ExitCode};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [input, output, bindings @ ..] = &*args else {
        return Err("usage: simplify IN.onnx OUT.onnx [INPUT=SIZE,SIZE,…]…".into());
    };
    let mut shapes = BTreeMap::new();
    for binding in bindings {
        let (name, sizes) =
            binding.rsplit_once('=').ok_or_else(|| format!("{binding:?} is not NAME=SIZE,SIZE,…"))?;
        let shape =
            sizes.split(',').filter(|s| !s.is_empty()).map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        shapes.insert(name.to_owned(), shape);
    }
    let mut graph = Graph::open(input, &OpenOptions::default())?;
    let report = simplify(&mut graph, &shapes, OpenDims::Allow)?;
    let bytes = graph.to_onnx(|name, weight| Ok(Placement::Inline(weight.read(name)?)))?;
    fs::write(output, bytes)?;
    println!("{} nodes became {} in {} rounds", report.nodes_before, report.nodes_after, report.rounds);
    for pass in &report.passes {
        println!("{:20} {} nodes, {} initializers", pass.name, -pass.nodes(), -pass.initializers);
    }
    println!("topology {}", graph.topology_hash());
    Ok(())
}
