//! `sdrun tune`

use super::{
    PrecisionArg, Suite,
    plan::{self, Plan},
};
use crate::{complete, context::Context, exit, format, model::ModelArgs};
use clap::ArgAction;
use sdrun::{
    Measurements, Observer, WeightFiles,
    bench::{self, BenchOptions, CaseReport, Event, PrecisionChoice, Row},
};
use serde::Serialize;
use std::{process::ExitCode, time::Duration};

/// Measure which provider is the fastest here, so that the other commands choose it
///
/// Measures each model for a few seconds on every provider, in fp32 and in the best low precision, and keeps the times in your data
/// folder. From then on, commands without --provider use the fastest one for each network. Times of other versions of a provider or its
/// runtime do not count. `sdrun bench` keeps its times, too; it measures longer and shows more.
///
/// Example: sdrun tune sd15/unet sd15/vae-decoder
#[derive(clap::Args)]
pub(crate) struct Args {
    /// .onnx files or names of built-in models [default: the quick suite of `sdrun bench`]
    #[arg(value_name = "MODEL", add = complete::models())]
    models: Vec<String>,

    /// Measure only this provider (repeatable) [default: all usable ones]
    #[arg(short, long = "provider", value_name = "ID", add = complete::providers())]
    providers: Vec<String>,

    /// fp32, fp16, bf16, q8_0, q4_k, or low: each provider's best below fp32 (repeatable) [default: fp32 and low]
    #[arg(long = "precision", value_name = "PRECISION", action = ArgAction::Append)]
    precisions: Vec<PrecisionArg>,

    #[command(flatten)]
    shapes: ModelArgs,
}

#[derive(Serialize)]
struct Line<'a> {
    model: &'a str,
    precision: &'a str,
    /// The fastest provider; `None` if none gave correct results.
    provider: Option<&'a str>,
    median_ms: Option<f64>,
    /// The next one, and its time as a multiple.
    next: Option<(&'a str, f64)>,
}

#[derive(Serialize)]
struct Tuned<'a> {
    choices: Vec<Line<'a>>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let registry = context.registry()?;
    for id in &args.providers {
        registry.entry(id)?;
    }
    let mut precisions: Vec<PrecisionChoice> = args.precisions.iter().map(|p| p.0).collect();
    if precisions.is_empty() {
        precisions = vec![PrecisionChoice::Fixed(sdrun::abi::Precision::Fp32), PrecisionChoice::BestLow];
    }
    let files = WeightFiles::default();
    let plan = plan::plan(&args.models, Suite::Quick, &precisions, &args.shapes, &files, context)?;
    let cases = Plan::cases(&plan, None);
    let options = BenchOptions {
        providers: args.providers.clone(),
        min_runs: 3,
        min_time: Duration::from_secs(1),
        max_time: Duration::from_secs(5),
        ..BenchOptions::default()
    };
    let mut task = None;
    let host = Observer::new(|_, _, _| {}, context.cancel_flag());
    let report = bench::run(&registry, &cases, &options, &host, &mut |event| match event {
        Event::Start { model, precision, system } => {
            task = Some(context.task(&format!("{model} {precision}: {system}")));
        }
        Event::Done(_) => task = None,
        _ => {}
    })?;
    context.go_on()?;
    Measurements::add(registry.paths(), &report)?;
    let tuned = Tuned { choices: report.cases.iter().map(line).collect() };
    context.present(&tuned, |out| {
        let mut table = format::table(["model", "precision", "provider", "median ms", "next"]);
        for line in &tuned.choices {
            table.add_row([
                line.model.to_string(),
                line.precision.to_string(),
                line.provider.unwrap_or("none works").to_string(),
                line.median_ms.map_or("-".into(), format::three_digits),
                line.next
                    .map_or("-".into(), |(name, ratio)| format!("{name} takes {ratio:.2} times as long")),
            ]);
        }
        format::right(&mut table, 3..4);
        writeln!(out, "{table}")
    })?;
    let any = tuned.choices.iter().any(|line| line.provider.is_some());
    Ok(ExitCode::from(if any { 0 } else { exit::NO }))
}

fn line(case: &CaseReport) -> Line<'_> {
    let place = |place: usize| case.rows.iter().find(|row| row.rank == Some(place));
    let median = |row: &Row| row.stats.as_ref().map(|stats| stats.median_ms);
    let (first, second) = (place(1), place(2));
    Line {
        model: &case.model,
        precision: &case.precision,
        provider: first.map(|row| &*row.system),
        median_ms: first.and_then(median),
        next: second.and_then(|row| Some((&*row.system, row.versus_best?.ratio))),
    }
}
