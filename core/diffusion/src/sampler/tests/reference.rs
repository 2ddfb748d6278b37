//! States after each step, as other programs compute them.

use super::{Options, Path, Program, Sampler, states};
use crate::schedule::{Betas, Levels};
use Sampler::*;
use std::collections::BTreeMap;

const A1111: Options = Options {
    eta: None,
    noise: 1.0,
    churn: 0.0,
    churn_range: (0.0, f64::INFINITY),
    order: None,
    program: Program::A1111,
};
const DIFFUSERS: Options = Options { program: Program::Diffusers, ..A1111 };

fn check(name: &str, actual: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32) {
    assert_eq!(actual.len(), expected.len(), "{name}");
    for (step, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        for (a, e) in actual.iter().zip(expected) {
            assert!((a - e).abs() <= tolerance * largest, "{name}, step {step}: {a} instead of {e}");
        }
    }
}

/// The best estimate where the data is -1 or 1.
fn sign(x: f64, sigma: f64) -> f64 {
    (x / (sigma * sigma)).tanh()
}

#[derive(serde::Deserialize)]
struct KDiffusion {
    sigmas: Vec<f64>,
    start: Vec<f32>,
    samplers: BTreeMap<String, Vec<Vec<f32>>>,
}

/// tools/diffusion/samplers.py
#[test]
fn states_are_those_of_k_diffusion() {
    let file = include_str!("../../../testdata/samplers.json");
    let reference: KDiffusion = serde_json::from_str(file).unwrap();
    let eta = |eta| Options { eta: Some(eta), ..A1111 };
    let churn = |churn, noise| Options { churn, noise, churn_range: (0.5, f64::INFINITY), ..A1111 };
    let samplers = [
        ("euler", Euler, A1111),
        ("euler_churn", Euler, churn(2.0, 1.1)),
        ("euler_ancestral", EulerAncestral, A1111),
        ("euler_ancestral_eta", EulerAncestral, Options { noise: 0.9, ..eta(0.6) }),
        ("heun", Heun, A1111),
        ("heun_churn", Heun, churn(8.0, 1.0)),
        ("dpm_2", Dpm2, A1111),
        ("dpm_2_churn", Dpm2, churn(2.0, 1.0)),
        ("dpm_2_ancestral", Dpm2Ancestral, A1111),
        ("dpm_fast", DpmFast, A1111),
        ("dpm_fast_eta", DpmFast, eta(0.5)),
        ("dpm_adaptive", DpmAdaptive, A1111),
        ("dpm_adaptive_eta", DpmAdaptive, eta(0.5)),
        ("dpmpp_2s_ancestral", DpmPp2sAncestral, A1111),
        ("dpmpp_sde", DpmPpSde, A1111),
        ("dpmpp_sde_eta", DpmPpSde, eta(0.5)),
        ("dpmpp_2m", DpmPp2m, A1111),
        ("dpmpp_2m_sde", DpmPp2mSde, A1111),
        ("dpmpp_2m_sde_eta", DpmPp2mSde, eta(0.4)),
        ("dpmpp_2m_sde_heun", DpmPp2mSdeHeun, A1111),
        ("dpmpp_3m", DpmPp3m, A1111),
        ("dpmpp_3m_sde", DpmPp3mSde, A1111),
        ("lms", Lms, A1111),
        ("lms_order_2", Lms, Options { order: Some(2), ..A1111 }),
    ];
    assert_eq!(samplers.len(), reference.samplers.len());
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    let path = Path { sigmas: &reference.sigmas, levels: &levels };
    for (name, sampler, options) in samplers {
        let actual = states(sampler, &path, &options, &reference.start, sign);
        // The adaptive solver's steps depend on a difference of f32 states.
        let tolerance = if sampler == DpmAdaptive { 2e-3 } else { 2e-5 };
        check(name, &actual, &reference.samplers[name], tolerance);
    }
}

#[derive(serde::Deserialize)]
struct Diffusers {
    sigmas: Vec<f64>,
    start: Vec<f32>,
    states: Vec<Vec<f32>>,
}

/// tools/diffusion/diffusers_samplers.py
#[test]
fn states_are_those_of_diffusers() {
    let file = include_str!("../../../testdata/diffusers.json");
    let reference: BTreeMap<String, Diffusers> = serde_json::from_str(file).unwrap();
    let order = |order| Options { order: Some(order), ..DIFFUSERS };
    let schedulers = [
        ("euler", Euler, DIFFUSERS),
        ("euler_ancestral", EulerAncestral, DIFFUSERS),
        ("heun", Heun, DIFFUSERS),
        ("kdpm_2", Dpm2, DIFFUSERS),
        ("kdpm_2_ancestral", Dpm2Ancestral, DIFFUSERS),
        ("lms", Lms, DIFFUSERS),
        ("ddim", Ddim, DIFFUSERS),
        ("ddim_eta", Ddim, Options { eta: Some(0.7), ..DIFFUSERS }),
        ("ddpm", EulerAncestral, DIFFUSERS),
        ("pndm", Plms, DIFFUSERS),
        ("lcm", Lcm, DIFFUSERS),
        ("tcd", Tcd, DIFFUSERS),
        ("dpm_1", Euler, DIFFUSERS),
        ("dpm_2", DpmPp2m, DIFFUSERS),
        ("dpm_2_karras", DpmPp2m, DIFFUSERS),
        ("dpm_2_flow", DpmPp2m, DIFFUSERS),
        ("dpm_3", DpmPp3m, DIFFUSERS),
        ("dpm_sde", DpmPp2mSde, DIFFUSERS),
        ("dpm_sde_heun", DpmPp2mSdeHeun, DIFFUSERS),
        ("dpm_singlestep", DpmPp2s, DIFFUSERS),
        ("unipc_bh1_1", UniPc, order(1)),
        ("unipc_bh1_2", UniPc, DIFFUSERS),
        ("unipc_bh1_3", UniPc, order(3)),
        ("unipc_bh2_2", UniPcBh2, DIFFUSERS),
        ("unipc_bh2_3", UniPcBh2, order(3)),
        ("unipc_flow", UniPcBh2, order(3)),
        ("deis_2", Deis, DIFFUSERS),
        ("deis_3", Deis, order(3)),
        ("sa_solver", SaSolver, DIFFUSERS),
        ("sa_solver_1", SaSolver, order(1)),
        ("sa_solver_4", SaSolver, order(4)),
        ("flow_euler", Euler, DIFFUSERS),
        ("flow_heun", Heun, DIFFUSERS),
        ("flow_lcm", Lcm, DIFFUSERS),
        ("scm", Lcm, DIFFUSERS),
        ("edm_euler", Euler, DIFFUSERS),
        ("edm_dpm_2", DpmPp2m, DIFFUSERS),
    ];
    assert_eq!(schedulers.len(), reference.len());
    for (name, sampler, options) in schedulers {
        let Diffusers { sigmas, start, states: expected } = &reference[name];
        let flow = name.contains("flow") || name == "scm";
        let levels = if flow { Levels::flow(3.0, 1000) } else { Levels::diffusion(Betas::STABLE_DIFFUSION) };
        let path = Path { sigmas, levels: &levels };
        let denoised =
            |x: f64, sigma: f64| if flow { sign(x * (1.0 - sigma), sigma) } else { sign(x, sigma) };
        let actual = states(sampler, &path, &options, start, denoised);
        // diffusers computes in f32.
        check(name, &actual, expected, 3e-5);
    }
}
