//! `sdrun cache`

use crate::{context::Context, exit, format, parse};
use clap::Subcommand;
use sdrun::{Cache, CacheEntry, GcLimits};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

/// List, check and clean up the cache of built engines
///
/// sdrun deletes only files that it put into its cache folder itself.
///
/// Example: sdrun cache gc --max-size 5GB --max-age 30d --dry-run
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List cached engines, least recently used first
    List,
    /// Delete engines beyond the limits, and always damaged ones and leftovers
    Gc {
        /// Keep at most this much and delete the least recently used engines: 5GB, 500MiB
        #[arg(long, value_name = "SIZE", value_parser = parse::size)]
        max_size: Option<u64>,
        /// Delete engines unused for longer than this: 12h, 30d
        #[arg(long, value_name = "TIME", value_parser = parse::duration)]
        max_age: Option<Duration>,
        /// Only show what would be deleted
        #[arg(long)]
        dry_run: bool,
    },
    /// Check every cached engine for damage; exit code 1 if there is any
    Verify,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let cache = Cache::at(context.paths()?.engines());
    match &args.command {
        Command::List => list(&cache, context),
        Command::Gc { max_size, max_age, dry_run } => {
            gc(&cache, &GcLimits { max_bytes: *max_size, max_age: *max_age }, *dry_run, context)
        }
        Command::Verify => verify(&cache, context),
    }
}

#[derive(Serialize)]
struct Listing<'a> {
    folder: PathBuf,
    bytes: u64,
    engines: &'a [CacheEntry],
}

fn list(cache: &Cache, context: &Context) -> anyhow::Result<ExitCode> {
    let engines = cache.list()?;
    let bytes = engines.iter().map(|e| e.bytes).sum();
    let listing = Listing { folder: cache.root().to_path_buf(), bytes, engines: &engines };
    context.present(&listing, |out| {
        if !engines.is_empty() {
            writeln!(out, "{}", table(&engines))?;
        }
        writeln!(out, "{} engines, {}, in {}", engines.len(), format::bytes(bytes), cache.root().display())
    })?;
    Ok(ExitCode::SUCCESS)
}

fn table(engines: &[CacheEntry]) -> comfy_table::Table {
    let mut table = format::table(["key", "model", "provider", "runtime", "precision", "size", "unused for"]);
    for e in engines {
        let short = e.key.get(..12).unwrap_or(&e.key).to_string();
        let (size, unused) = (format::bytes(e.bytes), format::seconds(e.idle_seconds as f64));
        match &e.content {
            Ok(c) => {
                let [model, provider, runtime, precision] =
                    [&c.model, &c.provider, &c.runtime, &c.precision].map(|text| format::line(text));
                table.add_row([&*short, &model, &provider, &runtime, &precision, &size, &unused])
            }
            Err(_) => table.add_row([&*short, "(damaged)", "", "", "", &size, &unused]),
        };
    }
    format::right(&mut table, 5..7);
    table
}

#[derive(Serialize)]
struct Collected {
    dry_run: bool,
    bytes: u64,
    deleted: Vec<Deleted>,
}

#[derive(Serialize)]
struct Deleted {
    path: PathBuf,
    bytes: u64,
}

fn gc(cache: &Cache, limits: &GcLimits, dry_run: bool, context: &Context) -> anyhow::Result<ExitCode> {
    let deleted: Vec<Deleted> =
        cache.gc(limits, dry_run)?.into_iter().map(|(path, bytes)| Deleted { path, bytes }).collect();
    let report = Collected { dry_run, bytes: deleted.iter().map(|d| d.bytes).sum(), deleted };
    context.present(&report, |out| {
        for d in &report.deleted {
            writeln!(out, "{}  {}", d.path.display(), format::bytes(d.bytes))?;
        }
        let what = if dry_run { "would be deleted" } else { "deleted" };
        writeln!(out, "{} files, {}, {what}", report.deleted.len(), format::bytes(report.bytes))
    })?;
    if limits.max_bytes.is_none() && limits.max_age.is_none() {
        context.note("without --max-size and --max-age, only damaged engines and leftovers are deleted");
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Verified<'a> {
    folder: PathBuf,
    checked: usize,
    damaged: Vec<&'a CacheEntry>,
}

fn verify(cache: &Cache, context: &Context) -> anyhow::Result<ExitCode> {
    let engines = cache.verify()?;
    let damaged: Vec<&CacheEntry> = engines.iter().filter(|e| e.content.is_err()).collect();
    let report = Verified { folder: cache.root().to_path_buf(), checked: engines.len(), damaged };
    context.present(&report, |out| show_verified(out, &report))?;
    if report.damaged.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    context.note("`sdrun cache gc` deletes damaged engines; they are built again when needed");
    Ok(ExitCode::from(exit::NO))
}

fn show_verified(out: &mut dyn Write, report: &Verified<'_>) -> io::Result<()> {
    for why in report.damaged.iter().filter_map(|e| e.content.as_ref().err()) {
        writeln!(out, "{why}")?;
    }
    writeln!(out, "{} engines checked, {} damaged", report.checked, report.damaged.len())
}
