//! Built-in models, loaded like a user's own: from files on disk, through the graph reader.

use sdrun_abi::{Flow, WeightSource, WeightSpec};
use sdrun_graph::{ExternalBase, Graph, OpenOptions};
use sdrun_weights::{OnnxWeights, builtin, check_complete};

fn specs(graph: &Graph) -> Vec<WeightSpec> {
    graph
        .weights()
        .map(|(name, weight)| WeightSpec {
            name: name.into(),
            dtype: weight.dtype,
            shape: weight.shape.clone(),
        })
        .collect()
}

#[test]
fn a_materialised_model_opens_and_delivers_its_weights() {
    let cache = tempfile::tempdir().unwrap();
    for name in ["mobilenet-v2", "taef2/encoder", "taef2/decoder"] {
        let model = builtin::find(name).unwrap();
        let path = model.materialise(&cache.path().join("models"), &|_, _| Flow::Continue).unwrap();
        let graph = Graph::open(&path, &OpenOptions::default()).unwrap();
        let (specs, files, made) = (specs(&graph), OnnxWeights::new(&graph), model.weights().unwrap());
        assert_eq!(specs.len(), model.weight_map().unwrap().tensors.len(), "{name}");
        check_complete(&specs, &files).unwrap();
        for WeightSpec { name, .. } in &specs {
            let (file, made) = (files.get(name).unwrap(), made.get(name).unwrap());
            assert!(file.file.is_some() && file.data() == made.data(), "{name}");
        }
    }
}

#[test]
fn every_stripped_graph_is_complete_with_synthetic_weights() {
    for model in builtin::list() {
        let graph =
            Graph::from_bytes(model.graph_bytes().unwrap().into(), model.name, ExternalBase::Stripped)
                .unwrap();
        let (specs, made, own) = (specs(&graph), model.weights().unwrap(), OnnxWeights::new(&graph));
        // Some exporters keep small tensors in the graph.
        let (given, kept): (Vec<_>, Vec<_>) =
            specs.iter().cloned().partition(|spec| made.describe(&spec.name).is_ok());
        check_complete(&given, &made).unwrap();
        check_complete(&kept, &own).unwrap();

        let missing = check_complete(&specs, &own).unwrap_err();
        let count = model.weight_map().unwrap().tensors.len();
        let expected = format!("{count} of the graph's {} weights", specs.len());
        assert!(missing.message.starts_with(&expected), "{}: {missing}", model.name);
    }
}
