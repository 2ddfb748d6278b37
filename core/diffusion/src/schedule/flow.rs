//! Noise levels of flow models: SD 3, Flux, Chroma, Sana.

/// Shifts a noise level `t` in 0 to 1: `s t / (1 + (s - 1) t)`. Larger pictures need more noise to lose their content, so models
/// use a shift above 1 (Esser et al., 2024, equation 23).
pub fn shifted(shift: f64, t: f64) -> f64 {
    shift * t / (1.0 + (shift - 1.0) * t)
}

/// The shift of Flux dev for a picture of `tokens` 16x16 patches: `exp(μ)`, with μ linear from 0.5 at 256 tokens to 1.15 at 4,096
/// (diffusers, `calculate_shift`).
pub fn flux_shift(tokens: usize) -> f64 {
    let slope = (1.15 - 0.5) / (4096.0 - 256.0);
    (tokens as f64 * slope + 0.5 - slope * 256.0).exp()
}

/// Levels of diffusers' Flux pipeline: `steps` of them from 1 to `1 / steps`, shifted, and 0. Schnell has `shift` 1.
pub fn flux(steps: usize, shift: f64) -> Vec<f64> {
    let last = 1.0 / steps as f64;
    let share = |i: usize| if steps == 1 { 1.0 } else { 1.0 + i as f64 / (steps - 1) as f64 * (last - 1.0) };
    (0..steps).map(|i| shifted(shift, share(i))).chain([0.0]).collect()
}

/// Levels of diffusers' SD 3 pipeline. It shifts twice: levels run from 1 to the already shifted lowest level, and are shifted
/// again.
pub fn stable_diffusion_3(steps: usize, shift: f64) -> Vec<f64> {
    let lowest = shifted(shift, 1.0 / 1000.0);
    let share =
        |i: usize| if steps == 1 { 1.0 } else { 1.0 + i as f64 / (steps - 1) as f64 * (lowest - 1.0) };
    (0..steps).map(|i| shifted(shift, share(i))).chain([0.0]).collect()
}

#[cfg(test)]
mod tests {
    use super::{flux, flux_shift, stable_diffusion_3};

    fn close(actual: &[f64], expected: &[f64]) {
        assert_eq!(actual.len(), expected.len());
        assert!(actual.iter().zip(expected).all(|(a, e)| (a - e).abs() <= 6e-5), "{actual:?}");
    }

    /// Levels of diffusers' pipelines: ten steps at 1024x1024, and four of schnell.
    #[test]
    fn levels_are_those_of_diffusers() {
        let expected = [1.0, 0.9660, 0.9266, 0.8805, 0.8257, 0.7595, 0.6780, 0.5751, 0.4412, 0.2598, 0.0];
        close(&flux(10, flux_shift(4096)), &expected);
        close(&flux(4, 1.0), &[1.0, 0.75, 0.5, 0.25, 0.0]);
        let expected = [1.0, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0.0];
        close(&stable_diffusion_3(10, 3.0), &expected);
    }

    #[test]
    fn shift_of_flux_follows_the_size() {
        for (side, mu) in [(512, 0.63), (768, 0.84667), (1024, 1.15), (1536, 2.01667)] {
            let tokens = (side / 16) * (side / 16);
            assert!((flux_shift(tokens).ln() - mu).abs() < 6e-6);
        }
    }
}
