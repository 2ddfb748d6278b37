//! Samplers: taking a picture from one noise level to the next.
//!
//! A sampler is a function over a state `x` and a [`Denoiser`], which estimates the clean picture in `x`. Names and rules are
//! those of k-diffusion and ComfyUI. Coefficients are computed in f64, states are f32.
//!
//! diffusers keeps the states of Stable Diffusion at variance 1. Such a state is one of ours divided by `√(1 + σ²)`, so its rules
//! hold here in a shorter form: the factor of the clean picture is 1.

mod adams;
mod ancestral;
mod dpm_solver;
mod heun;
mod kind;
mod math;
mod multistep;
mod sa_solver;
mod seeds;
mod stages;
mod unipc;

pub use kind::Sampler;

use crate::{program::Program, schedule::Levels};

/// Estimates clean states.
pub trait Denoiser {
    /// Why an estimate failed.
    type Error;

    /// Returns the clean state for `x` at noise level `sigma`, guidance included. It has the length of `x`.
    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, Self::Error>;

    /// Returns the same and the estimate for the negative prompt alone. Both are equal without guidance. Only the samplers named
    /// CFG++ call it.
    fn denoise_both(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Vec<f32>), Self::Error>;
}

/// A source of noise.
pub trait Noise {
    /// Fills `out` with unit-variance noise for a step between two levels. Only Brownian noise depends on the levels.
    fn fill(&mut self, from: f64, to: f64, out: &mut [f32]);
}

/// How noise and picture form a state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Space {
    /// `x = x0 + σ n`: Stable Diffusion 1, 2, XL.
    Additive,
    /// `x = (1 - σ) x0 + σ n`: flow models.
    Flow,
}

/// The noise levels of a run.
#[derive(Clone, Copy, Debug)]
pub struct Path<'a> {
    /// Falling levels; the last is 0 in a whole run.
    pub sigmas: &'a [f64],
    /// The levels of the model.
    pub levels: &'a Levels,
}

/// What users can change about a sampler. Each part has an effect only on samplers that have it in k-diffusion, ComfyUI or
/// diffusers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// The share of new noise (η; τ of SA-Solver; γ of TCD). `None` is the sampler's usual value.
    pub eta: Option<f64>,
    /// Factor of new noise (`s_noise`).
    pub noise: f64,
    /// How much noise to add before each step (`s_churn`; Karras et al., 2022, algorithm 2).
    pub churn: f64,
    /// The lowest and highest level at which to add it (`s_tmin`, `s_tmax`).
    pub churn_range: (f64, f64),
    /// The highest order of a multistep method. `None` is the program's usual value.
    pub order: Option<usize>,
    /// Whose rules to follow.
    pub program: Program,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            eta: None,
            noise: 1.0,
            churn: 0.0,
            churn_range: (0.0, f64::INFINITY),
            order: None,
            program: Program::default(),
        }
    }
}

/// A run in progress.
struct Run<'a, D> {
    path: &'a Path<'a>,
    options: &'a Options,
    space: Space,
    /// The share of new noise: 0 for a deterministic sampler.
    eta: f64,
    /// Whether slopes come from the negative prompt.
    cfg_pp: bool,
    x: &'a mut Vec<f32>,
    denoiser: &'a mut D,
    noise: &'a mut dyn Noise,
    observe: &'a mut dyn FnMut(usize, &[f32]),
}

/// An estimate, and the difference that guidance makes with CFG++.
type Estimates = (Vec<f32>, Option<Vec<f32>>);

/// The levels of a step.
#[derive(Clone, Copy)]
struct Step {
    index: usize,
    sigma: f64,
    next: f64,
}

impl<D: Denoiser> Run<'_, D> {
    /// The steps.
    fn steps(&self) -> Vec<Step> {
        let pairs = self.path.sigmas.windows(2).enumerate();
        pairs.map(|(index, pair)| Step { index, sigma: pair[0], next: pair[1] }).collect()
    }

    /// The steps in a space where the sampler needs a finite signal-to-noise ratio. The first level of a flow model has none, so
    /// one slightly below replaces it (ComfyUI's `offset_first_sigma_for_snr`).
    fn steps_in(&self, space: Space) -> Vec<Step> {
        let mut steps = self.steps();
        if let (Space::Flow, Some(first)) = (space, steps.first_mut())
            && first.sigma >= 1.0
        {
            first.sigma = self.path.levels.after(1e-4);
        }
        steps
    }

    /// The space in which a deterministic method measures its steps. The equation `dx/dσ = (x - denoised) / σ` is the same in both
    /// spaces. Only diffusers uses the signal-to-noise ratio of flow models.
    fn equation(&self) -> Space {
        match self.options.program {
            Program::Diffusers => self.space,
            _ => Space::Additive,
        }
    }

    /// The highest order that diffusers allows in a step: in runs of less than 15 steps, the number of steps left.
    fn order_limit(&self, index: usize) -> usize {
        let steps = self.path.sigmas.len() - 1;
        match self.options.program {
            Program::Diffusers if steps < 15 => steps - index,
            _ => usize::MAX,
        }
    }

    /// Adds noise before a step, as algorithm 2 of Karras et al. (2022) does, and returns the step from the level so reached.
    fn churn(&mut self, step: Step) -> Step {
        let (low, high) = self.options.churn_range;
        if self.options.churn <= 0.0 || step.sigma < low || step.sigma > high {
            return step;
        }
        let most = std::f64::consts::SQRT_2 - 1.0;
        let sigma = step.sigma * (1.0 + most.min(self.options.churn / (self.path.sigmas.len() - 1) as f64));
        let noise = self.noise(sigma, step.sigma);
        self.update(1.0, &[((sigma * sigma - step.sigma * step.sigma).sqrt(), &noise)]);
        Step { sigma, ..step }
    }

    /// Estimates the clean state of `x`.
    fn denoised(&mut self, sigma: f64) -> Result<Vec<f32>, D::Error> {
        self.denoiser.denoise(self.x, sigma)
    }

    /// Estimates the clean state of `x`. In the step to level 0 that estimate is the result: it becomes `x`, the step is done, and
    /// this returns `None`.
    fn denoised_unless_last(&mut self, step: Step) -> Result<Option<Vec<f32>>, D::Error> {
        let denoised = self.denoised(step.sigma)?;
        if step.next > 0.0 {
            return Ok(Some(denoised));
        }
        *self.x = denoised;
        self.done(step);
        Ok(None)
    }

    /// Estimates the clean state of `x` from which the slope follows, and what to add to the next state because of guidance: with CFG++
    /// the estimate is the negative prompt's, and the other the difference between both (Chung et al., 2024).
    fn estimates(&mut self, sigma: f64) -> Result<Estimates, D::Error> {
        if !self.cfg_pp {
            return Ok((self.denoised(sigma)?, None));
        }
        let (guided, negative) = self.denoiser.denoise_both(self.x, sigma)?;
        let difference = math::sum(&[(1.0, &guided), (-1.0, &negative)]);
        Ok((negative, Some(difference)))
    }

    /// Adds a difference that guidance makes.
    fn guide(&mut self, factor: f64, difference: &Option<Vec<f32>>) {
        if let Some(difference) = difference {
            self.update(1.0, &[(factor, difference)]);
        }
    }

    /// Estimates the clean state of another state.
    fn denoised_of(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, D::Error> {
        self.denoiser.denoise(x, sigma)
    }

    /// The slope at another state.
    fn slope_of(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, D::Error> {
        let denoised = self.denoiser.denoise(x, sigma)?;
        Ok(math::slope(x, &denoised, sigma))
    }

    /// Draws noise for a step between two levels.
    fn noise(&mut self, from: f64, to: f64) -> Vec<f32> {
        let mut out = vec![0.0; self.x.len()];
        self.noise.fill(from, to, &mut out);
        if self.options.noise != 1.0 {
            out.iter_mut().for_each(|value| *value = (self.options.noise * f64::from(*value)) as f32);
        }
        out
    }

    /// Replaces `x` by `scale * x` plus weighted terms.
    fn update(&mut self, scale: f64, terms: &[(f64, &[f32])]) {
        math::update(self.x, scale, terms);
    }

    /// Reports the end of a step.
    fn done(&mut self, step: Step) {
        (self.observe)(step.index, self.x);
    }
}

#[cfg(test)]
mod tests;
