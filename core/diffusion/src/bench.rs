//! Measures whole pictures: the time of each, on every provider in turns.

use crate::pipeline::{self, Engines, Event, Kept, Parts, Resolved, generate};
use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Isolation, Provider, Registry, Result, Tensors, Wishes,
    abi::{Device, Error, Host, Precision, RuntimeInfo},
    bench::{
        self, BenchOptions, CaseReport, Contender, Field, Kind, PrecisionChoice, Row, Task, Title, What,
    },
    verify::Tolerance,
};
use serde_json::{Value, json};
use std::{path::Path, time::Instant};

/// Name of the only output: red, green and blue from 0 to 1, `[height, width, 3]`.
const PICTURE: &str = "picture";

/// Lets each provider of `providers` draw the picture of `request` in turns, and compares the pictures with that of the reference
/// provider in fp32. The first run also builds and loads the networks. Baselines draw it with `checkpoint`, the file that holds all of
/// `parts`; `Err` says why they cannot.
///
/// # Errors
/// `Cancelled` if `host` cancels. A failure of a provider or a baseline is reported in its row.
#[expect(clippy::too_many_arguments, reason = "each is a thing of its own")]
pub fn pictures(
    registry: &Registry,
    name: &str,
    parts: &Parts,
    checkpoint: std::result::Result<&Path, &str>,
    request: &Resolved,
    precision: PrecisionChoice,
    options: &BenchOptions,
    host: &dyn Host,
    listen: &mut dyn FnMut(bench::Event<'_>),
) -> Result<CaseReport> {
    let folder = registry.paths().temporary()?;
    let ids = options.providers.clone();
    let folder = folder.path();
    let mut systems = Systems { registry, parts, checkpoint, request, precision, options, host, ids, folder };
    if systems.ids.is_empty() {
        systems.ids = registry.usable().iter().map(|provide| provide.id.clone()).collect();
    }
    let reference = registry.reference().and_then(|provide| Some((provide, systems.reference(&provide.id)?)));
    let title = Title {
        name,
        precision,
        reference: reference.as_ref().map(|(provide, picture)| (&*provide.id, picture)),
        steps: Some(request.steps),
    };
    bench::race(&title, &mut systems, options, host, listen)
}

struct Systems<'a> {
    registry: &'a Registry,
    parts: &'a Parts,
    checkpoint: std::result::Result<&'a Path, &'a str>,
    request: &'a Resolved,
    precision: PrecisionChoice,
    options: &'a BenchOptions,
    host: &'a dyn Host,
    /// The providers.
    ids: Vec<String>,
    /// For pictures of baselines.
    folder: &'a Path,
}

impl<'a> Systems<'a> {
    /// The picture of the reference provider in fp32; `None` if it cannot draw.
    fn reference(&self, id: &str) -> Option<Tensors> {
        let fp32 = PrecisionChoice::Fixed(Precision::Fp32);
        let mut row = Row::new(id, Kind::Provider);
        match self.artist(id, fp32, &mut row).and_then(|mut artist| artist.outputs(self.host)) {
            Ok(picture) => Some(picture),
            Err(error) => {
                tracing::warn!("no reference picture, so accuracy is unknown: {error}");
                None
            }
        }
    }

    fn artist(&self, id: &str, precision: PrecisionChoice, row: &mut Row) -> Result<Artist<'a>> {
        let started = Instant::now();
        let limits = bench::limits(self.options.time_limit);
        let provider = self.registry.open(id, &Isolation::worker(limits))?;
        row.init_seconds = Some(started.elapsed().as_secs_f64());
        let device = provider.present_device(self.options.device.as_deref())?;
        let offered = provider.capabilities(&device)?;
        let precision = precision.on(id, &offered, &device)?;
        // The path of its library may name the user.
        let runtime = provider.runtime();
        row.runtime = Some(RuntimeInfo::new(&runtime.name, &runtime.version, None));
        row.build_id = Some(provider.manifest().build_id.clone());
        row.device = Some(device.clone());
        row.precision = Some(precision.to_string());
        row.weight_update = Some(offered.weight_update);
        let mut build = BuildOptions::new(device).precision(precision).threads(self.options.threads);
        build.cache = CachePolicy::Off;
        build.vram_budget = self.options.vram_budget;
        build.options = self.options.options.get(id).cloned().unwrap_or_default();
        row.settings = bench::settings(&build, &offered);
        let Systems { registry, parts, request, .. } = *self;
        Ok(Artist { registry, parts, request, provider, build, kept: Some(Kept::default()) })
    }
}

impl<'a> Field<'a> for Systems<'a> {
    fn systems(&self) -> Vec<(String, Kind)> {
        let providers = self.ids.iter().map(|id| (id.clone(), Kind::Provider));
        let baselines = self.options.baselines.iter().map(|baseline| (baseline.name.clone(), Kind::Baseline));
        providers.chain(baselines).collect()
    }

    fn open(
        &mut self,
        at: usize,
        row: &mut Row,
        listen: &mut dyn FnMut(bench::Event<'_>),
    ) -> Result<Box<dyn Contender + 'a>> {
        if let Some(baseline) = at.checked_sub(self.ids.len()).map(|at| &self.options.baselines[at]) {
            let model = self.checkpoint.map_err(|why| {
                let error = Error::unsupported(why);
                sdrun::Error::Provider { provider: baseline.name.clone(), error }
            })?;
            let task = Task {
                model,
                name: None,
                precision: self.precision,
                what: What::Picture(settings(self.request, self.parts)),
                folder: self.folder,
            };
            return baseline.open(row, &task, self.options, self.host, listen);
        }
        listen(bench::Event::Phase("init"));
        let id = self.ids[at].clone();
        Ok(Box::new(self.artist(&id, self.precision, row)?))
    }

    /// Steps amplify rounding, so that pictures in a low precision differ in details.
    fn tolerance(&self, precision: Precision, _: &Tensors) -> Tolerance {
        match precision {
            // 5 of 255 levels.
            Precision::Fp32 => Tolerance { relative_error: Some(0.02), cosine: 0.9999 },
            Precision::Fp16 => Tolerance { relative_error: None, cosine: 0.995 },
            _ => Tolerance { relative_error: None, cosine: 0.95 },
        }
    }
}

/// A picture's settings for baselines.
fn settings(request: &Resolved, parts: &Parts) -> Value {
    let (_, sigmas) = request.levels(parts, [request.width, request.height], request.steps, None);
    json!({
        "prompt": request.prompt,
        "width": request.width,
        "height": request.height,
        "sampler": request.sampler.name(),
        "sigmas": sigmas,
        "guidance": request.guidance.scale,
        "distilled_guidance": request.distilled_guidance,
        "seed": request.seed,
    })
}

/// A provider that draws, with its networks.
struct Artist<'a> {
    registry: &'a Registry,
    parts: &'a Parts,
    request: &'a Resolved,
    provider: Provider,
    build: BuildOptions,
    kept: Option<Kept>,
}

impl Artist<'_> {
    fn draw(&mut self, host: &dyn Host) -> Result<pipeline::Picture> {
        let build = self.build.clone();
        // The only device that it is asked for.
        let options = |_: Device| build.clone();
        let engines = Engines {
            only: Some((self.provider.clone(), self.build.device.clone())),
            wishes: Wishes::new(),
            options: &options,
            kept: self.kept.take(),
        };
        let mut picture = None;
        let done = generate(self.registry, self.parts, self.request, &engines, host, &mut |event| {
            if let Event::Picture(drawn) = event {
                picture = Some(drawn);
            }
        });
        self.kept = engines.kept;
        done.map_err(|error| match error.core() {
            Some(core) => Error::new(core.code(), error.to_string()),
            None => Error::invalid(error.to_string()),
        })?;
        picture.ok_or_else(|| Error::internal("no picture was drawn").into())
    }
}

impl Contender for Artist<'_> {
    fn outputs(&mut self, host: &dyn Host) -> Result<Tensors> {
        let picture = self.draw(host)?;
        let values: Vec<f32> = picture.bytes.iter().map(|byte| f32::from(*byte) / 255.0).collect();
        let tensor = HostTensor::from_f32(vec![picture.height, picture.width, 3], &values)?;
        Ok(Tensors::from([(PICTURE.to_string(), tensor)]))
    }

    fn times(&mut self, warmup: usize, count: usize, host: &dyn Host) -> Result<Vec<f64>> {
        for _ in 0..warmup {
            self.draw(host)?;
        }
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let started = Instant::now();
            self.draw(host)?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
        Ok(times)
    }

    fn process(&self) -> Option<u32> {
        self.provider.worker().map(|worker| worker.pid())
    }

    fn report(&mut self, row: &mut Row) -> Result<()> {
        row.memory.run_bytes = self.provider.worker().and_then(|worker| worker.peak_rss());
        Ok(())
    }
}
