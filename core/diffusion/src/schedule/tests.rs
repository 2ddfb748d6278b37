//! Schedules against the levels of other programs.

use super::{Betas, Levels, Schedule};
use crate::program::Program;

fn close(actual: &[f64], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{actual:?}");
    assert!(actual.iter().zip(expected).all(|(a, e)| (a - e).abs() <= 6e-5), "{actual:?} for {expected:?}");
}

/// ComfyUI's levels for ten steps of Stable Diffusion.
#[test]
fn ten_steps_of_stable_diffusion() {
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    use Schedule::*;
    for (schedule, expected) in [
        (Normal, [14.6146, 7.8399, 4.6092, 2.9183, 1.9502, 1.3449, 0.9324, 0.6250, 0.3687, 0.0292, 0.0]),
        (SgmUniform, [14.6146, 8.3072, 5.0924, 3.3251, 2.2797, 1.6156, 1.1629, 0.8319, 0.5712, 0.3437, 0.0]),
        (Simple, [14.6146, 8.3028, 5.0878, 3.3211, 2.2765, 1.6129, 1.1606, 0.8299, 0.5693, 0.3417, 0.0]),
        (DdimUniform, [8.3907, 5.1344, 3.3478, 2.2929, 1.6237, 1.1682, 0.8357, 0.5741, 0.3462, 0.0413, 0.0]),
        (Karras, [14.6146, 9.1029, 5.4784, 3.1686, 1.7494, 0.9141, 0.4469, 0.2014, 0.0819, 0.0292, 0.0]),
        (Exponential, [14.6146, 7.3249, 3.6712, 1.8400, 0.9222, 0.4622, 0.2317, 0.1161, 0.0582, 0.0292, 0.0]),
        (Beta, [14.6146, 11.5428, 7.3718, 4.3728, 2.6152, 1.6183, 1.0273, 0.6549, 0.3955, 0.1991, 0.0]),
        (KlOptimal, [14.6146, 4.2324, 2.3937, 1.5971, 1.1330, 0.8152, 0.5729, 0.3725, 0.1953, 0.0292, 0.0]),
    ] {
        close(&schedule.sigmas(&levels, 10, Program::ComfyUi, 0), &expected);
    }
}

#[test]
fn simple_steps_of_stable_diffusion_3() {
    let expected = [1.0, 0.9643, 0.9231, 0.8750, 0.8182, 0.75, 0.6667, 0.5625, 0.4286, 0.25, 0.0];
    close(&Schedule::Simple.sigmas(&Levels::flow(3.0, 1000), 10, Program::ComfyUi, 0), &expected);
}

#[test]
fn aligned_steps_keep_their_ends() {
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    assert_eq!(
        Schedule::AlignYourSteps.sigmas(&levels, 10, Program::ComfyUi, 0)[1..3],
        [6.4745760956, 3.8636745985].map(close_to)
    );
    let twenty = Schedule::AlignYourStepsXl.sigmas(&levels, 20, Program::ComfyUi, 0);
    assert!((twenty[2] - 6.3184485287).abs() < 1e-9 && twenty.len() == 21);
}

fn close_to(value: f64) -> f64 {
    value.ln().exp()
}

/// Each schedule falls and ends at 0, by every program's rules. Only a few have another number of steps than asked for.
#[test]
fn every_schedule_falls_and_ends_at_zero() {
    use Schedule::*;
    for levels in [Levels::diffusion(Betas::STABLE_DIFFUSION), Levels::flow(3.0, 1000)] {
        for program in [Program::A1111, Program::ComfyUi, Program::Diffusers] {
            for (schedule, steps) in
                Schedule::ALL.iter().flat_map(|s| [1, 2, 3, 7, 20, 50, 120].map(|n| (*s, n)))
            {
                let sigmas = schedule.sigmas(&levels, steps, program, 4096);
                let ends = schedule == KlOptimal && program == Program::A1111;
                assert!(ends || sigmas.last() == Some(&0.0), "{schedule:?} {steps}");
                assert!(sigmas.windows(2).all(|pair| pair[0] > pair[1]), "{schedule:?} {steps}: {sigmas:?}");
                let exact = !matches!(
                    schedule,
                    Beta | DdimUniform | Laplace | Smoothstep | Lcm | Turbo | LogitNormal
                );
                assert!(!exact || sigmas.len() == steps + 1, "{schedule:?} {steps} {}", sigmas.len());
            }
        }
    }
}
