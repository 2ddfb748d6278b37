//! MIGraphX engines with weights as parameters and with weights inside: seconds, memory, sizes. Each has its own worker. Uses
//! the GPU if `SDRUN_MIGRAPHX_DIR` names a ROCm, else MIGraphX's interpreter `ref`, which runs nothing here.

use super::{Lab, Line, Outcome, median};
use crate::debian;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::ffi::OsStr;

/// Model, rounds, kinds of engine. The f32 UNet has 3.4 GB of weights; a program with these weights inside would take four times
/// as much memory.
const BUILDS: [(&str, &str, &[&str]); 5] = [
    ("mobilenet-v2", "5", &["stripped", "full"]),
    ("sd15/text-encoder", "3", &["stripped", "full"]),
    ("sd15/vae-decoder", "3", &["stripped", "full"]),
    ("sd15/unet-fp16", "1", &["stripped", "full"]),
    ("sd15/unet", "3", &["stripped"]),
];

pub(super) fn builds(lab: &Lab<'_>) -> Outcome {
    let dir = debian::migraphx(lab.workspace)?.context("MIGraphX is not installed")?;
    let variables = [(debian::VARIABLES[0], dir.as_os_str()), (debian::VARIABLES[1], OsStr::new("1"))];
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for (model, rounds, kinds) in BUILDS {
        let list = kinds.join(",");
        let arguments = [model, rounds, &list].map(OsStr::new);
        let row = lab.example_with("migraphx_builds", &arguments, &variables)?;
        println!("   {row}");
        for kind in kinds {
            lines.extend(figures(model, kind, &row)?);
        }
        if let [a, b] = kinds {
            lines.extend(compared(model, [a, b], &row));
        }
        raw.push(row);
    }
    Ok((json!(raw), lines))
}

/// One figure from all builds of a kind.
fn all(row: &Value, kind: &str, figure: &str) -> Vec<f64> {
    let builds = row["builds"].as_array().into_iter().flatten();
    builds.filter(|build| build["kind"] == *kind).filter_map(|build| build[figure].as_f64()).collect()
}

/// The cost of a kind of engine: median times and greatest memory of its builds.
fn figures(model: &str, kind: &str, row: &Value) -> Result<Vec<Line>> {
    let most = |figure: &str| all(row, kind, figure).into_iter().fold(f64::NAN, f64::max);
    let bytes = |bytes: f64| match bytes < 1e9 {
        true => format!("{:.2} MB", bytes / 1e6),
        false => format!("{:.2} GB", bytes / 1e9),
    };
    let (build, load) = (median(&all(row, kind, "build_s")), median(&all(row, kind, "load_s")));
    ensure!(build.is_finite(), "no {kind} build of {model}");
    let is_unet = model == "sd15/unet" && kind == "stripped";
    let aim = |aim: &'static str| if is_unet { aim } else { "" };
    let what = format!("{model}, {kind}");
    let mut lines = vec![
        Line::new(format!("{what}: build"), format!("{build:.2} s"), ""),
        Line::new(format!("{what}: peak memory of building"), bytes(most("build_bytes")), ""),
        Line::new(format!("{what}: engine"), bytes(most("engine_bytes")), aim("≤ 3 MB")),
        Line::new(format!("{what}: load"), format!("{load:.2} s"), aim("≤ 1 s")),
        Line::new(format!("{what}: peak memory of loading"), bytes(most("load_bytes")), aim("≤ 200 MB")),
    ];
    if let Some(kernels) = all(row, kind, "kernels").first() {
        lines.push(Line::new(format!("{what}: kernels per run"), format!("{kernels}"), ""));
    }
    Ok(lines)
}

/// Compares two kinds that were built in turns.
fn compared(model: &str, kinds: [&str; 2], row: &Value) -> Vec<Line> {
    let ratio = |figure: &str| -> Option<String> {
        let [ours, theirs] = kinds.map(|kind| all(row, kind, figure));
        let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(a, b)| a / b).collect();
        (!ratios.is_empty()).then(|| format!("{:.3}", median(&ratios)))
    };
    let line = |figure: &str, what: &str, aim| {
        let what = format!("{model}, {} / {}: {what}", kinds[0], kinds[1]);
        ratio(figure).map(|ratio| Line::new(what, ratio, aim))
    };
    [line("build_s", "build", ""), line("kernels", "kernels per run", "≤ 1.05")]
        .into_iter()
        .flatten()
        .collect()
}
