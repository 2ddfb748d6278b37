//! Models, engines, weights and tensors in files, good and bad.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Sandbox, model, npy};
use sdrun::{
    EngineFile, EngineManifest,
    abi::{BuildSpec, DType, EngineInfo, Precision, TensorSpec, WeightSpec},
    graph::{Attribute, ExternalBase, Graph, Value, proto},
};
use std::path::Path;

#[test]
fn a_model_is_described() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("ü 漢 model.onnx", model("x"));
    let text = sandbox.run(&["inspect", &path]).succeeds().stdout.clone();
    for words in [
        "tests",
        "ai.onnx 17",
        "x f32 [n, 4]",
        "y f32 [n, 4]",
        "Mul 1",
        "f32: 16 B in 1",
        "with open dimensions",
    ] {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
    let (_, open) = sandbox.json(&["inspect", &path]);
    assert_eq!(open["operators"], serde_json::json!({ "Mul": 1 }));
    assert_eq!(open["inputs"][0]["shape"], serde_json::json!(["n", 4]));
    assert_eq!(open["weights"]["bytes"], 16);
    assert_eq!(open["topology"]["bound"], false);
    let (_, bound) = sandbox.json(&["inspect", &path, "--shape", "x=2,4", "--passes", "--weights"]);
    assert_eq!(bound["topology"]["bound"], true);
    assert_eq!(bound["inputs"][0]["shape"], serde_json::json!([2, 4]));
    assert_eq!(bound["outputs"][0]["shape"], serde_json::json!([2, 4]));
    assert_ne!(bound["topology"]["hash"], open["topology"]["hash"]);
    assert_eq!(bound["simplified"]["nodes_after"], 1);
    assert_eq!(bound["merged"]["nodes_after"], 1);
    assert_eq!(bound["weights"]["list"][0]["name"], "w");
    // The hash ignores the values of weights.
    let mut other = model("x");
    let at = other.windows(4).position(|w| w == 4f32.to_le_bytes()).unwrap();
    other[at..at + 4].copy_from_slice(&5f32.to_le_bytes());
    let other = sandbox.file("other.onnx", other);
    assert_eq!(sandbox.json(&["inspect", &other]).1["topology"], open["topology"]);
}

/// A run-time choice between `x + bias` and `x`.
fn chooses() -> Vec<u8> {
    let read = |bytes: Vec<u8>| Graph::from_bytes(bytes.into(), "model", ExternalBase::Stripped).unwrap();
    let mut graph = read(model("x"));
    let y = graph.outputs[0];
    let output = proto::ValueInfoProto { name: Some("result".into()), ..Default::default() };
    let branch = |op: &str, inputs: &[&str], initializer: Vec<proto::TensorProto>| {
        let node = proto::NodeProto {
            op_type: Some(op.into()),
            input: inputs.iter().map(|name| name.to_string()).collect(),
            output: vec!["result".into()],
            ..Default::default()
        };
        let body = proto::GraphProto {
            node: vec![node],
            output: vec![output.clone()],
            initializer,
            ..Default::default()
        };
        Attribute::Graph(Box::new(body))
    };
    let bias = proto::TensorProto {
        name: Some("bias".into()),
        dims: vec![4],
        data_type: Some(DType::F32 as i32),
        raw_data: Some(vec![0; 16].into()),
        ..Default::default()
    };
    let flag = Value { name: "flag".into(), dtype: Some(DType::Bool), shape: Some(Vec::new()) };
    let flag = graph.add_value(flag);
    graph.inputs.push(flag);
    graph.initializers.clear();
    let node = &mut graph.nodes[0];
    (node.op_type, node.inputs, node.outputs) = ("If".into(), vec![Some(flag)], vec![Some(y)]);
    node.attributes.insert("then_branch".into(), branch("Add", &["x", "bias"], vec![bias]));
    node.attributes.insert("else_branch".into(), branch("Identity", &["x"], Vec::new()));
    graph.to_onnx(|name, _| unreachable!("{name} is not a weight")).unwrap()
}

#[test]
fn nodes_inside_branches_are_counted() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("if.onnx", chooses());
    let (_, json) = sandbox.json(&["inspect", &path]);
    assert_eq!((&json["nodes"], &json["nodes_in_bodies"]), (&3.into(), &2.into()));
    assert_eq!(json["operators"], serde_json::json!({ "Add": 1, "Identity": 1, "If": 1 }));
    assert_eq!((&json["weights"]["tensors"], &json["weights"]["bytes"]), (&1.into(), &16.into()));
    let text = sandbox.run(&["inspect", &path, "--weights"]).succeeds().stdout.clone();
    assert!(text.contains("3, 2 of them inside If") && text.contains("  bias f32 [4]"), "{text}");
}

/// Windows limits old programs to paths of 260 characters in a single alphabet.
#[test]
fn paths_may_be_long_and_in_any_alphabet() {
    let sandbox = Sandbox::new();
    let folder = sandbox.path("work").join(["Bildermodelle für 画像 и картинки"; 12].join("/"));
    assert!(folder.to_str().unwrap().chars().count() > 300);
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("модель.onnx");
    std::fs::write(&path, model("x")).unwrap();
    let (code, json) = sandbox.json(&["inspect", path.to_str().unwrap()]);
    assert_eq!((code, &json["inputs"][0]["name"]), (Some(0), &"x".into()));
    let absent = path.with_extension("bin");
    sandbox.run(&["inspect", absent.to_str().unwrap()]).fails(3, &["модель.bin"]);
}

#[test]
fn passes_report_what_they_remove_and_fuse() {
    let sandbox = Sandbox::new();
    let asked = ["inspect", "sd15/vae-decoder", "--shape", "latent_sample=1,4,64,64", "--passes"];
    let (_, json) = sandbox.json(&asked);
    let (simplified, merged) = (&json["simplified"], &json["merged"]);
    assert!(merged["nodes_after"].as_u64() < simplified["nodes_after"].as_u64());
    let pass = |name: &str| {
        let passes = merged["passes"].as_array().unwrap();
        passes.iter().find(|p| p["name"] == name).unwrap_or_else(|| panic!("no {name} in {passes:?}")).clone()
    };
    assert_eq!(pass("fuse_group_norm")["operators"]["sdrun.GroupNormalization"], 30);
    assert_eq!(pass("fuse_attention")["operators"]["Softmax"], -1);
    let text = sandbox.run(&asked).succeeds().stdout.clone();
    for words in ["fold_constants", "fuse_group_norm", "sdrun.Attention +1", "on providers that fuse nodes"] {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
}

#[test]
fn graphs_are_written_before_and_after_the_passes() {
    let sandbox = Sandbox::new();
    let folder = sandbox.path("work/graphs");
    let build = ["build", "sd15/vae-decoder", "--dump-graph", folder.to_str().unwrap(), "-p", "none"];
    sandbox.run(&build).fails(3, &["none"]);
    let inspect = |name: &str| sandbox.json(&["inspect", folder.join(name).to_str().unwrap()]).1;
    let (given, merged) = (inspect("given.onnx"), inspect("merged.onnx"));
    assert!(given["operators"]["InstanceNormalization"].as_u64() > Some(20));
    assert!(merged["operators"]["sdrun.GroupNormalization"].as_u64() > Some(20));
    assert_eq!(given["weights"], merged["weights"]);
    let file = sandbox.file("not-a-folder", b"");
    sandbox.run(&["build", "mobilenet-v2", "--dump-graph", &file]).fails(4, &["not-a-folder"]);
}

#[test]
fn built_in_models_are_listed_and_described_without_being_generated() {
    let sandbox = Sandbox::new();
    let (_, listed) = sandbox.json(&["models"]);
    let names: Vec<&str> =
        listed["models"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    for name in ["mobilenet-v2", "sd15/vae-decoder", "sd15/unet", "sd15/text-encoder"] {
        assert!(names.contains(&name), "{name}");
    }
    let (_, json) = sandbox.json(&["inspect", "mobilenet-v2", "--shape", "input=1,3,224,224"]);
    assert_eq!(json["topology"]["bound"], true);
    assert!(json["operators"]["Conv"].as_u64().unwrap() > 40);
    assert_eq!(json["files"][0]["present"], false);
    assert!(!sandbox.path("cache").exists());
    sandbox.run(&["inspect"]).fails(2, &["FILE"]);
}

#[test]
fn outputs_do_not_overwrite_inputs() {
    let sandbox = Sandbox::new();
    let bytes = model("x");
    let file = sandbox.file("m.onnx", &bytes);
    sandbox
        .run(&["inspect", &file, &format!("--json={file}")])
        .fails(4, &["m.onnx", "input of this command"]);
    let other = sandbox.path("work/hard.onnx");
    std::fs::hard_link(&file, &other).unwrap();
    let json = format!("--json={}", other.display());
    sandbox.run(&["inspect", &file, &json]).fails(4, &["hard.onnx", "input of this command"]);
    assert_eq!(std::fs::read(&file).unwrap(), bytes);
}

#[cfg(unix)]
#[test]
fn import_does_not_write_through_links() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("m.onnx", model("x"));
    let kept = sandbox.file("kept", "keep");
    std::os::unix::fs::symlink(&kept, sandbox.path("work/m.binding.json")).unwrap();
    sandbox.run(&["import", &file]).fails(4, &["m.binding.json", "symbolic link"]);
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "keep");
}

#[test]
fn bench_takes_several_models() {
    let sandbox = Sandbox::new();
    let (a, b) = (sandbox.file("a.onnx", model("x")), sandbox.file("b.onnx", model("other")));
    sandbox
        .run(&["bench", &a, &b, "--shape", "z=1,4"])
        .fails(4, &["\"z\"", "not an input of any of the models", "hint: "]);
    sandbox.run(&["bench", &a, &b, "--weights", &a]).fails(4, &["one model", "hint: "]);
    // A shape applies to the model that has the input. Both models are then ready, and only providers are missing.
    let (code, json) = sandbox.json(&["bench", &a, &b, "--shape", "x=2,4", "--shape", "other=3,4"]);
    let message = json["error"]["message"].as_str().unwrap_or_default();
    assert!(code != Some(4) && !message.contains("shape"), "{code:?} {json}");
}

#[test]
fn bench_without_providers_or_with_an_unusable_report() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("m.onnx", model("x"));
    let bench = |more: &[&str]| sandbox.run(&[&["bench", &file, "--shape", "x=1,4"], more].concat());
    bench(&[]).fails(3, &["no provider", "hint: "]);
    bench(&["--continue"]).fails(2, &["--export"]);
    bench(&["--continue", "--export", "html"]).fails(4, &["JSON", "add json to --export"]);
    // A report that is not there yet is begun.
    bench(&["--continue", "--export", "json"]).fails(3, &["no provider"]);
    sandbox.file("sdrun-bench.json", "{}");
    bench(&["--continue", "--export", "json"]).fails(4, &["sdrun-bench.json", "not a report"]);
    let mut report = serde_json::to_value(sdrun::bench::Report::new()).unwrap();
    report["environment"]["cpu"] = "abacus".into();
    sandbox.file("sdrun-bench.json", report.to_string());
    let outcome = bench(&["--continue", "--export", "json"]);
    outcome.fails(4, &["cannot go on with sdrun-bench.json", "instead of abacus", "hint: "]);
}

#[test]
fn missing_and_invalid_models() {
    let sandbox = Sandbox::new();
    for command in ["build", "run", "verify", "bench"] {
        sandbox.run(&[command, "absent.onnx"]).fails(3, &["absent.onnx", "hint: "]);
        sandbox.run(&[command, "sd15/unett"]).fails(3, &["sd15/unett", "did you mean `sd15/unet`?"]);
    }
    sandbox.run(&["inspect", "absent.onnx"]).fails(3, &["absent.onnx", "hint: "]);
    let whole = model("x");
    let good = sandbox.file("good.onnx", &whole);
    sandbox.run(&["inspect", &good]).succeeds();
    for cut in [whole.len() - 1, whole.len() / 2, 9] {
        let path = sandbox.file("cut.onnx", &whole[..cut]);
        for command in ["inspect", "build", "run"] {
            sandbox.run(&[command, &path]).fails(10, &["cut.onnx", "not a valid ONNX model"]);
        }
    }
    let junk = sandbox.file("junk.onnx", b"\xff\xfe\xfd not protobuf");
    sandbox.run(&["inspect", &junk]).fails(10, &["junk.onnx"]);
    let folder = sandbox.path("work");
    let outcome = sandbox.run(&["inspect", folder.to_str().unwrap()]);
    assert!(outcome.code.is_some_and(|c| c != 0 && c != 70), "{:?} {}", outcome.code, outcome.stderr);
}

#[test]
fn wrong_shapes() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("m.onnx", model("x"));
    sandbox.run(&["build", &path, "--shape", "x"]).fails(2, &["sample=1,4,64,64"]);
    sandbox.run(&["build", &path, "--shape", "x=1,0"]).fails(2, &["not a positive integer"]);
    sandbox.run(&["build", &path]).fails(4, &["m.onnx", "x", "hint: ", "--shape"]);
    sandbox.run(&["build", &path, "--shape", "x=1,4", "--shape", "x=2,4"]).fails(4, &["twice"]);
    sandbox.run(&["build", &path, "--shape", "z=1,4"]).fails(4, &["z"]);
    sandbox.run(&["build", &path, "--shape", "x=1,5"]).fails(4, &["x", "5"]);
    sandbox.run(&["inspect", &path, "--shape", "x=1,2,3"]).fails(4, &["x"]);
    sandbox.run(&["bench", "--shape", "x=1"]).fails(4, &["no", "model"]);
    // An unnamed input follows a named one in the dimensions they share.
    let sizes = |shape| ["inspect", "sd15/unet", "--shape", shape];
    assert_eq!(sandbox.json(&sizes("sample=2,4,64,64")).1["topology"]["bound"], true);
    let unet = |shapes: &[&str]| {
        let shapes = shapes.iter().flat_map(|shape| ["--shape", shape]);
        let command: Vec<&str> = ["build", "sd15/unet", "-p", "nope"].into_iter().chain(shapes).collect();
        sandbox.run(&command)
    };
    unet(&["sample=1,4,64,64:2,4,64,96"]).fails(3, &["`nope`"]);
    let text = "encoder_hidden_states=1,77,768:2,77,768";
    unet(&["sample=1,4,64,64:2,4,64,96:1,4,64,96", text]).fails(4, &["2 shapes", "has 3", "one:"]);
    unet(&["sample=1,4,64,64:1,4,64,96", text]).fails(4, &["\"batch\" is 2", "sample"]);
    sandbox.run(&["build", &path, "--shape", "x=1,4:2,5"]).fails(4, &["x", "[2, 5]", "fixed to 4"]);
    sandbox.run(&["build", &path, "--shape", "x=1,4:2"]).fails(4, &["x", "[2]", "2 dimensions"]);
    sandbox.run(&["run", &path, "--shape", "x=1,4:2,4"]).fails(4, &["several shapes", "`sdrun build`"]);
    // The model is fine here, so the error is the missing provider.
    sandbox.run(&["build", &path, "--shape", "x=1,4", "-p", "nope"]).fails(3, &["`nope`"]);
    sandbox.run(&["build", &path, "--shape", "x=1,4:2,4", "-p", "nope"]).fails(3, &["`nope`"]);
    sandbox.run(&["build", &path, "--shape", "x=1,4"]).fails(5, &["no provider works here", "sdrun doctor"]);
}

#[test]
fn wrong_inputs() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("m.onnx", model("x"));
    let run = |more: &[&str]| sandbox.run(&[&["run", &path], more].concat());
    let good = format!("x={}", sandbox.file("good.npy", npy("(2, 4)", &[1.0; 8])));
    run(&[]).fails(4, &["x f32 [n, 4]", "--seed", "--shape NAME=SIZES"]);
    run(&["--input", "good.npy"]).fails(2, &["NAME=FILE"]);
    run(&["--input", "x=data.bin"]).fails(2, &[".npy"]);
    run(&["--input", "x=absent.npy"]).fails(3, &["absent.npy"]);
    run(&["--input", &good, "--input", &good]).fails(4, &["twice"]);
    run(&["--input", &good.replace("x=", "z=")]).fails(4, &["\"z\"", "inputs: x"]);
    let cut = sandbox.file("cut.npy", &npy("(2, 4)", &[1.0; 8])[..90]);
    run(&["--input", &format!("x={cut}")]).fails(10, &["cut.npy", "truncated"]);
    let wide = sandbox.file("wide.npy", npy("(1, 5)", &[1.0; 5]));
    run(&["--input", &format!("x={wide}")]).fails(4, &["x", "5"]);
    run(&["--input", &good, "--shape", "x=3,4"]).fails(4, &["f32 [2, 4]", "f32 [3, 4]"]);
    let flat = sandbox.file("flat.npy", npy("(4,)", &[1.0; 4]));
    run(&["--input", &format!("x={flat}"), "--shape", "x=1,4"]).fails(4, &["f32 [4]", "f32 [1, 4]"]);
    let mut integers = npy("(1, 4)", &[1.0; 4]);
    let kind = integers.windows(2).position(|w| w == b"f4").unwrap();
    integers[kind] = b'i';
    let integers = sandbox.file("integers.npy", integers);
    run(&["--input", &format!("x={integers}")]).fails(4, &["i32 [1, 4]", "f32 [?, 4]"]);
    let text = sandbox.file("text.npz", b"not a zip file");
    run(&["--input", &text]).fails(10, &["text.npz"]);
    let picture = sandbox.file("p.png", b"\x89PNG\r\n\x1a\n");
    run(&["--input", &format!("x={picture}")]).fails(4, &["black and white", "--image-range"]);
    run(&["--input", &format!("x={picture}"), "--image-range", "-1..1"]).fails(10, &["p.png"]);
    run(&["--image-range", "1..0"]).fails(2, &["0..1"]);
    // Correct inputs get as far as the provider, and so do shapes taken from the file.
    run(&["--input", &good, "-p", "nope"]).fails(3, &["`nope`"]);
}

#[test]
fn outputs_are_checked_before_the_work() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("m.onnx", model("x"));
    let run = |more: &[&str]| {
        sandbox.run(&[&["run", &path, "--seed", "1", "--shape", "x=1,4", "-p", "nope"], more].concat())
    };
    run(&[]).fails(3, &["`nope`"]);
    run(&["--output", "z=z.npy"]).fails(4, &["\"z\"", "outputs: y"]);
    run(&["--output", "y=absent/y.npy"]).fails(3, &["absent/y.npy"]);
    run(&["--output", "y=y.npz"]).fails(4, &[".npz"]);
    run(&["--output", "y=y.png"]).fails(4, &["--image-range"]);
    run(&["-o", "y.npy"]).fails(4, &[".npz"]);
    run(&["-o", "."]).fails(4, &["."]);
    sandbox
        .run(&["build", &path, "--shape", "x=1,4", "-p", "nope", "-o", "absent/e.sdengine"])
        .fails(3, &["absent"]);
    let left: Vec<_> =
        std::fs::read_dir(sandbox.path("work")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["m.onnx"]);
}

#[test]
fn verify_needs_a_reference() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("m.onnx", model("x"));
    let args = ["verify", &path, "--seed", "1", "--shape", "x=1,4"];
    sandbox.run(&args).fails(5, &["no reference provider", "--reference"]);
    sandbox.run(&[&args[..], &["--reference-file", "absent.npz"]].concat()).fails(3, &["absent.npz"]);
    sandbox.run(&[&args[..], &["--reference", "nope"]].concat()).fails(3, &["`nope`"]);
    sandbox.run(&["bench", "-p", "nope"]).fails(3, &["`nope`"]);
    let unclear = ["bench", "--option", "weights=inputs"];
    sandbox.run(&unclear).fails(4, &["which provider", "--option PROVIDER:weights=inputs"]);
    assert!(!sandbox.path("cache").exists(), "a model was generated in vain");
}

fn engine(path: &Path, weights: Vec<WeightSpec>) {
    let tensor =
        |name: &str| TensorSpec { name: name.into(), dtype: DType::F32, shape: vec![Some(1), Some(4)] };
    let manifest = EngineManifest {
        key: String::new(),
        provider: "maker".into(),
        build_id: "b".into(),
        runtime: ("runtime".into(), "1.0".into()),
        device_class: "cpu".into(),
        topology: "abc".into(),
        model: "mobilenet-v2".into(),
        spec: BuildSpec { bake: weights.is_empty(), ..BuildSpec::new("cpu", Precision::Fp32) },
        binding: Default::default(),
        baked: weights.is_empty().then(|| "hash".into()),
        info: EngineInfo {
            inputs: vec![tensor("x")],
            outputs: vec![tensor("y")],
            weights,
            compatibility: "c".into(),
        },
    };
    EngineFile::write(path, &manifest, b"payload").expect("the engine file can be written");
}

#[test]
fn engines_are_described_and_report_what_they_need() {
    let sandbox = Sandbox::new();
    let stripped = sandbox.path("work/stripped.sdengine");
    engine(&stripped, vec![WeightSpec { name: "w".into(), dtype: DType::F32, shape: vec![4] }]);
    let path = stripped.to_str().unwrap();
    let text = sandbox.run(&["inspect", path]).succeeds().stdout.clone();
    for words in ["maker", "mobilenet-v2", "1 tensors, 16 B", "x f32 [1, 4]"] {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
    assert_eq!(sandbox.json(&["inspect", path]).1["provider"], "maker");
    sandbox.run(&["inspect", path, "--passes"]).fails(4, &["engine"]);
    let input = format!("x={}", sandbox.file("x.npy", npy("(1, 4)", &[1.0; 4])));
    sandbox
        .run(&["run", path, "--input", &input])
        .fails(3, &["holds no weights", "--weights", "mobilenet-v2"]);
    sandbox.run(&["run", path, "-p", "other"]).fails(4, &["maker", "other"]);
    sandbox.run(&["run", path, "--shape", "x=1,4"]).fails(4, &["--shape"]);
    for asked in [&["--precision", "bf16"][..], &["--bake"], &["--vram-budget", "1GB"], &["--option", "a=b"]]
    {
        let command = [&["run", path][..], asked].concat();
        sandbox.run(&command).fails(4, &[asked[0], "`sdrun build`"]);
    }
    // What it was built with may be said again.
    sandbox.run(&["run", path, "--precision", "fp32"]).fails(3, &["holds no weights"]);

    let baked = sandbox.path("work/baked.sdengine");
    engine(&baked, Vec::new());
    let path = baked.to_str().unwrap();
    sandbox.run(&["run", path, "--input", &input]).fails(3, &["no provider `maker`"]);
    sandbox.run(&["run", path]).fails(4, &["x f32 [1, 4]"]);
    sandbox.run(&["run", path, "--seed", "1"]).fails(4, &["--weights MODEL"]);
    let model = sandbox.file("m.onnx", model("x"));
    sandbox.run(&["run", path, "--weights", &model]).fails(4, &["baked in"]);

    let bytes = std::fs::read(&baked).unwrap();
    for (name, bytes) in [("cut", &bytes[..bytes.len() - 1]), ("short", &bytes[..20]), ("empty", b"")] {
        let path = sandbox.file(&format!("{name}.sdengine"), bytes);
        sandbox.run(&["inspect", &path]).fails(10, &[name]);
        sandbox.run(&["run", &path]).fails(10, &[name]);
    }
}

#[test]
fn files_of_weights_are_described() {
    let sandbox = Sandbox::new();
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[2,2],"data_offsets":[8,16]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 16]);
    let path = sandbox.file("w.safetensors", &bytes);
    let (_, json) = sandbox.json(&["inspect", &path, "--weights"]);
    assert_eq!(
        (&json["weights"]["tensors"], &json["weights"]["by_dtype"]["f16"]["bytes"]),
        (&2.into(), &8.into())
    );
    assert_eq!(json["weights"]["list"][1]["shape"], serde_json::json!([2, 2]));
    let cut = sandbox.file("cut.safetensors", &bytes[..bytes.len() - 1]);
    sandbox.run(&["inspect", &cut]).fails(10, &["cut.safetensors"]);
    let model = sandbox.file("m.onnx", model("x"));
    let args = ["run", &model, "--seed", "1", "--shape", "x=1,4", "--weights"];
    sandbox.run(&[&args[..], &[&cut]].concat()).fails(10, &["cut.safetensors"]);
    sandbox.run(&[&args[..], &["absent.safetensors"]].concat()).fails(3, &["absent.safetensors"]);
}

#[test]
fn names_cannot_control_the_terminal() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("m.onnx", model("x\u{1b}[2J\u{9b}1m"));
    let shown = sandbox.run(&["inspect", &path]).succeeds().stdout.clone();
    assert!(shown.contains("x?[2J?1m f32"), "{shown}");
    assert!(!shown.contains('\u{1b}') && !shown.contains('\u{9b}'));
    let failed = sandbox.run(&["run", &path]);
    assert!(failed.stderr.contains("x?[2J?1m") && !failed.stderr.contains('\u{1b}'), "{}", failed.stderr);
}
