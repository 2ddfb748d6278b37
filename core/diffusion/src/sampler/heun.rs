//! Heun's method and what builds on it.

use super::{Denoiser, Run, Step, math};
use crate::schedule::karras;

/// Algorithm 2 of Karras et al. (2022).
pub(super) fn heun<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let step = run.churn(step);
        heun_step(run, step)?;
        run.done(step);
    }
    Ok(())
}

fn heun_step<D: Denoiser>(run: &mut Run<'_, D>, step: Step) -> Result<(), D::Error> {
    let denoised = run.denoised(step.sigma)?;
    let slope = math::slope(run.x, &denoised, step.sigma);
    let length = step.next - step.sigma;
    if step.next == 0.0 {
        run.update(1.0, &[(length, &slope)]);
    } else {
        let end = math::sum(&[(1.0, run.x), (length, &slope)]);
        let second = run.slope_of(&end, step.next)?;
        run.update(1.0, &[(length / 2.0, &slope), (length / 2.0, &second)]);
    }
    Ok(())
}

/// Heun++ (sd-webui-samplers-scheduler), which weights up to three slopes by their levels.
pub(super) fn heun_pp2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let highest = run.path.sigmas[0];
    for step in run.steps() {
        let step = run.churn(step);
        let denoised = run.denoised(step.sigma)?;
        let slope = math::slope(run.x, &denoised, step.sigma);
        let length = step.next - step.sigma;
        if step.next == 0.0 {
            run.update(1.0, &[(length, &slope)]);
            run.done(step);
            continue;
        }
        let end = math::sum(&[(1.0, run.x), (length, &slope)]);
        let second = run.slope_of(&end, step.next)?;
        let beyond = run.path.sigmas.get(step.index + 2).copied().unwrap_or(0.0);
        if beyond == 0.0 {
            let weight = step.next / (2.0 * highest);
            run.update(1.0, &[(length * (1.0 - weight), &slope), (length * weight, &second)]);
        } else {
            let end = math::sum(&[(1.0, &end), (beyond - step.next, &second)]);
            let third = run.slope_of(&end, beyond)?;
            let weights = [step.next, beyond].map(|level| level / (3.0 * highest));
            let first = 1.0 - weights[0] - weights[1];
            let terms =
                [(length * first, &*slope), (length * weights[0], &*second), (length * weights[1], &*third)];
            run.update(1.0, &terms);
        }
        run.done(step);
    }
    Ok(())
}

/// Restart sampling (Xu et al., 2023) with A1111's choice of segments (`sd_samplers_extra.py`).
pub(super) fn restart<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let mut reached = f64::INFINITY;
    for (index, (sigma, next)) in restart_steps(run.path.sigmas).into_iter().enumerate() {
        run.renew(reached, sigma);
        let step = Step { index, sigma, next };
        heun_step(run, step)?;
        run.done(step);
        reached = next;
    }
    Ok(())
}

/// The pairs of levels of the steps. From 20 steps on, some of them return from about level 0.1 to about 2.
fn restart_steps(sigmas: &[f64]) -> Vec<(f64, f64)> {
    let steps = sigmas.len().saturating_sub(1);
    let (length, times) = match steps {
        0..20 => (0, 0),
        20..36 => (9, 1),
        _ => (steps / 4, 2),
    };
    if times == 0 {
        return pairs(sigmas);
    }
    let mut levels = karras(sigmas[steps - 1], sigmas[0], steps - length * times);
    levels.push(0.0);
    let nearest = |to: f64| {
        let distance = |index: &usize| (levels[*index] - to).abs();
        (0..levels.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0)
    };
    let (low, high) = (nearest(0.1), nearest(2.0));
    let mut out = pairs(&levels[..=low]);
    if low > 0 && high < low {
        let again = pairs(&karras(levels[low], levels[high], length + 1));
        (0..times).for_each(|_| out.extend(&again));
    }
    out.extend(pairs(&levels[low..]));
    out
}

fn pairs(levels: &[f64]) -> Vec<(f64, f64)> {
    levels.windows(2).map(|pair| (pair[0], pair[1])).collect()
}
