//! `sdrun import`

use crate::{context::Context, files, format, model::ModelArgs};
use sdrun::{
    Model,
    abi::Error,
    graph::WeightsPolicy,
    weights::{Binding, Checkpoint, Component, ImportReport},
};
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode};

/// Map each weight of a model to a tensor of a checkpoint
///
/// Exporters rename and transpose weights. This command recovers their names from the paths of the nodes that use them, checks
/// the shapes, and writes the table beside the model (MODEL.binding.json). `build` finds it there, and the model then takes any
/// checkpoint of its architecture and any adapter. With --reference, it also compares values with the checkpoint that the model
/// was exported from. It lists weights that it cannot map and never guesses; the exit code is then 1.
///
/// Example: sdrun import unet/model.onnx --reference stable-diffusion-v1-5
#[derive(clap::Args)]
pub(crate) struct Args {
    /// An .onnx file
    model: PathBuf,

    /// Checkpoint that the model was exported from: a diffusers folder or a file
    #[arg(long, value_name = "CHECKPOINT")]
    reference: Option<PathBuf>,

    /// Part of the checkpoint that the model is, if its weights do not show it: text_encoder, text_encoder_2, text_encoder_3,
    /// denoiser, vae, controlnet or upscaler
    #[arg(long, value_name = "PART")]
    component: Option<Component>,

    /// Write the table to this file instead
    #[arg(short, long, value_name = "FILE.json")]
    output: Option<PathBuf>,

    #[command(flatten)]
    shapes: ModelArgs,
}

#[derive(Serialize)]
struct Report<'a> {
    component: Option<Component>,
    bound: usize,
    #[serde(flatten)]
    found: &'a ImportReport,
    file: PathBuf,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let file = args.output.clone().unwrap_or_else(|| Model::binding_file(&args.model));
    // The path is derived from the model's path, not named by the user, so the model's folder may hold a malicious link there.
    files::check_file_target(&file)?;
    let policy = if args.reference.is_some() { WeightsPolicy::Required } else { WeightsPolicy::MayBeAbsent };
    let what = args.model.to_string_lossy();
    if !args.model.is_file() {
        return Err(Error::not_found(format!("there is no file {what}")).into());
    }
    let model = args.shapes.open(&what, policy, context)?;
    let (mut binding, mut found) = Binding::infer_file(model.graph(), &args.model);
    if let Some(component) = args.component {
        binding.component = Some(component);
    }
    if let Some(path) = &args.reference {
        let checkpoint = Checkpoint::open(path)?;
        let component = binding.component.ok_or_else(|| {
            Error::invalid(format!("the weights of {what} do not show which part of a pipeline it is"))
                .with_hint("name it with `--component`")
        })?;
        let reference = checkpoint.component(component)?;
        let weights = model.weights();
        (binding, found) = Binding::infer_with_reference(model.graph(), &weights, &*reference)?;
        binding.component = Some(component);
    }
    context.go_on()?;
    let json = binding.to_json()?;
    files::write(&file, |out| out.write_all(json.as_bytes()))?;
    let report = Report { component: binding.component, bound: binding.tensors.len(), found: &found, file };
    context.present(&report, |out| {
        let part = binding.component.map_or("of no known part of a pipeline".into(), |c| format!("of a {c}"));
        writeln!(out, "{} weights {part}; the table is {}", report.bound, report.file.display())?;
        writeln!(out, "  {found}")?;
        for unbound in &found.unbound {
            write!(out, "  not found: {} {:?}: {}", unbound.name, unbound.shape, unbound.reason)?;
            match unbound.candidates.is_empty() {
                true => writeln!(out)?,
                false => writeln!(out, " (candidates: {})", format::list(&unbound.candidates))?,
            }
        }
        for wrong in &found.contradictions {
            let by_value = format::list(&wrong.by_value);
            writeln!(
                out,
                "  contradiction: {} is {} by name and {by_value} by value",
                wrong.name, wrong.by_name
            )?;
        }
        if !found.unconfirmed.is_empty() {
            let first = &found.unconfirmed[..found.unconfirmed.len().min(3)];
            writeln!(out, "  not in the reference by value: {} …", format::list(first))?;
        }
        Ok(())
    })?;
    Ok(ExitCode::from(if found.is_complete() { 0 } else { crate::exit::NO }))
}
