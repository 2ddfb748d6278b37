//! Ancestral samplers: they step below the next level and add noise to return to it.

use super::{Denoiser, Run, Space, Step, math};

/// Euler's method.
pub(super) fn euler<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let renewal = Renewal::of(run.path.space, step);
        let ratio = renewal.down / step.sigma;
        run.update(ratio, &[(1.0 - ratio, &denoised)]);
        renewal.apply(run, step);
        run.done(step);
    }
    Ok(())
}

/// DPM-Solver-2.
pub(super) fn dpm2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let slope = math::slope(run.x, &denoised, step.sigma);
        let renewal = Renewal::of(run.path.space, step);
        let length = renewal.down - step.sigma;
        if renewal.down == 0.0 {
            run.update(1.0, &[(length, &slope)]);
        } else {
            let middle = (step.sigma * renewal.down).sqrt();
            let half = math::sum(&[(1.0, run.x), (middle - step.sigma, &slope)]);
            let denoised = run.denoised_of(&half, middle)?;
            let slope = math::slope(&half, &denoised, middle);
            run.update(1.0, &[(length, &slope)]);
        }
        renewal.apply(run, step);
        run.done(step);
    }
    Ok(())
}

/// DPM-Solver++(2S) (Lu et al., 2022).
pub(super) fn dpm_pp_2s<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.path.space;
    for step in run.steps() {
        let mut denoised = run.denoised(step.sigma)?;
        let renewal = Renewal::of(space, step);
        if renewal.down != 0.0 {
            // The signal-to-noise ratio is 0 at the first level of a flow model.
            let middle = match space {
                Space::Flow { .. } if step.sigma == 1.0 => 0.9999,
                _ => space.sigma((space.lambda(step.sigma) + space.lambda(renewal.down)) / 2.0),
            };
            let ratio = middle / step.sigma;
            let half = math::sum(&[(ratio, run.x), (1.0 - ratio, &denoised)]);
            denoised = run.denoised_of(&half, middle)?;
        }
        let ratio = renewal.down / step.sigma;
        run.update(ratio, &[(1.0 - ratio, &denoised)]);
        renewal.apply(run, step);
        run.done(step);
    }
    Ok(())
}

/// The sampler of latent consistency models (Luo et al., 2023), in ComfyUI's form.
pub(super) fn lcm<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        *run.x = run.denoised(step.sigma)?;
        if step.next > 0.0 {
            let noise = run.noise(step.sigma, step.next);
            run.update(run.path.space.alpha(step.next), &[(step.next, &noise)]);
        }
        run.done(step);
    }
    Ok(())
}

/// The level to step down to, and the noise that leads back up.
struct Renewal {
    down: f64,
    scale: f64,
    up: f64,
}

impl Renewal {
    fn of(space: Space, step: Step) -> Self {
        match space {
            Space::Additive => {
                let (down, up) = math::ancestral(step.sigma, step.next, 1.0);
                Self { down, scale: 1.0, up }
            }
            Space::Flow { .. } => {
                let math::FlowStep { down, scale, up } = math::ancestral_flow(step.sigma, step.next);
                Self { down, scale, up }
            }
        }
    }

    fn apply<D: Denoiser>(&self, run: &mut Run<'_, D>, step: Step) {
        if step.next > 0.0 {
            let noise = run.noise(step.sigma, step.next);
            run.update(self.scale, &[(self.up, &noise)]);
        }
    }
}
