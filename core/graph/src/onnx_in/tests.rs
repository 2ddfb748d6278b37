use crate::{
    Attribute, Dim, ExternalBase, Graph, GraphError, Initializer, OpenDims, OpenOptions, Tensor, WeightData,
    WeightRef, WeightsPolicy,
    proto::{self, Dimension, GraphProto, StringStringEntryProto, TensorProto, attribute_type as kind},
    testing::{Model, attribute, import, model, node, ramp, tensor, value},
};
use prost::Message;
use sdrun_abi::DType;
use std::{fs, path::Path};

type Change = fn(&mut GraphProto);

/// y = x · w + b, with w and b as initializers.
pub(super) fn linear() -> Model {
    model(17)
        .input("x", DType::F32, "batch 2")
        .initializer("w", &ramp(&[2, 3]))
        .initializer("b", &ramp(&[3]))
        .node("MatMul", &["x", "w"], &["xw"])
        .node("Add", &["xw", "b"], &["y"])
        .output("y", "batch 3")
}

fn names(graph: &Graph, weights: bool) -> Vec<&str> {
    let is_weight = |init: &Initializer| matches!(init, Initializer::Weight(_));
    let mut names: Vec<&str> = graph
        .initializers
        .iter()
        .filter(|(_, init)| is_weight(init) == weights)
        .map(|(id, _)| graph.value(*id).name.as_str())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn a_graph_is_imported() {
    let mut file = linear();
    file.0.producer_name = Some("exporter".into());
    file.0.producer_version = Some("2".into());
    file.graph_mut().node[0].name = Some("/fc/MatMul".into());
    file.graph_mut().value_info.push(value("xw", DType::F32, "? 3"));
    let graph = file.graph();
    assert_eq!(
        (graph.name.as_str(), graph.producer.as_str(), graph.opset(), graph.ir_version),
        ("test", "exporter 2", 17, 8)
    );
    let x = graph.value(graph.inputs[0]);
    assert_eq!(
        (x.dtype, x.shape.clone()),
        (Some(DType::F32), Some(vec![Dim::Symbol("batch".into()), Dim::Known(2)]))
    );
    let xw = graph.find("xw").unwrap();
    assert_eq!(graph.value(xw).shape, Some(vec![Dim::Unknown, Dim::Known(3)]));
    assert_eq!(graph.nodes[0].name, "/fc/MatMul");
    assert_eq!(graph.nodes[1].inputs, [Some(xw), graph.find("b")]);
    assert_eq!(graph.outputs, [graph.find("y").unwrap()]);
    assert_eq!(names(&graph, true), ["b", "w"]);
}

#[test]
fn raw_data_stays_in_the_file() {
    let bytes = bytes::Bytes::from(linear().bytes());
    let graph = Graph::from_bytes(bytes.clone(), "m", ExternalBase::Stripped).unwrap();
    let range = bytes.as_ptr_range();
    for (name, weight) in graph.weights() {
        let WeightData::Inline(data) = &weight.data else { panic!("{name} is not inline") };
        assert!(
            range.contains(&data.as_ptr()) && range.contains(&data.last().map(std::ptr::from_ref).unwrap()),
            "{name}"
        );
    }
}

#[test]
fn versions_outside_of_the_range_are_refused() {
    for (opset, part) in [(6, "operator set 6 is older than 7"), (29, "operator set 29 is newer than 28")] {
        let mut file = linear();
        file.0.opset_import = vec![import("ai.onnx", opset)];
        assert!(file.error().contains(part), "{}", file.error());
        assert!(matches!(file.read(), Err(GraphError::UnsupportedModel { .. })));
    }
    for (version, part) in
        [(Some(2), "IR version 2 is older"), (Some(15), "IR version 15 is newer"), (None, "no ir_version")]
    {
        let mut file = linear();
        file.0.ir_version = version;
        assert!(file.error().contains(part), "{}", file.error());
    }
    for (opset, ir) in [(7, 3), (28, 14)] {
        let mut file = linear();
        (file.0.opset_import, file.0.ir_version) = (vec![import("", opset)], Some(ir));
        assert_eq!(file.graph().opset(), opset);
    }
    let mut file = linear();
    file.0.opset_import.push(import("ai.onnx", 18));
    assert!(file.error().contains("as version 17 and as 18"), "{}", file.error());
    file.0.opset_import.clear();
    assert!(file.error().contains("domain \"\" is not imported"), "{}", file.error());
}

#[test]
fn files_that_are_not_models_are_named() {
    for (bytes, part) in [
        (&b""[..], "contains no graph"),
        (b"not a model", "not an ONNX file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"\x1f\x8b\x08\0", "gzip"),
        (&linear().bytes()[..60], "truncated"),
    ] {
        let error = Graph::from_bytes(bytes.to_vec().into(), "dir/m.onnx", ExternalBase::Stripped)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part) && error.contains("m.onnx"), "{error}");
    }
}

#[test]
fn files_that_cannot_be_opened_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Graph::open(dir.path().join("gone.onnx"), &OpenOptions::default()).unwrap_err();
    assert!(
        matches!(&error, GraphError::Io(e) if e.code == sdrun_abi::ErrorCode::NotFound)
            && error.to_string().contains("gone.onnx"),
        "{error}"
    );
    let error = Graph::open(dir.path(), &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("is a folder"), "{error}");
    fs::write(dir.path().join("empty.onnx"), b"").unwrap();
    let error = Graph::open(dir.path().join("empty.onnx"), &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("contains no graph"), "{error}");
}

#[test]
fn contradictions_are_refused() {
    let cases: [(&str, Change); 12] = [
        ("\"xw\" has the same name as another", |g| g.node[1].output[0] = "xw".into()),
        ("\"x\" has the same name as another", |g| g.node[0].output[0] = "x".into()),
        ("initializer \"w\" has the same name", |g| g.initializer.push(g.initializer[0].clone())),
        ("input \"x\" has the same name", |g| g.input.push(g.input[0].clone())),
        ("uses \"nowhere\", which is not defined", |g| g.node[1].input[1] = "nowhere".into()),
        ("output \"z\" is not computed", |g| g.output[0].name = Some("z".into())),
        ("output \"y\" is listed twice", |g| g.output.push(g.output[0].clone())),
        ("no outputs", |g| g.output.clear()),
        ("cycle", |g| g.node[0].input[0] = "y".into()),
        ("no operator", |g| g.node[0].op_type = None),
        ("type of \"x\": its shape has a negative dimension, -2", |g| {
            g.input[0] = value("x", DType::F32, "-2 2")
        }),
        ("initializer \"w\": it has 20 bytes", |g| g.initializer[0].raw_data = Some(vec![0; 20].into())),
    ];
    for (part, change) in cases {
        let mut file = linear();
        change(file.graph_mut());
        assert!(file.error().contains(part), "{part}: {}", file.error());
        assert!(matches!(file.read(), Err(GraphError::Malformed { .. })));
    }
}

#[test]
fn unsupported_types_are_refused() {
    let cases: [(&str, Change); 4] = [
        ("initializer \"w\": elements of type int4", |g| g.initializer[0].data_type = Some(22)),
        ("input \"x\" is not a tensor", |g| g.input[0].r#type = Some(Default::default())),
        ("output \"y\" is not a tensor", |g| g.output[0].r#type = Some(Default::default())),
        ("sparse initializers", |g| g.sparse_initializer.push(Default::default())),
    ];
    for (part, change) in cases {
        let mut file = linear();
        change(file.graph_mut());
        assert!(file.error().contains(part), "{part}: {}", file.error());
        assert!(matches!(file.read(), Err(GraphError::UnsupportedModel { .. })));
    }
}

#[test]
fn unsorted_nodes_are_sorted_and_sorted_nodes_keep_their_order() {
    let mut file = linear().node("Neg", &["x"], &["n"]).node("Abs", &["n"], &["a"]);
    let ops = |graph: &Graph| graph.nodes.iter().map(|n| n.op_type.clone()).collect::<Vec<_>>();
    assert_eq!(ops(&file.graph()), ["MatMul", "Add", "Neg", "Abs"]);
    file.graph_mut().node.reverse();
    assert_eq!(ops(&file.graph()), ["Neg", "Abs", "MatMul", "Add"]);
}

#[test]
fn inputs_that_are_also_initializers_are_initializers() {
    let mut file = linear();
    file.0.ir_version = Some(3);
    file = file.input("w", DType::F32, "2 3").input("b", DType::F32, "3");
    let graph = file.graph();
    assert_eq!(graph.inputs.len(), 1);
    assert_eq!(names(&graph, true), ["b", "w"]);
}

#[test]
fn initializers_are_weights_unless_they_belong_to_the_topology() {
    let floats = |shape: &[usize]| ramp(shape);
    let file = model(17)
        .input("x", DType::F32, "1 1 4 4")
        .initializer("weight", &floats(&[4]))
        .initializer("scalar", &Tensor::scalar(2.0f32))
        .initializer("one", &floats(&[1]))
        .initializer("axes", &Tensor::from_i64s(&[0, 1]))
        .initializer("roi", &floats(&[8]))
        .initializer("scales", &floats(&[4]))
        .initializer("both", &floats(&[4]))
        .initializer("captured", &floats(&[2]))
        .initializer("unused", &floats(&[2]))
        .initializer("cond", &Tensor::scalar(true))
        .node("Mul", &["x", "weight"], &["a"])
        .node("Add", &["a", "scalar"], &["b"])
        .node("Add", &["b", "one"], &["c"])
        .node("Unsqueeze", &["c", "axes"], &["d"])
        .node("Resize", &["x", "roi", "scales"], &["e"])
        .node("Resize", &["e", "", "both"], &["f"])
        .node("Add", &["x", "both"], &["g"])
        .node_with(
            "If",
            &["cond"],
            &["y"],
            [("then_branch", body("captured")), ("else_branch", body("captured"))],
        )
        .output("y", "2");
    let graph = file.graph();
    assert_eq!(names(&graph, true), ["both", "captured", "unused", "weight"]);
    assert_eq!(names(&graph, false), ["axes", "cond", "one", "roi", "scalar", "scales"]);
}

/// A body that passes on one value of the enclosing graph.
pub(super) fn body(of: &str) -> Attribute {
    Attribute::Graph(Box::new(GraphProto {
        node: vec![node("Identity", &[of], &["inner"])],
        output: vec![value("inner", DType::F32, "2")],
        ..Default::default()
    }))
}

#[test]
fn constant_nodes_become_initializers() {
    let large: Vec<f32> = (0..1024).map(|i| i as f32).collect();
    let constants = [
        ("t", "value", Attribute::Tensor(ramp(&[2, 2]))),
        ("f", "value_float", Attribute::Float(0.5)),
        ("fs", "value_floats", Attribute::Floats(vec![1.0, 2.0])),
        ("i", "value_int", Attribute::Int(-3)),
        ("is", "value_ints", Attribute::Ints(vec![4, 5])),
        ("large", "value_floats", Attribute::Floats(large)),
        ("filled", "value_floats", Attribute::Floats(vec![1.0; 1024])),
        ("text", "value_string", Attribute::String(b"words".to_vec())),
    ];
    let mut file = linear();
    for (output, key, value) in constants {
        file = file.node_with("Constant", &[], &[output], [(key, value)]);
    }
    let graph = file.graph();
    let get = |name: &str| graph.constant(graph.find(name).unwrap()).unwrap();
    assert_eq!(get("t"), &ramp(&[2, 2]));
    assert_eq!(get("f"), &Tensor::scalar(0.5f32));
    assert_eq!(get("fs"), &Tensor::from_elements(vec![2], &[1.0f32, 2.0]).unwrap());
    assert_eq!(get("i"), &Tensor::scalar(-3i64));
    assert_eq!(get("is"), &Tensor::from_i64s(&[4, 5]));
    assert_eq!(get("filled").len(), 1024);
    assert_eq!(names(&graph, true), ["b", "large", "w"]);
    let left: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
    assert_eq!(left, ["MatMul", "Add", "Constant"], "the IR has no string tensors");

    let two = linear().node_with(
        "Constant",
        &[],
        &["t"],
        [("value_int", Attribute::Int(0)), ("value_float", Attribute::Float(0.0))],
    );
    assert!(two.error().contains("2 attributes instead of one"), "{}", two.error());
}

#[test]
fn merged_initializers_get_their_names_back() {
    let file = model(17)
        .input("x", DType::F32, "2")
        .initializer("first", &ramp(&[2]))
        .node("Identity", &["first"], &["second"])
        .node("Identity", &["second"], &["third"])
        .node("Add", &["x", "second"], &["a"])
        .node("Add", &["a", "third"], &["b"])
        .node("Identity", &["first"], &["y"])
        .node("Identity", &["x"], &["z"])
        .output("b", "2")
        .output("y", "2")
        .output("z", "2");
    let graph = file.graph();
    assert_eq!(names(&graph, true), ["first", "second", "third"]);
    let ops: Vec<_> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
    assert_eq!(ops, ["Add", "Add", "Identity", "Identity"], "identities of an output and of an input");
    let weights: Vec<_> = graph.weights().map(|(_, weight)| weight).collect();
    assert!(weights.iter().all(|w| *w == weights[0]));
    assert_eq!(graph.value(graph.find("third").unwrap()).known_shape(), Some(vec![2]));
}

#[test]
fn attributes_are_read_by_their_type() {
    let mut file = linear();
    let all = [
        ("int", Attribute::Int(-7)),
        ("ints", Attribute::Ints(vec![1, -2])),
        ("float", Attribute::Float(1.5)),
        ("floats", Attribute::Floats(vec![0.5])),
        ("string", Attribute::String(vec![0xff])),
        ("strings", Attribute::Strings(vec![b"a".to_vec(), vec![]])),
        ("tensor", Attribute::Tensor(ramp(&[2]))),
        ("body", body("x")),
    ];
    file.graph_mut().node[0].attribute =
        all.iter().map(|(name, value)| attribute(name, value.clone())).collect();
    let graph = file.graph();
    assert_eq!(graph.nodes[0].attributes.len(), all.len());
    for (name, value) in &all {
        assert_eq!(&graph.nodes[0].attributes[*name], value);
    }
    // Some writers omit zeros.
    file.graph_mut().node[0].attribute[0].i = None;
    assert_eq!(file.graph().nodes[0].int("int"), Some(0));

    file.graph_mut().node[0].attribute[0].r#type = None;
    assert!(file.error().contains("attribute \"int\": it has no type"), "{}", file.error());
    file.graph_mut().node[0].attribute[0].r#type = Some(77);
    assert!(file.error().contains("77 is not"), "{}", file.error());
    file.graph_mut().node[0].attribute[0] = attribute("ints", Attribute::Int(1));
    assert!(file.error().contains("\"ints\" occurs twice"), "{}", file.error());
    file.graph_mut().node[0].attribute[0].ref_attr_name = Some("alpha".into());
    assert!(file.error().contains("not in a function"), "{}", file.error());
}

#[test]
fn attributes_without_a_tensor_type_are_passed_through() {
    let mut file = linear();
    let strings = TensorProto {
        data_type: Some(8),
        string_data: vec![b"a"[..].into()],
        dims: vec![1],
        ..Default::default()
    };
    let other = proto::AttributeProto {
        name: Some("keys".into()),
        r#type: Some(kind::TENSOR),
        t: Some(strings),
        ..Default::default()
    };
    file.graph_mut().node[0].attribute = vec![other.clone()];
    assert_eq!(file.graph().nodes[0].attributes["keys"], Attribute::Other(Box::new(other)));
}

#[test]
fn captured_values_must_exist() {
    let with = |name: &str| linear().node_with("If", &["x"], &["z"], [("then_branch", body(name))]);
    assert_eq!(with("xw").graph().nodes.len(), 3);
    assert!(with("nowhere").error().contains("uses \"nowhere\""), "{}", with("nowhere").error());
    let mut unsorted = with("y");
    unsorted.graph_mut().node.rotate_right(1);
    assert_eq!(unsorted.graph().nodes[2].op_type, "If", "a body's use counts for the order");
}

pub(super) fn external(tensor: &mut TensorProto, location: &str, offset: u64) {
    tensor.raw_data = None;
    tensor.data_location = Some(proto::EXTERNAL);
    let entry =
        |key: &str, value: String| StringStringEntryProto { key: Some(key.into()), value: Some(value) };
    tensor.external_data = vec![entry("location", location.into()), entry("offset", offset.to_string())];
}

#[test]
fn external_weights_are_located_and_external_constants_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut file =
        linear().initializer("axes", &Tensor::from_i64s(&[0])).node("Unsqueeze", &["y", "axes"], &["z"]);
    external(&mut file.graph_mut().initializer[0], "w.bin", 8);
    external(&mut file.graph_mut().initializer[2], "w.bin", 0);
    let path = dir.path().join("m.onnx");
    fs::write(&path, file.bytes()).unwrap();

    let error = Graph::open(&path, &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("tensor \"w\"") && error.contains("w.bin does not exist"), "{error}");
    let lenient = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..Default::default() };
    let error = Graph::open(&path, &lenient).unwrap_err().to_string();
    assert!(error.contains("tensor \"axes\"") && error.contains("topology"), "{error}");

    fs::write(dir.path().join("w.bin"), [&7i64.to_le_bytes()[..], ramp(&[2, 3]).data()].concat()).unwrap();
    let graph = Graph::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(graph.constant(graph.find("axes").unwrap()), Some(&Tensor::from_i64s(&[7])));
    let (_, weight) = graph.weights().find(|(name, _)| *name == "w").unwrap();
    let WeightData::External { file: place, offset: 8 } = &weight.data else { panic!("{weight:?}") };
    assert!(place.is_absolute() && place.ends_with("w.bin"));
    assert_eq!(weight.read("w").unwrap(), ramp(&[2, 3]).data());

    // Windows refuses to change files that are mapped.
    if cfg!(unix) {
        fs::write(dir.path().join("w.bin"), [0; 31]).unwrap();
        assert!(weight.read("w").unwrap_err().to_string().contains("shorter"));
    }
    drop(graph);
    fs::write(dir.path().join("w.bin"), [0; 31]).unwrap();
    let error = Graph::open(&path, &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("which has 31"), "{error}");
}

#[test]
fn bytes_are_weights_and_zero_points_are_not() {
    let bytes = |first: i8| {
        let elements: Vec<i8> = (0..6).map(|i| first + i).collect();
        Tensor::from_elements(vec![2, 3], &elements).unwrap()
    };
    let file = |w: &Tensor, zeros: &[i8]| {
        model(17)
            .input("x", DType::F32, "batch 2")
            .initializer("w", w)
            .initializer("scale", &ramp(&[3]))
            .initializer("zero", &Tensor::from_elements(vec![3], zeros).unwrap())
            .initializer("one", &Tensor::from_elements(vec![1], &[1u8]).unwrap())
            .initializer("wide", &Tensor::from_elements(vec![2], &[1i32, 2]).unwrap())
            .node("DequantizeLinear", &["w", "scale", "zero"], &["f"])
            .node("MatMul", &["x", "f"], &["y"])
            .output("y", "batch 3")
    };
    let graph = file(&bytes(1), &[0, 0, 0]).graph();
    assert_eq!(names(&graph, true), ["scale", "w"]);
    assert_eq!(names(&graph, false), ["one", "wide", "zero"]);
    let hash = graph.topology_hash();
    assert_eq!(file(&bytes(2), &[0, 0, 0]).graph().topology_hash(), hash, "values of weights");
    assert_ne!(file(&bytes(1), &[0, 1, 0]).graph().topology_hash(), hash, "zero points");
}

#[test]
fn a_model_path_without_a_folder_finds_its_weights() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = linear();
    external(&mut file.graph_mut().initializer[0], "w.bin", 0);
    fs::write(dir.path().join("w.bin"), [0; 24]).unwrap();
    let base = ExternalBase::Folder { dir: dir.path(), options: OpenOptions::default() };
    let graph = Graph::from_bytes(file.bytes().into(), Path::new("in memory"), base).unwrap();
    assert!(graph.weights().any(|(name, w)| name == "w" && matches!(w.data, WeightData::External { .. })));
}

#[test]
fn stripped_weights_may_have_any_name() {
    for name in ["../../etc/passwd", "/abs", "C:\\w", "a\nb", "onnx::MatMul_12"] {
        let mut file = linear();
        external(&mut file.graph_mut().initializer[0], name, 0);
        let graph = file.graph();
        let expected = WeightRef {
            dtype: DType::F32,
            shape: vec![2, 3],
            data: WeightData::Absent { location: name.into(), offset: 0 },
        };
        assert_eq!(graph.weights().find(|(name, _)| *name == "w").map(|(_, w)| w), Some(&expected));
    }
}

#[test]
fn parts_that_pass_through_must_not_name_files() {
    let mut stored = tensor("c", &Tensor::from_i64s(&[1, 2]));
    external(&mut stored, "c.bin", 0);
    let inner = GraphProto {
        initializer: vec![stored.clone()],
        output: vec![value("c", DType::F32, "2")],
        ..Default::default()
    };
    let nested = GraphProto {
        node: vec![proto::NodeProto {
            attribute: vec![attribute("then_branch", Attribute::Graph(Box::new(inner.clone())))],
            ..node("If", &["x"], &["d"])
        }],
        output: vec![value("d", DType::F32, "2")],
        ..Default::default()
    };
    let list = proto::AttributeProto {
        r#type: Some(kind::TENSORS),
        tensors: vec![stored.clone()],
        ..Default::default()
    };
    let direct = proto::AttributeProto { r#type: Some(kind::TENSOR), t: Some(stored), ..Default::default() };
    for bad in [
        attribute("a", Attribute::Graph(Box::new(inner))),
        attribute("a", Attribute::Graph(Box::new(nested))),
        list,
        direct,
    ] {
        let mut file = linear();
        file.graph_mut().node[0].attribute = vec![bad];
        assert!(file.error().contains("has external data"), "{}", file.error());
    }
}

#[test]
fn nesting_is_bounded() {
    let mut inner = GraphProto { output: vec![value("x", DType::F32, "1")], ..Default::default() };
    for _ in 0..200 {
        let attribute = vec![attribute("then_branch", Attribute::Graph(Box::new(inner)))];
        let branch = proto::NodeProto { attribute, ..node("If", &["x"], &["o"]) };
        inner = GraphProto {
            node: vec![branch],
            output: vec![value("o", DType::F32, "1")],
            ..Default::default()
        };
    }
    inner.input.push(value("x", DType::F32, "1"));
    let deep = proto::ModelProto { graph: Some(inner), ..linear().0 };
    let error = Graph::from_bytes(deep.encode_to_vec().into(), "m", ExternalBase::Stripped).unwrap_err();
    assert!(error.to_string().contains("recursion"), "{error}");
}

#[test]
fn open_dimensions_are_written_in_several_ways() {
    let mut file = model(17).input("x", DType::F32, "-1 n 3 2").input("y", DType::F32, "n -1 3 2");
    for input in &mut file.graph_mut().input {
        let tensor = input.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
        let dims = &mut tensor.shape.as_mut().unwrap().dim;
        // Paddle gives every open dimension the same name.
        dims[2] = Dimension { dim_param: Some("?".into()), ..Default::default() };
        dims[3] = Dimension { dim_param: Some("?".into()), ..Default::default() };
    }
    let file = file.node("Abs", &["x"], &["a"]).node("Neg", &["a"], &["b"]);
    let mut file = file.output("b", "-1 n ? -1");
    file.graph_mut().value_info.push(value("a", DType::F32, "-1 n -1 2"));
    let graph = file.graph();
    let open = |name: &str| graph.value(graph.find(name).unwrap()).shape.clone().unwrap();
    let n = || Dim::Symbol("n".into());
    assert_eq!(open("x"), [Dim::Unknown, n(), Dim::Unknown, Dim::Unknown]);
    assert_eq!(open("y"), [n(), Dim::Unknown, Dim::Unknown, Dim::Unknown]);
    assert_eq!(open("a"), [Dim::Unknown, n(), Dim::Unknown, Dim::Known(2)]);
    assert_eq!(open("b"), [Dim::Unknown, n(), Dim::Unknown, Dim::Unknown]);
    // Their sizes may differ.
    let sizes = [("x".to_owned(), vec![1, 2, 3, 4]), ("y".to_owned(), vec![2, 5, 6, 7])].into();
    let mut bound = graph.clone();
    bound.bind(&sizes, OpenDims::Refuse).unwrap();

    let overflowed = model(17).input("x", DType::F32, "-2147483648").output("x", "1").error();
    assert!(overflowed.contains("negative dimension, -2147483648"), "{overflowed}");
}
