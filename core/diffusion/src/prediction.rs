//! What networks predict, and how a prediction becomes an estimate of the clean picture.

use crate::{sampler::Space, schedule::Levels};
use serde::{Deserialize, Serialize};

/// What a network was trained to predict.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prediction {
    /// The noise ("eps"): most of Stable Diffusion 1 and XL.
    Noise,
    /// The velocity ("v"): Stable Diffusion 2 at 768, some of XL.
    Velocity,
    /// The preconditioned target of Karras et al. (2022): Playground 2.5.
    Edm {
        /// Standard deviation of the data; 0.5 for Playground 2.5.
        data: f64,
    },
    /// Noise minus picture: flow models.
    Flow,
}

/// How a noise level becomes the network's timestep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Time {
    /// The training step with its fraction (A1111, k-diffusion).
    Fraction,
    /// The nearest training step (ComfyUI).
    Nearest,
    /// The training step without its fraction (diffusers' solvers of flow models).
    Whole,
}

impl Prediction {
    /// The factor that gives a network's input unit variance.
    pub fn input_scale(self, sigma: f64) -> f64 {
        match self {
            Self::Noise | Self::Velocity => 1.0 / sigma.hypot(1.0),
            Self::Edm { data } => 1.0 / sigma.hypot(data),
            Self::Flow => 1.0,
        }
    }

    /// The factors `(a, b)` with which `a * state + b * output` is the clean state.
    pub fn denoised(self, sigma: f64) -> (f64, f64) {
        match self {
            Self::Noise | Self::Flow => (1.0, -sigma),
            Self::Velocity => {
                let variance = sigma * sigma + 1.0;
                (1.0 / variance, -sigma / variance.sqrt())
            }
            Self::Edm { data } => {
                let variance = sigma * sigma + data * data;
                (data * data / variance, sigma * data / variance.sqrt())
            }
        }
    }

    /// The network's timestep at level `sigma`.
    pub fn time(self, sigma: f64, levels: &Levels, time: Time) -> f64 {
        match (self, time) {
            (Self::Edm { .. }, _) => sigma.ln() / 4.0,
            (_, Time::Fraction) => levels.step(sigma),
            (_, Time::Nearest) => levels.nearest_step(sigma),
            (_, Time::Whole) => levels.step(sigma).floor(),
        }
    }
}

/// The factors `(a, b)` with which `a * state + b * denoised` meets the boundary condition of a latent consistency model: at step
/// 0 the estimate is the state itself (Luo et al., 2023, section 3; diffusers' `LCMScheduler` with its timestep scale of 10).
///
/// From step 19 on, the lowest of an LCM, `a` is below 1e-5. ComfyUI leaves the condition out.
pub fn consistent(sigma: f64, step: f64) -> (f64, f64) {
    const DATA: f64 = 0.5;
    let scaled = 10.0 * step;
    let total = scaled * scaled + DATA * DATA;
    // The condition applies to a state of variance 1.
    (DATA * DATA / total / sigma.hypot(1.0), scaled / total.sqrt())
}

/// Adds noise of the first level to a clean state, which is 0 for a new picture.
///
/// Set `full` when `sigma` is the model's highest level to scale the noise of Stable Diffusion by `√(1 + σ²)` instead of σ, as
/// ComfyUI does. diffusers and A1111 do not. A flow model's noise is then not scaled.
pub fn noised(space: Space, sigma: f64, full: bool, start: &[f32], noise: &[f32]) -> Vec<f32> {
    let scale = match space {
        Space::Additive if full => sigma.hypot(1.0),
        Space::Flow if full => 1.0,
        _ => sigma,
    };
    let keep = match space {
        Space::Additive => 1.0,
        Space::Flow => 1.0 - sigma,
    };
    let mix = |(start, noise): (&f32, &f32)| (keep * f64::from(*start) + scale * f64::from(*noise)) as f32;
    start.iter().zip(noise).map(mix).collect()
}

#[cfg(test)]
mod tests {
    use super::{Prediction, noised};
    use crate::sampler::Space;

    /// A perfect prediction of each kind gives the clean state back.
    #[test]
    fn a_perfect_network_gives_the_clean_state() {
        let (clean, noise) = (0.7, -1.3);
        for sigma in [0.05f64, 0.4, 0.9] {
            for prediction in
                [Prediction::Noise, Prediction::Velocity, Prediction::Edm { data: 0.5 }, Prediction::Flow]
            {
                let x = match prediction {
                    Prediction::Flow => (1.0 - sigma) * clean + sigma * noise,
                    _ => clean + sigma * noise,
                };
                let output = match prediction {
                    Prediction::Noise => noise,
                    Prediction::Flow => noise - clean,
                    // With α² + s² = 1: v = α n - s x0 (Salimans and Ho, 2022).
                    Prediction::Velocity => (noise - sigma * clean) / sigma.hypot(1.0),
                    // (x0 - c_skip x) / c_out (Karras et al., 2022, equation 7).
                    Prediction::Edm { data } => {
                        let variance: f64 = sigma * sigma + data * data;
                        (clean - data * data / variance * x) / (sigma * data / variance.sqrt())
                    }
                };
                let (skip, out) = prediction.denoised(sigma);
                assert!((skip * x + out * output - clean).abs() < 1e-12, "{prediction:?}");
            }
        }
    }

    #[test]
    fn states_have_variance_one_before_the_network() {
        for (prediction, data) in [(Prediction::Velocity, 1.0), (Prediction::Edm { data: 0.5 }, 0.5)] {
            for sigma in [0.1f64, 3.0, 80.0] {
                assert!((prediction.input_scale(sigma) * sigma.hypot(data) - 1.0).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn a_picture_begins_with_noise_alone_or_with_a_picture() {
        let (start, noise) = ([1.0, -2.0], [0.5, 0.25]);
        assert_eq!(noised(Space::Additive, 2.0, false, &start, &noise), [2.0, -1.5]);
        assert_eq!(noised(Space::Flow, 1.0, true, &start, &noise), noise);
        assert_eq!(noised(Space::Flow, 0.75, true, &[0.0, 0.0], &noise), noise);
        assert_eq!(noised(Space::Flow, 0.75, false, &start, &noise), [0.625, -0.3125]);
        let full = noised(Space::Additive, 14.6, true, &[0.0], &[1.0]);
        assert!((f64::from(full[0]) - (1.0 + 14.6f64 * 14.6).sqrt()).abs() < 1e-6);
    }
}
