//! Schedules with a formula of their own. All of them leave out the final 0.

use super::ramp;
use std::f64::consts::PI;

/// Half of the steps fall linearly to 97.5 % of the highest level; the others fall quadratically (ComfyUI's
/// `linear_quadratic_schedule`, from Mochi).
pub(super) fn linear_quadratic(max: f64, steps: usize) -> Vec<f64> {
    const THRESHOLD: f64 = 0.025;
    if steps == 1 {
        return vec![max];
    }
    let linear = (steps / 2) as f64;
    let rest = steps as f64 - linear;
    let difference = linear - THRESHOLD * steps as f64;
    let square = difference / (linear * rest * rest);
    let slope = THRESHOLD / linear - 2.0 * difference / (rest * rest);
    (0..steps)
        .map(|i| i as f64)
        .map(|i| {
            if i < linear {
                i * THRESHOLD / linear
            } else {
                square * i * i + slope * i + square * linear * linear
            }
        })
        .map(|done| (1.0 - done) * max)
        .collect()
}

/// Quantiles of a Laplace distribution of `ln σ` with mean 0 and scale 0.5, within the model's levels (ComfyUI's
/// `get_sigmas_laplace`; Hang et al., 2024). ComfyUI ends at the last of these levels instead of 0.
pub(super) fn laplace(min: f64, max: f64, steps: usize) -> Vec<f64> {
    // Keeps the logarithm finite at both ends.
    const SMALL: f64 = 1e-5;
    let sigma = |share: f64| {
        let distance = 0.5 - share;
        let sign = if distance == 0.0 { 0.0 } else { distance.signum() };
        (-0.5 * sign * (1.0 - 2.0 * distance.abs() + SMALL).ln()).exp().clamp(min, max)
    };
    ramp(0.0, 1.0, steps).map(sigma).collect()
}

/// Two arctangents, from the highest level to the middle at 60 % of the steps, and from there to the lowest.
pub(super) fn bong_tangent(min: f64, max: f64, steps: usize) -> Vec<f64> {
    let total = steps + 2;
    let first = total * 3 / 5;
    let slope = 0.2 / (total as f64 / 40.0);
    let middle = (min + max) / 2.0;
    let mut out = tangent(first, slope, first as f64, (max, middle));
    out.pop();
    out.extend(tangent(total - first, slope, 0.0, (middle, min)));
    out.truncate(steps);
    out
}

/// An arctangent with its steepest point at step `pivot`, stretched to run from one level to another.
fn tangent(steps: usize, slope: f64, pivot: f64, (from, to): (f64, f64)) -> Vec<f64> {
    let value = |step: f64| ((-slope * (step - pivot)).atan() * 2.0 / PI + 1.0) / 2.0;
    let (high, low) = (value(0.0), value(steps.saturating_sub(1) as f64));
    let share = |step: usize| if high == low { 1.0 } else { (value(step as f64) - low) / (high - low) };
    (0..steps).map(|step| to + share(step) * (from - to)).collect()
}
