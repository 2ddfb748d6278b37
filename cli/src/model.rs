//! Arguments that select a provider, a model and how to build it, and the library calls behind them.

use crate::{
    complete,
    context::Context,
    format,
    parse::{KeyValue, ShapeArg, duration, size},
    weights::Weights,
};
use clap::Args;
use sdrun::{
    BuildOptions, CachePolicy, Engine, EngineManifest, Isolation, Model, Provider, Shapes,
    abi::{Device, Error, OpenShapes, Precision, shape_sets},
    graph::{Dim, Graph, OpenOptions, WeightsPolicy},
    weights::builtin::{Builtin, Input},
    worker::Limits,
};
use std::{num::NonZeroUsize, path::Path, time::Duration};

/// How long a worker may continue after Ctrl-C.
pub(crate) const CANCEL_LIMIT: Duration = Duration::from_secs(5);

#[derive(Args)]
#[command(next_help_heading = "Provider")]
pub(crate) struct ProviderArgs {
    /// Provider to use [default: the best one that works on this machine]
    #[arg(short, long, value_name = "ID", add = complete::providers())]
    pub(crate) provider: Option<String>,

    /// Device to use: an id, an index or part of a name, as `sdrun devices` lists them
    #[arg(long, value_name = "DEVICE", add = complete::devices())]
    pub(crate) device: Option<String>,

    /// Number of threads on CPU devices [default: all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,

    /// Run the provider in a worker process and kill it if one call takes longer than this
    #[arg(long, value_name = "TIME", value_parser = duration)]
    time_limit: Option<Duration>,
}

impl ProviderArgs {
    /// Where the provider's code runs: in a worker if `isolate` is set or there is a time limit.
    pub(crate) fn isolation(&self, isolate: bool) -> Isolation {
        isolation(isolate, self.time_limit)
    }

    /// The number of threads from the command line, else from the config file.
    pub(crate) fn threads(&self, context: &Context) -> Option<usize> {
        self.threads.or(context.config.threads).map(NonZeroUsize::get)
    }

    /// The device from the command line, else from the config file. A configured device belongs to the provider that the file
    /// prefers, so it does not apply if the command line names a provider.
    pub(crate) fn device<'c>(&'c self, context: &'c Context) -> Option<&'c str> {
        let configured = self.provider.is_none().then_some(context.config.device.as_deref()).flatten();
        self.device.as_deref().or(configured)
    }

    /// Opens the named provider, else the best one, and finds the device, which must be in this machine.
    pub(crate) fn open(&self, isolate: bool, context: &Context) -> anyhow::Result<(Provider, Device)> {
        let provider = self.provider(isolate, context)?;
        let device = provider.present_device(self.device(context))?;
        Ok(used(provider, device))
    }

    /// Like [`open`](ProviderArgs::open), but the device may be absent from this machine.
    pub(crate) fn open_to_build(
        &self,
        isolate: bool,
        context: &Context,
    ) -> anyhow::Result<(Provider, Device)> {
        let provider = self.provider(isolate, context)?;
        let device = provider.device(self.device(context))?;
        Ok(used(provider, device))
    }

    fn provider(&self, isolate: bool, context: &Context) -> sdrun::Result<Provider> {
        let registry = context.registry()?;
        let isolation = self.isolation(isolate);
        match &self.provider {
            Some(id) => registry.open(id, &isolation),
            None => registry.open_best(&isolation),
        }
    }
}

/// Logs the provider and device in use.
fn used(provider: Provider, device: Device) -> (Provider, Device) {
    let runtime = provider.runtime();
    tracing::info!("{} ({} {}) on {}", provider.id(), runtime.name, runtime.version, device.name);
    (provider, device)
}

impl ProviderArgs {
    /// Returns an error if the command line names another provider than the one that built the engine.
    pub(crate) fn check_engine(&self, path: &Path, manifest: &EngineManifest) -> Result<(), Error> {
        match &self.provider {
            Some(id) if *id != manifest.provider => {
                let message = format!(
                    "{} was built by the provider {}, not by {id}",
                    path.display(),
                    manifest.provider
                );
                Err(Error::invalid(message).with_hint("leave out `--provider`"))
            }
            _ => Ok(()),
        }
    }

    /// Opens the provider of an engine file, finds the device, and loads it.
    pub(crate) fn load(
        &self,
        path: &Path,
        manifest: &EngineManifest,
        isolate: bool,
        context: &Context,
    ) -> anyhow::Result<(Engine, Device)> {
        let registry = context.registry()?;
        let provider = registry.open(&manifest.provider, &self.isolation(isolate))?;
        let device = match &self.device {
            Some(which) => provider.device(Some(which))?,
            // The first device of the class that the engine was built for. The provider refuses an engine that does not fit.
            None => {
                let fits = provider
                    .devices()?
                    .into_iter()
                    .find(|d| d.class == manifest.device_class && d.absent.is_none());
                fits.map_or_else(|| provider.device(None), Ok)?
            }
        };
        let task = context.task(&format!("loading {}", path.display()));
        let engine =
            provider.load(path, &device, self.threads(context), &task.host(context.cancel_flag()))?;
        Ok((engine, device))
    }
}

/// Isolation with one limit for every call.
pub(crate) fn isolation(worker: bool, limit: Option<Duration>) -> Isolation {
    let limits = Limits { init: limit, build: limit, session: limit, run: limit, cancel: Some(CANCEL_LIMIT) };
    Isolation { worker: worker || limit.is_some(), limits, ..Isolation::default() }
}

#[derive(Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Shape of an input (repeatable). Building and running need a size for every open dimension. `build` takes several shapes, as
    /// in sample=1,4,64,64:1,4,96,96, for an engine that serves them all
    #[arg(long = "shape", value_name = "NAME=DIMS[:DIMS…]")]
    pub(crate) shapes: Vec<ShapeArg>,

    /// Follow symbolic and hard links to external weight files, even outside the model's folder
    #[arg(long)]
    pub(crate) allow_links: bool,
}

impl ModelArgs {
    /// Opens a file or a built-in model.
    pub(crate) fn open(
        &self,
        what: &str,
        weights: WeightsPolicy,
        context: &Context,
    ) -> anyhow::Result<Model> {
        open_model(what, &OpenOptions { allow_links: self.allow_links, weights }, context)
    }

    /// The given shapes. Several shapes for one input are an error.
    pub(crate) fn shapes(&self) -> anyhow::Result<Shapes> {
        let (shapes, open) = self.shapes_and_lists()?;
        match open.keys().next() {
            None => Ok(shapes),
            Some(name) => Err(Error::invalid(format!("--shape gives input {name:?} several shapes"))
                .with_hint("only `sdrun build` takes several; `sdrun run ENGINE` then runs each of them")
                .into()),
        }
    }

    /// The shapes of inputs that have one, and of inputs that have several.
    pub(crate) fn shapes_and_lists(&self) -> anyhow::Result<(Shapes, OpenShapes)> {
        let (mut single, mut several) = (Shapes::new(), OpenShapes::new());
        for ShapeArg { name, shapes } in &self.shapes {
            if single.contains_key(name) || several.contains_key(name) {
                return Err(Error::invalid(format!("--shape gives input {name:?} twice")).into());
            }
            match &**shapes {
                [shape] => drop(single.insert(name.clone(), shape.clone())),
                shapes => drop(several.insert(name.clone(), shapes.to_vec())),
            }
        }
        Ok((single, several))
    }
}

/// Opens a file or a built-in model. Generates a built-in model that is not in the cache.
pub(crate) fn open_model(what: &str, options: &OpenOptions, context: &Context) -> anyhow::Result<Model> {
    let task = context.task(&format!("generating {what}"));
    let model = Model::find(what, &context.paths()?, options, &|done, total| {
        task.bytes(done, total);
        if context.cancelled() {
            // There is no other way to stop generating. The next call starts again.
            std::process::exit(crate::exit::CANCELLED.into());
        }
    });
    drop(task);
    context.go_on()?;
    Ok(model?)
}

/// Completes the shapes of a built-in model. An input without one gets the shape it is benchmarked in, except for dimensions
/// that it shares with a named input (`batch`).
pub(crate) fn complete(builtin: Option<&Builtin>, graph: &Graph, given: Shapes) -> Shapes {
    let mut shapes = given;
    let Some(builtin) = builtin else { return shapes };
    let dims_of = |name: &str| {
        let value = graph.inputs.iter().map(|id| graph.value(*id)).find(|value| value.name == name);
        value.and_then(|value| value.shape.as_deref()).unwrap_or_default()
    };
    let named: Vec<(&Dim, usize)> = shapes
        .iter()
        .flat_map(|(name, shape)| dims_of(name).iter().zip(shape.iter().copied()))
        .filter(|(dim, _)| matches!(dim, Dim::Symbol(_)))
        .collect();
    let sized = |(at, default): (usize, &usize), name: &str| {
        let shared = dims_of(name).get(at).and_then(|dim| named.iter().find(|(known, _)| *known == dim));
        shared.map_or(*default, |(_, size)| *size)
    };
    let missing = builtin.inputs.iter().filter(|input| !shapes.contains_key(input.name));
    let sizes = |input: &Input| input.shape.iter().enumerate().map(|dim| sized(dim, input.name)).collect();
    let made: Shapes = missing.map(|input| (input.name.to_string(), sizes(input))).collect();
    shapes.extend(made);
    shapes
}

/// Like [`complete`], if some inputs have several shapes. Inputs that share a dimension with them then have several too.
pub(crate) fn complete_lists(model: &Model, given: Shapes, lists: OpenShapes) -> (Shapes, OpenShapes) {
    let whole = |set: Shapes| {
        complete(model.builtin(), model.graph(), given.clone().into_iter().chain(set).collect())
    };
    let sets: Vec<Shapes> = shape_sets(&lists).into_iter().map(whole).collect();
    let (mut single, mut several) = (Shapes::new(), lists);
    for (name, first) in &sets[0] {
        if several.contains_key(name) {
            continue;
        }
        let list: Vec<Vec<usize>> = sets.iter().map(|set| set[name].clone()).collect();
        match list.iter().all(|shape| shape == first) {
            true => drop(single.insert(name.clone(), first.clone())),
            false => drop(several.insert(name.clone(), list)),
        }
    }
    (single, several)
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Build")]
pub(crate) struct BuildArgs {
    /// Precision of the computation: fp32, fp16 or bf16; q8_0 and q4_k keep large weights in blocks of 8 or 4 bits [default: fp32]
    #[arg(long, value_name = "PRECISION")]
    precision: Option<Precision>,

    /// Store the weights in the engine: it loads faster, but takes no other weights
    #[arg(long)]
    pub(crate) bake: bool,

    /// Limit of device memory for weights, such as 6GB; weights beyond it stay in main memory and are copied in every run
    #[arg(long, value_name = "SIZE", value_parser = size)]
    vram_budget: Option<u64>,

    /// Provider-specific option (repeatable)
    #[arg(long = "option", value_name = "KEY=VALUE")]
    options: Vec<KeyValue>,

    /// Build even if the cache has the engine, and replace it
    #[arg(long, conflicts_with = "no_cache")]
    rebuild: bool,

    /// Do not use the cache, neither to read nor to store the engine
    #[arg(long)]
    no_cache: bool,
}

impl BuildArgs {
    /// The precision from the command line, else from the config file, else fp32.
    pub(crate) fn precision(&self, context: &Context) -> Precision {
        self.precision.or(context.config.precision).unwrap_or(Precision::Fp32)
    }

    /// Returns an error if the command line asks for an option that the existing engine was not built with.
    pub(crate) fn check_engine(&self, manifest: &EngineManifest) -> Result<(), Error> {
        let spec = &manifest.spec;
        let asked = [
            ("--precision", self.precision.is_some_and(|precision| precision != spec.precision)),
            ("--bake", self.bake && !spec.bake),
            ("--vram-budget", self.vram_budget.is_some_and(|bytes| spec.vram_budget != Some(bytes))),
            ("--option", self.options.iter().any(|o| spec.options.get(&o.key) != Some(&o.value))),
            ("--rebuild", self.rebuild),
        ];
        match asked.into_iter().find(|(_, asked)| *asked) {
            Some((option, _)) => Err(Error::invalid(format!(
                "the engine was not built with this `{option}`"
            ))
            .with_hint(format!("give `{option}` to `sdrun build`, or run the model instead of the engine"))),
            None => Ok(()),
        }
    }

    /// The options for the reference: fp32, without those meant only for the other provider.
    pub(crate) fn of_reference(&self) -> Self {
        BuildArgs {
            precision: Some(Precision::Fp32),
            bake: false,
            vram_budget: None,
            options: Vec::new(),
            ..self.clone()
        }
    }

    /// Builds an engine or takes it from the cache. With `only_cached`, an engine missing from the cache is an error.
    pub(crate) fn build(
        &self,
        context: &Context,
        provider: &Provider,
        options: BuildOptions,
        model: &Model,
        weights: Option<&Weights>,
        only_cached: bool,
    ) -> anyhow::Result<Engine> {
        let cache = match (self.rebuild, self.no_cache, only_cached) {
            (true, ..) => CachePolicy::Rebuild,
            (_, true, _) => CachePolicy::Off,
            (.., true) => CachePolicy::Only,
            _ => CachePolicy::Use,
        };
        let options = BuildOptions {
            precision: self.precision(context),
            bake: self.bake,
            vram_budget: self.vram_budget,
            cache,
            options: self.options.iter().map(|o| (o.key.clone(), o.value.clone())).collect(),
            ..options
        };
        let task = context.task(&format!("building {} for {}", model.name(), provider.id()));
        let host = task.host(context.cancel_flag());
        Ok(match weights {
            Some(weights) => provider.build_with(model, &weights.stack, &options, &host)?,
            None => provider.build(model, &options, &host)?,
        })
    }
}

/// Whether a path ends in `.ending`, ignoring case.
pub(crate) fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending))
}

/// Describes an engine in one line.
pub(crate) fn describe(engine: &Engine, device: &Device) -> String {
    let manifest = engine.manifest();
    format!(
        "{} on {} ({}), {}, {} in {}",
        manifest.model,
        manifest.provider,
        device.name,
        manifest.spec.precision,
        if engine.was_loaded() { "loaded" } else { "built" },
        format::seconds(engine.seconds()),
    )
}
