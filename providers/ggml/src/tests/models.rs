//! The built-in models, translated with the shapes of the benchmarks.

use super::{bank, cpu};
use crate::{optimize::optimize, translate::translate};
use sdrun_abi::Precision;
use sdrun_graph::{ExternalBase, Graph, OpenDims, simplify};
use sdrun_weights::builtin::{self, Builtin};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// The operators that the reference implementation evaluates, and why that is harmless.
const ON_THE_HOST: &[(&str, &str)] = &[
    ("ArgMax", "of text encoders: where the end of the text is, among 77 tokens"),
    ("GatherND", "of text encoders: one vector for each text"),
];

/// A built-in graph and the shapes of its inputs.
pub(super) fn opened(model: &Builtin) -> (Graph, BTreeMap<String, Vec<usize>>) {
    let bytes = model.graph_bytes().unwrap();
    let graph = Graph::from_bytes(bytes.into(), model.name, ExternalBase::Stripped).unwrap();
    let shapes = model.inputs.iter().map(|input| (input.name.to_string(), input.shape.to_vec())).collect();
    (graph, shapes)
}

#[test]
fn built_in_models_are_translated_without_the_reference_implementation() {
    let mut left = BTreeMap::new();
    for model in builtin::list() {
        let (mut graph, shapes) = opened(model);
        let mut times = Vec::new();
        let mut timed = |what: &'static str, since: Instant| times.push((what, since.elapsed()));
        let start = Instant::now();
        simplify(&mut graph, &shapes, OpenDims::Refuse).unwrap();
        timed("simplify", start);
        let nodes = graph.nodes.len();
        let start = Instant::now();
        optimize(&mut graph, false).unwrap();
        timed("optimize", start);
        let start = Instant::now();
        let mut bank = bank(&graph);
        let translation = translate(&graph, Precision::Fp32, cpu(), &mut bank)
            .unwrap_or_else(|error| panic!("{}: {error}", model.name));
        timed("translate", start);
        let total: Duration = times.iter().map(|(_, time)| *time).sum();
        let mut operators: BTreeMap<&str, usize> = BTreeMap::new();
        graph.nodes.iter().for_each(|node| *operators.entry(&node.op_type).or_default() += 1);
        println!(
            "{}: {nodes} nodes, {} after passes {operators:?}; {total:?} {times:?}; on the host {:?}",
            model.name,
            graph.nodes.len(),
            translation.host_operators
        );
        for (operator, count) in translation.host_operators {
            left.entry(operator).or_insert_with(Vec::new).push(format!("{} x{count}", model.name));
        }
    }
    for (operator, models) in left {
        let known = ON_THE_HOST.iter().any(|(name, _)| *name == operator);
        assert!(known, "{operator} is evaluated by the reference implementation in {models:?}");
    }
}
