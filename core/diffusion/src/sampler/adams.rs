//! Multistep methods over the slopes `dx/dσ` of earlier steps.

use super::{Denoiser, Run, Step, math};
use crate::program::Program;

/// Linear multistep of order 4 (k-diffusion's `sample_lms`): integrates the polynomial through the last slopes.
pub(super) fn lms<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    // Only ComfyUI takes the estimate as the result of the last step.
    let estimate_last = run.options.program == Program::ComfyUi;
    adams(run, 4, estimate_last, |_| usize::MAX, |sigma| sigma)
}

/// DEIS (Zhang and Chen, 2022): the slope is a polynomial in another variable than σ. That is the time of a VP-SDE in ComfyUI ("tab")
/// and `ln σ` in diffusers. ComfyUI sums 10,000 points where this computes the integral.
pub(super) fn deis<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    match run.options.program {
        Program::Diffusers => {
            let limits: Vec<usize> =
                (0..run.path.sigmas.len() - 1).map(|index| run.order_limit(index)).collect();
            adams(run, 2, true, |index| limits[index], f64::ln)
        }
        _ => adams(run, 3, true, |_| usize::MAX, vp_time),
    }
}

/// The time of the VP-SDE that runs from level 0.002 at time 0.001 to level 80 at time 1 (Karras et al., 2022, table 1).
fn vp_time(sigma: f64) -> f64 {
    const EARLIEST: f64 = 1e-3;
    let log = |sigma: f64| (sigma * sigma + 1.0).ln();
    let slope = 2.0 * (log(0.002) / EARLIEST - log(80.0)) / (EARLIEST - 1.0);
    let start = log(80.0) - 0.5 * slope;
    ((start * start + 2.0 * slope * log(sigma)).sqrt() - start) / slope
}

/// Integrates the polynomial in `clock(σ)` through the last slopes. `limit` is the highest order of a step.
fn adams<D: Denoiser>(
    run: &mut Run<'_, D>,
    most: usize,
    estimate_last: bool,
    limit: impl Fn(usize) -> usize,
    clock: impl Fn(f64) -> f64,
) -> Result<(), D::Error> {
    let sigmas = run.path.sigmas;
    let most = run.options.order.unwrap_or(most);
    multistep(run, most, estimate_last, |step, order| {
        let order = order.min(limit(step.index));
        let times: Vec<f64> = (0..order).map(|j| clock(sigmas[step.index - j])).collect();
        let weight = |j| math::integral(step.sigma, step.next, |at| math::lagrange(&times, j, clock(at)));
        (0..order).map(weight).collect()
    })
}

/// Adams-Bashforth weights for equal steps.
fn equal_steps(order: usize) -> &'static [f64] {
    match order {
        1 => &[1.0],
        2 => &[3.0 / 2.0, -1.0 / 2.0],
        3 => &[23.0 / 12.0, -16.0 / 12.0, 5.0 / 12.0],
        _ => &[55.0 / 24.0, -59.0 / 24.0, 37.0 / 24.0, -9.0 / 24.0],
    }
}

fn equal_weights(step: Step, order: usize) -> Vec<f64> {
    equal_steps(order).iter().map(|weight| weight * (step.next - step.sigma)).collect()
}

/// Improved PNDM (Zhang and Chen, 2022): Adams-Bashforth with coefficients for equal steps.
pub(super) fn ipndm<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let most = run.options.order.unwrap_or(4);
    multistep(run, most, true, equal_weights)
}

/// Pseudo linear multistep (Liu et al., 2022, equation 12): the same after a first step by Heun's method. This is A1111's "PLMS" and
/// diffusers' `PNDMScheduler` with `skip_prk_steps`.
pub(super) fn plms<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let mut slopes: Vec<Vec<f32>> = Vec::new();
    for step in run.steps() {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        slopes.insert(0, math::slope(run.x, &denoised, step.sigma));
        slopes.truncate(4);
        if slopes.len() == 1 {
            let length = step.next - step.sigma;
            let end = math::sum(&[(1.0, run.x), (length, &slopes[0])]);
            let second = run.slope_of(&end, step.next)?;
            run.update(1.0, &[(length / 2.0, &slopes[0]), (length / 2.0, &second)]);
        } else {
            run.add_slopes(equal_weights(step, slopes.len()), &slopes);
        }
        run.done(step);
    }
    Ok(())
}

/// The coefficients of diff-solvers' `ipndm_v` for steps of different lengths. They differ a little from the exact integrals of
/// [`lms`].
pub(super) fn ipndm_v<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let sigmas = run.path.sigmas;
    let most = run.options.order.unwrap_or(4);
    multistep(run, most, true, |step, order| {
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

/// Adds slopes of the last steps, each times its weight. The weights depend on the step and the order, which is at most 4. With
/// `estimate_last`, the step to level 0 is Euler's method.
fn multistep<D: Denoiser>(
    run: &mut Run<'_, D>,
    most: usize,
    estimate_last: bool,
    weights: impl Fn(Step, usize) -> Vec<f64>,
) -> Result<(), D::Error> {
    let most = most.clamp(1, 4);
    let mut slopes: Vec<Vec<f32>> = Vec::new();
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        slopes.insert(0, math::slope(run.x, &denoised, step.sigma));
        slopes.truncate(most);
        if step.next == 0.0 && estimate_last {
            *run.x = denoised;
        } else {
            run.add_slopes(weights(step, slopes.len()), &slopes);
        }
        run.done(step);
    }
    Ok(())
}

impl<D: Denoiser> Run<'_, D> {
    fn add_slopes(&mut self, weights: Vec<f64>, slopes: &[Vec<f32>]) {
        let terms: Vec<(f64, &[f32])> = weights.into_iter().zip(slopes.iter().map(|s| &**s)).collect();
        self.update(1.0, &terms);
    }
}

#[cfg(test)]
mod tests {
    use super::vp_time;

    /// The levels that define it.
    #[test]
    fn time_of_the_vp_sde() {
        assert!((vp_time(0.002) - 1e-3).abs() < 1e-9 && (vp_time(80.0) - 1.0).abs() < 1e-12);
        assert!(vp_time(0.002) < vp_time(1.0) && vp_time(1.0) < vp_time(80.0));
    }
}
