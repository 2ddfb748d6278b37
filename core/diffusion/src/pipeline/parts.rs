//! Where the networks of a pipeline come from.

use super::{Error, Result};
use crate::{family::Family, prediction::Prediction, text::tokenizer::Tokenizer};
use sdrun::{
    AdapterFile, Model, Paths, WeightFiles,
    abi::{self, Host},
    files::{Links, read_small},
    graph::{OpenOptions, WeightsPolicy},
    weights::{
        Adapter, Checkpoint,
        adapter::Place,
        checkpoint::{Family as Kind, Parameterisation},
    },
};
use std::path::Path;

/// A network: its graph and its weights.
pub struct Part {
    /// Its name in a diffusers folder, such as `unet`.
    pub name: String,
    /// The graph.
    pub model: Model,
    /// The weights. If it names no file, the model's own weights are used.
    pub weights: WeightFiles,
}

/// The networks of a pipeline.
pub struct Parts {
    /// The family.
    pub family: &'static Family,
    /// What the denoiser predicts, if the checkpoint says so. Otherwise the family's default applies.
    pub prediction: Option<Prediction>,
    /// Turns prompts into ids for all CLIP encoders.
    pub tokenizer: Tokenizer,
    /// The text encoders, as in [`Family::encoders`].
    pub encoders: Vec<Part>,
    /// The denoiser.
    pub denoiser: Part,
    /// The autoencoder's decoder.
    pub vae_decoder: Part,
}

impl Parts {
    /// Opens a checkpoint and recognises its family, or opens a folder of ONNX models as Optimum exports them. Reads no weights yet.
    ///
    /// # Errors
    /// `Unimplemented` for a model that sdrun cannot draw with yet, and errors of reading files.
    pub fn open(path: &Path, paths: &Paths, host: &dyn Host) -> Result<Self> {
        if path.join("unet").join(MODEL).is_file() {
            Self::of_folder(path)
        } else {
            Self::of_checkpoint(path, paths, host)
        }
    }

    /// Adds an adapter (LoRA and its relatives) to the networks that it was made for.
    ///
    /// # Errors
    /// Errors of reading the file. `InvalidArgument` if the adapter changes none of the networks.
    pub fn add_adapter(&mut self, file: &Path, strength: f32, text_encoder_strength: f32) -> Result<()> {
        let places = Adapter::open(file)?.places();
        let is_for = |place: Place| places.contains_key(&place) || places.contains_key(&Place::Unsaid);
        let encoders =
            self.encoders.iter_mut().zip(1..).map(|(part, number)| (Place::TextEncoder(number), part));
        let mut used = false;
        for (place, part) in encoders.chain([(Place::Denoiser, &mut self.denoiser)]) {
            if is_for(place) {
                let file = file.to_path_buf();
                part.weights.adapters.push(AdapterFile { file, strength, text_encoder_strength });
                used = true;
            }
        }
        if used {
            return Ok(());
        }
        let message = format!("{} changes none of the networks of {}", file.display(), self.family.title);
        Err(abi::Error::invalid(message).with_file(file).into())
    }

    fn of_folder(folder: &Path) -> Result<Self> {
        let part = |name: &str| -> Result<Part> {
            let file = folder.join(name).join(MODEL);
            let model = Model::open(&file).map_err(Error::of(name))?;
            Ok(Part { name: name.into(), model, weights: WeightFiles::default() })
        };
        let denoiser = part("unet")?;
        let family = family(match folder.join("text_encoder_2").is_dir() {
            true => "sdxl",
            false if text_width(&denoiser.model) == Some(1024) => "sd21",
            false => "sd15",
        })?;
        let file = folder.join("tokenizer").join("tokenizer.json");
        let tokenizer = match file.is_file() {
            true => Tokenizer::json(&read_small(&file, Links::Follow, MOST_TOKENS)?)?,
            false => Tokenizer::clip()?,
        };
        Ok(Parts {
            family,
            prediction: None,
            tokenizer,
            encoders: family.encoders.iter().map(|encoder| part(encoder.component)).collect::<Result<_>>()?,
            denoiser,
            vae_decoder: part("vae_decoder")?,
        })
    }

    fn of_checkpoint(path: &Path, paths: &Paths, host: &dyn Host) -> Result<Self> {
        let summary = Checkpoint::open(path)?.summary();
        let unfit = |message: String| Error::from(abi::Error::unsupported(message).with_file(path));
        let kind = summary.family.ok_or_else(|| {
            unfit(format!("{} is no checkpoint of a model that sdrun knows", path.display()))
        })?;
        let id = match kind {
            Kind::Sd1 => "sd15",
            Kind::Sd2 => "sd21",
            Kind::Sdxl => "sdxl",
            other => {
                let message =
                    format!("{} is {other}; sdrun draws with SD 1, SD 2 and SDXL so far", path.display());
                return Err(unfit(message));
            }
        };
        if summary.facts.inpainting || summary.facts.distilled_guidance {
            let what =
                if summary.facts.inpainting { "an inpainting model" } else { "a latent consistency model" };
            return Err(unfit(format!("{} is {what}, which sdrun cannot draw with yet", path.display())));
        }
        let prediction = match summary.prediction.kind {
            None => None,
            Some(Parameterisation::Epsilon) => Some(Prediction::Noise),
            Some(Parameterisation::Velocity) => Some(Prediction::Velocity),
            Some(other) => {
                return Err(unfit(format!(
                    "{} uses {other}, which sdrun cannot draw with yet",
                    path.display()
                )));
            }
        };
        if summary.prediction.zero_terminal_snr == Some(true) {
            let why = "was trained with zero terminal SNR, which sdrun cannot draw with yet";
            return Err(unfit(format!("{} {why}", path.display())));
        }
        let family = family(id)?;
        let options = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..OpenOptions::default() };
        let part = |name: &str, builtin: &str| -> Result<Part> {
            let model = Model::find(builtin, paths, &options, host).map_err(Error::of(name))?;
            Ok(Part { name: name.into(), model, weights: WeightFiles::of(path) })
        };
        let encoder = |encoder: &crate::family::Encoder| part(encoder.component, encoder.model);
        Ok(Parts {
            family,
            prediction,
            tokenizer: Tokenizer::clip()?,
            encoders: family.encoders.iter().map(encoder).collect::<Result<_>>()?,
            denoiser: part("unet", family.denoiser)?,
            vae_decoder: part("vae_decoder", family.vae_decoder)?,
        })
    }
}

/// Name of a model's file in its folder.
const MODEL: &str = "model.onnx";

/// The largest `tokenizer.json` to read, in bytes. T5's has 2.4 MB.
const MOST_TOKENS: u64 = 64 << 20;

fn family(id: &str) -> Result<&'static Family> {
    Family::find(id).ok_or_else(|| abi::Error::internal(format!("there is no family {id}")).into())
}

/// Width of the text that a denoiser attends to.
fn text_width(model: &Model) -> Option<usize> {
    let inputs = model.inputs();
    let (spec, _) = inputs.iter().find(|(spec, _)| spec.name == "encoder_hidden_states")?;
    spec.shape.last().copied().flatten()
}
