//! `sdrun runtime`

use crate::{context::Context, format};
use clap::Subcommand;
use sdrun::{
    Registry,
    abi::{Error, ErrorCode, RuntimeSpec},
    runtime::{self, Candidate, InstallPlan},
};
use serde::Serialize;
use std::{
    io::{self, BufRead, IsTerminal, Write},
    path::Path,
    process::ExitCode,
};

/// List, install and remove vendor runtimes
///
/// Installs a runtime into your data folder with your own `pip`, in the version that its provider was tested with, checked
/// against a hash. Nothing outside that folder changes.
///
/// Example: sdrun runtime install openvino
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List runtimes, where they are installed, and what installing them takes
    List,
    /// Install a runtime; shows the download, its size and its destination, and asks first
    Install {
        /// Name of the runtime, as listed by `sdrun runtime list`
        name: String,
        /// Install without asking
        #[arg(short, long)]
        yes: bool,
    },
    /// Remove a runtime that sdrun installed
    Remove {
        /// Name of the runtime
        name: String,
    },
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let registry = context.registry()?;
    match &args.command {
        Command::List => list(&registry, context)?,
        Command::Install { name, yes } => install(&registry, registry.runtime(name)?, *yes, context)?,
        Command::Remove { name } => remove(&registry, registry.runtime(name)?, context)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Report {
    runtimes: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    version: String,
    /// The copy that sdrun would use.
    found: Option<Candidate>,
    /// What installing it takes; `None` if sdrun cannot install it here.
    plan: Option<InstallPlan>,
}

fn list(registry: &Registry, context: &Context) -> anyhow::Result<()> {
    let mut rows: Vec<Row> = Vec::new();
    for spec in registry.usable().into_iter().filter_map(|p| p.runtime.as_ref()) {
        if rows.iter().all(|row| row.name != spec.name) {
            rows.push(Row {
                name: spec.name.clone(),
                version: spec.version.clone(),
                found: runtime::find(spec, registry.paths()),
                plan: runtime::plan(spec, registry.paths()).ok(),
            });
        }
    }
    let report = Report { runtimes: rows };
    context.present(&report, |out| show(out, &report.runtimes))?;
    if report.runtimes.is_empty() {
        context.note(
            "no usable provider needs a runtime of its own; `sdrun providers --explain` lists providers",
        );
    }
    Ok(())
}

fn show(out: &mut dyn Write, rows: &[Row]) -> io::Result<()> {
    let mut table = format::table(["runtime", "version", "download", "on disk", "state"]);
    for row in rows {
        let size =
            |of: fn(&InstallPlan) -> u64| row.plan.as_ref().map_or("-".into(), |p| format::bytes(of(p)));
        let state = match (&row.found, &row.plan) {
            (Some(found), _) => format!("{} ({})", found.dir.display(), found.origin),
            (None, Some(_)) => "not installed".into(),
            (None, None) => "not found; sdrun cannot install it here".into(),
        };
        table.add_row([
            row.name.clone(),
            row.version.clone(),
            size(|p| p.wheel.download_bytes),
            size(|p| p.wheel.installed_bytes),
            state,
        ]);
    }
    format::right(&mut table, 2..4);
    if rows.is_empty() { Ok(()) } else { writeln!(out, "{table}") }
}

#[derive(Serialize)]
struct Installed<'a> {
    runtime: &'a str,
    version: &'a str,
    dir: &'a Path,
    /// Whether it was already installed.
    present: bool,
}

fn install(registry: &Registry, spec: &RuntimeSpec, yes: bool, context: &Context) -> anyhow::Result<()> {
    if spec.pip.is_none()
        && let Some(found) = runtime::find(spec, registry.paths())
    {
        let (dir, version) = (&found.dir, "of the system");
        let report = Installed { runtime: &spec.name, version, dir, present: true };
        return context.present(&report, |out| {
            writeln!(out, "{} is already installed in {} ({})", spec.name, dir.display(), found.origin)
        });
    }
    let plan = runtime::plan(spec, registry.paths())?;
    let report =
        Installed { runtime: &spec.name, version: &spec.version, dir: &plan.dir, present: plan.installed };
    if plan.installed {
        return context.present(&report, |out| {
            writeln!(out, "{} {} is already installed in {}", spec.name, spec.version, plan.dir.display())
        });
    }
    let (download, installed) = (plan.wheel.download_bytes, plan.wheel.installed_bytes);
    context.complain(&format!(
        "will download {} ({}) with pip and install it ({} on disk) into {}\n",
        plan.requirement,
        format::bytes(download),
        format::bytes(installed),
        plan.dir.display()
    ));
    check_room(&plan)?;
    if !yes && !ask(context)? {
        return Err(Error::new(ErrorCode::Cancelled, "nothing was installed").into());
    }
    let task = context.task(&format!("installing {}", plan.requirement));
    let outcome = runtime::install(&plan);
    drop(task);
    if outcome.is_err() {
        // Ctrl-C reaches pip too, and pip may end before our own handler has run.
        context.let_interrupt_arrive();
    }
    outcome?;
    context.present(&report, |out| {
        writeln!(out, "{} {} is installed in {}", spec.name, spec.version, plan.dir.display())
    })
}

/// The wheel and the unpacked files are both on disk for a moment.
fn check_room(plan: &InstallPlan) -> anyhow::Result<()> {
    let needed = plan.wheel.download_bytes + plan.wheel.installed_bytes;
    let there = plan.dir.ancestors().find(|d| d.exists()).unwrap_or(&plan.dir);
    let free = fs4::available_space(there).map_err(|e| Error::io("find the free space of", there, &e))?;
    if free >= needed {
        return Ok(());
    }
    let (needed, free) = (format::bytes(needed), format::bytes(free));
    Err(Error::new(
        ErrorCode::ResourceExhausted,
        format!("{} needs about {needed} in {}, but only {free} are free", plan.requirement, there.display()),
    )
    .with_hint("free some space, or choose another folder with SDRUN_DATA_DIR")
    .into())
}

/// Asks on the terminal. Without a terminal, this is an error.
fn ask(context: &Context) -> anyhow::Result<bool> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Error::invalid("cannot ask whether to install: this is not a terminal")
            .with_hint("add `--yes` to install without being asked")
            .into());
    }
    context.complain("continue? [y/N] ");
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(|e| Error::io("read", "standard input", &e))?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}

#[derive(Serialize)]
struct Removed<'a> {
    runtime: &'a str,
    removed: bool,
}

fn remove(registry: &Registry, spec: &RuntimeSpec, context: &Context) -> anyhow::Result<()> {
    let removed = runtime::remove(spec, registry.paths())?;
    context.present(&Removed { runtime: &spec.name, removed }, |out| {
        let dir = runtime::install_dir(spec, registry.paths());
        match removed {
            true => writeln!(out, "{} {} was removed from {}", spec.name, spec.version, dir.display()),
            false => writeln!(out, "{} {} was not installed by sdrun", spec.name, spec.version),
        }
    })
}
