//! `sdrun providers`

use crate::{
    complete,
    context::Context,
    exit, format,
    model::ModelArgs,
    provider::{PROBE_LIMIT, isolation},
};
use sdrun::{
    BuildOptions, Candidate, Entry, Registry, Rejected, RuntimeStatus, TracingHost, Why, Wishes,
    abi::{Device, MemoryEstimate, Precision},
    graph::WeightsPolicy,
};
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
/// With --for MODEL, ranks the providers and devices for that model and says why. `sdrun build` and `sdrun run` use the
/// first one that works, unless you name a provider. This loads each provider in a worker process with a time limit.
///
/// Example: sdrun providers --explain
///
/// Example: sdrun providers --for sd15/unet --precision bf16
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show every manifest found, whether it is used, and why
    #[arg(long)]
    explain: bool,

    /// Rank the providers and devices for this model: an .onnx file or the name of a built-in model
    #[arg(long = "for", value_name = "MODEL", add = complete::models())]
    model: Option<String>,

    /// Precision to rank for [default: fp32]
    #[arg(long, value_name = "PRECISION", requires = "model")]
    precision: Option<Precision>,

    #[command(flatten)]
    shapes: ModelArgs,
}

#[derive(Serialize)]
struct Report<'a> {
    providers: Vec<Row<'a>>,
    /// With `--for`.
    #[serde(skip_serializing_if = "Option::is_none")]
    ranking: Option<Ranking>,
}

#[derive(Serialize)]
struct Ranking {
    model: String,
    precision: Precision,
    /// The best first.
    candidates: Vec<Choosable>,
    rejected: Vec<Rejected>,
}

#[derive(Serialize)]
struct Choosable {
    provider: String,
    device: Device,
    why: Why,
    memory: MemoryEstimate,
    session_compiles: bool,
}

#[derive(Serialize)]
struct Row<'a> {
    /// Whether its manifest counts; its runtime may be missing.
    usable: bool,
    /// Whether its runtime is there, too.
    ready: bool,
    #[serde(flatten)]
    entry: &'a Entry,
    runtime: Option<RuntimeStatus>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let registry = context.registry()?;
    let ranking = args.model.as_ref().map(|what| rank(what, args, &registry, context)).transpose()?;
    let report = Report { providers: rows(&registry), ranking };
    context.present(&report, |out| {
        match (args.explain, &report.ranking) {
            (true, _) => explain(out, &report.providers)?,
            (false, None) => list(out, &report.providers)?,
            (false, Some(_)) => {}
        }
        report.ranking.as_ref().map_or(Ok(()), |ranking| show_ranking(out, ranking))
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

fn rank(what: &str, args: &Args, registry: &Registry, context: &Context) -> anyhow::Result<Ranking> {
    let model = args.shapes.open(what, WeightsPolicy::MayBeAbsent, context)?;
    let (shapes, open_shapes) = args.shapes.shapes_and_lists()?;
    // An error of the model is not one of each provider.
    model.bound_for(&shapes, &open_shapes)?;
    let precision = args.precision.or(context.config.precision).unwrap_or(Precision::Fp32);
    let options = |device: Device| {
        let mut options = BuildOptions::new(device).precision(precision).shapes(shapes.clone());
        options.open_shapes = open_shapes.clone();
        options
    };
    let mut wishes = Wishes::new();
    wishes.device = context.config.device.clone();
    wishes.isolation = isolation(true, Some(PROBE_LIMIT), PROBE_LIMIT);
    let task = context.task("asking providers");
    let mut choice = registry.choose(&model, &wishes, &options, &TracingHost);
    let choosable = |candidate: Candidate| Choosable {
        provider: candidate.provider.id().to_string(),
        device: candidate.options.device,
        why: candidate.why,
        memory: candidate.memory,
        session_compiles: candidate.session_compiles,
    };
    let candidates: Vec<Choosable> = choice.by_ref().map(choosable).collect();
    drop(task);
    context.go_on()?;
    let rejected = choice.rejected().to_vec();
    Ok(Ranking { model: model.name().to_string(), precision, candidates, rejected })
}

fn show_ranking(out: &mut dyn Write, ranking: &Ranking) -> io::Result<()> {
    writeln!(out, "for {} in {}:", ranking.model, ranking.precision)?;
    for (place, c) in ranking.candidates.iter().enumerate() {
        let compiles = if c.session_compiles { "; compiles whenever it is loaded" } else { "" };
        writeln!(
            out,
            "  {}. {} on {} ({}): {}{compiles}{}",
            place + 1,
            c.provider,
            c.device.id,
            c.device.name,
            c.why,
            memory(&c.memory)
        )?;
    }
    for r in &ranking.rejected {
        let device = r.device.as_ref().map_or(String::new(), |device| format!(" on {device}"));
        writeln!(out, "  not {}{device}: {}", r.provider, r.error)?;
        if let Some(hint) = &r.error.hint {
            writeln!(out, "      hint: {}", exit::advice(hint))?;
        }
    }
    Ok(())
}

/// `; at least 3.44 GB of main memory`.
fn memory(estimate: &MemoryEstimate) -> String {
    let sum = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b.unwrap_or(0)));
    let parts = [
        (sum(estimate.host_weights, estimate.host_activations), "main memory"),
        (sum(estimate.device_weights, estimate.device_activations), "device memory"),
    ];
    let words = parts.into_iter().filter_map(|(bytes, what)| Some((bytes.filter(|n| *n > 0)?, what)));
    let words: Vec<String> =
        words.map(|(bytes, what)| format!("{} of {what}", format::bytes(bytes))).collect();
    if words.is_empty() { String::new() } else { format!("; at least {}", words.join(" and ")) }
}

fn rows(registry: &Registry) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = registry
        .entries()
        .iter()
        .map(|entry| {
            let runtime = entry.provide.as_ref().map(|p| registry.runtime_status(p));
            let missing = runtime.as_ref().is_none_or(|r| r.name.is_some() && r.found.is_none());
            let usable = entry.skipped.is_none();
            Row { usable, ready: usable && !missing, entry, runtime }
        })
        .collect();
    let priority = |row: &Row<'_>| row.entry.provide.as_ref().map_or(0, |p| p.highest_priority());
    rows.sort_by_key(|row| (!row.usable, !row.ready, -priority(row)));
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
        let state = match (&row.entry.skipped, row.ready) {
            (Some(why), _) => format!("skipped: {why}"),
            (None, true) => "usable".into(),
            (None, false) => "its runtime is not installed".into(),
        };
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
            let kinds: String = p.priorities.iter().map(|(kind, n)| format!(", {n} on a {kind}")).collect();
            writeln!(out, "  priority  {}{kinds}{reference}{isolated}", p.priority)?;
            let (name, found) = runtime(row);
            writeln!(out, "  runtime   {name}: {found}")?;
            if let Some(spec) = p.runtime.as_ref().filter(|_| row.usable && !row.ready) {
                writeln!(out, "  hint      {}", exit::advice(&spec.how_to_get()))?;
            }
        }
    }
    Ok(())
}
