//! The denoiser that samplers call: a network with guidance.

use super::{
    Error, Resolved, Result,
    encoder::{Conditions, Step},
    inputs::{Layout, Role},
    network::{Network, Opener},
    parts::Parts,
};
use crate::{
    family::Timestep,
    guidance::Guidance,
    prediction::{Prediction, Time, consistent},
    program::Program,
    sampler::{Denoiser, Sampler},
    schedule::Levels,
    text::condition::Condition,
};
use sdrun::{Shapes, Tensors};

/// What a run of the sampler has besides its state.
#[derive(Clone, Copy)]
pub(super) struct Course<'a> {
    pub(super) parts: &'a Parts,
    pub(super) request: &'a Resolved,
    pub(super) levels: &'a Levels,
    pub(super) sigmas: &'a [f64],
    pub(super) conditions: &'a Conditions,
    /// The conditions of its steps.
    pub(super) steps: &'a [Step],
    /// Latents `[channels, height, width]`.
    pub(super) shape: [usize; 3],
}

/// The denoiser of a run.
pub(super) struct Guided<'a> {
    network: Network<'a>,
    course: Course<'a>,
    prediction: Prediction,
    time: Time,
    timestep: Timestep,
    guidance: Guidance,
    layout: Layout,
    roles: Vec<(String, Role)>,
    /// The conditions in `inputs`.
    current: Vec<usize>,
    inputs: Tensors,
}

impl<'a> Guided<'a> {
    /// Loads the denoiser.
    ///
    /// A prompt and its negative prompt run as one batch. Several parts of a prompt, or guidance in only some of the steps, run one
    /// after the other, so that one engine serves all steps.
    pub(super) fn open(open: &'a Opener<'a>, course: Course<'a>) -> Result<Self> {
        let Course { parts, request, conditions, steps, shape, .. } = course;
        let Some(first) = conditions.all.first() else {
            return Err(Error::invalid("there is no prompt"));
        };
        let is_pair = |step: &Step| step.with.len() == 1 && step.without.is_some();
        let in_all = request.guidance.interval == (0.0, 1.0);
        let batch = if in_all && steps.iter().all(is_pair) { 2 } else { 1 };
        let family = parts.family;
        let layout = Layout { batch, latents: shape, pack: family.pack, factor: family.latent.factor };
        let (roles, shapes) = layout.inputs(&parts.denoiser, first, &Shapes::new())?;
        let network = open.network(&parts.denoiser, shapes)?;
        let scale = request.guidance.scale * request.sampler.guidance_factor();
        let mut guided = Guided {
            network,
            course,
            prediction: request.prediction,
            time: request.time,
            timestep: family.timestep,
            guidance: Guidance { scale, ..request.guidance },
            layout,
            roles,
            current: Vec::new(),
            inputs: Tensors::new(),
        };
        guided.fill()?;
        Ok(guided)
    }

    /// Fills the inputs that stay the same.
    fn fill(&mut self) -> Result<()> {
        for (name, role) in &self.roles {
            let count = self.network.shape(name)?.iter().product();
            let values = match role {
                Role::ImageIds => self.layout.image_ids(),
                Role::TextIds => vec![0.0; count],
                Role::Guidance => vec![self.course.request.distilled_guidance.unwrap_or(1.0) as f32; count],
                _ => continue,
            };
            self.inputs.insert(name.clone(), self.network.input(name, &values)?);
        }
        Ok(())
    }

    /// Puts conditions into the inputs.
    fn condition(&mut self, rows: &[usize]) -> Result<()> {
        if self.current == rows {
            return Ok(());
        }
        let all = &self.course.conditions.all;
        let rows_of: Vec<&Condition> = rows.iter().filter_map(|index| all.get(*index)).collect();
        for (name, role) in &self.roles {
            let of = |condition: &Condition| -> Option<Vec<f32>> {
                match role {
                    Role::Text => Some(condition.hidden.clone()),
                    Role::Pooled => condition.pooled.clone(),
                    Role::Sizes => condition.time_ids.clone(),
                    Role::Mask => {
                        condition.mask.as_ref().map(|mask| mask.iter().map(|bit| *bit as f32).collect())
                    }
                    _ => None,
                }
            };
            if let Some(values) = rows_of.iter().map(|row| of(row)).collect::<Option<Vec<_>>>() {
                self.inputs.insert(name.clone(), self.network.input(name, &values.concat())?);
            }
        }
        self.current = rows.to_vec();
        Ok(())
    }

    /// Runs the network for these conditions, one prediction for each.
    fn outputs(&mut self, rows: &[usize], latents: &[f32], time: f64) -> Result<Vec<Vec<f32>>> {
        let mut outputs = Vec::with_capacity(rows.len());
        for rows in rows.chunks(self.layout.batch) {
            self.condition(rows)?;
            for (name, role) in &self.roles {
                let values = match role {
                    Role::Latents => latents.repeat(rows.len()),
                    Role::Time => vec![time as f32; self.network.shape(name)?.iter().product()],
                    _ => continue,
                };
                self.inputs.insert(name.clone(), self.network.input(name, &values)?);
            }
            let first = self.network.outputs().first().cloned().unwrap_or_default();
            let output = self.network.run(&self.inputs, &[&first])?.pop().unwrap_or_default();
            let size = output.len() / rows.len();
            let len: usize = self.course.shape.iter().product();
            if size < len {
                let message = format!("the denoiser returned {size} numbers for {len} latents");
                return Err(Error::invalid(message));
            }
            outputs.extend(output.chunks(size).map(|one| self.layout.unpacked(one, self.course.shape)));
        }
        Ok(outputs)
    }

    /// The network's predictions for the prompt and, if guidance needs it, for the negative prompt.
    fn predict(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let Course { sigmas, steps, levels, .. } = self.course;
        let index = sigmas.iter().skip(1).take_while(|next| **next >= sigma).count();
        let Some(step) = steps.get(index).or(steps.last()) else {
            return Err(Error::invalid("there are no steps"));
        };
        let share = index as f64 / (sigmas.len() - 1).max(1) as f64;
        let without = step.without.filter(|_| self.guidance.applies(share));
        let scale = self.prediction.input_scale(sigma);
        let scaled: Vec<f32> = x.iter().map(|x| (f64::from(*x) * scale) as f32).collect();
        let time = match self.timestep {
            Timestep::Steps => self.prediction.time(sigma, levels, self.time),
            Timestep::Level => sigma,
        };
        let rows: Vec<usize> = without.into_iter().chain(step.with.iter().map(|(row, _)| *row)).collect();
        let latents = self.layout.packed(&scaled);
        let mut outputs = self.outputs(&rows, &latents, time)?;
        let without = without.map(|_| outputs.remove(0));
        let with = joined(&step.with, outputs, without.as_deref());
        Ok((with, without))
    }

    /// The clean state that a prediction stands for.
    fn clean(&self, x: &[f32], output: &[f32], sigma: f64) -> Vec<f32> {
        let (mut keep, mut change) = self.prediction.denoised(sigma);
        let Resolved { sampler, options, .. } = self.course.request;
        if *sampler == Sampler::Lcm && options.program != Program::ComfyUi {
            let step = self.course.levels.step(sigma);
            let (state, clean) = consistent(sigma, step);
            (keep, change) = (state + clean * keep, clean * change);
        }
        let clean = |(x, out): (&f32, &f32)| (keep * f64::from(*x) + change * f64::from(*out)) as f32;
        x.iter().zip(output).map(clean).collect()
    }
}

/// The prediction for a prompt of several parts: `u + Σ w (c - u)` for parts `c` and the negative prompt `u` (A1111's `AND`, after
/// Liu et al., 2022), or the weighted sum without a negative prompt.
fn joined(parts: &[(usize, f64)], mut outputs: Vec<Vec<f32>>, without: Option<&[f32]>) -> Vec<f32> {
    if let [(_, 1.0)] = parts {
        return outputs.pop().unwrap_or_default();
    }
    let zeros = vec![0.0; outputs.first().map_or(0, Vec::len)];
    let base = without.unwrap_or(&zeros);
    let mut sum: Vec<f64> = base.iter().map(|u| f64::from(*u)).collect();
    for ((_, weight), output) in parts.iter().zip(&outputs) {
        for ((sum, c), u) in sum.iter_mut().zip(output).zip(base) {
            *sum += weight * (f64::from(*c) - f64::from(*u));
        }
    }
    sum.into_iter().map(|value| value as f32).collect()
}

impl Denoiser for Guided<'_> {
    type Error = Error;

    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>> {
        let (with, without) = self.predict(x, sigma)?;
        let guided = without.map(|without| self.guidance.combine(&with, &without)).unwrap_or(with);
        Ok(self.clean(x, &guided, sigma))
    }

    fn denoise_both(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Vec<f32>)> {
        let (with, without) = self.predict(x, sigma)?;
        let guided = without.as_ref().map(|without| self.guidance.combine(&with, without));
        let without = self.clean(x, without.as_ref().unwrap_or(&with), sigma);
        Ok((self.clean(x, guided.as_ref().unwrap_or(&with), sigma), without))
    }
}
