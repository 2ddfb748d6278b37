//! Models.

use crate::files::ROOM;
use sdrun::{
    abi::WeightSource,
    graph::{ExternalBase, Graph, OpenDims, OpenOptions, WeightsPolicy, simplify},
    weights::OnnxWeights,
};
use std::{collections::BTreeMap, fs};

/// A model that was read can be hashed, written, read again and simplified.
pub(crate) fn onnx(bytes: &[u8]) {
    if let Ok(graph) = Graph::from_bytes(bytes.to_vec().into(), "m", ExternalBase::Stripped) {
        use_up(graph);
    }
}

/// A model whose weights are in a file of 64 bytes beside it. What it says about that file is in the bytes.
pub(crate) fn external_data(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect(ROOM);
    fs::write(dir.path().join("w"), [1; 64]).expect(ROOM);
    let options = OpenOptions { weights: WeightsPolicy::Required, ..Default::default() };
    let base = ExternalBase::Folder { dir: dir.path(), options };
    let Ok(graph) = Graph::from_bytes(bytes.to_vec().into(), "m", base) else { return };
    let names: Vec<String> = graph.weights().map(|(name, _)| name.to_string()).collect();
    let weights = OnnxWeights::new(&graph);
    for name in names {
        let _ = weights.get(&name);
    }
    use_up(graph);
}

fn use_up(mut graph: Graph) {
    let hash = graph.topology_hash();
    let written = graph.to_onnx_stripped().expect("a graph that was read can be written");
    let again = Graph::from_bytes(written.into(), "m", ExternalBase::Stripped);
    let again = again.expect("a graph that was written can be read");
    assert_eq!(again.topology_hash(), hash, "the graph changes when it is written and read");
    if simplify(&mut graph, &BTreeMap::new(), OpenDims::Allow).is_ok() {
        graph.to_onnx_stripped().expect("a simplified graph can be written");
    }
}
