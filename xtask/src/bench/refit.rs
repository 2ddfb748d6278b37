//! How fast sdrun computes weights and loads them into engines: the tests' example `refit_speed`, OpenVINO and ONNX Runtime
//! against their own fastest way, and diffusers if it is available.

use super::{Lab, Line, Outcome, median};
use crate::{python::TORCH_PYTHON, workspace::output};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{path::Path, process::Command};

pub(super) fn refit(lab: &Lab<'_>) -> Outcome {
    let folder = lab.workspace.target.join("bench/refit");
    let measured = lab.example("refit_speed", &[folder.as_os_str()])?;
    let mut lines = Vec::new();
    of_keys(&measured["keys"], &mut lines);
    of_weights(&measured["weights"], &mut lines);
    of_ggml(&measured["ggml"], "SD 1.5", ["≤ 0.5 s", ""], &mut lines);
    of_ggml(&measured["sdxl"], "SDXL", ["≤ 1.5 s", "≤ 1 s"], &mut lines);
    let openvino = rebuilt(lab, &folder, ("openvino", "OpenVINO"), &mut lines)?;
    let onnxruntime = rebuilt(lab, &folder, ("onnxruntime", "ONNX Runtime"), &mut lines)?;
    let torch = diffusers(&folder, &measured, &mut lines)?;
    let raw = json!({
        "refit_speed": measured, "openvino": openvino, "onnxruntime": onnxruntime, "diffusers": torch
    });
    Ok((raw, lines))
}

/// Loads and refits of a UNet in each precision, with the targets of both.
fn of_ggml(measured: &Value, model: &str, [load, refit]: [&'static str; 2], lines: &mut Vec<Line>) {
    for (precision, times) in measured.as_object().into_iter().flatten() {
        let of = |name: &str| median(&numbers(&times[name]));
        let on = format!("{model} UNet on ggml, {precision}");
        lines.push(Line::new(
            format!("{on}: weights of a checkpoint into a built engine"),
            format!("{:.2} s", of("load_s")),
            load,
        ));
        lines.push(Line::new(format!("{on}: refit with a LoRA"), format!("{:.2} s", of("refit_s")), refit));
        lines.push(Line::new(
            format!("{on}: build and weights from scratch / refit with a LoRA"),
            format!("{:.2} s / {:.2} s = {:.1}", of("build_s"), of("refit_s"), of("build_s") / of("refit_s")),
            "≥ 5",
        ));
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

/// Median seconds of a pass over weights. Each entry is seconds and bytes.
fn pass_seconds(weights: &Value, name: &str) -> f64 {
    let passes = weights["passes"][name].as_array().into_iter().flatten();
    median(&passes.filter_map(|pass| pass[0].as_f64()).collect::<Vec<_>>())
}

fn of_keys(keys: &Value, lines: &mut Vec<Line>) {
    for (name, what) in
        [("checkpoint_ms", "opening a checkpoint"), ("adapter_ms", "reading and resolving a LoRA")]
    {
        let value = format!("{:.1} ms", median(&numbers(&keys[name])));
        lines.push(Line::new(
            format!("{what}, all keys resolved, {} tensors", keys["tensors"]),
            value,
            "< 20 ms for 2000",
        ));
    }
}

fn of_weights(weights: &Value, lines: &mut Vec<Line>) {
    let seconds = |name: &str| pass_seconds(weights, name);
    let over_memcpy =
        |ours: f64, memcpy: f64| format!("{ours:.3} s / {memcpy:.3} s = {:.2} of its speed", memcpy / ours);
    lines.push(Line::new(
        "weights no adapter changes (some transposed), copied out / memcpy of the same bytes of the file",
        over_memcpy(seconds("unchanged"), seconds("memcpy_unchanged")),
        "≥ 0.7",
    ));
    let flops = weights["changed_flops"].as_f64().unwrap_or(0.0) / seconds("changed");
    let peak = weights["gemm_flops_per_s"].as_f64().unwrap_or(f64::NAN);
    lines.push(Line::new(
        format!("{} weights merged with rank 16: GFLOP/s / f32 GEMM peak", weights["changed_tensors"]),
        format!("{:.0} / {:.0} = {:.2}", flops / 1e9, peak / 1e9, flops / peak),
        "≥ 0.6",
    ));
    // The unavoidable work: each step of the product, and reading the merged bytes.
    let product = weights["changed_flops"].as_f64().unwrap_or(0.0) / peak;
    let reading = seconds("memcpy_changed");
    let floor = product.max(reading);
    lines.push(Line::new(
        "the same: seconds / the larger of product at the peak and memcpy of the bytes",
        format!(
            "{:.3} s / max({product:.3}, {reading:.3}) s = {:.2}",
            seconds("changed"),
            seconds("changed") / floor
        ),
        "",
    ));
    lines.push(Line::new(
        "all weights of the UNet with the LoRA, copied out; the first time, with the pages of the file",
        format!("{:.2} s; {:.2} s", seconds("all"), weights["first"][0].as_f64().unwrap_or(f64::NAN)),
        "",
    ));
    let bytes = weights["memory_bytes"].as_f64().unwrap_or(f64::NAN);
    lines.push(Line::new("memory that takes at most", format!("{:.0} MB", bytes / 1e6), "≤ 300 MB"));
}

/// A refit on a provider that must read the graph again, compared with a Python program that reads the same graph.
fn rebuilt(lab: &Lab<'_>, folder: &Path, (id, name): (&str, &str), lines: &mut Vec<Line>) -> Result<Value> {
    let model = lab.model("sd15/unet-fp16")?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let dims = ["sample=1,4,64,64", "timestep=1", "encoder_hidden_states=1,77,768"];
    for _ in 0..3 {
        let mut sdrun = lab.dist.sdrun(lab.workspace);
        sdrun.args([
            "bench",
            "--no-save",
            "sd15/unet-fp16",
            "-p",
            id,
            "--min-time",
            "0s",
            "--min-runs",
            "1",
            "--json",
            "--quiet",
        ]);
        sdrun.arg("--weights").arg(folder.join("sd15_unet_B.safetensors"));
        sdrun.arg("--lora").arg(folder.join("lora_r16.safetensors"));
        let report: Value = serde_json::from_str(&output(&mut sdrun)?)?;
        let row = &report["cases"][0]["rows"][0];
        ours.push(row["refit"]["seconds"].as_f64().with_context(|| format!("no refit: {}", row["reason"]))?);
        let mut command = lab.python.python();
        command.arg(lab.workspace.root.join("xtask/python/load.py")).arg(id).arg(&model);
        theirs.push(output(command.arg(lab.threads.to_string()).args(dims))?.trim().parse::<f64>()?);
    }
    let (a, b) = (median(&ours), median(&theirs));
    lines.push(Line::new(
        format!("SD 1.5 UNet on {name}: refit with a LoRA, weights computed / loading the graph in Python"),
        format!("{a:.2} s / {b:.2} s = {:.2}", a / b),
        "≤ 1",
    ));
    Ok(json!({"sdrun_s": ours, "python_s": theirs}))
}

/// Computing all weights, compared with `load_lora_weights` and `fuse_lora` on the same files.
fn diffusers(folder: &Path, measured: &Value, lines: &mut Vec<Line>) -> Result<Value> {
    let Some(python) = std::env::var_os(TORCH_PYTHON) else {
        println!(
            "   not compared with diffusers: {TORCH_PYTHON} names no Python with torch, diffusers and peft"
        );
        return Ok(Value::Null);
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/fuse_lora.py");
    let mut command = Command::new(python);
    let theirs: Value = serde_json::from_str(&output(command.arg(script).arg(folder))?)?;
    let reading = median(&numbers(&measured["keys"]["adapter_ms"])) / 1e3;
    let fused = median(&numbers(&theirs["seconds"]));
    // diffusers changes the weights that the LoRA touches, in place. So does a refit from one LoRA to another.
    for (pass, what) in [("changed_and_copied", "the weights it changes"), ("all", "all weights")] {
        let ours = pass_seconds(&measured["weights"], pass) + reading;
        lines.push(Line::new(
            format!("diffusers `load_lora_weights` and `fuse_lora` / reading the LoRA and making {what}"),
            format!("{fused:.2} s / {ours:.2} s = {:.1}", fused / ours),
            "≥ 3",
        ));
    }
    Ok(theirs)
}
