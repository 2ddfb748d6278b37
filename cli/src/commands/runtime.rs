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
    path::{Path, PathBuf},
    process::ExitCode,
};

/// List, install and remove vendor runtimes
///
/// Installs a runtime into your data folder, in the version that its provider was tested with, and checks it against a
/// hash. The files come from your own `pip` or, with --from, from a wheel that you already have. Nothing outside that
/// folder changes.
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
        /// Install from this wheel, or from those in this folder, without Python and without a network
        #[arg(long, value_name = "WHEEL|FOLDER")]
        from: Option<PathBuf>,
        /// Also install what only graphics cards need, if the runtime keeps it apart
        #[arg(long)]
        with_gpu: bool,
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
        Command::Install { name, yes, from, with_gpu } => {
            let spec = registry.runtime(name)?;
            install(&registry, spec, from.as_deref(), (*yes, *with_gpu), context)?;
        }
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
    let row = |(spec, found): (&RuntimeSpec, Option<Candidate>)| Row {
        name: spec.name.clone(),
        version: spec.version.clone(),
        found,
        plan: runtime::plan(spec, registry.paths()).ok(),
    };
    let rows: Vec<Row> = registry.runtimes().into_iter().map(row).collect();
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
            size(InstallPlan::download_bytes),
            size(InstallPlan::installed_bytes),
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

fn install(
    registry: &Registry,
    spec: &RuntimeSpec,
    from: Option<&Path>,
    (yes, with_gpu): (bool, bool),
    context: &Context,
) -> anyhow::Result<()> {
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
    let plan = if with_gpu { plan.with_gpu()? } else { plan };
    let report =
        Installed { runtime: &spec.name, version: &spec.version, dir: &plan.dir, present: plan.installed };
    if plan.installed {
        return context.present(&report, |out| {
            writeln!(out, "{} {} is already installed in {}", spec.name, spec.version, plan.dir.display())
        });
    }
    let (download, installed) = (format::bytes(plan.download_bytes()), format::bytes(plan.installed_bytes()));
    let (requirements, dir) = (plan.requirements(), plan.dir.display());
    context.complain(&match from {
        Some(from) => {
            format!("will install {requirements} ({installed} on disk) from {} into {dir}\n", from.display())
        }
        None => format!(
            "will download {requirements} ({download}) with pip and install it ({installed} on disk) into {dir}\n"
        ),
    });
    plan.check_room()?;
    if !yes && !ask(context)? {
        return Err(Error::new(ErrorCode::Cancelled, "nothing was installed").into());
    }
    let task = context.task(&format!("installing {requirements}"));
    let host = task.host(context.cancel_flag());
    let outcome = match from {
        Some(from) => runtime::install_from(&plan, from, &host),
        None => runtime::install(&plan, &host),
    };
    drop(host);
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

/// Asks on the terminal. Without one, silence is no consent.
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
