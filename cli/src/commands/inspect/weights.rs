//! Checkpoints, adapters, embeddings, and other safetensors files.

use super::Weights;
use crate::{
    context::Context,
    format::{self, word},
    model,
};
use sdrun::{
    abi::{Error, WeightSource},
    weights::{
        Adapter, Checkpoint, Component, SafetensorsWeights,
        adapter::{Kind, Place},
        checkpoint::Summary,
        embedding::{Embedding, Vectors},
    },
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Number of keys shown; the rest is only counted.
const SHOWN: usize = 5;

pub(super) fn run(path: &Path, list: bool, context: &Context) -> anyhow::Result<()> {
    let checkpoint = match Checkpoint::open(path) {
        Ok(checkpoint) => return show_checkpoint(&checkpoint.summary(), context),
        Err(error) => error,
    };
    if !path.is_file() || !model::has_ending(path, "safetensors") {
        return Err(checkpoint.into());
    }
    // Report damage as such, and not as an unknown layout.
    let file = SafetensorsWeights::open(&[path])?;
    if let Ok(adapter) = Adapter::open(path) {
        return show_adapter(&adapter, context);
    }
    if let Ok(embedding) = Embedding::open(path) {
        return show_embedding(path, &embedding, context);
    }
    show_tensors(path, &file, list, &checkpoint, context)
}

#[derive(Serialize)]
struct CheckpointReport<'a> {
    kind: &'static str,
    #[serde(flatten)]
    summary: &'a Summary,
}

fn show_checkpoint(summary: &Summary, context: &Context) -> anyhow::Result<()> {
    context.present(&CheckpointReport { kind: "checkpoint", summary }, |out| {
        writeln!(out, "checkpoint   {} ({})", summary.path.display(), word(&summary.format))?;
        let family = summary.family.map_or("unknown".into(), |family| family.to_string());
        let facts = &summary.facts;
        let mut traits = vec![family];
        let known = [
            (facts.inpainting, "inpainting"),
            (facts.control, "a picture of edges or depths as input"),
            (facts.distilled_guidance, "distilled guidance"),
            (facts.ema, "averaged weights only (EMA)"),
            (facts.has_ema, "trained and averaged weights (EMA)"),
        ];
        traits.extend(known.iter().filter(|(is, _)| *is).map(|(_, what)| what.to_string()));
        writeln!(out, "model        {}", format::list(&traits))?;
        prediction(out, summary)?;
        let mut table =
            format::table(["part", "network", "model", "names", "prefix", "tensors", "parameters", "types"]);
        for part in &summary.components {
            let types = part.dtypes.iter().map(|(dtype, count)| format!("{dtype}: {count}"));
            table.add_row([
                part.component.to_string(),
                word(&part.network),
                part.family.to_string(),
                word(&part.naming),
                format::line(&part.prefix).into_owned(),
                part.tensors.to_string(),
                part.parameters.to_string(),
                format::list(types),
            ]);
        }
        format::right(&mut table, 5..7);
        writeln!(out, "{table}")?;
        for part in &summary.components {
            keys(out, &format!("missing in {}", part.component), &part.missing)?;
            keys(out, &format!("extra in {}", part.component), &part.extra)?;
        }
        keys(out, "not read", &summary.foreign)?;
        keys(out, "ignored", &summary.ignored)?;
        keys(out, "not recognised", &summary.unrecognised)?;
        metadata(out, summary.metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())))
    })
}

/// What the denoiser predicts, and the evidence.
fn prediction(out: &mut dyn Write, summary: &Summary) -> io::Result<()> {
    let prediction = &summary.prediction;
    if !summary.components.iter().any(|part| part.component == Component::Denoiser) {
        return Ok(());
    }
    let mut words = vec![prediction.kind.map_or("unknown".into(), |kind| kind.to_string())];
    words.extend(
        prediction
            .zero_terminal_snr
            .map(|is| format!("zero terminal SNR: {}", if is { "yes" } else { "no" })),
    );
    if let Some(edm) = &prediction.edm {
        words.push(format!("σ {} to {}, σ of the data {}", edm.sigma_min, edm.sigma_max, edm.sigma_data));
    }
    writeln!(out, "predicts     {}", format::list(&words))?;
    prediction.evidence.iter().try_for_each(|evidence| writeln!(out, "             by {evidence}"))
}

/// Prints a line about keys, if there are any.
fn keys(out: &mut dyn Write, what: &str, keys: &[String]) -> io::Result<()> {
    match keys.len() {
        0 => Ok(()),
        n if n <= SHOWN => writeln!(out, "{what}: {}", format::list(keys)),
        n => writeln!(out, "{what}: {} and {} more", format::list(&keys[..SHOWN]), n - SHOWN),
    }
}

/// Prints the metadata of a file. Cuts long values.
fn metadata<'a>(out: &mut dyn Write, entries: impl Iterator<Item = (&'a str, &'a str)>) -> io::Result<()> {
    const LONGEST: usize = 100;
    for (key, value) in entries {
        let short: String = value.chars().take(LONGEST).collect();
        let rest = if short.len() < value.len() { "…" } else { "" };
        writeln!(out, "metadata     {} = {}{rest}", format::line(key), format::line(&short))?;
    }
    Ok(())
}

#[derive(Serialize)]
struct AdapterReport<'a> {
    kind: &'static str,
    path: &'a Path,
    /// The model family it was made for, if known.
    family: Option<String>,
    modules: usize,
    places: BTreeMap<String, usize>,
    kinds: BTreeMap<Kind, usize>,
    dead_keys: &'a [String],
    metadata: &'a BTreeMap<String, String>,
}

fn show_adapter(adapter: &Adapter, context: &Context) -> anyhow::Result<()> {
    let place = |(place, count): (Place, usize)| {
        let name = match place {
            Place::Denoiser => "denoiser".into(),
            Place::TextEncoder(number) => format!("text encoder {number}"),
            Place::T5 => "T5".into(),
            Place::Unsaid => "not said".to_string(),
        };
        (name, count)
    };
    let report = AdapterReport {
        kind: "adapter",
        path: adapter.path(),
        family: adapter.family_guess().map(|family| family.to_string()),
        modules: adapter.len(),
        places: adapter.places().into_iter().map(place).collect(),
        kinds: adapter.kinds(),
        dead_keys: adapter.dead_keys(),
        metadata: adapter.metadata(),
    };
    context.present(&report, |out| {
        writeln!(out, "adapter      {}", report.path.display())?;
        writeln!(out, "made for     {}", report.family.as_deref().unwrap_or("unknown"))?;
        let places = report.places.iter().map(|(place, count)| format!("{place}: {count}"));
        writeln!(out, "modules      {} ({})", report.modules, format::list(places))?;
        let kinds = report.kinds.iter().map(|(kind, count)| format!("{kind}: {count}"));
        writeln!(out, "kinds        {}", format::list(kinds))?;
        keys(out, "unused keys", report.dead_keys)?;
        metadata(out, report.metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())))
    })
}

#[derive(Serialize)]
struct EmbeddingReport<'a> {
    kind: &'static str,
    path: &'a Path,
    name: &'a str,
    /// Number of vectors and their width, by text encoder.
    encoders: BTreeMap<String, (usize, usize)>,
}

fn show_embedding(path: &Path, embedding: &Embedding, context: &Context) -> anyhow::Result<()> {
    let row = |vectors: &Vectors| {
        let encoder = vectors.encoder.map_or("unknown".into(), |encoder| encoder.to_string());
        (encoder, (vectors.len(), vectors.width))
    };
    let encoders = embedding.encoders.iter().map(row).collect();
    let report = EmbeddingReport { kind: "embedding", path, name: &embedding.name, encoders };
    context.present(&report, |out| {
        writeln!(out, "embedding    {}", path.display())?;
        writeln!(out, "name         {}", report.name)?;
        for (encoder, (vectors, width)) in &report.encoders {
            writeln!(out, "vectors      {vectors} of {width} values for {encoder}")?;
        }
        Ok(())
    })
}

#[derive(Serialize)]
struct SafetensorsReport {
    kind: &'static str,
    path: PathBuf,
    /// Why it is not a checkpoint.
    reason: String,
    weights: Weights,
    /// Tensors of unsupported types.
    unreadable: Vec<String>,
}

fn show_tensors(
    path: &Path,
    file: &SafetensorsWeights,
    list: bool,
    why: &Error,
    context: &Context,
) -> anyhow::Result<()> {
    let mut weights = Weights { list: list.then(Vec::new), ..Weights::default() };
    let mut unreadable = Vec::new();
    for name in file.names() {
        match file.describe(name) {
            Ok((dtype, shape)) => weights.add(name, dtype, &shape),
            Err(_) => unreadable.push(name.to_string()),
        }
    }
    let (path, reason) = (path.to_path_buf(), why.message.clone());
    let report = SafetensorsReport { kind: "safetensors", path, reason, weights, unreadable };
    context.present(&report, |out| {
        writeln!(out, "file       {}", report.path.display())?;
        writeln!(out, "layout     unknown: {}", report.reason)?;
        report.weights.show(out)?;
        match report.unreadable.len() {
            0 => Ok(()),
            n => writeln!(
                out,
                "unreadable {n} tensors of unsupported types: {}",
                format::list(&report.unreadable)
            ),
        }
    })
}
