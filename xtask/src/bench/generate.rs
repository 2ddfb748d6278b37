//! Whole pictures of full-size models: the tests' example `generate_speed`, each time in a new process, and other programs in turns.

use super::{Lab, Line, Outcome, median, pictures::Peers};
use anyhow::Result;
use serde_json::{Value, json};
use std::ffi::OsStr;

/// Steps of a measured picture of SD 1.5.
pub(super) const STEPS: usize = 4;
/// Steps of the picture that targets speak of.
const WHOLE: usize = 20;
const ROUNDS: usize = 2;
/// The target for memory where there is none in bytes.
const AS_PLANNED: &str = "≤ 1.05 of the plan";

pub(super) fn generate(lab: &Lab<'_>) -> Outcome {
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    let mut peers = None;
    for precision in ["fp32", "bf16"] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 1..=ROUNDS {
            let measured = picture(lab, "sd15", precision, STEPS)?;
            println!("   SD 1.5 {precision} round {round}: {:.0} s a picture", whole_of(&measured));
            ours.push(measured);
            // The first picture wrote the checkpoint that all draw from.
            let peers =
                peers.get_or_insert_with(|| Peers::find(lab, &lab.workspace.target.join("bench/generate")));
            for (name, drawn) in peers.draw(precision) {
                println!("   {name}: {:.0} s", drawn.seconds);
                theirs.push((name, drawn));
            }
        }
        of_sd15(&ours, precision, &mut lines);
        for (name, aim) in Peers::aims(precision) {
            let found: Vec<_> = theirs.iter().filter(|(of, _)| *of == name).map(|(_, drawn)| drawn).collect();
            if found.is_empty() {
                continue;
            }
            let time = median(&found.iter().map(|drawn| drawn.seconds).collect::<Vec<_>>());
            let own = median(&ours.iter().map(whole_of).collect::<Vec<_>>());
            lines.push(Line::new(
                format!("SD 1.5 {precision}: a picture of {WHOLE} steps by {name} / sdrun on ggml"),
                format!("{time:.0} s / {own:.0} s = {:.2}", time / own),
                aim,
            ));
            let memory = found.iter().map(|drawn| drawn.peak_bytes).fold(f64::INFINITY, f64::min);
            let own = ours.iter().map(|one| number(&one["peak_bytes"])).fold(0.0, f64::max);
            lines.push(Line::new(
                format!("SD 1.5 {precision}: peak memory of sdrun on ggml / {name}"),
                format!("{:.2} / {:.2} GB = {:.2}", own / 1e9, memory / 1e9, own / memory),
                "≤ 1",
            ));
        }
        let theirs: Vec<Value> =
            theirs.iter().map(|(name, drawn)| json!({ "name": name, "measured": drawn.raw })).collect();
        raw.push(json!({ "family": "sd15", "precision": precision, "measured": ours, "others": theirs }));
    }
    for (precision, aim) in [("bf16", "< 7 GB"), ("q8_0", "< 4.5 GB")] {
        let measured = picture(lab, "sdxl", precision, 1)?;
        of_one_step(&measured, &format!("SDXL, 1024x1024, guidance, ggml {precision}"), aim, &mut lines);
        raw.push(json!({ "family": "sdxl", "precision": precision, "measured": measured }));
    }
    let measured = picture(lab, "sd35", "bf16", 1)?;
    of_one_step(&measured, "SD 3.5 medium, 1024x1024, guidance, ggml bf16", AS_PLANNED, &mut lines);
    raw.push(json!({ "family": "sd35", "precision": "bf16", "measured": measured }));
    for precision in ["q8_0", "q4_k"] {
        let measured = picture(lab, "flux-schnell", precision, 1)?;
        of_one_step(&measured, &format!("Flux schnell, 512x512, ggml {precision}"), AS_PLANNED, &mut lines);
        raw.push(json!({ "family": "flux-schnell", "precision": precision, "measured": measured }));
    }
    Ok((json!(raw), lines))
}

/// A picture on ggml.
fn picture(lab: &Lab<'_>, family: &str, precision: &str, steps: usize) -> Result<Value> {
    let folder = lab.workspace.target.join("bench/generate");
    let steps = steps.to_string();
    let arguments =
        [folder.as_os_str()].into_iter().chain([family, "ggml", precision, &steps].map(OsStr::new));
    lab.example("generate_speed", &arguments.collect::<Vec<_>>())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

/// The named numbers of all steps.
fn steps(picture: &Value, name: &str) -> Vec<f64> {
    picture["steps"].as_array().into_iter().flatten().map(|step| number(&step[name])).collect()
}

/// Seconds of a picture of [`WHOLE`] steps, from one of `steps` steps that took `seconds`, from the start of loading to the picture.
pub(super) fn whole(seconds: f64, steps: usize, step: f64) -> f64 {
    seconds + (WHOLE as f64 - steps as f64) * step
}

/// The same from what the example measured.
fn whole_of(measured: &Value) -> f64 {
    let first = &measured["first"];
    let all = steps(first, "seconds");
    whole(number(&first["seconds"]), all.len(), median(&all))
}

fn of_sd15(rounds: &[Value], precision: &str, lines: &mut Vec<Line>) {
    let name = format!("SD 1.5, 512x512, guidance, ggml {precision}");
    let Some(measured) = rounds.iter().min_by(|a, b| whole_of(a).total_cmp(&whole_of(b))) else { return };
    let seconds = whole_of(measured);
    let first = &measured["first"];
    let (all, networks) = (steps(first, "seconds"), steps(first, "networks"));
    let step = median(&all);
    lines.push(Line::new(
        format!("{name}: a picture of {WHOLE} steps, from {STEPS} steps"),
        format!("{seconds:.0} s, {step:.2} s a step"),
        "",
    ));
    let own: Vec<f64> = all.iter().zip(&networks).map(|(all, networks)| all - networks).collect();
    lines.push(Line::new(
        format!("{name}: a step's time outside networks"),
        format!("{:.2} ms of {step:.2} s = {:.3} %", median(&own) * 1e3, median(&own) / step * 100.0),
        "≤ 1 %",
    ));
    let start = format!("{:.2} s", number(&first["before_first_step"]));
    lines.push(Line::new(
        format!("{name}: from the start to the first step, engines cached"),
        start,
        "≤ 1.5 s",
    ));
    memory(measured, &name, AS_PLANNED, lines);
    let second = &measured["with_lora"];
    let networks = second["networks"].as_array().into_iter().flatten();
    let told = networks.map(|network| {
        let part = network["part"].as_str().unwrap_or_default();
        let origin = network["origin"].as_str().unwrap_or_default();
        format!("{part} {origin} in {:.2} s", number(&network["seconds"]))
    });
    let told: Vec<String> = told.collect();
    lines.push(Line::new(
        format!("{name}: the next picture, with a LoRA"),
        format!("{}; first step after {:.2} s", told.join(", "), number(&second["before_first_step"])),
        "no network built",
    ));
}

fn of_one_step(measured: &Value, name: &str, aim: &'static str, lines: &mut Vec<Line>) {
    let first = &measured["first"];
    let step = median(&steps(first, "networks"));
    let all = number(&first["seconds"]);
    lines.push(Line::new(format!("{name}: a step"), format!("{step:.1} s; all of one step {all:.0} s"), ""));
    memory(measured, name, aim, lines);
}

/// Peak memory against the plan.
fn memory(measured: &Value, name: &str, aim: &'static str, lines: &mut Vec<Line>) {
    let (peak, plan) = (number(&measured["peak_bytes"]), number(&measured["plan_bytes"]));
    let value = format!("{:.2} / {:.2} GB = {:.2}", peak / 1e9, plan / 1e9, peak / plan);
    lines.push(Line::new(format!("{name}: peak memory / plan"), value, aim));
}
