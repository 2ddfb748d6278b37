//! ggml against OpenVINO on the same processor: the SD 1.5 networks at 512x512 and MobileNet v2.

use super::{
    Lab, Line, Outcome, median,
    runs::{Subject, bench_row},
};
use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Networks, and the target for ggml's time divided by OpenVINO's.
const SUBJECTS: [(Subject, &str); 4] = [
    (Subject { name: "mobilenet-v2", shapes: &["input=1,3,224,224"], rounds: 7 }, "<= 1.3"),
    (Subject { name: "sd15/text-encoder", shapes: &["input_ids=1,77"], rounds: 5 }, "<= 1.2"),
    (
        Subject {
            name: "sd15/unet",
            shapes: &["sample=1,4,64,64", "encoder_hidden_states=1,77,768"],
            rounds: 3,
        },
        "<= 1.15",
    ),
    (Subject { name: "sd15/vae-decoder", shapes: &["latent_sample=1,4,64,64"], rounds: 3 }, "<= 1.15"),
];

/// Runs both providers in turns, one round each. Compares the fastest run of each round, and reports the median ratio.
pub(super) fn against_openvino(lab: &Lab<'_>) -> Outcome {
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for (subject, aim) in &SUBJECTS {
        lab.model(subject.name)?;
        for precision in ["fp32", "bf16"] {
            let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            let mut memory = None;
            for round in 1..=subject.rounds {
                let row = bench_row(lab, subject, "ggml", precision)?;
                let (ggml, load) = fastest(&row)?;
                let (openvino, _) = fastest(&bench_row(lab, subject, "openvino", precision)?)?;
                memory = Some(memory_of(&row)?);
                let name = subject.name;
                println!(
                    "   {name} {precision} round {round}: ggml {ggml:.3} ms (load {load:.2} s), OpenVINO {openvino:.3} ms"
                );
                ours.push(ggml);
                theirs.push(openvino);
                ratios.push(ggml / openvino);
            }
            lines.push(Line::new(
                format!("{} {precision}: ggml / OpenVINO, median of {} rounds", subject.name, ratios.len()),
                format!("{:.1} ms / {:.1} ms = {:.3}", median(&ours), median(&theirs), median(&ratios)),
                aim,
            ));
            let [peak, weights, activations] = memory.context("no rounds")?;
            lines.push(Line::new(
                format!("{} {precision}: ggml's peak memory / weights + activations", subject.name),
                format!(
                    "{peak:.0} / ({weights:.0} + {activations:.0}) MB = {:.3}",
                    peak / (weights + activations)
                ),
                "<= 1.05",
            ));
            raw.push(json!({
                "model": subject.name, "precision": precision, "ggml_ms": ours, "openvino_ms": theirs,
                "ggml_peak_mb": peak, "ggml_weights_mb": weights, "ggml_activations_mb": activations,
            }));
        }
    }
    Ok((json!(raw), lines))
}

/// Megabytes: the worker's peak while it loads and runs, and the weights and activations in it.
fn memory_of(row: &Value) -> Result<[f64; 3]> {
    let memory = &row["memory"];
    let megabytes = |value: &Value| value.as_f64().map(|bytes| bytes / 1e6).context("unknown memory");
    let peak = megabytes(&memory["load_bytes"])?.max(megabytes(&memory["run_bytes"])?);
    let session = &memory["session"];
    Ok([peak, megabytes(&session["weights"])?, megabytes(&session["activations"])?])
}

/// Milliseconds of the fastest run, and seconds to load.
pub(super) fn fastest(row: &Value) -> Result<(f64, f64)> {
    let time = row["stats"]["min_ms"].as_f64().context("the row has no fastest run")?;
    Ok((time, row["load_seconds"].as_f64().unwrap_or_default()))
}

/// How much longer the first run in a shape takes than the next ones, on an engine with open dimensions.
pub(super) fn new_shapes(lab: &Lab<'_>) -> Outcome {
    let measured = lab.example("shape_speed", &[])?;
    let rows = measured["shapes"].as_array().context("no shapes")?;
    let figure = |row: &Value, name: &str| row[name].as_f64().unwrap_or(f64::NAN);
    let more = |row: &Value| 1e3 * (figure(row, "first_s") - figure(row, "again_s"));
    let more: Vec<f64> = rows.iter().skip(1).map(more).collect();
    let what = format!("SD 1.5 UNet on ggml: a new shape, median of {}", more.len());
    let line = Line::new(what, format!("{:.1} ms", median(&more)), "≤ 20 ms");
    Ok((measured, vec![line]))
}
