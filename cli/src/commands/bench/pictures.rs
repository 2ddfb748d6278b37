//! `sdrun bench --suite pipeline`

use crate::{context::Context, model::ModelArgs};
use sdrun::{
    Registry, WeightFiles,
    abi::{Error, Host, Precision},
    bench::{BenchOptions, Event, PrecisionChoice, Report},
};
use sdrun_diffusion::{
    bench, demo,
    pipeline::{Files, Parts, Request, Resolved},
};
use std::{num::NonZeroUsize, path::PathBuf};

/// What is drawn of the demo model, which knows few words.
const SCENE: &str = "a red circle left of a blue square";
/// What is drawn of other models.
const PROMPT: &str = "a lighthouse on a cliff at dusk, waves below, oil painting";

/// A model and what it draws.
pub(super) struct Pictures {
    name: String,
    parts: Parts,
    /// The file for other software, or why there is none.
    checkpoint: Result<PathBuf, &'static str>,
    request: Resolved,
}

/// Opens the checkpoint in `files`, or the demo model, with its adapters. Without `steps`, the model's family decides.
pub(super) fn open(
    files: &WeightFiles,
    shapes: &ModelArgs,
    steps: Option<NonZeroUsize>,
    options: &BenchOptions,
    registry: &Registry,
    context: &Context,
) -> anyhow::Result<Pictures> {
    let refuse = |what: &str, hint: &str| Err(Error::invalid(what).with_hint(hint).into());
    if !shapes.shapes()?.is_empty() {
        return refuse("whole pictures have the size of the model's family", "leave out --shape");
    }
    if options.bake || !files.embeddings.is_empty() || files.base.len() > 1 {
        return refuse(
            "whole pictures take one checkpoint in --weights, and --lora",
            "leave out the other options",
        );
    }
    let task = context.task("opening the model");
    let host = task.host(context.cancel_flag());
    let paths = registry.paths();
    let given = files.base.first();
    let model = match given {
        Some(file) => Some(file.clone()),
        None => demo::find(demo::NAME, paths)?,
    };
    let mut parts = Parts::open(&Files { model, ..Files::default() }, paths, &host)?;
    for adapter in &files.adapters {
        parts.add_adapter(&adapter.file, adapter.strength, adapter.text_encoder_strength)?;
    }
    let prompt = if given.is_some() { PROMPT } else { SCENE };
    let steps = steps.map(NonZeroUsize::get);
    let request = Request { prompt: prompt.into(), seed: options.seed, steps, ..Request::default() };
    let request = request.resolve(&parts)?;
    let stem = given.and_then(|file| file.file_name()).map(|name| name.to_string_lossy().into_owned());
    let name = format!(
        "{}: a picture of {}x{} in {} steps",
        stem.as_deref().unwrap_or(demo::NAME),
        request.width,
        request.height,
        request.steps
    );
    let checkpoint = match given {
        Some(_) if !files.adapters.is_empty() => {
            Err("it was not given the LoRAs, so its pictures would differ")
        }
        Some(file) => Ok(file.clone()),
        None => Err("it cannot draw with the demo model; name a checkpoint"),
    };
    Ok(Pictures { name, parts, checkpoint, request })
}

impl Pictures {
    /// Draws in these precisions; in fp32 and each provider's best low one if there are none.
    pub(super) fn draw(
        &self,
        precisions: &[PrecisionChoice],
        registry: &Registry,
        options: &BenchOptions,
        host: &dyn Host,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> sdrun::Result<Report> {
        let default = [PrecisionChoice::Fixed(Precision::Fp32), PrecisionChoice::BestLow];
        let precisions = if precisions.is_empty() { &default[..] } else { precisions };
        let mut report = Report::new();
        for precision in precisions {
            let Self { name, parts, checkpoint, request } = self;
            let checkpoint = checkpoint.as_deref().map_err(|why| *why);
            let case = bench::pictures(
                registry, name, parts, checkpoint, request, *precision, options, host, listen,
            )?;
            report.cases.push(case);
        }
        Ok(report)
    }
}
