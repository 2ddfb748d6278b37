//! Sessions: weights, refit, runs, cancelling, threads.

use super::{
    Subject, Verdict,
    fixture::{self, Canceller, NanSink, SLOW, Weights},
    require,
    subject::Ready,
};
use sdrun::{
    BuildOptions, CachePolicy, Discovery, HostTensor, Isolation, Model, Registry, Tensors, graph::Tensor,
    weights::InMemoryWeights,
};
use sdrun_abi::{
    AlignedBuffer, CancelSupport, DType, DeviceTensor, ErrorCode, Host, Input, Manifest, NoHost, Provider,
    Session, TensorView, WeightUpdate,
};
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

pub(super) fn a_missing_weight_is_named(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let engine = ready.build()?;
    for name in ["w", "b"] {
        let Err(error) = engine.session(&ready.fixture.weights(0).without(name), &NoHost) else {
            return Err(format!("it creates a session without the weight {name:?}"));
        };
        let named =
            error.message.contains(&format!("{name:?}")) || error.message.contains(&format!("`{name}`"));
        require!(named, "the message does not name the weight {name:?}: {error}");
    }
    ready.fixture.check(engine.as_ref(), &ready.fixture.weights(0))
}

pub(super) fn weights_may_lie_in_files(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let engine = ready.build()?;
    for set in [0, 1] {
        let weights = ready.fixture.weights(set).in_files(subject.scratch.path())?;
        ready.fixture.check(engine.as_ref(), &weights)?;
    }
    Ok(())
}

pub(super) fn refit_is_exact(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let fixture = &ready.fixture;
    let engine = ready.build()?;
    let mut session = engine.session(&fixture.weights(0), &NoHost).map_err(|e| format!("session: {e}"))?;
    for set in [0, 1, 0, 2, 0] {
        let weights = fixture.weights(set);
        let report = session.refit(&["w", "b"], &weights, &NoHost).map_err(|e| format!("refit: {e}"))?;
        fixture
            .check_session(session.as_mut(), &weights)
            .map_err(|why| format!("with weights {set}: {why}"))?;
        require!(report.tensors > 0 && report.bytes > 0, "it reports a refit of nothing: {report:?}");
        let declared = ready.capabilities.weight_update;
        require!(
            report.method == declared || declared == WeightUpdate::Rebuild,
            "it declares {declared:?} and reports {:?}",
            report.method
        );
    }
    let mut mixed = fixture.weights(0);
    mixed.take("b", &fixture.weights(1));
    session.refit(&["b"], &mixed, &NoHost).map_err(|e| format!("refit of one weight: {e}"))?;
    fixture
        .check_session(session.as_mut(), &mixed)
        .map_err(|why| format!("after a refit of one weight: {why}"))
}

pub(super) fn a_failed_refit_changes_nothing(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let fixture = &ready.fixture;
    let engine = ready.build()?;
    let before = fixture.weights(0);
    let mut session = engine.session(&before, &NoHost).map_err(|e| format!("session: {e}"))?;
    for name in ["w", "b"] {
        let failed = session.refit(&["w", "b"], &fixture.weights(1).without(name), &NoHost);
        require!(failed.is_err(), "a refit without the weight {name:?} succeeds");
        fixture
            .check_session(session.as_mut(), &before)
            .map_err(|why| format!("after a failed refit: {why}"))?;
    }
    session
        .refit(&["w", "b"], &fixture.weights(1), &NoHost)
        .map_err(|e| format!("refit after a failed one: {e}"))?;
    fixture.check_session(session.as_mut(), &fixture.weights(1))
}

pub(super) fn every_output_is_filled(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let engine = ready.build()?;
    let weights = ready.fixture.weights(0);
    let mut session = engine.session(&weights, &NoHost).map_err(|e| format!("session: {e}"))?;
    // The buffers hold NaN before each run and differ in each run.
    for _ in 0..3 {
        ready.fixture.check_session(session.as_mut(), &weights)?;
    }
    Ok(())
}

pub(super) fn the_host_refuses_wrong_inputs(subject: &Subject) -> Verdict {
    let fixture = super::fixture::Fixture::new(subject.scratch.path())?;
    let text = |e: sdrun::Error| e.to_string();
    let manifest = subject.dir.join(Manifest::file_name(&subject.provide.id));
    let discovery = Discovery { provider_paths: vec![manifest], ..Discovery::default() };
    let provider = Registry::discover_with(&discovery).map_err(text)?;
    let provider = provider.open(&subject.provide.id, &Isolation::default()).map_err(text)?;
    let model = Model::open(&fixture.path).map_err(text)?;
    let mut options = BuildOptions::new(provider.device(None).map_err(text)?);
    options.cache = CachePolicy::Off;
    let engine = provider.build(&model, &options, &NoHost).map_err(text)?;
    let mut session = engine.session(&model.weights(), &NoHost).map_err(text)?;
    let good = |name: &str| {
        let view = fixture.inputs()[usize::from(name == "r")];
        HostTensor::from_bytes(view.dtype, view.shape.to_vec(), view.data).map_err(text)
    };
    let wrong_type = HostTensor::zeros(DType::I64, vec![2, 4]).map_err(text)?;
    let wrong_shape = HostTensor::zeros(DType::F32, vec![4, 2]).map_err(text)?;
    for (what, x) in [("type", Some(wrong_type)), ("shape", Some(wrong_shape)), ("number", None)] {
        let mut inputs = Tensors::from([("r".to_string(), good("r")?)]);
        inputs.extend(x.map(|x| ("x".to_string(), x)));
        match session.run(&inputs, &NoHost) {
            Ok(_) => return Err(format!("an input of the wrong {what} is accepted")),
            Err(e) => require!(e.code() == ErrorCode::InvalidArgument, "wrong {what}: {:?}: {e}", e.code()),
        }
    }
    let inputs = Tensors::from([("x".to_string(), good("x")?), ("r".to_string(), good("r")?)]);
    session.run(&inputs, &NoHost).map(drop).map_err(text)
}

/// Judges the result of a cancelled call. A provider that was told returns `Cancelled`. One that never asked may finish, unless the
/// call `must_ask`.
fn judge_cancel(
    what: &str,
    outcome: Result<(), sdrun_abi::Error>,
    host: &Canceller,
    must_ask: bool,
) -> Verdict {
    let (told, polled) = (host.told.load(Relaxed), host.polled.load(Relaxed));
    match outcome {
        Err(e) if e.code == ErrorCode::Cancelled => Ok(()),
        Err(e) => Err(format!("a cancelled {what} fails with {:?} and not with Cancelled: {e}", e.code)),
        Ok(()) if told + polled > 0 => Err(format!(
            "a {what} finished although its host cancelled: {told} progress reports and {polled} polls told it so"
        )),
        Ok(()) if must_ask => {
            Err(format!("a {what} neither reports progress nor polls, so it cannot be cancelled"))
        }
        Ok(()) => Ok(()),
    }
}

pub(super) fn cancelling_a_build_works_as_declared(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let host = Canceller::default();
    let built = ready.plugin.build(&ready.fixture.bytes, &ready.spec(), &ready.fixture.weights(0), &host);
    judge_cancel("build", built.map(drop), &host, ready.capabilities.cancel != CancelSupport::None)?;
    ready.fixture.check(ready.build()?.as_ref(), &ready.fixture.weights(0))
}

pub(super) fn cancelling_a_run_works_as_declared(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let engine = ready.build()?;
    let weights = ready.fixture.weights(0);
    let mut session = engine.session(&weights, &NoHost).map_err(|e| format!("session: {e}"))?;
    let host = Canceller::default();
    let run = ready.fixture.run(session.as_mut(), &host);
    // A provider that polls from another thread may be too late for a short run.
    judge_cancel("run", run.map(drop), &host, false)?;
    ready
        .fixture
        .check_session(session.as_mut(), &weights)
        .map_err(|why| format!("after a cancelled run: {why}"))?;
    if ready.capabilities.cancel == CancelSupport::Prompt {
        cancels_a_long_run(subject, &ready)
    } else {
        Ok(())
    }
}

/// `Prompt` means within about a second: a longer run must not finish after a cancel.
fn cancels_a_long_run(subject: &Subject, ready: &Ready) -> Verdict {
    let bytes = fixture::prepare(&fixture::slow(), &subject.scratch.path().join("slow.onnx"))?;
    let identity =
        Tensor::new(DType::F32, vec![SLOW, SLOW], fixture::identity()).map_err(|e| e.to_string())?;
    let weights = InMemoryWeights([("w".to_string(), identity)].into());
    let x: Vec<u8> = (0..SLOW * SLOW).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let x = AlignedBuffer::copy_of(&x).map_err(|e| e.to_string())?;
    let input = [TensorView { dtype: DType::F32, shape: &[SLOW, SLOW], data: &x }];
    let text = |e: sdrun_abi::Error| format!("the slow model: {e}");
    let engine = ready.plugin.build(&bytes, &ready.spec(), &weights, &NoHost).map_err(text)?;
    let mut session = engine.session(&weights, &NoHost).map_err(text)?;
    let mut run = |host: &dyn Host| -> Result<bool, sdrun_abi::Error> {
        let mut sink = NanSink::default();
        session.run(&input, &mut sink, host)?;
        Ok(sink.buffers.len() == 1 && sink.buffers[0][..] == x[..])
    };
    let started = Instant::now();
    require!(run(&NoHost).map_err(text)?, "a product with the identity gives other values");
    if started.elapsed() > Duration::from_secs(1) {
        let host = Canceller::default();
        judge_cancel("run", run(&host).map(drop), &host, true)?;
        require!(run(&NoHost).map_err(text)?, "after a cancelled run the results are wrong");
    }
    Ok(())
}

pub(super) fn unknown_memory_is_not_zero(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let engine = ready.build()?;
    let weights = ready.fixture.weights(0);
    let mut session = engine.session(&weights, &NoHost).map_err(|e| format!("session: {e}"))?;
    ready.fixture.check_session(session.as_mut(), &weights)?;
    let memory = session.memory().map_err(|e| format!("memory: {e}"))?;
    let figures = [memory.weights, memory.activations, memory.device];
    require!(!figures.contains(&Some(0)), "a session that has run uses memory, but it reports {memory:?}");
    Ok(())
}

pub(super) fn calls_come_from_any_thread(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let engine = ready.build()?;
    // Several threads create and run sessions at once. Each session then moves to another thread.
    let make = |set: usize| -> Result<(Box<dyn Session>, Weights), String> {
        let weights = ready.fixture.weights(set);
        let session = engine.session(&weights, &NoHost).map_err(|e| format!("session: {e}"))?;
        Ok((session, weights))
    };
    let made = on_threads((0..4).collect(), make)?;
    on_threads(made, |(mut session, weights)| {
        (0..10).try_for_each(|_| ready.fixture.check_session(session.as_mut(), &weights))
    })
    .map(drop)
}

/// Runs `work` on all items in parallel, each on its own thread.
fn on_threads<T: Send, R: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> Result<R, String> + Sync,
) -> Result<Vec<R>, String> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    })
}

pub(super) fn a_session_outlives_its_engine(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let engine = ready.build()?;
    let weights = ready.fixture.weights(0);
    let mut session = engine.session(&weights, &NoHost).map_err(|e| format!("session: {e}"))?;
    drop(engine);
    ready.fixture.check_session(session.as_mut(), &weights)?;
    session.refit(&["w", "b"], &ready.fixture.weights(1), &NoHost).map_err(|e| format!("refit: {e}"))?;
    ready.fixture.check_session(session.as_mut(), &ready.fixture.weights(1))
}

pub(super) fn tensors_stay_on_the_device(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let fixture = &ready.fixture;
    let engine = ready.build()?;
    let weights = fixture.weights(0);
    let make = || engine.session(&weights, &NoHost).map_err(|e| format!("session: {e}"));
    let (mut one, mut other) = (make()?, make()?);
    let [x, r] = fixture.inputs();
    let mut sink = NanSink::default();
    let kept =
        one.run_on_device(&[Input::Host(x), Input::Host(r)], &[true, false, false], &mut sink, &NoHost);
    if !ready.capabilities.device_tensors {
        let refused = kept.as_ref().err().map(|e| e.code);
        require!(
            refused == Some(ErrorCode::Unimplemented),
            "it declares no device tensors but returns {kept:?}"
        );
        return fixture.check_session(one.as_mut(), &weights);
    }
    let kept = kept.map_err(|e| format!("run on the device: {e}"))?;
    require!(kept.len() == 1 && sink.buffers.len() == 2, "one of three outputs should stay on the device");
    let y = kept[0].as_ref();
    let bytes = read(y)?;
    let [want, t, c] = fixture.expected(&weights);
    require!(
        fixture::floats(&bytes) == want,
        "the output that stays holds {:?}, not {want:?}",
        fixture::floats(&bytes)
    );
    let brought: Vec<_> = sink.buffers.iter().map(|b| fixture::floats(b)).collect();
    require!(brought == [t, c], "the outputs that do not stay are {brought:?}");
    // As an input, it must give the same results as its bytes, in another session and in its own.
    let in_memory = AlignedBuffer::copy_of(&bytes).map_err(|e| e.to_string())?;
    let from_memory = Input::Host(TensorView { data: &in_memory, ..r });
    for session in [&mut other, &mut one] {
        let mut outputs = Vec::new();
        for input in [from_memory, Input::Device(y)] {
            let mut sink = NanSink::default();
            session
                .run_on_device(&[Input::Host(x), input], &[false; 3], &mut sink, &NoHost)
                .map_err(|e| format!("run with a tensor on the device: {e}"))?;
            outputs.push(sink.buffers.iter().map(|b| b.to_vec()).collect::<Vec<_>>());
        }
        require!(outputs[0] == outputs[1], "a tensor on the device gives other outputs than its bytes");
    }
    // Later calls must not change it.
    one.refit(&["w", "b"], &fixture.weights(1), &NoHost).map_err(|e| format!("refit: {e}"))?;
    fixture.check_session(one.as_mut(), &fixture.weights(1))?;
    require!(read(y)? == bytes, "a later run changes a tensor that an earlier one left on the device");
    drop((one, other, engine));
    require!(read(y)? == bytes, "the end of a session changes a tensor it has left on the device");
    Ok(())
}

fn read(tensor: &dyn DeviceTensor) -> Result<Vec<u8>, String> {
    let spec = tensor.spec();
    let length = spec.dtype.bytes_of(&spec.shape).ok_or("a tensor on the device is too large")?;
    let mut bytes = vec![0xff; length];
    tensor.read(&mut bytes).map_err(|e| format!("read: {e}"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::Error;

    #[test]
    fn a_call_that_ignores_its_host_is_judged() {
        let host = |told: usize, polled: usize| Canceller { told: told.into(), polled: polled.into() };
        let cancelled = || Err(Error::new(ErrorCode::Cancelled, "stopped"));
        assert!(judge_cancel("run", cancelled(), &host(0, 1), true).is_ok());
        assert!(judge_cancel("run", Err(Error::internal("broken")), &host(0, 1), false).is_err());
        for (told, polled, must_ask, right) in
            [(1, 0, false, false), (0, 1, false, false), (0, 0, true, false), (0, 0, false, true)]
        {
            let verdict = judge_cancel("run", Ok(()), &host(told, polled), must_ask);
            assert_eq!(verdict.is_ok(), right, "{told} {polled} {must_ask}");
        }
    }
}
