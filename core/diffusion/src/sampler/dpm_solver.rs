//! DPM-Solver (Lu et al., 2022, arXiv 2206.00927) of orders 1 to 3 over the slopes, with steps of its own choice, as in
//! k-diffusion. Its time is `t = -ln σ`. Both samplers end at the lowest level above 0.

use super::{Denoiser, Run, Step, math};

/// DPM-Solver-fast: steps of order 3, with lower orders at the end, so that the number of calls is that of steps in the path.
pub(super) fn fast<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    let Some((start, end)) = range(run)? else { return Ok(()) };
    let calls = run.path.sigmas.len() - 1;
    let count = calls / 3 + 1;
    let time = |index: usize| start + (end - start) * index as f64 / count as f64;
    for index in 0..count {
        let order = match (count - index, calls % 3) {
            (1, 0) => 1,
            (2, 0) => 2,
            (1, rest) => rest,
            _ => 3,
        };
        let (from, to) = (time(index), time(index + 1));
        let solver = Solver::of(run, from, to, end);
        let slope = run.slope((-from).exp())?;
        *run.x = match order {
            1 => solver.first(run.x, &slope),
            2 => {
                let inner = solver.inner(run, &slope, 0.5)?;
                solver.second(run.x, &slope, &inner, 0.5)
            }
            _ => {
                let inner = solver.inner(run, &slope, THIRD)?;
                solver.third(run, &slope, &inner)?
            }
        };
        solver.finish(run, index, to);
    }
    Ok(())
}

/// DPM-Solver-23: compares the methods of order 2 and 3 to choose the length of each step. The tolerances are those of k-diffusion.
pub(super) fn adaptive<D: Denoiser>(run: &mut Run<'_, D>) -> Result<(), D::Error> {
    const ABSOLUTE: f64 = 0.0078;
    const RELATIVE: f64 = 0.05;
    const FIRST_STEP: f64 = 0.05;
    const ACCEPTED: f64 = 0.81;
    let Some((mut time, end)) = range(run)? else { return Ok(()) };
    let power = if run.eta > 0.0 { 1.0 / 1.5 } else { 1.0 / 3.0 };
    let (mut length, mut index) = (FIRST_STEP, 0);
    let mut former = run.x.clone();
    while time < end - 1e-5 {
        let to = end.min(time + length);
        let solver = Solver::of(run, time, to, end);
        let slope = run.slope((-time).exp())?;
        let inner = solver.inner(run, &slope, THIRD)?;
        let low = solver.second(run.x, &slope, &inner, THIRD);
        let high = solver.third(run, &slope, &inner)?;
        let squares = low.iter().zip(&high).zip(&former).map(|((low, high), former)| {
            let size = f64::from(low.abs().max(former.abs()));
            (f64::from(low - high) / ABSOLUTE.max(RELATIVE * size)).powi(2)
        });
        let error = (squares.sum::<f64>() / low.len() as f64).sqrt();
        let factor = 1.0 + ((1.0 / (error + 1e-8)).powf(power) - 1.0).atan();
        // A state with NaN would repeat this step for ever. It is the result, so that the caller sees it.
        let broken = !error.is_finite();
        if broken || factor >= ACCEPTED {
            former = low;
            *run.x = high;
            solver.finish(run, index, to);
            (time, index) = (to, index + 1);
        }
        if broken {
            break;
        }
        length *= factor;
    }
    Ok(())
}

/// The node of the inner slope in a step of order 3.
const THIRD: f64 = 1.0 / 3.0;

/// The times to start and end at. A path with only one level above 0 has none: its estimate is the result.
fn range<D: Denoiser>(run: &mut Run<'_, D>) -> Result<Option<(f64, f64)>, D::Error> {
    let first = run.path.sigmas[0];
    let lowest = run.path.sigmas.iter().rev().find(|sigma| **sigma > 0.0).copied().unwrap_or(first);
    if lowest < first {
        return Ok(Some((-first.ln(), -lowest.ln())));
    }
    *run.x = run.denoised(first)?;
    run.done(Step { index: 0, sigma: first, next: 0.0 });
    Ok(None)
}

/// A step: its start, its length in time, and the noise at its end.
struct Solver {
    time: f64,
    h: f64,
    noise: f64,
}

impl Solver {
    fn of<D: Denoiser>(run: &Run<'_, D>, time: f64, to: f64, end: f64) -> Self {
        let next = (-to).exp();
        let down = math::ancestral((-time).exp(), next, run.eta).0;
        let down = if run.eta > 0.0 { end.min(-down.ln()) } else { to };
        let noise = (next * next - (-2.0 * down).exp()).max(0.0).sqrt();
        Self { time, h: down - time, noise: if run.eta > 0.0 { noise } else { 0.0 } }
    }

    /// The level after a share of the step.
    fn level(&self, share: f64) -> f64 {
        (-self.time - share * self.h).exp()
    }

    /// `e^(r h) - 1` times the level after the share `r`.
    fn growth(&self, share: f64) -> f64 {
        self.level(share) * (share * self.h).exp_m1()
    }

    /// The method of order 1.
    fn first(&self, x: &[f32], slope: &[f32]) -> Vec<f32> {
        math::sum(&[(1.0, x), (-self.growth(1.0), slope)])
    }

    /// The slope after the share `r`.
    fn inner<D: Denoiser>(&self, run: &mut Run<'_, D>, slope: &[f32], r: f64) -> Result<Vec<f32>, D::Error> {
        let state = math::sum(&[(1.0, run.x), (-self.growth(r), slope)]);
        run.slope_of(&state, self.level(r))
    }

    /// The method of order 2.
    fn second(&self, x: &[f32], slope: &[f32], inner: &[f32], r: f64) -> Vec<f32> {
        let (whole, part) = (-self.growth(1.0), -self.growth(1.0) / (2.0 * r));
        math::sum(&[(1.0, x), (whole - part, slope), (part, inner)])
    }

    /// The method of order 3, with the inner slope after a third of the step.
    fn third<D: Denoiser>(
        &self,
        run: &mut Run<'_, D>,
        slope: &[f32],
        inner: &[f32],
    ) -> Result<Vec<f32>, D::Error> {
        const R: f64 = 2.0 / 3.0;
        let extra = |share: f64| self.level(share) * ((share * self.h).exp_m1() / (share * self.h) - 1.0);
        let part = -extra(R) * R / THIRD;
        let state = math::sum(&[(1.0, run.x), (-self.growth(R) - part, slope), (part, inner)]);
        let outer = run.slope_of(&state, self.level(R))?;
        let part = -extra(1.0) / R;
        Ok(math::sum(&[(1.0, run.x), (-self.growth(1.0) - part, slope), (part, &outer)]))
    }

    /// Adds the noise and reports the step.
    fn finish<D: Denoiser>(&self, run: &mut Run<'_, D>, index: usize, to: f64) {
        let step = Step { index, sigma: (-self.time).exp(), next: (-to).exp() };
        run.add_noise(self.noise, step.sigma, step.next);
        run.done(step);
    }
}

impl<D: Denoiser> Run<'_, D> {
    /// The slope at `x`.
    fn slope(&mut self, sigma: f64) -> Result<Vec<f32>, D::Error> {
        let denoised = self.denoised(sigma)?;
        Ok(math::slope(self.x, &denoised, sigma))
    }
}
