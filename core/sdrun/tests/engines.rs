//! Engines through the library: cache entries, waiting for builds of other processes, and accepted outputs.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

mod lab;
#[path = "worker/support.rs"]
mod support;

use lab::{Lab, input, sum, weight};
use sdrun::{
    BuildOptions, CachePolicy, Engine, Isolation, Model, Observer, Provider, Registry, Session, TracingHost,
    abi::{ErrorCode, NoHost},
    graph::proto,
    weights::Binding,
};
use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// Calls block, so hosts make them in threads of their own.
#[test]
fn calls_can_be_made_in_any_thread() {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<Registry>();
    shared::<Provider>();
    shared::<Engine>();
    moved::<Session>();
    moved::<Model>();
}

fn options(provider: &Provider) -> BuildOptions {
    BuildOptions::new(provider.device(None).unwrap())
}

fn build(provider: &Provider, model: &Model) -> Engine {
    provider.build(model, &options(provider), &NoHost).unwrap()
}

fn changed(change: impl FnOnce(&mut proto::GraphProto)) -> proto::ModelProto {
    let mut model = sum();
    change(model.graph.as_mut().unwrap());
    model
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
    let chosen = options(&provider).threads(Some(1));
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

/// After a driver update, cached engines are rebuilt, saved engines for the old driver are refused, and open sessions keep working.
#[test]
fn engines_for_another_driver_are_built_again() {
    let lab = Lab::new();
    let (driver, saved) = (lab.path("driver"), lab.path("saved.sdengine"));
    fs::write(&driver, "535.1").unwrap();
    let options = [("driver".to_string(), driver.display().to_string())].into();
    let provider = lab.registry.open("mock", &Isolation { options, ..Isolation::default() }).unwrap();
    let model = lab.model("m.onnx", &sum());
    let run =
        |session: &mut Session| session.run(&input([1.0, 2.0]), &NoHost).unwrap()["y"].to_f64().unwrap();
    let first = build(&provider, &model);
    first.save(&saved).unwrap();
    let mut session = first.session(&model.weights(), &NoHost).unwrap();
    let values = run(&mut session);
    assert!(build(&provider, &model).was_loaded());

    for version in ["580.65", "535.1", "a driver\n\u{1b}[2J of 0 bytes \0"] {
        fs::write(&driver, version).unwrap();
        assert_eq!(run(&mut session), values);
        let engine = build(&provider, &model);
        assert!(!engine.was_loaded(), "the cached engine is for another driver than {version}");
        assert_eq!(run(&mut engine.session(&model.weights(), &NoHost).unwrap()), values);
        assert!(build(&provider, &model).was_loaded());
        let loaded = provider.load(&saved, &provider.device(None).unwrap(), None, &NoHost);
        match loaded {
            Ok(_) => assert_eq!(version, "535.1"),
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::FailedPrecondition);
                assert!(error.to_string().contains("driver 535.1"), "{error}");
            }
        }
    }
    assert_eq!(lab.cache().list().unwrap().len(), 1, "the entry is replaced");
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
    let only = options(&provider).cache(CachePolicy::Only);
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
    let rebuild = options(&provider).cache(CachePolicy::Rebuild);
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

/// `Only` never builds, `Rebuild` always does, `Off` leaves no trace.
#[test]
fn every_policy_does_what_it_says() {
    let lab = Lab::new();
    let provider = lab.provider();
    let model = lab.model("m.onnx", &sum());
    let with = |policy: CachePolicy| provider.build(&model, &options(&provider).cache(policy), &NoHost);
    let entries = || lab.cache().list().unwrap().len();

    let miss = with(CachePolicy::Only).err().unwrap();
    assert_eq!((miss.code(), entries()), (ErrorCode::NotFound, 0));
    assert!(miss.hint().unwrap().to_string().contains("build the engine first"), "{:?}", miss.hint());
    assert!(!with(CachePolicy::Off).unwrap().was_loaded());
    assert_eq!(entries(), 0);
    assert!(!with(CachePolicy::Use).unwrap().was_loaded());
    assert!(with(CachePolicy::Use).unwrap().was_loaded());
    assert!(with(CachePolicy::Only).unwrap().was_loaded());

    let entry = lab.cache().list().unwrap().remove(0).path;
    let old = std::time::SystemTime::UNIX_EPOCH;
    fs::File::options().append(true).open(&entry).unwrap().set_modified(old).unwrap();
    assert!(!with(CachePolicy::Off).unwrap().was_loaded());
    assert_eq!(fs::metadata(&entry).unwrap().modified().unwrap(), old, "the cache is not touched");
    assert!(!with(CachePolicy::Rebuild).unwrap().was_loaded());
    assert_ne!(fs::metadata(&entry).unwrap().modified().unwrap(), old, "the entry is a new one");
    assert_eq!(entries(), 1);
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
    #[cfg(unix)]
    {
        let link = binding_error(|table| std::os::unix::fs::symlink("/dev/zero", table).unwrap());
        assert_eq!(link.code(), ErrorCode::InvalidArgument);
        let pipe = binding_error(|table| {
            assert!(std::process::Command::new("mkfifo").arg(table).status().unwrap().success());
        });
        assert!(pipe.to_string().contains("not a regular file"), "{pipe}");
    }
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
