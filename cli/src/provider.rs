//! Arguments that name a provider and a device, and the choice of both if they are missing.

use crate::{complete, context::Context, parse::duration};
use clap::Args;
use sdrun::{
    BuildOptions, Candidate, Engine, EngineFile, EngineManifest, Isolation, LoadOptions, Model, Provider,
    Registry, Result, Wishes,
    abi::{Device, Error},
    worker::Limits,
};
use sdrun_diffusion::pipeline::Engines;
use std::{num::NonZeroUsize, path::Path, time::Duration};

/// A working provider responds within this time.
pub(crate) const PROBE_LIMIT: Duration = Duration::from_secs(20);
/// How long a call in a worker may go on after Ctrl-C. Then the worker is killed; the command ends anyway.
const CANCEL_LIMIT: Duration = Duration::from_millis(400);

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

    /// Run the provider in a worker process and kill it if one call takes longer than this. What the command does itself, such as
    /// reading, waiting for another command or writing, may not take longer either
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) time_limit: Option<Duration>,
}

impl ProviderArgs {
    /// Where the provider's code runs: in a worker if it needs a vendor's runtime, if `isolate` is true, or if there is a time limit.
    pub(crate) fn isolation(&self, isolate: bool) -> Isolation {
        isolation(isolate, self.time_limit, CANCEL_LIMIT)
    }

    /// The number of threads: from the command line, else from the config file.
    pub(crate) fn threads(&self, context: &Context) -> Option<usize> {
        self.threads.or(context.config.threads).map(NonZeroUsize::get)
    }

    /// The device: from the command line, else from the config file. The configured device belongs to the provider
    /// that the file prefers, so it does not apply if the command line names a provider.
    pub(crate) fn device<'c>(&'c self, context: &'c Context) -> Option<&'c str> {
        let configured = self.provider.is_none().then_some(context.config.device.as_deref()).flatten();
        self.device.as_deref().or(configured)
    }

    /// The provider that the user named, opened, and its device. `None` if sdrun may choose.
    pub(crate) fn named(
        &self,
        registry: &Registry,
        isolate: bool,
        absent_devices: bool,
        context: &Context,
    ) -> Result<Option<(Provider, Device)>> {
        let Some(id) = &self.provider else { return Ok(None) };
        let provider = registry.open(id, &self.isolation(isolate))?;
        let device = match absent_devices {
            true => provider.device(self.device(context))?,
            false => provider.present_device(self.device(context))?,
        };
        used(&provider, &device);
        Ok(Some((provider, device)))
    }

    /// What to choose a provider by if the user named none.
    pub(crate) fn wishes(&self, isolate: bool, absent_devices: bool, context: &Context) -> Wishes {
        let mut wishes = Wishes::new();
        wishes.device = self.device(context).map(str::to_string);
        wishes.absent_devices = absent_devices;
        wishes.isolation = self.isolation(isolate);
        wishes
    }

    /// How a pipeline's networks become engines. `options` says how to build for a device.
    pub(crate) fn engines<'a>(
        &self,
        registry: &Registry,
        isolate: bool,
        context: &Context,
        options: &'a dyn Fn(Device) -> BuildOptions,
    ) -> Result<Engines<'a>> {
        let only = self.named(registry, isolate, false, context)?;
        Ok(Engines { only, wishes: self.wishes(isolate, false, context), options, kept: None })
    }

    /// Runs `attempt` on the provider that the user named. Without one, runs it on the candidate that suits the model
    /// best, and then on the next one whenever a provider is absent or does not support the model.
    pub(crate) fn attempt<T>(
        &self,
        job: &Job<'_>,
        context: &Context,
        mut attempt: impl FnMut(&Provider, BuildOptions) -> Result<T>,
    ) -> anyhow::Result<T> {
        let registry = context.registry()?;
        if let Some((provider, device)) = self.named(&registry, job.isolate, job.absent_devices, context)? {
            return Ok(attempt(&provider, (job.options)(device))?);
        }
        let wishes = self.wishes(job.isolate, job.absent_devices, context);
        let mut choice = registry.choose(job.model, &wishes, job.options, &sdrun::TracingHost);
        Ok(choice.try_each(|candidate: &Candidate| {
            let (provider, options) = (&candidate.provider, &candidate.options);
            used(provider, &options.device);
            tracing::info!("chosen: {}", candidate.why);
            attempt(provider, options.clone())
        })?)
    }
}

/// What a provider is needed for.
pub(crate) struct Job<'a> {
    pub(crate) model: &'a Model,
    /// How to build for a device.
    pub(crate) options: &'a dyn Fn(Device) -> BuildOptions,
    /// Run the provider in a worker.
    pub(crate) isolate: bool,
    /// Accept a device that this machine lacks.
    pub(crate) absent_devices: bool,
}

/// Logs the provider, device and runtime in use.
fn used(provider: &Provider, device: &Device) {
    let runtime = provider.runtime();
    tracing::info!("{} ({} {}) on {}", provider.id(), runtime.name, runtime.version, device.name);
}

impl ProviderArgs {
    /// Fails if the user names a provider other than the one that built the engine.
    pub(crate) fn check_engine(&self, path: &Path, manifest: &EngineManifest) -> Result<(), Error> {
        match &self.provider {
            Some(id) if *id != manifest.provider => {
                let message =
                    format!("{} was made by the provider {}, not by {id}", path.display(), manifest.provider);
                Err(Error::invalid(message).with_hint("leave out `--provider`"))
            }
            _ => Ok(()),
        }
    }

    /// Loads an engine file on the provider that made it.
    pub(crate) fn load(
        &self,
        path: &Path,
        file: &EngineFile,
        isolate: bool,
        context: &Context,
    ) -> anyhow::Result<Engine> {
        let mut options = LoadOptions::new();
        options.device = self.device.clone();
        options.threads = self.threads(context);
        options.isolation = self.isolation(isolate);
        let task = context.task(&format!("loading {}", path.display()));
        Ok(context.registry()?.load_file(file, &options, &task.host(context.cancel_flag()))?)
    }
}

/// Isolation with one limit for every call, and one for calls that were cancelled. A crash of a vendor's library is always an error, because users cannot know which models are
/// safe.
pub(crate) fn isolation(worker: bool, limit: Option<Duration>, cancel: Duration) -> Isolation {
    let limits = Limits { init: limit, build: limit, session: limit, run: limit, cancel: Some(cancel) };
    let worker = worker || limit.is_some();
    Isolation { worker, runtimes_in_worker: true, limits, ..Isolation::default() }
}
