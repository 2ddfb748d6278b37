//! diffusers' `timestep_spacing` (Lin et al., 2024, table 2).

use super::{Levels, ramp};

/// How the training steps of a run are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spacing {
    /// From the last training step to the first.
    Linspace,
    /// Multiples of a whole stride, plus an offset.
    Leading {
        /// `steps_offset`: 1 for Stable Diffusion.
        offset: usize,
    },
    /// Multiples of the stride below the last training step.
    Trailing,
}

/// Levels of `EulerDiscreteScheduler` and its relatives, and of `DDIMScheduler` and `PNDMScheduler`, without the final 0. Between two
/// training steps σ is linear.
pub fn sigmas(levels: &Levels, spacing: Spacing, steps: usize) -> Vec<f64> {
    let count = levels.table().len();
    let last = (count - 1) as f64;
    let places: Vec<f64> = match spacing {
        Spacing::Linspace => ramp(last, 0.0, steps).collect(),
        Spacing::Leading { offset } => leading(count / steps, offset, steps),
        Spacing::Trailing => trailing(count, steps),
    };
    places.into_iter().map(|place| at(levels.table(), place)).collect()
}

/// Levels of the multistep solvers (`DPMSolverMultistepScheduler`, `UniPCMultistepScheduler`, `DEISMultistepScheduler`,
/// `SASolverScheduler`) and of `DPMSolverSinglestepScheduler`, without the final 0. They leave out the lowest of one step more.
pub fn solver_sigmas(levels: &Levels, spacing: Spacing, steps: usize) -> Vec<f64> {
    let count = levels.table().len();
    let last = (count - 1) as f64;
    let places: Vec<f64> = match spacing {
        Spacing::Linspace => ramp(last, 0.0, steps + 1).take(steps).map(f64::round_ties_even).collect(),
        Spacing::Leading { offset } => leading(count / (steps + 1), offset, steps + 1)[..steps].to_vec(),
        Spacing::Trailing => trailing(count, steps),
    };
    places.into_iter().map(|place| at(levels.table(), place)).collect()
}

fn leading(stride: usize, offset: usize, steps: usize) -> Vec<f64> {
    (0..steps).rev().map(|i| (i * stride + offset) as f64).collect()
}

fn trailing(count: usize, steps: usize) -> Vec<f64> {
    let stride = count as f64 / steps as f64;
    (0..steps).map(|i| (count as f64 - i as f64 * stride).round_ties_even() - 1.0).collect()
}

fn at(table: &[f64], place: f64) -> f64 {
    let place = place.clamp(0.0, (table.len() - 1) as f64);
    let (low, share) = (place as usize, place.fract());
    let high = (low + 1).min(table.len() - 1);
    (1.0 - share) * table[low] + share * table[high]
}
