//! `sdrun verify --layers` and `--reduce`

use super::{Args, options};
use crate::{context::Context, files, job::Job};
use sdrun::{
    BuildOptions, CachePolicy, Model, Provider, Registry, Tensors, Weights,
    numpy::npz,
    onnx_file,
    verify::{Comparison, Sides, Tolerance},
};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Where values first differ.
#[derive(Serialize)]
pub(super) struct Found {
    /// `None` if all is right as long as intermediate values are outputs.
    divergence: Option<Divergence>,
    /// What was written.
    reduced: Option<Reduced>,
}

#[derive(Serialize)]
struct Divergence {
    node: String,
    op: String,
    output: Comparison,
    inputs: Vec<Comparison>,
}

#[derive(Serialize)]
struct Reduced {
    files: [PathBuf; 4],
    nodes: Vec<String>,
    output: Comparison,
}

/// The files of a reduced model: graph, weights, inputs, outputs.
fn targets(file: &Path) -> [PathBuf; 4] {
    let stem = file.with_extension("");
    let [inputs, expected] = [".inputs.npz", ".expected.npz"].map(|ending| files::with_ending(&stem, ending));
    [file.to_path_buf(), files::with_ending(file, ".data"), inputs, expected]
}

pub(super) fn check_targets(file: &Path) -> anyhow::Result<()> {
    targets(file).iter().try_for_each(|file| Ok(files::check_target(file).map(drop)?))
}

#[expect(clippy::too_many_arguments, reason = "each is a thing of its own, and one caller has them all")]
pub(super) fn find(
    args: &Args,
    registry: &Registry,
    provider: &str,
    reference: &str,
    job: &Job,
    weights: &Weights,
    tolerance: Tolerance,
    context: &Context,
) -> anyhow::Result<Found> {
    let task = context.task("looking for the first difference");
    let host = task.host(context.cancel_flag());
    let run = |provider: &Provider, options: &BuildOptions, model: &Model, inputs: &Tensors| {
        // Its shapes are those of the job already.
        let mut options = options.clone().shapes(Default::default());
        options.cache = CachePolicy::Off;
        let engine = match options.bake {
            true => provider.build_with(model, &weights.stack, &options, &host)?,
            false => provider.build(model, &options, &host)?,
        };
        engine.session(&weights.stack, &host)?.allow_non_finite().run(inputs, &host)
    };
    let open = |id: &str, device: Option<&str>| -> sdrun::Result<_> {
        let provider = registry.open(id, &args.provider.isolation(true))?;
        let device = provider.present_device(device)?;
        Ok((provider, device))
    };
    let (candidate, device) = open(provider, args.provider.device(context))?;
    let own = options(&args.build, device, job, args, context);
    let (right, device) = open(reference, None)?;
    let of_reference = options(&args.build.of_reference(), device, job, args, context);
    let mut candidate = |model: &Model, inputs: &Tensors| run(&candidate, &own, model, inputs);
    let mut reference = |model: &Model, inputs: &Tensors| run(&right, &of_reference, model, inputs);
    let mut sides = Sides { candidate: &mut candidate, reference: &mut reference, tolerance };
    let bound = job.model.bound(&job.shapes)?;
    let Some(found) = sides.first_divergence(&job.model, &bound, &job.inputs)? else {
        return Ok(Found { divergence: None, reduced: None });
    };
    let reduced = match &args.reduce {
        None => None,
        Some(file) => {
            let part = sides.reduce(&job.model, &bound, &job.inputs, &found)?;
            let graph = part.model.graph();
            let [model, data, inputs, expected] = targets(file);
            onnx_file::write(graph, &weights.stack, &model)?;
            for (path, tensors) in [(&inputs, &part.inputs), (&expected, &part.expected)] {
                let entries = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
                files::write(path, |out| npz::write_to(out, entries))?;
            }
            let nodes = graph.nodes.iter().map(|node| format!("{} `{}`", node.op_type, node.name)).collect();
            Some(Reduced { files: [model, data, inputs, expected], nodes, output: part.output })
        }
    };
    let sdrun::verify::Divergence { node, op, output, inputs, .. } = found;
    Ok(Found { divergence: Some(Divergence { node, op, output, inputs }), reduced })
}

pub(super) fn show(out: &mut dyn Write, found: &Found) -> io::Result<()> {
    let Some(Divergence { node, op, output, inputs }) = &found.divergence else {
        return writeln!(
            out,
            "all values are right while they are outputs of the model, so the error comes from fusing nodes"
        );
    };
    let far = |c: &Comparison| format!("relative error {:.2e}, cosine {:.6}", c.relative_error, c.cosine);
    writeln!(out, "the first wrong value is {:?} of {op} `{node}`: {}", output.output, far(output))?;
    for input in inputs {
        writeln!(out, "  its input {:?}: {}", input.output, far(input))?;
    }
    if let Some(Reduced { files, nodes, output }) = &found.reduced {
        writeln!(out, "wrote {} ({}): {}", files[0].display(), nodes.join(", "), far(output))?;
        for file in &files[1..] {
            writeln!(out, "wrote {}", file.display())?;
        }
    }
    Ok(())
}
