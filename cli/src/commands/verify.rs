//! `sdrun verify`

mod layers;

use crate::{
    build::{self, BuildArgs},
    complete,
    context::Context,
    exit, format, job,
    model::ModelArgs,
    provider::{Job, ProviderArgs},
    tensors::InputArgs,
    weights::{self, WeightArgs},
};
use sdrun::{
    BuildOptions, HostTensor, Provider, Registry, Tensors, WeightReport, Weights,
    abi::{Device, Error, Precision, shape_fits},
    graph::{Dim, Graph},
    numpy::npz,
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
/// Runs a model on a provider and, in fp32 on the same inputs, on the reference provider, each in a worker process. Or
/// takes the reference outputs from a file. An fp32 output is correct if its relative error is at most 1e-3 (of the
/// largest value) and its cosine at least 0.99999. The cosine must be at least 0.999 in fp16, 0.99 in bf16, 0.998 in q8_0
/// and 0.95 in q4_k. If the model quantizes its intermediate values, a relative error of up to 0.1 with a cosine of at
/// least 0.99 is accepted too; the table marks such outputs. The exit code is 1 if an output is wrong.
///
/// With --lora, also runs the model without the adapters and reports outputs that they do not change.
///
/// Example: sdrun verify sd15/vae-decoder -p openvino --precision bf16
///
/// Example: sdrun verify sd15/unet -p ggml --weights dreamshaper.safetensors --lora style.safetensors:0.8
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An .onnx file or the name of a built-in model
    #[arg(add = complete::models())]
    model: String,

    /// Provider to compare with [default: the one whose manifest says that it is the reference]
    #[arg(long, value_name = "ID", conflicts_with = "reference_file", add = complete::providers())]
    reference: Option<String>,

    /// If an output is wrong, look for the first node whose values differ, by running the model with intermediate values as outputs
    #[arg(long, conflicts_with = "reference_file")]
    layers: bool,

    /// If an output is wrong, also write the smallest part of the model that is wrong: FILE.onnx with weights in FILE.onnx.data, its
    /// inputs in FILE.inputs.npz, and the right outputs in FILE.expected.npz
    #[arg(long, value_name = "FILE.onnx", conflicts_with = "reference_file")]
    reduce: Option<PathBuf>,

    /// Compare with the outputs in this .npz file
    #[arg(long, value_name = "FILE.npz")]
    reference_file: Option<PathBuf>,

    #[command(flatten)]
    weights: WeightArgs,
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
    /// Whether the model quantizes intermediate values.
    quantized: bool,
    accepted: bool,
    outputs: Vec<Row>,
    /// The weights from --weights and --lora.
    weights: Option<WeightReport>,
    /// Outputs that the adapters do not change in a single bit.
    unchanged: Vec<String>,
    /// What --layers and --reduce found.
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<layers::Found>,
}

#[derive(Serialize)]
struct Row {
    accepted: bool,
    /// Accepted only because the model quantizes.
    within_quantization: bool,
    #[serde(flatten)]
    comparison: Comparison,
}

/// Checks that a graph has an output of this name and, as far as it is known before a run, of this shape.
fn check_output(bound: &Graph, name: &str, shape: &[usize]) -> Result<(), Error> {
    let outputs = bound.outputs.iter().map(|id| bound.value(*id));
    let Some(output) = outputs.clone().find(|output| output.name == name) else {
        let known = format::list(outputs.map(|output| output.name.clone()));
        return Err(Error::invalid(format!("there is no output {name:?} (outputs: {known})")));
    };
    let known: Option<Vec<_>> = output.shape.as_ref().map(|dims| dims.iter().map(Dim::known).collect());
    if known.is_none_or(|known| shape_fits(&known, shape)) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "output {name:?} has shape {shape:?} in this file, and another one in the model"
    )))
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    context.limit(args.provider.time_limit);
    if let Some(file) = &args.reduce {
        layers::check_targets(file)?;
    }
    let files = args.weights.files(args.shapes.allow_links);
    let job = job::prepare(&args.model, &args.shapes, &args.inputs, files.policy(), context)?;
    let weights = weights::of_model(&files, &job.model, context)?;
    let registry = context.registry()?;
    let (reference, expected) = match (&args.reference_file, reference_provider(args, &registry)) {
        (Some(path), _) => {
            let bound = job.model.bound(&job.shapes)?;
            let check = |name: &str, _, shape: &[usize]| check_output(&bound, name, shape);
            (path.display().to_string(), npz::read(path, None, check)?)
        }
        (None, id) => {
            let id = id?;
            let provider = registry.open(&id, &args.provider.isolation(true))?;
            let device = provider.present_device(None)?;
            let options = options(&args.build.of_reference(), device, &job, args, context);
            let side = Side { weights: &weights, pristine: false };
            (id, outputs_of(&side, &provider, &options, &job, context)?.0)
        }
    };
    context.go_on()?;
    let build = |device: Device| options(&args.build, device, &job, args, context);
    let need = Job { model: &job.model, options: &build, isolate: true, absent_devices: false };
    let side = Side { weights: &weights, pristine: true };
    let (provider, (outputs, unchanged)) = args.provider.attempt(&need, context, |provider, options| {
        let outputs = outputs_of(&side, provider, &options, &job, context)?;
        Ok((provider.id().to_string(), outputs))
    })?;
    let tolerance = Tolerance::for_outputs(args.build.precision(context), &expected);
    let quantized = job.model.graph().quantizes();
    let row = |comparison: Comparison| {
        let right = tolerance.accepts(&comparison);
        let within_quantization = !right && quantized && tolerance.quantized().accepts(&comparison);
        Row { accepted: right || within_quantization, within_quantization, comparison }
    };
    let rows: Vec<Row> = compare(&outputs, &expected)?.into_iter().map(row).collect();
    let accepted = rows.iter().all(|row| row.accepted);
    let layers = match accepted {
        false if args.layers || args.reduce.is_some() => {
            Some(layers::find(args, &registry, &provider, &reference, &job, &weights, tolerance, context)?)
        }
        _ => None,
    };
    let report = Report {
        model: job.model.name().to_string(),
        provider,
        precision: args.build.precision(context),
        reference,
        tolerance,
        quantized,
        accepted,
        outputs: rows,
        weights: files.is_given().then(|| weights.report()),
        unchanged,
        layers,
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

/// How both sides build.
fn options(
    build: &BuildArgs,
    device: Device,
    job: &job::Job,
    args: &Args,
    context: &Context,
) -> BuildOptions {
    build.options(device, false, context).threads(args.provider.threads(context)).shapes(job.shapes.clone())
}

/// One of the two that are compared.
struct Side<'a> {
    weights: &'a Weights,
    /// Also run without the adapters, to see what they change.
    pristine: bool,
}

/// Runs the job on a provider. Returns the outputs, and the names of those that the adapters leave as they are.
fn outputs_of(
    side: &Side<'_>,
    provider: &Provider,
    options: &BuildOptions,
    job: &job::Job,
    context: &Context,
) -> sdrun::Result<(Tensors, Vec<String>)> {
    let engine = build::build(provider, &job.model, Some(side.weights), options, context)?;
    let task = context.task(&format!("running on {}", provider.id()));
    let host = task.host(context.cancel_flag());
    let stack = &side.weights.stack;
    if !side.pristine || stack.is_pristine() || engine.info().weights.is_empty() {
        let outputs = engine.session(stack, &host)?.allow_non_finite().run(&job.inputs, &host)?;
        return Ok((outputs, Vec::new()));
    }
    let mut session = engine.session(&stack.pristine(), &host)?.allow_non_finite();
    let before = session.run(&job.inputs, &host)?;
    session.refit(stack, &host)?;
    let outputs = session.run(&job.inputs, &host)?;
    let same =
        |(name, tensor): (&String, &HostTensor)| (before.get(name) == Some(tensor)).then(|| name.clone());
    let unchanged = outputs.iter().filter_map(same).collect();
    Ok((outputs, unchanged))
}

/// How many values are NaN or infinite, and on which side.
fn not_finite(c: &Comparison) -> String {
    match (c.not_finite, c.reference_not_finite) {
        (0, 0) => "0".into(),
        (here, 0) => format!("{here} here"),
        (0, there) => format!("{there} in the reference"),
        (here, there) => format!("{here} here, {there} in the reference"),
    }
}

fn limits(tolerance: &Tolerance) -> String {
    let relative =
        tolerance.relative_error.map_or(String::new(), |e| format!("relative error at most {e:e}, "));
    format!("{relative}cosine at least {}", tolerance.cosine)
}

fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    show_outputs(out, report)?;
    report.layers.as_ref().map_or(Ok(()), |found| layers::show(out, found))
}

fn show_outputs(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Report { model, provider, precision, reference, tolerance, .. } = report;
    let limits_of = limits(tolerance);
    writeln!(out, "{model} on {provider} in {precision}, compared with {reference} ({limits_of})")?;
    if let Some(weights) = &report.weights {
        weights::show(weights, out, model)?;
    }
    if !report.unchanged.is_empty() {
        writeln!(out, "  warning: the adapters do not change {}", format::list(&report.unchanged))?;
    }
    let mut table =
        format::table(["output", "max abs", "relative", "cosine", "SNR dB", "NaN, inf", "verdict"]);
    for Row { accepted, within_quantization, comparison: c } in &report.outputs {
        table.add_row([
            format::line(&c.output).into_owned(),
            format!("{:.3e}", c.max_abs_error),
            format!("{:.3e}", c.relative_error),
            format!("{:.7}", c.cosine),
            match c.snr_db {
                Some(db) => format!("{db:.1}"),
                None if *accepted => "equal".into(),
                None => "-".into(),
            },
            not_finite(c),
            match (accepted, within_quantization) {
                (true, false) => "right".into(),
                (true, true) => "within quantization".into(),
                (false, _) => "WRONG".to_string(),
            },
        ]);
    }
    format::right(&mut table, 1..6);
    writeln!(out, "{table}")?;
    let differs = |row: &Row| row.within_quantization || !row.accepted;
    if report.quantized && report.outputs.iter().any(differs) {
        writeln!(
            out,
            "the model quantizes intermediate values, so a tiny difference can round a value to another step \
             (within quantization: {})",
            limits(&tolerance.quantized())
        )?;
    }
    Ok(())
}
