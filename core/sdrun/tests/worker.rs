//! A provider in a worker behaves as in this process; workers start and end properly.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "worker/support.rs"]
mod support;

use sdrun::worker::{Limits, WorkerConfig, WorkerProvider};
use sdrun_abi::{
    Compatibility, DType, Engine, ErrorCode, Input, Provider, Result, TensorView, VecSink, Weight,
    WeightSource,
};
use std::{io::Write, process::Command, sync::atomic::Ordering::SeqCst, thread, time::Duration};
use support::*;

const X: [f32; 5] = [1.0, -2.0, 3.5, 0.0, 1e30];

// ---- the same answers ----

#[test]
fn answers_are_those_of_the_plugin_in_process() {
    let (direct, isolated) = (plugin("good"), worker("good"));
    assert_eq!(isolated.identity(), &direct.identity());
    assert_eq!(isolated.devices(), direct.devices());
    assert_eq!(isolated.capabilities("mock0"), direct.capabilities("mock0"));
    assert_eq!(isolated.capabilities("gpu7"), direct.capabilities("gpu7"));
    assert!(isolated.capabilities("gpu7").unwrap_err().hint.unwrap().to_string().contains("mock0"));
    for text in ["mock-1", "mock-0", "other"] {
        assert_eq!(isolated.check(text, "mock0"), direct.check(text, "mock0"));
    }
    assert!(matches!(isolated.check("mock-0", "mock0"), Ok(Compatibility::PreferRecompile(_))));

    let model = Model::small();
    let weights = Weights::ramp(&model, 0.25);
    let engines = [&direct as &dyn Provider, &isolated]
        .map(|p| p.build(&model.json(), &spec(), &weights, &Quiet).unwrap());
    assert_eq!(engines[0].info(), engines[1].info());
    let payloads = engines.each_ref().map(|e| e.serialize().unwrap());
    assert_eq!(payloads[0], payloads[1]);
    let loaded = isolated.load(&payloads[0], &spec(), &Quiet).unwrap();
    assert_eq!(loaded.info(), engines[0].info());
    assert_eq!(isolated.load(b"junk", &spec(), &Quiet).err().unwrap().code, ErrorCode::DataLoss);

    let expected = model.expected(&X, 2.0, weights.sum(&model));
    for engine in engines.iter().chain([&loaded]) {
        let mut session = engine.session(&weights, &Quiet).unwrap();
        assert_eq!(run(session.as_mut(), &model, &X).unwrap(), expected);
        assert_eq!(session.memory().unwrap().weights, Some(28));
    }
}

#[test]
fn sessions_outlive_the_provider_and_engine_they_come_from() {
    let isolated = worker("good");
    let pid = isolated.pid();
    let model = Model::small();
    let weights = Weights::filled(&model, 1.0);
    let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    let mut session = engine.session(&weights, &Quiet).unwrap();
    drop(engine);
    drop(isolated);
    assert_eq!(run(session.as_mut(), &model, &X).unwrap(), model.expected(&X, 2.0, 7.0));
    assert!(is_alive(pid));
    drop(session);
    assert!(!exists(pid), "the worker is killed and reaped");
}

#[test]
fn a_refit_there_and_back_is_bit_identical() {
    let isolated = worker("good");
    let model = Model::small();
    let (a, b) = (Weights::ramp(&model, 0.1), Weights::ramp(&model, 0.7));
    let engine = isolated.build(&model.json(), &spec(), &a, &Quiet).unwrap();
    assert!(a.asked().is_empty(), "a build without baking requests no weights");
    let mut session = engine.session(&a, &Quiet).unwrap();
    a.asked();
    let first = run(session.as_mut(), &model, &X).unwrap();
    assert_eq!(first, model.expected(&X, 2.0, a.sum(&model)));
    let all: Vec<&str> = model.weights.iter().map(|(name, _)| name.as_str()).collect();
    let report = session.refit(&all, &b, &Quiet).unwrap();
    assert_eq!((report.tensors, report.bytes), (3, 28));
    assert_eq!(run(session.as_mut(), &model, &X).unwrap(), model.expected(&X, 2.0, b.sum(&model)));
    for name in &all {
        session.refit(&[name], &a, &Quiet).unwrap();
        let asked = [format!("check {name}"), name.to_string()];
        assert_eq!(a.asked(), asked, "only changed weights are checked and requested");
    }
    let bits = |outputs: &[Vec<f32>]| outputs.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&run(session.as_mut(), &model, &X).unwrap()), bits(&first));
    let error = session.refit(&["w/ä", "unknown"], &b, &Quiet).unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    let mut partial = Weights::ramp(&model, 0.7);
    partial.tensors.remove("e");
    let error = session.refit(&all, &partial, &Quiet).unwrap_err();
    assert_eq!((error.code, &*error.message), (ErrorCode::NotFound, "there is no weight e"));
    assert!(
        partial.asked().iter().all(|asked| asked.starts_with("check ")),
        "an error precedes all requests"
    );
    assert_eq!(bits(&run(session.as_mut(), &model, &X).unwrap()), bits(&first));
}

// ---- tensors on devices ----

#[test]
fn outputs_stay_on_the_device_and_are_inputs_there() {
    // The first output has the shape of the input.
    let model = Model::small();
    let weights = Weights::ramp(&model, 0.25);
    let sum = weights.sum(&model);
    let (y, data) = (model.expected(&X, 2.0, sum), bytes(&X));
    for provider in [Box::new(plugin("good")) as Box<dyn Provider>, Box::new(worker("good"))] {
        let engine = provider.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
        let [mut one, mut other] = [(); 2].map(|()| engine.session(&weights, &Quiet).unwrap());
        let (brought, kept) =
            run_keeping(one.as_mut(), Input::Host(model.view(&data)), &[true, false]).unwrap();
        assert_eq!((brought.len(), kept.len()), (1, 1), "each output goes one way");
        assert_eq!(brought[0], y[1]);
        assert_eq!((kept[0].spec().dtype, &kept[0].spec().shape), (DType::F32, &model.outputs[0]));

        let z = model.expected(&y[0], 2.0, sum);
        let (brought, all) = run_keeping(other.as_mut(), Input::Device(&*kept[0]), &[false, false]).unwrap();
        assert_eq!((brought, all.len()), (z.clone(), 0));
        let (brought, all) = run_keeping(other.as_mut(), Input::Device(&*kept[0]), &[true, true]).unwrap();
        assert_eq!(brought.len(), 0);
        // A run of the session that created a tensor does not change it. The tensor outlives session and engine.
        let (_, more) = run_keeping(other.as_mut(), Input::Device(&*all[0]), &[true, false]).unwrap();
        assert_eq!(floats(&read(&*more[0]).unwrap()), model.expected(&z[0], 2.0, sum)[0]);
        run(one.as_mut(), &model, &[9.0; 5]).unwrap();
        drop((one, other, engine));
        assert_eq!(floats(&read(&*kept[0]).unwrap()), y[0]);
        assert_eq!([&all[0], &all[1]].map(|tensor| floats(&read(&**tensor).unwrap())), *z);
    }
}

#[test]
fn tensors_of_elsewhere_are_refused() {
    let model = Model::small();
    let weights = Weights::ramp(&model, 0.25);
    let data = bytes(&X);
    let providers: [Box<dyn Provider>; 4] = [
        Box::new(plugin("good")),
        Box::new(plugin("good")),
        Box::new(worker("good")),
        Box::new(worker("good")),
    ];
    let session = |provider: &dyn Provider| {
        provider.build(&model.json(), &spec(), &weights, &Quiet).unwrap().session(&weights, &Quiet).unwrap()
    };
    let mut sessions = providers.each_ref().map(|provider| session(provider.as_ref()));
    let tensors = sessions.each_mut().map(|session| {
        run_keeping(session.as_mut(), Input::Host(model.view(&data)), &[true, false]).unwrap().1.remove(0)
    });
    for (i, session) in sessions.iter_mut().enumerate() {
        for (j, tensor) in tensors.iter().enumerate() {
            let result = run_keeping(session.as_mut(), Input::Device(&**tensor), &[false, false]);
            assert_eq!(result.is_ok(), i == j, "a tensor of {j} in {i}");
            if let Err(error) = result {
                assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
                assert!(error.hint.is_some(), "{error}");
            }
        }
        run(session.as_mut(), &model, &X).unwrap();
    }
}

#[test]
fn a_tensor_is_freed_in_its_own_process() {
    let isolated = worker("exit_in_drop");
    let model = Model::small();
    let weights = Weights::ramp(&model, 0.25);
    let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    let mut session = engine.session(&weights, &Quiet).unwrap();
    let data = bytes(&X);
    let (_, kept) = run_keeping(session.as_mut(), Input::Host(model.view(&data)), &[true, false]).unwrap();
    run(session.as_mut(), &model, &X).unwrap();
    drop(kept);
    eventually("the fault in the drop", || !is_alive(isolated.pid()));
}

// ---- weights ----

/// A hundred weights of many sizes, in alternating order.
fn many_weights() -> Model {
    let weights = (0..100).map(|i| (format!("w{i:02}"), vec![1 + (i * 7919) % 50_000])).collect();
    Model { weights, ..Model::small() }
}

#[test]
fn weights_in_memory_arrive_however_they_are_pulled() {
    let model = many_weights();
    let weights = Weights::ramp(&model, 0.5);
    let expected = model.expected(&X, 2.0, weights.sum(&model));
    for behaviour in ["good", "hold_weights", "parallel_weights"] {
        let isolated = worker(behaviour);
        let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
        for _ in 0..2 {
            let mut session = engine.session(&weights, &Quiet).unwrap();
            assert_eq!(weights.asked().len(), 100, "{behaviour}");
            assert_eq!(run(session.as_mut(), &model, &X).unwrap(), expected, "{behaviour}");
        }
        if cfg!(target_os = "linux") {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", isolated.pid())).unwrap();
            let regions = maps.lines().filter(|line| line.contains("/sdrun-worker-")).count();
            assert_eq!(regions, 2, "{behaviour}: only the input and output regions stay mapped");
        }
    }
}

#[test]
fn weights_in_files_are_mapped_by_the_worker() {
    let model = Model::small();
    let mut weights = Weights::ramp(&model, 0.25);
    let inside = Weights::ramp(&model, 0.5);
    // The file and the memory hold different values, so the result shows which was read.
    let path = folder().join("weights ü.bin");
    let mut file = std::fs::File::create(&path).unwrap();
    let mut offsets = std::collections::HashMap::new();
    let mut offset = 3;
    file.write_all(b"xyz").unwrap();
    for (name, (_, values)) in &inside.tensors {
        offsets.insert(name.clone(), offset);
        file.write_all(&bytes(values)).unwrap();
        offset += 4 * values.len() as u64;
    }
    weights.file = Some((path.clone(), offsets));
    let isolated = worker("good");
    let baked = sdrun_abi::BuildSpec { bake: true, ..spec() };
    let engine = isolated.build(&model.json(), &baked, &weights, &Quiet).unwrap();
    assert!(engine.info().weights.is_empty());
    let mut session = engine.session(&Weights::default(), &Quiet).unwrap();
    assert_eq!(run(session.as_mut(), &model, &X).unwrap(), model.expected(&X, 2.0, inside.sum(&model)));

    file.set_len(offset - 1).unwrap();
    let error = isolated.build(&model.json(), &baked, &weights, &Quiet).err().unwrap();
    assert_eq!(error.code, ErrorCode::DataLoss);
    assert!(error.message.contains("does not lie in it"), "{error}");
    // On Windows, a file stays until the last process unmaps it.
    if cfg!(unix) {
        std::fs::remove_file(&path).unwrap();
        let error = isolated.build(&model.json(), &baked, &weights, &Quiet).err().unwrap();
        assert_eq!((error.code, error.file), (ErrorCode::NotFound, Some(path.display().to_string())));
    }
    isolated.devices().unwrap();
}

#[test]
fn weights_in_blocks_pass_through_unchanged() {
    let model = Model { weights: vec![("w".into(), vec![2, 3]), ("b".into(), vec![3])], ..Model::small() };
    let plain = Weights::ramp(&model, 0.25);
    // The blocks hold twice the values.
    let [w, b] = ["w", "b"].map(|name| plain.tensors[name].1.iter().sum::<f32>());
    let expected = model.expected(&X, 2.0, 2.0 * w + b);
    let path = folder().join("blocks.bin");
    std::fs::write(&path, [vec![7; 24], Blocks::blocks(&plain.tensors["w"].1)].concat()).unwrap();
    let mut source = Blocks { plain, file: None };
    for file in [None, Some((path, 24))] {
        source.file = file;
        let (direct, isolated) = (plugin("encoded_weights"), worker("encoded_weights"));
        let providers: [&dyn Provider; 2] = [&direct, &isolated];
        for provider in providers {
            let engine = provider.build(&model.json(), &spec(), &source, &Quiet).unwrap();
            let mut session = engine.session(&source, &Quiet).unwrap();
            assert_eq!(run(session.as_mut(), &model, &X).unwrap(), expected);
            assert_eq!(source.plain.asked(), ["b"], "only what has no blocks is taken as it is");
        }
    }
}

#[test]
fn an_assessment_lists_every_node_and_the_memory() {
    let (direct, isolated) = (plugin("good"), worker("good"));
    let providers: [&dyn Provider; 2] = [&direct, &isolated];
    for provider in providers {
        let told = provider.assess(&Model::small().json(), &spec()).unwrap();
        assert_eq!(told.unsupported, Some(vec![]));
        // Weights of 2·3, 1 and 0 elements; outputs of 5 and 7.
        assert_eq!((told.memory.host_weights, told.memory.host_activations), (Some(28), Some(48)));
        assert_eq!((told.memory.device_weights, told.session_compiles), (None, Some(false)));
        let empty = Model { input: vec![1, 0], ..Model::small() };
        let nodes = provider.assess(&empty.json(), &spec()).unwrap().unsupported.unwrap();
        assert_eq!((nodes.len(), nodes[0].name.as_str(), nodes[0].op.as_str()), (1, "x", "Input"));
        assert!(provider.assess(b"{", &spec()).is_err());
    }
}

#[test]
fn a_missing_or_wrong_weight_is_the_sources_error() {
    let model = Model::small();
    let mut weights = Weights::filled(&model, 1.0);
    let isolated = worker("good");
    let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    let b = weights.tensors.remove("b").unwrap();
    let error = engine.session(&weights, &Quiet).err().unwrap();
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::NotFound, "there is no weight b"));
    assert_eq!(error.hint, Some("look elsewhere".into()));
    weights.tensors.insert("b".into(), (vec![3], vec![1.0; 3]));
    assert_eq!(engine.session(&weights, &Quiet).err().unwrap().code, ErrorCode::InvalidArgument);
    weights.tensors.insert("b".into(), b);
    engine.session(&weights, &Quiet).unwrap();
}

#[test]
fn the_time_of_the_hosts_own_weight_source_does_not_count() {
    struct Slow(Weights);
    impl WeightSource for Slow {
        fn get(&self, name: &str) -> Result<Weight<'_>> {
            thread::sleep(Duration::from_millis(1500));
            self.0.get(name)
        }
    }
    let model = Model::small();
    let isolated = worker_with("good", Limits { session: Some(Duration::from_secs(2)), ..patient() });
    let weights = Slow(Weights::filled(&model, 1.0));
    let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    engine.session(&weights, &Quiet).unwrap();
}

// ---- tensors ----

#[test]
fn large_tensors_and_growing_ones() {
    let isolated = worker("good");
    let before = isolated.peak_rss();
    assert_eq!(before.is_none(), cfg!(target_os = "macos"));
    // 64 MiB, then one that fits the same regions, then a larger one.
    for elements in [16 << 20, 1000, 17 << 20] {
        let weights = vec![("w".into(), vec![elements])];
        let model = Model { input: vec![elements], outputs: vec![vec![elements], vec![3]], weights };
        let source = Weights {
            tensors: [("w".into(), (vec![elements], vec![0.5; elements]))].into(),
            ..Weights::default()
        };
        let engine = isolated.build(&model.json(), &spec(), &source, &Quiet).unwrap();
        let mut session = engine.session(&source, &Quiet).unwrap();
        let x: Vec<f32> = (0..elements).map(|i| (i % 1000) as f32).collect();
        let outputs = run(session.as_mut(), &model, &x).unwrap();
        assert!(outputs == model.expected(&x, 2.0, elements as f32 * 0.5), "{elements} elements");
    }
    if let Some(before) = before {
        let peak = isolated.peak_rss().unwrap();
        assert!(peak > before + (128 << 20), "{before} → {peak}");
        isolated.reset_peak_rss();
        assert!(isolated.peak_rss().unwrap() <= peak);
    }
}

#[test]
fn inputs_that_do_not_fit_their_shape_are_refused_here() {
    let isolated = worker("good");
    let model = Model::small();
    let weights = Weights::filled(&model, 1.0);
    let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    let mut session = engine.session(&weights, &Quiet).unwrap();
    for shape in [&[1, 6][..], &[usize::MAX, 3], &[1 << 40]] {
        let data = bytes(&X);
        let input = TensorView { dtype: DType::F32, shape, data: &data };
        let error = session.run(&[input], &mut VecSink::default(), &Quiet).unwrap_err();
        assert!(matches!(error.code, ErrorCode::InvalidArgument | ErrorCode::ResourceExhausted), "{error}");
    }
    assert_eq!(run(session.as_mut(), &model, &X).unwrap(), model.expected(&X, 2.0, 7.0));
}

#[test]
fn threads_share_a_worker() {
    let isolated = worker("good");
    thread::scope(|scope| {
        for t in 0..4 {
            let isolated = &isolated;
            scope.spawn(move || {
                let model = Model { input: vec![10 + 1000 * t], ..Model::small() };
                let weights = Weights::filled(&model, t as f32);
                let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
                let mut session = engine.session(&weights, &Quiet).unwrap();
                let x = vec![t as f32; model.input[0]];
                for _ in 0..50 {
                    assert_eq!(
                        run(session.as_mut(), &model, &x).unwrap(),
                        model.expected(&x, 2.0, 7.0 * t as f32)
                    );
                }
            });
        }
    });
}

// ---- starting ----

#[test]
fn plugins_that_must_be_refused_are_refused_alike() {
    let junk = folder().join("junk.so");
    std::fs::write(&junk, b"no library").unwrap();
    for (path, code, words) in [
        (library("wrong_major"), ErrorCode::FailedPrecondition, "speaks version 2 of the ABI"),
        (library("too_new"), ErrorCode::FailedPrecondition, "needs a newer host"),
        (
            library("short_table"),
            ErrorCode::FailedPrecondition,
            "table of 72 bytes lacks functions that every plugin has: init, devices",
        ),
        (library("no_symbol"), ErrorCode::FailedPrecondition, "sdrun_plugin_query_v1"),
        (junk, ErrorCode::FailedPrecondition, "cannot load plugin"),
        (folder().join("none.so"), ErrorCode::NotFound, "there is no plugin"),
        ("mock.so".into(), ErrorCode::InvalidArgument, "is not absolute"),
    ] {
        let direct = load(&path).err().unwrap();
        let isolated =
            WorkerProvider::start(WorkerConfig { plugin: path.clone(), ..config(patient()) }).err().unwrap();
        for error in [direct, isolated] {
            assert_eq!(error.code, code, "{error}");
            assert!(error.message.contains(words), "{error}");
        }
    }
}

#[test]
fn a_crash_or_hang_while_loading_is_an_error() {
    let start = |query: &str, limits: Limits| {
        let env = vec![("SDRUN_MOCK_QUERY".into(), query.into())];
        WorkerProvider::start(WorkerConfig { env, ..config(limits) }).err().unwrap()
    };
    let error = start("abort", patient());
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains(&format!("died ({ABORTED}) while loading the plugin")), "{error}");
    assert!(
        error.message.contains("sdrun_mock_plugin"),
        "it is named by its file as long as its id is unknown"
    );
    let error = start("hang", Limits { init: Some(Duration::from_secs(1)), ..patient() });
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
}

#[cfg(unix)]
#[test]
fn programs_other_than_workers_are_refused() {
    let start = |worker: &str| {
        WorkerProvider::start(WorkerConfig { worker: worker.into(), ..config(patient()) }).err().unwrap()
    };
    let text = folder().join("text");
    std::fs::write(&text, "no program").unwrap();
    let other_protocol = folder().join("other");
    let hello = r#"{"hello":{"hello":{"protocol":99,"abi":[1,0]},"plugin":{"Err":{"code":"internal","message":"x"}}}}"#;
    let script =
        format!("#!/bin/sh\nprintf '\\{:03o}\\000\\000\\000%s' '{hello}'\nexec sleep 600\n", hello.len());
    std::fs::write(&other_protocol, script).unwrap();
    std::fs::set_permissions(&other_protocol, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    for (worker, code, words) in [
        ("/bin/true", ErrorCode::Unavailable, "exit code 0"),
        ("/bin/cat", ErrorCode::Internal, "broke the protocol"),
        ("/bin/false", ErrorCode::Unavailable, "exit code 1"),
        (text.to_str().unwrap(), ErrorCode::PermissionDenied, "cannot start the worker"),
        ("/no/such/worker", ErrorCode::NotFound, "there is no worker"),
        ("sdrun-worker", ErrorCode::InvalidArgument, "not absolute"),
        (other_protocol.to_str().unwrap(), ErrorCode::Internal, "speaks version 99, this program 2"),
    ] {
        let error = start(worker);
        assert!(error.code == code && error.message.contains(words), "{worker}: {error:?}");
    }
    let by_hand = Command::new(WORKER).output().unwrap();
    assert_eq!(by_hand.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&by_hand.stderr).contains("sdrun"));
}

#[cfg(unix)]
#[test]
fn a_worker_can_be_started_through_another_loader() {
    let loader = "/lib64/ld-linux-x86-64.so.2";
    let mut loaders = vec![vec!["/usr/bin/env".into(), "SDRUN_TEST=1".into()]];
    if std::fs::exists(loader).unwrap() {
        loaders.push(vec![loader.into(), "--library-path".into(), "/no/such/folder".into()]);
    }
    for loader in loaders {
        let isolated = WorkerProvider::start(WorkerConfig { loader, ..config(patient()) }).unwrap();
        all_calls(&isolated, "good").unwrap();
    }
    let error =
        WorkerProvider::start(WorkerConfig { loader: vec!["/no/loader".into()], ..config(patient()) })
            .err()
            .unwrap();
    assert_eq!(error.code, ErrorCode::NotFound);
}

// ---- ending ----

#[test]
fn closing_is_graceful_and_final() {
    let isolated = worker("good");
    let pid = isolated.pid();
    let model = Model::small();
    let weights = Weights::filled(&model, 1.0);
    let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    let mut session = engine.session(&weights, &Quiet).unwrap();
    isolated.close();
    assert!(!exists(pid));
    for error in [run(session.as_mut(), &model, &X).unwrap_err(), engine.serialize().unwrap_err()] {
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        assert!(error.message.contains("was closed"), "{error}");
    }
}

#[test]
fn closing_ends_a_call_that_hangs() {
    let isolated = worker("hang_in_serialize");
    let engine = isolated.build(&Model::small().json(), &spec(), &Weights::default(), &Quiet).unwrap();
    thread::scope(|scope| {
        let call = scope.spawn(|| engine.serialize());
        thread::sleep(Duration::from_millis(50));
        isolated.close();
        assert_eq!(call.join().unwrap().unwrap_err().code, ErrorCode::FailedPrecondition);
    });
}

#[test]
fn dropping_objects_does_not_wait_for_a_call_under_way() {
    let isolated = worker("slow_progress");
    let model = Model::small();
    let payload = plugin("good")
        .build(&model.json(), &spec(), &Weights::default(), &Quiet)
        .unwrap()
        .serialize()
        .unwrap();
    let engine: Box<dyn Engine> = isolated.load(&payload, &spec(), &Quiet).unwrap();
    let listener = Listener::default();
    thread::scope(|scope| {
        let build = scope
            .spawn(|| isolated.build(&model.json(), &spec(), &Weights::default(), &listener).map(|_| ()));
        eventually("progress", || !listener.progress.lock().unwrap().is_empty());
        drop(engine);
        assert!(!build.is_finished());
        listener.stop.store(true, SeqCst);
        assert_eq!(build.join().unwrap().unwrap_err().code, ErrorCode::Cancelled);
    });
}

#[test]
fn devices_are_known_while_a_call_is_under_way() {
    let isolated = worker("slow_progress");
    let model = Model::small();
    let (devices, capabilities) = (isolated.devices().unwrap(), isolated.capabilities("mock0").unwrap());
    let listener = Listener::default();
    thread::scope(|scope| {
        let build = scope
            .spawn(|| isolated.build(&model.json(), &spec(), &Weights::default(), &listener).map(|_| ()));
        eventually("progress", || !listener.progress.lock().unwrap().is_empty());
        assert_eq!(isolated.devices().unwrap(), devices);
        assert_eq!(isolated.capabilities("mock0").unwrap(), capabilities);
        assert!(!build.is_finished());
        listener.stop.store(true, SeqCst);
        assert_eq!(build.join().unwrap().unwrap_err().code, ErrorCode::Cancelled);
    });
}

/// Runs itself in another process, which is killed.
#[test]
fn a_worker_ends_with_its_host_and_the_next_one_cleans_up() {
    const ROLE: &str = "SDRUN_TEST_HOST";
    if std::env::var_os(ROLE).is_some() {
        let isolated = worker("hang_in_build");
        println!("\nworker {}", isolated.pid());
        let _ = isolated.build(&Model::small().json(), &spec(), &Weights::default(), &Quiet);
        return;
    }
    let name = "a_worker_ends_with_its_host_and_the_next_one_cleans_up";
    let mut host = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(ROLE, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(host.stdout.take().unwrap()));
    let pid = lines
        .map(|l| l.unwrap())
        .find_map(|l| l.strip_prefix("worker ").map(|pid| pid.parse::<u32>().unwrap()))
        .unwrap();
    assert!(is_alive(pid));
    let lock = cfg!(target_os = "linux").then(|| {
        let files = std::fs::read_dir(format!("/proc/{}/fd", host.id())).unwrap();
        let files = files.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        let lock = files.into_iter().find(|file| file.to_string_lossy().contains("/sdrun-worker-")).unwrap();
        assert!(lock.exists());
        lock
    });
    host.kill().unwrap();
    host.wait().unwrap();
    eventually("the end of the worker", || !is_alive(pid));
    drop(started(patient()));
    if let Some(lock) = lock {
        assert!(!lock.parent().unwrap().exists(), "{} is left", lock.display());
    }
}

/// Runs itself with other environments, which a process cannot change safely for itself.
#[cfg(unix)]
#[test]
fn the_worker_is_found_by_the_variable_only_where_it_is_not_beside() {
    const ROLE: &str = "SDRUN_TEST_FIND";
    if std::env::var_os(ROLE).is_some() {
        match sdrun::worker::find_worker() {
            Ok(path) => println!("\nfound {}", path.display()),
            Err(e) => println!(
                "\nfound nothing: {e} ({})",
                e.hint.as_ref().map_or("no hint".into(), ToString::to_string)
            ),
        }
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let own = home.path().join("worker");
    // Independent of the umask of whoever runs the tests.
    let allow = |path: &std::path::Path, mode: u32| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    std::fs::copy(WORKER, &own).unwrap();
    allow(&own, 0o755);
    allow(home.path(), 0o700);
    let find = |variable: Option<&std::path::Path>| {
        let name = "the_worker_is_found_by_the_variable_only_where_it_is_not_beside";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--nocapture"]).env(ROLE, "1").env("SDRUN_DATA_DIR", home.path());
        command.env_remove("SDRUN_WORKER").envs(variable.map(|v| ("SDRUN_WORKER", v)));
        // A worker in the working directory or in PATH is ignored.
        command.current_dir(std::path::Path::new(WORKER).parent().unwrap());
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        text.lines().find(|l| l.starts_with("found ")).unwrap().to_string()
    };
    assert_eq!(find(Some(&own)), format!("found {}", own.display()));
    let nothing = find(None);
    assert!(nothing.starts_with("found nothing: there is no sdrun-worker in /"), "{nothing}");
    assert!(nothing.contains("SDRUN_WORKER"), "{nothing}");
    assert!(find(Some("worker".as_ref())).contains("not the absolute path"));
    let providers = home.path().join("providers");
    let beside_providers = providers.join("sdrun-worker");
    std::fs::create_dir(&providers).unwrap();
    std::fs::copy(WORKER, &beside_providers).unwrap();
    allow(&providers, 0o755);
    allow(&beside_providers, 0o755);
    assert_eq!(find(None), format!("found {}", beside_providers.display()));
    allow(&own, 0o777);
    assert!(find(Some(&own)).contains("can be written by"), "{}", find(Some(&own)));
}
