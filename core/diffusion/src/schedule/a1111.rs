//! Levels of A1111's samplers that work on training steps (`sd_samplers_timesteps.py`). They end at a level above 0.

use super::{Levels, ramp};

/// Levels of DDIM, DDIM CFG++ and PLMS: every `⌊1000 / steps⌋`-th training step, starting at the second one. If `steps` divides 1,000,
/// this gives one step fewer than requested.
pub fn training_steps(levels: &Levels, steps: usize) -> Vec<f64> {
    let table = levels.table();
    let last = table.len() - 1;
    let stride = (table.len() / steps.max(1)).max(1);
    (0..table.len()).step_by(stride).rev().map(|step| table[(step + 1).min(last)]).collect()
}

/// Levels of UniPC, which has one step more: uniform in training steps, between which `ln ᾱ = -ln (1 + σ²)` is linear.
pub fn uni_pc(levels: &Levels, steps: usize) -> Vec<f64> {
    let log = |step: usize| levels.table()[step].hypot(1.0).ln();
    let last = levels.table().len() - 1;
    let count = training_steps(levels, steps).len();
    ramp(last as f64, 0.0, count + 1)
        .map(|place| {
            let (low, share) = (place as usize, place.fract());
            let log = (1.0 - share) * log(low) + share * log((low + 1).min(last));
            (2.0 * log).exp_m1().sqrt()
        })
        .collect()
}
