//! UniPC: a unified predictor-corrector (Zhao et al., 2023).

use super::{Denoiser, Run, Space};
use crate::program::Program;

/// The function `B(h)`.
#[derive(Clone, Copy)]
pub(super) enum Variant {
    /// `h`.
    Bh1,
    /// `e^h - 1`.
    Bh2,
}

/// An estimate and the λ of its level.
type Known = (f64, Vec<f32>);

/// UniPC for the clean picture, with the corrector in every step but the last. Its order falls to the number of steps left.
pub(super) fn unipc<D: Denoiser>(run: &mut Run<'_, D>, variant: Variant) -> Result<(), D::Error> {
    let space = run.equation();
    let usual = if run.options.program == Program::Diffusers { 2 } else { 3 };
    let most = run.options.order.unwrap_or(usual).clamp(1, 3);
    let steps = run.steps_in(space);
    let mut known: Vec<Known> = Vec::new();
    let mut start = run.x.clone();
    let mut order = 0;
    for (left, step) in (1..=steps.len()).rev().zip(&steps) {
        let Some(denoised) = run.denoised_unless_last(*step)? else { break };
        let lambda = space.lambda(step.sigma);
        known.insert(0, (lambda, denoised));
        if let Some(former) = step.index.checked_sub(1).and_then(|index| steps.get(index)) {
            let advance = Advance { space, variant, sigma: former.sigma, next: step.sigma };
            *run.x = advance.from(&start, &known[1], known[2..].iter().take(order - 1).chain(&known[..1]));
        }
        order = most.min(left).min(known.len());
        start.clone_from(run.x);
        let advance = Advance { space, variant, sigma: step.sigma, next: step.next };
        *run.x = advance.from(&start, &known[0], known[1..].iter().take(order - 1));
        known.truncate(most);
        run.done(*step);
    }
    Ok(())
}

/// A step between two levels.
struct Advance {
    space: Space,
    variant: Variant,
    sigma: f64,
    next: f64,
}

impl Advance {
    /// Returns the state at the next level. `base` is the estimate at the first level, `others` those at other levels (Zhao et al.,
    /// 2023, equations 3 and 8, for the clean picture).
    fn from<'a>(&self, start: &[f32], base: &Known, others: impl Iterator<Item = &'a Known>) -> Vec<f32> {
        let h = self.space.lambda(self.next) - self.space.lambda(self.sigma);
        let phi_1 = (-h).exp_m1();
        let b = match self.variant {
            Variant::Bh1 => -h,
            Variant::Bh2 => phi_1,
        };
        let others: Vec<&Known> = others.collect();
        let ratios: Vec<f64> = others.iter().map(|(lambda, _)| (lambda - base.0) / h).collect();
        let alpha = self.space.alpha(self.next);
        let (mut terms, mut weight) = (Vec::new(), -alpha * phi_1);
        for ((share, ratio), (_, estimate)) in shares(&ratios, -h, b).into_iter().zip(&ratios).zip(others) {
            let factor = -alpha * b * share / ratio;
            weight -= factor;
            terms.push((factor, &**estimate));
        }
        terms.push((weight, &*base.1));
        terms.push((self.next / self.sigma, start));
        super::math::sum(&terms)
    }
}

/// The weights `ρ` of the differences: `Σ ρ_i r_i^(k-1) = b_k`. A single one is ½, which suits both functions `B`.
fn shares(ratios: &[f64], h: f64, b: f64) -> Vec<f64> {
    if let [_] = ratios {
        return vec![0.5];
    }
    let (mut phi, mut factorial) = (h.exp_m1() / h - 1.0, 1.0);
    let rows = (0..ratios.len()).map(|power| {
        let mut row: Vec<f64> = ratios.iter().map(|ratio| ratio.powi(power as i32)).collect();
        row.push(phi * factorial / b);
        factorial *= (power + 2) as f64;
        phi = phi / h - 1.0 / factorial;
        row
    });
    solve(rows.collect())
}

/// Solves a small linear system whose rows end with the right-hand side. The ratios differ, so that the pivots are not 0.
fn solve(mut rows: Vec<Vec<f64>>) -> Vec<f64> {
    let size = rows.len();
    for pivot in 0..size {
        let row = rows[pivot].clone();
        for (_, other) in rows.iter_mut().enumerate().filter(|(index, _)| *index != pivot) {
            let factor = other[pivot] / row[pivot];
            other.iter_mut().zip(&row).for_each(|(value, by)| *value -= factor * by);
        }
    }
    rows.iter().enumerate().map(|(index, row)| row[size] / row[index]).collect()
}
