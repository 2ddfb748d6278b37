//! Samplers: taking a picture from one noise level to the next.
//!
//! A sampler is a function over a state `x` and a [`Denoiser`], which estimates the clean picture in `x`. Names and rules are
//! those of k-diffusion and ComfyUI. Coefficients are computed in f64, states are f32.

mod adams;
mod ancestral;
mod exponential;
mod math;
mod one_step;

/// Estimates clean states.
pub trait Denoiser {
    /// Why an estimate failed.
    type Error;

    /// Returns the clean state for `x` at noise level `sigma`, guidance included. It has the length of `x`.
    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, Self::Error>;
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
    Flow {
        /// Shift of the model's levels. Samplers that need a finite signal-to-noise ratio replace a first level of 1 by the
        /// shifted 0.9999.
        shift: f64,
    },
}

/// A sampling method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sampler {
    /// Euler's method. DDIM with η = 0 is the same.
    Euler,
    /// Ancestral form of Euler's method, with new noise in each step.
    EulerAncestral,
    /// Heun's method; two calls per step.
    Heun,
    /// Heun++; up to three calls per step.
    HeunPp2,
    /// DPM-Solver-2; two calls per step.
    Dpm2,
    /// Its ancestral form, with new noise in each step.
    Dpm2Ancestral,
    /// Ancestral form of DPM-Solver++(2S); two calls per step.
    DpmPp2sAncestral,
    /// DPM-Solver++ SDE; two calls per step.
    DpmPpSde,
    /// DPM-Solver++(2M).
    DpmPp2m,
    /// DPM-Solver++(2M) SDE, midpoint form.
    DpmPp2mSde,
    /// DPM-Solver++(2M) SDE, Heun form.
    DpmPp2mSdeHeun,
    /// DPM-Solver++(3M) SDE.
    DpmPp3mSde,
    /// Linear multistep of order 4.
    Lms,
    /// Adams-Bashforth of order 4, with coefficients for equal steps.
    Ipndm,
    /// Adams-Bashforth of order 4 for steps of different lengths.
    IpndmV,
    /// For consistency models: the clean state with new noise.
    Lcm,
    /// Exponential multistep of order 2 (Zhang et al., 2023).
    ResMultistep,
    /// Its ancestral form, with new noise in each step.
    ResMultistepAncestral,
    /// Gradient estimation with γ = 2: Euler's method that extrapolates the slope.
    GradientEstimation,
    /// Extended reverse-time SDE solver of order 3.
    ErSde,
    /// SEEDS-2; two calls per step.
    Seeds2,
}

impl Sampler {
    /// All samplers.
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

    /// Whether A1111 and ComfyUI give it Brownian noise.
    pub fn is_brownian(self) -> bool {
        matches!(self, Self::DpmPpSde | Self::DpmPp2mSde | Self::DpmPp2mSdeHeun | Self::DpmPp3mSde)
    }

    /// Whether it draws noise.
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

    /// Whether ComfyUI and A1111 compute one extra level and drop the second lowest.
    pub fn drops_second_lowest(self) -> bool {
        matches!(self, Self::Dpm2 | Self::Dpm2Ancestral)
    }

    /// Denoises `x` along `path`. After each step, `observe` receives the step's index and the state.
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

/// The noise levels of a run.
#[derive(Clone, Copy, Debug)]
pub struct Path<'a> {
    /// Falling levels; the last is 0.
    pub sigmas: &'a [f64],
    /// How noise and picture form a state.
    pub space: Space,
}

/// A run in progress.
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
    /// The steps.
    fn steps(&self) -> Vec<Step> {
        let pairs = self.path.sigmas.windows(2).enumerate();
        pairs.map(|(index, pair)| Step { index, sigma: pair[0], next: pair[1] }).collect()
    }

    /// The steps, with a first level below 1 for samplers that need a finite signal-to-noise ratio.
    fn steps_below_one(&self) -> Vec<Step> {
        let mut steps = self.steps();
        if let (Space::Flow { shift }, Some(first)) = (self.path.space, steps.first_mut())
            && first.sigma >= 1.0
        {
            first.sigma = crate::schedule::flow::shifted(shift, 0.9999);
        }
        steps
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

    /// Estimates the clean state of another state.
    fn denoised_of(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, D::Error> {
        self.denoiser.denoise(x, sigma)
    }

    /// Draws noise for a step between two levels.
    fn noise(&mut self, from: f64, to: f64) -> Vec<f32> {
        let mut out = vec![0.0; self.x.len()];
        self.noise.fill(from, to, &mut out);
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
