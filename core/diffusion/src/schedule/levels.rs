//! The noise levels of a model.

use crate::sampler::Space;

/// Noise levels of a model, by training step: the lowest first.
///
/// A *level* σ is the standard deviation of the noise in `x = x0 + σ n` (Stable Diffusion), or the share of noise in
/// `x = (1 - σ) x0 + σ n` (flow models: SD 3, Flux).
#[derive(Clone, Debug, PartialEq)]
pub struct Levels {
    sigmas: Vec<f64>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Between two training steps ln σ is linear.
    Diffusion,
    /// σ is the shifted share of the step.
    Flow { shift: f64 },
}

/// How β grows over the training steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Betas {
    /// Linear: PixArt, from 0.0001 to 0.02.
    Linear {
        /// First β.
        start: f64,
        /// Last β.
        end: f64,
    },
    /// The root of β is linear: Stable Diffusion, from 0.00085 to 0.012.
    ScaledLinear {
        /// First β.
        start: f64,
        /// Last β.
        end: f64,
    },
}

impl Betas {
    /// Stable Diffusion 1, 2 and XL.
    pub const STABLE_DIFFUSION: Self = Self::ScaledLinear { start: 0.00085, end: 0.012 };
    /// PixArt.
    pub const PIXART: Self = Self::Linear { start: 1e-4, end: 0.02 };

    /// Products of `1 - β` after each of `steps` training steps (ᾱ).
    fn alphas(self, steps: usize) -> Vec<f64> {
        let mut product = 1.0;
        let beta = |step: usize| {
            let share = step as f64 / (steps - 1) as f64;
            match self {
                Self::Linear { start, end } => start + share * (end - start),
                Self::ScaledLinear { start, end } => {
                    (start.sqrt() + share * (end.sqrt() - start.sqrt())).powi(2)
                }
            }
        };
        (0..steps)
            .map(|step| {
                product *= 1.0 - beta(step);
                product
            })
            .collect()
    }
}

/// Training steps of every model of the Stable Diffusion kind.
const STEPS: usize = 1000;

/// ᾱ of the last step after rescaling to zero terminal SNR, which cannot be zero itself.
const LAST_ALPHA: f64 = 4.8973451890853435e-8;

impl Levels {
    /// 1,000 levels of a model trained with these β.
    pub fn diffusion(betas: Betas) -> Self {
        Self::of_alphas(betas.alphas(STEPS))
    }

    /// The same, rescaled so that the last level is almost only noise (zero terminal SNR; Lin et al., 2024, algorithm 1).
    /// The last ᾱ is ComfyUI's.
    pub fn zero_terminal_snr(betas: Betas) -> Self {
        let roots: Vec<f64> = betas.alphas(STEPS).into_iter().map(f64::sqrt).collect();
        let (first, last) = (roots[0], roots[STEPS - 1]);
        let mut alphas: Vec<f64> =
            roots.iter().map(|root| ((root - last) * first / (first - last)).powi(2)).collect();
        alphas[STEPS - 1] = LAST_ALPHA;
        Self::of_alphas(alphas)
    }

    fn of_alphas(alphas: Vec<f64>) -> Self {
        let sigmas = alphas.into_iter().map(|alpha| ((1.0 - alpha) / alpha).sqrt()).collect();
        Self { sigmas, kind: Kind::Diffusion }
    }

    /// Levels of a flow model in a table of `steps`: 1,000 for SD 3, 10,000 for Flux in ComfyUI. See
    /// [`shifted`](super::flow::shifted) for `shift`.
    pub fn flow(shift: f64, steps: usize) -> Self {
        let level = |step: usize| super::flow::shifted(shift, (step + 1) as f64 / steps as f64);
        Self { sigmas: (0..steps).map(level).collect(), kind: Kind::Flow { shift } }
    }

    /// Levels of a model of the EDM kind: 1,000 of them, uniform in ln σ (ComfyUI's `ModelSamplingContinuousEDM`). Playground 2.5
    /// has 0.002 to 80.
    pub fn edm(min: f64, max: f64) -> Self {
        let share = |step: usize| step as f64 / (STEPS - 1) as f64;
        let sigmas = (0..STEPS).map(|step| (min.ln() + share(step) * (max.ln() - min.ln())).exp()).collect();
        Self { sigmas, kind: Kind::Diffusion }
    }

    /// How noise and picture form a state of this model.
    pub fn space(&self) -> Space {
        match self.kind {
            Kind::Diffusion => Space::Additive,
            Kind::Flow { .. } => Space::Flow,
        }
    }

    /// The shift of a flow model.
    pub fn shift(&self) -> Option<f64> {
        match self.kind {
            Kind::Diffusion => None,
            Kind::Flow { shift } => Some(shift),
        }
    }

    /// All levels, the lowest first.
    pub fn table(&self) -> &[f64] {
        &self.sigmas
    }

    /// The lowest level.
    pub fn min(&self) -> f64 {
        self.sigmas[0]
    }

    /// The highest level.
    pub fn max(&self) -> f64 {
        self.sigmas[self.sigmas.len() - 1]
    }

    /// The level at a training step, which may have a fraction. For flow models the step runs from 0 to 1,000.
    pub fn sigma(&self, step: f64) -> f64 {
        match self.kind {
            Kind::Diffusion => {
                let step = step.clamp(0.0, (self.sigmas.len() - 1) as f64);
                let (low, share) = (step.floor() as usize, step.fract());
                let high = (low + 1).min(self.sigmas.len() - 1);
                ((1.0 - share) * self.sigmas[low].ln() + share * self.sigmas[high].ln()).exp()
            }
            Kind::Flow { shift } => super::flow::shifted(shift, step / 1000.0),
        }
    }

    /// The training step of a level, with its fraction: what A1111 and k-diffusion give the network. For flow models it is
    /// 1,000 σ, without undoing the shift.
    pub fn step(&self, sigma: f64) -> f64 {
        match self.kind {
            Kind::Diffusion => {
                let last = self.sigmas.len() - 1;
                let low = self.sigmas.partition_point(|level| *level <= sigma).clamp(1, last) - 1;
                let (from, to) = (self.sigmas[low].ln(), self.sigmas[low + 1].ln());
                low as f64 + ((sigma.ln() - from) / (to - from)).clamp(0.0, 1.0)
            }
            Kind::Flow { .. } => sigma * 1000.0,
        }
    }

    /// The level after a share of the training steps, counted from the highest (ComfyUI's `percent_to_sigma`).
    pub fn after(&self, share: f64) -> f64 {
        match self.kind {
            Kind::Diffusion => self.sigma((1.0 - share) * (self.sigmas.len() - 1) as f64),
            Kind::Flow { shift } => super::flow::shifted(shift, 1.0 - share),
        }
    }

    /// The inverse of [`sigma`](Self::sigma).
    pub(crate) fn position(&self, sigma: f64) -> f64 {
        match self.kind {
            Kind::Diffusion => self.step(sigma),
            Kind::Flow { shift } => 1000.0 * super::flow::shifted(1.0 / shift, sigma),
        }
    }

    /// The training step whose level is nearest in ln σ: what ComfyUI gives the network.
    pub fn nearest_step(&self, sigma: f64) -> f64 {
        match self.kind {
            Kind::Diffusion => {
                let distance = |step: &usize| (self.sigmas[*step].ln() - sigma.ln()).abs();
                let nearest =
                    (0..self.sigmas.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
                nearest as f64
            }
            Kind::Flow { .. } => self.step(sigma),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Betas, Levels};

    fn close(actual: f64, expected: f64, tolerance: f64) {
        assert!((actual - expected).abs() <= tolerance * expected.abs(), "{actual} instead of {expected}");
    }

    #[test]
    fn levels_of_stable_diffusion_and_pixart() {
        let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
        for (step, sigma) in [(0, 0.0291672), (1, 0.041314), (499, 1.612886), (999, 14.614641)] {
            close(levels.table()[step], sigma, 1e-5);
        }
        let levels = Levels::diffusion(Betas::PIXART);
        close(levels.min(), 0.010001, 1e-4);
        close(levels.max(), 157.4073, 1e-6);
    }

    #[test]
    fn zero_terminal_snr() {
        let levels = Levels::zero_terminal_snr(Betas::STABLE_DIFFUSION);
        for (step, sigma) in [(499, 1.76808), (998, 2254.24), (999, 4518.76)] {
            close(levels.table()[step], sigma, 3e-5);
        }
    }

    #[test]
    fn steps_and_levels_are_inverse() {
        let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
        for step in [0.0, 0.5, 1.0, 17.25, 500.0, 998.75, 999.0] {
            assert!((levels.step(levels.sigma(step)) - step).abs() < 1e-6);
            let nearest = levels.nearest_step(levels.sigma(step));
            assert!((nearest - step).abs() <= 0.5, "{nearest} for {step}");
        }
        for levels in [&levels, &Levels::flow(3.0, 1000), &Levels::edm(0.002, 80.0)] {
            assert!((levels.position(levels.sigma(321.5)) - 321.5).abs() < 1e-6);
            assert!((levels.position(levels.after(0.25)) / 750.0 - 1.0).abs() < 2e-3);
        }
        assert_eq!(levels.step(1000.0), 999.0);
        assert_eq!(levels.step(1e-9), 0.0);
    }
}
