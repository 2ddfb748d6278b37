//! Schedules published as tables of levels for one number of steps.

use super::ramp;

/// "Align your steps" (Sabour et al., 2024) for ten steps of Stable Diffusion 1.
pub(super) const ALIGNED: [f64; 11] = [
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
pub(super) const ALIGNED_XL: [f64; 11] = [
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

/// The same for Stable Video Diffusion.
pub(super) const ALIGNED_VIDEO: [f64; 11] =
    [700.0, 54.5, 15.886, 7.977, 4.248, 1.789, 0.981, 0.403, 0.173, 0.034, 0.002];

/// A1111's rounded table for Stable Diffusion 1.
pub(super) const ALIGNED_ROUNDED: [f64; 11] =
    [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029];

/// The same for SDXL.
pub(super) const ALIGNED_XL_ROUNDED: [f64; 11] =
    [14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029];

/// "Optimal steps" (Pei et al., 2025; ComfyUI's `OptimalStepsScheduler`) for Flux.
pub(super) const OPTIMAL_FLUX: [f64; 11] =
    [0.9968, 0.9886, 0.9819, 0.975, 0.966, 0.9471, 0.9158, 0.8287, 0.5512, 0.2808, 0.001];

/// The same for Wan.
pub(super) const OPTIMAL_WAN: [f64; 21] = [
    1.0, 0.997, 0.995, 0.993, 0.991, 0.989, 0.987, 0.985, 0.98, 0.975, 0.973, 0.968, 0.96, 0.946, 0.927,
    0.902, 0.864, 0.776, 0.539, 0.208, 0.001,
];

/// The same for Chroma.
pub(super) const OPTIMAL_CHROMA: [f64; 41] = [
    0.992, 0.99, 0.988, 0.985, 0.982, 0.978, 0.973, 0.968, 0.961, 0.953, 0.943, 0.931, 0.917, 0.9, 0.881,
    0.858, 0.832, 0.802, 0.769, 0.731, 0.69, 0.646, 0.599, 0.55, 0.501, 0.451, 0.402, 0.355, 0.311, 0.27,
    0.232, 0.199, 0.169, 0.143, 0.12, 0.101, 0.084, 0.07, 0.058, 0.048, 0.001,
];

/// Interpolates a table linearly in `ln σ` to `count` levels.
pub(super) fn stretched(table: &[f64], count: usize) -> Vec<f64> {
    let pieces = table.len() - 1;
    let level = |place: f64| {
        let low = (place as usize).min(pieces - 1);
        let share = place - low as f64;
        ((1.0 - share) * table[low].ln() + share * table[low + 1].ln()).exp()
    };
    ramp(0.0, pieces as f64, count).map(level).collect()
}

/// Interpolates a table to one level more than there are steps, and leaves out the last, which 0 replaces.
pub(super) fn without_end(table: &[f64], steps: usize) -> Vec<f64> {
    let mut levels = stretched(table, steps + 1);
    levels.pop();
    levels
}
