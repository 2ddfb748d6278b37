//! What a job shall do. Each API translates its requests into tasks.

use crate::fault::Fault;
use image::RgbImage;
use sdrun_diffusion::{
    family::Family,
    file::Format,
    picture::{Fit, Hint, Mask},
    pipeline::{self, Content, Control, Hires, Inpaint, Recipe, Request, Start, Upscale},
};
use std::path::PathBuf;

/// Work for a device.
pub(crate) enum Task {
    /// Draw pictures.
    Draw(Box<Draw>),
    /// Enlarge a picture.
    Enlarge(Box<Enlarge>),
    /// Free the memory of networks and prompts that are kept.
    Unload,
}

/// Pictures to draw. What depends on the model's family is filled in when its files are open.
#[derive(Clone)]
pub(crate) struct Draw {
    pub(crate) recipe: Recipe,
    pub(crate) request: Request,
    /// A picture to start from.
    pub(crate) start: Option<Begin>,
    /// A picture to edit: one to start from, unless the model edits pictures by itself.
    pub(crate) edit: Option<Begin>,
    pub(crate) controls: Vec<Hinted>,
    pub(crate) second: Option<Second>,
    pub(crate) repeats: Option<usize>,
    pub(crate) output: Output,
}

/// How finished pictures are stored.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) format: Format,
    /// JPEG's quality.
    pub(crate) quality: u8,
    /// Whether previews are wanted.
    pub(crate) previews: bool,
}

/// A picture to start from.
#[derive(Clone)]
pub(crate) struct Begin {
    pub(crate) picture: RgbImage,
    pub(crate) mask: Option<Mask>,
    pub(crate) strength: f64,
    pub(crate) fit: Fit,
    pub(crate) blur: f32,
    pub(crate) content: Content,
    pub(crate) only_masked: Option<u32>,
}

/// A picture for a ControlNet.
#[derive(Clone)]
pub(crate) struct Hinted {
    pub(crate) picture: RgbImage,
    pub(crate) hint: Hint,
    pub(crate) fit: Fit,
    pub(crate) strength: f64,
    pub(crate) interval: (f64, f64),
}

/// A second pass over the enlarged picture.
#[derive(Clone, Copy)]
pub(crate) struct Second {
    pub(crate) size: Size,
    pub(crate) steps: Option<usize>,
    pub(crate) strength: f64,
    pub(crate) upscale: Upscale,
}

/// The size of a second pass.
#[derive(Clone, Copy)]
pub(crate) enum Size {
    /// A factor of the first pass.
    Factor(f64),
    /// Width and height in pixels.
    Pixels(usize, usize),
}

/// A picture to enlarge.
pub(crate) struct Enlarge {
    pub(crate) picture: RgbImage,
    /// Keys and texts of the picture's file.
    pub(crate) texts: Vec<(String, String)>,
    /// A file of ESRGAN; without one, a filter enlarges the picture.
    pub(crate) upscaler: Option<PathBuf>,
    pub(crate) size: Resized,
    pub(crate) output: Output,
}

/// The size of an enlarged picture.
#[derive(Clone, Copy)]
pub(crate) enum Resized {
    /// A factor.
    Factor(f64),
    /// Width and height in pixels, and whether to cut off what does not fit.
    Pixels(u32, u32, bool),
}

/// The most pictures of a job.
pub(crate) const MOST_PICTURES: usize = 64;
/// The most steps of a picture, so that nobody blocks a device for hours.
pub(crate) const MOST_STEPS: usize = 200;
/// The most adapters, ControlNets, and pictures to edit of a job.
pub(crate) const MOST_HELPERS: usize = 32;
/// The most pixels of a picture that is drawn.
pub(crate) const MOST_PIXELS: usize = 16 << 20;

impl Task {
    /// How many pictures it makes.
    pub(crate) fn count(&self) -> usize {
        match self {
            Task::Draw(draw) => draw.request.count.max(1),
            Task::Enlarge(_) => 1,
            Task::Unload => 0,
        }
    }
}

impl Draw {
    /// Refuses what would take too long or too much memory.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        let Request { width, height, steps, count, .. } = self.request;
        if count > MOST_PICTURES {
            return Err(Fault::invalid(format!("{count} pictures are more than {MOST_PICTURES} in one job")));
        }
        let helpers = [self.recipe.loras.len(), self.controls.len(), self.request.references.len()];
        if let Some(count) = helpers.into_iter().find(|count| *count > MOST_HELPERS) {
            let message =
                format!("{count} LoRAs, ControlNets or pictures to edit are more than {MOST_HELPERS}");
            return Err(Fault::invalid(message));
        }
        let second = self.second.and_then(|second| second.steps);
        if let Some(steps) = [steps, second].into_iter().flatten().find(|steps| *steps > MOST_STEPS) {
            return Err(Fault::invalid(format!("{steps} steps are more than {MOST_STEPS}")));
        }
        check_pixels(width.unwrap_or(1), height.unwrap_or(1))
    }

    /// The request for a model of this family.
    pub(crate) fn request(&self, family: &Family, upscaler: bool) -> Result<Request, Fault> {
        let mut request = self.request.clone();
        let size = (request.width.unwrap_or(family.size), request.height.unwrap_or(family.size));
        let mut start = self.start.clone();
        match &self.edit {
            Some(edit) if family.edits => request.references.push(edit.picture.clone()),
            Some(edit) => start = Some(edit.clone()),
            None => {}
        }
        request.start = start.map(Begin::start);
        for Hinted { picture, hint, fit, strength, interval } in &self.controls {
            let hint =
                hint.picture(picture, *fit, size.0 as u32, size.1 as u32).map_err(pipeline::Error::from)?;
            request.controls.push(Control { hint, strength: *strength, interval: *interval });
        }
        if let Some(second) = &self.second {
            request.hires = Some(second.hires(size, family.multiple)?);
        }
        let between = request.hires.is_some_and(|hires| hires.upscale == Upscale::Model);
        request.upscale_repeats = match (upscaler, self.repeats) {
            (false, _) => 0,
            (true, Some(repeats)) => repeats,
            (true, None) => usize::from(!between),
        };
        Ok(request)
    }
}

impl Begin {
    fn start(self) -> Start {
        let Begin { picture, mask, strength, fit, blur, content, only_masked } = self;
        let inpaint = mask.map(|mask| Inpaint { mask, blur, content, only_masked });
        Start { picture, fit, strength, inpaint }
    }
}

impl Second {
    fn hires(self, (width, height): (usize, usize), multiple: usize) -> Result<Hires, Fault> {
        let (width, height) = match self.size {
            Size::Factor(factor) if factor > 1.0 && factor <= 8.0 => {
                let scaled = |side: usize| {
                    ((side as f64 * factor / multiple as f64).round() as usize).max(1) * multiple
                };
                (scaled(width), scaled(height))
            }
            Size::Factor(factor) => {
                return Err(Fault::invalid(format!("a second pass at {factor} times the size: take 1 to 8")));
            }
            Size::Pixels(width, height) => (width, height),
        };
        check_pixels(width, height)?;
        Ok(Hires { width, height, steps: self.steps, strength: self.strength, upscale: self.upscale })
    }
}

/// Refuses sizes that are too large.
pub(crate) fn check_pixels(width: usize, height: usize) -> Result<(), Fault> {
    match width.checked_mul(height) {
        Some(pixels) if pixels <= MOST_PIXELS => Ok(()),
        _ => {
            let most = MOST_PIXELS >> 20;
            Err(Fault::invalid(format!(
                "{width} x {height} pixels are too many: a picture may have {most} million"
            )))
        }
    }
}
