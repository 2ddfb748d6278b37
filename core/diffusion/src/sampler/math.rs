//! Arithmetic shared by the samplers.

use super::Space;

/// Replaces `x` by `scale * x` plus weighted states. Computes in f64 and rounds once.
pub(super) fn update(x: &mut [f32], scale: f64, terms: &[(f64, &[f32])]) {
    for (index, value) in x.iter_mut().enumerate() {
        let sum = terms.iter().map(|(factor, state)| factor * f64::from(state[index])).sum::<f64>();
        *value = (scale * f64::from(*value) + sum) as f32;
    }
}

/// Returns the sum of weighted states. Needs at least one term.
pub(super) fn sum(terms: &[(f64, &[f32])]) -> Vec<f32> {
    let mut out = vec![0.0; terms[0].1.len()];
    update(&mut out, 0.0, terms);
    out
}

/// The slope `dx/dσ` at a state: `(x - denoised) / sigma`.
pub(super) fn slope(x: &[f32], denoised: &[f32], sigma: f64) -> Vec<f32> {
    sum(&[(1.0 / sigma, x), (-1.0 / sigma, denoised)])
}

/// Returns the level to step down to and the standard deviation of the noise that leads back up to `to` (Karras et al., 2022).
pub(super) fn ancestral(from: f64, to: f64, eta: f64) -> (f64, f64) {
    if eta == 0.0 {
        return (to, 0.0);
    }
    let up = to.min(eta * (to * to * (from * from - to * to) / (from * from)).sqrt());
    ((to * to - up * up).sqrt(), up)
}

/// An ancestral step of a flow model.
pub(super) struct FlowStep {
    /// The level to step down to.
    pub(super) down: f64,
    /// Factor of the state at that level.
    pub(super) scale: f64,
    /// Standard deviation of the noise.
    pub(super) up: f64,
}

/// The flow form of [`ancestral`] with η = 1.
pub(super) fn ancestral_flow(sigma: f64, next: f64) -> FlowStep {
    let down = next * next / sigma;
    let scale = (1.0 - next) / (1.0 - down);
    let up = (next * next - down * down * scale * scale).max(0.0).sqrt();
    FlowStep { down, scale, up }
}

impl Space {
    /// Half the log signal-to-noise ratio at a level.
    pub(super) fn lambda(self, sigma: f64) -> f64 {
        match self {
            Self::Additive => -sigma.ln(),
            Self::Flow { .. } => ((1.0 - sigma) / sigma).ln(),
        }
    }

    /// The level with this half log signal-to-noise ratio.
    pub(super) fn sigma(self, lambda: f64) -> f64 {
        match self {
            Self::Additive => (-lambda).exp(),
            Self::Flow { .. } => 1.0 / (1.0 + lambda.exp()),
        }
    }

    /// Factor of the clean picture at a level.
    pub(super) fn alpha(self, sigma: f64) -> f64 {
        match self {
            Self::Additive => 1.0,
            Self::Flow { .. } => 1.0 - sigma,
        }
    }
}
