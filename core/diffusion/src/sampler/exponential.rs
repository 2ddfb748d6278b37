//! Exponential integrators: they solve the linear part of the equation exactly, in half the log signal-to-noise ratio λ.
//!
//! A step has length `h` in λ. The SDEs have η = 1 and use `H = 2 h`.

use super::{Denoiser, Run, math};

/// DPM-Solver++(2M) (Lu et al., 2022). As in k-diffusion, λ is `-ln σ` in every space.
pub(super) fn dpm_pp_2m<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let mut last: Option<(f64, Vec<f32>)> = None;
    for step in run.steps() {
        let denoised = run.denoised(step.sigma)?;
        let ratio = step.next / step.sigma;
        let h = -ratio.ln();
        match &last {
            Some((length, former)) if step.next > 0.0 => {
                let share = h / (2.0 * length);
                let weight = 1.0 - ratio;
                run.update(ratio, &[(weight * (1.0 + share), &denoised), (-weight * share, former)]);
            }
            _ => run.update(ratio, &[(1.0 - ratio, &denoised)]),
        }
        last = Some((h, denoised));
        run.done(step);
    }
    Ok(())
}

/// How the 2M SDE extrapolates.
#[derive(Clone, Copy)]
pub(super) enum Form {
    /// By the midpoint rule.
    Midpoint,
    /// By Heun's rule.
    Heun,
}

/// DPM-Solver++(2M) SDE with η = 1.
pub(super) fn dpm_pp_2m_sde<D: Denoiser>(run: &mut Run<'_, D>, form: Form) -> Result<(), D::Error> {
    let mut last: Option<(f64, Vec<f32>)> = None;
    for step in run.steps_below_one() {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let base = Base::of(run, step.sigma, step.next);
        let mut weights = (base.weight, 0.0);
        if let Some((length, _)) = &last {
            let factor = match form {
                Form::Midpoint => base.weight / 2.0,
                Form::Heun => base.alpha * base.phi_2(),
            };
            weights = (base.weight + factor * base.h / length, -factor * base.h / length);
        }
        let noise = run.noise(step.sigma, step.next);
        let former = last.as_ref().map_or(&*denoised, |(_, former)| former);
        run.update(base.scale, &[(weights.0, &denoised), (weights.1, former), (base.noise, &noise)]);
        last = Some((base.h, denoised));
        run.done(step);
    }
    Ok(())
}

/// DPM-Solver++(3M) SDE with η = 1.
pub(super) fn dpm_pp_3m_sde<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let mut last: Vec<(f64, Vec<f32>)> = Vec::new();
    for step in run.steps_below_one() {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let base = Base::of(run, step.sigma, step.next);
        let noise = run.noise(step.sigma, step.next);
        // Weights of this and the two former estimates in the first and second difference.
        let (first, second) = match &*last {
            [] => ([0.0; 3], [0.0; 3]),
            [(h1, _)] => ([base.h / h1, -base.h / h1, 0.0], [0.0; 3]),
            [(h1, _), (h2, _), ..] => {
                let (r0, r1) = (h1 / base.h, h2 / base.h);
                let near = [1.0 / r0, -1.0 / r0, 0.0];
                let far = [0.0, 1.0 / r1, -1.0 / r1];
                let change = |i: usize| (near[i] - far[i]) / (r0 + r1);
                (std::array::from_fn(|i| near[i] + change(i) * r0), std::array::from_fn(change))
            }
        };
        let (phi_2, phi_3) = (base.phi_2(), base.phi_2() / base.total() - 0.5);
        let weight = |i: usize| base.alpha * (phi_2 * first[i] - phi_3 * second[i]);
        let former = |i: usize| last.get(i).map_or(&*denoised, |(_, state)| state);
        let terms = [
            (base.weight + weight(0), &*denoised),
            (weight(1), former(0)),
            (weight(2), former(1)),
            (base.noise, &*noise),
        ];
        math::update(run.x, base.scale, &terms);
        last.insert(0, (base.h, denoised));
        last.truncate(2);
        run.done(step);
    }
    Ok(())
}

/// The first-order part of an SDE step: the factors of state, estimate and noise.
struct Base {
    h: f64,
    alpha: f64,
    scale: f64,
    weight: f64,
    noise: f64,
}

impl Base {
    fn of<D: Denoiser>(run: &Run<'_, D>, sigma: f64, next: f64) -> Self {
        let space = run.path.space;
        let h = space.lambda(next) - space.lambda(sigma);
        let alpha = space.alpha(next);
        Self {
            h,
            alpha,
            scale: next / sigma * (-h).exp(),
            weight: -alpha * (-2.0 * h).exp_m1(),
            noise: next * (-(-2.0 * h).exp_m1()).sqrt(),
        }
    }

    /// `H`.
    fn total(&self) -> f64 {
        2.0 * self.h
    }

    /// `(e^-H - 1) / H + 1`.
    fn phi_2(&self) -> f64 {
        (-self.total()).exp_m1() / self.total() + 1.0
    }
}

/// DPM-Solver++ SDE with η = 1 and r = 1/2.
pub(super) fn dpm_pp_sde<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.path.space;
    for step in run.steps_below_one() {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let (from, to) = (space.lambda(step.sigma), space.lambda(step.next));
        let half = (from + to) / 2.0;
        let middle = space.sigma(half);
        let alphas = [step.sigma, middle, step.next].map(|sigma| space.alpha(sigma));

        // From the first level to one below `end`, in λ, and back up with noise.
        let stage = |end: f64, alpha: f64| {
            let (down, up) = math::ancestral((-from).exp(), (-end).exp(), 1.0);
            let h = -down.ln() - from;
            (alpha / alphas[0] * (-h).exp(), -alpha * (-h).exp_m1(), alpha * up)
        };
        let (scale, weight, up) = stage(half, alphas[1]);
        let noise = run.noise(step.sigma, middle);
        let inner = math::sum(&[(scale, run.x), (weight, &denoised), (up, &noise)]);
        let denoised = run.denoised_of(&inner, middle)?;

        let (scale, weight, up) = stage(to, alphas[2]);
        let noise = run.noise(step.sigma, step.next);
        run.update(scale, &[(weight, &denoised), (up, &noise)]);
        run.done(step);
    }
    Ok(())
}

/// SEEDS-2 (Gonzalez et al., 2023) with η = 1 and r = 1/2.
pub(super) fn seeds_2<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.path.space;
    for step in run.steps_below_one() {
        let Some(denoised) = run.denoised_unless_last(step)? else { break };
        let (from, to) = (space.lambda(step.sigma), space.lambda(step.next));
        let (h, middle) = (to - from, space.sigma((from + to) / 2.0));
        let spread = (-(-h).exp_m1()).sqrt();
        let first = run.noise(step.sigma, middle);
        let inner = math::sum(&[
            (middle / step.sigma * (-h / 2.0).exp(), run.x),
            (-space.alpha(middle) * (-h).exp_m1(), &denoised),
            (middle * spread, &first),
        ]);
        let denoised = run.denoised_of(&inner, middle)?;

        let second = run.noise(middle, step.next);
        let terms = [
            (-space.alpha(step.next) * (-2.0 * h).exp_m1(), &*denoised),
            (step.next * spread * (-h / 2.0).exp(), &*first),
            (step.next * spread, &*second),
        ];
        run.update(step.next / step.sigma * (-h).exp(), &terms);
        run.done(step);
    }
    Ok(())
}

/// Points of the numerical integrals in [`er_sde`].
const POINTS: i32 = 200;

/// VP ER-SDE-Solver-3 (Cui et al., 2023). Its time variable is `ℓ = σ / α`.
pub(super) fn er_sde<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let space = run.path.space;
    let scaler = |level: f64| level * (level.powf(0.3).exp() + 10.0);
    let ratio = |sigma: f64| sigma / space.alpha(sigma);
    let mut levels: Vec<f64> = Vec::new();
    let mut former: Option<Vec<f32>> = None;
    let mut former_change: Option<Vec<f32>> = None;
    for step in run.steps_below_one() {
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
        let noise = run.noise(step.sigma, step.next);
        run.update(1.0, &[(alpha * spread, &noise)]);
        former = Some(denoised);
        run.done(step);
    }
    Ok(())
}
