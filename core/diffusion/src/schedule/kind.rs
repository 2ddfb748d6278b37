//! The list of schedules.

use super::{
    Levels, beta,
    diffusers::{self, Spacing},
    flow, karras, ramp, shapes, tables,
};
use crate::program::Program;

crate::list! {
    /// How levels are spaced.
    Schedule {
    /// Uniform in training steps, including the lowest level ("normal", A1111's "Uniform", sd.cpp's "discrete").
    Normal,
    /// Uniform in training steps, with 0 instead of the lowest level.
    SgmUniform,
    /// Uniform in table entries, starting at the highest. In diffusers' flow models uniform in σ before the shift.
    Simple,
    /// Uniform in table entries, counted from the second lowest.
    DdimUniform,
    /// Uniform in `σ^(1/7)` (Karras et al., 2022).
    Karras,
    /// Uniform in `ln σ`.
    Exponential,
    /// Quantiles of the beta distribution with α = β = 0.6 (Lee et al., 2024): of training steps in ComfyUI, of σ in A1111 and
    /// diffusers.
    Beta,
    /// Uniform in `atan σ`. A1111's form ends at the lowest level.
    KlOptimal,
    /// "Align your steps" (Sabour et al., 2024) for Stable Diffusion 1.
    AlignYourSteps,
    /// The same for SDXL.
    AlignYourStepsXl,
    /// The same for Stable Video Diffusion.
    AlignYourStepsVideo,
    /// Half of the steps fall linearly to 97.5 % of the highest level; the others fall quadratically.
    LinearQuadratic,
    /// Levels with a Laplace distribution of `ln σ` around 0 (ComfyUI's `LaplaceScheduler`).
    Laplace,
    /// Training steps along `u² (3 - 2 u)` (stable-diffusion.cpp).
    Smoothstep,
    /// Two arctangents that meet halfway (RES4LYF, in stable-diffusion.cpp's form).
    BongTangent,
    /// Quantiles of a logit-normal distribution, for flow models (Ideogram 4, in stable-diffusion.cpp's form).
    LogitNormal,
    /// Training steps 999, 899, and so on (ComfyUI's `SDTurboScheduler`); up to ten.
    Turbo,
    /// Every twentieth training step, thinned out (latent consistency models).
    Lcm,
    /// Times of SCM (Sana Sprint), as levels of a flow model.
    Scm,
    /// "Optimal steps" (Pei et al., 2025) for Flux.
    OptimalStepsFlux,
    /// The same for Wan.
    OptimalStepsWan,
    /// The same for Chroma.
    OptimalStepsChroma,
    /// Flux dev, shifted by the size of the picture.
    Flux,
    /// Flux.2, shifted by the size of the picture and the number of steps.
    Flux2,
    /// diffusers' spacing of flow models for solvers (`use_flow_sigmas`, as Sana sets it): uniform below the highest training step.
    Sana,
    /// diffusers' spacing "linspace". Flow models such as SD 3 shift it twice.
    Linspace,
    /// diffusers' spacing "leading" with an offset of 1, as Stable Diffusion sets it.
    Leading,
    /// diffusers' spacing "trailing".
    Trailing,
}
}

impl Schedule {
    /// Returns the levels for `steps` steps (at least 1), by the rules of `program` where programs differ.
    ///
    /// Where neighbouring levels coincide there are fewer. [`DdimUniform`](Self::DdimUniform) has one more if `steps` does not divide
    /// the table. `tokens` is the number of 16x16 patches in the picture. Only [`Flux`](Self::Flux), [`Flux2`](Self::Flux2) and
    /// [`LogitNormal`](Self::LogitNormal) depend on it.
    pub fn sigmas(self, levels: &Levels, steps: usize, program: Program, tokens: usize) -> Vec<f64> {
        let steps = steps.max(1);
        let (min, max, table) = (levels.min(), levels.max(), levels.table());
        let training_steps = |count| ramp(levels.step(max), levels.step(min), count);
        let mut sigmas: Vec<f64> = match self {
            Self::Normal => training_steps(steps).map(|step| levels.sigma(step)).collect(),
            Self::SgmUniform => {
                training_steps(steps + 1).take(steps).map(|step| levels.sigma(step)).collect()
            }
            Self::Simple if program == Program::Diffusers && levels.shift().is_some() => {
                (0..steps).map(|i| levels.sigma(1000.0 * (1.0 - i as f64 / steps as f64))).collect()
            }
            Self::Simple => {
                let stride = table.len() as f64 / steps as f64;
                (0..steps).map(|i| table[table.len() - 1 - (i as f64 * stride) as usize]).collect()
            }
            Self::DdimUniform => {
                let stride = (table.len() / steps).max(1);
                let mut chosen: Vec<f64> = table.iter().skip(1).step_by(stride).copied().collect();
                chosen.reverse();
                chosen
            }
            Self::Karras => karras(min, max, steps),
            Self::Exponential => ramp(max.ln(), min.ln(), steps).map(f64::exp).collect(),
            Self::Beta if program == Program::ComfyUi => {
                let share = |i| beta::quantile(1.0 - i as f64 / steps as f64, 0.6, 0.6);
                entries(table, (0..steps).map(share))
            }
            Self::Beta => {
                ramp(1.0, 0.0, steps).map(|p| min + beta::quantile(p, 0.6, 0.6) * (max - min)).collect()
            }
            Self::KlOptimal if program == Program::A1111 => {
                return ramp(max.atan(), min.atan(), steps + 1).map(f64::tan).collect();
            }
            Self::KlOptimal => ramp(max.atan(), min.atan(), steps).map(f64::tan).collect(),
            Self::AlignYourSteps if program == Program::A1111 => {
                tables::stretched(&tables::ALIGNED_ROUNDED, steps)
            }
            Self::AlignYourStepsXl if program == Program::A1111 => {
                tables::stretched(&tables::ALIGNED_XL_ROUNDED, steps)
            }
            Self::AlignYourSteps => tables::without_end(&tables::ALIGNED, steps),
            Self::AlignYourStepsXl => tables::without_end(&tables::ALIGNED_XL, steps),
            Self::AlignYourStepsVideo => tables::without_end(&tables::ALIGNED_VIDEO, steps),
            Self::OptimalStepsFlux => tables::without_end(&tables::OPTIMAL_FLUX, steps),
            Self::OptimalStepsWan => tables::without_end(&tables::OPTIMAL_WAN, steps),
            Self::OptimalStepsChroma => tables::without_end(&tables::OPTIMAL_CHROMA, steps),
            Self::LinearQuadratic => shapes::linear_quadratic(max, steps),
            Self::Laplace => shapes::laplace(min, max, steps),
            Self::Smoothstep => {
                let rest = |i| 1.0 - i as f64 / steps as f64;
                entries(table, (0..steps).map(|i| rest(i) * rest(i) * (3.0 - 2.0 * rest(i))))
            }
            Self::BongTangent => shapes::bong_tangent(min, max, steps),
            Self::LogitNormal => flow::logit_normal(steps, tokens),
            Self::Turbo => (0..steps.min(10)).map(|i| table[(10 - i) * table.len() / 10 - 1]).collect(),
            Self::Lcm => (0..steps).map(|i| table[(50 - i * 50 / steps) * table.len() / 50 - 1]).collect(),
            Self::Scm => flow::scm(steps),
            Self::Flux => return flow::flux(steps, flow::flux_shift(tokens)),
            Self::Flux2 => return flow::flux(steps, flow::flux2_shift(tokens, steps)),
            Self::Sana => return flow::sana(steps, levels.shift().unwrap_or(1.0)),
            Self::Linspace if levels.shift().is_some() => {
                return flow::stable_diffusion_3(steps, levels.shift().unwrap_or(1.0));
            }
            Self::Linspace => diffusers::sigmas(levels, Spacing::Linspace, steps),
            Self::Leading => diffusers::sigmas(levels, Spacing::Leading { offset: 1 }, steps),
            Self::Trailing => diffusers::sigmas(levels, Spacing::Trailing, steps),
        };
        sigmas.push(0.0);
        sigmas.dedup();
        sigmas
    }
}

/// The entries of a table nearest to shares of its length.
fn entries(table: &[f64], shares: impl Iterator<Item = f64>) -> Vec<f64> {
    let last = table.len() - 1;
    shares.map(|share| table[((share * last as f64).round_ties_even() as usize).min(last)]).collect()
}
