//! Samplers on a problem with a known solution: normal data with variance 1.

use super::{Denoiser, Noise, Path, Sampler, Space};
use crate::noise::{BrownianTree, TorchCpu};
use std::{collections::BTreeMap, convert::Infallible};

/// The optimal denoiser for normal data.
struct Gaussian {
    space: Space,
    calls: usize,
}

impl Denoiser for Gaussian {
    type Error = Infallible;

    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, Infallible> {
        self.calls += 1;
        let alpha = self.space.alpha(sigma);
        let factor = alpha / (alpha * alpha + sigma * sigma);
        Ok(x.iter().map(|value| (factor * f64::from(*value)) as f32).collect())
    }
}

struct Stream(TorchCpu);

impl Noise for Stream {
    fn fill(&mut self, _: f64, _: f64, out: &mut [f32]) {
        self.0.randn(out);
    }
}

/// Noise for samplers that must not draw any.
struct None;

impl Noise for None {
    fn fill(&mut self, _: f64, _: f64, _: &mut [f32]) {
        panic!("a deterministic sampler draws noise");
    }
}

const ADDITIVE: Space = Space::Additive;
const FLOW: Space = Space::Flow { shift: 1.0 };

fn deviation(space: Space, sigma: f64) -> f64 {
    space.alpha(sigma).hypot(sigma)
}

/// Levels uniform in `ln σ`.
fn geometric(from: f64, to: f64, steps: usize) -> Vec<f64> {
    (0..=steps).map(|i| from * (to / from).powf(i as f64 / steps as f64)).collect()
}

/// The relative error of a deterministic sampler between two levels above 0.
fn error(sampler: Sampler, space: Space, steps: usize) -> f64 {
    let (from, to) = match space {
        Space::Additive => (10.0, 0.4),
        Space::Flow { .. } => (0.9, 0.3),
    };
    let sigmas = geometric(from, to, steps);
    let mut x = vec![3.0f32];
    let path = Path { sigmas: &sigmas, space };
    let mut denoiser = Gaussian { space, calls: 0 };
    let Ok(()) = sampler.run(&path, &mut x, &mut denoiser, &mut None, &mut |_, _| ());
    let exact = 3.0 * deviation(space, to) / deviation(space, from);
    (f64::from(x[0]) / exact - 1.0).abs()
}

/// Twice as many steps divide the error by two to the power of the order.
#[test]
fn deterministic_samplers_converge_with_their_order() {
    use Sampler::*;
    let orders = [
        (Euler, 1.0),
        (Heun, 2.0),
        (Dpm2, 2.0),
        (DpmPp2m, 2.0),
        (Lms, 2.0),
        (IpndmV, 2.0),
        (ResMultistep, 2.0),
    ];
    for space in [ADDITIVE, FLOW] {
        for (sampler, order) in orders {
            let (coarse, fine) = (error(sampler, space, 48), error(sampler, space, 96));
            let slope = (coarse / fine).log2();
            assert!(
                fine < 2e-6 || slope > order - 0.25,
                "{sampler:?} in {space:?}: {coarse} {fine}, slope {slope}"
            );
            assert!(fine < 0.05, "{sampler:?} in {space:?} is {fine} off");
        }
    }
}

/// The result has the variance of the data.
#[test]
fn samplers_keep_the_variance() {
    const COUNT: usize = 20_000;
    for space in [ADDITIVE, FLOW] {
        let first = if space == FLOW { 1.0 } else { 14.6 };
        let mut sigmas = geometric(first, 0.02, 100);
        sigmas.push(0.0);
        for sampler in Sampler::ALL {
            if space == FLOW && matches!(sampler, Sampler::ResMultistepAncestral) {
                continue; // ComfyUI computes it for flow models, too, but it does not keep their variance.
            }
            let mut x = vec![0.0; COUNT];
            TorchCpu::new(1).randn(&mut x);
            x.iter_mut().for_each(|value| *value *= deviation(space, first) as f32);
            let path = Path { sigmas: &sigmas, space };
            let mut denoiser = Gaussian { space, calls: 0 };
            let mut noise = Stream(TorchCpu::new(2));
            let Ok(()) = sampler.run(&path, &mut x, &mut denoiser, &mut noise, &mut |_, _| ());
            let variance = x.iter().map(|v| f64::from(v * v)).sum::<f64>() / COUNT as f64;
            let expected = if sampler == Sampler::Lcm { variance_of_lcm(space, &sigmas) } else { 1.0 };
            assert!(
                (variance / expected - 1.0).abs() < 0.1,
                "{sampler:?} in {space:?}: {variance}, not {expected}"
            );
        }
    }
}

/// The exact variance of [`Sampler::Lcm`]'s result. It is below that of the data because each estimate is a mean.
fn variance_of_lcm(space: Space, sigmas: &[f64]) -> f64 {
    sigmas.windows(2).fold(deviation(space, sigmas[0]).powi(2), |variance, pair| {
        let alpha = space.alpha(pair[0]);
        let factor = alpha / (alpha * alpha + pair[0] * pair[0]);
        variance * (factor * space.alpha(pair[1])).powi(2) + pair[1] * pair[1]
    })
}

#[derive(serde::Deserialize)]
struct Reference {
    sigmas: Vec<f64>,
    start: Vec<f32>,
    samplers: BTreeMap<String, Vec<Vec<f32>>>,
}

/// Data that is -1 or 1.
struct Signs;

impl Denoiser for Signs {
    type Error = Infallible;

    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, Infallible> {
        Ok(x.iter().map(|value| (f64::from(*value) / (sigma * sigma)).tanh() as f32).collect())
    }
}

struct Tree(BrownianTree);

impl Noise for Tree {
    fn fill(&mut self, from: f64, to: f64, out: &mut [f32]) {
        self.0.noise(from, to, out);
    }
}

/// The state after each step matches k-diffusion's (tools/diffusion/samplers.py).
#[test]
fn states_are_those_of_k_diffusion() {
    let file = include_str!("../../testdata/samplers.json");
    let reference: Reference = serde_json::from_str(file).unwrap();
    use Sampler::*;
    let samplers = [
        ("euler", Euler),
        ("euler_ancestral", EulerAncestral),
        ("heun", Heun),
        ("dpm_2", Dpm2),
        ("dpm_2_ancestral", Dpm2Ancestral),
        ("dpmpp_2s_ancestral", DpmPp2sAncestral),
        ("dpmpp_sde", DpmPpSde),
        ("dpmpp_2m", DpmPp2m),
        ("dpmpp_2m_sde", DpmPp2mSde),
        ("dpmpp_2m_sde_heun", DpmPp2mSdeHeun),
        ("dpmpp_3m_sde", DpmPp3mSde),
        ("lms", Lms),
    ];
    assert_eq!(samplers.len(), reference.samplers.len());
    let sigmas = &reference.sigmas;
    for (name, sampler) in samplers {
        let mut x = reference.start.clone();
        let mut noise: Box<dyn Noise> = if sampler.is_brownian() {
            Box::new(Tree(BrownianTree::new(1, sigmas[sigmas.len() - 2], sigmas[0], x.len())))
        } else if sampler.is_stochastic() {
            Box::new(Stream(TorchCpu::new(1)))
        } else {
            Box::new(None)
        };
        let path = Path { sigmas, space: ADDITIVE };
        let mut states = Vec::new();
        let mut observe = |_: usize, x: &[f32]| states.push(x.to_vec());
        let Ok(()) = sampler.run(&path, &mut x, &mut Signs, &mut *noise, &mut observe);
        let mut expected = reference.samplers[name].clone();
        assert_eq!(states.len(), expected.len(), "{name}");
        if sampler == Lms {
            // ComfyUI's last step is the estimate; k-diffusion's is a step like the others.
            let last = expected.len() - 1;
            let Ok(estimate) = Signs.denoise(&expected[last - 1], sigmas[last]);
            expected[last] = estimate;
        }
        for (step, (actual, expected)) in states.iter().zip(&expected).enumerate() {
            let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            for (a, e) in actual.iter().zip(expected) {
                assert!((a - e).abs() <= 2e-5 * largest, "{name}, step {step}: {a} instead of {e}");
            }
        }
    }
}
