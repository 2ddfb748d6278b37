//! Measures what a new shape costs in a session of an engine with open dimensions, for `cargo xtask bench shapes`: the SD 1.5
//! UNet with f16 weights on ggml, small inputs, more shapes than a session keeps. Prints JSON.
//!
//! `shape_speed [PRECISION]`

use anyhow::Result;
use sdrun::{
    BuildOptions, CachePolicy, Isolation, Shapes,
    abi::{NoHost, Precision},
    inputs,
};
use sdrun_tests::lab::Lab;
use serde_json::json;
use std::time::Instant;

fn main() -> Result<()> {
    let lab = Lab::default();
    let precision = std::env::args().nth(1).map_or(Ok(Precision::Fp32), |text| text.parse());
    let model = lab.model("sd15/unet-fp16");
    let provider = lab.registry.open("ggml", &Isolation::default())?;
    let mut options =
        BuildOptions::new(provider.device(None)?).precision(precision.map_err(anyhow::Error::msg)?);
    options.cache = CachePolicy::Off;
    // Any shape.
    let open = ["sample", "timestep", "encoder_hidden_states"];
    options.open_shapes = open.map(|input| (input.to_string(), Vec::new())).into();
    let engine = provider.build(&model, &options, &NoHost)?;
    let mut session = engine.session(&model.weights(), &NoHost)?;
    let mut rows = Vec::new();
    // Run the largest first, so that memory for activations is allocated.
    for eighths in [8, 1, 2, 3, 4, 5, 6, 7].repeat(3) {
        let shapes: Shapes = [
            ("sample".to_string(), vec![1, 4, 8 * eighths, 8]),
            ("timestep".to_string(), vec![1]),
            ("encoder_hidden_states".to_string(), vec![1, 77, 768]),
        ]
        .into();
        let given = inputs::seeded(&model, &model.bound(&shapes)?, 0)?;
        let mut run = || -> Result<f64> {
            let started = Instant::now();
            session.run(&given, &NoHost)?;
            Ok(started.elapsed().as_secs_f64())
        };
        let (first, again) = (run()?, [run()?, run()?]);
        rows.push(json!({"height": 8 * eighths, "first_s": first, "again_s": again[0].min(again[1])}));
    }
    println!("{}", json!({"shapes": rows}));
    Ok(())
}
