//! How often pictures are enlarged, and what becomes of a picture's enlargement without its file.

use sdrun_diffusion::{
    metadata::{self, Record},
    pipeline::{Hires, Request, Upscale, Upscaler},
};

/// How often an upscaler enlarges finished pictures: as `given`, or else as the picture `from` was, or else once, but not if it works
/// between two passes.
pub(super) fn repeats(
    given: Option<usize>,
    upscaler: Option<&Upscaler>,
    hires: Option<Hires>,
    from: Option<&Record>,
) -> usize {
    let before = from.and_then(|record| record.upscale.as_ref());
    match (upscaler, given, before) {
        (None, ..) => 0,
        (Some(_), Some(repeats), _) => repeats,
        (Some(upscaler), None, Some(before)) => upscaler.repeats(before.factor),
        (Some(_), None, None) => usize::from(!hires.is_some_and(|hires| hires.upscale == Upscale::Model)),
    }
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
