//! A host that draws pictures: `cargo run -p sdrun-diffusion --example draw -- "a red circle left of a blue square"`.

use sdrun::{BuildOptions, Registry, TracingHost, Wishes};
use sdrun_diffusion::{
    demo,
    pipeline::{self, Engines, Event, Files, Kept, Parts, Request},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let prompt = arguments.next().ok_or("usage: draw PROMPT [MODEL]")?;
    let registry = Registry::discover()?;
    let paths = registry.paths();
    let model = match arguments.next() {
        Some(file) => Some(file.into()),
        None => demo::find(demo::NAME, paths)?,
    };
    let parts = Parts::open(&Files { model, ..Files::default() }, paths, &TracingHost)?;
    let request = Request { prompt, seed: 7, ..Request::default() }.resolve(&parts)?;
    // Keep `engines` for the next request: its networks are still loaded then.
    let engines = Engines {
        only: None,
        wishes: Wishes::new(),
        options: &|device| BuildOptions::new(device),
        kept: Some(Kept::default()),
    };
    let mut saved = Ok(());
    pipeline::generate(&registry, &parts, &request, &engines, &TracingHost, &mut |event| match event {
        Event::Step { step, steps, .. } => println!("step {} of {steps}", step + 1),
        Event::Picture(it) => {
            let (width, height) = (it.width as u32, it.height as u32);
            saved = image::save_buffer("picture.png", &it.bytes, width, height, image::ColorType::Rgb8);
        }
        _ => {}
    })?;
    Ok(saved?)
}
