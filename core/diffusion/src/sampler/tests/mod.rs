//! Samplers against exact solutions and other programs.

mod gaussian;
mod published;
mod reference;

use super::{Denoiser, Noise, Options, Path, Sampler};
use crate::{
    noise::{BrownianTree, TorchCpu},
    program::Program,
};
use std::convert::Infallible;

/// A denoiser that cannot fail.
struct Function<F>(F);

impl<F: FnMut(f64, f64) -> f64> Denoiser for Function<F> {
    type Error = Infallible;

    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, Infallible> {
        Ok(x.iter().map(|value| self.0(f64::from(*value), sigma) as f32).collect())
    }

    fn denoise_both(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Vec<f32>), Infallible> {
        let Ok(denoised) = self.denoise(x, sigma);
        Ok((denoised.clone(), denoised))
    }
}

struct Stream(TorchCpu);

impl Noise for Stream {
    fn fill(&mut self, _: f64, _: f64, out: &mut [f32]) {
        self.0.randn(out);
    }
}

struct Tree(BrownianTree);

impl Noise for Tree {
    fn fill(&mut self, from: f64, to: f64, out: &mut [f32]) {
        self.0.noise(from, to, out);
    }
}

/// Noise for samplers that must not draw any.
struct Silent;

impl Noise for Silent {
    fn fill(&mut self, _: f64, _: f64, _: &mut [f32]) {
        panic!("a deterministic sampler draws noise");
    }
}

/// Runs a sampler and returns the state after each step.
fn states(
    sampler: Sampler,
    path: &Path<'_>,
    options: &Options,
    start: &[f32],
    denoised: impl FnMut(f64, f64) -> f64,
) -> Vec<Vec<f32>> {
    let sigmas = path.sigmas;
    let mut x = start.to_vec();
    let mut noise: Box<dyn Noise> =
        if sampler.is_brownian() && sampler.is_stochastic(options) && options.program == Program::A1111 {
            let lowest = sigmas.iter().copied().filter(|sigma| *sigma > 0.0).fold(f64::INFINITY, f64::min);
            Box::new(Tree(BrownianTree::new(1, lowest, sigmas[0], x.len())))
        } else if sampler.is_stochastic(options) {
            Box::new(Stream(TorchCpu::new(1)))
        } else {
            Box::new(Silent)
        };
    let mut states = Vec::new();
    let mut observe = |_: usize, x: &[f32]| states.push(x.to_vec());
    let Ok(()) = sampler.run(path, options, &mut x, &mut Function(denoised), &mut *noise, &mut observe);
    let bits = |x: &Vec<f32>| x.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(states.last().map(bits), Some(bits(&x)), "{sampler:?}");
    states
}
