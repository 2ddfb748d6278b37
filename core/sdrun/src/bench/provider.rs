//! A provider in its own worker process, as a contender.

use super::{BenchOptions, Case, Event, PrecisionChoice, Refit, Row, contender::Contender};
use crate::{BuildOptions, CachePolicy, Isolation, Provider, Registry, Result, Session, Tensors};
use sdrun_abi::{
    Capabilities, DeviceKind, Host, Precision, Provide, RuntimeInfo, TimingPlan, WeightSource,
    default_threads,
};
use sdrun_weights::WeightStack;
use std::time::{Duration, Instant};

/// A session of a provider.
pub(super) struct Loaded<'a> {
    provider: Provider,
    session: Session,
    inputs: &'a Tensors,
    /// Its engine's file, which some providers keep open.
    _folder: crate::OwnedFolder,
}

/// Builds an engine, loads it with its weights and applies adapters. `row` gets all times and the memory.
#[expect(clippy::too_many_arguments, reason = "each is a thing of its own, and one caller has them all")]
pub(super) fn open<'a>(
    row: &mut Row,
    registry: &Registry,
    case: &Case<'_>,
    inputs: &'a Tensors,
    options: &BenchOptions,
    isolation: &Isolation,
    host: &dyn Host,
    listen: &mut dyn FnMut(Event<'_>),
) -> Result<Loaded<'a>> {
    listen(Event::Phase("init"));
    let started = Instant::now();
    let provider = registry.open(&row.system, isolation)?;
    row.init_seconds = Some(started.elapsed().as_secs_f64());
    let build = build_options(&provider, case, options)?;
    // The path of its library may name the user.
    let runtime = provider.runtime();
    row.runtime = Some(RuntimeInfo::new(&runtime.name, &runtime.version, None));
    row.build_id = Some(provider.manifest().build_id.clone());
    row.device = Some(build.device.clone());
    row.precision = Some(build.precision.to_string());
    let offered = provider.capabilities(&build.device)?;
    row.weight_update = Some(offered.weight_update);
    row.settings = settings(&build, &offered);

    listen(Event::Phase("build"));
    let peak = |provider: &Provider| provider.worker().and_then(|w| w.peak_rss());
    let engine = provider.build(case.model, &build, host)?;
    row.build_seconds = Some(engine.seconds());
    let folder = registry.paths().temporary()?;
    let file = folder.path().join("bench.sdengine");
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
    reset_peak(&provider);
    Ok(Loaded { provider, session, inputs, _folder: folder })
}

impl Contender for Loaded<'_> {
    fn outputs(&mut self, host: &dyn Host) -> Result<Tensors> {
        self.session.run(self.inputs, host)
    }

    fn times(&mut self, warmup: usize, count: usize, host: &dyn Host) -> Result<Vec<f64>> {
        let forever = Duration::MAX;
        let plan = TimingPlan { warmup, min_runs: count, min_time: Duration::ZERO, max_time: forever };
        self.session.time(self.inputs, &plan, host)
    }

    fn process(&self) -> Option<u32> {
        self.provider.worker().map(|worker| worker.pid())
    }

    fn report(&mut self, row: &mut Row) -> Result<()> {
        row.memory.run_bytes = self.provider.worker().and_then(|worker| worker.peak_rss());
        row.memory.session = self.session.memory()?;
        Ok(())
    }
}

/// A number of threads in words, as [`settings`] have it.
pub fn threads(count: usize) -> String {
    if count == 1 { "1 thread".into() } else { format!("{count} threads") }
}

/// What changes the figures of a row, beside the precision: threads, weights in the engine, and the provider's own settings.
pub fn settings(build: &BuildOptions, offered: &Capabilities) -> Vec<String> {
    let mut settings = Vec::new();
    if build.device.kind == DeviceKind::Cpu {
        settings.push(threads(build.threads.unwrap_or_else(default_threads)));
    }
    settings.push(if build.bake {
        "weights stored in the engine".into()
    } else {
        "engine without weights".into()
    });
    settings
        .extend(build.vram_budget.map(|bytes| format!("at most {bytes} bytes of device memory for weights")));
    let mut own = offered.settings.clone();
    own.extend(build.options.clone());
    settings.extend(own.iter().map(|(key, value)| format!("{key}={value}")));
    settings
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
    let precision = case.precision.on(provider.id(), &provider.capabilities(&device)?, &device)?;
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
