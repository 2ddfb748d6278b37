//! Solvers of stochastic equations with rules of their own.

use super::{Denoiser, Run, math};

/// DPM-Solver++ SDE (k-diffusion's `sample_dpmpp_sde`) with r = 1/2.
pub(super) fn dpm_pp_sde<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.space;
    for step in run.steps_in(space) {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let (from, to) = (space.lambda(step.sigma), space.lambda(step.next));
        let half = (from + to) / 2.0;
        let middle = space.sigma(half);
        let alphas = [step.sigma, middle, step.next].map(|sigma| space.alpha(sigma));

        // From the first level to one below `end`, in λ, and back up with noise.
        let eta = run.eta;
        let stage = |end: f64, alpha: f64| {
            let (down, up) = math::ancestral((-from).exp(), (-end).exp(), eta);
            let h = -down.ln() - from;
            (alpha / alphas[0] * (-h).exp(), -alpha * (-h).exp_m1(), alpha * up)
        };
        let (scale, weight, up) = stage(half, alphas[1]);
        let mut inner = math::sum(&[(scale, run.x), (weight, &denoised)]);
        if up > 0.0 {
            let noise = run.noise(step.sigma, middle);
            math::update(&mut inner, 1.0, &[(up, &noise)]);
        }
        let denoised = run.denoised_of(&inner, middle)?;

        let (scale, weight, up) = stage(to, alphas[2]);
        run.update(scale, &[(weight, &denoised)]);
        run.add_noise(up, step.sigma, step.next);
        run.done(step);
    }
    Ok(())
}

/// Points of the numerical integrals in [`er_sde`].
const POINTS: i32 = 200;

/// VP ER-SDE-Solver-3 (Cui et al., 2023). Its time variable is `ℓ = σ / α`.
pub(super) fn er_sde<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.space;
    let scaler = |level: f64| level * (level.powf(0.3).exp() + 10.0);
    let ratio = |sigma: f64| sigma / space.alpha(sigma);
    let mut levels: Vec<f64> = Vec::new();
    let mut former: Option<Vec<f32>> = None;
    let mut former_change: Option<Vec<f32>> = None;
    for step in run.steps_in(space) {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let (from, to) = (ratio(step.sigma), ratio(step.next));
        let (alpha, r) = (space.alpha(step.next), scaler(to) / scaler(from));
        run.update(alpha / space.alpha(step.sigma) * r, &[(alpha * (1.0 - r), &denoised)]);
        levels.push(from);
        if let Some(former) = &former {
            let length = to - from;
            let width = -length / f64::from(POINTS);
            let integral = |value: &dyn Fn(f64) -> f64| {
                (0..POINTS).map(|k| value(to + f64::from(k) * width)).sum::<f64>() * width
            };
            let gap = from - levels[levels.len() - 2];
            let change = math::sum(&[(1.0 / gap, &denoised), (-1.0 / gap, former)]);
            let first = length + scaler(to) * integral(&|level| 1.0 / scaler(level));
            run.update(1.0, &[(alpha * first, &change)]);
            if let Some(former_change) = &former_change {
                let gap = (from - levels[levels.len() - 3]) / 2.0;
                let second =
                    length * length / 2.0 + scaler(to) * integral(&|level| (level - from) / scaler(level));
                let factor = alpha * second / gap;
                run.update(1.0, &[(factor, &change), (-factor, former_change)]);
            }
            former_change = Some(change);
        }
        let spread = (to * to - from * from * r * r).max(0.0).sqrt();
        run.add_noise(alpha * spread, step.sigma, step.next);
        former = Some(denoised);
        run.done(step);
    }
    Ok(())
}
