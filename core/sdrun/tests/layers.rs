//! Where a wrong provider first differs, and the part that it gets wrong.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "../../../tests/mock/c_plugins.rs"]
mod c_plugins;
mod lab;
#[path = "worker/support.rs"]
mod support;

use lab::{Lab, input, node, sum};
use sdrun::{
    BuildOptions, Model, Provider, Tensors,
    abi::{ErrorCode, NoHost, Precision},
    graph::{Graph, proto},
    onnx_file,
    verify::{Sides, Tolerance},
};
use serde_json::json;

/// `y = relu(relu((x + a) + b) + a)`.
fn chain() -> proto::ModelProto {
    let mut model = sum();
    let graph = model.graph.as_mut().unwrap();
    let relu = |name: &str, from: &str, to: &str| proto::NodeProto {
        input: vec![from.into()],
        ..node(name, "Relu", [from, from], to)
    };
    graph.node[1].output = vec!["u".into()];
    graph.node.extend([
        relu("/three", "u", "v"),
        node("/four", "Add", ["v", "a"], "w"),
        relu("/five", "w", "y"),
    ]);
    model
}

fn with_c() -> (Lab, Provider, tempfile::TempDir) {
    let (dir, manifest) = c_plugins::installed();
    let lab = Lab::with(json!({}), &[manifest], &[]);
    let provider = lab.registry.open("c", &Default::default()).unwrap();
    (lab, provider, dir)
}

fn run(provider: &Provider, model: &Model, inputs: &Tensors) -> sdrun::Result<Tensors> {
    let options = BuildOptions::new(provider.device(None)?);
    provider.build(model, &options, &NoHost)?.session(&model.weights(), &NoHost)?.run(inputs, &NoHost)
}

/// A provider with a bug: it skips the Relu in `node` if the graph also has all of `with`.
fn wrong(
    provider: &Provider,
    model: &Model,
    inputs: &Tensors,
    node: &str,
    with: &[&str],
) -> sdrun::Result<Tensors> {
    let mut graph: Graph = model.graph().clone();
    let has = |name: &&str| model.graph().nodes.iter().any(|node| node.name == **name);
    if with.iter().all(has) {
        for found in graph.nodes.iter_mut().filter(|found| found.name == node) {
            found.op_type = "Identity".into();
        }
    }
    run(provider, &model.with_graph(graph), inputs)
}

fn names(graph: &Graph) -> Vec<&str> {
    graph.nodes.iter().map(|node| &*node.name).collect()
}

#[test]
fn the_first_wrong_node_is_found_and_cut_out() {
    let (lab, provider, _plugin) = with_c();
    let model = lab.model("m.onnx", &chain());
    let bound = model.bound(&Default::default()).unwrap();
    // Negative after the first two additions, so that Relu matters.
    let inputs = input([-100.0, -200.0]);
    let mut reference = |model: &Model, inputs: &Tensors| run(&provider, model, inputs);
    let tolerance = Tolerance::of(Precision::Fp32);

    let mut candidate = |model: &Model, inputs: &Tensors| wrong(&provider, model, inputs, "/three", &[]);
    let mut sides = Sides { candidate: &mut candidate, reference: &mut reference, tolerance };
    let found = sides.first_divergence(&model, &bound, &inputs).unwrap().unwrap();
    assert_eq!((&*found.node, &*found.op, &*found.output.output), ("/three", "Relu", "v"));
    assert_eq!((found.inputs.len(), &*found.inputs[0].output), (1, "u"));
    assert!(tolerance.accepts(&found.inputs[0]) && !tolerance.accepts(&found.output));
    let reduced = sides.reduce(&model, &bound, &inputs, &found).unwrap();
    assert_eq!(names(reduced.model.graph()), ["/three"]);
    assert_eq!(reduced.inputs["u"].to_f64().unwrap(), [-96.0, -194.0]);
    assert_eq!(reduced.expected["v"].to_f64().unwrap(), [0.0, 0.0]);

    // A bug that needs three nodes: the smallest part has all of them.
    let all = ["/two", "/three", "/four"];
    let mut candidate = |model: &Model, inputs: &Tensors| wrong(&provider, model, inputs, "/three", &all);
    let mut sides = Sides { candidate: &mut candidate, reference: &mut reference, tolerance };
    let mut found = sides.first_divergence(&model, &bound, &inputs).unwrap().unwrap();
    assert_eq!(found.node, "/three");
    assert_eq!(
        sides.reduce(&model, &bound, &inputs, &found).map(|_| ()).unwrap_err().code(),
        ErrorCode::FailedPrecondition,
        "what comes before the node alone is right"
    );
    let only_later = ["/two", "/three"];
    let mut candidate =
        |model: &Model, inputs: &Tensors| wrong(&provider, model, inputs, "/three", &only_later);
    let mut sides = Sides { candidate: &mut candidate, reference: &mut reference, tolerance };
    found = sides.first_divergence(&model, &bound, &inputs).unwrap().unwrap();
    let reduced = sides.reduce(&model, &bound, &inputs, &found).unwrap();
    assert_eq!(names(reduced.model.graph()), only_later);
    // The part in a file, with the weights it needs, computes the same.
    let file = lab.path("part.onnx");
    onnx_file::write(reduced.model.graph(), &model.weights(), &file).unwrap();
    let again = Model::open(&file).unwrap();
    assert_eq!(again.graph().weights().map(|(name, _)| name).collect::<Vec<_>>(), ["b"]);
    let outputs = run(&provider, &again, &reduced.inputs).unwrap();
    assert_eq!(outputs["v"].to_f64(), reduced.expected["v"].to_f64());

    // Who is right has no first difference.
    let mut candidate = |model: &Model, inputs: &Tensors| run(&provider, model, inputs);
    let mut sides = Sides { candidate: &mut candidate, reference: &mut reference, tolerance };
    assert!(sides.first_divergence(&model, &bound, &inputs).unwrap().is_none());
}
