//! What a shell offers for names: built-in models, providers, devices. The shell calls this program with
//! [`VARIABLE`] set each time the user presses Tab, so that the names are those of the moment.

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
/// A user who presses Tab does not wait longer for a provider's devices.
const PATIENCE: Duration = Duration::from_secs(5);

/// Prints completions and ends the program, if a shell called it for them.
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

/// Providers that can be used.
pub(crate) fn providers() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let Some(registry) = registry() else { return Vec::new() };
        let of =
            |p: &&sdrun::abi::Provide| CompletionCandidate::new(&p.id).help(Some(p.summary.clone().into()));
        registry.usable().iter().map(of).collect()
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

/// The providers, or nothing: a shell that completes has no place for errors.
fn registry() -> Option<Registry> {
    let config = Config::load().ok()?;
    let paths = Paths::for_user(config.folders.data.as_deref(), config.folders.cache.as_deref()).ok()?;
    Registry::discover_with(&Discovery { paths: Some(paths), ..Discovery::default() }).ok()
}
