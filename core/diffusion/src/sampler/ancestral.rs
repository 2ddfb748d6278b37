//! Methods of one step that may step below the next level and add noise to return to it.

use super::{Denoiser, Run, Space, Step, math};

/// Euler's method and its ancestral form.
///
/// The ancestral step equals that of DDIM with the same η: with `ᾱ = 1 / (1 + σ²)`, DDIM's noise
/// `η √((1 - ᾱ') / (1 - ᾱ)) √(1 - ᾱ / ᾱ')` divided by `√ᾱ'` is `η (σ' / σ) √(σ² - σ'²)`. With η = 1 it is that of DDPM.
pub(super) fn euler<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let step = run.churn(step);
        let denoised = run.denoised(step.sigma)?;
        let down = run.down(step);
        run.step_to(down, step, &denoised);
        run.renew(down, step.next);
        run.done(step);
    }
    Ok(())
}

/// Euler's method with CFG++ (Chung et al., 2024), in ComfyUI's form: the clean picture comes from guidance, the noise to keep
/// from the negative prompt.
pub(super) fn cfg_pp<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let (denoised, negative) = run.denoiser.denoise_both(run.x, step.sigma)?;
        if step.next == 0.0 {
            *run.x = denoised;
        } else {
            let (from, to) = (run.space.alpha(step.sigma), run.space.alpha(step.next));
            let (down, up) = math::ancestral(step.sigma / from, step.next / to, run.eta);
            let keep = to * down / step.sigma;
            let state = math::sum(&[(keep, run.x), (to, &denoised), (-keep * from, &negative)]);
            *run.x = state;
            run.add_noise(to * up, step.sigma, step.next);
        }
        run.done(step);
    }
    Ok(())
}

/// DPM-Solver-2 (Lu et al., 2022) with the midpoint at the geometric mean of the levels, and its ancestral form.
pub(super) fn dpm2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        let step = run.churn(step);
        let denoised = run.denoised(step.sigma)?;
        let down = run.down(step);
        if down == 0.0 {
            run.step_to(down, step, &denoised);
        } else {
            let slope = math::slope(run.x, &denoised, step.sigma);
            let middle = (step.sigma * down).sqrt();
            let half = math::sum(&[(1.0, run.x), (middle - step.sigma, &slope)]);
            let slope = run.slope_of(&half, middle)?;
            run.update(1.0, &[(down - step.sigma, &slope)]);
        }
        run.renew(down, step.next);
        run.done(step);
    }
    Ok(())
}

/// DPM-Solver++(2S) (Lu et al., 2022), also with CFG++ (ComfyUI's `dpmpp_2s_ancestral_cfg_pp`).
pub(super) fn dpm_pp_2s<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.space;
    for step in run.steps() {
        let (mut denoised, difference) = run.estimates(step.sigma)?;
        let down = run.down(step);
        if down != 0.0 {
            // The signal-to-noise ratio is 0 at the first level of a flow model.
            let middle = match space {
                Space::Flow if step.sigma >= 1.0 => 0.9999,
                _ => space.sigma((space.lambda(step.sigma) + space.lambda(down)) / 2.0),
            };
            let ratio = middle / step.sigma;
            let half = math::sum(&[(ratio, run.x), (1.0 - ratio, &denoised)]);
            denoised = if run.cfg_pp {
                run.denoiser.denoise_both(&half, middle)?.1
            } else {
                run.denoised_of(&half, middle)?
            };
        }
        run.step_to(down, step, &denoised);
        run.renew(down, step.next);
        run.guide(space.alpha(step.next), &difference);
        run.done(step);
    }
    Ok(())
}

/// The sampler of latent consistency models (Luo et al., 2023): the estimate with new noise.
///
/// This is also SCM, the sampler of Sana Sprint. Its state `cos t x0 + sin t n` (divided by the deviation of the data) is that of a
/// flow model times `cos t + sin t`.
pub(super) fn lcm<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    for step in run.steps() {
        if let Some(denoised) = run.denoised_unless_last(step)? {
            *run.x = denoised;
            let noise = run.noise(step.sigma, step.next);
            run.update(run.space.alpha(step.next), &[(step.next, &noise)]);
            run.done(step);
        }
    }
    Ok(())
}

/// Strategic stochastic sampling (Zheng et al., 2024, algorithm 4): steps down to the training step `⌊(1 - γ) t⌋`, where `t` is the
/// next level's. The last step adds no noise.
pub(super) fn tcd<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let last = run.path.sigmas.len().saturating_sub(2);
    for step in run.steps() {
        if let Some(denoised) = run.denoised_unless_last(step)? {
            let levels = run.path.levels;
            let next = levels.position(step.next).round();
            let down = match run.eta {
                0.0 => step.next,
                gamma => levels.sigma(((1.0 - gamma) * next).floor()).min(step.next),
            };
            run.step_to(down, step, &denoised);
            if step.index < last {
                run.renew(down, step.next);
            }
            run.done(step);
        }
    }
    Ok(())
}

impl<D: Denoiser> Run<'_, D> {
    /// The level to step down to. It is the next one without new noise.
    fn down(&self, step: Step) -> f64 {
        match self.space {
            Space::Additive => math::ancestral(step.sigma, step.next, self.eta).0,
            Space::Flow => step.next * (1.0 + (step.next / step.sigma - 1.0) * self.eta),
        }
    }

    /// Moves `x` to a level by Euler's method.
    fn step_to(&mut self, level: f64, step: Step, denoised: &[f32]) {
        let ratio = level / step.sigma;
        self.update(ratio, &[(1.0 - ratio, denoised)]);
    }

    /// Adds the noise that leads from one level up to another.
    pub(super) fn renew(&mut self, from: f64, to: f64) {
        if from >= to {
            return;
        }
        let scale = self.space.alpha(to) / self.space.alpha(from);
        let up = (to * to - (from * scale).powi(2)).max(0.0).sqrt();
        let noise = self.noise(from, to);
        self.update(scale, &[(up, &noise)]);
    }
}
