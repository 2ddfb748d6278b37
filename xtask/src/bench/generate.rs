//! Whole pictures of full-size models: the tests' example `generate_speed`, each time in a new process.

use super::{Lab, Line, Outcome, median};
use anyhow::Result;
use serde_json::{Value, json};
use std::ffi::OsStr;

/// Steps of a measured picture of SD 1.5.
const STEPS: usize = 4;
/// Steps of the picture that targets speak of.
const WHOLE: f64 = 20.0;

pub(super) fn generate(lab: &Lab<'_>) -> Outcome {
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for precision in ["fp32", "bf16"] {
        let measured = picture(lab, "sd15", precision, STEPS)?;
        of_sd15(&measured, precision, &mut lines);
        raw.push(json!({ "family": "sd15", "precision": precision, "measured": measured }));
    }
    for (precision, aim) in [("bf16", "< 7 GB"), ("q8_0", "< 4.5 GB")] {
        let measured = picture(lab, "sdxl", precision, 1)?;
        of_sdxl(&measured, precision, aim, &mut lines);
        raw.push(json!({ "family": "sdxl", "precision": precision, "measured": measured }));
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

fn of_sd15(measured: &Value, precision: &str, lines: &mut Vec<Line>) {
    let first = &measured["first"];
    let (all, networks) = (steps(first, "seconds"), steps(first, "networks"));
    let step = median(&all);
    // The first step's time begins where the network was loaded.
    let own: Vec<f64> = all.iter().zip(&networks).map(|(all, networks)| all - networks).collect();
    let name = format!("SD 1.5, 512x512, guidance, ggml {precision}");
    let whole = number(&first["seconds"]) + (WHOLE - all.len() as f64) * step;
    lines.push(Line::new(
        format!("{name}: a picture of 20 steps, from {} steps", all.len()),
        format!("{whole:.0} s, {step:.2} s a step"),
        "",
    ));
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
    memory(measured, &name, "", lines);
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

fn of_sdxl(measured: &Value, precision: &str, aim: &'static str, lines: &mut Vec<Line>) {
    let name = format!("SDXL, 1024x1024, guidance, ggml {precision}");
    let step = median(&steps(&measured["first"], "networks"));
    lines.push(Line::new(format!("{name}: a step"), format!("{step:.1} s"), ""));
    memory(measured, &name, aim, lines);
}

/// Peak memory against the plan.
fn memory(measured: &Value, name: &str, aim: &'static str, lines: &mut Vec<Line>) {
    let (peak, plan) = (number(&measured["peak_bytes"]), number(&measured["plan_bytes"]));
    let value = format!("{:.2} / {:.2} GB = {:.2}", peak / 1e9, plan / 1e9, peak / plan);
    let aim = if aim.is_empty() { "≤ 1.05 of the plan" } else { aim };
    lines.push(Line::new(format!("{name}: peak memory / plan"), value, aim));
}
