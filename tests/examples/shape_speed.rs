//! What another shape costs a session of an engine with open dimensions, for `cargo xtask bench shapes`: the SD 1.5 UNet
//! with f16 weights on ggml. Prints JSON.

use anyhow::{Context, Result};
use sdrun::{
    BuildOptions, CachePolicy, Isolation, Shapes, Tensors,
    abi::{NoHost, Precision},
    inputs,
};
use sdrun_tests::lab::Lab;
use serde_json::json;
use std::time::Instant;

fn main() -> Result<()> {
    let lab = Lab::default();
    let precision: Precision =
        std::env::args().nth(1).unwrap_or_else(|| "fp32".into()).parse().map_err(anyhow::Error::msg)?;
    let model = lab.model("sd15/unet-fp16");
    let provider = lab.registry.open("ggml", &Isolation::default())?;
    let mut options = BuildOptions::new(provider.device(None)?).precision(precision);
    (options.cache, options.open_dims) = (CachePolicy::Off, true);
    // One dimension given, so that the defaults of the built-in model are not taken.
    let text: Shapes = [("timestep".to_string(), vec![1])].into();
    options.shapes = text;
    let started = Instant::now();
    let engine = provider.build(&model, &options, &NoHost)?;
    let build = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let mut session = engine.session(&model.weights(), &NoHost)?;
    let load = started.elapsed().as_secs_f64();
    let mut given: Vec<(String, Tensors)> = Vec::new();
    for latent in [64, 32, 48, 40] {
        let shapes: Shapes = [
            ("sample".to_string(), vec![1, 4, latent, latent]),
            ("timestep".to_string(), vec![1]),
            ("encoder_hidden_states".to_string(), vec![1, 77, 768]),
        ]
        .into();
        given.push((format!("{latent}x{latent}"), inputs::seeded(&model, &model.bound(&shapes)?, 0)?));
    }
    let mut rows = Vec::new();
    for (name, tensors) in &given {
        let mut seconds = Vec::new();
        for _ in 0..4 {
            let started = Instant::now();
            session.run(tensors, &NoHost)?;
            seconds.push(started.elapsed().as_secs_f64());
        }
        let (first, others) = seconds.split_first().context("no runs")?;
        let steady = others.iter().copied().fold(f64::INFINITY, f64::min);
        rows.push(json!({"latent": name, "first_s": first, "steady_s": steady}));
    }
    let memory = session.memory()?;
    println!(
        "{}",
        json!({"build_s": build, "load_s": load, "shapes": rows, "weights": memory.weights, "activations": memory.activations})
    );
    Ok(())
}
