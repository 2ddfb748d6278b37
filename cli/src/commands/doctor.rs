//! `sdrun doctor`

use crate::{context::Context, exit, format, provider::PROBE_LIMIT};
use sdrun::{
    Entry, Probe, Registry, Result,
    abi::RuntimeSpec,
    runtime,
    worker::{self, Confinement},
};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Check this installation (folders, providers, runtimes) and say what to do
///
/// Checks each provider step by step: its manifest, its library, and every place where its runtime may be. Then loads it in a
/// worker process with a time limit. The exit code is 1 if no provider works.
///
/// Example: sdrun doctor
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    Warning,
    Problem,
}

#[derive(Serialize)]
struct Check {
    name: &'static str,
    state: State,
    detail: String,
    hint: Option<String>,
}

impl Check {
    fn new(name: &'static str, state: State, detail: impl Into<String>) -> Self {
        Check { name, state, detail: detail.into(), hint: None }
    }
    fn failed(name: &'static str, state: State, error: &sdrun::Error) -> Self {
        Check { hint: error.hint().as_ref().map(exit::advice), ..Check::new(name, state, error.to_string()) }
    }
    fn hint(self, hint: impl Into<String>) -> Self {
        Check { hint: Some(hint.into()), ..self }
    }
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    /// Whether at least one provider works.
    usable: bool,
    checks: Vec<Check>,
    providers: Vec<ProviderReport>,
}

#[derive(Serialize)]
struct ProviderReport {
    provider: String,
    usable: bool,
    checks: Vec<Check>,
}

pub(crate) fn run(_: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let registry = context.registry()?;
    let mut checks = vec![match worker::find_worker() {
        Ok(path) => Check::new("worker", State::Ok, path.display().to_string()),
        Err(e) => Check::failed("worker", State::Problem, &e.into()),
    }];
    checks.push(match &context.config.path {
        Some(path) => Check::new("config file", State::Ok, path.display().to_string()),
        None => Check::new("config file", State::Ok, "none"),
    });
    let paths = registry.paths();
    checks.push(folder("cache folder", &paths.cache));
    checks.push(folder("data folder", &paths.data));
    // A provider without its runtime is not loaded: the result is known.
    let ready = |entry: &Entry| {
        let missing = |spec: &RuntimeSpec| runtime::find(spec, paths).is_none();
        entry.skipped.is_none()
            && !entry.provide.as_ref().and_then(|p| p.runtime.as_ref()).is_some_and(missing)
    };
    let ids: Vec<&str> = registry.entries().iter().filter(|e| ready(e)).map(|e| e.id.as_str()).collect();
    let task = context.task("loading providers");
    let found = registry.probe(&ids, PROBE_LIMIT);
    drop(task);
    context.go_on()?;
    let mut probes = ids.into_iter().zip(found);
    let providers: Vec<ProviderReport> = registry
        .entries()
        .iter()
        .map(|entry| {
            let probe = if ready(entry) { probes.next().map(|(_, found)| found) } else { None };
            examine(&registry, entry, probe)
        })
        .collect();
    let usable = providers.iter().any(|p| p.usable);
    let report = Report { version: env!("CARGO_PKG_VERSION"), usable, checks, providers };
    context.present(&report, |out| show(out, &report))?;
    Ok(ExitCode::from(if usable { 0 } else { exit::NO }))
}

/// Checks whether files can be created in a folder, or in its nearest existing ancestor. Leaves no file behind.
fn folder(name: &'static str, dir: &Path) -> Check {
    let there: PathBuf = dir.ancestors().find(|d| d.exists()).unwrap_or(dir).to_path_buf();
    if let Err(e) = tempfile::tempfile_in(&there) {
        return Check::new(name, State::Problem, format!("{} is not writable: {e}", there.display()))
            .hint("make it writable, or choose another folder with SDRUN_CACHE_DIR or SDRUN_DATA_DIR");
    }
    let (state, free) = match fs4::available_space(&there) {
        Ok(free) if free < 1_000_000_000 => (State::Warning, format!("only {} free", format::bytes(free))),
        Ok(free) => (State::Ok, format!("{} free", format::bytes(free))),
        Err(e) => (State::Warning, format!("free space unknown: {e}")),
    };
    let new = if there == dir { "" } else { " (will be created)" };
    Check::new(name, state, format!("{}{new}, writable, {free}", dir.display()))
}

fn examine(registry: &Registry, entry: &Entry, probe: Option<Result<Probe>>) -> ProviderReport {
    let place = format!("{} ({})", entry.manifest_path.display(), entry.origin);
    let mut checks = Vec::new();
    match &entry.skipped {
        Some(why) => checks.push(Check::new("manifest", State::Problem, format!("{place}: {why}"))),
        None => checks.push(Check::new("manifest", State::Ok, place)),
    }
    let provide = entry.provide.as_ref().filter(|_| entry.skipped.is_none());
    if let Some(spec) = provide.and_then(|p| p.runtime.as_ref()) {
        checks.extend(candidates(registry, spec));
    }
    for spec in provide.iter().flat_map(|p| &p.extensions) {
        checks.push(match runtime::find_extension(spec, registry.paths()) {
            // For other systems.
            Ok(None) if runtime::plan(spec, registry.paths()).is_err() => continue,
            Ok(Some(found)) => {
                let text = format!("{} in {} ({})", spec.name, found.dir.display(), found.origin);
                Check::new("extension", State::Ok, text)
            }
            Ok(None) => Check::new("extension", State::Ok, format!("{} is not installed", spec.name)),
            Err(e) => Check::failed("extension", State::Problem, &e),
        });
    }
    let mut usable = false;
    match probe {
        None => {}
        Some(Err(e)) => checks.push(Check::failed("loading", State::Problem, &e)),
        Some(Ok(found)) => {
            let library =
                found.runtime.library.as_ref().map_or("built in".into(), |l| l.display().to_string());
            let text = format!(
                "{} {} ({library}), in {}",
                found.runtime.name,
                found.runtime.version,
                format::seconds(found.seconds)
            );
            checks.push(Check::new("loading", State::Ok, text));
            checks.push(sandbox(registry, provide.is_some_and(|p| p.sandbox.is_some()), found.confinement));
            let present: Vec<_> = found.devices.iter().filter(|(d, _)| d.absent.is_none()).collect();
            usable = !present.is_empty();
            let absent = found.devices.iter().find_map(|(d, _)| d.absent.clone());
            checks.push(match (usable, absent) {
                (true, _) => {
                    Check::new("devices", State::Ok, format::list(present.iter().map(|(d, _)| &d.name)))
                }
                (false, Some(why)) => Check::new("devices", State::Warning, format!("none to run on: {why}"))
                    .hint("engines can be built here and run on a machine with the hardware"),
                (false, None) => Check::new("devices", State::Problem, "none"),
            });
        }
    }
    ProviderReport { provider: entry.id.clone(), usable, checks }
}

/// Whether the provider's workers are confined.
fn sandbox(registry: &Registry, works: bool, found: Confinement) -> Check {
    let (state, text) = match found {
        Confinement::Full => (State::Ok, "workers reach only their own files and the models, and no network"),
        Confinement::Partial => (State::Warning, "this kernel enforces only a part of it"),
        Confinement::None if !works => (State::Ok, "none: the runtime was not tried in one"),
        Confinement::None if registry.confine().off => (State::Ok, "switched off"),
        Confinement::None => (State::Warning, "this system has none"),
    };
    Check::new("sandbox", state, text)
}

/// The places that were searched for the runtime. The first place that has it is used.
fn candidates(registry: &Registry, spec: &RuntimeSpec) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut have = false;
    for candidate in runtime::candidates(spec, registry.paths()) {
        let place = format!("{} ({})", candidate.dir.display(), candidate.origin);
        checks.push(match candidate.library {
            Some(library) if !have => {
                have = true;
                Check::new("runtime", State::Ok, format!("{} ({})", library.display(), candidate.origin))
            }
            Some(library) => Check::new(
                "runtime",
                State::Ok,
                format!("not used: {} ({})", library.display(), candidate.origin),
            ),
            None => Check::new("runtime", State::Warning, format!("not in {place}")),
        });
    }
    if !have {
        let install = match runtime::plan(spec, registry.paths()) {
            Ok(_) => format!("run `sdrun runtime install {}`, or ", spec.name),
            Err(_) => String::new(),
        };
        let check =
            Check::new("runtime", State::Problem, format!("{} {} is not installed", spec.name, spec.version));
        let holds = spec.library_names.join(" or ");
        checks.push(check.hint(format!("{install}set {} to the folder that holds {holds}", spec.env)));
    }
    checks
}

fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let list = |out: &mut dyn Write, checks: &[Check]| -> io::Result<()> {
        for check in checks {
            let state = match check.state {
                State::Ok => "ok",
                State::Warning => "warning",
                State::Problem => "problem",
            };
            writeln!(out, "  {state:<8} {:<13} {}", check.name, check.detail)?;
            if let Some(hint) = &check.hint {
                writeln!(out, "  {:<8} {:<13} hint: {hint}", "", "")?;
            }
        }
        Ok(())
    };
    writeln!(out, "sdrun {}", report.version)?;
    list(out, &report.checks)?;
    for provider in &report.providers {
        writeln!(out, "{}", provider.provider)?;
        list(out, &provider.checks)?;
    }
    let usable: Vec<&str> =
        report.providers.iter().filter(|p| p.usable).map(|p| p.provider.as_str()).collect();
    if usable.is_empty() {
        writeln!(out, "no provider works here")
    } else {
        writeln!(out, "usable here: {}", usable.join(", "))
    }
}
