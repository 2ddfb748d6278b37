//! Samplers: how a picture gets from one noise level to the next.
//!
//! A sampler is a function over a state `x` and a [`Denoiser`], which estimates the clean picture in `x`. Names and rules are
//! those of k-diffusion and ComfyUI. Coefficients are computed in f64, states are f32.

mod adams;
mod ancestral;
mod exponential;
mod math;
mod one_step;

/// What a network says of a noisy state.
pub trait Denoiser {
    /// Why it could not.
    type Error;

    /// The clean state in `x` at noise level `sigma`, guidance included; as long as `x`.
    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, Self::Error>;
}

/// Where a sampler's noise comes from.
pub trait Noise {
    /// Fills `out` with normal numbers for a step between two levels. Only Brownian noise depends on the levels.
    fn fill(&mut self, from: f64, to: f64, out: &mut [f32]);
}

/// What a noisy state is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Space {
    /// `x = x0 + σ n`: Stable Diffusion 1, 2, XL.
    Additive,
    /// `x = (1 - σ) x0 + σ n`: flow models.
    Flow {
        /// Shift of the model's levels. Samplers that need a finite signal-to-noise ratio replace a first level of 1 by
        /// the level at a share of 0.9999.
        shift: f64,
    },
}

/// The samplers. Each is deterministic but for the noise that it draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sampler {
    /// Euler's method; DDIM with η = 0 is the same.
    Euler,
    /// Euler's method with new noise in each step.
    EulerAncestral,
    /// Heun's method, two calls each step.
    Heun,
    /// Heun++: two or three slopes, weighted by their levels.
    HeunPp2,
    /// DPM-Solver-2, two calls each step.
    Dpm2,
    /// The same with new noise in each step.
    Dpm2Ancestral,
    /// DPM-Solver++(2S) with new noise in each step; two calls each step.
    DpmPp2sAncestral,
    /// DPM-Solver++ as an SDE; two calls each step.
    DpmPpSde,
    /// DPM-Solver++(2M).
    DpmPp2m,
    /// DPM-Solver++(2M) as an SDE, midpoint form.
    DpmPp2mSde,
    /// The same in Heun's form.
    DpmPp2mSdeHeun,
    /// DPM-Solver++(3M) as an SDE.
    DpmPp3mSde,
    /// Linear multistep of order 4.
    Lms,
    /// Adams and Bashforth's method of order 4, as if all steps were equal.
    Ipndm,
    /// The same for steps of different lengths.
    IpndmV,
    /// Consistency models: the clean state, with new noise.
    Lcm,
    /// Exponential multistep of order 2 (Zhang et al., 2023).
    ResMultistep,
    /// The same with new noise in each step.
    ResMultistepAncestral,
    /// Euler's method with the last slope's change carried on (γ = 2).
    GradientEstimation,
    /// Extended reverse-time SDE of order 3.
    ErSde,
    /// SEEDS-2; two calls each step.
    Seeds2,
}

impl Sampler {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::Euler,
        Self::EulerAncestral,
        Self::Heun,
        Self::HeunPp2,
        Self::Dpm2,
        Self::Dpm2Ancestral,
        Self::DpmPp2sAncestral,
        Self::DpmPpSde,
        Self::DpmPp2m,
        Self::DpmPp2mSde,
        Self::DpmPp2mSdeHeun,
        Self::DpmPp3mSde,
        Self::Lms,
        Self::Ipndm,
        Self::IpndmV,
        Self::Lcm,
        Self::ResMultistep,
        Self::ResMultistepAncestral,
        Self::GradientEstimation,
        Self::ErSde,
        Self::Seeds2,
    ];

    /// Whether the noise of a step should be that of a Brownian path between its levels.
    pub fn is_brownian(self) -> bool {
        matches!(self, Self::DpmPpSde | Self::DpmPp2mSde | Self::DpmPp2mSdeHeun | Self::DpmPp3mSde)
    }

    /// Whether it draws noise at all.
    pub fn is_stochastic(self) -> bool {
        self.is_brownian()
            || matches!(
                self,
                Self::EulerAncestral
                    | Self::Dpm2Ancestral
                    | Self::DpmPp2sAncestral
                    | Self::Lcm
                    | Self::ResMultistepAncestral
                    | Self::ErSde
                    | Self::Seeds2
            )
    }

    /// Whether ComfyUI and A1111 compute one more level than steps and drop the second lowest.
    pub fn drops_second_lowest(self) -> bool {
        matches!(self, Self::Dpm2 | Self::Dpm2Ancestral)
    }

    /// Denoises `x` from the first of `sigmas` to the last, which falls and ends with 0. After each step `observe` receives the
    /// number of the step and the state.
    pub fn run<D: Denoiser>(
        self,
        path: &Path<'_>,
        x: &mut Vec<f32>,
        denoiser: &mut D,
        noise: &mut dyn Noise,
        observe: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), D::Error> {
        let mut run = Run { path, x, denoiser, noise, observe };
        match self {
            Self::Euler => one_step::euler(&mut run),
            Self::Heun => one_step::heun(&mut run),
            Self::HeunPp2 => one_step::heun_pp2(&mut run),
            Self::Dpm2 => one_step::dpm2(&mut run),
            Self::EulerAncestral => ancestral::euler(&mut run),
            Self::Dpm2Ancestral => ancestral::dpm2(&mut run),
            Self::DpmPp2sAncestral => ancestral::dpm_pp_2s(&mut run),
            Self::Lcm => ancestral::lcm(&mut run),
            Self::DpmPpSde => exponential::dpm_pp_sde(&mut run),
            Self::DpmPp2m => exponential::dpm_pp_2m(&mut run),
            Self::DpmPp2mSde => exponential::dpm_pp_2m_sde(&mut run, exponential::Form::Midpoint),
            Self::DpmPp2mSdeHeun => exponential::dpm_pp_2m_sde(&mut run, exponential::Form::Heun),
            Self::DpmPp3mSde => exponential::dpm_pp_3m_sde(&mut run),
            Self::ErSde => exponential::er_sde(&mut run),
            Self::Seeds2 => exponential::seeds_2(&mut run),
            Self::Lms => adams::lms(&mut run),
            Self::Ipndm => adams::ipndm(&mut run),
            Self::IpndmV => adams::ipndm_v(&mut run),
            Self::GradientEstimation => adams::gradient_estimation(&mut run),
            Self::ResMultistep => adams::res_multistep(&mut run, 0.0),
            Self::ResMultistepAncestral => adams::res_multistep(&mut run, 1.0),
        }
    }
}

/// The levels that a picture passes.
#[derive(Clone, Copy, Debug)]
pub struct Path<'a> {
    /// Levels, the highest first; the last is 0.
    pub sigmas: &'a [f64],
    /// What a noisy state is made of.
    pub space: Space,
}

/// A sampler at work.
struct Run<'a, D> {
    path: &'a Path<'a>,
    x: &'a mut Vec<f32>,
    denoiser: &'a mut D,
    noise: &'a mut dyn Noise,
    observe: &'a mut dyn FnMut(usize, &[f32]),
}

/// The levels of a step.
#[derive(Clone, Copy)]
struct Step {
    index: usize,
    sigma: f64,
    next: f64,
}

impl<D: Denoiser> Run<'_, D> {
    /// All steps.
    fn steps(&self) -> Vec<Step> {
        let pairs = self.path.sigmas.windows(2).enumerate();
        pairs.map(|(index, pair)| Step { index, sigma: pair[0], next: pair[1] }).collect()
    }

    /// All steps, for samplers that need a finite signal-to-noise ratio at the first level.
    fn steps_below_one(&self) -> Vec<Step> {
        let mut steps = self.steps();
        if let (Space::Flow { shift }, Some(first)) = (self.path.space, steps.first_mut())
            && first.sigma >= 1.0
        {
            first.sigma = crate::schedule::flow::shifted(shift, 0.9999);
        }
        steps
    }

    /// The clean state in `x`.
    fn denoised(&mut self, sigma: f64) -> Result<Vec<f32>, D::Error> {
        self.denoiser.denoise(self.x, sigma)
    }

    /// The clean state in another state.
    fn denoised_of(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, D::Error> {
        self.denoiser.denoise(x, sigma)
    }

    /// New noise for a step between two levels.
    fn noise(&mut self, from: f64, to: f64) -> Vec<f32> {
        let mut out = vec![0.0; self.x.len()];
        self.noise.fill(from, to, &mut out);
        out
    }

    /// Makes `x` a sum of `scale` times itself and of other terms.
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
