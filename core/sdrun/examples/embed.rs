//! A minimal host in twenty lines: discover, list devices, choose one, build or load, run.
//!
//! `cargo run -p sdrun --example embed -- MODEL`, with providers in `SDRUN_PROVIDER_FILES` or installed for the user.

use sdrun::{BuildOptions, Isolation, Model, Registry, TracingHost, graph::OpenOptions, inputs};

fn main() -> Result<(), sdrun::Error> {
    let what = std::env::args().nth(1).unwrap_or("mobilenet-v2".into());
    let registry = Registry::discover()?;
    for provide in registry.usable() {
        println!("found {}: {}", provide.id, provide.summary);
    }
    let provider = registry.open_best(&Isolation::default())?;
    for device in provider.devices()? {
        println!("{} can use {} ({})", provider.id(), device.name, device.id);
    }
    let model = Model::find(&what, registry.paths(), &OpenOptions::default(), &|_, _| ())?;
    let options = BuildOptions::new(provider.device(None)?);
    let engine = provider.build(&model, &options, &TracingHost)?;
    println!("{} in {:.3} s", if engine.was_loaded() { "loaded" } else { "built" }, engine.seconds());
    let mut session = engine.session(&model.weights(), &TracingHost)?;
    let outputs = session.run(&inputs::seeded(&model, &model.bound(&options.shapes)?, 0)?, &TracingHost)?;
    println!("{outputs:?}");
    Ok(())
}
