//! A second pass over the enlarged picture ("hires fix").

use super::{Error, Result};
use crate::latent;

/// The second pass: the picture is enlarged, noise is added, and the sampler runs again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hires {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Steps; `None` is as many as in the first pass.
    pub steps: Option<usize>,
    /// How much to change: above 0, at most 1.
    pub strength: f64,
    /// How to enlarge.
    pub upscale: Upscale,
}

/// How the result of the first pass becomes larger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Upscale {
    /// The picture, by Lanczos' filter.
    #[default]
    Lanczos,
    /// The latents, linearly: blurs, so it needs a strength of 0.5 or more (A1111's "Latent").
    Latent,
    /// The picture, by [`Parts::upscaler`](super::Parts::upscaler), and then by Lanczos' filter to the exact size.
    Model,
}

impl Upscale {
    /// A1111's name. A network has that of its file.
    pub fn label(self) -> Option<&'static str> {
        match self {
            Self::Lanczos => Some("Lanczos"),
            Self::Latent => Some("Latent"),
            Self::Model => None,
        }
    }

    /// What comes nearest to a name of A1111, in any case. Other names are those of networks.
    pub fn named(name: &str) -> Self {
        match name.trim().to_lowercase().as_str() {
            "lanczos" | "nearest" | "none" => Self::Lanczos,
            // With or without the kind of interpolation.
            name if name.starts_with("latent") => Self::Latent,
            _ => Self::Model,
        }
    }
}

impl Hires {
    /// Fails if a setting is out of range.
    pub(super) fn check(&self, multiple: usize) -> Result<()> {
        latent::check_size(self.width, self.height, multiple)?;
        if !(self.strength > 0.0 && self.strength <= 1.0) || self.steps == Some(0) {
            let message = format!(
                "the second pass has the strength {} and {:?} steps: take a strength above 0, at most 1, and at least one step",
                self.strength, self.steps
            );
            return Err(Error::invalid(message));
        }
        Ok(())
    }
}
