//! Benchmarks without inference: sizes, start-up, opening a large model.

use super::{Lab, Line, Outcome, median};
use crate::{
    dist,
    workspace::{output, run},
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{fs, process::Command};

/// Size of an installation, without vendor runtimes.
pub(super) fn size(lab: &Lab<'_>) -> Outcome {
    let sizes = dist::sizes(&lab.dist.dir)?;
    let total: u64 = sizes.iter().map(|(_, bytes)| bytes).sum();
    let mut lines: Vec<Line> =
        sizes.iter().map(|(name, bytes)| Line::new(name, megabytes(*bytes), "")).collect();
    lines.push(Line::new("sdrun, its worker and all plugins", megabytes(total), "< 30 MB"));
    Ok((json!(sizes), lines))
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// Commands that must respond at once on a machine without any runtime.
pub(super) fn start(lab: &Lab<'_>) -> Outcome {
    let empty = lab.workspace.target.join("bench/no-runtimes");
    fs::create_dir_all(&empty).with_context(|| format!("cannot create {}", empty.display()))?;
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for arguments in ["--help", "providers", "doctor"] {
        let measured = measure(lab, 20, &[arguments], |command| {
            command.env("SDRUN_DATA_DIR", &empty);
        })?;
        let seconds: Vec<f64> = measured.iter().filter_map(|m| m["seconds"].as_f64()).collect();
        lines.push(Line::new(
            format!("`sdrun {arguments}`, no runtime installed"),
            format!("{:.1} ms", median(&seconds) * 1e3),
            "< 50 ms",
        ));
        raw.push(json!({ "arguments": arguments, "runs": measured }));
    }
    Ok((json!(raw), lines))
}

/// Opens 3.4 GB of weights, which are mapped and not read. The file is sparse, so it needs no space on disk.
pub(super) fn open(lab: &Lab<'_>) -> Outcome {
    let folder = lab.workspace.target.join("bench/sd15-unet-sparse");
    let models = lab.workspace.root.join("core/weights/models");
    run(lab.python.python().arg(lab.workspace.root.join("xtask/python/sparse_model.py")).args([
        models.join("sd15_unet.graph.onnx.xz"),
        models.join("sd15_unet.map.json.xz"),
        folder.clone(),
    ]))?;
    let model = folder.join("model.onnx");
    let model = model.to_str().context("the target folder's name is UTF-8")?;
    let measured = measure(lab, 10, &["inspect", model], |_| ())?;
    let figure = |name: &str| -> Vec<f64> { measured.iter().filter_map(|m| m[name].as_f64()).collect() };
    let peak = figure("peak_bytes").into_iter().fold(0.0, f64::max);
    let what = "`sdrun inspect` of the SD 1.5 UNet, 3.4 GB of external weights";
    let lines = vec![
        Line::new(what, format!("{:.0} ms", median(&figure("seconds")) * 1e3), "< 300 ms"),
        Line::new("its peak resident memory", megabytes(peak as u64), "< 300 MB"),
    ];
    Ok((json!(measured), lines))
}

/// Runs sdrun several times and returns seconds and peak memory of each run.
fn measure(
    lab: &Lab<'_>,
    runs: usize,
    arguments: &[&str],
    set: impl FnOnce(&mut Command),
) -> Result<Vec<Value>> {
    let sdrun = lab.dist.sdrun(lab.workspace);
    let mut command = lab.python.python();
    command.arg(lab.workspace.root.join("xtask/python/measure.py")).arg(runs.to_string());
    command.arg(sdrun.get_program()).args(arguments);
    for (name, value) in sdrun.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        command.env(name, value);
    }
    set(&mut command);
    let measured: Vec<Value> = serde_json::from_str(&output(&mut command)?)?;
    ensure!(measured.len() == runs, "measure.py made {} runs of {runs}", measured.len());
    Ok(measured)
}
