//! Exponential multistep methods: they solve the linear part of the equation exactly, in half the log signal-to-noise ratio λ, and
//! extrapolate the clean picture from earlier steps.

use super::{Denoiser, Run, Space, math};

/// How DPM-Solver++(2M) extrapolates.
#[derive(Clone, Copy)]
pub(super) enum Form {
    /// By the midpoint rule.
    Midpoint,
    /// By Heun's rule.
    Heun,
}

/// The first-order part of a step of length `h` in λ: the factors of state, estimate and noise. With η it solves an SDE
/// (Lu et al., 2022, DPM-Solver++, section 4.3; k-diffusion's `sample_dpmpp_2m_sde`).
pub(super) struct Base {
    pub(super) h: f64,
    /// `h (1 + η)`.
    pub(super) total: f64,
    pub(super) alpha: f64,
    pub(super) scale: f64,
    pub(super) weight: f64,
    pub(super) noise: f64,
}

impl Base {
    pub(super) fn of(space: Space, eta: f64, sigma: f64, next: f64) -> Self {
        let h = space.lambda(next) - space.lambda(sigma);
        let (alpha, total) = (space.alpha(next), h * (1.0 + eta));
        Self {
            h,
            total,
            alpha,
            // With η = 0 the product would not be a number where h is infinite.
            scale: next / sigma * if eta > 0.0 { (-h * eta).exp() } else { 1.0 },
            weight: -alpha * (-total).exp_m1(),
            noise: if eta > 0.0 { next * (-(-2.0 * h * eta).exp_m1()).sqrt() } else { 0.0 },
        }
    }

    /// `(e^-H - 1) / H + 1`.
    fn phi_2(&self) -> f64 {
        (-self.total).exp_m1() / self.total + 1.0
    }
}

/// DPM-Solver++(2M) (Lu et al., 2022) and its SDE, also with CFG++ (ComfyUI's `dpmpp_2m_cfg_pp`).
pub(super) fn dpm_pp_2m<D: Denoiser>(run: &mut Run<'_, D>, space: Space, form: Form) -> Result<(), D::Error> {
    let mut last: Option<(f64, Vec<f32>)> = None;
    for step in run.steps_in(space) {
        let (denoised, difference) = run.estimates(step.sigma)?;
        if step.next == 0.0 {
            *run.x = denoised;
            run.guide(1.0, &difference);
            run.done(step);
            break;
        }
        let base = Base::of(space, run.eta, step.sigma, step.next);
        let mut second = 0.0;
        if let Some((length, _)) = &last
            && run.order_limit(step.index) > 1
        {
            let factor = match form {
                Form::Midpoint => base.weight / 2.0,
                Form::Heun => base.alpha * base.phi_2(),
            };
            second = factor * base.h / length;
        }
        let former = last.as_ref().map_or(&*denoised, |(_, former)| former);
        run.update(base.scale, &[(base.weight + second, &denoised), (-second, former)]);
        run.guide(1.0 + second, &difference);
        run.add_noise(base.noise, step.sigma, step.next);
        last = Some((base.h, denoised));
        run.done(step);
    }
    Ok(())
}

/// DPM-Solver++(3M) and its SDE (k-diffusion's `sample_dpmpp_3m_sde`).
pub(super) fn dpm_pp_3m<D: Denoiser>(run: &mut Run<'_, D>, space: Space) -> Result<(), D::Error> {
    let mut last: Vec<(f64, Vec<f32>)> = Vec::new();
    for step in run.steps_in(space) {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let base = Base::of(space, run.eta, step.sigma, step.next);
        let order = run.order_limit(step.index).min(last.len() + 1);
        // Weights of this and the two former estimates in the first and second difference.
        let (first, second) = match (order, &*last) {
            (2, [(h1, _), ..]) => ([base.h / h1, -base.h / h1, 0.0], [0.0; 3]),
            (3, [(h1, _), (h2, _), ..]) => {
                let (r0, r1) = (h1 / base.h, h2 / base.h);
                let near = [1.0 / r0, -1.0 / r0, 0.0];
                let far = [0.0, 1.0 / r1, -1.0 / r1];
                let change = |i: usize| (near[i] - far[i]) / (r0 + r1);
                (std::array::from_fn(|i| near[i] + change(i) * r0), std::array::from_fn(change))
            }
            _ => ([0.0; 3], [0.0; 3]),
        };
        // diffusers uses the midpoint rule for a step of order 2 without noise.
        let midpoint = order == 2 && run.options.program == crate::program::Program::Diffusers;
        let phi_2 = if midpoint { base.weight / base.alpha / 2.0 } else { base.phi_2() };
        let phi_3 = phi_2 / base.total - 0.5;
        let weight = |i: usize| base.alpha * (phi_2 * first[i] - phi_3 * second[i]);
        let former = |i: usize| last.get(i).map_or(&*denoised, |(_, state)| state);
        let terms = [(base.weight + weight(0), &*denoised), (weight(1), former(0)), (weight(2), former(1))];
        math::update(run.x, base.scale, &terms);
        run.add_noise(base.noise, step.sigma, step.next);
        last.insert(0, (base.h, denoised));
        last.truncate(2);
        run.done(step);
    }
    Ok(())
}

/// DPM-Solver++(2S) over pairs of steps: the second step starts again where the first one did and takes the level between as its
/// midpoint (diffusers' `DPMSolverSinglestepScheduler`). The last step is of order 1.
pub(super) fn singlestep<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.equation();
    let mut first: Option<(f64, Vec<f32>, Vec<f32>)> = None;
    for step in run.steps_in(space) {
        let state = run.x.clone();
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        match first.take() {
            Some((start, state, former)) if step.index + 2 < run.path.sigmas.len() => {
                let base = Base::of(space, 0.0, start, step.next);
                let share = 0.5 * base.h / (space.lambda(step.sigma) - space.lambda(start));
                *run.x = state;
                let weights = (base.weight * share, base.weight * (1.0 - share));
                run.update(base.scale, &[(weights.0, &denoised), (weights.1, &former)]);
            }
            _ => {
                let base = Base::of(space, 0.0, step.sigma, step.next);
                run.update(base.scale, &[(base.weight, &denoised)]);
                first = Some((step.sigma, state, denoised));
            }
        }
        run.done(step);
    }
    Ok(())
}

/// The second-order exponential multistep method of Zhang et al. (2023, arXiv 2308.02157), in `-ln σ` (ComfyUI's `res_multistep`), also
/// with CFG++.
pub(super) fn res<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let mut last: Option<(f64, Vec<f32>)> = None;
    for step in run.steps() {
        let (denoised, difference) = run.estimates(step.sigma)?;
        let (down, up) = math::ancestral(step.sigma, step.next, run.eta);
        match &last {
            Some((former_down, former)) if down > 0.0 => {
                let h = (step.sigma / down).ln();
                // Without noise the former step ended at this level.
                let c2 = (former_down / run.path.sigmas[step.index - 1]).ln() / h;
                let phi_1 = (-h).exp_m1() / -h;
                let phi_2 = (phi_1 - 1.0) / -h;
                let second = h * phi_2 / c2;
                run.guide(1.0, &difference);
                run.update((-h).exp(), &[(h * phi_1 - second, &denoised), (second, former)]);
            }
            _ => {
                let ratio = down / step.sigma;
                run.update(ratio, &[(1.0 - ratio, &denoised)]);
                run.guide(1.0, &difference);
            }
        }
        run.add_noise(up, step.sigma, step.next);
        last = Some((down, denoised));
        run.done(step);
    }
    Ok(())
}

/// Gradient estimation (Permenter and Yuan, 2024) with γ = 2, also with CFG++.
pub(super) fn gradient_estimation<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let mut last: Option<Vec<f32>> = None;
    for step in run.steps() {
        let (denoised, difference) = run.estimates(step.sigma)?;
        let slope = math::slope(run.x, &denoised, step.sigma);
        let length = step.next - step.sigma;
        match &last {
            _ if step.next == 0.0 => *run.x = denoised,
            Some(former) => run.update(1.0, &[(2.0 * length, &slope), (-length, former)]),
            None => run.update(1.0, &[(length, &slope)]),
        }
        run.guide(1.0, &difference);
        last = Some(slope);
        run.done(step);
    }
    Ok(())
}

impl<D: Denoiser> Run<'_, D> {
    /// Adds noise of a standard deviation, which may be 0.
    pub(super) fn add_noise(&mut self, deviation: f64, from: f64, to: f64) {
        if deviation > 0.0 {
            let noise = self.noise(from, to);
            self.update(1.0, &[(deviation, &noise)]);
        }
    }
}
