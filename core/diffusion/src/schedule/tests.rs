//! Schedules against the levels of other programs.

use super::{
    Betas, Levels, Schedule, a1111,
    diffusers::{self, Spacing},
    flow,
};
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

/// Values of the same rule in NumPy, SciPy and PyTorch.
#[test]
fn rules_of_a1111() {
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    let sigmas = |schedule: Schedule, steps| schedule.sigmas(&levels, steps, Program::A1111, 0);
    close(
        &sigmas(Schedule::AlignYourSteps, 10),
        &[14.615, 6.1135, 3.5651, 2.3939, 1.65, 1.1358, 0.7425, 0.445, 0.1692, 0.029, 0.0],
    );
    close(
        &sigmas(Schedule::AlignYourSteps, 11),
        &[14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029, 0.0],
    );
    close(
        &sigmas(Schedule::KlOptimal, 10),
        &[14.6146, 4.565, 2.6329, 1.7864, 1.2948, 0.9616, 0.7116, 0.5094, 0.3356, 0.1783, 0.0292],
    );
    close(
        &sigmas(Schedule::Beta, 10),
        &[14.6146, 13.9278, 12.491, 10.5976, 8.4424, 6.2014, 4.0462, 2.1528, 0.716, 0.0292, 0.0],
    );
    close(
        &a1111::training_steps(&levels, 10),
        &[8.3907, 5.1344, 3.3478, 2.2929, 1.6237, 1.1682, 0.8357, 0.5741, 0.3462, 0.0413],
    );
    // The ends and the middle are training steps.
    let uni_pc = a1111::uni_pc(&levels, 1);
    close(&uni_pc, &[14.6146, 0.0292]);
    let middle = a1111::uni_pc(&levels, 2)[1];
    let [low, high] = [499, 500].map(|step| levels.table()[step].powi(2) + 1.0);
    assert!(((middle * middle + 1.0) / (low * high).sqrt() - 1.0).abs() < 1e-9);
}

/// Values of ComfyUI's rules in NumPy and PyTorch.
#[test]
fn more_rules_of_comfyui() {
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    let sigmas = |schedule: Schedule, steps| schedule.sigmas(&levels, steps, Program::ComfyUi, 0);
    close(
        &sigmas(Schedule::Laplace, 10),
        &[14.6146, 2.1213, 1.5, 1.2247, 1.0607, 0.9428, 0.8165, 0.6667, 0.4714, 0.0292, 0.0],
    );
    close(
        &sigmas(Schedule::OptimalStepsFlux, 8),
        &[0.9968, 0.9869, 0.9784, 0.9682, 0.9471, 0.8932, 0.6759, 0.3324, 0.0],
    );
    close(&sigmas(Schedule::Turbo, 4), &[14.6146, 8.3028, 5.0878, 3.3211, 0.0]);
}

/// Values printed by stable-diffusion.cpp's schedulers.
#[test]
fn rules_of_stable_diffusion_cpp() {
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    let sigmas = |schedule: Schedule, steps| schedule.sigmas(&levels, steps, Program::ComfyUi, 4096);
    close(
        &sigmas(Schedule::Smoothstep, 10),
        &[14.6146, 12.3720, 8.1305, 4.7336, 2.7149, 1.6183, 0.9937, 0.6103, 0.3529, 0.1642, 0.0],
    );
    close(
        &sigmas(Schedule::BongTangent, 10),
        &[14.6146, 14.2944, 13.8552, 13.2191, 12.2279, 10.5283, 7.3219, 3.7839, 1.7424, 0.6602, 0.0],
    );
    let flow = Levels::flow(1.0, 1000);
    close(
        &Schedule::BongTangent.sigmas(&flow, 5, Program::ComfyUi, 0),
        &[1.0, 0.9321, 0.8045, 0.5005, 0.1331, 0.0],
    );
    close(
        &sigmas(Schedule::LogitNormal, 10),
        &[0.9999, 0.9496, 0.8972, 0.8335, 0.7570, 0.6667, 0.5621, 0.4441, 0.3144, 0.1751, 0.0],
    );
    close(
        &sigmas(Schedule::Flux2, 10),
        &[1.0, 0.9885, 0.9745, 0.9570, 0.9347, 0.9052, 0.8642, 0.8036, 0.7047, 0.5148, 0.0],
    );
    close(&Schedule::Flux2.sigmas(&flow, 4, Program::ComfyUi, 8000), &[1.0, 0.9483, 0.8595, 0.6709, 0.0]);
    close(&sigmas(Schedule::Lcm, 4), &[14.6146, 4.2606, 1.6129, 0.7194, 0.0]);
    close(
        &sigmas(Schedule::AlignYourStepsVideo, 7),
        &[700.0, 32.1327, 8.8019, 3.3180, 1.1647, 0.3571, 0.0683, 0.0],
    );
}

/// Values of diffusers' schedulers (0.36).
#[test]
fn rules_of_diffusers() {
    let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
    let sigmas = |schedule: Schedule| schedule.sigmas(&levels, 7, Program::Diffusers, 0);
    close(&sigmas(Schedule::Linspace), &[14.6146, 5.9489, 2.9183, 1.6156, 0.9324, 0.4936, 0.0292, 0.0]);
    close(&sigmas(Schedule::Leading), &[6.5707, 3.4855, 2.0473, 1.2721, 0.7901, 0.4403, 0.0413, 0.0]);
    close(&sigmas(Schedule::Trailing), &[14.6146, 6.6686, 3.5139, 2.0545, 1.2762, 0.7901, 0.4381, 0.0]);
    let solver = |spacing| diffusers::solver_sigmas(&levels, spacing, 7);
    close(&solver(Spacing::Linspace), &[14.6146, 6.6686, 3.5282, 2.0617, 1.2762, 0.7901, 0.4403]);
    close(&solver(Spacing::Leading { offset: 1 }), &[7.3718, 4.1167, 2.5109, 1.6237, 1.0760, 0.6984, 0.4022]);
    close(&solver(Spacing::Trailing), &[14.6146, 6.6686, 3.5139, 2.0545, 1.2762, 0.7901, 0.4381]);

    let sana = flow::sana(20, 3.0);
    close(&sana[..5], &[0.9997, 0.9824, 0.9639, 0.9441, 0.9227]);
    close(&sana[17..], &[0.3459, 0.2498, 0.1362, 0.0]);
    let flux = flow::flux(10, 1.15f64.exp());
    close(
        &flow::stretched(&flux[..10], 0.02),
        &[1.0, 0.9550, 0.9029, 0.8418, 0.7692, 0.6816, 0.5737, 0.4375, 0.2602, 0.02],
    );
    close(&Schedule::Scm.sigmas(&Levels::flow(1.0, 1000), 2, Program::Diffusers, 0), &[1.0, 0.7827, 0.0]);
    // The beta schedule is A1111's.
    assert_eq!(
        Schedule::Beta.sigmas(&levels, 9, Program::Diffusers, 0),
        Schedule::Beta.sigmas(&levels, 9, Program::A1111, 0)
    );
}

/// Under each program's rules, every schedule decreases and ends at 0. Only a few return a different number of steps than requested.
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
