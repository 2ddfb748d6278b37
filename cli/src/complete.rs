//! Shell completions for the names of built-in models, providers and devices. The shell runs this program with [`VARIABLE`]
//! set each time the user presses Tab, so the names are always current.

use crate::{cli::Cli, config::Config};
use clap::CommandFactory;
use clap_complete::{
    CompleteEnv, PathCompleter,
    engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate, ValueCompleter},
};
use sdrun::{Discovery, Paths, Registry, weights::builtin};
use std::{ffi::OsStr, time::Duration};

/// Set by the scripts that `sdrun completions` prints.
pub(crate) const VARIABLE: &str = "SDRUN_COMPLETE";
/// How long a user who presses Tab waits for a provider's devices.
const PATIENCE: Duration = Duration::from_secs(5);

/// Prints completions and exits if a shell called the program for them.
pub(crate) fn serve() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).complete();
}

/// Built-in models and files.
pub(crate) fn models() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let typed = current.to_string_lossy();
        let names = builtin::list().iter().filter(|model| model.name.starts_with(&*typed));
        let names = names.map(|model| CompletionCandidate::new(model.name).help(Some(model.summary.into())));
        names.chain(PathCompleter::any().complete(current)).collect()
    })
}

/// Usable providers.
pub(crate) fn providers() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let Some(registry) = registry() else { return Vec::new() };
        let of =
            |p: &&sdrun::abi::Provide| CompletionCandidate::new(&p.id).help(Some(p.summary.clone().into()));
        registry.usable().iter().map(of).collect()
    })
}

/// Other software to measure.
pub(crate) fn baselines() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let of =
            |b: &sdrun_baselines::Baseline| CompletionCandidate::new(b.name).help(Some(b.summary.into()));
        sdrun_baselines::ALL.iter().map(of).collect()
    })
}

/// Devices of all providers; each is loaded in a worker.
pub(crate) fn devices() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let Some(registry) = registry() else { return Vec::new() };
        let ids: Vec<&str> = registry.usable().iter().map(|p| p.id.as_str()).collect();
        let found = registry.probe(&ids, PATIENCE).into_iter().flatten();
        let devices = found.flat_map(|found| found.devices);
        devices.map(|(d, _)| CompletionCandidate::new(d.id).help(Some(d.name.into()))).collect()
    })
}

/// The providers, or nothing on an error, which a completion cannot show.
fn registry() -> Option<Registry> {
    let config = Config::load().ok()?;
    let paths = Paths::for_user(config.folders.data.as_deref(), config.folders.cache.as_deref()).ok()?;
    Registry::discover_with(&Discovery { paths: Some(paths), ..Discovery::default() }).ok()
}
