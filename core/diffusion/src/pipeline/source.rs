//! The noise of a picture.

use super::Resolved;
use crate::{
    noise::{self, BrownianTree, Stream},
    program::Program,
    sampler::Noise,
};

/// The noise of one picture of a run. Programs differ in what a batch shares:
///
/// | | start | steps |
/// |---|---|---|
/// | sdrun, A1111 | a stream for each picture, from its seed | the same stream goes on |
/// | diffusers | one stream over the whole batch, from the first seed | the same stream goes on |
/// | ComfyUI | as diffusers | on the CPU a stream from the first seed plus 1, or a Brownian tree, over the whole batch |
///
/// A1111 and ComfyUI give some samplers Brownian noise, from the seed. A variation mixes the start noise with that of another seed,
/// a stream for each picture.
pub(super) struct Source {
    kind: Kind,
    batch: Batch,
}

enum Kind {
    Stream(Stream),
    Brownian(BrownianTree),
}

/// The part of a batch's noise that belongs to one picture.
#[derive(Clone, Copy)]
struct Batch {
    picture: usize,
    count: usize,
}

impl Batch {
    /// Fills `out` with this picture's share of noise that `draw` makes for the whole batch.
    fn fill(self, out: &mut [f32], draw: impl FnOnce(&mut [f32])) {
        if self.count == 1 {
            return draw(out);
        }
        let mut all = vec![0.0; out.len() * self.count];
        draw(&mut all);
        out.copy_from_slice(&all[out.len() * self.picture..][..out.len()]);
    }
}

/// What noise is drawn for besides the start and the steps: samples from the distributions of encoded pictures. Only diffusers
/// draws them; the other programs take the means or a generator of their own.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Samples {
    /// For the picture to start from, before the start noise.
    pub(super) start: bool,
    /// For the picture beside the latents, before the start noise.
    pub(super) before: bool,
    /// The same, after it.
    pub(super) after: bool,
}

/// The noise of a picture.
pub(super) struct Drawn {
    /// For the picture to start from.
    pub(super) sample: Option<Vec<f32>>,
    /// For the picture beside the latents.
    pub(super) beside: Option<Vec<f32>>,
    /// The start noise.
    pub(super) start: Vec<f32>,
    /// The noise of the steps.
    pub(super) steps: Source,
}

impl Source {
    /// The noise of picture number `picture`, for states of a shape, along `sigmas`.
    pub(super) fn draw(
        request: &Resolved,
        picture: usize,
        shape: [usize; 3],
        sigmas: &[f64],
        samples: Samples,
    ) -> Drawn {
        let len = shape.iter().product();
        let shares = matches!(request.like, Some(Program::Diffusers | Program::ComfyUi));
        let (seed, batch) = match shares {
            true => (request.seed, Batch { picture, count: request.count }),
            false => (request.seed_of(picture), Batch { picture: 0, count: 1 }),
        };
        let mut stream = Stream::new(request.rng, seed);
        let mut draw = || {
            let mut noise = vec![0.0; len];
            batch.fill(&mut noise, |all| stream.randn(all));
            noise
        };
        let sample = samples.start.then(&mut draw);
        let before = samples.before.then(&mut draw);
        let mut start = draw();
        let beside = before.or(samples.after.then(&mut draw));
        if let Some(variation) = request.variation_of(picture) {
            let mut other = vec![0.0; len];
            Stream::new(request.rng, variation.seed).randn(&mut other);
            noise::towards(&mut start, &other, variation.strength, shape);
        }
        let kind = if request.sampler.is_brownian() && request.like != Some(Program::Diffusers) {
            let positive = || sigmas.iter().copied().filter(|sigma| *sigma > 0.0);
            let (low, high) = (positive().fold(f64::MAX, f64::min), positive().fold(0.0, f64::max));
            Kind::Brownian(BrownianTree::new(seed, low, high, len * batch.count))
        } else if request.like == Some(Program::ComfyUi) {
            Kind::Stream(Stream::new(request.rng, seed.wrapping_add(1)))
        } else {
            Kind::Stream(stream)
        };
        Drawn { sample, beside, start, steps: Source { kind, batch } }
    }
}

impl Noise for Source {
    fn fill(&mut self, from: f64, to: f64, out: &mut [f32]) {
        self.batch.fill(out, |all| match &mut self.kind {
            Kind::Stream(stream) => stream.randn(all),
            Kind::Brownian(tree) => tree.noise(from, to, all),
        });
    }
}
