//! Mutated bytes never panic the reader: it returns a graph or an error.

use super::tests::{body, external, linear};
use crate::{
    Attribute, ExternalBase, Graph, OpenDims, OpenOptions, Tensor, WeightsPolicy,
    proto::{self, TensorProto},
    simplify,
    testing::{import, node, ramp, tensor, value},
};
use proptest::prelude::*;
use sdrun_abi::DType;

/// A model that exercises every part of the reader.
fn everything() -> Vec<u8> {
    let mut file = linear()
        .initializer("axes", &Tensor::from_i64s(&[0]))
        .node_with("Constant", &[], &["c"], [("value_floats", Attribute::Floats(vec![1.0, 2.0, 3.0]))])
        .node("Identity", &["b"], &["b2"])
        .node("Sub", &["y", "b2"], &["s"])
        .node_with("If", &["x"], &["z"], [("then_branch", body("xw"))])
        .node("twice", &["s"], &["t"])
        .output("t", "?");
    external(&mut file.graph_mut().initializer[0], "w", 0);
    let floats = TensorProto { float_data: vec![1.0; 4], raw_data: None, ..tensor("typed", &ramp(&[4])) };
    file.graph_mut().initializer.push(floats);
    file.graph_mut().value_info.push(value("xw", DType::F32, "batch 3"));
    file.0.functions.push(proto::FunctionProto {
        name: Some("twice".into()),
        input: vec!["a".into()],
        output: vec!["r".into()],
        node: vec![node("Add", &["a", "a"], &["r"])],
        opset_import: vec![import("", 17)],
        ..Default::default()
    });
    file.bytes()
}

#[test]
fn the_model_for_mutations_is_valid() {
    assert!(Graph::from_bytes(everything().into(), "m", ExternalBase::Stripped).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Reading mutated bytes returns a graph or an error. A graph that was read can be written, hashed and
    /// simplified.
    #[test]
    fn mutated_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keep in prop::option::weighted(0.3, any::<prop::sample::Index>()),
    ) {
        let mut bytes = everything();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(keep) = keep {
            bytes.truncate(keep.index(bytes.len()));
        }
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..Default::default() };
        for external in [ExternalBase::Stripped, ExternalBase::Folder { dir: dir.path(), options }] {
            if let Ok(mut graph) = Graph::from_bytes(bytes.clone().into(), "m", external) {
                graph.topology_hash();
                let written = graph.to_onnx_stripped().unwrap();
                Graph::from_bytes(written.into(), "m", ExternalBase::Stripped).unwrap();
                let _ = simplify(&mut graph, &Default::default(), OpenDims::Allow);
                graph.to_onnx_stripped().unwrap();
            }
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Graph::from_bytes(bytes.into(), "m", ExternalBase::Stripped);
    }
}
