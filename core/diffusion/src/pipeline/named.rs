//! Values by the names that requests have for them.

use super::{Content, Error, Result, Upscale};
use crate::{
    names,
    noise::Rng,
    picture::{Fit, Hint},
    program::Program,
    sampler::Sampler,
    schedule::Schedule,
};
use sdrun::did_you_mean;

/// A sampler, under its name in any program, and the schedule that the name implies.
///
/// # Errors
/// An unknown name, as all functions here.
pub fn sampler(name: &str) -> Result<(Sampler, Option<Schedule>)> {
    names::sampler(name).ok_or_else(|| unknown("sampler", name, names::samplers()))
}

/// A schedule, under its name in any program.
pub fn schedule(name: &str) -> Result<Schedule> {
    names::schedule(name).ok_or_else(|| unknown("schedule", name, names::schedules()))
}

/// What a ControlNet shall see of a picture.
pub fn hint(name: &str) -> Result<Hint> {
    Hint::named(name).ok_or_else(|| unknown("hint", name, Hint::names()))
}

/// How a picture is brought to a size.
pub fn fit(name: &str) -> Result<Fit> {
    one_of("fit", name, &[("crop", Fit::Crop), ("fill", Fit::Fill), ("stretch", Fit::Stretch)])
}

/// What is under a mask at the start.
pub fn content(name: &str) -> Result<Content> {
    let known = [
        ("original", Content::Original),
        ("surroundings", Content::Surroundings),
        ("noise", Content::Noise),
        ("nothing", Content::Nothing),
    ];
    one_of("content of a mask", name, &known)
}

/// The program whose pictures to reproduce.
pub fn program(name: &str) -> Result<Program> {
    let known = [("diffusers", Program::Diffusers), ("a1111", Program::A1111), ("comfy", Program::ComfyUi)];
    one_of("program", name, &known)
}

/// Where noise comes from.
pub fn rng(name: &str) -> Result<Rng> {
    // A GPU's numbers are those of NV for small pictures.
    one_of("source of noise", name, &[("cpu", Rng::Cpu), ("nv", Rng::Nv), ("gpu", Rng::Nv)])
}

/// How a picture is enlarged between two passes.
pub fn upscale(name: &str) -> Result<Upscale> {
    let known = [("lanczos", Upscale::Lanczos), ("latent", Upscale::Latent), ("upscaler", Upscale::Model)];
    one_of("way to enlarge", name, &known)
}

fn one_of<T: Copy>(what: &str, name: &str, known: &[(&'static str, T)]) -> Result<T> {
    let found = known.iter().find(|(one, _)| one.eq_ignore_ascii_case(name)).map(|(_, value)| *value);
    found.ok_or_else(|| unknown(what, name, known.iter().map(|(one, _)| *one)))
}

fn unknown(what: &str, name: &str, known: impl IntoIterator<Item = &'static str>) -> Error {
    let known: Vec<&str> = known.into_iter().collect();
    let guess = did_you_mean(name, known.iter().copied());
    Error::invalid(format!("there is no {what} {name:?}{guess} (known: {})", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_any_case_and_guesses() {
        assert_eq!((fit("Crop").unwrap(), rng("GPU").unwrap()), (Fit::Crop, Rng::Nv));
        let error = content("surrounding").unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no content of a mask \"surrounding\"; did you mean `surroundings`? (known: original, surroundings, noise, nothing)"
        );
        assert!(sampler("magic").unwrap_err().to_string().contains("there is no sampler \"magic\""));
    }
}
