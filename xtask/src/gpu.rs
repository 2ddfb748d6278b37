//! `cargo xtask gpu PROVIDER [DEVICE]`: everything that needs a provider's hardware, on a machine that has it.
//!
//! Runs the golden and refit tests with that provider instead of those for CPUs: outputs against ONNX Runtime in fp32 and
//! against PyTorch, checkpoints, adapters, and A after B after A bit for bit. Then prints a table for the SD 1.5 VAE decoder and
//! UNet, with PyTorch on the same GPU if it is available.

use crate::{
    dist,
    python::TORCH_PYTHON,
    setup, test,
    workspace::{Workspace, output, run, step},
};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::process::Command;

/// Model, precision, smallest allowed cosine to ONNX Runtime's fp32.
const MODELS: [(&str, &str, f64); 4] = [
    ("sd15/vae-decoder", "fp32", 0.99999),
    ("sd15/vae-decoder", "fp16", 0.999),
    ("sd15/unet", "fp32", 0.99999),
    ("sd15/unet", "fp16", 0.999),
];

pub(crate) fn run_all(workspace: &Workspace, provider: &str, device: Option<&str>) -> Result<()> {
    setup::compilers()?;
    let dist = dist::for_use(workspace)?;
    setup::runtimes(workspace, &dist)?;

    step("Devices");
    let mut sdrun = dist.sdrun(workspace);
    let text = output(sdrun.args(["devices", "--provider", provider, "--json"]))?;
    let report: Value = serde_json::from_str(&text)?;
    let devices = report["providers"][0]["devices"].as_array();
    // Devices that are present come first.
    let wanted = |found: &&Value| device.is_none_or(|device| found["id"] == device);
    let first =
        devices.and_then(|devices| devices.iter().find(wanted)).context("the provider has no such device")?;
    let device = first["id"].as_str().context("the device has no id")?;
    if let Some(why) = first["absent"].as_str() {
        bail!("{provider} cannot run here: {why}");
    }
    println!("   {} ({})", first["name"].as_str().unwrap_or("?"), first["class"].as_str().unwrap_or("?"));

    let tests = dist::for_tests(workspace)?;
    let environment = test::environment(workspace, &tests, &setup::node_tests(workspace)?)?;
    let mut failures = Vec::new();
    let mut stage = |name: &str, arguments: &[&str]| {
        step(name);
        let mut cargo = workspace.cargo();
        cargo.args(arguments).envs(environment.iter().cloned()).env("SDRUN_TEST_PROVIDERS", provider);
        cargo.env("SDRUN_TEST_DEVICE", device);
        if let Err(error) = run(&mut cargo) {
            failures.push(format!("{name}: {error:#}"));
        }
    };
    let package = "--package=sdrun-tests";
    stage("The provider's own tests", &["test", &format!("--package=sdrun-provider-{provider}")]);
    stage("Outputs against ONNX Runtime", &["test", package, "--test=golden", "--no-fail-fast"]);
    stage(
        "Full-size models",
        &["test", package, "--test=golden", "--no-fail-fast", "--", "--ignored", "full_size"],
    );
    stage(
        "Small pipelines against PyTorch: checkpoints, adapters, A-B-A",
        &["test", package, "--test=refit", "--no-fail-fast"],
    );

    step("Table");
    println!(
        "| model | precision | build | engine | load with weights | first run | run | PyTorch | torch.compile | cosine |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (model, precision, least) in MODELS {
        let mut sdrun = dist.sdrun(workspace);
        sdrun.args([
            "bench",
            "--no-save",
            model,
            "-p",
            provider,
            "--device",
            device,
            "--precision",
            precision,
        ]);
        sdrun.args(["--json", "--quiet"]);
        let report: Value = serde_json::from_str(&output(&mut sdrun)?)?;
        let row = &report["cases"][0]["rows"][0];
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let cosine = number(&row["accuracy"]["worst"]["cosine"]);
        let [eager, compiled] = pytorch(workspace, model, precision).unwrap_or_else(|error| {
            failures.push(format!("PyTorch, {model} in {precision}: {error:#}"));
            ["?".into(), "?".into()]
        });
        println!(
            "| {model} | {precision} | {:.1} s | {:.1} MB | {:.2} s | {:.0} ms | {:.2} ms | {eager} | {compiled} | {cosine:.7} |",
            number(&row["build_seconds"]),
            number(&row["engine_bytes"]) / 1e6,
            number(&row["load_seconds"]),
            number(&row["first_run_ms"]),
            number(&row["stats"]["median_ms"]),
        );
        if row["status"] != "ok" {
            failures.push(format!("{model} in {precision}: {}", row["reason"]));
        } else if cosine.is_nan() || cosine < least {
            failures.push(format!("{model} in {precision}: cosine {cosine} is below {least}"));
        }
    }
    if std::env::var_os(TORCH_PYTHON).is_none() {
        println!(
            "\nnot compared with PyTorch: {TORCH_PYTHON} does not name a Python with torch and diffusers"
        );
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// PyTorch's time for the same model on the same GPU, eager and compiled.
fn pytorch(workspace: &Workspace, model: &str, precision: &str) -> Result<[String; 2]> {
    let Some(python) = std::env::var_os(TORCH_PYTHON) else { return Ok(["-".into(), "-".into()]) };
    let mut command = Command::new(python);
    command.arg(workspace.root.join("xtask/python/torch_speed.py")).args([model, precision, "cuda"]);
    let report: Value = serde_json::from_str(&output(&mut command)?)?;
    Ok(["eager_ms", "compiled_ms"].map(|name| format!("{:.2} ms", report[name].as_f64().unwrap_or(f64::NAN))))
}
