//! `cargo xtask bench`: the figures of docs/benchmarks.md. Writes raw numbers to `target/bench/NAME.json` and prints Markdown
//! tables. No figure passes or fails.

mod generate;
mod ggml;
mod migraphx;
mod pictures;
mod process;
mod refit;
mod runs;
mod serve;
mod stable_diffusion_cpp;
mod tensorrt_rtx;

use crate::{
    dist::{self, Dist},
    python::{Packages, Python},
    setup,
    workspace::{Workspace, output, step},
};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::{ffi::OsStr, fs, path::PathBuf};

/// What a benchmark needs.
struct Lab<'a> {
    workspace: &'a Workspace,
    dist: Dist,
    python: Python,
    /// Threads for both sides of a comparison.
    threads: usize,
}

/// One figure: name, value, target.
struct Line {
    what: String,
    value: String,
    aim: &'static str,
}

impl Line {
    fn new(what: impl Into<String>, value: impl Into<String>, aim: &'static str) -> Self {
        Line { what: what.into(), value: value.into(), aim }
    }
}

/// Raw numbers, and the figures derived from them.
type Outcome = Result<(Value, Vec<Line>)>;

type Measure = fn(&Lab<'_>) -> Outcome;

const ALL: [(&str, Measure); 14] = [
    ("size", process::size),
    ("start", process::start),
    ("open", process::open),
    ("load", runs::load),
    ("worker", runs::worker),
    ("overhead", runs::overhead),
    ("refit", refit::refit),
    ("ggml", ggml::against_openvino),
    ("shapes", ggml::new_shapes),
    ("generate", generate::generate),
    ("serve", serve::serve),
    ("stable-diffusion.cpp", stable_diffusion_cpp::beside),
    ("tensorrt-rtx", tensorrt_rtx::builds),
    ("migraphx", migraphx::builds),
];

/// Runs the named benchmarks, or all of them.
pub(crate) fn run(workspace: &Workspace, names: &[&str]) -> Result<()> {
    if let Some(unknown) = names.iter().find(|name| !ALL.iter().any(|(known, _)| known == *name)) {
        let known: Vec<&str> = ALL.iter().map(|(name, _)| *name).collect();
        bail!("there is no benchmark `{unknown}` (there are: {})", known.join(", "));
    }
    setup::compilers()?;
    let dist = dist::for_use(workspace)?;
    setup::runtimes(workspace, &dist)?;
    let python = Python::with(workspace, Packages::Bench)?;
    let threads = std::thread::available_parallelism()?.get();
    let lab = Lab { workspace, dist, python, threads };
    let folder = workspace.target.join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut lines = Vec::new();
    for (name, measure) in ALL.iter().filter(|(name, _)| names.is_empty() || names.contains(name)) {
        step(&format!("Benchmark: {name}"));
        let (raw, more) = measure(&lab)?;
        let file = folder.join(format!("{name}.json"));
        let document = json!({ "benchmark": name, "threads": threads, "measured": raw });
        fs::write(&file, serde_json::to_string_pretty(&document)? + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
        println!("   raw numbers are in {}", file.display());
        lines.extend(more);
    }
    println!("\n| what | measured | target |\n|---|---|---|");
    for line in lines {
        println!("| {} | {} | {} |", line.what, line.value, line.aim);
    }
    Ok(())
}

impl Lab<'_> {
    /// The file of a built-in model. Generates a missing one.
    fn model(&self, name: &str) -> Result<PathBuf> {
        let file = self.workspace.cache().join("models").join(name).join("model.onnx");
        if !file.exists() {
            // `sdrun run` generates the model as a side effect.
            crate::workspace::run(self.dist.sdrun(self.workspace).args(["run", name, "-p", "onnxruntime"]))?;
        }
        Ok(file)
    }

    /// The JSON that an example of the tests prints.
    fn example(&self, name: &str, arguments: &[&OsStr]) -> Result<Value> {
        self.example_with(name, arguments, &[])
    }

    /// The same, with additional environment variables.
    fn example_with(&self, name: &str, arguments: &[&OsStr], variables: &[(&str, &OsStr)]) -> Result<Value> {
        let mut cargo = self.workspace.cargo();
        cargo.args(["run", "--quiet", "--release", "--package=sdrun-tests"]);
        cargo.arg(format!("--example={name}")).arg("--").args(arguments);
        cargo.env("SDRUN_DIST", &self.dist.dir).env("SDRUN_WORKER", self.dist.program("sdrun-worker"));
        cargo.env("SDRUN_DATA_DIR", self.workspace.data()).env("SDRUN_CACHE_DIR", self.workspace.cache());
        cargo.envs(variables.iter().copied());
        Ok(serde_json::from_str(&output(&mut cargo)?)?)
    }
}

/// The median. For an even number of values, the mean of the middle two.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
