//! Benchmarks with inference: sdrun against the runtimes' own programs, and the cost of isolation. Both sides take turns, so a
//! machine that slows down slows both.

use super::{Lab, Line, Outcome, median};
use crate::workspace::output;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::Path;

/// A built-in model and the shape of its input.
pub(super) struct Subject {
    pub(super) name: &'static str,
    /// The value of `--shape`: inputs and their dimensions.
    pub(super) shapes: &'static [&'static str],
    pub(super) rounds: usize,
}

const SUBJECTS: [Subject; 2] = [
    Subject { name: "mobilenet-v2", shapes: &["input=1,3,224,224"], rounds: 15 },
    Subject { name: "sd15/vae-decoder", shapes: &["latent_sample=1,4,64,64"], rounds: 3 },
];

/// `sdrun bench` on OpenVINO against OpenVINO's own `benchmark_app`: same file, shape, precision, threads.
pub(super) fn overhead(lab: &Lab<'_>) -> Outcome {
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for subject in &SUBJECTS {
        let model = lab.model(subject.name)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 1..=subject.rounds {
            let row = bench_row(lab, subject, "openvino", "fp32")?;
            ours.push(row["stats"]["median_ms"].as_f64().context("the row has no median")?);
            theirs.push(benchmark_app(lab, subject, &model)?);
            println!(
                "   {} round {round}: sdrun {:.3} ms, benchmark_app {:.3} ms",
                subject.name,
                ours[round - 1],
                theirs[round - 1]
            );
        }
        let (a, b) = (median(&ours), median(&theirs));
        lines.push(Line::new(
            format!(
                "{}: `sdrun bench` / `benchmark_app`, medians of {} rounds",
                subject.name, subject.rounds
            ),
            format!("{a:.2} ms / {b:.2} ms = {:.3}", a / b),
            "within 1 %",
        ));
        raw.push(json!({ "model": subject.name, "sdrun_ms": ours, "benchmark_app_ms": theirs }));
    }
    Ok((json!(raw), lines))
}

/// One provider's row of `sdrun bench`.
pub(super) fn bench_row(lab: &Lab<'_>, subject: &Subject, provider: &str, precision: &str) -> Result<Value> {
    let threads = lab.threads.to_string();
    let mut sdrun = lab.dist.sdrun(lab.workspace);
    sdrun.args([
        "bench",
        "--no-save",
        subject.name,
        "-p",
        provider,
        "--precision",
        precision,
        "--threads",
        &threads,
    ]);
    sdrun.args(["--min-time", "2s", "--min-runs", "3"]);
    for shape in subject.shapes {
        sdrun.args(["--shape", shape]);
    }
    let report: Value = serde_json::from_str(&output(sdrun.args(["--json", "--quiet"]))?)?;
    let row = &report["cases"][0]["rows"][0];
    ensure!(row["status"] == "ok", "{provider} on {}: {}", subject.name, row["reason"]);
    Ok(row.clone())
}

/// Median in milliseconds of OpenVINO's own program.
fn benchmark_app(lab: &Lab<'_>, subject: &Subject, model: &Path) -> Result<f64> {
    let threads = lab.threads.to_string();
    let mut command = lab.python.python();
    command.arg(lab.python.program("benchmark_app")).arg("-m").arg(model);
    command.args(["-d", "CPU", "-api", "sync", "-hint", "none", "-nstreams", "1", "-nthreads", &threads]);
    let shapes: Vec<String> = subject
        .shapes
        .iter()
        .filter_map(|s| s.split_once('='))
        .map(|(name, dims)| format!("{name}[{dims}]"))
        .collect();
    command.args(["-infer_precision", "f32", "-t", "2", "-shape", &shapes.join(",")]);
    let text = output(&mut command)?;
    let line = text
        .lines()
        .find_map(|line| line.split_once("Median:"))
        .context("benchmark_app printed no median")?;
    let number = line.1.trim().trim_end_matches("ms").trim();
    number.parse().with_context(|| format!("benchmark_app's median is {number:?}"))
}

/// Seconds from a stored engine to a session, against a Python program that loads the same model.
pub(super) fn load(lab: &Lab<'_>) -> Outcome {
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    // Loading time does not depend on the size of the picture, but the time of the runs that complete the row does.
    let [mobilenet, decoder] = SUBJECTS;
    for subject in &[mobilenet, Subject { shapes: &["latent_sample=1,4,16,16"], ..decoder }] {
        let model = lab.model(subject.name)?;
        for provider in ["openvino", "onnxruntime"] {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..7 {
                let row = bench_row(lab, subject, provider, "fp32")?;
                ours.push(row["load_seconds"].as_f64().context("the row has no load time")?);
                let mut command = lab.python.python();
                command.arg(lab.workspace.root.join("xtask/python/load.py")).arg(provider).arg(&model);
                command.arg(lab.threads.to_string()).args(subject.shapes);
                theirs.push(output(&mut command)?.trim().parse::<f64>()?);
            }
            let (a, b) = (median(&ours), median(&theirs));
            lines.push(Line::new(
                format!(
                    "{} on {provider}: loading a stored engine / the runtime's own loading",
                    subject.name
                ),
                format!("{:.0} ms / {:.0} ms = {:.2}", a * 1e3, b * 1e3, a / b),
                "within 5 %",
            ));
            raw.push(
                json!({ "model": subject.name, "provider": provider, "sdrun_s": ours, "runtime_s": theirs }),
            );
        }
    }
    Ok((json!(raw), lines))
}

/// The same engine in this process and in a worker, with runs in turns.
pub(super) fn worker(lab: &Lab<'_>) -> Outcome {
    let mut cargo = lab.workspace.cargo();
    cargo.args(["run", "--quiet", "--release", "--package=sdrun-tests", "--example=worker_overhead"]);
    cargo.env("SDRUN_DIST", &lab.dist.dir).env("SDRUN_WORKER", lab.dist.program("sdrun-worker"));
    cargo.env("SDRUN_DATA_DIR", lab.workspace.data()).env("SDRUN_CACHE_DIR", lab.workspace.cache());
    let measured: Value = serde_json::from_str(&output(&mut cargo)?)?;
    let times = |name: &str| -> Vec<f64> {
        measured[name].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    let (here, there) = (times("in_process_ms"), times("worker_ms"));
    if here.is_empty() || here.len() != there.len() {
        bail!("worker_overhead measured nothing");
    }
    let differences: Vec<f64> = here.iter().zip(&there).map(|(a, b)| b - a).collect();
    let (median_here, difference) = (median(&here), median(&differences));
    let line = Line::new(
        format!("a run in a worker, MobileNet v2 on {}", measured["provider"].as_str().unwrap_or("?")),
        format!("{median_here:.2} ms {difference:+.3} ms ({:+.1} %)", 100.0 * difference / median_here),
        "< 5 % of a 10 ms run",
    );
    Ok((measured, vec![line]))
}
