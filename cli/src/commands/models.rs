//! `sdrun models`

use crate::{context::Context, format};
use sdrun::{abi::DType, weights::builtin};
use sdrun_diffusion::demo;
use serde::Serialize;
use std::process::ExitCode;

/// List the built-in models
///
/// Each model is the graph of a real architecture with synthetic weights, so you can try every command without a download. Use
/// its name wherever a command takes a model. It runs in the listed shapes unless --shape says otherwise. The last table lists the files
/// with trained weights, for `sdrun generate`.
///
/// Example: sdrun models --json
#[derive(clap::Args)]
pub(crate) struct Args {}

#[derive(Serialize)]
struct Report {
    models: Vec<Model>,
    /// What `sdrun generate` can draw with.
    trained: Vec<Trained>,
}

#[derive(Serialize)]
struct Trained {
    name: &'static str,
    summary: &'static str,
}

#[derive(Serialize)]
struct Model {
    name: &'static str,
    summary: &'static str,
    inputs: Vec<Input>,
}

#[derive(Serialize)]
struct Input {
    name: &'static str,
    dtype: DType,
    shape: &'static [usize],
}

pub(crate) fn run(_: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let input = |i: &builtin::Input| Input { name: i.name, dtype: i.dtype, shape: i.shape };
    let models = builtin::list()
        .iter()
        .map(|b| Model { name: b.name, summary: b.summary, inputs: b.inputs.iter().map(input).collect() })
        .collect();
    let trained = demo::FILES.iter().map(|(name, _, summary)| Trained { name, summary }).collect();
    let report = Report { models, trained };
    context.present(&report, |out| {
        let mut table = format::table(["model", "description", "inputs"]);
        for m in &report.models {
            let inputs: Vec<String> =
                m.inputs.iter().map(|i| format!("{} {} {:?}", i.name, i.dtype, i.shape)).collect();
            table.add_row([m.name, m.summary, &inputs.join("\n")]);
        }
        writeln!(out, "{table}\n\nWith trained weights, for `sdrun generate`:\n")?;
        let mut table = format::table(["name", "description"]);
        for Trained { name, summary } in &report.trained {
            table.add_row([name, summary]);
        }
        writeln!(out, "{table}")
    })?;
    Ok(ExitCode::SUCCESS)
}
