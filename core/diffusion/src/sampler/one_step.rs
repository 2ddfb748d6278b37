//! Deterministic samplers without memory of earlier steps.

use super::{Denoiser, Run, math};

/// Euler's method: algorithm 2 of Karras et al. (2022) without correction or churn.
pub(super) fn euler<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let ratio = step.next / step.sigma;
        run.update(ratio, &[(1.0 - ratio, &denoised)]);
        run.done(step);
    }
    Ok(())
}

/// Algorithm 2 of Karras et al. (2022) without churn.
pub(super) fn heun<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let slope = math::slope(run.x, &denoised, step.sigma);
        let length = step.next - step.sigma;
        if step.next == 0.0 {
            run.update(1.0, &[(length, &slope)]);
        } else {
            let end = math::sum(&[(1.0, run.x), (length, &slope)]);
            let denoised = run.denoised_of(&end, step.next)?;
            let second = math::slope(&end, &denoised, step.next);
            run.update(1.0, &[(length / 2.0, &slope), (length / 2.0, &second)]);
        }
        run.done(step);
    }
    Ok(())
}

/// Heun++ (sd-webui-samplers-scheduler): weights the slopes at the next one or two levels by those levels.
pub(super) fn heun_pp2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let highest = run.path.sigmas[0];
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let slope = math::slope(run.x, &denoised, step.sigma);
        let length = step.next - step.sigma;
        if step.next == 0.0 {
            run.update(1.0, &[(length, &slope)]);
            run.done(step);
            continue;
        }
        let end = math::sum(&[(1.0, run.x), (length, &slope)]);
        let denoised = run.denoised_of(&end, step.next)?;
        let second = math::slope(&end, &denoised, step.next);
        let beyond = run.path.sigmas.get(step.index + 2).copied().unwrap_or(0.0);
        if beyond == 0.0 {
            let weight = step.next / (2.0 * highest);
            run.update(1.0, &[(length * (1.0 - weight), &slope), (length * weight, &second)]);
        } else {
            let end = math::sum(&[(1.0, &end), (beyond - step.next, &second)]);
            let denoised = run.denoised_of(&end, beyond)?;
            let third = math::slope(&end, &denoised, beyond);
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

/// DPM-Solver-2 (Lu et al., 2022) with the midpoint at the geometric mean of the levels.
pub(super) fn dpm2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let slope = math::slope(run.x, &denoised, step.sigma);
        if step.next == 0.0 {
            run.update(1.0, &[(step.next - step.sigma, &slope)]);
        } else {
            let middle = (step.sigma * step.next).sqrt();
            let half = math::sum(&[(1.0, run.x), (middle - step.sigma, &slope)]);
            let denoised = run.denoised_of(&half, middle)?;
            let slope = math::slope(&half, &denoised, middle);
            run.update(1.0, &[(step.next - step.sigma, &slope)]);
        }
        run.done(step);
    }
    Ok(())
}
