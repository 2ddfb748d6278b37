//! SA-Solver: stochastic Adams methods with a predictor and a corrector (Xue et al., 2023).

use super::{Denoiser, Run, Space, Step, math};
use crate::program::Program;

/// SA-Solver for the clean picture. With `twice`, each corrected state is estimated again (ComfyUI's `sa_solver_pece`).
pub(super) fn sa_solver<D: Denoiser>(run: &mut Run<'_, D>, twice: bool) -> Result<(), D::Error> {
    let space = run.space;
    let orders = Orders::of(run);
    let steps = run.steps_in(space);
    let lambdas: Vec<f64> = steps.iter().map(|step| space.lambda(step.sigma)).collect();
    let mut known: Vec<Vec<f32>> = Vec::new();
    let (mut start, mut noise, mut tau) = (run.x.clone(), None, 0.0);
    for step in &steps {
        let left = steps.len() - step.index;
        let mut denoised = run.denoised(step.sigma)?;
        if step.next == 0.0 && !twice {
            *run.x = denoised;
            run.done(*step);
            break;
        }
        known.insert(0, denoised);
        // Times of this and the former steps.
        let times: Vec<f64> = lambdas[..=step.index].iter().rev().copied().collect();
        if step.index > 0 {
            let former = steps[step.index - 1];
            let order = orders.corrector.min(known.len()).min(left + 2 * orders.spare);
            let adams = Adams { space, tau, sigma: former.sigma, next: step.sigma };
            let weights = match order {
                2 if orders.simple => adams.simple(0.5).into_iter().rev().collect(),
                _ => adams.integrals(&times[..order]),
            };
            *run.x = adams.from(&start, &weights, &known, noise.as_deref());
            if twice {
                denoised = run.denoised(step.sigma)?;
                known[0] = denoised;
            }
        }
        if step.next == 0.0 {
            *run.x = known.swap_remove(0);
            run.done(*step);
            break;
        }
        tau = orders.tau(run, *step);
        let order = orders.predictor.min(known.len()).min(left - 1 + orders.spare);
        let adams = Adams { space, tau, sigma: step.sigma, next: step.next };
        let weights = match order {
            2 if orders.simple => adams.simple(0.5 * adams.h() / (times[1] - times[0])),
            _ => adams.integrals(&times[..order]),
        };
        noise = (tau > 0.0 || orders.simple).then(|| run.noise(step.sigma, step.next));
        start.clone_from(run.x);
        *run.x = adams.from(&start, &weights, &known, noise.as_deref());
        known.truncate(orders.predictor.max(orders.corrector - 1));
        run.done(*step);
    }
    Ok(())
}

/// What differs between programs.
struct Orders {
    predictor: usize,
    corrector: usize,
    /// Whether methods of order 2 use the simpler weights of the paper's appendix D. diffusers does.
    simple: bool,
    /// How far the order of the last steps may exceed the number of steps left.
    spare: usize,
    /// The highest and lowest level at which to add noise.
    noisy: (f64, f64),
}

impl Orders {
    fn of<D: Denoiser>(run: &Run<'_, D>) -> Self {
        let levels = run.path.levels;
        let most = |usual: usize| run.options.order.unwrap_or(usual).clamp(1, 4);
        match run.options.program {
            Program::Diffusers => Self {
                predictor: most(2),
                corrector: most(2),
                simple: true,
                spare: 1,
                noisy: (levels.sigma(800.0), levels.sigma(200.0)),
            },
            _ => Self {
                predictor: most(3),
                corrector: most(4),
                simple: false,
                // Only runs to level 0 end with lower orders.
                spare: if run.path.sigmas.last() == Some(&0.0) { 0 } else { 4 },
                noisy: (levels.after(0.2), levels.after(0.8)),
            },
        }
    }

    /// The share of noise in a step.
    fn tau<D: Denoiser>(&self, run: &Run<'_, D>, step: Step) -> f64 {
        let level = if self.simple { step.sigma } else { step.next };
        if self.noisy.0 >= level && level >= self.noisy.1 { run.eta } else { 0.0 }
    }
}

/// A step between two levels.
struct Adams {
    space: Space,
    tau: f64,
    sigma: f64,
    next: f64,
}

impl Adams {
    fn h(&self) -> f64 {
        self.space.lambda(self.next) - self.space.lambda(self.sigma)
    }

    /// `1 + τ²`.
    fn rate(&self) -> f64 {
        1.0 + self.tau * self.tau
    }

    /// The weights of equations 15 and 18: integrals of the polynomials through the estimates at `times`. The latest comes first, here
    /// and below.
    fn integrals(&self, times: &[f64]) -> Vec<f64> {
        let (rate, alpha) = (self.rate(), self.space.alpha(self.next));
        let (from, to) = (self.space.lambda(self.sigma), self.space.lambda(self.next));
        let weight = |j| {
            let value = |at: f64| rate * (rate * (at - to)).exp() * math::lagrange(times, j, at);
            alpha * math::integral(from, to, value)
        };
        (0..times.len()).map(weight).collect()
    }

    /// The weights of appendix D for two estimates. The second one's is `share` times `(1 + τ²) h`.
    fn simple(&self, share: f64) -> Vec<f64> {
        let alpha = self.space.alpha(self.next);
        let (whole, part) =
            (-alpha * (-self.rate() * self.h()).exp_m1(), alpha * share * self.rate() * self.h());
        vec![whole - part, part]
    }

    /// Returns the state at the next level.
    fn from(&self, start: &[f32], weights: &[f64], known: &[Vec<f32>], noise: Option<&[f32]>) -> Vec<f32> {
        let shrink = self.tau * self.tau * self.h();
        let mut terms: Vec<(f64, &[f32])> = vec![(self.next / self.sigma * (-shrink).exp(), start)];
        terms.extend(weights.iter().copied().zip(known.iter().map(|state| &**state)));
        if let Some(noise) = noise {
            terms.push((self.next * (-(-2.0 * shrink).exp_m1()).sqrt(), noise));
        }
        math::sum(&terms)
    }
}
