use super::*;
use crate::{
    devices,
    ffi::{
        Library,
        cuda::{Context, Driver},
        engine::Engine,
    },
    refit, runtime,
};
use sdrun_abi::{Compatibility, DeviceTensor, ErrorCode, Flow, Host, Input, LogLevel, WeightUpdate};

fn load(provider: &TensorRtRtx, payload: &[u8]) -> Result<Box<dyn sdrun_abi::Engine>> {
    provider.load(payload, &spec(GPU), &NoHost)
}

fn session(provider: &TensorRtRtx, source: &Source) -> Result<Box<dyn Session>> {
    load(provider, &payload_of(&description(), PLAN))?.session(source, &NoHost)
}

fn failure<T>(result: Result<T>) -> Error {
    result.err().expect("it must fail")
}

#[test]
fn weights_are_given_changed_and_changed_back() {
    let (_guard, double, provider) = provider();
    let before = double.alive();
    let (a, b) = (Source::new(0.3, -0.2), Source::new(1.25, 0.7));
    let mut session = session(&provider, &a).unwrap();
    assert_eq!(a.asked.load(Relaxed), 2);
    let first = run(&mut *session, 2).unwrap();
    assert_eq!(first, expected(&a, 2));
    // A larger tensor, then a smaller one.
    assert_eq!(run(&mut *session, 8).unwrap(), expected(&a, 8));
    assert_eq!(run(&mut *session, 1).unwrap(), expected(&a, 1));

    let released = double.get("released");
    let report = session.refit(&["a", "b"], &b, &NoHost).unwrap();
    assert_eq!((report.method, report.tensors, report.bytes), (WeightUpdate::InPlace, 2, 32));
    assert_eq!(double.get("released"), released + 1);
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&b, 2));
    session.refit(&["a", "b"], &a, &NoHost).unwrap();
    assert_eq!(run(&mut *session, 2).unwrap(), first, "A, B, A gives A to the bit");

    // Changes one weight; the library's coupled weights follow.
    let mixed = Source { a: a.a.clone(), ..Source::new(0.0, 5.0) };
    assert_eq!(session.refit(&["b"], &mixed, &NoHost).unwrap().tensors, 1);
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&mixed, 2));
    assert_eq!(session.refit(&["a"], &b, &NoHost).unwrap().tensors, 2);
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&b, 2));

    let memory = session.memory().unwrap();
    assert_eq!((memory.weights, memory.activations), (Some(36), Some(4096)));
    assert!(memory.device.is_some());
    drop(session);
    assert_eq!(double.alive(), before, "everything of the vendor's is freed");
}

#[test]
fn what_is_incomplete_is_refused() {
    let (_guard, double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    *source.absent.lock().unwrap() = Some("b");
    assert_eq!(failure(session(&provider, &source)).code, ErrorCode::NotFound);
    *source.absent.lock().unwrap() = None;

    let mut description = description();
    let try_plan = |description: &Description, plan: &str| {
        failure(load(&provider, &payload_of(description, plan)).unwrap().session(&source, &NoHost))
    };
    let error = try_plan(&description, &PLAN.replace("weight b 3\n", ""));
    assert!(error.message.contains("no place for 1 of 2 weights, the first is `b`"), "{error}");
    // The table is checked even if the library claims that nothing is missing.
    double.set("says_nothing_is_missing", 1);
    let error = try_plan(&description, &format!("{PLAN}weight d 2\n"));
    assert!(error.message.contains("`d`, which its refit table does not name"), "{error}");
    assert_eq!(error.code, ErrorCode::DataLoss);
    double.set("says_nothing_is_missing", 0);
    let error = try_plan(&description, &PLAN.replace("weight a 5", "weight a 6"));
    assert!(error.message.contains("`a` has 6 elements") && error.message.contains("5 of f32"), "{error}");
    description.info.weights.remove(1);
    let error = try_plan(&description, PLAN);
    assert!(error.message.contains("uses `b`, which the engine does not list"), "{error}");
}

#[test]
fn a_refit_that_fails_keeps_the_former_weights_or_says_so() {
    let (_guard, double, provider) = provider();
    let (a, b) = (Source::new(0.3, -0.2), Source::new(1.25, 0.7));
    let mut session = session(&provider, &a).unwrap();
    let first = run(&mut *session, 2).unwrap();

    *b.absent.lock().unwrap() = Some("b");
    assert_eq!(failure(session.refit(&["a", "b"], &b, &NoHost)).code, ErrorCode::NotFound);
    *b.absent.lock().unwrap() = None;
    assert_eq!(run(&mut *session, 2).unwrap(), first);
    double.set("set_fails", 2);
    assert!(failure(session.refit(&["a", "b"], &b, &NoHost)).message.contains("take the weight"));
    assert_eq!(run(&mut *session, 2).unwrap(), first);
    assert_eq!(failure(session.refit(&["a", "b"], &b, &Stop)).code, ErrorCode::Cancelled);
    assert_eq!(run(&mut *session, 2).unwrap(), first);

    // The library fails half-way: the session refuses to run until all weights are set again.
    double.set("refit_fails", 1);
    failure(session.refit(&["a", "b"], &b, &NoHost));
    let error = failure(run(&mut *session, 2));
    assert!(error.message.contains("incomplete") && error.hint.is_some(), "{error}");
    assert_eq!(session.refit(&["b"], &a, &NoHost).unwrap().tensors, 3);
    assert_eq!(run(&mut *session, 2).unwrap(), first);
}

/// Weights of 20, 12 and 4 bytes.
#[test]
fn values_beyond_a_chunk_are_written_in_several_refits() {
    let (_guard, double, _) = provider();
    let runtime = runtime::get().unwrap();
    let place = devices::find(runtime, GPU).unwrap();
    let context = Context::of(runtime.driver().unwrap(), place.gpu().unwrap()).unwrap();
    let stream = context.stream().unwrap();
    let (a, b) = (Source::new(0.3, 0.4), Source::new(1.25, 0.7));
    let description = description();
    let plan = PLAN.replace("coupled a b\n", "");
    let load = || Engine::load(&runtime.library, &context, plan.as_bytes(), &NoHost).unwrap();
    let values = |engine: &mut Engine| engine.bake(&NoHost).unwrap().to_vec();
    let apply = |engine: &Engine, changed: Option<&[&str]>, source: &Source, chunk, host: &dyn Host| {
        double.set("refits", 0);
        double.set("largest_refit", 0);
        let report = refit::apply(engine, &stream, &description, changed, source, chunk, host)
            .map_err(|failure| (failure.error.code, failure.half_done))?;
        Ok((report.tensors, report.bytes, double.get("refits"), double.get("largest_refit")))
    };

    let (mut whole, mut split) = (load(), load());
    assert_eq!(apply(&whole, None, &a, u64::MAX, &NoHost), Ok((3, 36, 1, 9)));
    // An engine without weights: 5, 3 and 1 numbers, each set by its own refit.
    assert_eq!(apply(&split, None, &a, 1, &NoHost), Ok((3, 36, 3, 5)));
    assert_eq!(values(&mut split), values(&mut whole));
    assert_eq!(a.asked.load(Relaxed), 4, "each is asked for once");
    // 20 bytes are too few for a step; 32 are enough.
    assert_eq!(apply(&load(), None, &a, 21, &NoHost), Ok((3, 36, 2, 8)));

    // New weights replace the previous ones.
    apply(&whole, Some(&["a", "b"]), &b, u64::MAX, &NoHost).unwrap();
    assert_eq!(apply(&split, Some(&["a", "b"]), &b, 1, &NoHost), Ok((2, 32, 2, 5)));
    assert_eq!(values(&mut split), values(&mut whole));

    // A failure before anything is written is harmless; a later one is not.
    *a.absent.lock().unwrap() = Some("b");
    let lacks = |half_done| Err((ErrorCode::NotFound, half_done));
    assert_eq!(apply(&whole, Some(&["a", "b"]), &a, u64::MAX, &NoHost), lacks(false));
    assert_eq!(apply(&split, Some(&["a", "b"]), &a, 1, &NoHost), lacks(true));

    // Cancellation works before anything is written. Later it would lose the previous weights.
    *a.absent.lock().unwrap() = None;
    let stopped = Err((ErrorCode::Cancelled, false));
    assert_eq!(apply(&split, Some(&["a", "b"]), &a, 1, &Stop), stopped);
    struct StopLater(AtomicUsize);
    impl Host for StopLater {
        fn log(&self, _: LogLevel, _: &str, _: &str) {}
        fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
            if self.0.fetch_add(1, Relaxed) < 3 { Flow::Continue } else { Flow::Cancel }
        }
        fn cancelled(&self) -> bool {
            self.0.load(Relaxed) > 3
        }
    }
    let later = || StopLater(AtomicUsize::new(0));
    assert_eq!(apply(&split, Some(&["a", "b"]), &a, 1, &later()), Ok((2, 32, 2, 5)));
    assert_eq!(apply(&load(), None, &a, 1, &later()).map(drop), Err((ErrorCode::Cancelled, true)));
}

#[test]
fn exceptions_of_the_library_are_errors() {
    let (_guard, double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    let before = double.alive();
    for (what, words) in [
        ("runtime_throws", "an exception: the test double throws"),
        ("runtime_throws_a_number", "an exception without a message"),
    ] {
        double.set(what, 1);
        let error = failure(session(&provider, &source));
        assert_eq!(error.code, ErrorCode::Internal);
        assert!(error.message.contains(words), "{error}");
    }
    assert_eq!(double.alive(), before);
    session(&provider, &source).unwrap();
}

#[test]
fn reads_share_a_stream_and_memory() {
    let (_guard, double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    let mut session = session(&provider, &source).unwrap();
    let data = bytes_of(&given(2));
    let x = Input::Host(TensorView { dtype: DType::F32, shape: &[2, 4], data: &data });
    let y = session.run_on_device(&[x], &[true], &mut VecSink::default(), &NoHost).unwrap().remove(0);
    let read = || {
        let mut bytes = vec![0; 32];
        y.read(&mut bytes).unwrap();
        assert_eq!(bytes, bytes_of(&expected(&source, 2)));
        [double.get("streams"), double.get("pinned_made")]
    };
    let first = read();
    assert_eq!([read(), read()], [first; 2]);
}

#[test]
fn a_build_runs_with_its_gpu_current() {
    let (_guard, double, provider) = provider();
    double.set("gpus", 2);
    double.set("current", 0);
    let model = testing::Model::default()
        .input("x", DType::F32, &[2])
        .output("y", DType::F32, &[2])
        .node("Relu", &["x"], &["y"])
        .bytes();
    // The double has no builder.
    let error = failure(provider.build(&model, &spec("0000:02:00.0"), &Source::new(0.0, 0.0), &NoHost));
    assert!(error.message.contains("createInferBuilder_INTERNAL"), "{error}");
    assert_eq!(double.get("current"), 2);
}

/// The library does not check them. The description of an engine says which inputs are indices.
#[test]
fn indices_out_of_range_are_refused() {
    let (_guard, _double, provider) = provider();
    let checks =
        r#"{"inputs":[{"number":0,"name":"x","used":{"node":"Gather `g`","sizes":[3]}}],"computed":[]}"#;
    let description = Description { checks: serde_json::from_str(checks).unwrap(), ..description() };
    let source = Source::new(0.3, -0.2);
    let mut session =
        load(&provider, &payload_of(&description, PLAN)).unwrap().session(&source, &NoHost).unwrap();
    let mut run = |indices: [i32; 4]| {
        let data = indices.map(i32::to_le_bytes).concat();
        let x = TensorView { dtype: DType::F32, shape: &[1, 4], data: &data };
        session.run(&[x], &mut VecSink::default(), &NoHost)
    };
    run([0, 2, -3, 1]).unwrap();
    let error = failure(run([0, 2, -4, 1]));
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("`x` has -4 at position 2"), "{error}");
    run([0, 0, 0, 0]).unwrap();
}

#[test]
fn an_old_driver_is_refused() {
    let (_guard, double) = Double::lock();
    double.set("driver_version", 11_080);
    let error = Driver::load(Some(&double.library)).err().unwrap();
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    assert!(error.message.contains("supports CUDA 11.8") && error.hint.is_some(), "{error}");
    double.set("driver_version", 12_090);
    assert_eq!(Driver::load(Some(&double.library)).unwrap().version, "12.9");
}

#[test]
fn inputs_that_stay_the_same_stay_on_the_gpu() {
    let (_guard, double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    let mut session = session(&provider, &source).unwrap();
    let mut uploads = |rows: usize| {
        let before = double.get("uploads");
        assert_eq!(run(&mut *session, rows).unwrap(), expected(&source, rows));
        double.get("uploads") - before
    };
    assert_eq!([uploads(2), uploads(2), uploads(4), uploads(4), uploads(2), uploads(2)], [1, 0, 1, 0, 1, 0]);
    // After a failure the contents of the memory are unknown.
    double.set("enqueue_fails", 1);
    failure(run(&mut *session, 2));
    let before = double.get("uploads");
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&source, 2));
    assert_eq!(double.get("uploads"), before + 1);
}

#[test]
fn outputs_stay_on_the_gpu_and_are_inputs_there() {
    let (_guard, double, provider) = provider();
    let before = double.alive();
    let (a, b) = (Source::new(0.3, -0.2), Source::new(1.25, 0.7));
    let (mut one, mut other) = (session(&provider, &a).unwrap(), session(&provider, &b).unwrap());
    let copies = || [double.get("uploads"), double.get("downloads")];
    let keep = |session: &mut dyn Session, input: Input<'_>| -> Box<dyn DeviceTensor> {
        let mut sink = VecSink::default();
        let mut kept = session.run_on_device(&[input], &[true], &mut sink, &NoHost).unwrap();
        assert_eq!((sink.len(), kept.len()), (0, 1));
        kept.remove(0)
    };
    let read = |tensor: &dyn DeviceTensor| {
        let mut bytes = vec![0; 4 * tensor.spec().shape.iter().product::<usize>()];
        tensor.read(&mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    let data = bytes_of(&given(2));
    let x = Input::Host(TensorView { dtype: DType::F32, shape: &[2, 4], data: &data });

    let start = copies();
    let y = keep(&mut *one, x);
    assert_eq!(copies(), [start[0] + 1, start[1]], "the input goes up, nothing comes down");
    let mut sink = VecSink::default();
    other.run_on_device(&[Input::Device(&*y)], &[false], &mut sink, &NoHost).unwrap();
    assert_eq!(copies(), [start[0] + 1, start[1] + 1], "nothing goes up, the output comes down");
    let want: Vec<f32> = expected(&a, 2).iter().map(|y| y * b.factor()).collect();
    assert_eq!(sink.get(0).unwrap().data, bytes_of(&want));

    // Later runs of the session do not affect the tensor, and its output can be its own next input.
    assert_eq!(run(&mut *one, 8).unwrap(), expected(&a, 8));
    let twice = keep(&mut *one, Input::Device(&*y));
    assert_eq!(read(&*y), expected(&a, 2));
    assert_eq!(read(&*twice), expected(&a, 2).iter().map(|y| y * a.factor()).collect::<Vec<_>>());

    // A loop's memory does not grow, whether a tensor is dropped before or after the next one is made.
    let held = || double.get("device_bytes");
    let mut last = keep(&mut *one, x);
    let mut figures = Vec::new();
    for _ in 0..6 {
        last = keep(&mut *one, Input::Device(&*last));
        figures.push(held());
    }
    assert!(figures[1..].iter().all(|bytes| *bytes == figures[1]), "{figures:?}");
    drop(last);
    for _ in 0..6 {
        drop(keep(&mut *one, x));
        assert!(held() <= figures[1]);
    }

    // Tensors outlive their sessions, and free their memory when dropped.
    drop((one, other));
    assert_eq!(read(&*y), expected(&a, 2));
    drop((y, twice));
    assert_eq!(double.alive(), before);
}

#[test]
fn tensors_of_another_gpu_are_refused() {
    let (_guard, double, provider) = provider();
    double.set("gpus", 2);
    let source = Source::new(0.3, -0.2);
    let payload = payload_of(&description(), PLAN);
    let mut sessions = [GPU, "0000:02:00.0"]
        .map(|gpu| provider.load(&payload, &spec(gpu), &NoHost).unwrap().session(&source, &NoHost).unwrap());
    let data = bytes_of(&given(1));
    let x = Input::Host(TensorView { dtype: DType::F32, shape: &[1, 4], data: &data });
    let mut sink = VecSink::default();
    let y = sessions[0].run_on_device(&[x], &[true], &mut sink, &NoHost).unwrap().remove(0);
    let error = failure(sessions[1].run_on_device(&[Input::Device(&*y)], &[false], &mut sink, &NoHost));
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("another GPU") && error.hint.is_some(), "{error}");
    assert_eq!(run(&mut *sessions[1], 2).unwrap(), expected(&source, 2));
}

/// Cancels everything.
struct Stop;

impl Host for Stop {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Cancel
    }
    fn cancelled(&self) -> bool {
        true
    }
}

#[test]
fn weights_can_be_baked_in() {
    let (_guard, _double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    let engine = load(&provider, &payload_of(&description(), PLAN)).unwrap();
    let baked = engine.bake(&source, &NoHost).unwrap();
    assert!(baked.info().weights.is_empty() && baked.info().compatibility.contains("\"refit\":false"));
    let again = load(&provider, &baked.serialize().unwrap()).unwrap();
    let nothing = Source::new(f32::NAN, f32::NAN);
    let mut session = again.session(&nothing, &NoHost).unwrap();
    assert_eq!(nothing.asked.load(Relaxed), 0);
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&source, 2));
    let error = failure(session.refit(&["a"], &source, &NoHost));
    assert!(error.message.contains("baked in"), "{error}");
}

#[test]
fn failures_of_the_gpu_are_errors_and_leak_nothing() {
    let (_guard, double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    let before = double.alive();
    for (what, nth, code, words) in [
        ("load_fails", 1, ErrorCode::ResourceExhausted, "out of memory"),
        ("context_fails", 1, ErrorCode::Internal, "prepare a run"),
        ("alloc_fails", 1, ErrorCode::ResourceExhausted, "out of memory"),
        ("alloc_fails", 2, ErrorCode::ResourceExhausted, "Test GPU 0"),
    ] {
        double.set(what, nth);
        let error = failure(session(&provider, &source));
        assert_eq!(error.code, code, "{what}: {error}");
        assert!(error.message.contains(words), "{error}");
        assert_eq!(double.alive(), before, "{what}");
    }
    double.set("diagnostics", 0b101);
    let error = failure(session(&provider, &source));
    assert!(
        error.message.contains("another release") && error.message.contains("driver is older"),
        "{error}"
    );
    double.set("diagnostics", 0);
    let damaged = PLAN.replace("plan", "pfan");
    let engine = load(&provider, &payload_of(&description(), &damaged)).unwrap();
    assert!(failure(engine.session(&source, &NoHost)).message.contains("damaged"));

    let mut session = session(&provider, &source).unwrap();
    double.set("enqueue_fails", 1);
    assert!(failure(run(&mut *session, 2)).message.contains("run the engine"));
    let error = failure(run(&mut *session, 9));
    assert!(error.message.contains("shape [9, 4]") && error.code == ErrorCode::InvalidArgument, "{error}");
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&source, 2));
    double.set("alloc_fails", 1);
    assert_eq!(failure(run(&mut *session, 8)).code, ErrorCode::ResourceExhausted);
    assert_eq!(run(&mut *session, 8).unwrap(), expected(&source, 8));
}

/// Loses the GPU at each call of the driver in turn, until a session lives without it.
#[test]
fn a_lost_gpu_is_an_error_and_never_a_result() {
    let (_guard, double, provider) = provider();
    let (a, b) = (Source::new(0.3, -0.2), Source::new(-0.1, 0.5));
    let mut last = 0;
    for nth in 1.. {
        double.set("lost_at", nth);
        let outcome = (|| {
            let mut session = session(&provider, &a)?;
            let first = run(&mut *session, 2)?;
            session.refit(&["a", "b"], &b, &NoHost)?;
            Ok::<_, Error>((first, run(&mut *session, 2)?, session))
        })();
        match outcome {
            Err(error) => {
                assert!(
                    [ErrorCode::Internal, ErrorCode::FailedPrecondition].contains(&error.code),
                    "call {nth}: {error:?}"
                );
                assert_eq!(double.get("lost_at"), -1, "call {nth}: {error}");
            }
            Ok((first, second, mut session)) => {
                assert_eq!((first, second), (expected(&a, 2), expected(&b, 2)), "call {nth}");
                // From now on nothing works, and each attempt says so.
                double.set("lost_at", -1);
                for _ in 0..2 {
                    assert!(run(&mut *session, 2).is_err());
                }
                assert!(session.refit(&["a", "b"], &a, &NoHost).is_err());
                last = nth;
                break;
            }
        }
    }
    assert!(last > 10, "only {last} calls");
    // The next session works if the GPU is back.
    double.set("lost_at", 0);
    let mut session = session(&provider, &a).unwrap();
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&a, 2));
}

#[test]
fn a_long_run_can_be_cancelled() {
    let (_guard, double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    let mut session = session(&provider, &source).unwrap();
    double.set("busy", 1_000_000);
    let data = [0u8; 32];
    let view = TensorView { dtype: DType::F32, shape: &[2, 4], data: &data };
    let error = failure(session.run(&[view], &mut VecSink::default(), &Stop));
    assert_eq!(error.code, ErrorCode::Cancelled);
    double.set("busy", 3);
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&source, 2));
}

#[test]
fn compiled_kernels_are_kept() {
    let (_guard, double, provider) = provider();
    let source = Source::new(0.3, -0.2);
    // A plan that no other test uses.
    let plan = format!("{PLAN}# kernels\n");
    let engine = load(&provider, &payload_of(&description(), &plan)).unwrap();
    let used = double.get("kernels_used");
    let mut session = engine.session(&source, &NoHost).unwrap();
    run(&mut *session, 2).unwrap();
    drop(session);
    assert_eq!(double.get("kernels_used"), used);
    let mut session = engine.session(&source, &NoHost).unwrap();
    assert_eq!(double.get("kernels_used"), used + 1);

    // Kernels that later runs compile are stored too: after the second run and, for runs in between, at the end.
    let file = std::fs::read_dir(double.dir.join("kernels")).unwrap().map(|entry| entry.unwrap().path());
    let newest = file.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap();
    let kept = || std::fs::read_to_string(&newest).unwrap();
    let mut run_with = |late: i64| {
        double.set("late_kernels", late);
        run(&mut *session, 2).unwrap();
        kept()
    };
    let found = [run_with(1), run_with(2), run_with(3)];
    assert_eq!(found, [1, 2, 2].map(|late| format!("kernels of the test double {late}")));
    drop(session);
    assert_eq!(kept(), "kernels of the test double 3");
    double.set("late_kernels", 0);
}

#[test]
fn options_reach_the_library() {
    let (_guard, double, provider) = provider();
    let payload = payload_of(&description(), PLAN);
    let with =
        |spec: BuildSpec| provider.load(&payload, &spec, &NoHost)?.session(&Source::new(0.3, -0.2), &NoHost);
    double.set("cuda_graph", 0);
    let options = [("cuda-graph".to_string(), "on".to_string())].into();
    with(BuildSpec { options, ..spec(GPU) }).unwrap();
    assert_eq!(double.get("cuda_graph"), 1);
    let within = |bytes| with(BuildSpec { vram_budget: Some(bytes), ..spec(GPU) });
    double.set("streamable", 1000);
    within(600).unwrap();
    assert_eq!(double.get("budget"), 600);
    within(5_000_000_000).unwrap();
    assert_eq!(double.get("budget"), 1000);
    double.set("streamable", 0);
    let error = failure(within(600));
    assert!(error.message.contains("was built without"), "{error}");
}

#[test]
fn gpus_are_listed_and_chosen() {
    let (_guard, double, provider) = provider();
    double.set("gpus", 2);
    let devices = provider.devices().unwrap();
    let ids: Vec<&str> = devices.iter().map(|d| d.id.as_str()).collect();
    assert_eq!(ids[..3], ["0000:01:00.0", "0000:02:00.0", "portable"]);
    assert_eq!((&*devices[1].name, &*devices[1].class), ("Test GPU 1", "sm89"));
    assert_eq!((devices[0].memory_bytes, &devices[0].absent), (Some(8 << 30), &None));
    let source = Source::new(0.3, -0.2);
    let engine = provider.load(&payload_of(&description(), PLAN), &spec("0000:02:00.0"), &NoHost).unwrap();
    let mut session = engine.session(&source, &NoHost).unwrap();
    assert_eq!(run(&mut *session, 2).unwrap(), expected(&source, 2));
    assert_eq!(double.get("current"), 2);
    drop(session);

    // Engines for other GPUs, and build targets without hardware.
    double.set("capability", 120);
    let verdict = provider.check(&description().info.compatibility, GPU).unwrap();
    assert!(
        matches!(verdict, Compatibility::Unsupported(why) if why.contains("built for sm89, this device is sm120"))
    );
    let portable = description().info.compatibility.replace("sm89", "portable");
    assert!(matches!(provider.check(&portable, GPU).unwrap(), Compatibility::PreferRecompile(_)));
    double.set("capability", 90);
    assert_eq!(provider.check(&portable, GPU).unwrap(), Compatibility::Optimal);
    let engine = provider.load(&payload_of(&description(), PLAN), &spec("sm89"), &NoHost).unwrap();
    let error = failure(engine.session(&source, &NoHost));
    assert!(error.message.contains("sm89 is not a GPU of this machine"), "{error}");
}

#[test]
fn other_libraries_are_refused_before_they_are_used() {
    let (_guard, double) = Double::lock();
    let dir = tempfile::tempdir().unwrap();
    for (version, words) in [("110400", "is TensorRT 11.4;"), ("10601", "is TensorRT-RTX 1.6;")] {
        let file = double::compile(
            dir.path(),
            &format!("lib{version}.so"),
            &[&format!("-DDOUBLE_VERSION={version}")],
        );
        let error = Library::load(&file).err().unwrap();
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        assert!(error.message.contains(words) && error.message.contains("1.7"), "{error}");
    }
    // A file that is not a library, half of one, and one without the functions.
    let whole = std::fs::read(&double.library).unwrap();
    for (name, bytes, words) in [
        ("half.so", &whole[..whole.len() / 2], "truncated"),
        ("text.so", &[b'x'; 9000][..], "no ELF library"),
        ("small.so", b"", "only 0 bytes"),
    ] {
        let file = dir.path().join(name);
        std::fs::write(&file, bytes).unwrap();
        let error = Library::load(&file).err().unwrap();
        assert!(error.message.contains(words), "{error}");
    }
}

/// Weights declared identical must not be refitted with others, so weights are marked one by one.
#[test]
fn the_builder_promises_nothing_about_weights() {
    let shim = include_str!("../../shim/build.cpp");
    let code: Vec<&str> = shim.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let uses = |flag: &str| code.iter().filter(|line| line.contains(flag)).count();
    assert_eq!(
        (uses("setFlag(BuilderFlag::kSTRIP_PLAN)"), uses("setFlag(BuilderFlag::kREFIT_INDIVIDUAL)")),
        (1, 1)
    );
    assert_eq!(
        (uses("setFlag(BuilderFlag::kREFIT_IDENTICAL)"), uses("setFlag(BuilderFlag::kREFIT)")),
        (0, 0)
    );
    assert_eq!(uses("getFlag(BuilderFlag::kREFIT_IDENTICAL)"), 1, "the shim asks the library itself");
}
