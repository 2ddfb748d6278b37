//! Choosing between providers: the order, who is left out and why, and what happens when the first one fails.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "../../../tests/mock/c_plugins.rs"]
mod c_plugins;
mod lab;
#[path = "worker/support.rs"]
mod support;

use lab::{Lab, input, node, sum};
use sdrun::{
    BuildOptions, Choice, Error, LoadOptions, Measurements, Model, Why, Wishes,
    abi::{Device, DeviceKind, ErrorCode, Flow, Hint, Host, LogLevel, NoHost, Precision},
};
use serde_json::{Value, json};
use std::{
    fs,
    path::PathBuf,
    sync::{LazyLock, Mutex},
};

/// The provider in C: Add, MatMul, Relu and Identity.
static C: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(c_plugins::installed);

/// The mock with priority 5, or what `mock` says, and the provider in C with priority -100.
fn lab(mock: Value, order: &[&str]) -> Lab {
    Lab::with(mock, std::slice::from_ref(&C.1), order)
}

fn fp32(device: Device) -> BuildOptions {
    BuildOptions::new(device)
}

fn ids(choice: &mut Choice<'_>) -> Vec<String> {
    choice.by_ref().map(|candidate| candidate.provider.id().to_string()).collect()
}

fn order(lab: &Lab, model: &Model) -> Vec<String> {
    ids(&mut lab.registry.choose(model, &Wishes::new(), &fp32, &NoHost))
}

#[test]
fn priorities_by_kind_of_device_come_before_the_general_one_and_wishes_before_both() {
    let model = |lab: &Lab| lab.model("m.onnx", &sum());
    let plain = lab(json!({}), &[]);
    assert_eq!(order(&plain, &model(&plain)), ["mock", "c"]);
    let low = lab(json!({ "priority": 7, "priorities": { "cpu": -200, "gpu": 90 } }), &[]);
    assert_eq!(order(&low, &model(&low)), ["c", "mock"]);
    let wished = lab(json!({}), &["c"]);
    assert_eq!(order(&wished, &model(&wished)), ["c", "mock"]);

    let model = model(&wished);
    let mut wishes = Wishes::new();
    wishes.order = vec!["mock".into()];
    let mut choice = wished.registry.choose(&model, &wishes, &fp32, &NoHost);
    let first = choice.next().unwrap();
    assert_eq!((first.provider.id(), &first.why), ("mock", &Why::Preferred { place: 0 }));
    assert_eq!((first.memory.host_weights, first.session_compiles), (Some(16), false));
    assert_eq!(choice.next().unwrap().why, Why::Preferred { place: 1 });
    assert!(choice.next().is_none() && choice.rejected().is_empty());
    let mut choice = low.registry.choose(&model, &Wishes::new(), &fp32, &NoHost);
    let last = choice.by_ref().last().unwrap();
    assert_eq!(last.why, Why::Priority { priority: -200, device: DeviceKind::Cpu });
}

#[test]
fn what_was_measured_here_comes_before_priorities_and_only_for_this_graph_and_these_versions() {
    let lab = lab(json!({}), &[]);
    let model = lab.model("m.onnx", &sum());
    let topology = model.bound(&Default::default()).unwrap().topology_hash();
    let entry = |provider: &str, runtime: Value, device: &str, ms: f64| {
        let build = if provider == "mock" { "mock-build" } else { "test" };
        json!({ "topology": topology, "provider": provider, "build_id": build, "runtime": runtime, "device": device,
                "precision": "fp32", "median_ms": ms })
    };
    let write = |entries: Value| {
        fs::create_dir_all(lab.path("data")).unwrap();
        let document = json!({ "format_version": 1, "measurements": entries });
        fs::write(Measurements::file(lab.registry.paths()), document.to_string()).unwrap();
    };
    let runtime = |id: &str| {
        let provider = lab.registry.open(id, &Default::default()).unwrap();
        json!([provider.runtime().name, provider.runtime().version])
    };
    let mock = |ms| entry("mock", runtime("mock"), "mock0", ms);
    let c = |ms| entry("c", runtime("c"), "cpu", ms);
    write(json!([mock(2.0), c(1.0)]));
    assert_eq!(order(&lab, &model), ["c", "mock"]);
    let mut choice = lab.registry.choose(&model, &Wishes::new(), &fp32, &NoHost);
    assert_eq!(choice.next().unwrap().why, Why::Measured { median_ms: 1.0, same_sizes: true });
    write(json!([mock(2.0), c(1.0), c(3.0)]));
    assert_eq!(order(&lab, &model), ["mock", "c"], "the latest counts");
    write(json!([c(1.0)]));
    assert_eq!(order(&lab, &model), ["c", "mock"]);
    for (field, value) in [
        ("topology", json!("another")),
        ("build_id", json!("another")),
        ("runtime", json!(["r", "another"])),
        ("device", json!("gpu")),
        ("precision", json!("bf16")),
    ] {
        let mut other = c(1.0);
        other[field] = value;
        write(json!([other]));
        assert_eq!(order(&lab, &model), ["mock", "c"], "{field}");
    }
}

#[test]
fn who_cannot_is_left_out_with_the_reason() {
    // A third provider whose runtime no machine has.
    let dir = tempfile::tempdir().unwrap();
    let away = dir.path().join("sdrun-provider-away.json");
    let runtime = json!({ "name": "thing", "version": "1", "env": "SDRUN_NO_SUCH_THING",
        "library_names": ["libsdrun_no_such_thing.so"], "by_hand": "ask its vendor" });
    let manifest = json!({ "file_format_version": "1.0.0", "provider": { "id": "away", "summary": "", "vendor": "v",
        "version": "1", "build_id": "1", "priority": 900, "runtime": runtime,
        "library": { "path": "lib.so", "sha256": "", "target": "", "abi_major": 1 } } });
    fs::write(&away, manifest.to_string()).unwrap();
    fs::write(dir.path().join("lib.so"), b"").unwrap();
    let lab = Lab::with(json!({}), &[C.1.clone(), away], &[]);

    // The provider in C does not know Sub, and says so without building.
    let mut model = sum();
    model.graph.as_mut().unwrap().node[0] = node("/one", "Sub", ["x", "a"], "t");
    let model = lab.model("m.onnx", &model);
    let mut choice = lab.registry.choose(&model, &Wishes::new(), &fp32, &NoHost);
    assert_eq!(ids(&mut choice), ["mock"]);
    let rejected: Vec<_> =
        choice.rejected().iter().map(|r| (r.provider.as_str(), r.device.as_deref(), r.error.code)).collect();
    assert_eq!(
        rejected,
        [("away", None, ErrorCode::FailedPrecondition), ("c", Some("cpu"), ErrorCode::Unimplemented)]
    );
    assert!(choice.rejected()[0].error.hint.as_ref().unwrap().to_string().contains("ask its vendor"));
    assert!(choice.rejected()[1].error.message.contains("Sub"), "{}", choice.rejected()[1].error);

    // Neither computes in fp16.
    let fp16 = |device| BuildOptions::new(device).precision(Precision::Fp16);
    let mut choice = lab.registry.choose(&model, &Wishes::new(), &fp16, &NoHost);
    let error = choice.build(None).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Unimplemented);
    assert_eq!(error.hint(), Some(Hint::UsePrecision(vec![Precision::Fp32])));
    for words in ["no provider works here", "mock on mock0", "c on cpu", "away: "] {
        assert!(error.to_string().contains(words), "{error}");
    }

    // No provider has this device.
    let mut wishes = Wishes::new();
    wishes.device = Some("quantum".into());
    let mut choice = lab.registry.choose(&model, &wishes, &fp32, &NoHost);
    assert_eq!(choice.next().map(|c| c.provider.id().to_string()), None);
    assert_eq!(choice.rejected().len(), 3);
}

/// A weight of 4 TB is in no main memory. Elsewhere the system does not tell how much there is.
#[cfg(target_os = "linux")]
#[test]
fn what_does_not_fit_into_memory_is_left_out_before_anything_is_read() {
    let lab = lab(json!({}), &[]);
    let mut model = sum();
    let graph = model.graph.as_mut().unwrap();
    let size = 1i64 << 40;
    for weight in &mut graph.initializer {
        weight.dims = vec![size];
        weight.raw_data = None;
        weight.data_location = Some(1);
        let entry = |key: &str, value: &str| sdrun::graph::proto::StringStringEntryProto {
            key: Some(key.into()),
            value: Some(value.into()),
        };
        weight.external_data = vec![entry("location", "absent.bin")];
    }
    for value in graph.input.iter_mut().chain(&mut graph.output) {
        let tensor = value.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
        tensor.shape.as_mut().unwrap().dim[0].dim_value = Some(size);
    }
    lab.write("m.onnx", &model);
    let options =
        sdrun::graph::OpenOptions { weights: sdrun::graph::WeightsPolicy::MayBeAbsent, ..Default::default() };
    let model = Model::open_with(lab.path("m.onnx"), &options).unwrap();
    let error = lab.registry.choose(&model, &Wishes::new(), &fp32, &NoHost).build(None).err().unwrap();
    assert_eq!(error.code(), ErrorCode::ResourceExhausted, "{error}");
    assert!(
        matches!(error.hint(), Some(Hint::FreeMemory { bytes: Some(n) }) if n > 1 << 40),
        "{:?}",
        error.hint()
    );
}

/// Keeps what is logged.
#[derive(Default)]
struct Ears(Mutex<Vec<(LogLevel, String)>>);

impl Host for Ears {
    fn log(&self, level: LogLevel, _: &str, message: &str) {
        self.0.lock().unwrap().push((level, message.into()));
    }
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Continue
    }
    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn the_next_one_is_tried_aloud_where_the_first_is_absent_or_does_not_support_the_model() {
    let lab = lab(json!({}), &["c"]);
    let model = lab.model("m.onnx", &sum());
    let ears = Ears::default();
    let failing = |code: ErrorCode| {
        let mut choice = lab.registry.choose(&model, &Wishes::new(), &fp32, &ears);
        let outcome = choice.try_each(|candidate| match candidate.provider.id() {
            "c" => Err(Error::Provider {
                provider: "c".into(),
                error: sdrun::abi::Error::new(code, "changed its mind"),
            }),
            _ => candidate.provider.build(&model, &candidate.options, &NoHost),
        });
        (outcome.map(|engine| engine.provider().id().to_string()), choice.rejected().len())
    };
    let (outcome, rejected) = failing(ErrorCode::Unimplemented);
    assert_eq!((outcome.unwrap().as_str(), rejected), ("mock", 1));
    let said = ears.0.lock().unwrap().clone();
    let warned = |(level, text): &(LogLevel, String)| {
        *level == LogLevel::Warn && text.contains("c on ") && text.contains("changed its mind")
    };
    assert!(said.iter().any(warned), "{said:?}");
    // What the provider itself logs while it starts reaches the same host.
    let (outcome, _) = failing(ErrorCode::ResourceExhausted);
    assert_eq!(outcome.unwrap_err().code(), ErrorCode::ResourceExhausted);
}

#[test]
fn a_chosen_engine_runs_and_is_loaded_again_from_its_file() {
    let lab = lab(json!({}), &["c"]);
    let model = lab.model("m.onnx", &sum());
    let engine = lab.registry.choose(&model, &Wishes::new(), &fp32, &NoHost).build(None).unwrap();
    assert_eq!((engine.provider().id(), engine.device().id.as_str()), ("c", "cpu"));
    let file = lab.path("m.sdengine");
    engine.save(&file).unwrap();

    let loaded = lab.registry.load_engine(&file, &LoadOptions::new(), &NoHost).unwrap();
    assert_eq!((loaded.provider().id(), loaded.device().id.as_str()), ("c", "cpu"));
    assert!(loaded.was_loaded());
    let mut session = loaded.session(&model.weights(), &NoHost).unwrap();
    assert_eq!(session.run(&input([1.0, 2.0]), &NoHost).unwrap()["y"].to_f64().unwrap(), [5.0, 8.0]);

    let mut elsewhere = LoadOptions::new();
    elsewhere.device = Some("nowhere".into());
    let error = lab.registry.load_engine(&file, &elsewhere, &NoHost).err().unwrap();
    assert_eq!(error.code(), ErrorCode::NotFound);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = lab.registry.load_engine(&file, &LoadOptions::new(), &NoHost).err().unwrap();
    assert_eq!(error.code(), ErrorCode::DataLoss);
}
