//! `sdrun verify`

use crate::{
    context::Context,
    exit,
    files::npz,
    format, job,
    model::{BuildArgs, ModelArgs, ProviderArgs},
    tensors::InputArgs,
};
use sdrun::{
    BuildOptions, Isolation, Registry, Tensors,
    abi::{Error, Precision},
    graph::WeightsPolicy,
    verify::{Comparison, Tolerance, compare},
};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

/// Compare a provider's outputs with a reference
///
/// Runs a model on a provider and, in fp32 on the same inputs, on the reference provider, each in a worker process;
/// or takes the reference outputs from a file. fp32 is right up to a relative error of 1e-3 (of the largest value)
/// and a cosine of 0.99999; fp16 to a cosine of 0.999; bf16 to 0.99. Exit code 1 where an output is wrong.
///
/// Example: sdrun verify sd15/vae-decoder -p openvino --precision bf16
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An .onnx file or the name of a built-in model
    model: String,

    /// Provider to compare with; without it, the one whose manifest says that it is the reference
    #[arg(long, value_name = "ID", conflicts_with = "reference_file")]
    reference: Option<String>,

    /// Compare with the outputs in this .npz file
    #[arg(long, value_name = "FILE.npz")]
    reference_file: Option<PathBuf>,

    #[command(flatten)]
    provider: ProviderArgs,
    #[command(flatten)]
    shapes: ModelArgs,
    #[command(flatten)]
    build: BuildArgs,
    #[command(flatten)]
    inputs: InputArgs,
}

#[derive(Serialize)]
struct Report {
    model: String,
    provider: String,
    precision: Precision,
    /// A provider or a file.
    reference: String,
    tolerance: Tolerance,
    accepted: bool,
    outputs: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    accepted: bool,
    #[serde(flatten)]
    comparison: Comparison,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let job = job::prepare(&args.model, &args.shapes, &args.inputs, WeightsPolicy::Required, context)?;
    let registry = context.registry()?;
    let isolation = args.provider.isolation(true);
    let (reference, expected) = match (&args.reference_file, reference_provider(args, &registry)) {
        (Some(path), _) => (path.display().to_string(), npz::read(path, None)?),
        (None, id) => {
            let id = id?;
            let side = Side { id: Some(&id), device: None, build: &args.build.of_reference() };
            let (_, outputs) = outputs_of(&side, &job, args, &registry, &isolation, context)?;
            (id, outputs)
        }
    };
    context.go_on()?;
    let (id, device) = (args.provider.provider.as_deref(), args.provider.device.as_deref());
    let side = Side { id, device, build: &args.build };
    let (provider, outputs) = outputs_of(&side, &job, args, &registry, &isolation, context)?;
    let tolerance = Tolerance::of(args.build.precision);
    let rows: Vec<Row> = compare(&outputs, &expected)?
        .into_iter()
        .map(|comparison| Row { accepted: tolerance.accepts(&comparison), comparison })
        .collect();
    let report = Report {
        model: job.model.name().to_string(),
        provider,
        precision: args.build.precision,
        reference,
        tolerance,
        accepted: rows.iter().all(|row| row.accepted),
        outputs: rows,
    };
    context.present(&report, |out| show(out, &report))?;
    Ok(ExitCode::from(if report.accepted { 0 } else { exit::NO }))
}

fn reference_provider(args: &Args, registry: &Registry) -> Result<String, Error> {
    match &args.reference {
        Some(id) => Ok(id.clone()),
        None => registry.reference().map(|p| p.id.clone()).ok_or_else(|| {
            Error::precondition("there is no reference provider to compare with")
                .with_hint("name a provider with `--reference`, or give its outputs with `--reference-file`")
        }),
    }
}

/// One of the two that are compared.
struct Side<'a> {
    id: Option<&'a str>,
    device: Option<&'a str>,
    build: &'a BuildArgs,
}

/// Runs the job on a provider; says which one it was.
fn outputs_of(
    side: &Side<'_>,
    job: &job::Job,
    args: &Args,
    registry: &Registry,
    isolation: &Isolation,
    context: &Context,
) -> anyhow::Result<(String, Tensors)> {
    let provider = match side.id {
        Some(id) => registry.open(id, isolation)?,
        None => registry.open_best(isolation)?,
    };
    let device = provider.device(side.device)?;
    let options = BuildOptions {
        threads: args.provider.threads(),
        shapes: job.shapes.clone(),
        ..BuildOptions::new(device)
    };
    let engine = side.build.build(context, &provider, options, &job.model, false)?;
    let task = context.task(&format!("running on {}", provider.id()));
    let host = task.host(context.cancel_flag());
    let outputs = engine.session(&job.model.weights(), &host)?.run(&job.inputs, &host)?;
    Ok((provider.id().to_string(), outputs))
}

fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Report { model, provider, precision, reference, tolerance, .. } = report;
    let relative =
        tolerance.relative_error.map_or(String::new(), |e| format!("relative error at most {e:e}, "));
    writeln!(
        out,
        "{model} on {provider} in {precision}, compared with {reference} ({relative}cosine at least {})",
        tolerance.cosine
    )?;
    let mut table =
        format::table(["output", "max abs", "relative", "cosine", "SNR dB", "NaN, inf", "verdict"]);
    for Row { accepted, comparison: c } in &report.outputs {
        table.add_row([
            c.output.clone(),
            format!("{:.3e}", c.max_abs_error),
            format!("{:.3e}", c.relative_error),
            format!("{:.7}", c.cosine),
            c.snr_db.map_or("equal".into(), |db| format!("{db:.1}")),
            c.not_finite.to_string(),
            if *accepted { "right".into() } else { "WRONG".to_string() },
        ]);
    }
    format::right(&mut table, 1..6);
    writeln!(out, "{table}")
}
