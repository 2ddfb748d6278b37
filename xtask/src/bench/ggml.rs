//! ggml next to OpenVINO on the same processor: the SD 1.5 networks at 512x512 and MobileNet v2.

use super::{
    Lab, Line, Outcome, median,
    runs::{Subject, bench_row},
};
use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Networks, what the time over OpenVINO's should be, rounds.
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

/// Both providers in turns, a round of each at a time; the fastest run of each round counts, and the median of the rounds'
/// ratios.
pub(super) fn against_openvino(lab: &Lab<'_>) -> Outcome {
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for (subject, aim) in &SUBJECTS {
        lab.model(subject.name)?;
        for precision in ["fp32", "bf16"] {
            let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            for round in 1..=subject.rounds {
                let (ggml, load) = fastest(lab, subject, "ggml", precision)?;
                let (openvino, _) = fastest(lab, subject, "openvino", precision)?;
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
            raw.push(json!({
                "model": subject.name, "precision": precision, "ggml_ms": ours, "openvino_ms": theirs,
            }));
        }
    }
    Ok((json!(raw), lines))
}

/// Milliseconds of the fastest run, and seconds of loading.
pub(super) fn fastest(
    lab: &Lab<'_>,
    subject: &Subject,
    provider: &str,
    precision: &str,
) -> Result<(f64, f64)> {
    let row: Value = bench_row(lab, subject, provider, precision)?;
    let time = row["stats"]["min_ms"].as_f64().context("the row has no fastest run")?;
    Ok((time, row["load_seconds"].as_f64().unwrap_or_default()))
}

/// What the first run in a shape takes beyond the next ones, on an engine with open dimensions.
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
