//! What a denoiser predicts, with the evidence.

use super::{Checkpoint, container::Container, family::Family};
use crate::{
    Component, StateDict,
    convert::{convert, is_convertible},
};
use sdrun_abi::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a denoiser predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parameterisation {
    /// The noise.
    Epsilon,
    /// The velocity of the diffusion, α·noise − σ·sample (v-prediction).
    Velocity,
    /// The sample without noise.
    Sample,
    /// The residual of an EDM (Playground 2.5).
    Edm,
    /// The velocity of an EDM (CosXL).
    EdmVelocity,
    /// The velocity of a straight path from sample to noise (flow matching).
    Flow,
    /// The velocity of a trigonometric path (Sana Sprint).
    TrigFlow,
}

impl fmt::Display for Parameterisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Parameterisation::Epsilon => "epsilon-prediction",
            Parameterisation::Velocity => "v-prediction",
            Parameterisation::Sample => "sample-prediction",
            Parameterisation::Edm => "EDM",
            Parameterisation::EdmVelocity => "EDM v-prediction",
            Parameterisation::Flow => "flow matching",
            Parameterisation::TrigFlow => "trigonometric flow",
        })
    }
}

/// The constants of an EDM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Edm {
    /// Standard deviation of the data.
    pub sigma_data: f64,
    /// Smallest noise level.
    pub sigma_min: f64,
    /// Largest noise level.
    pub sigma_max: f64,
    /// Means of the latents' channels, if the file has them.
    pub latent_mean: Option<Vec<f32>>,
    /// Standard deviations of the latents' channels, if the file has them.
    pub latent_std: Option<Vec<f32>>,
}

/// What the denoiser of a checkpoint predicts, if the checkpoint tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// `None` without evidence, or where evidence is contradictory.
    pub kind: Option<Parameterisation>,
    /// Whether the noise schedule ends in pure noise (zero terminal SNR). `None` without evidence.
    pub zero_terminal_snr: Option<bool>,
    /// The constants of an EDM, if it is one.
    pub edm: Option<Edm>,
    /// The evidence.
    pub evidence: Vec<String>,
}

impl Prediction {
    /// Whether the denoiser predicts velocities (v-prediction, also of an EDM); `None` if unknown.
    pub fn is_velocity(&self) -> Option<bool> {
        self.kind.map(|kind| matches!(kind, Parameterisation::Velocity | Parameterisation::EdmVelocity))
    }

    /// Evidence in this order: models of only one kind; statements (marker tensors, a pipeline's scheduler, metadata), which
    /// must agree; the values of SD 2.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        family: Option<Family>,
        channels: Option<usize>,
    ) -> Prediction {
        use Parameterisation::Flow;
        let mut found = Prediction::default();
        if !checkpoint.components().contains(&Component::Denoiser) {
            return found;
        }
        let statements = found.statements(checkpoint);
        let flow = match family {
            Some(Family::Sd3 | Family::Sd35 | Family::Flux | Family::Chroma) => true,
            Some(Family::Sana) => statements.is_empty(),
            _ => false,
        };
        if let (true, Some(family)) = (flow, family) {
            found.kind = Some(Flow);
            found.evidence = vec![format!("{family} is trained with flow matching")];
        } else if let Some((kind, _)) = statements.first() {
            found.kind = statements.iter().all(|(other, _)| other == kind).then_some(*kind);
            found.evidence.extend(statements.into_iter().map(|(_, what)| what));
        } else if family == Some(Family::PixArt) {
            found.kind = Some(Parameterisation::Epsilon);
            found.evidence.push("PixArt is trained to predict the noise".into());
        } else if family == Some(Family::Sd2) && channels == Some(4) {
            found.by_values(checkpoint);
        }
        if !matches!(found.kind, Some(Parameterisation::Edm | Parameterisation::EdmVelocity)) {
            found.edm = None;
        }
        found
    }

    /// Reads marker tensors, the scheduler and the metadata. Fills in the constants they give.
    ///
    /// Sources: `model_type` of ComfyUI's `SDXL` (`comfy/supported_models.py`) for the markers and the constants of
    /// Playground and CosXL; ModelSpec 1.0 for the metadata; `scheduler_config.json` of diffusers.
    fn statements(&mut self, checkpoint: &Checkpoint) -> Vec<(Parameterisation, String)> {
        use Parameterisation::{Edm as Plain, EdmVelocity, Velocity};
        let mut said = Vec::new();
        let marker = |key: &str| {
            checkpoint.sources.iter().any(|source| source.layout.ignored.iter().any(|k| k == key))
        };
        let values = |key: &str| checkpoint.sources.iter().find_map(|source| values(&*source.container, key));
        let number = |key: &str| values(key).and_then(|list| list.first().copied()).map(f64::from);
        if marker("edm_mean") && marker("edm_std") {
            let (latent_mean, latent_std) = (values("edm_mean"), values("edm_std"));
            self.edm =
                Some(Edm { sigma_data: 0.5, sigma_min: 0.002, sigma_max: 80.0, latent_mean, latent_std });
            said.push((Plain, "the tensors edm_mean and edm_std (Playground 2.5)".into()));
        } else if marker("edm_vpred.sigma_max") {
            let sigma = |key, default| number(key).filter(|v| *v > 0.0).unwrap_or(default);
            let (sigma_min, sigma_max) =
                (sigma("edm_vpred.sigma_min", 0.002), sigma("edm_vpred.sigma_max", 120.0));
            self.edm =
                Some(Edm { sigma_data: 1.0, sigma_min, sigma_max, latent_mean: None, latent_std: None });
            said.push((EdmVelocity, "the tensor edm_vpred.sigma_max (CosXL)".into()));
        } else if marker("v_pred") {
            said.push((Velocity, "the tensor v_pred".into()));
        }
        if marker("ztsnr") {
            self.zero_terminal_snr = Some(true);
            self.evidence.push("the tensor ztsnr".into());
        }
        said.extend(self.scheduled(checkpoint));
        let metadata = checkpoint.metadata();
        for key in ["modelspec.prediction_type", "modelspec.predict_key"] {
            if let Some(value) = metadata.get(key)
                && let Some(kind) = kind_of(value)
            {
                said.push((kind, format!("{key} in the metadata: {value}")));
            }
        }
        said
    }

    fn scheduled(&mut self, checkpoint: &Checkpoint) -> Option<(Parameterisation, String)> {
        let entry = |key: &str| checkpoint.scheduler.get(key);
        if let Some(rescaled) = entry("rescale_betas_zero_snr").and_then(serde_json::Value::as_bool) {
            self.zero_terminal_snr = Some(rescaled);
            self.evidence.push(format!("rescale_betas_zero_snr of the scheduler: {rescaled}"));
        }
        let text = |key: &str| entry(key).and_then(serde_json::Value::as_str);
        let class = text("_class_name").unwrap_or_default();
        let stated = text("prediction_type");
        if class.starts_with("EDM") {
            let number =
                |key: &str, default| entry(key).and_then(serde_json::Value::as_f64).unwrap_or(default);
            let edm = self.edm.get_or_insert(Edm {
                sigma_data: 0.5,
                sigma_min: 0.002,
                sigma_max: 80.0,
                latent_mean: None,
                latent_std: None,
            });
            edm.sigma_data = number("sigma_data", edm.sigma_data);
            edm.sigma_min = number("sigma_min", edm.sigma_min);
            edm.sigma_max = number("sigma_max", edm.sigma_max);
            let velocity = stated.and_then(kind_of) == Some(Parameterisation::Velocity);
            let kind = if velocity { Parameterisation::EdmVelocity } else { Parameterisation::Edm };
            return Some((kind, format!("the scheduler is {class}")));
        }
        if class.starts_with("FlowMatch") {
            return Some((Parameterisation::Flow, format!("the scheduler is {class}")));
        }
        let stated = stated?;
        Some((kind_of(stated)?, format!("prediction_type of the scheduler: {stated}")))
    }

    /// SD 2's two kinds have the same structure. ComfyUI tells them apart by this bias (`SD20.model_type` in
    /// `comfy/supported_models.py`): its standard deviation is larger where velocities are predicted.
    fn by_values(&mut self, checkpoint: &Checkpoint) {
        const BIAS: &str = "up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias";
        const LIMIT: f64 = 0.09;
        let Ok(state) = checkpoint.component(Component::Denoiser) else { return };
        let Some(values) = floats(&*state, BIAS).filter(|values| !values.is_empty()) else { return };
        let mean = |values: &mut dyn Iterator<Item = f64>, count: usize| values.sum::<f64>() / count as f64;
        let average = mean(&mut values.iter().map(|v| f64::from(*v)), values.len());
        let variance = mean(&mut values.iter().map(|v| (f64::from(*v) - average).powi(2)), values.len());
        let deviation = variance.sqrt();
        let velocity = deviation > LIMIT;
        self.kind = Some(if velocity { Parameterisation::Velocity } else { Parameterisation::Epsilon });
        let side = if velocity { "above" } else { "not above" };
        self.evidence.push(format!("the standard deviation of {BIAS} is {deviation:.4}, {side} {LIMIT}"));
    }
}

/// The names of diffusers, ModelSpec and trainers.
fn kind_of(text: &str) -> Option<Parameterisation> {
    Some(match text.to_lowercase().as_str() {
        "epsilon" | "eps" => Parameterisation::Epsilon,
        "v" | "v_prediction" | "v-prediction" => Parameterisation::Velocity,
        "sample" | "x0" => Parameterisation::Sample,
        "flow_prediction" | "flow" => Parameterisation::Flow,
        "trigflow" => Parameterisation::TrigFlow,
        _ => return None,
    })
}

/// The values of a small tensor of a file, if they are finite floating-point numbers.
fn values(container: &dyn Container, key: &str) -> Option<Vec<f32>> {
    /// Above the number of values of any marker.
    const MOST: usize = 1024;
    let (dtype, shape) = container.describe(key).ok()?;
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
    (count <= MOST && is_convertible(dtype)).then_some(())?;
    to_f32(container.read(key, None).ok()?.data(), dtype)
        .filter(|values| values.iter().all(|v| v.is_finite()))
}

fn floats(state: &dyn StateDict, name: &str) -> Option<Vec<f32>> {
    let weight = state.get(name).ok()?;
    to_f32(weight.data(), weight.dtype)
}

fn to_f32(data: &[u8], dtype: DType) -> Option<Vec<f32>> {
    let converted;
    let data = match dtype {
        DType::F32 => data,
        _ if is_convertible(dtype) => {
            converted = convert(data, dtype, DType::F32).ok()?;
            &converted
        }
        _ => return None,
    };
    Some(data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}
