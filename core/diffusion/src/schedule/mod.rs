//! Schedules: the noise levels of the steps.
//!
//! A schedule lists levels from the highest down, followed by 0: `steps + 1` numbers for `steps` steps.

pub mod a1111;
mod beta;
pub mod diffusers;
pub mod flow;
mod kind;
mod levels;
mod shapes;
mod tables;

pub use kind::Schedule;
pub use levels::{Betas, Levels};

/// Levels by equation 5 of Karras et al. (2022) with ρ = 7, without the final 0.
pub fn karras(min: f64, max: f64, steps: usize) -> Vec<f64> {
    ramp(max.powf(1.0 / 7.0), min.powf(1.0 / 7.0), steps).map(|root| root.powi(7)).collect()
}

/// k-diffusion's "polyexponential" levels, without the final 0. They are uniform in `ln σ` for ρ = 1.
pub fn polyexponential(min: f64, max: f64, rho: f64, steps: usize) -> Vec<f64> {
    ramp(1.0, 0.0, steps).map(|share| (min.ln() + share.powf(rho) * (max.ln() - min.ln())).exp()).collect()
}

/// `count` numbers from `first` to `last`; a single one is `first`.
fn ramp(first: f64, last: f64, count: usize) -> impl Iterator<Item = f64> {
    let share = move |i: usize| if count > 1 { i as f64 / (count - 1) as f64 } else { 0.0 };
    (0..count).map(move |i| first + share(i) * (last - first))
}

#[cfg(test)]
mod tests;
