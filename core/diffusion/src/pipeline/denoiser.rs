//! The denoiser that samplers call: a network with guidance.

use super::{
    Error, Resolved, Result,
    control::{Controls, PreparedControls},
    encoder::{Conditions, Step},
    fed::{Fed, Fixed, Prepared, Run},
    inputs::{Layout, Role},
    network::Opener,
    parts::Parts,
    reference,
};
use crate::{
    family::Timestep,
    guidance::Guidance,
    prediction::{consistent, noised},
    program::Program,
    reuse::Cache,
    sampler::{Denoiser, Sampler},
    schedule::Levels,
};

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

impl Course<'_> {
    /// The conditions of a step, without the negative prompt if there is no guidance in it.
    fn step(&self, guidance: &Guidance, index: usize) -> Result<Step> {
        let Some(step) = self.steps.get(index).or(self.steps.last()) else {
            return Err(Error::invalid("there are no steps"));
        };
        let share = index as f64 / (self.sigmas.len() - 1).max(1) as f64;
        Ok(Step { without: step.without.filter(|_| guidance.applies(share)), with: step.with.clone() })
    }

    /// What the network takes for the time of a noise level.
    fn time(&self, sigma: f64) -> f64 {
        match self.parts.family.timestep {
            Timestep::Steps => self.request.prediction.time(sigma, self.levels, self.request.time),
            Timestep::Level => sigma,
        }
    }

    /// Conditions and times of the network's runs, `batch` conditions in each, as far as the sampler keeps to its levels.
    fn upcoming(&self, guidance: &Guidance, batch: usize) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        let levels = &self.sigmas[..self.sigmas.len().saturating_sub(1)];
        for (index, sigma) in levels.iter().enumerate() {
            let rows = self.step(guidance, index)?.rows();
            runs.extend(rows.chunks(batch).map(|rows| (rows.to_vec(), self.time(*sigma))));
        }
        Ok(runs)
    }
}

/// The denoiser of a run.
pub(super) struct Guided<'a> {
    network: Fed<'a>,
    controls: Controls<'a>,
    course: Course<'a>,
    guidance: Guidance,
    layout: Layout,
    output: String,
    /// What the denoiser takes beside the noisy latents, `[channels, height, width]`.
    pub(super) beside: Vec<f32>,
    /// The tokens of the pictures that the model edits.
    pub(super) reference: Vec<f32>,
    /// Outputs that later steps of the picture may reuse.
    pub(super) cache: Option<Cache>,
}

impl<'a> Guided<'a> {
    /// Loads the denoiser and the ControlNets.
    ///
    /// A prompt and its negative prompt of one length run as one batch. Several parts of a prompt, or guidance in only some of the
    /// steps, run one after the other, so that one engine serves all steps.
    pub(super) fn open(open: &'a Opener<'a>, course: Course<'a>) -> Result<Self> {
        let Course { parts, request, conditions, .. } = course;
        let (alone, layout) = layouts(parts, request, conditions, course.steps, course.shape)?;
        let batch = layout.batch;
        let scale = request.guidance.scale * request.sampler.guidance_factor();
        let guidance = Guidance { scale, ..request.guidance };
        let upcoming = course.upcoming(&guidance, batch)?;
        let controls = PreparedControls::new(open, course, alone, &upcoming)?;
        let distilled = request.distilled_guidance.unwrap_or(1.0);
        let grids = reference::grids(&request.references, parts);
        let fixed: Fixed<'_> = Box::new(move |role: Role, size: usize| match role {
            Role::ImageIds => Some(layout.image_ids(&grids)),
            Role::Guidance => Some(vec![distilled as f32; size]),
            Role::GuidanceEmbedding => Some(guidance_embedding(distilled, size / batch).repeat(batch)),
            _ => None,
        });
        let (all, residuals) = (&conditions.all, controls.residuals());
        let network = Prepared::new(open, &parts.denoiser, layout, all, &residuals, fixed, &upcoming)?;
        let (controls, network) = (controls.load()?, network.load()?);
        let output = network.network.outputs().first().cloned().unwrap_or_default();
        Ok(Guided {
            network,
            controls,
            course,
            guidance,
            layout,
            output,
            beside: Vec::new(),
            reference: Vec::new(),
            cache: None,
        })
    }

    /// Runs the network for these conditions, one prediction for each.
    fn outputs(&mut self, rows: &[usize], latents: &[f32], time: f64, index: usize) -> Result<Vec<Vec<f32>>> {
        let Course { conditions, shape, sigmas, .. } = self.course;
        let alone = Layout { latents: shape, ..self.layout };
        let mut full = self.layout.packed(&[latents, self.beside.as_slice()].concat());
        full.extend_from_slice(&self.reference);
        let latents = alone.packed(latents);
        let mut outputs = Vec::with_capacity(rows.len());
        for rows in rows.chunks(self.layout.batch) {
            if !self.course.parts.controls.is_empty() {
                let at = (index, sigmas.len() - 1);
                self.controls.apply(&mut self.network, &conditions.all, rows, &latents, time, at)?;
            }
            let mut found = self.network.run(&conditions.all, rows, &full, time, &[&self.output])?;
            let output = found.pop().unwrap_or_default();
            let size = output.len() / rows.len();
            let len: usize = shape.iter().product();
            if size < len {
                let message = format!("the denoiser returned {size} numbers for {len} latents");
                return Err(Error::invalid(message));
            }
            outputs.extend(output.chunks(size).map(|one| alone.unpacked(one)));
        }
        Ok(outputs)
    }

    /// The network's predictions for the prompt and, if guidance needs it, for the negative prompt.
    fn predict(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let course = self.course;
        let Course { request, sigmas, .. } = course;
        let index = sigmas.iter().skip(1).take_while(|next| **next >= sigma).count();
        let step = course.step(&self.guidance, index)?;
        let scale = request.prediction.input_scale(sigma);
        let scaled: Vec<f32> = x.iter().map(|x| (f64::from(*x) * scale) as f32).collect();
        let (time, rows) = (course.time(sigma), step.rows());
        let place = (index, sigmas.len() - 1);
        let reused = self.cache.as_mut().and_then(|cache| cache.outputs(place, &rows, &scaled));
        let mut outputs = match reused {
            Some(outputs) => outputs,
            None => {
                let outputs = self.outputs(&rows, &scaled, time, index)?;
                if let Some(cache) = &mut self.cache {
                    cache.computed(place, &rows, &scaled, &outputs);
                }
                outputs
            }
        };
        let without = step.without.map(|_| outputs.remove(0));
        let with = joined(&step.with, outputs, without.as_deref());
        Ok((with, without))
    }

    /// The clean state that a prediction stands for.
    fn clean(&self, x: &[f32], output: &[f32], sigma: f64) -> Vec<f32> {
        let Resolved { sampler, options, prediction, .. } = self.course.request;
        let (mut keep, mut change) = prediction.denoised(sigma);
        if *sampler == Sampler::Lcm && options.program != Program::ComfyUi {
            let step = self.course.levels.step(sigma);
            let (state, clean) = consistent(sigma, step);
            (keep, change) = (state + clean * keep, clean * change);
        }
        let clean = |(x, out): (&f32, &f32)| (keep * f64::from(*x) + change * f64::from(*out)) as f32;
        x.iter().zip(output).map(clean).collect()
    }
}

/// Sizes of the inputs of ControlNets and of the denoiser.
pub(super) fn layouts(
    parts: &Parts,
    request: &Resolved,
    conditions: &Conditions,
    steps: &[Step],
    shape: [usize; 3],
) -> Result<(Layout, Layout)> {
    let Some(first) = conditions.all.first() else {
        return Err(Error::invalid("there is no prompt"));
    };
    let is_pair = |step: &Step| step.with.len() == 1 && step.without.is_some();
    let in_all = request.guidance.interval == (0.0, 1.0);
    let is_even = conditions.all.iter().all(|condition| condition.places == first.places);
    let batch = if in_all && is_even && steps.iter().all(is_pair) { 2 } else { 1 };
    let family = parts.family;
    let [channels, height, width] = shape;
    let references = reference::grids(&request.references, parts).iter().map(reference::Grid::len).sum();
    let alone = Layout { batch, latents: shape, pack: family.pack, factor: family.latent.factor, references };
    let more = family.beside.channels(&family.latent);
    Ok((alone, Layout { latents: [channels + more, height, width], ..alone }))
}

/// A guidance scale as `width` sines and cosines (diffusers' `get_guidance_scale_embedding` of the scale less 1).
fn guidance_embedding(scale: f64, width: usize) -> Vec<f32> {
    let half = width / 2;
    let fall = 10_000f64.ln() / (half.max(2) - 1) as f64;
    let angles = || (0..half).map(|at| (scale - 1.0) * 1000.0 * (-fall * at as f64).exp());
    let mut out: Vec<f32> =
        angles().map(f64::sin).chain(angles().map(f64::cos)).map(|value| value as f32).collect();
    out.resize(width, 0.0);
    out
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

/// A denoiser that keeps what is not under a mask (ComfyUI's `KSamplerX0Inpaint`): before each call these numbers become the clean
/// state with the start noise at the level of the step, and after it the clean state. diffusers does the same after each step, so its
/// first call sees the start noise alone.
pub(super) struct Kept<'a, D> {
    pub(super) inner: &'a mut D,
    pub(super) levels: &'a Levels,
    /// For each number of a state, the share to draw anew; `None` is all.
    pub(super) mask: Option<&'a [f32]>,
    pub(super) clean: &'a [f32],
    pub(super) noise: &'a [f32],
    /// Whether the first call keeps nothing.
    pub(super) late: bool,
}

impl<D: Denoiser> Kept<'_, D> {
    fn before(&mut self, mask: &[f32], x: &[f32], sigma: f64) -> Vec<f32> {
        if std::mem::take(&mut self.late) {
            return x.to_vec();
        }
        let kept = noised(self.levels.space(), sigma, false, self.clean, self.noise);
        mixed(mask, x, &kept)
    }
}

/// `new` where the mask is 1, `kept` where it is 0.
fn mixed(mask: &[f32], new: &[f32], kept: &[f32]) -> Vec<f32> {
    let mix = |((new, kept), share): ((&f32, &f32), &f32)| share * new + (1.0 - share) * kept;
    new.iter().zip(kept).zip(mask).map(mix).collect()
}

impl<D: Denoiser> Denoiser for Kept<'_, D> {
    type Error = D::Error;

    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, D::Error> {
        let Some(mask) = self.mask else { return self.inner.denoise(x, sigma) };
        let x = self.before(mask, x, sigma);
        let new = self.inner.denoise(&x, sigma)?;
        Ok(mixed(mask, &new, self.clean))
    }

    fn denoise_both(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Vec<f32>), D::Error> {
        let Some(mask) = self.mask else { return self.inner.denoise_both(x, sigma) };
        let x = self.before(mask, x, sigma);
        let (new, without) = self.inner.denoise_both(&x, sigma)?;
        Ok((mixed(mask, &new, self.clean), mixed(mask, &without, self.clean)))
    }
}
