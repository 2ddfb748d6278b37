//! What a user wants drawn, in terms that do not depend on the model.

use super::{Control, Error, Hires, Parts, Request, Result, Start, Upscale};
use crate::picture::{Fit, Hint};
use image::RgbImage;

/// A request with pictures of any size for ControlNets, and a second pass of any factor. The model's family decides what becomes of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wanted {
    /// All else.
    pub request: Request,
    /// A picture to edit: one to start from, unless the model edits pictures by itself.
    pub edit: Option<Start>,
    /// Pictures that ControlNets follow, one for each, in their order. They replace the request's.
    pub hints: Vec<HintPicture>,
    /// A second pass, instead of the request's.
    pub second: Option<Second>,
    /// How often the upscaler enlarges finished pictures; once by default, but not if it works between two passes.
    pub repeats: Option<usize>,
}

/// A picture for a ControlNet.
#[derive(Clone, Debug, PartialEq)]
pub struct HintPicture {
    /// The picture, of any size.
    pub picture: RgbImage,
    /// What the network shall see of it.
    pub hint: Hint,
    /// How it is brought to the size of the request.
    pub fit: Fit,
    /// How strongly to follow it; usually 1.
    pub strength: f64,
    /// In which part of the steps to follow it, as shares from 0 to 1.
    pub interval: (f64, f64),
}

/// A second pass over the enlarged picture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Second {
    /// Its size.
    pub size: Size,
    /// Steps; `None` is as many as in the first pass.
    pub steps: Option<usize>,
    /// How much to change: above 0, at most 1.
    pub strength: f64,
    /// How to enlarge.
    pub upscale: Upscale,
}

/// The size of a second pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// A factor of the first pass: above 1, at most 8. Sides become multiples of what the model can draw.
    Factor(f64),
    /// Width and height in pixels.
    Pixels(usize, usize),
}

impl Wanted {
    /// The request for a model.
    ///
    /// # Errors
    /// A factor out of range, and pictures that cannot be resized.
    pub fn request(&self, parts: &Parts) -> Result<Request> {
        let family = parts.family;
        let mut request = self.request.clone();
        let size = (request.width.unwrap_or(family.size), request.height.unwrap_or(family.size));
        match &self.edit {
            Some(edit) if family.edits => request.references.push(edit.picture.clone()),
            Some(edit) => request.start = Some(edit.clone()),
            None => {}
        }
        let control = |hint: &HintPicture| {
            let picture = hint.hint.picture(&hint.picture, hint.fit, size.0 as u32, size.1 as u32)?;
            Ok(Control { hint: picture, strength: hint.strength, interval: hint.interval })
        };
        if !self.hints.is_empty() {
            request.controls = self.hints.iter().map(control).collect::<Result<_>>()?;
        }
        if let Some(second) = &self.second {
            request.hires = Some(second.hires(size, family.multiple)?);
        }
        let between = request.hires.is_some_and(|hires| hires.upscale == Upscale::Model);
        request.upscale_repeats = match (&parts.upscaler, self.repeats) {
            (None, _) => 0,
            (Some(_), Some(repeats)) => repeats,
            (Some(_), None) => usize::from(!between),
        };
        Ok(request)
    }
}

impl Second {
    fn hires(self, (width, height): (usize, usize), multiple: usize) -> Result<Hires> {
        let (width, height) = match self.size {
            Size::Factor(factor) if factor > 1.0 && factor <= 8.0 => {
                let scaled = |side: usize| {
                    ((side as f64 * factor / multiple as f64).round() as usize).max(1) * multiple
                };
                (scaled(width), scaled(height))
            }
            Size::Factor(factor) => {
                let message =
                    format!("a second pass at {factor} times the size: take a factor above 1, at most 8");
                return Err(Error::invalid(message));
            }
            Size::Pixels(width, height) => (width, height),
        };
        Ok(Hires { width, height, steps: self.steps, strength: self.strength, upscale: self.upscale })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_of_a_second_pass_are_multiples() {
        let second = |size| Second { size, steps: Some(3), strength: 0.5, upscale: Upscale::Latent };
        let sides = |size| second(size).hires((64, 96), 16).map(|hires| (hires.width, hires.height));
        assert_eq!(sides(Size::Factor(1.6)).unwrap(), (96, 160));
        assert_eq!(sides(Size::Pixels(100, 7)).unwrap(), (100, 7));
        for factor in [1.0, 8.1, f64::NAN, -2.0] {
            assert!(sides(Size::Factor(factor)).unwrap_err().to_string().contains("at most 8"));
        }
    }
}
