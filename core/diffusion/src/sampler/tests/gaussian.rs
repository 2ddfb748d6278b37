//! Samplers on a problem with a known solution: normal data with variance 1.

use super::{Options, Path, Program, Sampler, Silent, Stream, states};
use crate::{
    noise::TorchCpu,
    sampler::{Noise, Space},
    schedule::{Betas, Levels},
};
use Sampler::*;

fn levels(space: Space) -> Levels {
    match space {
        Space::Additive => Levels::diffusion(Betas::STABLE_DIFFUSION),
        Space::Flow => Levels::flow(1.0, 1000),
    }
}

fn deviation(space: Space, sigma: f64) -> f64 {
    space.alpha(sigma).hypot(sigma)
}

/// The factor of the best estimate.
fn factor(space: Space, sigma: f64) -> f64 {
    let alpha = space.alpha(sigma);
    alpha / (alpha * alpha + sigma * sigma)
}

/// Levels uniform in `ln σ`.
fn geometric(from: f64, to: f64, steps: usize) -> Vec<f64> {
    (0..=steps).map(|i| from * (to / from).powf(i as f64 / steps as f64)).collect()
}

const OFF: Options = Options {
    eta: Some(0.0),
    noise: 1.0,
    churn: 0.0,
    churn_range: (0.0, 0.0),
    order: None,
    program: Program::ComfyUi,
};

/// The relative error of a sampler without noise between two levels above 0.
fn error(sampler: Sampler, space: Space, program: Program, steps: usize) -> f64 {
    let (from, to) = match space {
        Space::Additive => (10.0, 0.4),
        Space::Flow => (0.9, 0.3),
    };
    let sigmas = geometric(from, to, steps);
    let levels = levels(space);
    let options = Options { program, ..OFF };
    let path = Path { sigmas: &sigmas, levels: &levels };
    let states = states(sampler, &path, &options, &[3.0], |x, sigma| factor(space, sigma) * x);
    let exact = 3.0 * deviation(space, to) / deviation(space, from);
    (f64::from(states.last().unwrap()[0]) / exact - 1.0).abs()
}

/// Twice as many steps divide the error by two to the power of the order, on average over two doublings, until the rounding of
/// states dominates.
#[test]
fn samplers_without_noise_converge_with_their_order() {
    let orders = [
        (Euler, 1.0),
        (EulerCfgPp, 1.0),
        (Heun, 2.0),
        (Dpm2, 2.0),
        (DpmFast, 2.0),
        (DpmPp2s, 2.0),
        (DpmPp2m, 2.0),
        (DpmPp2mSde, 2.0),
        (DpmPp3m, 2.0),
        (DpmPpSde, 2.0),
        (Lms, 2.0),
        (IpndmV, 2.0),
        (Plms, 1.0),
        (Deis, 2.0),
        (UniPc, 2.0),
        (UniPcBh2, 2.0),
        (SaSolver, 2.0),
        (SaSolverPece, 2.0),
        (ResMultistep, 2.0),
        (ExpHeun2, 2.0),
        (Seeds2, 2.0),
        (Seeds3, 3.0),
    ];
    for space in [Space::Additive, Space::Flow] {
        for program in [Program::ComfyUi, Program::Diffusers] {
            for (sampler, order) in orders {
                let (coarse, fine) =
                    (error(sampler, space, program, 48), error(sampler, space, program, 192));
                let slope = (coarse / fine).log2() / 2.0;
                assert!(
                    fine < 6e-6 || slope > order - 0.3,
                    "{sampler:?} in {space:?} like {program:?}: {coarse} {fine}, slope {slope}"
                );
                assert!(fine < 0.05, "{sampler:?} in {space:?} is {fine} off");
            }
        }
    }
}

/// The adaptive solver keeps to its tolerance without regard to the number of steps.
#[test]
fn the_adaptive_solver_is_accurate() {
    for space in [Space::Additive, Space::Flow] {
        for steps in [1, 2, 50] {
            let error = error(DpmAdaptive, space, Program::ComfyUi, steps);
            assert!(error < 0.05, "{error} in {space:?}");
        }
    }
}

/// Without noise, stochastic samplers equal deterministic ones.
#[test]
fn relatives_agree_without_noise() {
    let path = |space| match space {
        Space::Additive => [geometric(14.6, 0.03, 12), vec![0.0]].concat(),
        Space::Flow => [geometric(0.99, 0.05, 12), vec![0.0]].concat(),
    };
    let pairs = [
        (EulerAncestral, Euler),
        (EulerAncestralCfgPp, EulerCfgPp),
        // Without guidance, CFG++ changes nothing.
        (EulerCfgPp, Euler),
        (DpmPp2mCfgPp, DpmPp2m),
        (ResMultistepCfgPp, ResMultistep),
        (GradientEstimationCfgPp, GradientEstimation),
        (DpmPp2sAncestralCfgPp, DpmPp2sAncestral),
        (Ddim, Euler),
        (Tcd, Euler),
        (Dpm2Ancestral, Dpm2),
        (DpmPp3mSde, DpmPp3m),
        (DpmPp2mSde, DpmPp2m),
        (ResMultistepAncestral, ResMultistep),
        (ExpHeun2Sde, ExpHeun2),
    ];
    for space in [Space::Additive, Space::Flow] {
        let (sigmas, levels) = (path(space), levels(space));
        let path = Path { sigmas: &sigmas, levels: &levels };
        for (stochastic, deterministic) in pairs {
            // diffusers measures the steps of both by the signal-to-noise ratio.
            let options = Options { program: Program::Diffusers, ..OFF };
            let [a, b] = [stochastic, deterministic].map(|sampler| {
                states(sampler, &path, &options, &[3.0, -1.0], |x, sigma| (factor(space, sigma) * x).tanh())
            });
            for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{stochastic:?} in {space:?}: {a} and {b}");
            }
        }
    }
}

/// The result has the variance of the data.
#[test]
fn samplers_keep_the_variance() {
    const COUNT: usize = 20_000;
    for space in [Space::Additive, Space::Flow] {
        let first = if space == Space::Flow { 1.0 } else { 14.6 };
        let mut sigmas = geometric(first, 0.02, 100);
        sigmas.push(0.0);
        let levels = levels(space);
        for sampler in Sampler::ALL.iter().copied() {
            if space == Space::Flow && matches!(sampler, ResMultistepAncestral | ResMultistepAncestralCfgPp) {
                continue; // ComfyUI computes it for flow models, too, but it does not keep their variance.
            }
            for churn in [0.0, 3.0] {
                if churn > 0.0 && (space == Space::Flow || !matches!(sampler, Euler | Heun | HeunPp2 | Dpm2))
                {
                    continue; // The noise of churn is that of an additive state.
                }
                let mut start = vec![0.0; COUNT];
                TorchCpu::new(7).randn(&mut start);
                start.iter_mut().for_each(|value| *value *= deviation(space, first) as f32);
                let path = Path { sigmas: &sigmas, levels: &levels };
                // At γ = 0.3 TCD takes steps too large for the estimates of this problem.
                let eta = (sampler == Tcd).then_some(0.02);
                let options = Options { eta, churn, ..Options::default() };
                let states = states(sampler, &path, &options, &start, |x, sigma| factor(space, sigma) * x);
                let x = states.last().unwrap();
                let variance = x.iter().map(|v| f64::from(v * v)).sum::<f64>() / COUNT as f64;
                let expected = if sampler == Lcm { variance_of_lcm(space, &sigmas) } else { 1.0 };
                assert!(
                    (variance / expected - 1.0).abs() < 0.1,
                    "{sampler:?} in {space:?}: {variance}, not {expected}"
                );
            }
        }
    }
}

/// The exact variance of [`Lcm`]'s result. It is below that of the data because each estimate is a mean.
fn variance_of_lcm(space: Space, sigmas: &[f64]) -> f64 {
    sigmas.windows(2).fold(deviation(space, sigmas[0]).powi(2), |variance, pair| {
        variance * (factor(space, pair[0]) * space.alpha(pair[1])).powi(2) + pair[1] * pair[1]
    })
}

/// A state that is not a number ends the adaptive solver.
#[test]
fn the_adaptive_solver_ends() {
    let levels = levels(Space::Additive);
    let path = Path { sigmas: &[14.6, 1.0, 0.03, 0.0], levels: &levels };
    let states = states(DpmAdaptive, &path, &OFF, &[1.0], |_, _| f64::NAN);
    assert!(states.last().unwrap()[0].is_nan());
}

/// Every sampler accepts short paths.
#[test]
fn short_paths() {
    for space in [Space::Additive, Space::Flow] {
        let levels = levels(space);
        for sigmas in [&[1.0, 0.0][..], &[1.0, 0.5, 0.0], &[1.0, 0.7, 0.2, 0.0]] {
            for program in [Program::A1111, Program::ComfyUi, Program::Diffusers] {
                for sampler in Sampler::ALL.iter().copied() {
                    let options = Options { program, ..Options::default() };
                    let path = Path { sigmas, levels: &levels };
                    let states =
                        states(sampler, &path, &options, &[1.0; 16], |x, sigma| factor(space, sigma) * x);
                    assert!(states.iter().flatten().all(|value| value.is_finite()), "{sampler:?} {sigmas:?}");
                }
            }
        }
    }
}

/// The negative prompt steers CFG++ by the formula of its paper: `x' = D + σ' (x - D_negative) / σ`.
#[test]
fn cfg_pp_keeps_the_noise_of_the_negative_prompt() {
    struct Both;
    impl crate::sampler::Denoiser for Both {
        type Error = std::convert::Infallible;
        fn denoise(&mut self, _: &[f32], _: f64) -> Result<Vec<f32>, Self::Error> {
            Ok(vec![2.0])
        }
        fn denoise_both(&mut self, _: &[f32], _: f64) -> Result<(Vec<f32>, Vec<f32>), Self::Error> {
            Ok((vec![2.0], vec![-1.0]))
        }
    }
    let levels = levels(Space::Additive);
    let path = Path { sigmas: &[4.0, 1.0], levels: &levels };
    let mut x = vec![5.0];
    let Ok(()) = EulerCfgPp.run(&path, &OFF, &mut x, &mut Both, &mut Silent, &mut |_, _| ());
    assert_eq!(x, [2.0 + 1.0 * (5.0 + 1.0) / 4.0]);
    // The first step of these is the same, and the last gives the guided estimate.
    for sampler in
        [DdimCfgPp, DpmPp2mCfgPp, ResMultistepCfgPp, GradientEstimationCfgPp, DpmPp2sAncestralCfgPp]
    {
        for (sigmas, expected) in [([4.0, 1.0], 3.5), ([4.0, 0.0], 2.0)] {
            let mut x = vec![5.0];
            let path = Path { sigmas: &sigmas, levels: &levels };
            let Ok(()) = sampler.run(&path, &OFF, &mut x, &mut Both, &mut Silent, &mut |_, _| ());
            assert_eq!(x, [expected], "{sampler:?}");
        }
    }
    let mut noise = vec![0.0];
    Stream(TorchCpu::new(3)).fill(4.0, 1.0, &mut noise);
    let mut x = vec![5.0];
    let options = Options { eta: Some(1.0), ..OFF };
    let mut stream = Stream(TorchCpu::new(3));
    let Ok(()) = EulerAncestralCfgPp.run(&path, &options, &mut x, &mut Both, &mut stream, &mut |_, _| ());
    // σ_up² = σ'² (σ² - σ'²) / σ².
    let up = (15.0f32 / 16.0).sqrt();
    let expected = 2.0 + (1.0 - up * up).sqrt() * 6.0 / 4.0 + up * noise[0];
    assert!((x[0] - expected).abs() < 1e-6, "{} {expected}", x[0]);
}
