//! Checks of what a provider does, beside computing: engines without weights, refits, adapters, shapes, device tensors, cancelling,
//! budgets and a process that dies.

use crate::rig::{CANCEL_LIMIT, Problem, Rig, Synthetic};
use sdrun::{
    BuildOptions, DeviceTensors, Session, Tensors,
    abi::{CancelSupport, ErrorCode, NoHost, WeightSource, WeightUpdate},
    inputs,
    verify::{self, Tolerance},
};
use sdrun_diffusion::{
    demo,
    pipeline::{Files, Parts},
};
use std::{
    thread,
    time::{Duration, Instant},
};

/// A check; returns what it found.
type Run = fn(&mut Rig<'_>) -> Result<String, Problem>;

/// The checks, in this order.
pub(crate) const ALL: [(&str, Run); 8] = [
    ("engine without weights, saved and loaded", engine_file),
    ("refit A, B, A", refit),
    ("LoRA at strength 0", lora),
    ("several shapes in one engine", shapes),
    ("tensors that stay on the device", device_tensors),
    ("cancelling a run", cancel),
    ("budget of device memory", budget),
    ("a process that dies", killed),
];

fn wrong<T>(why: impl Into<String>) -> Result<T, Problem> {
    Err(Problem::Wrong(why.into()))
}

/// An engine of a network, with seeded inputs.
struct Ready {
    network: Synthetic,
    options: BuildOptions,
    inputs: Tensors,
}

impl Ready {
    fn new(rig: &Rig<'_>, model: &str, input: &str, shape: &[usize]) -> Result<Self, Problem> {
        let network = rig.synthetic(model)?;
        let options = rig.options(rig.precision()?).shape(input, shape);
        let inputs = inputs::seeded(&network.model, &network.model.bound(&options.shapes)?, 0)?;
        rig.has_room(&network, &options)?;
        Ok(Ready { network, options, inputs })
    }

    fn session(&self, rig: &mut Rig<'_>, weights: &dyn WeightSource) -> Result<Session, Problem> {
        let provider = rig.provider()?;
        let engine = provider.build_with(&self.network.model, weights, &self.options, rig.host())?;
        Ok(engine.session(weights, rig.host())?)
    }

    fn run(&self, rig: &Rig<'_>, session: &mut Session) -> Result<Tensors, Problem> {
        Ok(session.run(&self.inputs, rig.host())?)
    }
}

fn text_encoder(rig: &Rig<'_>) -> Result<Ready, Problem> {
    Ready::new(rig, "sd15/text-encoder", "input_ids", &[1, 77])
}

fn decoder(rig: &Rig<'_>, side: usize) -> Result<Ready, Problem> {
    Ready::new(rig, "sd15/vae-decoder", "latent_sample", &[1, 4, side, side])
}

fn engine_file(rig: &mut Rig<'_>) -> Result<String, Problem> {
    let ready = text_encoder(rig)?;
    let provider = rig.provider()?;
    let engine =
        provider.build_with(&ready.network.model, &ready.network.weights, &ready.options, rig.host())?;
    let folder = rig.folder()?;
    let file = folder.path().join("selftest.sdengine");
    let bytes = engine.save(&file)?;
    let expected = engine.session(&ready.network.weights, rig.host())?.run(&ready.inputs, rig.host())?;
    drop((engine, provider));
    let weights = ready.network.bytes();
    if bytes > weights / 4 {
        return wrong(format!(
            "the engine has {bytes} bytes and the weights {weights}: it seems to hold them"
        ));
    }
    // Another process loads it.
    let provider = rig.restart()?;
    let engine = provider.load(&file, &ready.options.device, ready.options.threads, rig.host())?;
    let found = engine.session(&ready.network.weights, rig.host())?.run(&ready.inputs, rig.host())?;
    if found != expected {
        return wrong("the loaded engine computes other bits than the one that was built");
    }
    Ok(format!(
        "{} kB for {} MB of weights; the same bits in another process",
        bytes / 1000,
        weights / 1_000_000
    ))
}

fn refit(rig: &mut Rig<'_>) -> Result<String, Problem> {
    let ready = decoder(rig, 8)?;
    let (a, b) = (&ready.network.weights, &ready.network.other_weights());
    let mut session = ready.session(rig, a)?;
    let with_a = ready.run(rig, &mut session)?;
    let started = Instant::now();
    let report = session.refit(b, rig.host())?;
    let seconds = started.elapsed().as_secs_f64();
    let with_b = ready.run(rig, &mut session)?;
    let fresh = ready.session(rig, b)?.run(&ready.inputs, rig.host())?;
    if with_b == with_a {
        return wrong("other weights change nothing");
    }
    close(rig, &with_b, &fresh, "after the refit, and in a session that began with the same weights")?;
    session.refit(a, rig.host())?;
    if ready.run(rig, &mut session)? != with_a {
        return wrong("back at the first weights, the bits differ");
    }
    let how = match report.method {
        WeightUpdate::InPlace => "in the session",
        WeightUpdate::OnLoad => "by loading the engine again",
        WeightUpdate::AsInputs => "as inputs",
        WeightUpdate::Rebuild => "by building the engine again",
    };
    Ok(format!(
        "the same bits again; {} tensors, {} MB in {seconds:.2} s, {how}",
        report.tensors,
        report.bytes / 1_000_000
    ))
}

/// Fails if two results differ by more than the precision allows.
fn close(rig: &Rig<'_>, found: &Tensors, expected: &Tensors, what: &str) -> Result<(), Problem> {
    let tolerance = Tolerance::for_outputs(rig.precision()?, expected);
    let compared = verify::compare(found, expected)?;
    match compared.iter().find(|one| !tolerance.accepts(one)) {
        None => Ok(()),
        Some(one) => wrong(format!(
            "outputs differ {what}: cosine {:.6}, relative error {:.2e}",
            one.cosine, one.relative_error
        )),
    }
}

fn lora(rig: &mut Rig<'_>) -> Result<String, Problem> {
    let paths = rig.registry.paths();
    let files = Files { model: demo::find(demo::NAME, paths)?, ..Files::default() };
    let parts = Parts::open(&files, paths, rig.host()).map_err(|e| Problem::Wrong(e.to_string()))?;
    let part = parts.denoiser;
    let Some(adapter) = demo::find("demo/outline", paths)? else { return wrong("there is no demo LoRA") };
    let weights = |strength: Option<f32>| {
        let files = part.weights.clone();
        let files = match strength {
            Some(strength) => files.adapter(&adapter, strength),
            None => files,
        };
        files.of_model(&part.model, paths, &NoHost)
    };
    let base = weights(None)?.stack;
    let options = rig.options(rig.precision()?);
    let given = inputs::seeded(&part.model, &part.model.bound(&options.shapes)?, 0)?;
    let engine = rig.provider()?.build_with(&part.model, &base, &options, rig.host())?;
    let mut session = engine.session(&base, rig.host())?;
    let plain = session.run(&given, rig.host())?;
    session.refit(&weights(Some(1.0))?.stack, rig.host())?;
    if session.run(&given, rig.host())? == plain {
        return wrong("at strength 1 it changes nothing");
    }
    session.refit(&weights(Some(0.0))?.stack, rig.host())?;
    if session.run(&given, rig.host())? != plain {
        return wrong("at strength 0 the bits differ from those without it");
    }
    Ok("the same bits as without it, and others at strength 1".into())
}

fn shapes(rig: &mut Rig<'_>) -> Result<String, Problem> {
    const SIZES: [[usize; 2]; 3] = [[8, 8], [16, 12], [8, 24]];
    if !rig.capabilities.dynamic_shapes {
        return Err(Problem::NotOffered("each size needs its own engine".into()));
    }
    let exact: Vec<Ready> = SIZES
        .iter()
        .map(|[height, width]| Ready::new(rig, "sd15/vae-decoder", "latent_sample", &[1, 4, *height, *width]))
        .collect::<Result<_, _>>()?;
    let mut options = rig.options(rig.precision()?);
    let list = SIZES.iter().map(|[height, width]| vec![1, 4, *height, *width]).collect();
    options.open_shapes.insert("latent_sample".into(), list);
    let network = &exact[0].network;
    let engine = rig.provider()?.build_with(&network.model, &network.weights, &options, rig.host())?;
    let mut session = engine.session(&network.weights, rig.host())?;
    let mut found = Vec::new();
    for ready in exact.iter().chain(&exact[..1]) {
        found.push(session.run(&ready.inputs, rig.host())?);
    }
    if found.last() != found.first() {
        return wrong("back at the first size, the bits differ");
    }
    for (ready, found) in exact.iter().zip(&found) {
        let alone = ready.session(rig, &ready.network.weights)?.run(&ready.inputs, rig.host())?;
        close(rig, found, &alone, "from those of an engine for this size alone")?;
    }
    Ok(format!("{} sizes agree with engines for one size each", SIZES.len()))
}

fn device_tensors(rig: &mut Rig<'_>) -> Result<String, Problem> {
    if !rig.capabilities.device_tensors {
        return Err(Problem::NotOffered("outputs always come back to main memory".into()));
    }
    let encoder = Ready::new(rig, "taef2/encoder", "image", &[1, 3, 64, 96])?;
    let decoder = Ready::new(rig, "taef2/decoder", "latent", &[1, 32, 8, 12])?;
    let mut encode = encoder.session(rig, &encoder.network.weights)?;
    let mut decode = decoder.session(rig, &decoder.network.weights)?;
    let latent = encoder.run(rig, &mut encode)?;
    let picture = decode.run(&latent, rig.host())?;
    let (_, kept) = encode.run_on_device(&encoder.inputs, &DeviceTensors::new(), &["latent"], rig.host())?;
    let (found, _) = decode.run_on_device(&Tensors::new(), &kept, &[], rig.host())?;
    match found == picture {
        true => Ok("from an encoder to a decoder, with the same bits as over main memory".into()),
        false => wrong("a decoder computes other bits from a tensor that stayed on the device"),
    }
}

/// How a run ended that was disturbed after a while, and how long it went on then.
fn disturbed(
    session: &mut Session,
    inputs: &Tensors,
    rig: &Rig<'_>,
    after: Duration,
    disturb: impl FnOnce() + Send,
) -> (sdrun::Result<Tensors>, f64) {
    thread::scope(|scope| {
        let disturbing = scope.spawn(move || {
            thread::sleep(after);
            disturb();
            Instant::now()
        });
        let ended = session.run(inputs, rig.host());
        let seconds = disturbing.join().map_or(0.0, |since| since.elapsed().as_secs_f64());
        (ended, seconds)
    })
}

/// A network whose run takes a while, its session and outputs, and a moment in the middle of a run.
fn in_the_middle(rig: &mut Rig<'_>) -> Result<(Ready, Session, Tensors, Duration), Problem> {
    let ready = decoder(rig, 16)?;
    let mut session = ready.session(rig, &ready.network.weights)?;
    let expected = ready.run(rig, &mut session)?;
    let started = Instant::now();
    ready.run(rig, &mut session)?;
    Ok((ready, session, expected, started.elapsed() / 3))
}

fn cancel(rig: &mut Rig<'_>) -> Result<String, Problem> {
    let (ready, mut session, expected, moment) = in_the_middle(rig)?;
    let (ended, seconds) =
        disturbed(&mut session, &ready.inputs, rig, moment, || rig.listener.set_cancel(true));
    rig.listener.set_cancel(false);
    let was_killed = rig.has_ended();
    let detail = match ended {
        Err(error) if error.code() != ErrorCode::Cancelled => return Err(error.into()),
        Err(_) if was_killed && rig.capabilities.cancel != CancelSupport::None => {
            return wrong(format!("it did not stop within {CANCEL_LIMIT:?} and was killed"));
        }
        Err(_) if was_killed => format!("stopped by killing the process, {seconds:.2} s later"),
        Err(_) => format!("stopped {seconds:.2} s later"),
        Ok(_) if rig.capabilities.cancel == CancelSupport::Prompt && seconds > 2.0 => {
            return wrong(format!("it went on for {seconds:.2} s and finished"));
        }
        Ok(_) => format!("it finished {seconds:.2} s later"),
    };
    drop(session);
    let mut session = ready.session(rig, &ready.network.weights)?;
    match ready.run(rig, &mut session)? == expected {
        true => Ok(format!("{detail}; then the same bits as before")),
        false => wrong(format!("{detail}; then other bits than before")),
    }
}

fn budget(rig: &mut Rig<'_>) -> Result<String, Problem> {
    if !rig.capabilities.streaming {
        return Err(Problem::NotOffered("all weights of a network have to fit".into()));
    }
    let mut ready = text_encoder(rig)?;
    let expected = ready.session(rig, &ready.network.weights)?.run(&ready.inputs, rig.host())?;
    let budget = ready.network.bytes() / 2;
    ready.options.vram_budget = Some(budget);
    let mut session = ready.session(rig, &ready.network.weights)?;
    let found = ready.run(rig, &mut session)?;
    close(rig, &found, &expected, "with and without a budget")?;
    let used = session
        .memory()?
        .device
        .map_or("an unknown amount".into(), |bytes| format!("{} MB", bytes / 1_000_000));
    Ok(format!(
        "the same result with {} of {} MB of weights on the device; {used} in use",
        budget / 1_000_000,
        budget / 500_000
    ))
}

fn killed(rig: &mut Rig<'_>) -> Result<String, Problem> {
    let (ready, mut session, expected, moment) = in_the_middle(rig)?;
    let provider = rig.provider()?;
    let kill = || {
        if let Some(worker) = provider.worker() {
            worker.kill();
        }
    };
    let (ended, _) = disturbed(&mut session, &ready.inputs, rig, moment, kill);
    // A quick device may have finished before.
    let ended = ended.and_then(|_| session.run(&ready.inputs, rig.host()));
    match ended {
        Ok(_) => return wrong("it still runs after its process was killed"),
        Err(error) if [ErrorCode::Unavailable, ErrorCode::FailedPrecondition].contains(&error.code()) => {}
        Err(error) => return Err(error.into()),
    }
    drop(session);
    let mut session = ready.session(rig, &ready.network.weights)?;
    match ready.run(rig, &mut session)? == expected {
        true => Ok("one error, and the same bits in a new process".into()),
        false => wrong("a new process computes other bits"),
    }
}
