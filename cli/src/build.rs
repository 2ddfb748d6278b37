//! Arguments about building an engine.

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
    /// Arithmetic the engine computes in: fp32, fp16 or bf16; q8_0 or q4_k: large weights in blocks of 8 or 4 bits [default:
    /// fp32]
    #[arg(long, value_name = "PRECISION")]
    precision: Option<Precision>,

    /// Store the weights in the engine: loads faster, takes no other weights
    #[arg(long)]
    pub(crate) bake: bool,

    /// Most device memory for weights, as in 6GB; what does not fit stays in main memory and is copied in every run
    #[arg(long, value_name = "SIZE", value_parser = size)]
    vram_budget: Option<u64>,

    /// Option of the provider (repeatable)
    #[arg(long = "option", value_name = "KEY=VALUE")]
    options: Vec<KeyValue>,

    /// Build even if there is an engine in the cache, and replace it
    #[arg(long, conflicts_with = "no_cache")]
    rebuild: bool,

    /// Neither take an engine from the cache nor store one
    #[arg(long)]
    no_cache: bool,
}

impl BuildArgs {
    /// The precision: as given, else as in the config file, else fp32.
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

    /// For a reference: fp32, without what was meant for the other provider alone.
    pub(crate) fn of_reference(&self) -> Self {
        BuildArgs {
            precision: Some(Precision::Fp32),
            bake: false,
            vram_budget: None,
            options: Vec::new(),
            ..self.clone()
        }
    }

    /// The options for a device. `only_cached` makes a build that would be needed an error.
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

/// Builds an engine, or takes it from the cache.
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

/// One line about what an engine is.
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
