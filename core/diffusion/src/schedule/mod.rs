//! Schedules: the noise levels of the steps.
//!
//! A schedule lists levels from the highest down, followed by 0: `steps + 1` numbers for `steps` steps.

mod beta;
pub mod flow;
mod levels;

pub use levels::{Betas, Levels};

/// How levels are spaced, by ComfyUI's rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    /// Uniform in training steps, including the lowest level ("normal", A1111's "Uniform", sd.cpp's "discrete").
    Normal,
    /// Uniform in training steps, with 0 instead of the lowest level.
    SgmUniform,
    /// Uniform in table entries, starting at the highest.
    Simple,
    /// Uniform in table entries, counted from the second lowest.
    DdimUniform,
    /// Uniform in `σ^(1/7)` (Karras et al., 2022).
    Karras,
    /// Uniform in `ln σ`.
    Exponential,
    /// Training steps at the quantiles of the beta distribution with α = β = 0.6 (Lee et al., 2024).
    Beta,
    /// Uniform in `atan σ`.
    KlOptimal,
    /// "Align your steps" (Sabour et al., 2024) for Stable Diffusion 1.
    AlignYourSteps,
    /// The same for SDXL.
    AlignYourStepsXl,
    /// Half of the steps fall linearly to 97.5 % of the highest level; the others fall quadratically.
    LinearQuadratic,
}

/// Levels of "align your steps" for ten steps.
const ALIGNED: [f64; 11] = [
    14.6146412293,
    6.4745760956,
    3.8636745985,
    2.6946151520,
    1.8841921177,
    1.3943805092,
    0.9642583904,
    0.6523686016,
    0.3977456272,
    0.1515232662,
    0.0291671582,
];

/// The same for SDXL.
const ALIGNED_XL: [f64; 11] = [
    14.6146412293,
    6.3184485287,
    3.7681790315,
    2.1811480769,
    1.3405244945,
    0.8620721141,
    0.5550693289,
    0.3798540708,
    0.2332364134,
    0.1114188177,
    0.0291671582,
];

impl Schedule {
    /// Returns the levels for `steps` steps (at least 1). [`Beta`](Schedule::Beta) returns fewer if steps coincide, and
    /// [`DdimUniform`](Schedule::DdimUniform) one more if `steps` does not divide the table.
    pub fn sigmas(self, levels: &Levels, steps: usize) -> Vec<f64> {
        let steps = steps.max(1);
        let (min, max) = (levels.min(), levels.max());
        let mut sigmas: Vec<f64> = match self {
            Self::Normal => {
                let (first, last) = (levels.step(max), levels.step(min));
                ramp(first, last, steps).map(|step| levels.sigma(step)).collect()
            }
            Self::SgmUniform => {
                let (first, last) = (levels.step(max), levels.step(min));
                ramp(first, last, steps + 1).take(steps).map(|step| levels.sigma(step)).collect()
            }
            Self::Simple => {
                let (table, stride) = (levels.table(), levels.table().len() as f64 / steps as f64);
                (0..steps).map(|i| table[table.len() - 1 - (i as f64 * stride) as usize]).collect()
            }
            Self::DdimUniform => {
                let stride = (levels.table().len() / steps).max(1);
                let mut chosen: Vec<f64> = levels.table().iter().skip(1).step_by(stride).copied().collect();
                chosen.reverse();
                chosen
            }
            Self::Karras => karras(min, max, steps),
            Self::Exponential => ramp(max.ln(), min.ln(), steps).map(f64::exp).collect(),
            Self::Beta => {
                let last = (levels.table().len() - 1) as f64;
                let mut chosen: Vec<usize> = (0..steps)
                    .map(|i| {
                        (beta::quantile(1.0 - i as f64 / steps as f64, 0.6, 0.6) * last).round_ties_even()
                    })
                    .map(|step| step as usize)
                    .collect();
                chosen.dedup();
                chosen.into_iter().map(|step| levels.table()[step]).collect()
            }
            Self::KlOptimal => ramp(max.atan(), min.atan(), steps).map(f64::tan).collect(),
            Self::AlignYourSteps => return aligned(&ALIGNED, steps),
            Self::AlignYourStepsXl => return aligned(&ALIGNED_XL, steps),
            Self::LinearQuadratic => linear_quadratic(max, steps),
        };
        sigmas.push(0.0);
        sigmas
    }
}

/// Levels by equation 5 of Karras et al. (2022) with ρ = 7, without the final 0.
pub fn karras(min: f64, max: f64, steps: usize) -> Vec<f64> {
    ramp(max.powf(1.0 / 7.0), min.powf(1.0 / 7.0), steps).map(|root| root.powi(7)).collect()
}

/// `count` numbers from `first` to `last`; a single one is `first`.
fn ramp(first: f64, last: f64, count: usize) -> impl Iterator<Item = f64> {
    let share = move |i: usize| if count > 1 { i as f64 / (count - 1) as f64 } else { 0.0 };
    (0..count).map(move |i| first + share(i) * (last - first))
}

/// Interpolates a ten-step table linearly in `ln σ`, with 0 as the last level.
fn aligned(table: &[f64; 11], steps: usize) -> Vec<f64> {
    let mut sigmas: Vec<f64> = ramp(0.0, 10.0, steps + 1)
        .map(|place| {
            let low = (place as usize).min(9);
            let share = place - low as f64;
            ((1.0 - share) * table[low].ln() + share * table[low + 1].ln()).exp()
        })
        .collect();
    sigmas[steps] = 0.0;
    sigmas
}

fn linear_quadratic(max: f64, steps: usize) -> Vec<f64> {
    const THRESHOLD: f64 = 0.025;
    if steps == 1 {
        return vec![max];
    }
    let linear = (steps / 2) as f64;
    let rest = steps as f64 - linear;
    let difference = linear - THRESHOLD * steps as f64;
    let square = difference / (linear * rest * rest);
    let slope = THRESHOLD / linear - 2.0 * difference / (rest * rest);
    (0..steps)
        .map(|i| i as f64)
        .map(|i| {
            if i < linear {
                i * THRESHOLD / linear
            } else {
                square * i * i + slope * i + square * linear * linear
            }
        })
        .map(|done| (1.0 - done) * max)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Betas, Levels, Schedule};

    fn close(actual: &[f64], expected: &[f64]) {
        assert_eq!(actual.len(), expected.len(), "{actual:?}");
        assert!(
            actual.iter().zip(expected).all(|(a, e)| (a - e).abs() <= 6e-5),
            "{actual:?} for {expected:?}"
        );
    }

    /// ComfyUI's levels for ten steps of Stable Diffusion.
    #[test]
    fn ten_steps_of_stable_diffusion() {
        let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
        use Schedule::*;
        for (schedule, expected) in [
            (Normal, [14.6146, 7.8399, 4.6092, 2.9183, 1.9502, 1.3449, 0.9324, 0.6250, 0.3687, 0.0292, 0.0]),
            (
                SgmUniform,
                [14.6146, 8.3072, 5.0924, 3.3251, 2.2797, 1.6156, 1.1629, 0.8319, 0.5712, 0.3437, 0.0],
            ),
            (Simple, [14.6146, 8.3028, 5.0878, 3.3211, 2.2765, 1.6129, 1.1606, 0.8299, 0.5693, 0.3417, 0.0]),
            (
                DdimUniform,
                [8.3907, 5.1344, 3.3478, 2.2929, 1.6237, 1.1682, 0.8357, 0.5741, 0.3462, 0.0413, 0.0],
            ),
            (Karras, [14.6146, 9.1029, 5.4784, 3.1686, 1.7494, 0.9141, 0.4469, 0.2014, 0.0819, 0.0292, 0.0]),
            (
                Exponential,
                [14.6146, 7.3249, 3.6712, 1.8400, 0.9222, 0.4622, 0.2317, 0.1161, 0.0582, 0.0292, 0.0],
            ),
            (Beta, [14.6146, 11.5428, 7.3718, 4.3728, 2.6152, 1.6183, 1.0273, 0.6549, 0.3955, 0.1991, 0.0]),
            (
                KlOptimal,
                [14.6146, 4.2324, 2.3937, 1.5971, 1.1330, 0.8152, 0.5729, 0.3725, 0.1953, 0.0292, 0.0],
            ),
        ] {
            close(&schedule.sigmas(&levels, 10), &expected);
        }
    }

    #[test]
    fn simple_steps_of_stable_diffusion_3() {
        let expected = [1.0, 0.9643, 0.9231, 0.8750, 0.8182, 0.75, 0.6667, 0.5625, 0.4286, 0.25, 0.0];
        close(&Schedule::Simple.sigmas(&Levels::flow(3.0, 1000), 10), &expected);
    }

    #[test]
    fn aligned_steps_keep_their_ends() {
        let levels = Levels::diffusion(Betas::STABLE_DIFFUSION);
        assert_eq!(
            Schedule::AlignYourSteps.sigmas(&levels, 10)[1..3],
            [6.4745760956, 3.8636745985].map(close_to)
        );
        let twenty = Schedule::AlignYourStepsXl.sigmas(&levels, 20);
        assert!((twenty[2] - 6.3184485287).abs() < 1e-9 && twenty.len() == 21);
    }

    fn close_to(value: f64) -> f64 {
        value.ln().exp()
    }

    #[test]
    fn every_schedule_falls_and_ends_at_zero() {
        for levels in [Levels::diffusion(Betas::STABLE_DIFFUSION), Levels::flow(3.0, 1000)] {
            use Schedule::*;
            let all = [
                Normal,
                SgmUniform,
                Simple,
                DdimUniform,
                Karras,
                Exponential,
                Beta,
                KlOptimal,
                LinearQuadratic,
            ];
            for schedule in all {
                for steps in [1, 2, 3, 7, 20, 50] {
                    let sigmas = schedule.sigmas(&levels, steps);
                    assert_eq!(*sigmas.last().unwrap(), 0.0);
                    assert!(
                        sigmas.windows(2).all(|pair| pair[0] > pair[1]),
                        "{schedule:?} {steps}: {sigmas:?}"
                    );
                    assert!(schedule == Beta || schedule == DdimUniform || sigmas.len() == steps + 1);
                }
            }
        }
    }
}
