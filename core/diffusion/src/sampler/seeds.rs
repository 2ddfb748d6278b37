//! SEEDS (Gonzalez et al., 2023): exponential Runge-Kutta methods in λ for the SDE, in ComfyUI's form. A step has length `h` in λ, and
//! `H = h (1 + η)`.

use super::{Denoiser, Run, math};

/// SEEDS-2 with r = 1/2.
pub(super) fn seeds_2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    seeds(run, &[0.5, 1.0], |stage, h| match stage {
        0 => vec![phi_1(-0.5 * h)],
        _ => vec![0.0, phi_1(-h)],
    })
}

/// SEEDS-3 with r = 1/3 and 2/3.
pub(super) fn seeds_3<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    const R: [f64; 2] = [1.0 / 3.0, 2.0 / 3.0];
    seeds(run, &[R[0], R[1], 1.0], |stage, h| match stage {
        0 => vec![phi_1(-R[0] * h)],
        1 => {
            let second = R[1] / R[0] * phi_2(-R[1] * h);
            vec![phi_1(-R[1] * h) - second, second]
        }
        _ => {
            let third = phi_2(-h) / R[1];
            vec![phi_1(-h) - third, 0.0, third]
        }
    })
}

/// The exponential form of Heun's method (ComfyUI's `exp_heun_2_x0`), and its SDE.
pub(super) fn exp_heun_2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    seeds(run, &[1.0, 1.0], |stage, h| match stage {
        0 => vec![phi_1(-h)],
        _ => vec![phi_1(-h) - phi_2(-h), phi_2(-h)],
    })
}

/// `z φ₁(z)`.
fn phi_1(z: f64) -> f64 {
    z.exp_m1()
}

/// `z φ₂(z)`.
fn phi_2(z: f64) -> f64 {
    (z.exp_m1() - z) / z
}

/// Runs the stages of each step. `nodes` are their ends as shares of the step; the last is 1. `weights(stage, H)` are the factors of
/// the estimates so far. The noise of a stage continues that of the former one.
fn seeds<D: Denoiser>(
    run: &mut Run<'_, D>,
    nodes: &[f64],
    weights: impl Fn(usize, f64) -> Vec<f64>,
) -> Result<(), D::Error> {
    let (space, eta) = (run.space, run.eta);
    for step in run.steps_in(space) {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let (from, to) = (space.lambda(step.sigma), space.lambda(step.next));
        let h = to - from;
        let mut estimates = vec![denoised];
        let mut noise = vec![0.0; run.x.len()];
        let (mut node, mut level) = (0.0, step.sigma);
        for (stage, end) in nodes.iter().enumerate() {
            let next = if *end == 1.0 { step.next } else { space.sigma(from + end * h) };
            if eta > 0.0 {
                let fade = -(end - node) * h * eta;
                let new = run.noise(level, next);
                math::update(&mut noise, fade.exp(), &[((-(2.0 * fade).exp_m1()).sqrt(), &new)]);
            }
            let alpha = space.alpha(next);
            let mut terms: Vec<(f64, &[f32])> = weights(stage, h * (1.0 + eta))
                .into_iter()
                .zip(&estimates)
                .map(|(weight, estimate)| (-alpha * weight, &**estimate))
                .collect();
            terms.push((next / step.sigma * (-end * h * eta).exp(), run.x));
            terms.push((next, &noise));
            let state = math::sum(&terms);
            if stage + 1 == nodes.len() {
                *run.x = state;
            } else {
                estimates.push(run.denoised_of(&state, next)?);
            }
            (node, level) = (*end, next);
        }
        run.done(step);
    }
    Ok(())
}
