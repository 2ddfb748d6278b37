//! ControlNets: networks that make a denoiser follow a picture.

use super::{
    Error, Result,
    denoiser::Course,
    fed::{Fed, Fixed, Prepared, Run},
    inputs::{Layout, Role},
    network::Opener,
};
use crate::{latent::planes, picture::Fit, text::condition::Condition};
use image::RgbImage;
use sdrun::{Shapes, abi};

/// A picture that a ControlNet follows.
#[derive(Clone, Debug, PartialEq)]
pub struct Control {
    /// The picture as the network takes it, of the request's size: edges, depth, or what it was trained on.
    pub hint: RgbImage,
    /// How strongly to follow it; usually 1.
    pub strength: f64,
    /// In which part of the steps to follow it, as shares from 0 to 1.
    pub interval: (f64, f64),
}

impl Control {
    /// Whether it acts in step `index` of `steps` (diffusers' rule).
    fn acts(&self, index: usize, steps: usize) -> bool {
        let steps = steps.max(1) as f64;
        let (start, end) = self.interval;
        self.strength != 0.0 && index as f64 / steps >= start && (index + 1) as f64 / steps <= end
    }
}

/// The ControlNets of a run before they are loaded.
pub(super) struct PreparedControls<'a> {
    all: Vec<(Prepared<'a>, &'a Control)>,
    /// Outputs of a ControlNet, and their shapes.
    outputs: Vec<(String, Vec<usize>)>,
}

/// The ControlNets of a run.
pub(super) struct Controls<'a> {
    all: Vec<(Fed<'a>, &'a Control)>,
    /// Outputs of a ControlNet, and their shapes.
    outputs: Vec<(String, Vec<usize>)>,
}

impl<'a> PreparedControls<'a> {
    /// Computes what the runs in `upcoming` share.
    pub(super) fn new(
        open: &'a Opener<'a>,
        course: Course<'a>,
        layout: Layout,
        upcoming: &[Run],
    ) -> Result<Self> {
        let (mut all, mut outputs) = (Vec::new(), Vec::new());
        for (part, control) in course.parts.controls.iter().zip(&course.request.controls) {
            let [_, height, width] = layout.latents.map(|cells| (cells * layout.factor) as u32);
            let hint = Fit::Stretch.picture(&control.hint, width, height)?;
            let hint: Vec<f32> = planes(&hint).map(|byte| f32::from(byte) / 255.0).collect();
            let fixed: Fixed<'_> = Box::new(move |role: Role, size: usize| match role {
                Role::Hint => Some(hint.repeat(size / hint.len().max(1))),
                Role::Strength => Some(vec![control.strength as f32; size]),
                _ => None,
            });
            let all_conditions = &course.conditions.all;
            let prepared =
                Prepared::new(open, part, layout, all_conditions, &Shapes::new(), fixed, upcoming)?;
            let shapes = prepared.outputs.iter().map(|(name, shape)| Some((name.clone(), shape.clone()?)));
            outputs = shapes.collect::<Option<_>>().ok_or_else(|| {
                let message = "its outputs have no fixed shapes";
                Error::of(&part.name)(abi::Error::unsupported(message).into())
            })?;
            all.push((prepared, control));
        }
        Ok(PreparedControls { all, outputs })
    }

    /// Shapes of the denoiser's inputs that the ControlNets fill.
    pub(super) fn residuals(&self) -> Shapes {
        self.outputs.iter().map(|(name, shape)| (residual(name), shape.clone())).collect()
    }

    /// Loads them.
    pub(super) fn load(self) -> Result<Controls<'a>> {
        let all = self.all.into_iter().map(|(prepared, control)| Ok((prepared.load()?, control)));
        Ok(Controls { all: all.collect::<Result<_>>()?, outputs: self.outputs })
    }
}

impl Controls<'_> {
    /// Runs those that act in a step, and puts the sum of their outputs into the denoiser's inputs.
    pub(super) fn apply(
        &mut self,
        to: &mut Fed<'_>,
        all: &[Condition],
        rows: &[usize],
        latents: &[f32],
        time: f64,
        (index, steps): (usize, usize),
    ) -> Result<()> {
        let names: Vec<&str> = self.outputs.iter().map(|(name, _)| name.as_str()).collect();
        let zeros = |(_, shape): &(String, Vec<usize>)| vec![0.0f32; shape.iter().product()];
        let mut sums: Vec<Vec<f32>> = self.outputs.iter().map(zeros).collect();
        for (fed, control) in &mut self.all {
            if control.acts(index, steps) {
                let found = fed.run(all, rows, latents, time, &names)?;
                for (sum, found) in sums.iter_mut().flatten().zip(found.iter().flatten()) {
                    *sum += found;
                }
            }
        }
        for ((name, _), sum) in self.outputs.iter().zip(&sums) {
            to.set_named(&residual(name), sum)?;
        }
        Ok(())
    }
}

/// The denoiser's input for an output of a ControlNet.
pub(super) fn residual(output: &str) -> String {
    format!("{output}_res")
}

#[cfg(test)]
mod tests {
    use super::Control;
    use image::RgbImage;

    #[test]
    fn a_control_acts_in_its_steps() {
        let control = Control { hint: RgbImage::new(1, 1), strength: 1.0, interval: (0.25, 0.75) };
        let steps: Vec<bool> = (0..4).map(|index| control.acts(index, 4)).collect();
        assert_eq!(steps, [false, true, true, false]);
        assert!(!Control { strength: 0.0, interval: (0.0, 1.0), ..control }.acts(0, 4));
    }
}
