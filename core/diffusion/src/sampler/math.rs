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

/// Returns the level to step down to and the standard deviation of the noise that leads back up to `to` (k-diffusion's
/// `get_ancestral_step`). `from` may be infinite.
pub(super) fn ancestral(from: f64, to: f64, eta: f64) -> (f64, f64) {
    if eta == 0.0 {
        return (to, 0.0);
    }
    let up = to.min(eta * to * (1.0 - (to / from).powi(2)).max(0.0).sqrt());
    ((to * to - up * up).sqrt(), up)
}

/// The polynomial that is 1 at `nodes[j]` and 0 at the other nodes.
pub(super) fn lagrange(nodes: &[f64], j: usize, at: f64) -> f64 {
    let others = nodes.iter().enumerate().filter(|(k, _)| *k != j);
    others.map(|(_, node)| (at - node) / (nodes[j] - node)).product()
}

/// Integrates a smooth function: 3-point Gauss quadrature on 32 pieces, exact for polynomials up to degree 5.
pub(super) fn integral(from: f64, to: f64, value: impl Fn(f64) -> f64) -> f64 {
    const PIECES: u32 = 32;
    let half = (to - from) / f64::from(2 * PIECES);
    let offset = half * 0.6f64.sqrt();
    let piece = |index: u32| {
        let middle = from + half * f64::from(2 * index + 1);
        5.0 * (value(middle - offset) + value(middle + offset)) + 8.0 * value(middle)
    };
    half / 9.0 * (0..PIECES).map(piece).sum::<f64>()
}

impl Space {
    /// Half the log signal-to-noise ratio at a level.
    pub(super) fn lambda(self, sigma: f64) -> f64 {
        match self {
            Self::Additive => -sigma.ln(),
            Self::Flow => ((1.0 - sigma) / sigma).ln(),
        }
    }

    /// The level with this half log signal-to-noise ratio.
    pub(super) fn sigma(self, lambda: f64) -> f64 {
        match self {
            Self::Additive => (-lambda).exp(),
            Self::Flow => 1.0 / (1.0 + lambda.exp()),
        }
    }

    /// Factor of the clean picture at a level.
    pub(super) fn alpha(self, sigma: f64) -> f64 {
        match self {
            Self::Additive => 1.0,
            Self::Flow => 1.0 - sigma,
        }
    }
}
