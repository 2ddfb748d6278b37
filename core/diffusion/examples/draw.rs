//! A host that draws pictures: `cargo run -p sdrun-diffusion --example draw -- "a red circle left of a blue square"`.

use sdrun::{Registry, TracingHost as Host};
use sdrun_diffusion::pipeline::{Artist, Event, Files, Lane, Recipe, Request, Told, Wanted};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let prompt = arguments.next().ok_or("usage: draw PROMPT [MODEL]")?;
    // Without a model it is the demo model.
    let files = Files { model: arguments.next().map(Into::into), ..Files::default() };
    let recipe = Recipe { files, ..Recipe::default() };
    // Keep the artist for the next picture: its networks are still loaded then.
    let artist = Artist::open(Registry::discover()?, recipe, Lane::default(), &Host)?;
    let request = Request { prompt, seed: 7, ..Request::default() };
    let mut saved = Ok(());
    artist.draw(&Wanted { request, ..Wanted::default() }, &Host, &mut |told| match told {
        Told::Event(Event::Step { step, steps, .. }) => println!("step {} of {steps}", step + 1),
        Told::Picture(finished) => saved = finished.picture.into_rgb().save("picture.png"),
        _ => {}
    })?;
    Ok(saved?)
}
