//! Measures pictures of full-size models, for `cargo xtask bench generate`. The checkpoint has synthetic weights; times do not depend
//! on them. Prints JSON.
//!
//! `generate_speed FOLDER sd15|sdxl|sd35|flux-schnell PROVIDER PRECISION STEPS`: FOLDER keeps the checkpoint. It draws a picture as the
//! command line does, and for `sd15` one more with networks that stay loaded and a LoRA.

use anyhow::{Context, Result, bail};
use sdrun::{
    BuildOptions, Wishes,
    abi::{Device, NoHost, Precision},
    weights::{Binding, builtin},
};
use sdrun_diffusion::pipeline::{
    Engines, Event, Files, LoadedNetwork, Origin, Parts, Request, generate, plan,
};
use sdrun_tests::{checkpoints, lab::Lab, memory};
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, family, provider, precision, steps] = &arguments[..] else {
        bail!("usage: generate_speed FOLDER sd15|sdxl|sd35|flux-schnell PROVIDER PRECISION STEPS");
    };
    let folder = Path::new(folder);
    fs::create_dir_all(folder)?;
    let file = folder.join(format!("{family}.safetensors"));
    let (networks, side) = match &**family {
        "sd15" => (checkpoints::SD15, 512),
        "sdxl" => (checkpoints::SDXL, 1024),
        "sd35" => (checkpoints::SD35, 1024),
        "flux-schnell" => (checkpoints::FLUX_SCHNELL, 512),
        other => bail!("unknown family {other}"),
    };
    checkpoints::checkpoint(&file, networks, "generate/A")?;
    if family == "flux-schnell" {
        // Times do not depend on the vocabulary, and T5's own is not ours to ship.
        let vocabulary =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/diffusion/testdata/text/t5.model");
        fs::copy(vocabulary, folder.join("spiece.model"))?;
    }
    let lab = Lab::default();
    let precision: Precision = precision.parse().map_err(anyhow::Error::msg)?;
    let options = |device: Device| BuildOptions::new(device).precision(precision);
    let mut wishes = Wishes::new();
    wishes.order = vec![provider.clone()];
    let engines = Engines { wishes, ..Engines::new(&options) };
    let files = Files { model: Some(file), ..Files::default() };
    let open = || Parts::open(&files, &lab.paths, &NoHost);
    let request = Request {
        prompt: "a lighthouse in the fog".into(),
        negative: "blurry".into(),
        width: Some(side),
        height: Some(side),
        steps: Some(steps.parse()?),
        seed: 1,
        ..Request::default()
    };

    // Build the engines first, so that we measure a start with a warm cache.
    let started = Instant::now();
    let parts = open()?;
    let planned = plan(&lab.registry, &parts, &request.resolve(&parts)?, &engines, &NoHost)?;
    let mut measured = json!({ "plan_bytes": planned.peak()[0] + planned.own.unwrap_or(0), "plan_s": started.elapsed().as_secs_f64() });
    let has_engines =
        planned.phases.iter().flat_map(|phase| &phase.networks).all(|network| network.has_engine);
    if !has_engines {
        let once = Request { steps: Some(1), ..request.clone() };
        draw(&lab, open, &once, &engines)?;
    }
    if let Some(kept) = &engines.kept {
        kept.clear();
    }
    let watch = Watch::start();
    // As the command line does, without keeping anything.
    let alone = Engines { wishes: engines.wishes.clone(), kept: None, ..Engines::new(&options) };
    measured["first"] = draw(&lab, open, &request, &alone)?;
    measured["peak_bytes"] = json!(watch.end());
    if family == "sd15" {
        draw(&lab, open, &Request { steps: Some(1), ..request.clone() }, &engines)?;
        let binding = Binding::from_map(&builtin::find("sd15/unet").context("no sd15/unet")?.weight_map()?);
        let lora = folder.join("lora.safetensors");
        checkpoints::lora(&lora, &binding)?;
        let adapted = || {
            let mut parts = open()?;
            parts.add_adapter(&lora, 0.8, 0.8)?;
            Ok(parts)
        };
        measured["with_lora"] = draw(&lab, adapted, &Request { steps: Some(1), ..request }, &engines)?;
    }
    println!("{measured}");
    Ok(())
}

/// Draws a picture from the first byte read to the last pixel, and returns the times.
fn draw(
    lab: &Lab,
    open: impl Fn() -> sdrun_diffusion::pipeline::Result<Parts>,
    request: &Request,
    engines: &Engines<'_>,
) -> Result<Value> {
    let started = Instant::now();
    let parts = open()?;
    let request = request.resolve(&parts)?;
    let (mut networks, mut steps, mut latest) = (Vec::new(), Vec::new(), started);
    let mut first_step = None;
    let mut hear = |event: Event<'_>| match event {
        Event::Loaded(LoadedNetwork { part, origin, seconds, .. }) => {
            networks.push(json!({ "part": part, "origin": origin, "seconds": seconds }));
            assert!(*origin != Origin::Built || engines.kept.is_some(), "{part} was built again");
            latest = Instant::now();
        }
        Event::Step { running, .. } => {
            let seconds = latest.elapsed().as_secs_f64();
            first_step.get_or_insert_with(|| started.elapsed().as_secs_f64() - running);
            steps.push(json!({ "seconds": seconds, "networks": running }));
            latest = Instant::now();
        }
        _ => {}
    };
    generate(&lab.registry, &parts, &request, engines, &NoHost, &mut hear)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(json!({ "seconds": seconds, "before_first_step": first_step, "networks": networks, "steps": steps }))
}

/// Watches this process' memory.
#[derive(Clone, Default)]
struct Watch(Arc<Watched>);

#[derive(Default)]
struct Watched {
    peak: AtomicU64,
    ended: AtomicBool,
}

impl Watch {
    fn start() -> Self {
        let watch = Watch::default();
        let Watch(seen) = watch.clone();
        thread::spawn(move || {
            while !seen.ended.load(Ordering::Relaxed) {
                seen.peak.fetch_max(memory::own(), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(5));
            }
        });
        watch
    }

    /// The most memory so far, in bytes.
    fn end(self) -> u64 {
        self.0.ended.store(true, Ordering::Relaxed);
        self.0.peak.load(Ordering::Relaxed)
    }
}
