//! Measures one provider on one case.

use super::{Accuracy, BenchOptions, Case, Event, PrecisionChoice, Refit, Row, Stats, Status, stats};
use crate::{
    BuildOptions, CachePolicy, Error, Isolation, Provider, Registry, Result, Tensors,
    verify::{self, Tolerance},
};
use sdrun_abi::{Error as AbiError, ErrorCode, Host, Precision, Provide, TimingPlan, WeightSource};
use sdrun_weights::WeightStack;
use std::time::{Duration, Instant};

#[allow(clippy::too_many_arguments)]
pub(super) fn row(
    registry: &Registry,
    provide: &Provide,
    case: &Case<'_>,
    inputs: &Tensors,
    reference: Option<&Tensors>,
    options: &BenchOptions,
    isolation: &Isolation,
    host: &dyn Host,
    listen: &mut dyn FnMut(Event<'_>),
) -> Row {
    let mut row = Row::new(&provide.id);
    if let Err(error) = fill(&mut row, registry, case, inputs, reference, options, isolation, host, listen) {
        row.status = match error.code() {
            ErrorCode::Unimplemented => Status::Unsupported,
            ErrorCode::DeadlineExceeded => Status::TimedOut,
            ErrorCode::FailedPrecondition | ErrorCode::NotFound if row.runtime.is_none() => Status::Absent,
            _ => Status::Failed,
        };
        row.reason = Some(match error.hint() {
            Some(hint) => format!("{error} ({hint})"),
            None => error.to_string(),
        });
    }
    row
}

#[allow(clippy::too_many_arguments)]
fn fill(
    row: &mut Row,
    registry: &Registry,
    case: &Case<'_>,
    inputs: &Tensors,
    reference: Option<&Tensors>,
    options: &BenchOptions,
    isolation: &Isolation,
    host: &dyn Host,
    listen: &mut dyn FnMut(Event<'_>),
) -> Result<()> {
    listen(Event::Phase("init"));
    let started = Instant::now();
    let provider = registry.open(&row.provider, isolation)?;
    row.init_seconds = Some(started.elapsed().as_secs_f64());
    let build = build_options(&provider, case, options)?;
    row.runtime = Some(provider.runtime().clone());
    row.device = Some(build.device.name.clone());
    row.precision = Some(build.precision.to_string());
    row.weight_update = Some(provider.capabilities(&build.device)?.weight_update);

    listen(Event::Phase("build"));
    let peak = |provider: &Provider| provider.worker().and_then(|w| w.peak_rss());
    let engine = provider.build(case.model, &build, host)?;
    row.build_seconds = Some(engine.seconds());
    let scratch = registry.paths().scratch()?;
    let dir = tempfile::tempdir_in(&scratch).map_err(|e| Error::io("create a folder in", &scratch, &e))?;
    let file = dir.path().join("bench.sdengine");
    row.engine_bytes = Some(engine.save(&file)?);
    row.memory.build_bytes = peak(&provider);
    drop(engine);

    listen(Event::Phase("load"));
    reset_peak(&provider);
    let started = Instant::now();
    let engine = provider.load(&file, &build.device, build.threads, host)?;
    let own = case.model.weights();
    let pristine = case.weights.map(WeightStack::pristine);
    let weights: &dyn WeightSource = pristine.as_ref().map_or(&own, |stack| stack);
    // The comparison reports which side is not finite.
    let mut session = engine.session(weights, host)?.allow_non_finite();
    row.load_seconds = Some(started.elapsed().as_secs_f64());
    row.memory.load_bytes = peak(&provider);
    if let Some(stack) = case.weights.filter(|stack| !stack.is_pristine()) {
        listen(Event::Phase("refit"));
        reset_peak(&provider);
        let started = Instant::now();
        let report = session.refit(stack, host)?;
        row.refit = Some(Refit { seconds: started.elapsed().as_secs_f64(), report });
        row.memory.refit_bytes = peak(&provider);
    }

    listen(Event::Phase("first run"));
    reset_peak(&provider);
    let started = Instant::now();
    let outputs = session.run(inputs, host)?;
    row.first_run_ms = Some(millis(started.elapsed()));
    judge(row, build.precision, &outputs, reference)?;

    listen(Event::Phase("runs"));
    let plan = TimingPlan {
        warmup: options.warmup,
        min_runs: options.min_runs,
        min_time: options.min_time,
        max_time: options.max_time,
    };
    row.times_ms = session.time(inputs, &plan, host)?;
    row.memory.run_bytes = peak(&provider);
    row.memory.session = session.memory()?;
    row.stats = Stats::of(&row.times_ms);
    row.warnings = stats::warnings(&row.times_ms);
    Ok(())
}

/// Score of an output; lower is worse. Non-finite values outweigh any cosine.
fn score(c: &verify::Comparison) -> f64 {
    c.cosine - (c.not_finite + c.reference_not_finite) as f64
}

fn judge(row: &mut Row, precision: Precision, outputs: &Tensors, reference: Option<&Tensors>) -> Result<()> {
    let Some(reference) = reference else {
        row.status = Status::Unverified;
        row.reason = Some("there are no reference outputs to compare with".into());
        return Ok(());
    };
    let tolerance = Tolerance::for_outputs(precision, reference);
    let compared = verify::compare(outputs, reference)?;
    let accepted = compared.iter().all(|c| tolerance.accepts(c));
    let worst = compared
        .into_iter()
        .min_by(|a, b| score(a).total_cmp(&score(b)))
        .ok_or_else(|| AbiError::invalid("the model has no outputs"))?;
    row.status = if accepted { Status::Ok } else { Status::Inaccurate };
    row.reason = (!accepted).then(|| match (worst.not_finite, worst.reference_not_finite) {
        (0, 0) => format!(
            "output {:?} is too far from the reference: relative error {:.2e}, cosine {:.6}",
            worst.output, worst.relative_error, worst.cosine
        ),
        (0, there) => {
            format!("output {:?} has {there} NaN or infinite values in the reference alone", worst.output)
        }
        (here, _) => format!("output {:?} has {here} NaN or infinite values", worst.output),
    });
    row.accuracy = Some(Accuracy { worst, tolerance, accepted });
    Ok(())
}

/// The fp32 outputs of a provider.
pub(super) fn outputs_of(
    registry: &Registry,
    provide: &Provide,
    case: &Case<'_>,
    inputs: &Tensors,
    options: &BenchOptions,
    isolation: &Isolation,
    host: &dyn Host,
) -> Result<Tensors> {
    let provider = registry.open(&provide.id, isolation)?;
    let case =
        Case { precision: PrecisionChoice::Fixed(Precision::Fp32), shapes: case.shapes.clone(), ..*case };
    let plain = BenchOptions { threads: options.threads, ..BenchOptions::default() };
    let build = build_options(&provider, &case, &plain)?;
    let engine = provider.build(case.model, &build, host)?;
    let own = case.model.weights();
    let weights: &dyn WeightSource = case.weights.map_or(&own, |stack| stack);
    engine.session(weights, host)?.allow_non_finite().run(inputs, host)
}

fn build_options(provider: &Provider, case: &Case<'_>, options: &BenchOptions) -> Result<BuildOptions> {
    let device = provider.present_device(options.device.as_deref())?;
    let offered = provider.capabilities(&device)?.precisions;
    let precision = match case.precision {
        PrecisionChoice::Fixed(precision) => precision,
        PrecisionChoice::BestLow => {
            offered.iter().copied().find(|p| *p != Precision::Fp32).ok_or_else(|| Error::Provider {
                provider: provider.id().to_string(),
                error: AbiError::unsupported(format!("offers no precision below fp32 on {}", device.name)),
            })?
        }
    };
    Ok(BuildOptions {
        precision,
        threads: options.threads,
        shapes: case.shapes.clone(),
        bake: options.bake,
        vram_budget: options.vram_budget,
        options: options.options.get(provider.id()).cloned().unwrap_or_default(),
        cache: CachePolicy::Off,
        ..BuildOptions::new(device)
    })
}

fn reset_peak(provider: &Provider) {
    if let Some(worker) = provider.worker() {
        worker.reset_peak_rss();
    }
}

fn millis(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}
