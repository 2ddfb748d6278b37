//! Where the networks of a pipeline come from.

use super::{
    Error, Result,
    checkpoint::{self, Source},
    upscale::Upscaler,
    vocabulary::Tokenizers,
    words::Word,
};
use crate::{
    family::{Beside, Encoder, Family, NoiseLevels, Vocabulary},
    prediction::Prediction,
    text::tokenizer::Tokenizer,
};
use sdrun::{
    AdapterFile, Model, Paths, WeightFiles,
    abi::{self, Host},
    graph::{OpenOptions, WeightsPolicy},
    weights::{Adapter, Component, adapter::Place},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The files of a model. A file for one network goes before `model`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// A checkpoint of any layout, a diffusers folder, or a folder of ONNX models as Optimum exports them.
    pub model: Option<PathBuf>,
    /// The denoiser alone (UNet or transformer).
    pub denoiser: Option<PathBuf>,
    /// CLIP ViT-L.
    pub clip_l: Option<PathBuf>,
    /// OpenCLIP ViT-bigG, or ViT-H of SD 2.
    pub clip_g: Option<PathBuf>,
    /// T5.
    pub t5: Option<PathBuf>,
    /// T5's vocabulary: `spiece.model` or `tokenizer.json`.
    pub t5_vocabulary: Option<PathBuf>,
    /// The language model that is a text encoder: Gemma 2.
    pub llm: Option<PathBuf>,
    /// Its vocabulary: `tokenizer.json`.
    pub llm_vocabulary: Option<PathBuf>,
    /// The autoencoder.
    pub autoencoder: Option<PathBuf>,
}

impl Files {
    /// The file of a text encoder alone.
    pub(super) fn encoder(&self, vocabulary: Vocabulary) -> Option<&PathBuf> {
        match vocabulary {
            Vocabulary::Clip => self.clip_l.as_ref(),
            Vocabulary::OpenClip => self.clip_g.as_ref(),
            Vocabulary::T5 => self.t5.as_ref(),
            Vocabulary::Gemma => self.llm.as_ref(),
        }
    }

    /// The file of a vocabulary that is not built in.
    fn vocabulary(&self, vocabulary: Vocabulary) -> Option<&Path> {
        match vocabulary {
            Vocabulary::Clip | Vocabulary::OpenClip => None,
            Vocabulary::T5 => self.t5_vocabulary.as_deref(),
            Vocabulary::Gemma => self.llm_vocabulary.as_deref(),
        }
    }
}

/// A network: its graph and its weights.
pub struct Part {
    /// Its name in a diffusers folder, such as `unet`.
    pub name: String,
    /// The graph.
    pub model: Model,
    /// The weights. If it names no file, the model's own weights are used.
    pub weights: WeightFiles,
}

impl Part {
    /// A network on a built-in graph.
    pub(super) fn of_builtin(
        name: &str,
        builtin: &str,
        weights: WeightFiles,
        paths: &Paths,
        host: &dyn Host,
    ) -> Result<Self> {
        Ok(Part { name: name.into(), model: built_in(name, builtin, paths, host)?, weights })
    }
}

/// A text encoder with its vocabulary.
pub struct TextEncoder {
    /// The network.
    pub part: Part,
    /// Turns prompts into token ids.
    pub tokenizer: Arc<Tokenizer>,
}

/// The networks of a pipeline.
pub struct Parts {
    /// The family.
    pub family: &'static Family,
    /// What the denoiser predicts, if the checkpoint says so. Otherwise the family's default applies.
    pub prediction: Option<Prediction>,
    /// The noise levels that it was trained with.
    pub noise: NoiseLevels,
    /// The text encoders, as in [`Family::encoders`]. Only SD 3 can do without some.
    pub encoders: Vec<Option<TextEncoder>>,
    /// The denoiser.
    pub denoiser: Part,
    /// The autoencoder's decoder.
    pub vae_decoder: Part,
    /// The autoencoder's encoder, which only pictures as inputs need.
    pub vae_encoder: Option<Part>,
    /// Learned words that prompts may use.
    pub words: Vec<Word>,
    /// ControlNets.
    pub controls: Vec<Part>,
    /// The model of the last steps: the refiner of SDXL, or another model with the same latents.
    pub refiner: Option<Box<Parts>>,
    /// Enlarges finished pictures, or those between two passes.
    pub upscaler: Option<Upscaler>,
}

impl Parts {
    /// Opens the files of a model and recognises its family. Reads no weights yet.
    ///
    /// # Errors
    /// [`Error::Missing`] if no file holds a network that the family needs. `Unimplemented` for a model that sdrun cannot draw with
    /// yet, and errors of reading files.
    pub fn open(files: &Files, paths: &Paths, host: &dyn Host) -> Result<Self> {
        match &files.model {
            Some(folder) if is_onnx(folder) => Self::of_folder(folder, files),
            _ => Self::of_checkpoint(files, paths, host),
        }
    }

    /// Adds an adapter (LoRA and its relatives) to the networks that it was made for.
    ///
    /// # Errors
    /// Errors of reading the file. `InvalidArgument` if the adapter changes none of the networks.
    pub fn add_adapter(&mut self, file: &Path, strength: f32, text_encoder_strength: f32) -> Result<()> {
        let places = Adapter::open(file)?.places();
        let is_for = |place: &Place| places.contains_key(place);
        let mut networks = vec![(vec![Place::Denoiser, Place::Unsaid], &mut self.denoiser)];
        for (encoder, found) in self.family.encoders.iter().zip(&mut self.encoders) {
            let mut places = vec![Place::TextEncoder(number(encoder)), Place::Unsaid];
            places.extend((encoder.vocabulary == Vocabulary::T5).then_some(Place::T5));
            networks.extend(found.as_mut().map(|found| (places, &mut found.part)));
        }
        let mut used = false;
        for (places, part) in networks {
            if places.iter().any(is_for) {
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

    /// Adds a ControlNet. The denoiser gets a graph that takes what it returns.
    ///
    /// # Errors
    /// Errors of reading the file. `InvalidArgument` if it is not a ControlNet of this family; `Unimplemented` if sdrun has no graph
    /// for one.
    pub fn add_control(&mut self, file: &Path, paths: &Paths, host: &dyn Host) -> Result<()> {
        let Some(controlled) = self.family.controlled else {
            let message = format!("sdrun has no ControlNets for {} yet", self.family.title);
            return Err(abi::Error::unsupported(message).with_file(file).into());
        };
        checkpoint::check_control(file, self.family)?;
        let weights = WeightFiles { component: Some(Component::ControlNet), ..WeightFiles::of(file) };
        self.controls.push(Part::of_builtin("controlnet", controlled.network, weights, paths, host)?);
        self.denoiser.model = built_in(&self.denoiser.name, controlled.denoiser, paths, host)?;
        Ok(())
    }

    /// The autoencoder's encoder.
    pub(super) fn encoder(&self) -> Result<&Part> {
        let missing = || Error::Missing { component: "vae_encoder".into(), family: self.family, file: None };
        self.vae_encoder.as_ref().ok_or_else(missing)
    }

    /// Adds a model for the last steps.
    ///
    /// # Errors
    /// Those of [`open`](Self::open). `InvalidArgument` if its latents differ.
    pub fn add_refiner(&mut self, file: &Path, paths: &Paths, host: &dyn Host) -> Result<()> {
        let files = Files { model: Some(file.into()), ..Files::default() };
        self.set_refiner(Self::open(&files, paths, host)?)
    }

    /// The same with an opened model.
    ///
    /// # Errors
    /// `InvalidArgument` if its latents differ.
    pub fn set_refiner(&mut self, refiner: Parts) -> Result<()> {
        let (own, other) = (self.family, refiner.family);
        let is_flow = |family: &Family| family.prediction == Prediction::Flow;
        if own.latent != other.latent || is_flow(own) != is_flow(other) || other.beside != Beside::Nothing {
            let message =
                format!("{} cannot refine pictures of {}: their latents differ", other.title, own.title);
            return Err(Error::invalid(message));
        }
        self.refiner = Some(Box::new(refiner));
        Ok(())
    }

    /// All networks, without those of the refiner.
    pub fn networks_mut(&mut self) -> impl Iterator<Item = &mut Part> {
        let encoders = self.encoders.iter_mut().flatten().map(|encoder| &mut encoder.part);
        let others = [&mut self.denoiser, &mut self.vae_decoder];
        encoders.chain(others).chain(&mut self.vae_encoder).chain(&mut self.controls)
    }

    fn of_folder(folder: &Path, files: &Files) -> Result<Self> {
        let part = |name: &str, component: Component| -> Result<Part> {
            let file = folder.join(name).join(MODEL);
            let model = Model::open(&file).map_err(Error::of(name))?;
            let weights = WeightFiles { component: Some(component), ..WeightFiles::default() };
            Ok(Part { name: name.into(), model, weights })
        };
        let has = |name: &str| folder.join(name).join(MODEL).is_file();
        let denoiser = part(if has("unet") { "unet" } else { "transformer" }, Component::Denoiser)?;
        let family = family(family_of(&denoiser.model, &has))?;
        let mut tokenizers = Tokenizers::default();
        let mut encoders = Vec::new();
        for encoder in family.encoders {
            let part = part(encoder.component, component_of(encoder))?;
            let tokenizer =
                tokenizers.of(encoder, Some(folder), files.vocabulary(encoder.vocabulary), &[])?;
            encoders.push(Some(TextEncoder { part, tokenizer }));
        }
        Ok(Parts {
            family,
            prediction: None,
            noise: family.noise,
            encoders,
            denoiser,
            vae_decoder: part("vae_decoder", Component::Vae)?,
            vae_encoder: has("vae_encoder").then(|| part("vae_encoder", Component::Vae)).transpose()?,
            words: Vec::new(),
            controls: Vec::new(),
            refiner: None,
            upscaler: None,
        })
    }

    fn of_checkpoint(files: &Files, paths: &Paths, host: &dyn Host) -> Result<Self> {
        let source = Source::open(files, paths, host)?;
        let family = source.family;
        let mut tokenizers = Tokenizers::default();
        let mut encoders = Vec::new();
        for encoder in family.encoders {
            let file = files.encoder(encoder.vocabulary);
            let found = source.part(component_of(encoder), encoder.component, encoder.model, file);
            encoders.push(match found {
                Ok(part) => {
                    let folder = files.model.as_deref().filter(|path| path.is_dir());
                    let vocabulary = files.vocabulary(encoder.vocabulary);
                    let tokenizer = tokenizers.of(encoder, folder, vocabulary, &part.weights.base)?;
                    Some(TextEncoder { part, tokenizer })
                }
                Err(Error::Missing { .. }) if family.may_lack(encoder) => None,
                Err(error) => return Err(error),
            });
        }
        if encoders.iter().all(Option::is_none) {
            return Err(source.missing(family.encoders[0].component));
        }
        let vae = |model| source.part(Component::Vae, "vae", model, files.autoencoder.as_ref());
        let denoiser = family.denoiser;
        Ok(Parts {
            family,
            prediction: source.prediction,
            noise: source.noise,
            encoders,
            denoiser: source.part(
                Component::Denoiser,
                denoiser.component,
                denoiser.model,
                files.denoiser.as_ref(),
            )?,
            vae_decoder: vae(family.autoencoder.decoder)?,
            vae_encoder: Some(vae(family.autoencoder.encoder)?),
            words: Vec::new(),
            controls: Vec::new(),
            refiner: None,
            upscaler: None,
        })
    }
}

/// A built-in graph for the network `name`. Its weights come from files.
fn built_in(name: &str, builtin: &str, paths: &Paths, host: &dyn Host) -> Result<Model> {
    let options = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..OpenOptions::default() };
    Model::find(builtin, paths, &options, host).map_err(Error::of(name))
}

/// The number of a text encoder in checkpoints and adapters, from 1.
fn number(encoder: &Encoder) -> u8 {
    match encoder.component {
        "text_encoder_2" => 2,
        "text_encoder_3" => 3,
        _ => 1,
    }
}

/// The component of a checkpoint that is this text encoder.
fn component_of(encoder: &Encoder) -> Component {
    match number(encoder) {
        2 => Component::TextEncoder2,
        3 => Component::TextEncoder3,
        _ => Component::TextEncoder,
    }
}

/// Name of a model's file in its folder.
const MODEL: &str = "model.onnx";

/// Whether a folder has ONNX models.
fn is_onnx(folder: &Path) -> bool {
    ["unet", "transformer"].iter().any(|name| folder.join(name).join(MODEL).is_file())
}

pub(super) fn family(id: &str) -> Result<&'static Family> {
    Family::find(id).ok_or_else(|| abi::Error::internal(format!("there is no family {id}")).into())
}

/// The family of a folder, by its denoiser's inputs and its text encoders.
fn family_of(denoiser: &Model, has: &dyn Fn(&str) -> bool) -> &'static str {
    let inputs = denoiser.inputs();
    let takes = |name: &str| inputs.iter().any(|(spec, _)| spec.name == name);
    let size = |name: &str, axis: fn(&[Option<usize>]) -> Option<&Option<usize>>| {
        let (spec, _) = inputs.iter().find(|(spec, _)| spec.name == name)?;
        axis(&spec.shape).copied().flatten()
    };
    let last = |name: &str| size(name, |shape| shape.last());
    let channels = size("sample", |shape| shape.get(1));
    let kind = match (channels, takes("timestep_cond")) {
        (Some(9), _) => "inpainting",
        (Some(5), _) => "depth",
        (_, true) => "lcm",
        _ => "",
    };
    match kind {
        _ if takes("img_ids") && takes("guidance") => match last("hidden_states") {
            Some(384) => "flux-fill",
            Some(128) => "flux-canny-depth",
            _ => "flux-dev",
        },
        _ if takes("img_ids") && takes("pooled_projections") => "flux-schnell",
        _ if takes("img_ids") => "chroma",
        _ if takes("hidden_states") && takes("pooled_projections") => "sd3",
        _ if size("hidden_states", |shape| shape.get(1)) == Some(32) => "sana",
        _ if takes("hidden_states") => "pixart-sigma",
        _ if has("text_encoder_2") && !has("text_encoder") => "sdxl-refiner",
        "inpainting" if has("text_encoder_2") => "sdxl-inpainting",
        "lcm" if has("text_encoder_2") => "sdxl-lcm",
        _ if has("text_encoder_2") => "sdxl",
        "inpainting" if last("encoder_hidden_states") == Some(1024) => "sd21-inpainting",
        "depth" => "sd21-depth",
        _ if last("encoder_hidden_states") == Some(1024) => "sd21",
        "inpainting" => "sd15-inpainting",
        "lcm" => "sd15-lcm",
        _ => "sd15",
    }
}
