use super::*;
use crate::{InMemoryWeights, OnnxWeights, StateDict, builtin, synthetic};
use prost::Message;
use sdrun_abi::{Weight, WeightSource};
use sdrun_graph::{ExternalBase, Graph, OpenOptions, Tensor, WeightsPolicy, proto::*};
use std::{collections::BTreeMap, fs, path::Path};

impl StateDict for InMemoryWeights {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

fn open(model: &builtin::Builtin) -> Graph {
    Graph::from_bytes(model.graph_bytes().unwrap().into(), model.name, ExternalBase::Stripped).unwrap()
}

/// `found`, by initializer.
fn by_name(binding: &Binding) -> BTreeMap<&str, &BoundTensor> {
    binding.tensors.iter().map(|tensor| (&*tensor.name, tensor)).collect()
}

#[test]
fn every_built_in_graph_tells_its_own_map() {
    let (mut all, mut path) = (0, 0);
    for model in builtin::list() {
        let expected = Binding::from_map(&model.weight_map().unwrap());
        let (found, report) = Binding::infer(&open(model));
        let table = by_name(&found);
        for tensor in &expected.tensors {
            // TAEF2's map is named after the initializers, of which 6 have lost their names.
            if names::is_state_dict_name(&tensor.sources[0]) {
                assert_eq!(table.get(&*tensor.name), Some(&tensor), "{}: {:?}", model.name, report.unbound);
            }
        }
        assert_eq!(found.tensors.len(), expected.tensors.len(), "{}", model.name);
        assert_eq!(report.unbound, [], "{}", model.name);
        assert_eq!(found.component, expected.component, "{}", model.name);
        println!("{}: {:?}, {report}", model.name, found.component);
        all += report.bound();
        path += report.by_path;
    }
    println!("{all} weights, {path} of them by path");
}

#[test]
fn components_of_the_built_in_models() {
    use Component::*;
    for model in builtin::list() {
        let expected = match model.name {
            name if name.contains("controlnet") && !name.contains("unet") => Some(ControlNet),
            name if name.contains("vae") || name.starts_with("taesd") => Some(Vae),
            name if name.starts_with("esrgan") => Some(Upscaler),
            "sdxl/text-encoder-2" => Some(TextEncoder2),
            // No pipeline in the wild has an encoder of its width.
            "demo/text-encoder" => None,
            name if name.contains("text-encoder") => Some(TextEncoder),
            name if ["t5", "gemma", "taef2", "mobilenet"].iter().any(|start| name.starts_with(start)) => {
                continue;
            }
            _ => Some(Denoiser),
        };
        let binding = Binding::from_map(&model.weight_map().unwrap());
        assert_eq!(binding.component, expected, "{}", model.name);
        let text = matches!(expected, Some(TextEncoder | TextEncoder2));
        let of_transformers_4 = |t: &BoundTensor| {
            t.sources[0].starts_with("text_model.") || t.sources[0] == "text_projection.weight"
        };
        assert!(!text || binding.tensors.iter().all(of_transformers_4), "{}", model.name);
    }
}

#[test]
fn json_and_back() {
    let map = builtin::find("sd15/vae-decoder").unwrap().weight_map().unwrap();
    let binding = Binding::from_map(&map);
    let json = binding.to_json().unwrap();
    assert_eq!(Binding::parse(json.as_bytes()).unwrap(), binding);
    let mut value: serde_json::Value = serde_json::from_str(&json).unwrap();
    for (place, wrong, words) in [
        ("/tensors/1/init", binding.tensors[0].name.clone().into(), "appears twice"),
        ("/tensors/0/src", serde_json::json!([]), "has no source"),
        ("/tensors/0/shape", vec![1; 9].into(), "too many dimensions"),
        ("/tensors/0/src_shape", serde_json::json!([7]), "transform"),
        ("/tensors/0/op", "turn".into(), "turn"),
    ] {
        let right = std::mem::replace(value.pointer_mut(place).unwrap(), wrong);
        let error = Binding::parse(value.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.code, ErrorCode::DataLoss);
        assert!(error.message.contains(words), "{place}: {error}");
        *value.pointer_mut(place).unwrap() = right;
    }
}

/// Exports of other tools: those with an oracle, and one. The others are ours (tools/diffusion/denoisers.py).
fn tiny_exports() -> Vec<(String, std::path::PathBuf, std::path::PathBuf)> {
    let mut found = Vec::new();
    for family in ["sd", "sdxl", "sd3", "flux"] {
        let onnx = sdrun_tiny::folder().join(family).join("onnx");
        let is_foreign = |name: &str| {
            name == "unet_controlnet" || onnx.with_file_name(format!("oracle/{name}.safetensors")).is_file()
        };
        for folder in fs::read_dir(&onnx).unwrap_or_else(|e| panic!("{}: {e}", onnx.display())).flatten() {
            for (model, map) in [("model.onnx", "map.json"), ("model.graph.onnx", "model.map.json")] {
                let (model, map) = (folder.path().join(model), folder.path().join(map));
                if model.is_file() && map.is_file() && is_foreign(&folder.file_name().to_string_lossy()) {
                    found.push((format!("{family}/{}", folder.file_name().to_string_lossy()), model, map));
                }
            }
        }
    }
    assert_eq!(found.len(), 22);
    found.sort();
    found
}

fn open_tiny(path: &Path) -> Graph {
    let options = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..Default::default() };
    Graph::open(path, &options).unwrap()
}

fn expected_tiny(map: &Path) -> Vec<BoundTensor> {
    let map: serde_json::Value = serde_json::from_slice(&fs::read(map).unwrap()).unwrap();
    let mut tensors: Vec<BoundTensor> = map["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| BoundTensor {
            name: t["init"].as_str().unwrap().into(),
            sources: vec![t["src"].as_str().unwrap().into()],
            transform: serde_json::from_value(t["op"].clone()).unwrap(),
            source_shape: serde_json::from_value(t["src_shape"].clone()).unwrap(),
            shape: serde_json::from_value(t["shape"].clone()).unwrap(),
            dtype: DType::F32,
        })
        .collect();
    names::canonicalise(&mut tensors);
    tensors
}

#[test]
fn tiny_exports_tell_their_maps() {
    let (mut all, mut path) = (0, 0);
    for (name, model, map) in tiny_exports() {
        let (found, report) = Binding::infer(&open_tiny(&model));
        let (table, expected) = (by_name(&found), expected_tiny(&map));
        for tensor in &expected {
            assert_eq!(table.get(&*tensor.name), Some(&tensor), "{name}: {:?}", report.unbound);
        }
        println!("{name}: {:?}, {report}; map {}", found.component, expected.len());
        // The torch.export-based exporter leaves tables it has computed, which no name tells from weights.
        let torchscript = report.unbound.iter().filter(|tensor| tensor.name.starts_with("onnx::")).count();
        assert_eq!((torchscript, found.tensors.len()), (0, expected.len()), "{name}: {:?}", report.unbound);
        all += expected.len();
        path += report.by_path;
    }
    println!("{all} weights, {path} of them by path");
}

/// The state dict a graph was exported from.
fn unbind(expected: &[BoundTensor], weights: &dyn WeightSource) -> InMemoryWeights {
    let tensor = |t: &BoundTensor| {
        let weight = weights.get(&t.name).unwrap();
        let data = match (t.transform, &*t.shape) {
            (Transform::Transpose, [rows, columns]) => {
                let elements = weight.data().as_chunks::<4>().0;
                (0..*columns)
                    .flat_map(|c| (0..*rows).flat_map(move |r| elements[r * columns + c]))
                    .collect::<Vec<u8>>()
            }
            _ => weight.data().to_vec(),
        };
        (t.sources[0].clone(), Tensor::new(t.dtype, t.source_shape.clone(), data).unwrap())
    };
    expected.iter().map(tensor).collect()
}

#[test]
fn tiny_exports_by_value() {
    for (name, model, map) in tiny_exports().into_iter().filter(|(_, model, _)| model.ends_with("model.onnx"))
    {
        let mut graph = open_tiny(&model);
        let (weights, expected) = (OnnxWeights::new(&graph), expected_tiny(&map));
        let reference = unbind(&expected, &weights);
        let (found, report) = Binding::infer_with_reference(&graph, &weights, &reference).unwrap();
        assert!(report.is_complete() && report.unused.is_empty(), "{name}: {report:?}");
        let nameless = report.by_path + report.by_value;

        // The same without paths: names and values are left.
        for node in &mut graph.nodes {
            node.name.clear();
            node.metadata.clear();
        }
        let (again, report) = Binding::infer_with_reference(&graph, &weights, &reference).unwrap();
        assert_eq!(again, found, "{name}: {report:?}");
        assert_eq!((report.by_value, report.by_path), (nameless, 0), "{name}");
        println!("{name}: {report}");
    }
}

/// A whole component without paths, against its synthetic checkpoint.
#[test]
fn values_find_what_paths_do_not() {
    let model = builtin::find("sd15/vae-encoder").unwrap();
    let map = model.weight_map().unwrap();
    let reference: InMemoryWeights = map
        .tensors
        .iter()
        .map(|t| {
            let mut data = vec![0; t.length as usize];
            synthetic::fill(&map.tag, &t.source, &t.source_shape, t.dtype, &mut data).unwrap();
            (t.source.clone(), Tensor::new(t.dtype, t.source_shape.clone(), data).unwrap())
        })
        .collect();
    let (mut graph, weights) = (open(model), model.weights().unwrap());
    let expected = Binding::from_map(&map);
    let (found, report) = Binding::infer_with_reference(&graph, &weights, &reference).unwrap();
    assert_eq!(by_name(&found), by_name(&expected));
    assert_eq!((report.confirmed, report.by_value), (108, 0));

    graph.nodes.iter_mut().for_each(|node| node.name.clear());
    let (_, blind) = Binding::infer(&graph);
    assert_eq!((blind.by_name, blind.unbound.len()), (60, 48));
    assert!(blind.unbound.iter().all(|u| u.reason == Reason::NoPath && !u.used_by.is_empty()));
    let (found, report) = Binding::infer_with_reference(&graph, &weights, &reference).unwrap();
    assert_eq!(by_name(&found), by_name(&expected));
    assert_eq!((report.by_name, report.by_value, report.bound()), (60, 48, 108));

    // Another checkpoint's values: names and paths stand, and it is said.
    let (_, report) =
        Binding::infer_with_reference(&open(model), &weights.with_tag("other"), &reference).unwrap();
    assert_eq!((report.bound(), report.confirmed, report.unconfirmed.len()), (108, 0, 108));
}

/// A graph of `op(x, weight)` nodes; each weight is (initializer, dimensions, values, uses as (operator, node name)).
type Sample<'a> = (&'a str, &'a [usize], &'a [f32], &'a [(&'a str, &'a str)]);

fn sample(weights: &[Sample<'_>]) -> Graph {
    let mut graph = GraphProto::default();
    let info = |name: &str| ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto {
            tensor_type: Some(TensorTypeProto { elem_type: Some(1), shape: None }),
            ..Default::default()
        }),
        ..Default::default()
    };
    graph.input.push(info("x"));
    for (name, dims, values, uses) in weights {
        graph.initializer.push(TensorProto {
            name: Some(name.to_string()),
            data_type: Some(1),
            dims: dims.iter().map(|d| *d as i64).collect(),
            raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>().into()),
            ..Default::default()
        });
        for (op, node) in *uses {
            let output = format!("y{}", graph.node.len());
            graph.output.push(info(&output));
            graph.node.push(NodeProto {
                op_type: Some(op.to_string()),
                name: Some(node.to_string()),
                input: vec!["x".into(), name.to_string()],
                output: vec![output],
                ..Default::default()
            });
        }
    }
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
        graph: Some(graph),
        ..Default::default()
    };
    Graph::from_bytes(model.encode_to_vec().into(), "sample", ExternalBase::Stripped).unwrap()
}

fn reasons(report: &ImportReport) -> Vec<(&str, Reason, Vec<&str>)> {
    report
        .unbound
        .iter()
        .map(|u| (&*u.name, u.reason, u.candidates.iter().map(String::as_str).collect()))
        .collect()
}

#[test]
fn what_is_doubtful_is_reported_and_not_bound() {
    let (m, v) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2.0]);
    let graph = sample(&[
        ("onnx::MatMul_1", &[3, 2], &m, &[("MatMul", "/a/MatMul")]),
        ("a.bias", &[3], &m[..3], &[("Add", "/a/Add")]),
        ("onnx::MatMul_3", &[3, 2], &m, &[("MatMul", "MatMul_3")]),
        ("onnx::Conv_4", &[2, 3, 1], &m, &[("Conv", "/c/Conv")]),
        ("d.weight", &[2, 3], &m, &[("MatMul", "/d/MatMul"), ("MatMul", "/e/MatMul")]),
        ("onnx::MatMul_5", &[3, 2], &m, &[("MatMul", "/f/MatMul")]),
        ("onnx::MatMul_6", &[2, 3], &m, &[("MatMul", "/f/MatMul_1")]),
        ("onnx::MatMul_7", &[3, 2], &m, &[("MatMul", "/g/MatMul")]),
        ("onnx::MatMul_8", &[3, 2], &m, &[("MatMul", "/g/MatMul_1")]),
        ("onnx::Sub_9", &[2], &v, &[("Sub", "/h/Sub")]),
        ("onnx::Mul_10", &[1, 2], &v, &[("Mul", "/i/Mul")]),
        ("val_12", &[2], &v, &[("Mul", "/i/Mul_1")]),
        ("val_11", &[2], &[1.0; 2], &[("LayerNormalization", "/j/LayerNormalization")]),
    ]);
    let (binding, report) = Binding::infer(&graph);
    let bound: Vec<_> = binding.tensors.iter().map(|t| (&*t.name, &*t.sources[0])).collect();
    // g is called twice with equal values.
    assert_eq!(bound, [("a.bias", "a.bias"), ("onnx::MatMul_7", "g.weight"), ("onnx::MatMul_8", "g.weight")]);
    assert_eq!(
        reasons(&report),
        [
            ("onnx::MatMul_1", Reason::Shape, vec!["a.weight"]),
            ("onnx::MatMul_3", Reason::NoPath, vec![]),
            ("onnx::Conv_4", Reason::Folded, vec!["c.weight"]),
            ("d.weight", Reason::Merged, vec!["d.weight", "e.weight"]),
            ("onnx::MatMul_5", Reason::OneSourceTwice, vec!["f.weight"]),
            ("onnx::MatMul_6", Reason::OneSourceTwice, vec!["f.weight"]),
            ("onnx::Sub_9", Reason::NoRule, vec![]),
            ("onnx::Mul_10", Reason::NoRule, vec![]),
            ("val_12", Reason::Folded, vec!["i.weight"]),
        ]
    );
    assert_eq!(report.literals, ["val_11"]);
    assert!(!report.is_complete());
    assert!(report.to_string().starts_with("3 of 12 weights recognised: 1 by name, 2 by path"), "{report}");
}

#[test]
fn a_value_decides_where_it_is_unique() {
    let tensor = |shape: &[usize], values: &[f32]| Tensor::from_elements(shape.to_vec(), values).unwrap();
    let (a, turned, b) = ([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0], [5.0, 6.0, 7.0, 8.0]);
    let graph = sample(&[
        ("onnx::MatMul_1", &[2, 2], &turned, &[("MatMul", "/a/MatMul")]),
        // Its path says b, it is c; square, so that only the value tells that it is not transposed.
        ("onnx::MatMul_2", &[2, 2], &b, &[("MatMul", "/b/MatMul")]),
        ("zero.bias", &[2], &[0.0; 2], &[("Add", "/zero/Add")]),
        ("onnx::Add_3", &[2], &[0.0; 2], &[("Add", "Add_3")]),
        ("changed.bias", &[2], &[0.5; 2], &[("Add", "/changed/Add")]),
        ("unknown.bias", &[2], &[0.25; 2], &[("Add", "/unknown/Add")]),
    ]);
    let reference: InMemoryWeights = [
        ("a.weight", tensor(&[2, 2], &a)),
        ("b.weight", tensor(&[2, 2], &[9.0, 8.0, 7.0, 5.0])),
        ("c.weight", tensor(&[2, 2], &b)),
        ("zero.bias", tensor(&[2], &[0.0; 2])),
        ("other.bias", tensor(&[2], &[0.0; 2])),
        ("changed.bias", tensor(&[2], &[1.5; 2])),
    ]
    .map(|(name, tensor)| (name.to_owned(), tensor))
    .into_iter()
    .collect();
    let weights = OnnxWeights::new(&graph);
    let (binding, report) = Binding::infer_with_reference(&graph, &weights, &reference).unwrap();
    let bound: Vec<_> = binding.tensors.iter().map(|t| (&*t.name, &*t.sources[0], t.transform)).collect();
    use Transform::*;
    assert_eq!(
        bound,
        [
            ("onnx::MatMul_1", "a.weight", Transpose),
            ("onnx::MatMul_2", "c.weight", Identity),
            ("zero.bias", "zero.bias", Identity),
            ("changed.bias", "changed.bias", Identity),
        ]
    );
    assert_eq!((report.by_name, report.by_path, report.by_value, report.confirmed), (2, 1, 1, 2));
    let contradiction = Contradiction {
        name: "onnx::MatMul_2".into(),
        by_name: "b.weight".into(),
        by_value: vec!["c.weight".into()],
    };
    assert_eq!(report.contradictions, [contradiction]);
    assert_eq!(report.unconfirmed, ["changed.bias"]);
    assert_eq!(report.unused, ["b.weight", "other.bias"]);
    assert_eq!(
        reasons(&report),
        [
            ("onnx::Add_3", Reason::EqualValues, vec!["other.bias", "zero.bias"]),
            ("unknown.bias", Reason::NotInReference, vec!["unknown.bias"]),
        ]
    );
}

#[test]
fn errors_of_a_source_are_passed_on() {
    struct Broken;
    impl WeightSource for Broken {
        fn get(&self, _: &str) -> Result<Weight<'_>> {
            Err(Error::new(ErrorCode::DataLoss, "broken"))
        }
    }
    let graph = sample(&[("a.bias", &[2], &[1.0, 2.0], &[("Add", "/a/Add")])]);
    let reference = InMemoryWeights::default();
    let error = Binding::infer_with_reference(&graph, &Broken, &reference).unwrap_err();
    assert_eq!(error.message, "broken");
}

#[test]
fn names_of_state_dicts() {
    for name in ["conv_in.weight", "features.0.1.running_var", "0.weight", "logit_scale", "blocks.3.scale-1"]
    {
        assert!(names::is_state_dict_name(name), "{name}");
    }
    for name in [
        "onnx::MatMul_5647",
        "val_28",
        "5647",
        "weight.13",
        "/to_q/Transpose_output_0",
        "_tensor_constant0",
        "",
        "a..b",
        "a.",
        "const 1",
    ] {
        assert!(!names::is_state_dict_name(name), "{name}");
    }
    assert!(names::is_program_constant("/time_proj/Constant_3_output_0"));
    assert!(!names::is_program_constant("/to_q/Transpose_output_0"));
}

#[test]
fn names_of_other_versions() {
    let canonical = |names: &[&str]| {
        let tensor = |name: &&str| BoundTensor {
            name: "i".into(),
            sources: vec![name.to_string()],
            transform: Transform::Identity,
            source_shape: vec![1280],
            shape: vec![1280],
            dtype: DType::F32,
        };
        let mut tensors: Vec<_> = names.iter().map(tensor).collect();
        let component = names::canonicalise(&mut tensors);
        (component, tensors.into_iter().flat_map(|t| t.sources).collect::<Vec<_>>())
    };
    let (component, found) =
        canonical(&["unet.down_blocks.0.a.weight", "unet.time_embedding.linear_1.weight"]);
    assert_eq!(component, Some(Component::Denoiser));
    assert_eq!(found, ["down_blocks.0.a.weight", "time_embedding.linear_1.weight"]);
    let (component, found) =
        canonical(&["embeddings.token_embedding.weight", "encoder.layers.0.x", "text_projection.weight"]);
    assert_eq!(component, Some(Component::TextEncoder2));
    assert_eq!(
        found,
        [
            "text_model.embeddings.token_embedding.weight",
            "text_model.encoder.layers.0.x",
            "text_projection.weight"
        ]
    );
    let (component, found) =
        canonical(&["decoder.conv_in.weight", "decoder.mid_block.attentions.0.proj_attn.bias"]);
    assert_eq!(component, Some(Component::Vae));
    assert_eq!(found[1], "decoder.mid_block.attentions.0.to_out.0.bias");
    let (component, found) = canonical(&["encoder.embed_tokens.weight", "encoder.block.0.layer.0.x"]);
    assert_eq!((component, &*found[0]), (None, "shared.weight"));
}
