//! Build arguments, and building an engine.

use crate::{
    context::Context,
    format,
    parse::{KeyValue, size},
};
use clap::Args;
use sdrun::{
    BuildOptions, CachePolicy, Engine, EngineManifest, Model, Provider, Weights,
    abi::{Device, Error, Precision},
};

#[derive(Args, Clone)]
#[command(next_help_heading = "Build")]
pub(crate) struct BuildArgs {
    /// Precision of the computation: fp32, fp16 or bf16; q8_0 and q4_k keep large weights in blocks of 8 or 4 bits [default:
    /// fp32]
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
    /// The precision: from the command line, else from the config file, else fp32.
    pub(crate) fn precision(&self, context: &Context) -> Precision {
        self.precision.or(context.config.precision).unwrap_or(Precision::Fp32)
    }

    /// Fails if the user asks for an option that the existing engine was not built with.
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
            Some((option, _)) => Err(Error::invalid(format!("the engine was built without this `{option}`"))
                .with_hint(format!(
                    "give `{option}` to `sdrun build`, or run the model instead of the engine"
                ))),
            None => Ok(()),
        }
    }

    /// The arguments for a reference: fp32, without options that apply only to the provider under test.
    pub(crate) fn of_reference(&self) -> Self {
        BuildArgs {
            precision: Some(Precision::Fp32),
            bake: false,
            vram_budget: None,
            options: Vec::new(),
            ..self.clone()
        }
    }

    /// The options for a device. With `only_cached`, a missing engine is an error instead of a build.
    pub(crate) fn options(&self, device: Device, only_cached: bool, context: &Context) -> BuildOptions {
        let mut options = BuildOptions::new(device).precision(self.precision(context));
        options.cache = match (self.rebuild, self.no_cache, only_cached) {
            (true, ..) => CachePolicy::Rebuild,
            (_, true, _) => CachePolicy::Off,
            (.., true) => CachePolicy::Only,
            _ => CachePolicy::Use,
        };
        options.bake = self.bake;
        options.vram_budget = self.vram_budget;
        options.options = self.options.iter().map(|o| (o.key.clone(), o.value.clone())).collect();
        options
    }
}

/// Builds an engine, or loads it from the cache.
pub(crate) fn build(
    provider: &Provider,
    model: &Model,
    weights: Option<&Weights>,
    options: &BuildOptions,
    context: &Context,
) -> sdrun::Result<Engine> {
    let task = context.task(&format!("building {} for {}", model.name(), provider.id()));
    let host = task.host(context.cancel_flag());
    match weights {
        Some(weights) => provider.build_with(model, &weights.stack, options, &host),
        None => provider.build(model, options, &host),
    }
}

/// Describes an engine in one line.
pub(crate) fn describe(engine: &Engine) -> String {
    let manifest = engine.manifest();
    format!(
        "{} on {} ({}), {}, {} in {}",
        manifest.model,
        manifest.provider,
        engine.device().name,
        manifest.spec.precision,
        if engine.was_loaded() { "loaded" } else { "built" },
        format::seconds(engine.seconds()),
    )
}
