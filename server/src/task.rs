//! What a job shall do. Each API translates its requests into tasks.

use crate::fault::Fault;
use image::RgbImage;
use sdrun_diffusion::{
    file::Format,
    pipeline::{Recipe, Request, Resolved, Wanted},
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

/// Pictures to draw.
#[derive(Clone)]
pub(crate) struct Draw {
    pub(crate) recipe: Recipe,
    pub(crate) wanted: Wanted,
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
            Task::Draw(draw) => draw.wanted.request.count.max(1),
            Task::Enlarge(_) => 1,
            Task::Unload => 0,
        }
    }
}

impl Draw {
    /// Refuses what would take too long or too much memory.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        let Wanted { request, hints, second, .. } = &self.wanted;
        let Request { width, height, steps, count, .. } = *request;
        if count > MOST_PICTURES {
            return Err(Fault::invalid(format!("{count} pictures are more than {MOST_PICTURES} in one job")));
        }
        let helpers = [self.recipe.loras.len(), hints.len(), request.references.len()];
        if let Some(count) = helpers.into_iter().find(|count| *count > MOST_HELPERS) {
            let message =
                format!("{count} LoRAs, ControlNets or pictures to edit are more than {MOST_HELPERS}");
            return Err(Fault::invalid(message));
        }
        let second = second.and_then(|second| second.steps);
        if let Some(steps) = [steps, second].into_iter().flatten().find(|steps| *steps > MOST_STEPS) {
            return Err(Fault::invalid(format!("{steps} steps are more than {MOST_STEPS}")));
        }
        check_pixels(width.unwrap_or(1), height.unwrap_or(1))
    }
}

/// Refuses requests whose sizes are too large.
pub(crate) fn check_sizes(request: &Resolved) -> Result<(), Fault> {
    check_pixels(request.width, request.height)?;
    request.hires.map_or(Ok(()), |hires| check_pixels(hires.width, hires.height))
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
