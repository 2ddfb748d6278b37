//! `sdrun providers`

use crate::{context::Context, format};
use sdrun::{Entry, Registry, RuntimeStatus};
use serde::Serialize;
use std::{
    io::{self, Write},
    process::ExitCode,
};

/// List providers and whether their runtimes are installed
///
/// A provider is a plugin that drives one vendor's runtime. This command reads manifests and looks for files. It loads no code,
/// so it is fast and cannot crash. `sdrun devices` and `sdrun doctor` load the providers.
///
/// sdrun looks for manifests (sdrun-provider-ID.json) in --provider-path, then in SDRUN_PROVIDER_FILES if that is set. If it is
/// not set, sdrun looks in SDRUN_ADD_PROVIDER_FILES, in `providers` beside the executable, in the user's data folder, and in
/// /usr/local/lib/sdrun/providers and /usr/lib/sdrun/providers. The first manifest of an id wins.
///
/// Example: sdrun providers --explain
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show every manifest found, whether it is used, and why
    #[arg(long)]
    explain: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    providers: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    usable: bool,
    #[serde(flatten)]
    entry: &'a Entry,
    runtime: Option<RuntimeStatus>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let registry = context.registry()?;
    let report = Report { providers: rows(&registry) };
    context.present(&report, |out| match args.explain {
        true => explain(out, &report.providers),
        false => list(out, &report.providers),
    })?;
    if registry.entries().is_empty() {
        let folder = registry.paths().providers();
        context.note(&format!(
            "no provider found; put one into {} or name one with --provider-path (`sdrun providers --help` lists all \
             places)",
            folder.display()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn rows(registry: &Registry) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = registry
        .entries()
        .iter()
        .map(|entry| Row {
            usable: entry.skipped.is_none(),
            entry,
            runtime: entry.provide.as_ref().map(|p| registry.runtime_status(p)),
        })
        .collect();
    let priority = |row: &Row<'_>| row.entry.provide.as_ref().map_or(0, |p| p.priority);
    rows.sort_by_key(|row| (!row.usable, -priority(row)));
    rows
}

/// The runtime in a few words.
fn runtime(row: &Row<'_>) -> (String, String) {
    match &row.runtime {
        None => ("?".into(), "?".into()),
        Some(RuntimeStatus { name: Some(name), version, found }) => {
            let version = version.as_deref().unwrap_or_default();
            let state =
                found.as_ref().map_or("not found".into(), |c| format!("{} ({})", c.dir.display(), c.origin));
            (format!("{name} {version}"), state)
        }
        Some(_) => ("built in".into(), "ready".into()),
    }
}

fn list(out: &mut dyn Write, rows: &[Row<'_>]) -> io::Result<()> {
    let mut table = format::table(["provider", "version", "description", "runtime", "found in"]);
    for row in rows.iter().filter(|r| r.usable) {
        let (name, found) = runtime(row);
        let provide = row.entry.provide.as_ref();
        let text = |of: fn(&sdrun::abi::Provide) -> &str| provide.map_or("", of).to_string();
        table.add_row([row.entry.id.clone(), text(|p| &p.version), text(|p| &p.summary), name, found]);
    }
    if table.row_count() > 0 {
        writeln!(out, "{table}")?;
    }
    let skipped = rows.iter().filter(|r| !r.usable).count();
    if skipped > 0 {
        writeln!(out, "{skipped} skipped; `sdrun providers --explain` says why")?;
    }
    Ok(())
}

fn explain(out: &mut dyn Write, rows: &[Row<'_>]) -> io::Result<()> {
    for row in rows {
        let state = row.entry.skipped.as_ref().map_or("usable".into(), |why| format!("skipped: {why}"));
        writeln!(out, "{}: {state}", row.entry.id)?;
        writeln!(out, "  manifest  {} ({})", row.entry.manifest_path.display(), row.entry.origin)?;
        if let Some(p) = &row.entry.provide {
            writeln!(
                out,
                "  summary   {}, version {} of {}, build {}",
                p.summary, p.version, p.vendor, p.build_id
            )?;
            writeln!(
                out,
                "  library   {} ({}, ABI {})",
                p.library.path.display(),
                p.library.target,
                p.library.abi_major
            )?;
            let reference = if p.reference { ", reference for accuracy" } else { "" };
            let isolated = if p.isolate { ", always in a worker" } else { "" };
            writeln!(out, "  priority  {}{reference}{isolated}", p.priority)?;
            let (name, found) = runtime(row);
            writeln!(out, "  runtime   {name}: {found}")?;
        }
    }
    Ok(())
}
