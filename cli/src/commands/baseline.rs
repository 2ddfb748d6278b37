//! `sdrun baseline`

use crate::{context::Context, format};
use clap::Subcommand;
use sdrun::{Paths, abi::Error, bench, did_you_mean};
use sdrun_baselines::{ALL, Baseline};
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode};

/// List, install and remove other software to measure beside the providers
///
/// `sdrun bench --baseline NAME` runs the same model with the same inputs, threads and precision in other software, in turns with the
/// providers. Each gets a Python environment of its own in your data folder, with pinned packages from your package index. Nothing outside
/// that folder changes.
///
/// Example: sdrun baseline install NAME
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the software and what is installed
    List,
    /// Make an environment with the packages that it needs; some take gigabytes
    Install {
        /// Names, as listed by `sdrun baseline list`, or `all`
        #[arg(required = true)]
        names: Vec<String>,
        /// A Python 3.12 to 3.14 [default: the first one in the search path]
        #[arg(long, value_name = "PROGRAM")]
        python: Option<PathBuf>,
    },
    /// Remove an environment
    Remove {
        /// Names, or `all`
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    summary: &'static str,
    packages: Vec<&'static str>,
    installed: bool,
    /// Why sdrun cannot measure it.
    #[serde(skip_serializing_if = "Option::is_none")]
    obstacle: Option<&'static str>,
}

#[derive(Serialize)]
struct Report {
    baselines: Vec<Row>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let registry = context.registry()?;
    let data = &registry.paths().data;
    match &args.command {
        Command::List => {}
        Command::Install { names, python } => {
            // `all` leaves out what cannot be measured; naming it is an error.
            let all = means_all(names);
            for baseline in named(names)?.into_iter().filter(|baseline| !all || baseline.obstacle().is_none())
            {
                let task = context.task(baseline.name);
                let host = task.host(context.cancel_flag());
                baseline
                    .install(data, python.as_deref(), &host)
                    .map_err(|error| sdrun::Error::Provider { provider: baseline.name.into(), error })?;
            }
        }
        Command::Remove { names } => named(names)?.into_iter().try_for_each(|b| b.remove(data))?,
    }
    let row = |baseline: &Baseline| Row {
        name: baseline.name,
        summary: baseline.summary,
        packages: baseline.packages().collect(),
        installed: baseline.is_installed(data),
        obstacle: baseline.obstacle(),
    };
    let report = Report { baselines: ALL.iter().map(row).collect() };
    context.present(&report, |out| {
        let mut table = format::table(["name", "software", "state"]);
        for row in &report.baselines {
            let state = match (row.obstacle, row.installed) {
                (Some(_), _) => "cannot be measured yet",
                (None, true) => "installed",
                (None, false) => "not installed",
            };
            table.add_row([row.name, row.summary, state]);
        }
        writeln!(out, "{table}")
    })?;
    Ok(ExitCode::SUCCESS)
}

fn means_all(names: &[String]) -> bool {
    names.iter().any(|name| name == "all")
}

/// The baselines with these names; `all` is every one.
fn named(names: &[String]) -> anyhow::Result<Vec<&'static Baseline>> {
    if means_all(names) {
        return Ok(ALL.iter().collect());
    }
    let find = |name: &String| {
        sdrun_baselines::find(name).ok_or_else(|| {
            let guess = did_you_mean(name, ALL.iter().map(|baseline| baseline.name));
            let known = format::list(ALL.iter().map(|baseline| baseline.name));
            Error::not_found(format!("there is no baseline {name:?}{guess}"))
                .with_hint(format!("known are {known}"))
        })
    };
    Ok(names.iter().map(find).collect::<Result<_, _>>()?)
}

/// Looks up the named baselines for a benchmark of whole `pictures`, or of single networks; `all` picks those that can take part. A baseline
/// that is not installed still gets a row, which says how to install it.
pub(crate) fn chosen(
    names: &[String],
    pictures: bool,
    paths: &Paths,
) -> anyhow::Result<Vec<bench::Baseline>> {
    let all = means_all(names);
    let mut chosen = Vec::new();
    for baseline in named(names)? {
        if baseline.draws == pictures {
            let command = baseline.command(&paths.data);
            chosen.push(bench::Baseline { name: baseline.name.into(), command });
        } else if !all {
            let (what, hint) = match baseline.draws {
                true => {
                    ("draws whole pictures and runs no single network", "measure it with --suite pipeline")
                }
                false => ("runs networks, not whole pictures", "leave out --baseline, or take another suite"),
            };
            return Err(Error::invalid(format!("{} {what}", baseline.name)).with_hint(hint).into());
        }
    }
    Ok(chosen)
}
