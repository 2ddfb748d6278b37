//! Builds, stores and loads MIGraphX engines with weights as parameters and with weights inside, in turns, for
//! `cargo xtask bench migraphx`. Every build and every load has its own worker. Prints JSON.
//!
//! `migraphx_builds MODEL ROUNDS stripped,full`
//!
//! On a GPU, the stand-in for HIP (`tests/fake-hip`) counts the kernels of a run. On `ref` nothing is run.

use anyhow::{Context, Result};
use sdrun::{
    BuildOptions, CachePolicy, Model, Provider, Shapes,
    abi::{DeviceKind, NoHost},
    inputs,
};
use sdrun_tests::{kernels, lab::Lab};
use serde_json::{Value, json};
use std::time::Instant;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, rounds, kinds] = &arguments[..] else { anyhow::bail!("give MODEL ROUNDS stripped,full") };
    let lab = Lab::default();
    let model = lab.model(name);
    let mut rows = Vec::new();
    for _ in 0..rounds.parse()? {
        for kind in kinds.split(',') {
            rows.push(row(&lab, &model, kind)?);
        }
    }
    println!("{}", json!({"model": name, "builds": rows}));
    Ok(())
}

fn row(lab: &Lab, model: &Model, kind: &str) -> Result<Value> {
    let provider = lab.open("migraphx")?;
    let mut options = BuildOptions::new(provider.device(None)?);
    options.cache = CachePolicy::Off;
    options.bake = kind == "full";
    options.shapes = model.shapes(&Shapes::new());
    let engine = provider.build(model, &options, &NoHost)?;
    let folder = tempfile::tempdir_in(lab.paths.temp())?;
    let file = folder.path().join("engine.sdengine");
    let bytes = engine.save(&file)?;
    let mut row = json!({"kind": kind, "build_s": engine.seconds(), "build_bytes": peak(&provider)?, "engine_bytes": bytes});
    let weights = engine.info().weights.iter().filter_map(|w| w.dtype.bytes_of(&w.shape));
    row["weight_bytes"] = weights.sum::<usize>().into();
    drop((engine, provider));

    let provider = lab.open("migraphx")?;
    let started = Instant::now();
    let engine = provider.load(&file, &options.device, None, &NoHost)?;
    row["load_s"] = started.elapsed().as_secs_f64().into();
    row["load_bytes"] = peak(&provider)?.into();
    if options.device.kind == DeviceKind::Gpu {
        let given = inputs::seeded(model, &model.bound(&options.shapes)?, 0)?;
        let mut session = engine.session(&model.weights(), &NoHost)?;
        let kernels = kernels::of_a_run(&mut session, &given)?;
        row["kernels"] = kernels.map(|kernels| kernels.values().sum::<usize>()).into();
    }
    Ok(row)
}

/// Peak resident bytes of the worker.
fn peak(provider: &Provider) -> Result<u64> {
    provider.worker().and_then(|worker| worker.peak_rss()).context("the worker reports no peak memory")
}
