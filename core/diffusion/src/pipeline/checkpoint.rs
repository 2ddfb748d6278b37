//! The networks of checkpoints, on built-in graphs.

use super::{
    Error, Result,
    parts::{Files, Part, family},
};
use crate::{
    family::{Family, NoiseLevels},
    prediction::Prediction,
};
use sdrun::{
    Paths, WeightFiles,
    abi::{self, Host},
    weights::{
        Checkpoint, Component,
        checkpoint::{Facts, Family as Kind, Parameterisation, Summary},
    },
};
use std::path::{Path, PathBuf};

/// A recognised checkpoint.
pub(super) struct Source<'a> {
    pub(super) family: &'static Family,
    pub(super) prediction: Option<Prediction>,
    pub(super) noise: NoiseLevels,
    model: Option<(&'a Path, Vec<Component>)>,
    paths: &'a Paths,
    host: &'a dyn Host,
}

impl<'a> Source<'a> {
    /// Recognises the family by the denoiser.
    pub(super) fn open(files: &'a Files, paths: &'a Paths, host: &'a dyn Host) -> Result<Self> {
        let Some(path) = files.denoiser.as_deref().or(files.model.as_deref()) else {
            return Err(Error::invalid("no model was given: name a checkpoint or a folder"));
        };
        let summary = Checkpoint::open(path)?.summary();
        let family = family(family_id(path, &summary)?)?;
        let (prediction, noise) = training(path, &summary, family)?;
        let model = match files.model.as_deref() {
            Some(model) if files.denoiser.is_some() => Some((model, Checkpoint::open(model)?.components())),
            Some(model) => Some((model, summary.components.iter().map(|part| part.component).collect())),
            None => None,
        };
        Ok(Source { family, prediction, noise, model, paths, host })
    }

    /// The network `name` from `file`, or else from the model.
    pub(super) fn part(
        &self,
        component: Component,
        name: &str,
        builtin: &str,
        file: Option<&PathBuf>,
    ) -> Result<Part> {
        let weights = match (file, &self.model) {
            (Some(file), _) => file.as_path(),
            (None, Some((model, components))) if components.contains(&component) => model,
            _ => return Err(self.missing(name)),
        };
        let weights = WeightFiles { component: Some(component), ..WeightFiles::of(weights) };
        Part::of_builtin(name, builtin, weights, self.paths, self.host)
    }

    /// The error for a network that no file holds.
    pub(super) fn missing(&self, component: &str) -> Error {
        let file = self.model.as_ref().map(|(path, _)| path.to_path_buf());
        Error::Missing { component: component.into(), family: self.family, file }
    }
}

/// Fails unless a file is a ControlNet of this family.
pub(super) fn check_control(file: &Path, family: &Family) -> Result<()> {
    let summary = Checkpoint::open(file)?.summary();
    let is_control = summary.components.iter().any(|part| part.component == Component::ControlNet);
    let fits = match summary.family {
        Some(Kind::Sd1) if is_demo(&summary.facts) => family.id == "demo",
        Some(Kind::Sd1) => family.id == "sd15",
        Some(Kind::Sd2) => family.id == "sd21",
        Some(Kind::Sdxl) => family.id == "sdxl",
        _ => false,
    };
    if is_control && fits {
        return Ok(());
    }
    let found = match summary.family {
        Some(kind) if is_control => format!("a ControlNet of {kind}"),
        _ => "not a ControlNet".into(),
    };
    let message = format!("{} is {found}, and the model is {}", file.display(), family.title);
    Err(abi::Error::invalid(message).with_file(file).into())
}

/// The family of a checkpoint.
fn family_id(path: &Path, summary: &Summary) -> Result<&'static str> {
    let unfit = |message: String| Error::from(abi::Error::unsupported(message).with_file(path));
    let kind = summary.family.ok_or_else(|| {
        unfit(format!("{} is not a checkpoint of a model that sdrun knows", path.display()))
    })?;
    let Facts { inpainting, control, distilled_guidance, .. } = summary.facts;
    let of = |usual, for_inpainting, of_consistency| match (inpainting, distilled_guidance) {
        (true, _) => for_inpainting,
        (_, true) => of_consistency,
        _ => usual,
    };
    Ok(match kind {
        Kind::Sd1 if is_demo(&summary.facts) => "demo",
        Kind::Sd1 => of("sd15", "sd15-inpainting", "sd15-lcm"),
        Kind::Sd2 if control => "sd21-depth",
        Kind::Sd2 => of("sd21", "sd21-inpainting", "sd21"),
        Kind::Sdxl if summary.prediction.kind == Some(Parameterisation::Edm) => "playground",
        Kind::Sdxl => of("sdxl", "sdxl-inpainting", "sdxl-lcm"),
        Kind::SdxlRefiner => "sdxl-refiner",
        Kind::Sd3 => "sd3",
        // The two differ in width and depth: 2.5 and 8.1 billion parameters.
        Kind::Sd35 if parameters(summary) > 5_000_000_000 => "sd35-large",
        Kind::Sd35 => "sd35-medium",
        Kind::Flux if inpainting => "flux-fill",
        Kind::Flux if control => "flux-canny-depth",
        Kind::Flux if distilled_guidance => "flux-dev",
        Kind::Flux => "flux-schnell",
        Kind::Chroma => "chroma",
        Kind::PixArt => "pixart-sigma",
        // The guidance of Sana Sprint is an input that the built-in graph lacks.
        Kind::Sana if !distilled_guidance => "sana",
        other => {
            return Err(unfit(format!("{} is {other}, which sdrun cannot draw with yet", path.display())));
        }
    })
}

/// Whether it is the demo model, which is SD 1 with narrow states.
fn is_demo(facts: &Facts) -> bool {
    facts.text_width == Some(128)
}

/// Parameters of the denoiser.
fn parameters(summary: &Summary) -> u64 {
    let mut parts = summary.components.iter();
    parts.find(|part| part.component == Component::Denoiser).map_or(0, |part| part.parameters)
}

/// What the denoiser predicts, if the checkpoint says so, and its noise levels.
fn training(path: &Path, summary: &Summary, family: &Family) -> Result<(Option<Prediction>, NoiseLevels)> {
    let prediction = match summary.prediction.kind {
        None | Some(Parameterisation::Flow | Parameterisation::Edm) => None,
        Some(Parameterisation::Epsilon) => Some(Prediction::Noise),
        Some(Parameterisation::Velocity) => Some(Prediction::Velocity),
        Some(other) => {
            let message = format!("{} uses {other}, which sdrun cannot draw with yet", path.display());
            return Err(abi::Error::unsupported(message).with_file(path).into());
        }
    };
    let noise = match family.noise {
        NoiseLevels::Diffusion(betas) if summary.prediction.zero_terminal_snr == Some(true) => {
            NoiseLevels::ZeroTerminalSnr(betas)
        }
        noise => noise,
    };
    Ok((prediction, noise))
}
