//! A host: chooses where a model runs, builds with progress, gives the engine a checkpoint, switches an adapter on and off,
//! cancels a build from another thread, and runs.
//!
//! `embed [MODEL [CHECKPOINT [ADAPTER]]] [INPUT=1,4,64,64 …]`, with providers in `SDRUN_PROVIDER_FILES` or installed for
//! the user. Without arguments it runs a built-in model with its own weights.

use sdrun::{
    BuildOptions, CachePolicy, Error, Model, Observer, Registry, Shapes, Tensors, WeightFiles, Wishes, abi,
    graph::OpenOptions, inputs,
};
use std::{
    sync::{Arc, atomic::AtomicBool, atomic::Ordering::Relaxed},
    thread,
};

fn main() -> Result<(), Error> {
    let (shapes, files): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|a| a.contains('='));
    let mut files = files.into_iter();
    let what = files.next().unwrap_or("mobilenet-v2".into());
    let (checkpoint, adapter) = (files.next(), files.next());
    let shapes = shapes.iter().map(|text| shape(text)).collect::<Result<Shapes, Error>>()?;

    // Another thread, a signal or a button sets the flag; the call under way then ends with `Cancelled`.
    let cancel = Arc::new(AtomicBool::new(false));
    let progress = |phase: &str, step: u64, total: u64| {
        if step == total {
            println!("  {phase}");
        }
    };
    let host = Observer::new(progress, cancel.clone());

    let registry = Registry::discover()?;
    let weights = match &checkpoint {
        Some(file) => WeightFiles::of(file),
        None => WeightFiles::default(),
    };
    let open = OpenOptions { weights: weights.policy(), ..OpenOptions::default() };
    let model = Model::find(&what, registry.paths(), &open, &host)?;

    // The best device for this model here, and why. The next one is tried where it turns out not to support the model.
    let options = |device| BuildOptions::new(device).shapes(shapes.clone());
    let mut choice = registry.choose(&model, &Wishes::new(), &options, &host);
    let engine = choice.try_each(|candidate| {
        println!("{} on {}: {}", candidate.provider.id(), candidate.options.device.name, candidate.why);
        candidate.provider.build(&model, &candidate.options, &host)
    })?;
    println!("{} in {:.3} s", if engine.was_loaded() { "loaded" } else { "built" }, engine.seconds());

    let plain_weights = weights.of_model(&model, registry.paths(), &host)?;
    let mut session = engine.session(&plain_weights.stack, &host)?;
    let given = inputs::seeded(&model, &model.bound(&shapes)?, 0)?;
    let plain = session.run(&given, &host)?;
    println!("with {}: {}", plain_weights.base, summary(&plain));

    if let Some(adapter) = adapter {
        let changed = weights.clone().adapter(adapter, 1.0).of_model(&model, registry.paths(), &host)?;
        let report = session.refit(&changed.stack, &host)?;
        let with = session.run(&given, &host)?;
        println!("adapter on ({} tensors): {}", report.tensors, summary(&with));
        session.refit(&plain_weights.stack, &host)?;
        let again = session.run(&given, &host)?;
        println!("adapter off: {}", if again == plain { "the same bits as before" } else { "other bits" });
        if with == plain || again != plain {
            return Err(abi::Error::internal("the adapter did not switch").into());
        }
    }

    // A user gives up: another thread sets the flag, and a build ends with `Cancelled`.
    let pressed = thread::spawn(move || cancel.store(true, Relaxed));
    pressed.join().map_err(|_| abi::Error::internal("the thread panicked"))?;
    let again = options(engine.device().clone()).cache(CachePolicy::Rebuild);
    match engine.provider().build(&model, &again, &host) {
        Err(error) if error.code() == abi::ErrorCode::Cancelled => println!("cancelled"),
        Err(error) => return Err(error),
        Ok(_) => return Err(abi::Error::internal("the build did not stop").into()),
    }
    Ok(())
}

/// `sample=1,4,64,64`.
fn shape(text: &str) -> Result<(String, Vec<usize>), Error> {
    let parsed = text.split_once('=').and_then(|(name, dims)| {
        let dims = dims.split(',').filter(|dim| !dim.is_empty()).map(|dim| dim.parse().ok());
        Some((name.to_string(), dims.collect::<Option<_>>()?))
    });
    parsed.ok_or_else(|| abi::Error::invalid(format!("`{text}` is no shape such as sample=1,4,64,64")).into())
}

/// Name, shape and mean of each output.
fn summary(outputs: &Tensors) -> String {
    let one = |(name, tensor): (&String, &sdrun::HostTensor)| {
        let values = tensor.to_f64().unwrap_or_default();
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        format!("{name} {:?}, mean {mean:.4}", tensor.shape())
    };
    outputs.iter().map(one).collect::<Vec<_>>().join("; ")
}
