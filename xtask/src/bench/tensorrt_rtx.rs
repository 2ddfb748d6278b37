//! TensorRT-RTX engines built without a GPU: seconds, memory, sizes. Each model has its own process.

use super::{Lab, Line, Outcome, median};
use crate::{setup, workspace::output};
use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Model, precision, kind of engine, rounds (more than one compares with the library's calls alone), target for peak memory in
/// bytes.
const BUILDS: [(&str, &str, &str, usize, Option<f64>); 9] = [
    ("mobilenet-v2", "fp32", "stripped", 3, None),
    ("mobilenet-v2", "fp32", "full", 3, None),
    ("sd15/vae-decoder", "fp32", "stripped", 3, None),
    ("sd15/vae-decoder", "fp32", "full", 1, None),
    ("sd15/unet-fp16", "fp16", "stripped", 1, Some(1.0e9)),
    ("sd15/unet-fp16", "fp16", "full", 1, None),
    ("sd15/unet", "fp16", "stripped", 1, Some(1.0e9)),
    ("sdxl/unet", "fp16", "stripped", 1, Some(2.5e9)),
    ("sdxl/unet", "fp16", "full", 1, None),
];

pub(super) fn builds(lab: &Lab<'_>) -> Outcome {
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for (model, precision, kind, rounds, peak_aim) in BUILDS {
        let row = build(lab, &format!("{model} {precision} {kind} {rounds}"))?;
        let figure = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        let times = |name: &str| -> Vec<f64> {
            row[name].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
        };
        let (ours, bare) = (median(&times("seconds")), median(&times("bare_seconds")));
        let share = 100.0 * figure("engine_bytes") / figure("weight_bytes");
        let what = format!("{model} in {precision}, {kind}");
        lines.push(Line::new(format!("{what}: build"), format!("{ours:.1} s"), ""));
        if rounds > 1 {
            let ratio = format!("{:.2} s / {:.2} s = {:.3}", ours, bare, ours / bare);
            lines.push(Line::new(format!("{what}: build / the library's calls alone"), ratio, "≤ 1.05"));
        }
        let is_unet = model.contains("unet") && kind == "stripped";
        let size = format!("{:.1} MB = {share:.1} % of the weights", figure("engine_bytes") / 1e6);
        lines.push(Line::new(format!("{what}: engine"), size, if is_unet { "≤ 3 %" } else { "" }));
        let peak = format!("{:.2} GB", figure("peak_bytes") / 1e9);
        let aim = match peak_aim {
            Some(1.0e9) => "≤ 1.0 GB",
            Some(_) => "≤ 2.5 GB",
            None => "",
        };
        lines.push(Line::new(format!("{what}: peak memory"), peak, aim));
        raw.push(row);
    }
    Ok((json!(raw), lines))
}

/// One row of figures from the provider.
fn build(lab: &Lab<'_>, what: &str) -> Result<Value> {
    let mut cargo = lab.workspace.cargo();
    cargo.args(["test", "--quiet", "--release", "--package=sdrun-provider-tensorrt-rtx", "--lib", "--"]);
    cargo.args(["--ignored", "--nocapture", "--exact", "tests::figures::figures"]).env("SDRUN_FIGURES", what);
    cargo.envs(setup::runtime_dirs(lab.workspace, &lab.dist));
    // As in workers.
    cargo.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    let text = output(&mut cargo)?;
    let line =
        text.lines().find(|line| line.starts_with('{')).with_context(|| format!("no figures of {what}"))?;
    println!("   {line}");
    Ok(serde_json::from_str(line)?)
}
