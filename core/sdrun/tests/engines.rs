//! Engines through the library: cache entries, waiting for builds of other processes, and accepted outputs.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "worker/support.rs"]
mod support;

use prost::Message;
use sdrun::{
    BuildOptions, Cache, CachePolicy, Discovery, Engine, HostTensor, Isolation, Model, Observer, Paths,
    Provider, Registry, Tensors, TracingHost,
    abi::{DType, ErrorCode, NoHost},
    graph::proto,
    weights::Binding,
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// A user with the mock provider.
struct Lab {
    dir: tempfile::TempDir,
    registry: Registry,
}

impl Lab {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("plugin");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        let library = folder.join("libmock.so");
        fs::copy(support::mock(), &library).unwrap();
        fs::set_permissions(&library, PermissionsExt::from_mode(0o755)).unwrap();
        let identity = support::uninitialised_plugin().identity().clone();
        let manifest = serde_json::json!({
            "file_format_version": "1.0.0",
            "provider": {
                "id": identity.id, "summary": "", "vendor": "sdrun", "version": identity.version,
                "build_id": identity.build_id,
                "library": { "path": "libmock.so", "sha256": "", "target": "", "abi_major": 1 },
            },
        });
        let manifest_file = folder.join(format!("sdrun-provider-{}.json", identity.id));
        fs::write(&manifest_file, manifest.to_string()).unwrap();
        let paths = Paths { data: dir.path().join("data"), cache: dir.path().join("cache") };
        let discovery =
            Discovery { provider_paths: vec![manifest_file], paths: Some(paths), ..Discovery::default() };
        Lab { dir, registry: Registry::discover_with(&discovery).unwrap() }
    }

    fn provider(&self) -> Provider {
        self.registry.open("mock", &Isolation::default()).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a model.
    fn model(&self, name: &str, model: &proto::ModelProto) -> Model {
        fs::write(self.path(name), model.encode_to_vec()).unwrap();
        Model::open(self.path(name)).unwrap()
    }

    fn cache(&self) -> Cache {
        Cache::at(self.path("cache/engines"))
    }
}

fn options(provider: &Provider) -> BuildOptions {
    BuildOptions::new(provider.device(None).unwrap())
}

fn build(provider: &Provider, model: &Model) -> Engine {
    provider.build(model, &options(provider), &NoHost).unwrap()
}

fn value(name: &str) -> proto::ValueInfoProto {
    let dimension = proto::Dimension { dim_value: Some(2), ..Default::default() };
    let tensor = proto::TensorTypeProto {
        elem_type: Some(DType::F32 as i32),
        shape: Some(proto::TensorShapeProto { dim: vec![dimension] }),
    };
    proto::ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(proto::TypeProto { tensor_type: Some(tensor), ..Default::default() }),
        ..Default::default()
    }
}

fn node(name: &str, op: &str, inputs: [&str; 2], output: &str) -> proto::NodeProto {
    proto::NodeProto {
        name: Some(name.into()),
        op_type: Some(op.into()),
        input: inputs.map(String::from).to_vec(),
        output: vec![output.into()],
        ..Default::default()
    }
}

fn weight(name: &str, values: [f32; 2]) -> proto::TensorProto {
    proto::TensorProto {
        name: Some(name.into()),
        data_type: Some(DType::F32 as i32),
        dims: vec![2],
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into()),
        ..Default::default()
    }
}

/// `y = (x + a) + b`.
fn sum() -> proto::ModelProto {
    proto::ModelProto {
        ir_version: Some(8),
        opset_import: vec![proto::OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(proto::GraphProto {
            name: Some("sum".into()),
            node: vec![node("/one", "Add", ["x", "a"], "t"), node("/two", "Add", ["t", "b"], "y")],
            initializer: vec![weight("a", [1.0, 2.0]), weight("b", [3.0, 4.0])],
            input: vec![value("x")],
            output: vec![value("y")],
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn changed(change: impl FnOnce(&mut proto::GraphProto)) -> proto::ModelProto {
    let mut model = sum();
    change(model.graph.as_mut().unwrap());
    model
}

fn input(values: [f32; 2]) -> Tensors {
    Tensors::from([("x".into(), HostTensor::from_f32(vec![2], &values).unwrap())])
}

// ---- the cache ----

/// The key ignores names of files and nodes, and the binding table, so these must not come from the entry.
#[test]
fn a_cached_engine_has_the_name_the_binding_and_the_device_options_of_the_request() {
    let lab = Lab::new();
    let provider = lab.provider();
    let model = lab.model("first.onnx", &sum());
    let first = build(&provider, &model);
    assert!(!first.was_loaded());

    let table = r#"{"component":"vae","tensors":[]}"#;
    let binding = Binding::parse(table.as_bytes()).unwrap();
    assert_ne!(&binding, &first.manifest().binding);
    fs::write(Model::binding_file(model.path()), table).unwrap();
    let again = build(&provider, &model);
    assert!(again.was_loaded());
    assert_eq!(again.manifest().binding, binding);
    let saved = lab.path("first.sdengine");
    again.save(&saved).unwrap();
    assert_eq!(sdrun::EngineFile::open(&saved).unwrap().manifest.binding, binding);

    let copy = lab.model("second.onnx", &sum());
    let chosen = BuildOptions { threads: Some(1), ..options(&provider) };
    let third = provider.build(&copy, &chosen, &NoHost).unwrap();
    assert!(third.was_loaded());
    assert_eq!(third.manifest().model, copy.name());
    assert_eq!(third.manifest().spec.threads, Some(1));
    assert_eq!(third.manifest().binding, copy.binding().unwrap());
    assert_eq!(third.manifest().key, first.manifest().key);
}

#[test]
fn keys_follow_the_graph_and_not_its_weights_or_names() {
    let lab = Lab::new();
    let provider = lab.provider();
    let key = |name: &str, model: &proto::ModelProto| {
        build(&provider, &lab.model(name, model)).manifest().key.clone()
    };
    let base = key("base.onnx", &sum());
    let same = [
        changed(|g| g.initializer[0] = weight("a", [-1.0, 0.5])),
        changed(|g| g.initializer.reverse()),
        changed(|g| {
            g.node[0].output[0] = "renamed".into();
            g.node[1].input[0] = "renamed".into();
        }),
        changed(|g| g.node[0].name = Some("/other".into())),
        changed(|g| g.name = Some("other".into())),
    ];
    for (i, model) in same.iter().enumerate() {
        assert_eq!(key(&format!("same{i}.onnx"), model), base, "{i}");
    }
    let other = [
        changed(|g| g.node[0].op_type = Some("Sub".into())),
        changed(|g| g.node[0].input.reverse()),
        changed(|g| g.node[1].input[1] = "a".into()),
        changed(|g| {
            g.initializer[1].name = Some("c".into());
            g.node[1].input[1] = "c".into();
        }),
        changed(|g| {
            g.output[0].name = Some("z".into());
            g.node[1].output[0] = "z".into();
        }),
    ];
    let mut keys: Vec<String> =
        other.iter().enumerate().map(|(i, model)| key(&format!("other{i}.onnx"), model)).collect();
    keys.push(base.clone());
    let model = lab.model("baked.onnx", &sum());
    let with = |change: fn(&mut BuildOptions), model: &Model| {
        let mut options = options(&provider);
        change(&mut options);
        provider.build(model, &options, &NoHost).unwrap().manifest().key.clone()
    };
    keys.push(with(|o| o.bake = true, &model));
    keys.push(with(|o| o.bake = true, &lab.model("baked2.onnx", &same[0])));
    keys.push(with(|o| drop(o.options.insert("scale".into(), "2".into())), &model));
    keys.push(with(|o| drop(o.options.insert("scale".into(), "3".into())), &model));
    let count = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), count);
    assert_eq!(with(|o| o.threads = Some(2), &model), base);
}

/// Two undamaged entries with swapped files: one would run the other's graph.
#[test]
fn exchanged_entries_are_built_again() {
    let lab = Lab::new();
    let provider = lab.provider();
    let engine = |scale: &str| {
        let mut options = options(&provider);
        options.options.insert("scale".into(), scale.into());
        provider.build(&lab.model("m.onnx", &sum()), &options, &NoHost).unwrap()
    };
    let keys = ["2", "-2"].map(|scale| engine(scale).manifest().key.clone());
    let [a, b] = keys.map(|key| lab.path("cache/engines").join(format!("{key}.sdengine")));
    let swap = lab.path("swap");
    for (from, to) in [(&a, &swap), (&b, &a), (&swap, &b)] {
        fs::rename(from, to).unwrap();
    }
    assert!(lab.cache().list().unwrap().iter().all(|entry| entry.content.is_err()));
    let engine = engine("2");
    assert!(!engine.was_loaded());
    assert!(a.with_extension("corrupt").exists());
    let mut session = engine.session(&lab.model("m.onnx", &sum()).weights(), &NoHost).unwrap();
    // 2x + Σ weights
    assert_eq!(session.run(&input([1.0, 2.0]), &NoHost).unwrap()["y"].to_f64().unwrap(), [12.0, 14.0]);
}

/// Another process may hold the lock as long as it likes.
fn hold_lock(lab: &Lab, key: &str) -> fs::File {
    let file = fs::File::create(lab.path("cache/engines").join(format!("{key}.lock"))).unwrap();
    file.lock().unwrap();
    file
}

#[test]
fn a_hit_does_not_wait_for_a_lock_and_a_build_can_be_cancelled_while_it_does() {
    let lab = Lab::new();
    let provider = lab.provider();
    let model = lab.model("m.onnx", &sum());
    let key = build(&provider, &model).manifest().key.clone();
    let _held = hold_lock(&lab, &key);
    assert!(build(&provider, &model).was_loaded());
    let only = BuildOptions { cache: CachePolicy::Only, ..options(&provider) };
    assert!(provider.build(&model, &only, &NoHost).unwrap().was_loaded());

    let cancel = Arc::new(AtomicBool::new(false));
    let waited = AtomicBool::new(false);
    let host = Observer::new(
        |phase: &str, _, _| {
            waited.store(phase.contains("another process"), Relaxed);
            cancel.store(true, Relaxed);
        },
        cancel.clone(),
    );
    let rebuild = BuildOptions { cache: CachePolicy::Rebuild, ..options(&provider) };
    let error = provider.build(&model, &rebuild, &host).err().unwrap();
    assert_eq!((error.code(), waited.load(Relaxed)), (ErrorCode::Cancelled, true));
}

/// Uses the engine that the other process has built meanwhile.
#[test]
fn after_waiting_the_cache_is_checked_again() {
    let lab = Lab::new();
    let provider = lab.provider();
    let model = lab.model("m.onnx", &sum());
    let key = build(&provider, &model).manifest().key.clone();
    let entry = lab.path("cache/engines").join(format!("{key}.sdengine"));
    let built = lab.path("built");
    fs::rename(&entry, &built).unwrap();
    let held = std::sync::Mutex::new(Some(hold_lock(&lab, &key)));
    let host = Observer::new(
        |phase: &str, _, _| {
            if phase.contains("another process") && held.lock().unwrap().is_some() {
                fs::rename(&built, &entry).unwrap();
                drop(held.lock().unwrap().take());
            }
        },
        Arc::default(),
    );
    assert!(provider.build(&model, &options(&provider), &host).unwrap().was_loaded());
}

// ---- files beside the model ----

fn binding_error(place: impl Fn(&Path)) -> sdrun::Error {
    let lab = Lab::new();
    let model = lab.model("m.onnx", &sum());
    place(&Model::binding_file(model.path()));
    model.binding().unwrap_err()
}

#[test]
fn a_binding_file_is_a_small_regular_file() {
    let link = binding_error(|table| std::os::unix::fs::symlink("/dev/zero", table).unwrap());
    assert_eq!(link.code(), ErrorCode::InvalidArgument);
    let pipe = binding_error(|table| {
        assert!(std::process::Command::new("mkfifo").arg(table).status().unwrap().success());
    });
    assert!(pipe.to_string().contains("not a regular file"), "{pipe}");
    let huge = binding_error(|table| fs::File::create(table).unwrap().set_len(20 << 30).unwrap());
    assert_eq!(huge.code(), ErrorCode::DataLoss);
}

// ---- one process, one set of options ----

#[test]
fn a_second_open_with_other_options_is_an_error() {
    let lab = Lab::new();
    let with = |behaviour: &str| {
        let options = [("behaviour".to_string(), behaviour.to_string())].into();
        lab.registry.open("mock", &Isolation { options, ..Isolation::default() })
    };
    with("good").unwrap();
    with("good").unwrap();
    let error = with("no_output").unwrap_err();
    assert_eq!(error.code(), ErrorCode::FailedPrecondition);
    assert!(error.to_string().contains("no_output"), "{error}");
}

#[test]
fn a_read_only_cache_blocks_nothing() {
    let lab = Lab::new();
    // A file in place of the folder: nobody can create anything there.
    fs::write(lab.path("cache"), b"").unwrap();
    let provider = lab.provider();
    let engine = provider.build(&lab.model("m.onnx", &sum()), &options(&provider), &TracingHost).unwrap();
    assert!(!engine.was_loaded());
}
