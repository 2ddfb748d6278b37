//! Samplers that use the slopes of earlier steps.

use super::{Denoiser, Run, Step, math};

/// Linear multistep of order 4: integrates the polynomial through the last slopes (k-diffusion's `sample_lms`).
pub(super) fn lms<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let sigmas = run.path.sigmas;
    multistep(run, |step, order| {
        let levels: Vec<f64> = (0..order).map(|j| sigmas[step.index - j]).collect();
        (0..order).map(|j| integral(&levels, j, step.sigma, step.next)).collect()
    })
}

/// Integrates the polynomial that is 1 at level `j` and 0 at the others. Three-point Gauss quadrature is exact for it.
fn integral(levels: &[f64], j: usize, from: f64, to: f64) -> f64 {
    let basis = |at: f64| -> f64 {
        let others = levels.iter().enumerate().filter(|(k, _)| *k != j);
        others.map(|(_, level)| (at - level) / (levels[j] - level)).product()
    };
    let (middle, half, place) = ((from + to) / 2.0, (to - from) / 2.0, 0.6f64.sqrt());
    half * (5.0 * (basis(middle - half * place) + basis(middle + half * place)) + 8.0 * basis(middle)) / 9.0
}

/// Adams-Bashforth coefficients for equal steps.
pub(super) fn ipndm<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    multistep(run, |step, order| {
        let weights: &[f64] = match order {
            1 => &[1.0],
            2 => &[3.0 / 2.0, -1.0 / 2.0],
            3 => &[23.0 / 12.0, -16.0 / 12.0, 5.0 / 12.0],
            _ => &[55.0 / 24.0, -59.0 / 24.0, 37.0 / 24.0, -9.0 / 24.0],
        };
        weights.iter().map(|weight| weight * (step.next - step.sigma)).collect()
    })
}

/// The coefficients of diff-solvers' `ipndm_v` for steps of different lengths. They differ a little from the exact integrals of
/// [`lms`].
pub(super) fn ipndm_v<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let sigmas = run.path.sigmas;
    multistep(run, |step, order| {
        let h: Vec<f64> = (0..order).map(|j| sigmas[step.index + 1 - j] - sigmas[step.index - j]).collect();
        let mut weights = vec![0.0; order];
        weights[0] = 1.0;
        if order > 1 {
            let ratio = h[0] / h[1];
            weights[0] += ratio / 2.0;
            weights[1] -= ratio / 2.0;
        }
        if order > 2 {
            let (ratio, near, far) = (h[1] / h[2], h[0] + h[1], h[1] + h[2]);
            let third = (1.0 - h[0] / (3.0 * near) * (h[0] * near) / (h[1] * far)) / 2.0;
            weights[0] += third;
            weights[1] -= (1.0 + ratio) * third;
            weights[2] += ratio * third;
            if order > 3 {
                let all = near + h[2];
                let fourth = ((1.0 - h[0] / (3.0 * near)) / 2.0
                    + (1.0 - h[0] / (2.0 * near)) * h[0] / (6.0 * all))
                    * (h[0] * near * all)
                    / (h[1] * far * (far + h[3]));
                let outer = h[1] * far / (h[2] * (h[2] + h[3]));
                weights[0] += fourth;
                weights[1] -= (1.0 + ratio + outer) * fourth;
                weights[2] += (ratio + outer * (1.0 + h[2] / h[3])) * fourth;
                weights[3] -= outer * ratio * fourth;
            }
        }
        weights.into_iter().map(|weight| weight * h[0]).collect()
    })
}

/// Adds up to four slopes, each times its weight. The step to level 0 is Euler's method.
fn multistep<D: Denoiser>(
    run: &mut Run<'_, D>,
    weights: impl Fn(Step, usize) -> Vec<f64>,
) -> Result<(), D::Error> {
    let mut slopes: Vec<Vec<f32>> = Vec::new();
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        slopes.insert(0, math::slope(run.x, &denoised, step.sigma));
        slopes.truncate(4);
        if step.next == 0.0 {
            *run.x = denoised;
        } else {
            let weights = weights(step, slopes.len());
            let terms: Vec<(f64, &[f32])> = weights.into_iter().zip(slopes.iter().map(|s| &**s)).collect();
            run.update(1.0, &terms);
        }
        run.done(step);
    }
    Ok(())
}

/// Gradient estimation (Permenter and Yuan, 2024) with γ = 2.
pub(super) fn gradient_estimation<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let mut last: Option<Vec<f32>> = None;
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let slope = math::slope(run.x, &denoised, step.sigma);
        let length = step.next - step.sigma;
        match &last {
            _ if step.next == 0.0 => *run.x = denoised,
            Some(former) => run.update(1.0, &[(2.0 * length, &slope), (-length, former)]),
            None => run.update(1.0, &[(length, &slope)]),
        }
        last = Some(slope);
        run.done(step);
    }
    Ok(())
}

/// The second-order exponential multistep method of Zhang et al. (2023, arXiv 2308.02157), in `-ln σ`.
pub(super) fn res_multistep<D: Denoiser>(run: &mut Run<'_, D>, eta: f64) -> Result<(), D::Error> {
    let mut last: Option<(f64, Vec<f32>)> = None;
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let (down, up) = math::ancestral(step.sigma, step.next, eta);
        match &last {
            Some((former_down, former)) if down > 0.0 => {
                let h = (step.sigma / down).ln();
                // Without noise the former step ended at this level.
                let c2 = (former_down / run.path.sigmas[step.index - 1]).ln() / h;
                let phi_1 = (-h).exp_m1() / -h;
                let phi_2 = (phi_1 - 1.0) / -h;
                let second = h * phi_2 / c2;
                run.update((-h).exp(), &[(h * phi_1 - second, &denoised), (second, former)]);
            }
            _ => {
                let ratio = down / step.sigma;
                run.update(ratio, &[(1.0 - ratio, &denoised)]);
            }
        }
        if step.next > 0.0 && eta > 0.0 {
            let noise = run.noise(step.sigma, step.next);
            run.update(1.0, &[(up, &noise)]);
        }
        last = Some((down, denoised));
        run.done(step);
    }
    Ok(())
}
