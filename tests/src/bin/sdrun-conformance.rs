//! Runs the ONNX node tests and the rules of docs/provider-spec.md against a provider plugin.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use sdrun::{Discovery, Registry};
use sdrun_tests::{
    nodes::{self, Snapshot},
    spec,
};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

/// Checks a provider plugin with the ONNX node tests, the rules of docs/provider-spec.md, or both.
#[derive(Parser)]
#[command(name = "sdrun-conformance", version)]
struct Arguments {
    /// Manifest of the plugin (sdrun-provider-ID.json).
    #[arg(long, value_name = "FILE")]
    plugin: PathBuf,
    /// Check the rules of docs/provider-spec.md that are visible from outside.
    #[arg(long)]
    spec: bool,
    /// Run the ONNX node tests in this folder.
    #[arg(long, value_name = "DIR")]
    nodes: Option<PathBuf>,
    /// Compare with the snapshot in this folder; a test that passed and now fails, or fails in another way, is an error.
    #[arg(long, value_name = "DIR", requires = "nodes")]
    snapshots: Option<PathBuf>,
    /// Record the results as the new snapshot.
    #[arg(long, requires = "snapshots", conflicts_with = "filter")]
    bless: bool,
    /// Run the node tests on this device [default: the provider's first]. Its snapshot is called PROVIDER-BACKEND.
    #[arg(long, requires = "nodes")]
    device: Option<String>,
    /// Run the node tests with engines that contain their weights, saved to a file and loaded again.
    #[arg(long, requires = "nodes", conflicts_with = "bless")]
    baked: bool,
    /// Run only tests whose names contain this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Number of node tests to run in parallel [default: number of cores].
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Run one check of the specification in this process.
    #[arg(long, hide = true, value_name = "NAME")]
    check: Option<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let (Some(name), Ok(plugin)) = (&arguments.check, arguments.plugin.canonicalize()) {
        return ExitCode::from(spec::run_one(&plugin, name) as u8);
    }
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let plugin = arguments.plugin.canonicalize();
    let plugin =
        plugin.with_context(|| format!("cannot find the manifest {}", arguments.plugin.display()))?;
    ensure!(arguments.spec || arguments.nodes.is_some(), "nothing to do: give --spec, --nodes DIR, or both");
    let mut passed = true;
    if arguments.spec {
        passed &= run_spec(&plugin, arguments.filter.as_deref())?;
    }
    if let Some(dir) = &arguments.nodes {
        passed &= run_nodes(&plugin, dir, arguments)?;
    }
    Ok(passed)
}

fn run_spec(plugin: &Path, filter: Option<&str>) -> Result<bool> {
    let started = Instant::now();
    let (mut passed, mut failed) = (0, 0);
    for check in spec::CHECKS.iter().filter(|c| filter.is_none_or(|text| c.name.contains(text))) {
        match spec::run_isolated(plugin, check) {
            Ok(Some(why)) => println!("test {} (rule {}) ... ignored, {why}", check.name, check.rules),
            Ok(None) => {
                passed += 1;
                println!("test {} (rule {}) ... ok", check.name, check.rules);
            }
            Err(why) => {
                failed += 1;
                println!("test {} (rule {}) ... FAILED", check.name, check.rules);
                println!("    {why}");
            }
        }
    }
    ensure!(passed + failed > 0, "no check matches the filter");
    close(passed, failed, &[], started);
    Ok(failed == 0)
}

fn run_nodes(plugin: &Path, dir: &Path, arguments: &Arguments) -> Result<bool> {
    let started = Instant::now();
    let manifest = sdrun::read_manifest(plugin)?;
    let id = &manifest.provider.id;
    let device = arguments.device.as_deref();
    // `webgpu:0` is the first device of `webgpu`.
    let recorded = match device {
        Some(device) => format!("{id}-{}", device.split(':').next().unwrap_or(device)),
        None => id.clone(),
    };
    let registry = Registry::discover_with(&Discovery {
        provider_paths: vec![plugin.to_path_buf()],
        ..Discovery::default()
    })?;
    let target = nodes::Target { registry: &registry, id, device, baked: arguments.baked };
    if let Some(why) = nodes::absent(target)? {
        println!("test ONNX node tests on {recorded} ... ignored, {why}");
        close(0, 0, &[], started);
        return Ok(true);
    }
    let mut cases = nodes::find(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    if let Some(text) = &arguments.filter {
        cases.retain(|case| case.name.contains(text));
    }
    ensure!(!cases.is_empty(), "there are no such tests in {}", dir.display());
    let jobs = match arguments.jobs {
        Some(jobs) => jobs,
        None => std::thread::available_parallelism()?.get(),
    };
    let outcomes = nodes::run(target, &cases, jobs)?;
    if arguments.bless
        && let Some(snapshots) = &arguments.snapshots
    {
        let cannot_write = || format!("cannot write to {}", snapshots.display());
        Snapshot::of(&outcomes).write(snapshots, &recorded).with_context(cannot_write)?;
    }
    let Some(snapshots) = &arguments.snapshots else {
        // Without a snapshot, every failure counts and is shown.
        for (name, outcome) in &outcomes {
            if let Err(failure) = outcome {
                println!("test {name} ... FAILED");
                println!("    {}: {}", failure.class, failure.detail);
            }
        }
        let passed = outcomes.values().filter(|o| o.is_ok()).count();
        close(passed, outcomes.len() - passed, &[], started);
        return Ok(passed == outcomes.len());
    };
    let snapshot = Snapshot::read(snapshots, &recorded)
        .with_context(|| format!("cannot read the snapshot in {}", snapshots.display()))?;
    let report = snapshot.judge(&outcomes, arguments.filter.is_none());
    for name in &report.improvements {
        println!("test {name} passes now: record it with --bless");
    }
    for (name, why) in &report.regressions {
        println!("test {name} ... FAILED");
        println!("    {why}");
    }
    let more = [(report.expected, "expected failures"), (report.improvements.len(), "new passes")];
    close(report.passed, report.regressions.len(), &more, started);
    Ok(report.regressions.is_empty())
}

/// Prints the last line, in the form of Rust's own test harness.
fn close(passed: usize, failed: usize, more: &[(usize, &str)], started: Instant) {
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    let more: String = more.iter().map(|(n, what)| format!(" {n} {what};")).collect();
    let seconds = started.elapsed().as_secs_f64();
    println!("test result: {verdict}. {passed} passed; {failed} failed;{more} finished in {seconds:.1}s");
}
