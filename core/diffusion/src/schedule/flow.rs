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

/// Levels of diffusers' Sana pipeline (`use_flow_sigmas`): uniform between 1 and the lowest training step, without both ends, then
/// shifted.
pub fn sana(steps: usize, shift: f64) -> Vec<f64> {
    let share = |i: usize| (1.0 - 1.0 / 1000.0) * (1.0 - i as f64 / steps as f64);
    (0..steps).map(|i| shifted(shift, share(i))).chain([0.0]).collect()
}

/// The shift of Flux.2 (diffusers' `compute_empirical_mu`): the logarithm is linear in the tokens, and below 4,300 tokens also in the
/// number of steps.
pub fn flux2_shift(tokens: usize, steps: usize) -> f64 {
    let tokens = tokens as f64;
    let at_200 = 0.00016927 * tokens + 0.45666666;
    if tokens > 4300.0 {
        return at_200.exp();
    }
    let at_10 = 8.73809524e-5 * tokens + 1.89833333;
    let slope = (at_200 - at_10) / 190.0;
    (at_200 + slope * (steps as f64 - 200.0)).exp()
}

/// Stretches levels without the final 0 so that the last becomes `terminal` (diffusers' `shift_terminal`: 0.02 in Qwen-Image).
pub fn stretched(levels: &[f64], terminal: f64) -> Vec<f64> {
    let factor = levels.last().map_or(1.0, |last| (1.0 - terminal) / (1.0 - last));
    levels.iter().map(|level| 1.0 - (1.0 - level) * factor).collect()
}

/// Levels of Ideogram 4 (stable-diffusion.cpp's `LogitNormalScheduler`), without the final 0: quantiles of a logit-normal
/// distribution with deviation 1.75, whose mean grows with the logarithm of the tokens above 1,024. 0 tokens set the mean to 0.
pub(super) fn logit_normal(steps: usize, tokens: usize) -> Vec<f64> {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let mean = if tokens > 0 { 0.5 * (tokens as f64 / 1024.0).ln() } else { 0.0 };
    let (lowest, highest) = (sigmoid(-7.5), sigmoid(9.0));
    let level = |i: usize| match i {
        0 => highest,
        _ => sigmoid(mean - 1.75 * normal_quantile(i as f64 / steps as f64)).clamp(lowest, highest),
    };
    (0..steps).map(level).collect()
}

/// The quantile of the normal distribution, by bisection of its integral.
fn normal_quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..60 {
        let middle: f64 = 0.5 * (low + high);
        if normal(middle) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// The normal distribution function `½ + φ(x) (x + x³/3 + x⁵/(3·5) + …)`.
fn normal(x: f64) -> f64 {
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + sum * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt()
}

/// Levels of SCM, without the final 0 (diffusers' `SCMScheduler`). Time `t` has the state `cos t x0 + sin t n`, which is
/// `cos t + sin t` times that of a flow model.
pub(super) fn scm(steps: usize) -> Vec<f64> {
    // diffusers rounds it to 1.57080, slightly too large.
    const FIRST: f64 = std::f64::consts::FRAC_PI_2;
    const SECOND: f64 = 1.3;
    let times = match steps {
        2 => vec![FIRST, SECOND],
        _ => super::ramp(FIRST, 0.0, steps + 1).take(steps).collect(),
    };
    times.into_iter().map(|time| time.sin() / (time.sin() + time.cos())).collect()
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
