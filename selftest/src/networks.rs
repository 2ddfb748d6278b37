//! Built-in networks at two sizes in every precision, against stored outputs.

use crate::{
    Network, State,
    references::{self, Expected},
    rig::{Problem, Rig, Synthetic},
};
use sdrun::{
    BuildOptions, Session, Shapes, Tensors,
    abi::{OpenShapes, Precision, TimingPlan},
    inputs,
    verify::{Comparison, Tolerance},
};
use std::time::{Duration, Instant};

/// A built-in network and the sizes to check it at: for each, the shapes of the inputs that are not as in benchmarks.
pub(crate) struct Case {
    pub(crate) model: &'static str,
    pub(crate) sizes: [&'static [(&'static str, &'static [usize])]; 2],
    /// A precision that its synthetic weights do not allow, and why.
    pub(crate) without: Option<(Precision, &'static str)>,
}

const fn case(model: &'static str, sizes: [&'static [(&'static str, &'static [usize])]; 2]) -> Case {
    Case { model, sizes, without: None }
}

/// One network of each kind that diffusion models have, the quick ones first. Those of Flux, SD 3 and T5 have all the width and few of
/// the layers.
pub(crate) const CASES: [Case; 11] = [
    case("mobilenet-v2", [&[("input", &[1, 3, 224, 224])], &[("input", &[2, 3, 224, 224])]]),
    case("taesd/decoder", [&[("latent_sample", &[1, 4, 8, 8])], &[("latent_sample", &[2, 4, 16, 24])]]),
    case("sd15/text-encoder", [&[("input_ids", &[1, 77])], &[("input_ids", &[2, 77])]]),
    case("sd15/vae-decoder", [&[("latent_sample", &[1, 4, 8, 8])], &[("latent_sample", &[1, 4, 16, 12])]]),
    case("sd15/vae-encoder", [&[("sample", &[1, 3, 64, 64])], &[("sample", &[1, 3, 128, 96])]]),
    case("esrgan/x4-6-blocks", [&[("image", &[1, 3, 32, 32])], &[("image", &[1, 3, 24, 48])]]),
    case(
        "sd3/medium-4-layers",
        [
            &[("hidden_states", &[1, 16, 16, 16]), ("encoder_hidden_states", &[1, 40, 4096])],
            &[("hidden_states", &[1, 16, 32, 24]), ("encoder_hidden_states", &[1, 77, 4096])],
        ],
    ),
    case(
        "sd15/controlnet",
        [
            &[("sample", &[1, 4, 8, 8]), ("controlnet_cond", &[1, 3, 64, 64])],
            &[("sample", &[1, 4, 16, 8]), ("controlnet_cond", &[1, 3, 128, 64])],
        ],
    ),
    Case {
        without: Some((
            Precision::Q4K,
            "T5 does not scale the input of its softmax, so with untrained weights rounding to 4 bits changes what it attends to",
        )),
        ..case("t5-xxl-2-layers", [&[("input_ids", &[1, 16])], &[("input_ids", &[1, 77])]])
    },
    case("sd15/unet", [&[("sample", &[1, 4, 8, 8])], &[("sample", &[1, 4, 16, 8])]]),
    case(
        "flux/dev-2x2-layers",
        [
            &[
                ("hidden_states", &[1, 16, 64]),
                ("img_ids", &[16, 3]),
                ("encoder_hidden_states", &[1, 16, 4096]),
                ("txt_ids", &[16, 3]),
            ],
            &[
                ("hidden_states", &[1, 64, 64]),
                ("img_ids", &[64, 3]),
                ("encoder_hidden_states", &[1, 32, 4096]),
                ("txt_ids", &[32, 3]),
            ],
        ],
    ),
];

impl Case {
    /// The shapes of its sizes.
    pub(crate) fn shapes(&self) -> [Shapes; 2] {
        self.sizes.map(|size| size.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect())
    }
}

/// The limit of runs that are only timed.
const TIMING: TimingPlan =
    TimingPlan { warmup: 0, min_runs: 3, min_time: Duration::ZERO, max_time: Duration::from_secs(20) };

/// Checks a network in one precision at both sizes: with one engine for both where the provider can. Cancelling is an error.
pub(crate) fn check(rig: &mut Rig<'_>, case: &Case, precision: Precision) -> sdrun::Result<Vec<Network>> {
    let sizes = case.shapes();
    let mut rows: Vec<Network> = sizes.iter().map(|shapes| row(case, shapes, precision)).collect();
    let found = try_all(rig, case, &sizes, precision, &mut rows);
    if let Err(problem) = found {
        let (state, reason) = rig.judged(problem)?;
        // What came before the problem stays.
        for row in rows.iter_mut().filter(|row| row.state == State::NotRun) {
            (row.state, row.reason) = (state, Some(reason.clone()));
        }
    }
    Ok(rows)
}

fn row(case: &Case, shapes: &Shapes, precision: Precision) -> Network {
    Network {
        model: case.model.into(),
        shape: case.sizes[0].first().and_then(|(name, _)| shapes.get(*name)).cloned().unwrap_or_default(),
        precision,
        state: State::NotRun,
        reason: None,
        build_seconds: None,
        load_seconds: None,
        first_run_ms: None,
        run_ms: None,
        worst: None,
        peak_bytes: None,
        memory: None,
    }
}

fn try_all(
    rig: &mut Rig<'_>,
    case: &Case,
    sizes: &[Shapes; 2],
    precision: Precision,
    rows: &mut [Network],
) -> Result<(), Problem> {
    if let Some((_, why)) = case.without.filter(|(without, _)| *without == precision) {
        return Err(Problem::NotRun(why.into()));
    }
    let network = rig.synthetic(case.model)?;
    let expected = references::stored(case.model)?;
    let mut session = None;
    for (at, shapes) in sizes.iter().enumerate() {
        rig.time_left()?;
        if session.is_none() || !rig.capabilities.dynamic_shapes {
            // The former one gives its memory back first.
            drop(session.take());
            let mut options = rig.options(precision);
            match rig.capabilities.dynamic_shapes {
                true => options.open_shapes = open(&network, sizes),
                false => options.shapes = shapes.clone(),
            }
            session = Some(load(rig, &network, &options, shapes, &mut rows[at])?);
        }
        let Some(session) = &mut session else { continue };
        run(rig, &network, session, shapes, &expected[at], &mut rows[at])?;
    }
    Ok(())
}

/// The sizes as lists for each input.
fn open(network: &Synthetic, sizes: &[Shapes; 2]) -> OpenShapes {
    let [first, second] = sizes.each_ref().map(|shapes| network.model.shapes(shapes));
    let open = first.into_iter().filter(|(name, shape)| second.get(name) != Some(shape));
    open.map(|(name, shape)| (name.clone(), vec![shape, second[&name].clone()])).collect()
}

fn load(
    rig: &mut Rig<'_>,
    network: &Synthetic,
    options: &BuildOptions,
    shapes: &Shapes,
    row: &mut Network,
) -> Result<Session, Problem> {
    let provider = rig.provider()?;
    let mut one_size = options.clone().shapes(shapes.clone());
    one_size.open_shapes.clear();
    rig.has_room(network, &one_size)?;
    if let Some(worker) = provider.worker() {
        worker.reset_peak_rss();
    }
    let engine = provider.build_with(&network.model, &network.weights, options, rig.host())?;
    row.build_seconds = Some(engine.seconds());
    let session = engine.session(&network.weights, rig.host())?;
    row.load_seconds = Some(session.seconds());
    Ok(session)
}

fn run(
    rig: &mut Rig<'_>,
    network: &Synthetic,
    session: &mut Session,
    shapes: &Shapes,
    expected: &Expected,
    row: &mut Network,
) -> Result<(), Problem> {
    let given = inputs::seeded(&network.model, &network.model.bound(shapes)?, references::SEED)?;
    let started = Instant::now();
    let outputs = session.run(&given, rig.host())?;
    row.first_run_ms = Some(started.elapsed().as_secs_f64() * 1e3);
    let mut times = session.time(&given, &TIMING, rig.host())?;
    times.sort_by(f64::total_cmp);
    row.run_ms = times.get(times.len() / 2).copied();
    row.peak_bytes = rig.provider()?.worker().and_then(|worker| worker.peak_rss());
    row.memory = session.memory().ok();
    let (worst, tolerance) = compare(&outputs, expected, row.precision)?;
    row.state = if tolerance.accepts(&worst) { State::Passed } else { State::Failed };
    row.reason = (row.state == State::Failed).then(|| {
        let Comparison { output, relative_error, cosine, .. } = &worst;
        format!("output {output:?} is wrong: relative error {relative_error:.2e}, cosine {cosine:.6}")
    });
    row.worst = Some(worst);
    Ok(())
}

/// The worst output, and what is allowed.
fn compare(
    outputs: &Tensors,
    expected: &Expected,
    precision: Precision,
) -> Result<(Comparison, Tolerance), Problem> {
    let worst = expected
        .compare(outputs)?
        .into_iter()
        .min_by(|a, b| a.cosine.total_cmp(&b.cosine))
        .ok_or_else(|| Problem::Wrong("there are no outputs".into()))?;
    Ok((worst, Tolerance::for_outputs(precision, outputs)))
}
