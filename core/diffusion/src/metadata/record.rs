//! sdrun's own record of a picture.

use super::{
    Error, Reading,
    by_name::{sampler, schedule},
};
use crate::{
    guidance::Rule,
    noise::{Rng, Variation},
    pipeline::{Content, Syntax},
    prediction::Prediction,
    program::Program,
    reuse::Reuse,
    sampler::Sampler,
    schedule::Schedule,
};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// Version of the format that this code writes. A new field does not change it; a new meaning of a field does.
const VERSION: u64 = 1;

/// How a picture was made: settings, not files. What is `None` or empty is unknown or has the default of the model's family.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Record {
    /// The program and its version, such as `sdrun 0.1.0`.
    pub program: String,
    /// The prompt, without tags of the [`loras`](Self::loras).
    pub prompt: String,
    /// The negative prompt.
    pub negative: String,
    /// Width in pixels, of the first pass if there are two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// Height in pixels, of the first pass if there are two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub height: Option<usize>,
    /// Steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// Sampler, under its name in ComfyUI.
    #[serde(with = "sampler", skip_serializing_if = "Option::is_none")]
    pub sampler: Option<Sampler>,
    /// Schedule, under its name in ComfyUI.
    #[serde(with = "schedule", skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Guidance scale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cfg_scale: Option<f64>,
    /// How far the deviation of guided predictions was restored, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cfg_rescale: Option<f64>,
    /// How predictions with and without the prompt were combined; standard guidance by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guidance_rule: Option<Rule>,
    /// The part of the steps with guidance, as shares from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guidance_interval: Option<(f64, f64)>,
    /// Guidance scale that the network takes as an input (Flux dev).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guidance: Option<f64>,
    /// Seed of this picture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// The share of another seed's noise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variation: Option<Variation>,
    /// Where the noise came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rng: Option<Rng>,
    /// The program whose rules were followed where programs differ under one name, for example in the use of the seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed_like: Option<Program>,
    /// The language of the prompts; that of `seed_like` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub syntax: Option<Syntax>,
    /// What the denoiser predicts, if the user said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
    /// Layer of the text encoder, counted from the last, which is 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_skip: Option<usize>,
    /// How much of a given picture was drawn anew, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denoising_strength: Option<f64>,
    /// Which part of the given picture was drawn anew.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inpaint: Option<Inpaint>,
    /// The checkpoint. Its hash is AutoV2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelFile>,
    /// The autoencoder, if it is not the checkpoint's. Its hash is AutoV2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vae: Option<ModelFile>,
    /// When steps could skip the network, if they could.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reuse: Option<Reuse>,
    /// Side of the autoencoder's tiles in pixels, if the user requested tiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tile: Option<usize>,
    /// The model of the last steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refiner: Option<ModelFile>,
    /// After which share of the steps it took over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refiner_start: Option<f64>,
    /// Text encoders that are not the checkpoint's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub text_encoders: Vec<ModelFile>,
    /// Adapters, in the order in which they were applied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loras: Vec<Lora>,
    /// Embeddings (textual inversion), under the names that the prompt uses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub embeddings: Vec<ModelFile>,
    /// ControlNets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub controlnets: Vec<ControlNet>,
    /// The second pass at a larger size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hires: Option<Hires>,
    /// How the finished picture was enlarged by a network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upscale: Option<Upscale>,
    /// What ran the networks. For information: it does not change the picture beyond rounding.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<Network>,
}

/// A file of a model, by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelFile {
    /// The file's name without folders and without the ending.
    #[serde(deserialize_with = "stem_in_json")]
    pub name: String,
    /// Its [hash](super::hash) in hex digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
}

impl ModelFile {
    /// A file by its path or name.
    pub fn new(path: &str, hash: Option<String>) -> Self {
        ModelFile { name: stem(path), hash }
    }
}

/// An adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lora {
    /// The file's name without folders and without the ending.
    #[serde(deserialize_with = "stem_in_json")]
    pub name: String,
    /// The [hash of its tensors](super::hash::HashCache::adapter).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// Strength in the denoiser.
    pub strength: f32,
    /// Strength in the text encoders.
    pub text_encoder_strength: f32,
}

impl Lora {
    /// An adapter by its path or name.
    pub fn new(path: &str, hash: Option<String>, strength: f32, text_encoder_strength: f32) -> Self {
        Lora { name: stem(path), hash, strength, text_encoder_strength }
    }
}

impl Default for Lora {
    fn default() -> Self {
        Lora { name: String::new(), hash: None, strength: 1.0, text_encoder_strength: 1.0 }
    }
}

/// A ControlNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ControlNet {
    /// The file's name without folders and without the ending.
    #[serde(deserialize_with = "stem_in_json")]
    pub name: String,
    /// The file's hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// Strength.
    pub strength: f64,
    /// The fraction of the steps before it starts.
    pub start: f64,
    /// The fraction of the steps after which it ends.
    pub end: f64,
}

impl Default for ControlNet {
    fn default() -> Self {
        ControlNet { name: String::new(), hash: None, strength: 1.0, start: 0.0, end: 1.0 }
    }
}

/// A second pass at a larger size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hires {
    /// Factor of the size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
    /// Width in pixels, instead of a factor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// Height in pixels, instead of a factor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub height: Option<usize>,
    /// Steps, if they are not those of the first pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// Name of the method or model that enlarges the picture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upscaler: Option<String>,
    /// How much is drawn anew, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denoising_strength: Option<f64>,
    /// Sampler, if it is not that of the first pass.
    #[serde(with = "sampler", skip_serializing_if = "Option::is_none")]
    pub sampler: Option<Sampler>,
    /// Schedule, if it is not that of the first pass.
    #[serde(with = "schedule", skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
}

/// An enlargement by a network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Upscale {
    /// The name of the network's file without folders and without the ending.
    #[serde(deserialize_with = "stem_in_json")]
    pub name: String,
    /// The file's hash (AutoV2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// How many times wider and higher the picture became.
    pub factor: f64,
}

impl Upscale {
    /// An enlargement by a network, from its path or name.
    pub fn new(path: &str, hash: Option<String>, factor: f64) -> Self {
        Upscale { name: stem(path), hash, factor }
    }
}

/// Which part of a given picture was drawn anew. The mask is not in the metadata.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inpaint {
    /// How soft the edge of the mask was: the deviation of a Gaussian, in pixels.
    pub blur: f64,
    /// What was under the mask at the start.
    pub content: Content,
    /// How many pixels around the mask were drawn, if not all of the picture was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub only_masked: Option<u32>,
}

/// What ran a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// Its name in a diffusers folder, such as `unet`.
    pub part: String,
    /// The provider's id.
    pub provider: String,
    /// The device's name.
    pub device: String,
    /// The precision.
    pub precision: String,
}

impl Record {
    /// The record of a picture of this version of sdrun, without settings.
    pub fn of_sdrun() -> Self {
        Record { program: concat!("sdrun ", env!("CARGO_PKG_VERSION")).into(), ..Record::default() }
    }

    /// The record as JSON, for a picture's text [`SDRUN`](super::SDRUN).
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Document<'a> {
            version: u64,
            #[serde(flatten)]
            record: &'a Record,
        }
        serde_json::to_string(&Document { version: VERSION, record: self }).unwrap_or_default()
    }
}

/// Reads a record. A field that this version does not know, or that has an unknown value, does not hide the others.
pub(super) fn read(text: &str) -> Result<Reading, Error> {
    let unreadable = |why: String| Error::Unreadable { program: "sdrun", why };
    let mut fields: Map<String, Value> =
        serde_json::from_str(text).map_err(|why| unreadable(why.to_string()))?;
    let version = fields.remove("version").and_then(|version| version.as_u64());
    let (mut good, mut unread) = (Map::new(), Vec::new());
    for (name, value) in fields {
        let alone: Map<String, Value> = [(name.clone(), value.clone())].into_iter().collect();
        match serde_json::from_value::<Record>(alone.into()) {
            Ok(_) => drop(good.insert(name, value)),
            Err(why) => {
                let why = why.to_string();
                unread.push(format!(
                    "`{name}` is not understood: {}",
                    why.split(", expected").next().unwrap_or_default()
                ));
            }
        }
    }
    let record: Record = serde_json::from_value(good.into()).map_err(|why| unreadable(why.to_string()))?;
    if version != Some(VERSION) {
        unread.push(format!(
            "`{}` wrote the settings in another format, so that they may mean something else",
            record.program
        ));
    }
    Ok(Reading { record, unread })
}

/// Endings of files of weights.
const ENDINGS: [&str; 8] = ["safetensors", "sft", "ckpt", "pt", "pth", "bin", "gguf", "onnx"];

/// A file's name without folders, in any system's notation, and without the ending.
fn stem(path: &str) -> String {
    let mut name = path.rsplit(['/', '\\']).next().unwrap_or_default().trim();
    while let Some((stem, ending)) = name.rsplit_once('.')
        && ENDINGS.contains(&ending.to_lowercase().as_str())
    {
        name = stem.trim_end();
    }
    if name.bytes().all(|byte| byte == b'.') { String::new() } else { name.into() }
}

fn stem_in_json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(stem(&String::deserialize(deserializer)?))
}
