//! Measures what isolation costs: MobileNet v2 on one provider, in this process and in a worker, with runs in turns. Prints the
//! milliseconds of every run as JSON.

use sdrun::{
    BuildOptions, CachePolicy, Discovery, Isolation, Model, Paths, Registry, Session, Tensors, abi::NoHost,
    graph::OpenOptions, inputs, worker::Limits,
};
use sdrun_tests::place::Place;
use std::time::Instant;

const PROVIDER: &str = "onnxruntime";
const MODEL: &str = "mobilenet-v2";
const RUNS: usize = 300;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths = Paths { data: Place::Data.find()?, cache: Place::Cache.find()? };
    let providers = vec![Place::Dist.find()?.join("providers")];
    let discovery =
        Discovery { provider_paths: providers, paths: Some(paths.clone()), ..Discovery::default() };
    let registry = Registry::discover_with(&discovery)?;
    let model = Model::find(MODEL, &paths, &OpenOptions::default(), &NoHost)?;
    let given = inputs::seeded(&model, &model.bound(&model.shapes(&Default::default()))?, 0)?;
    let session = |isolation: &Isolation| -> sdrun::Result<Session> {
        let provider = registry.open(PROVIDER, isolation)?;
        let mut options = BuildOptions::new(provider.device(None)?);
        options.cache = CachePolicy::Off;
        options.shapes = model.shapes(&options.shapes);
        provider.build(&model, &options, &NoHost)?.session(&model.weights(), &NoHost)
    };
    let mut here = session(&Isolation::default())?;
    let mut there = session(&Isolation::worker(Limits::default()))?;
    let (mut in_process, mut worker) = (Vec::new(), Vec::new());
    for run in 0..RUNS {
        let (a, b) = (milliseconds(&mut here, &given)?, milliseconds(&mut there, &given)?);
        // The first runs warm up both sides.
        if run >= 10 {
            in_process.push(a);
            worker.push(b);
        }
    }
    println!(
        "{}",
        serde_json::json!({ "provider": PROVIDER, "model": MODEL, "in_process_ms": in_process, "worker_ms": worker })
    );
    Ok(())
}

fn milliseconds(session: &mut Session, given: &Tensors) -> sdrun::Result<f64> {
    let started = Instant::now();
    session.run_in_place(given, &NoHost)?;
    Ok(started.elapsed().as_secs_f64() * 1e3)
}
