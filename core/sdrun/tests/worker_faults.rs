//! A faulty plugin causes an error in its host, at once or at the time limit, and the host survives.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "worker/support.rs"]
mod support;

use sdrun::worker::Limits;
use sdrun_abi::{DType, Error, ErrorCode, LogLevel, Provider, Result, TensorView, Weight, WeightSource};
use std::{sync::atomic::Ordering::SeqCst, thread, time::Duration};
use support::*;

const X: [f32; 5] = [1.0, -2.0, 3.5, 0.0, 1e30];

// ---- faults ----

const CALLS: [(&str, &str); 13] = [
    ("init", "initialising the runtime"),
    ("devices", "asking about devices"),
    ("capabilities", "asking about devices"),
    ("check", "asking about devices"),
    ("assess", "assessing a graph"),
    ("build", "building an engine"),
    ("serialize", "serializing an engine"),
    ("load", "loading an engine"),
    ("session", "creating a session"),
    ("refit", "changing weights"),
    ("run", "running"),
    ("read", "running"),
    ("memory", "measuring memory"),
];

/// The error that `<fault>_in_<call>` causes, which must come from that call.
fn fails(provider: &dyn Provider, fault: &str, call: &str) -> Error {
    let (place, error) = all_calls(provider, &format!("{fault}_in_{call}")).unwrap_err();
    assert_eq!(place, call, "{error}");
    error
}

#[test]
fn errors_are_the_same_in_every_call() {
    for (call, _) in CALLS {
        let expected = Error {
            code: ErrorCode::ResourceExhausted,
            message: format!("no memory in {call}"),
            hint: Some("buy more".into()),
            native_code: Some("MOCK_OOM".into()),
            file: Some("/no/such/file".into()),
        };
        assert_eq!(fails(&uninitialised_plugin(), "error", call), expected);
        let isolated = started(patient());
        assert_eq!(fails(&isolated, "error", call), expected);
        if !matches!(call, "init" | "devices") {
            isolated.devices().unwrap();
        }
    }
}

#[test]
fn panics_are_contained_in_every_call_and_poison() {
    for (call, _) in CALLS {
        let check = |provider: &dyn Provider, error: Error| {
            assert_eq!(error.code, ErrorCode::Internal);
            assert!(error.message.contains(&format!("the mock panics in {call}")), "{error}");
            let later = provider.devices().unwrap_err();
            assert_eq!(later.code, ErrorCode::FailedPrecondition, "{later}");
            assert!(later.message.contains("panicked earlier"), "{later}");
        };
        let direct = uninitialised_plugin();
        check(&direct, fails(&direct, "panic", call));
        let isolated = started(patient());
        let error = fails(&isolated, "panic", call);
        assert!(
            error.hint.as_ref().unwrap().to_string().contains("panics in"),
            "stderr has the panic too: {error:?}"
        );
        check(&isolated, error);
        assert!(is_alive(isolated.pid()));
    }
}

#[test]
fn an_abort_or_exit_in_any_call_is_an_error() {
    for (call, doing) in CALLS {
        for (fault, how) in [("abort", ABORTED), ("exit", "exit code 7")] {
            let isolated = started(patient());
            let error = fails(&isolated, fault, call);
            assert_eq!(error.code, ErrorCode::Unavailable);
            let expected = format!("the worker of provider mock died ({how}) while {doing}");
            assert!(error.message.starts_with(&expected), "{error}");
            assert!(error.hint.is_some());
            let later = isolated.devices().unwrap_err();
            assert_eq!(later.code, ErrorCode::FailedPrecondition);
            assert!(later.message.contains(&format!("is gone: it died ({how}) while {doing}")), "{later}");
            assert!(!exists(isolated.pid()), "no zombie");
        }
    }
}

#[test]
fn a_hang_in_any_call_ends_at_its_limit() {
    // All at once, because each takes as long as its limit.
    thread::scope(|scope| {
        for (call, doing) in CALLS {
            scope.spawn(move || {
                let limit = Duration::from_secs(match call {
                    // Includes the start of the process.
                    "init" | "devices" | "capabilities" | "check" | "memory" => 8,
                    _ => 2,
                });
                let short = Some(limit);
                let limits = match call {
                    "assess" | "build" | "load" | "serialize" => Limits { build: short, ..patient() },
                    "session" | "refit" => Limits { session: short, ..patient() },
                    "run" | "read" => Limits { run: short, ..patient() },
                    _ => Limits { init: short, ..patient() },
                };
                let isolated = started(limits);
                let error = fails(&isolated, "hang", call);
                assert_eq!(error.code, ErrorCode::DeadlineExceeded, "{error}");
                let expected = format!("{doing} took longer than the limit of {limit:?}");
                assert!(error.message.contains(&expected), "{error}");
                assert_eq!(isolated.devices().unwrap_err().code, ErrorCode::FailedPrecondition);
                assert!(!exists(isolated.pid()));
            });
        }
    });
}

#[test]
fn processes_of_the_runtime_die_with_it() {
    let limits = Limits { build: Some(Duration::from_secs(2)), ..patient() };
    let isolated = started(limits);
    let error = fails(&isolated, "helper_then_hang", "build");
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
    let words = error.message.split("its last words: helper ").nth(1).unwrap();
    let helper = words.trim().parse().unwrap();
    eventually("the end of the helper", || !is_alive(helper));
}

#[test]
fn a_crash_while_objects_are_destroyed_shows_in_the_next_call() {
    let isolated = worker("abort_in_drop");
    let model = Model::small();
    drop(isolated.build(&model.json(), &spec(), &Weights::default(), &Quiet).unwrap());
    eventually("the end of the worker", || !exists(isolated.pid()));
    let error = isolated.devices().unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains(ABORTED), "{error}");
    assert_eq!(isolated.devices().unwrap_err().code, ErrorCode::FailedPrecondition);
    // In process, a panic there is contained.
    let direct = plugin("panic_in_drop");
    drop(direct.build(&model.json(), &spec(), &Weights::default(), &Quiet).unwrap());
}

#[test]
fn a_worker_killed_in_a_call_is_an_error() {
    let isolated = worker("slow_progress");
    let pid = isolated.pid();
    let listener = Listener::default();
    thread::scope(|scope| {
        let build =
            scope.spawn(|| isolated.build(&Model::small().json(), &spec(), &Weights::default(), &listener));
        eventually("progress", || !listener.progress.lock().unwrap().is_empty());
        kill(pid);
        let error = build.join().unwrap().err().unwrap();
        assert_eq!(error.code, ErrorCode::Unavailable);
        // Windows does not report that a process was killed, and kills none when memory runs out.
        let how = if cfg!(windows) { "died (exit code " } else { "signal 9, SIGKILL" };
        assert!(error.message.contains(how), "{error}");
        assert!(cfg!(windows) || error.hint.unwrap().to_string().contains("memory"));
    });
}

#[test]
fn a_panic_of_the_hosts_own_callback_ends_the_worker() {
    struct Panics;
    impl WeightSource for Panics {
        fn get(&self, _: &str) -> Result<Weight<'_>> {
            panic!("the source panics")
        }
    }
    let isolated = worker("good");
    let engine = isolated.build(&Model::small().json(), &spec(), &Panics, &Quiet).unwrap();
    let session = std::panic::AssertUnwindSafe(|| engine.session(&Panics, &Quiet).map(|_| ()));
    assert!(std::panic::catch_unwind(session).is_err());
    let error = isolated.devices().unwrap_err();
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    assert!(error.message.contains("in the middle of a call"), "{error}");
    assert!(!exists(isolated.pid()));
}

// ---- lies ----

#[test]
fn lies_are_detected_on_both_sides() {
    let model = Model::small();
    let weights = Weights::ramp(&model, 0.25);
    let both = |behaviour: &str, check: &dyn Fn(&dyn Provider)| {
        check(&plugin(behaviour));
        let isolated = worker(behaviour);
        check(&isolated);
        isolated.devices().expect("a lie does not end the worker");
    };
    let build = |provider: &dyn Provider| provider.build(&model.json(), &spec(), &weights, &Quiet);
    let run_error = |provider: &dyn Provider| {
        let mut session = build(provider).unwrap().session(&weights, &Quiet).unwrap();
        run(session.as_mut(), &model, &X).unwrap_err()
    };
    both("garbage_info", &|p| {
        let error = build(p).err().unwrap();
        assert!(error.message.contains("engine information is not valid"), "{error}");
    });
    both("null_engine", &|p| {
        assert!(build(p).err().unwrap().message.contains("success without an engine"));
    });
    both("no_output", &|p| assert!(run_error(p).message.contains("without requesting output buffers")));
    both("asks_twice", &|p| assert!(run_error(p).message.contains("twice in one run")));
    both("wrong_output_shape", &|p| {
        let mut session = build(p).unwrap().session(&weights, &Quiet).unwrap();
        let (data, mut asked) = (bytes(&X), Asked::default());
        let input = TensorView { dtype: DType::F32, shape: &model.input, data: &data };
        session.run(&[input], &mut asked, &Quiet).unwrap();
        assert_eq!(asked.0, [vec![1, 6], vec![8]], "the host's sink gets to see what does not fit");
    });
    both("lying_refit", &|p| {
        weights.asked();
        let mut session = build(p).unwrap().session(&weights, &Quiet).unwrap();
        let report = session.refit(&["b", "w/ä"], &weights, &Quiet).unwrap();
        assert_eq!((report.tensors, weights.asked()), (2, vec![]), "which the host can count");
    });
    // In process, this sink would really try to allocate.
    let isolated = worker("huge_output");
    let error = run_error(&isolated);
    assert_eq!(error.code, ErrorCode::ResourceExhausted, "{error}");
    isolated.devices().unwrap();
}

// ---- what they write ----

#[test]
fn output_of_the_runtime_does_not_disturb() {
    let isolated = started(patient());
    all_calls(&isolated, "print_to_stdout").unwrap();
    let tail = isolated.stderr_tail();
    for words in ["entering build", "entering run", "printed by C"] {
        assert!(tail.contains(words), "{words:?} is not in {tail}");
    }
}

#[test]
fn last_words_go_into_the_error() {
    let isolated = started(patient());
    let error = fails(&isolated, "stderr_then_abort", "run");
    assert!(error.message.ends_with("; its last words: mock: assertion failed in run: 1 == 2"), "{error}");
    // A runtime that gives the reason only on stderr.
    for _ in 0..20 {
        let isolated = started(patient());
        let error = fails(&isolated, "stderr_then_error", "build");
        assert_eq!(error.message, "status 4");
        assert_eq!(
            error.hint.unwrap().to_string(),
            "the worker wrote: mock: file.cpp:12: the reason for build"
        );
        let error = isolated.build(b"{", &spec(), &Weights::default(), &Quiet).err().unwrap();
        assert_eq!(
            error.hint.unwrap().to_string(),
            "the worker wrote: mock: file.cpp:12: the reason for build"
        );
        assert!(!isolated.stderr_tail().contains("sdrun-mark"));
    }
}

#[test]
fn logs_and_progress_arrive_whatever_their_size() {
    let isolated = started(patient());
    let listener = Listener::default();
    isolated.init(&init_config("huge_log"), &listener).unwrap();
    assert_eq!(*listener.log.lock().unwrap(), [(LogLevel::Info, "mock".into(), "ready".into())]);
    isolated.build(&Model::small().json(), &spec(), &Weights::default(), &listener).unwrap();
    let log = listener.log.lock().unwrap();
    assert_eq!(log.len(), 10_002);
    assert!(log[1].2.len() > 10_000 && log[1].2.len() < 20_000, "a long line is cut");
    assert!(log[10_001].2.starts_with("line 9999 y"));
    eventually("the end of stderr", || isolated.stderr_tail().contains("line 9999 z"));
    assert!(isolated.stderr_tail().len() < 70_000);
}

// ---- cancelling ----

#[test]
fn progress_cancels_a_build() {
    let isolated = worker("slow_progress");
    let listener = Listener { stop_at: Some(3), ..Listener::default() };
    let error =
        isolated.build(&Model::small().json(), &spec(), &Weights::default(), &listener).err().unwrap();
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::Cancelled, "cancelled"));
    let steps: Vec<u64> = listener.progress.lock().unwrap().iter().map(|(_, step, _)| *step).collect();
    assert_eq!(steps, [0, 1, 2, 3], "the answer to a report counts at once");
    // The next call is not cancelled.
    let listener = Listener { stop_at: Some(1), ..Listener::default() };
    isolated.build(&Model::small().json(), &spec(), &Weights::default(), &listener).err().unwrap();
    assert_eq!(listener.progress.lock().unwrap().len(), 2);
}

/// What a plugin asks for after a cancel is answered, its result counts, and the next call is not cancelled.
#[test]
fn calls_back_after_a_cancel_do_no_harm() {
    let model = Model::small();
    let weights = Weights::ramp(&model, 0.25);
    let isolated = worker("ignores_cancel");
    for provider in [&plugin("ignores_cancel") as &dyn Provider, &isolated] {
        let listener = Listener { stop_at: Some(0), ..Listener::default() };
        let engine = provider.build(&model.json(), &spec(), &weights, &listener).unwrap();
        assert_eq!(listener.progress.lock().unwrap().len(), 100);
        let mut session = engine.session(&weights, &Quiet).unwrap();
        assert_eq!(run(session.as_mut(), &model, &X).unwrap(), model.expected(&X, 2.0, weights.sum(&model)));
        provider.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    }
}

#[test]
fn a_flag_cancels_a_run_and_only_that_run() {
    let isolated = worker("slow_progress");
    let model = Model::small();
    let payload = plugin("good")
        .build(&model.json(), &spec(), &Weights::default(), &Quiet)
        .unwrap()
        .serialize()
        .unwrap();
    let engine = isolated.load(&payload, &spec(), &Quiet).unwrap();
    let mut session = engine.session(&Weights::filled(&model, 1.0), &Quiet).unwrap();
    for _ in 0..3 {
        let listener = Listener::default();
        let error = thread::scope(|scope| {
            let run = scope.spawn(|| run_with(session.as_mut(), &model, &X, &listener));
            thread::sleep(Duration::from_millis(30));
            listener.stop.store(true, SeqCst);
            run.join().unwrap().unwrap_err()
        });
        assert_eq!((error.code, error.message.as_str()), (ErrorCode::Cancelled, "cancelled"));
    }
}

#[test]
fn a_runtime_that_cannot_cancel_is_killed() {
    let isolated =
        worker_with("hang_in_build", Limits { cancel: Some(Duration::from_millis(100)), ..patient() });
    let listener = Listener::default();
    listener.stop.store(true, SeqCst);
    let error =
        isolated.build(&Model::small().json(), &spec(), &Weights::default(), &listener).err().unwrap();
    assert_eq!(error.code, ErrorCode::Cancelled);
    assert!(error.message.contains("was killed"), "{error}");
    assert_eq!(isolated.devices().unwrap_err().code, ErrorCode::FailedPrecondition);
}
