//! The denoiser that samplers call: a network with guidance.

use super::{
    Error, Event, Part, Resolved, Result, cancelled,
    encoder::Conditions,
    network::{Network, Opener},
};
use crate::{
    guidance::Guidance,
    prediction::{Prediction, Time},
    sampler::Denoiser,
    schedule::Levels,
    text::condition::Condition,
};
use sdrun::{Shapes, Tensors, abi::Host};

/// Opens the denoiser for latents of `shape`. If guidance needs the negative prompt, each run makes both predictions.
pub(super) fn open(
    open: &Opener<'_>,
    part: &Part,
    conditions: &Conditions,
    [channels, height, width]: [usize; 3],
    event: &mut dyn FnMut(Event<'_>),
) -> Result<Network> {
    let batch = if conditions.steps.iter().any(|(_, without)| without.is_some()) { 2 } else { 1 };
    let Some(first) = conditions.all.first() else {
        return Err(Error::invalid("there is no prompt"));
    };
    let mut shapes = Shapes::from([
        ("sample".into(), vec![batch, channels, height, width]),
        ("encoder_hidden_states".into(), vec![batch, first.places, first.width()]),
    ]);
    for (spec, dims) in part.model.inputs() {
        // Some graphs take one number, others a list of one.
        if spec.name == "timestep" && dims.len() == 1 {
            shapes.insert("timestep".into(), vec![1]);
        }
    }
    if let Some(pooled) = &first.pooled {
        shapes.insert("text_embeds".into(), vec![batch, pooled.len()]);
    }
    if let Some(ids) = &first.time_ids {
        shapes.insert("time_ids".into(), vec![batch, ids.len()]);
    }
    open.network(part, shapes, event)
}

/// The denoiser of a run.
pub(super) struct Guided<'a> {
    network: Network,
    levels: &'a Levels,
    sigmas: &'a [f64],
    prediction: Prediction,
    time: Time,
    guidance: Guidance,
    conditions: &'a Conditions,
    /// The conditions that are in `inputs`, as in [`Conditions::steps`].
    current: Option<(usize, Option<usize>)>,
    inputs: Tensors,
    host: &'a dyn Host,
}

impl<'a> Guided<'a> {
    pub(super) fn new(
        network: Network,
        conditions: &'a Conditions,
        request: &Resolved,
        levels: &'a Levels,
        sigmas: &'a [f64],
        host: &'a dyn Host,
    ) -> Self {
        Guided {
            network,
            levels,
            sigmas,
            prediction: request.prediction,
            time: request.time,
            guidance: Guidance {
                scale: request.guidance.scale * request.sampler.guidance_factor(),
                ..request.guidance
            },
            conditions,
            current: None,
            inputs: Tensors::new(),
            host,
        }
    }

    /// Puts the conditions of the step at level `sigma` into the inputs, the negative prompt first, as diffusers does. Returns whether
    /// there is a negative prompt.
    fn condition(&mut self, sigma: f64) -> Result<bool> {
        let step = self.sigmas.iter().skip(1).take_while(|next| **next >= sigma).count();
        let (with, without) = self
            .conditions
            .steps
            .get(step)
            .or(self.conditions.steps.last())
            .copied()
            .ok_or_else(|| Error::invalid("there are no steps"))?;
        if self.current == Some((with, without)) {
            return Ok(without.is_some());
        }
        let rows: Vec<&Condition> =
            without.into_iter().chain([with]).filter_map(|index| self.conditions.all.get(index)).collect();
        let joined = |take: &dyn Fn(&Condition) -> Option<&[f32]>| -> Option<Vec<f32>> {
            rows.iter().map(|row| take(row)).collect::<Option<Vec<_>>>().map(|rows| rows.concat())
        };
        let tensors: [(&str, Option<Vec<f32>>); 3] = [
            ("encoder_hidden_states", joined(&|row| Some(&row.hidden))),
            ("text_embeds", joined(&|row| row.pooled.as_deref())),
            ("time_ids", joined(&|row| row.time_ids.as_deref())),
        ];
        for (name, values) in tensors {
            if let Some(values) = values {
                self.inputs.insert(name.into(), self.network.input(name, &values)?);
            }
        }
        self.current = Some((with, without));
        Ok(without.is_some())
    }

    /// The network's predictions for the prompt and, if guidance needs it, for the negative prompt.
    fn predict(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        cancelled(self.host)?;
        let both = self.condition(sigma)?;
        let scale = self.prediction.input_scale(sigma);
        let mut sample: Vec<f32> = x.iter().map(|x| (f64::from(*x) * scale) as f32).collect();
        if both {
            sample.extend_from_within(..);
        }
        let time = self.prediction.time(sigma, self.levels, self.time) as f32;
        self.inputs.insert("sample".into(), self.network.input("sample", &sample)?);
        self.inputs.insert("timestep".into(), self.network.input("timestep", &[time])?);
        let mut output =
            self.network.run(&self.inputs, &["out_sample"], self.host)?.pop().unwrap_or_default();
        if output.len() != sample.len() {
            let message =
                format!("the denoiser returned {} numbers for {} latents", output.len(), sample.len());
            return Err(Error::invalid(message));
        }
        if !both {
            return Ok((output, None));
        }
        let with = output.split_off(x.len());
        Ok((with, Some(output)))
    }

    /// The clean state that a prediction stands for.
    fn clean(&self, x: &[f32], output: &[f32], sigma: f64) -> Vec<f32> {
        let (keep, change) = self.prediction.denoised(sigma);
        let clean = |(x, out): (&f32, &f32)| (keep * f64::from(*x) + change * f64::from(*out)) as f32;
        x.iter().zip(output).map(clean).collect()
    }
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
