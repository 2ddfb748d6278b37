//! A host that draws pictures: `cargo run -p sdrun-diffusion --example draw -- "a red circle left of a blue square"`.

use sdrun::{BuildOptions, Registry, TracingHost as Host};
use sdrun_diffusion::demo;
use sdrun_diffusion::pipeline::{Engines, Event, Files, Parts, Request, generate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let prompt = arguments.next().ok_or("usage: draw PROMPT [MODEL]")?;
    let registry = Registry::discover()?;
    let paths = registry.paths();
    let model = match arguments.next() {
        Some(file) => Some(file.into()),
        None => demo::find(demo::NAME, paths)?,
    };
    let parts = Parts::open(&Files { model, ..Files::default() }, paths, &Host)?;
    let request = Request { prompt, seed: 7, ..Request::default() }.resolve(&parts)?;
    // Keep `engines` for the next request: its networks are still loaded then.
    let engines = Engines::new(&BuildOptions::new);
    let mut saved = Ok(());
    generate(&registry, &parts, &request, &engines, &Host, &mut |event| match event {
        Event::Step { step, steps, .. } => println!("step {} of {steps}", step + 1),
        Event::Picture(picture) => saved = picture.into_rgb().save("picture.png"),
        _ => {}
    })?;
    Ok(saved?)
}
