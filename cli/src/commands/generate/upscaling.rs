//! How often pictures are enlarged, and what becomes of a picture's enlargement without its file.

use sdrun_diffusion::{
    metadata::{self, Record},
    pipeline::{Request, Upscale, Upscaler},
};

/// How often an upscaler enlarges finished pictures, if the user or the picture `from` tells.
pub(super) fn repeats(
    given: Option<usize>,
    upscaler: Option<&Upscaler>,
    from: Option<&Record>,
) -> Option<usize> {
    let before = from.and_then(|record| record.upscale.as_ref());
    given.or_else(|| Some(upscaler?.repeats(before?.factor)))
}

/// Says that the picture `from` was enlarged with an upscaler that is not given, and goes on without.
pub(super) fn leave_out(from: &Record, request: &mut Request) {
    if let Some(metadata::Upscale { name, factor, .. }) = &from.upscale {
        tracing::warn!(
            "the picture was enlarged {factor} times with {name}: give its file with --upscale-model to do so again"
        );
    }
    if let Some(hires) = request.hires.as_mut().filter(|hires| hires.upscale == Upscale::Model) {
        let name = from.hires.as_ref().and_then(|hires| hires.upscaler.as_deref()).unwrap_or_default();
        tracing::warn!(
            "the second pass enlarged the picture with {name}, and Lanczos' filter does now: give its file with --upscale-model"
        );
        hires.upscale = Upscale::Lanczos;
    }
}
