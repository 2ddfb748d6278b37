//! Sums and means that diffusers' own tests expect (`tests/schedulers/test_scheduler_*.py`).
//!
//! Their network predicts the noise `x t / (t + 1)`. β is linear from 0.0001 to 0.02; runs have ten steps. Not compared: tests with
//! Runge-Kutta steps (PNDM), with a last step of order 2 (singlestep), and of methods of several calls or steps whose scaled network
//! input is fed back as the state (LMS, Heun, KDPM2).

use super::{Function, Options, Path, Program, Sampler, Stream};
use crate::{
    noise::TorchCpu,
    schedule::{
        Betas, Levels, Schedule,
        diffusers::{Spacing, sigmas, solver_sigmas},
        karras,
    },
};
use Sampler::*;

/// The tests' picture of shape (4, 3, 8, 8), whose values count up along the last axis of (3, 8, 8, 4).
fn picture() -> Vec<f32> {
    (0..768).map(|i| ((i % 192) * 4 + i / 192) as f32 / 768.0).collect()
}

/// Returns the sum of |x| after a run.
fn sum(sampler: Sampler, options: Options, levels: &Levels, path: &[f64], limit: f64) -> f64 {
    // The tests' states have variance 1.
    let mut x: Vec<f32> = picture().iter().map(|x| (f64::from(*x) * path[0].hypot(1.0)) as f32).collect();
    let mut known = (f64::NAN, 0.0);
    let mut denoiser = Function(|x: f64, sigma: f64| {
        if known.0 != sigma {
            known = (sigma, levels.nearest_step(sigma));
        }
        let noise = x / sigma.hypot(1.0) * known.1 / (known.1 + 1.0);
        (x - sigma * noise).clamp(-limit, limit)
    });
    let mut noise = Stream(TorchCpu::new(0));
    let path = Path { sigmas: path, levels };
    let Ok(()) = sampler.run(&path, &options, &mut x, &mut denoiser, &mut noise, &mut |_, _| ());
    let last = path.sigmas[path.sigmas.len() - 1];
    x.iter().map(|value| f64::from(value.abs()) / last.hypot(1.0)).sum()
}

/// Schedulers whose states have variance 1. Paths end at 0 or at the lowest level.
#[test]
fn sums_of_states_of_variance_one() {
    let levels = Levels::diffusion(Betas::PIXART);
    let lowest = levels.min();
    let ending = |path: Vec<f64>, last| [path, vec![last]].concat();
    let leading = sigmas(&levels, Spacing::Leading { offset: 0 }, 10);
    let solver = ending(solver_sigmas(&levels, Spacing::Linspace, 10), lowest);
    let karras = ending(karras(lowest, levels.max(), 10), lowest);
    let every = ending(levels.table().iter().rev().copied().collect(), 0.0);
    let diffusers = Options { program: Program::Diffusers, ..Options::default() };
    let comfyui = Options::default();
    for (name, sampler, options, path, limit, expected) in [
        ("ddim", Ddim, diffusers, &ending(leading, 0.0), 1.0, 172.0067),
        ("ddpm", EulerAncestral, diffusers, &every, 1.0, 258.9606),
        // The test allows order 2 in the last step, as ComfyUI does.
        ("dpm multistep", DpmPp2m, comfyui, &solver, f64::INFINITY, 0.3301 * 768.0),
        ("unipc", UniPcBh2, diffusers, &solver, f64::INFINITY, 0.2464 * 768.0),
        ("unipc karras", UniPcBh2, diffusers, &karras, f64::INFINITY, 0.2925 * 768.0),
        ("deis", Deis, diffusers, &solver, f64::INFINITY, 0.23916 * 768.0),
        // Not published; diffusers 0.36 computes it for the scheduler's usual settings.
        ("sa", SaSolver, diffusers, &solver, f64::INFINITY, 341.5797),
    ] {
        let actual = sum(sampler, options, &levels, path, limit);
        // The tests allow 1e-3 for a mean.
        assert!((actual / expected - 1.0).abs() < 2e-4, "{name}: {actual} instead of {expected}");
    }

    // Tests of consistency models have the levels of Stable Diffusion.
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    let lowest = levels.min();
    let path = |steps, last| {
        let mut path = Schedule::Lcm.sigmas(&levels, steps, Program::Diffusers, 0);
        path[steps] = last;
        path
    };
    let still = Options { eta: Some(0.0), ..diffusers };
    for (name, sampler, path, expected) in [
        ("lcm, one step", Lcm, path(1, 0.0), 18.7097),
        ("lcm", Lcm, path(10, 0.0), 197.7616),
        ("tcd, one step", Tcd, path(1, lowest), 29.8715),
        ("tcd", Tcd, path(10, lowest), 181.2040),
    ] {
        let actual = sum(sampler, still, &levels, &path, f64::INFINITY);
        assert!((actual / expected - 1.0).abs() < 2e-4, "{name}: {actual} instead of {expected}");
    }
}

/// Euler's method, whose tests feed the scaled network input back as the state, for a model of 1,100 steps.
#[test]
fn sums_of_scaled_states() {
    let mut product = 1.0;
    let table: Vec<f64> = (0..1100)
        .map(|step| {
            product *= 1.0 - (1e-4 + f64::from(step) / 1099.0 * (0.02 - 1e-4));
            ((1.0 - product) / product).sqrt()
        })
        .collect();
    let levels = Levels::diffusion(Betas::PIXART);
    for (sampler, expected) in [(Euler, 10.0807), (EulerAncestral, 152.3192)] {
        let steps: Vec<f64> = (0..10).map(|i| 1099.0 * (1.0 - f64::from(i) / 9.0)).collect();
        let level = |step: f64| {
            let (low, share) = (step as usize, step.fract());
            (1.0 - share) * table[low] + share * table[(low + 1).min(1099)]
        };
        let path: Vec<f64> = steps.iter().map(|step| level(*step)).chain([0.0]).collect();
        let mut x: Vec<f32> = picture().iter().map(|value| (f64::from(*value) * path[0]) as f32).collect();
        let mut noise = Stream(TorchCpu::new(0));
        for (pair, step) in path.windows(2).zip(&steps) {
            x.iter_mut().for_each(|value| *value = (f64::from(*value) / pair[0].hypot(1.0)) as f32);
            let mut denoiser = Function(|x: f64, sigma: f64| x - sigma * x * step / (step + 1.0));
            let path = Path { sigmas: pair, levels: &levels };
            let Ok(()) =
                sampler.run(&path, &Options::default(), &mut x, &mut denoiser, &mut noise, &mut |_, _| ());
        }
        let actual: f64 = x.iter().map(|value| f64::from(value.abs())).sum();
        assert!((actual / expected - 1.0).abs() < 1e-5, "{sampler:?}: {actual} instead of {expected}");
    }
}
