//! What a client of sdrun's own API orders.

use crate::{
    fault::Fault,
    library::Library,
    pictures,
    task::{Draw, Output},
};
use sdrun::did_you_mean;
use sdrun_diffusion::{
    file::{Format, JPEG_QUALITY},
    metadata::Record,
    noise::{Rng, Variation},
    picture::{Fit, Hint, Mask},
    pipeline::{HintPicture, Inpaint, Named, Recipe, Request, Second, Size, Start, Upscale, Wanted, named},
    program::Program,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Pictures to draw. What is absent or null has the usual value of the model's family.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Order {
    /// What to draw, in A1111's language: weights, alternatives, `<lora:NAME:STRENGTH>`.
    pub(crate) prompt: String,
    /// What to avoid.
    pub(crate) negative_prompt: Option<String>,
    /// A model of the library.
    pub(crate) model: Option<String>,
    /// Another autoencoder of the library.
    pub(crate) vae: Option<String>,
    /// Text encoders of the library.
    pub(crate) text_encoders: Vec<String>,
    /// Adapters.
    pub(crate) loras: Vec<LoraOrder>,
    /// The model of the last steps.
    pub(crate) refiner: Option<String>,
    /// After which share of the steps it takes over.
    pub(crate) refiner_start: Option<f64>,
    /// Width in pixels.
    #[schema(minimum = 8, maximum = 16384)]
    pub(crate) width: Option<usize>,
    /// Height in pixels.
    #[schema(minimum = 8, maximum = 16384)]
    pub(crate) height: Option<usize>,
    /// Steps.
    #[schema(minimum = 1, maximum = 200)]
    pub(crate) steps: Option<usize>,
    /// Guidance scale.
    pub(crate) cfg_scale: Option<f64>,
    /// How far to restore the contrast that a high scale changes, from 0 to 1.
    pub(crate) cfg_rescale: Option<f64>,
    /// Guidance of models that take it as an input.
    pub(crate) guidance: Option<f64>,
    /// Sampler, under its name in any program.
    pub(crate) sampler: Option<String>,
    /// Schedule, under its name in any program.
    pub(crate) schedule: Option<String>,
    /// Seed of the first picture; each further picture adds 1.
    pub(crate) seed: Option<u64>,
    /// A share of another seed's noise.
    pub(crate) variation: Option<VariationOrder>,
    /// Number of pictures.
    #[schema(minimum = 1, maximum = 64)]
    pub(crate) count: Option<usize>,
    /// Which of the last layers of the text encoder to use.
    pub(crate) clip_skip: Option<usize>,
    /// A picture to start from.
    pub(crate) start: Option<StartOrder>,
    /// Pictures for ControlNets.
    pub(crate) controls: Vec<ControlOrder>,
    /// Pictures to edit as the prompt says, for models that do so (FLUX.1 Kontext).
    pub(crate) references: Vec<String>,
    /// A second pass over the enlarged picture.
    pub(crate) hires: Option<HiresOrder>,
    /// An ESRGAN of the library, for finished pictures.
    pub(crate) upscaler: Option<String>,
    /// How often it enlarges.
    #[schema(minimum = 1, maximum = 4)]
    pub(crate) upscale_repeats: Option<usize>,
    /// Sides in pixels of tiles for the autoencoder.
    pub(crate) tile: Option<usize>,
    /// The program whose pictures to repeat: `diffusers`, `a1111` or `comfy`.
    pub(crate) seed_like: Option<String>,
    /// Where noise comes from: `cpu` or `nv`.
    pub(crate) rng: Option<String>,
    /// `png` (default), `jpeg` or `webp`.
    pub(crate) format: Option<String>,
}

/// An adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoraOrder {
    /// Its name in the library.
    pub(crate) name: String,
    /// Strength in the denoiser; 1 by default.
    pub(crate) strength: Option<f32>,
    /// Strength in the text encoders; that in the denoiser by default.
    pub(crate) text_encoder_strength: Option<f32>,
}

/// A share of another seed's noise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct VariationOrder {
    /// The other seed.
    pub(crate) seed: u64,
    /// Its share, from 0 to 1.
    pub(crate) strength: f64,
}

/// A picture to start from. Pictures are PNG, JPEG or WebP in base64, with or without `data:image/png;base64,` before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StartOrder {
    /// The picture.
    pub(crate) picture: String,
    /// How much to change it, from 0 to 1; 0.75 by default.
    pub(crate) strength: Option<f64>,
    /// White where the picture shall be drawn anew. Without it, what is transparent in the picture.
    pub(crate) mask: Option<String>,
    /// How soft the mask's edge is, in pixels; 4 by default.
    pub(crate) mask_blur: Option<f32>,
    /// What is under the mask at the start: `original` (default), `surroundings`, `noise` or `nothing`.
    pub(crate) fill: Option<String>,
    /// Draw only the masked part and this many pixels around it.
    pub(crate) only_masked: Option<u32>,
    /// How a picture of another size is fitted: `crop` (default), `fill` or `stretch`.
    pub(crate) fit: Option<String>,
}

/// A picture for a ControlNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ControlOrder {
    /// The ControlNet's name in the library; absent for a model that itself draws after a picture.
    pub(crate) control_net: Option<String>,
    /// The picture in base64.
    pub(crate) picture: String,
    /// What to make of it first, such as `canny`; `none` by default.
    pub(crate) hint: Option<String>,
    /// How strongly to follow it; 1 by default.
    pub(crate) strength: Option<f64>,
    /// After which share of the steps it begins; 0 by default.
    pub(crate) start: Option<f64>,
    /// After which share of the steps it ends; 1 by default.
    pub(crate) end: Option<f64>,
}

/// A second pass over the enlarged picture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct HiresOrder {
    /// Factor of the size, above 1.
    pub(crate) scale: f64,
    /// How much it changes, from 0 to 1; 0.5 by default.
    pub(crate) strength: Option<f64>,
    /// Its steps.
    pub(crate) steps: Option<usize>,
    /// `lanczos` (default), `latent`, or an ESRGAN of the library.
    pub(crate) upscaler: Option<String>,
}

impl Order {
    /// The task for it.
    ///
    /// # Errors
    /// Unknown names, pictures that cannot be read, numbers out of range.
    pub(crate) fn draw(&self, library: &Library) -> Result<Draw, Fault> {
        let mut recipe = recipe(library, self.model.as_deref(), self.vae.as_deref(), &self.text_encoders)?;
        for LoraOrder { name, strength, text_encoder_strength } in &self.loras {
            let strength = strength.unwrap_or(1.0);
            let text_encoder_strength = text_encoder_strength.unwrap_or(strength);
            recipe.loras.push(Named { file: library.lora(name)?.path, strength, text_encoder_strength });
        }
        recipe.refiner =
            self.refiner.as_deref().map(|name| library.model(name)).transpose()?.map(|it| it.path);
        let mut hints = Vec::new();
        for control in &self.controls {
            if let Some(name) = &control.control_net {
                recipe.control_nets.push(library.control_net(name)?.path);
            }
            hints.push(control.hinted()?);
        }
        let upscaler = self.upscaler.as_deref().map(|name| library.upscaler(name)).transpose()?;
        recipe.upscaler = upscaler.map(|entry| entry.path);
        let second = self.hires.as_ref().map(|hires| hires.second(&mut recipe, library)).transpose()?;
        let (sampler, usual) = self.sampler.as_deref().map(named::sampler).transpose()?.unzip();
        let schedule = self.schedule.as_deref().map(named::schedule).transpose()?;
        let format = self.format.as_deref().map(format).transpose()?.unwrap_or(Format::Png);
        let request = Request {
            prompt: self.prompt.clone(),
            negative: self.negative_prompt.clone().unwrap_or_default(),
            width: self.width,
            height: self.height,
            steps: self.steps,
            scale: self.cfg_scale,
            rescale: self.cfg_rescale.unwrap_or_default(),
            distilled_guidance: self.guidance,
            sampler,
            schedule: schedule.or(usual.flatten()),
            seed: self.seed.unwrap_or_else(any_seed),
            variation: self
                .variation
                .as_ref()
                .map(|variation| Variation { seed: variation.seed, strength: variation.strength }),
            count: self.count.unwrap_or(1).max(1),
            clip_skip: self.clip_skip,
            refiner_start: self.refiner_start,
            tile: self.tile,
            references: pictures::rgb_all("references", &self.references)?,
            like: self.seed_like.as_deref().map(named::program).transpose()?,
            rng: self.rng.as_deref().map(named::rng).transpose()?,
            start: self.start.as_ref().map(StartOrder::begin).transpose()?,
            ..Request::default()
        };
        let output = Output { format, quality: JPEG_QUALITY, previews: true };
        let wanted = Wanted { request, edit: None, hints, second, repeats: self.upscale_repeats };
        let draw = Draw { recipe, wanted, output };
        draw.check()?;
        Ok(draw)
    }

    /// The order that makes a picture again, without pictures as inputs.
    pub(crate) fn of_record(record: &Record) -> Self {
        let hires = record.hires.as_ref().and_then(|hires| {
            let by_size = || Some(hires.width? as f64 / record.width? as f64);
            Some(HiresOrder {
                scale: hires.scale.or_else(by_size)?,
                strength: hires.denoising_strength,
                steps: hires.steps,
                upscaler: hires.upscaler.clone(),
            })
        });
        let like = |program: Program| match program {
            Program::Diffusers => "diffusers",
            Program::A1111 => "a1111",
            Program::ComfyUi => "comfy",
        };
        let rng = |rng: Rng| if rng == Rng::Nv { "nv" } else { "cpu" };
        Order {
            prompt: record.prompt.clone(),
            negative_prompt: Some(record.negative.clone()),
            model: record.model.as_ref().map(|file| file.name.clone()),
            vae: record.vae.as_ref().map(|file| file.name.clone()),
            text_encoders: record.text_encoders.iter().map(|file| file.name.clone()).collect(),
            loras: record
                .loras
                .iter()
                .map(|lora| LoraOrder {
                    name: lora.name.clone(),
                    strength: Some(lora.strength),
                    text_encoder_strength: Some(lora.text_encoder_strength),
                })
                .collect(),
            refiner: record.refiner.as_ref().map(|file| file.name.clone()),
            refiner_start: record.refiner_start,
            width: record.width,
            height: record.height,
            steps: record.steps,
            cfg_scale: record.cfg_scale,
            cfg_rescale: record.cfg_rescale,
            guidance: record.guidance,
            sampler: record.sampler.map(|sampler| sampler.name().into()),
            schedule: record.schedule.map(|schedule| schedule.name().into()),
            seed: record.seed,
            variation: record
                .variation
                .map(|variation| VariationOrder { seed: variation.seed, strength: variation.strength }),
            clip_skip: record.clip_skip,
            hires,
            upscaler: record.upscale.as_ref().map(|upscale| upscale.name.clone()),
            tile: record.tile,
            seed_like: record.seed_like.map(|program| like(program).into()),
            rng: record.rng.map(|source| rng(source).into()),
            ..Order::default()
        }
    }
}

impl StartOrder {
    fn begin(&self) -> Result<Start, Fault> {
        let read = pictures::decode("start.picture", &self.picture)?;
        let mask = match &self.mask {
            Some(mask) => Some(Mask::new(pictures::decode("start.mask", mask)?.mask())),
            None => read.erased().map(Mask::new),
        };
        let content = named::content(self.fill.as_deref().unwrap_or("original"))?;
        let fit = named::fit(self.fit.as_deref().unwrap_or("crop"))?;
        let blur = self.mask_blur.unwrap_or(4.0);
        let inpaint = mask.map(|mask| Inpaint { mask, blur, content, only_masked: self.only_masked });
        Ok(Start { picture: read.rgb(), fit, strength: self.strength.unwrap_or(0.75), inpaint })
    }
}

impl ControlOrder {
    fn hinted(&self) -> Result<HintPicture, Fault> {
        let hint = self.hint.as_deref().map(named::hint).transpose()?.unwrap_or(Hint::None);
        Ok(HintPicture {
            picture: pictures::decode("controls.picture", &self.picture)?.rgb(),
            hint,
            fit: Fit::Crop,
            strength: self.strength.unwrap_or(1.0),
            interval: (self.start.unwrap_or(0.0), self.end.unwrap_or(1.0)),
        })
    }
}

impl HiresOrder {
    fn second(&self, recipe: &mut Recipe, library: &Library) -> Result<Second, Fault> {
        let upscale = between(recipe, library, self.upscaler.as_deref().unwrap_or("lanczos"))?;
        let strength = self.strength.unwrap_or(0.5);
        Ok(Second { size: Size::Factor(self.scale), steps: self.steps, strength, upscale })
    }
}

/// How a picture is enlarged between two passes. An ESRGAN becomes part of the recipe.
pub(crate) fn between(recipe: &mut Recipe, library: &Library, name: &str) -> Result<Upscale, Fault> {
    if name.to_lowercase().starts_with("latent") {
        return Ok(Upscale::Latent);
    }
    if ["", "none", "lanczos"].contains(&&*name.to_lowercase()) {
        return Ok(Upscale::Lanczos);
    }
    let file = library.upscaler(name)?.path;
    if recipe.upscaler.as_ref().is_some_and(|other| *other != file) {
        return Err(Fault::invalid("the second pass and the end take the same upscaler: name one only"));
    }
    recipe.upscaler = Some(file);
    Ok(Upscale::Model)
}

/// The files of a model, or of the default one, with the folders that prompts name files in.
///
/// # Errors
/// Names that are not in the library.
pub(crate) fn recipe(
    library: &Library,
    model: Option<&str>,
    vae: Option<&str>,
    text_encoders: &[String],
) -> Result<Recipe, Fault> {
    let model = model.map_or_else(|| library.default_model(), str::to_string);
    let folder =
        |folder: &Option<std::path::PathBuf>| folder.iter().filter(|it| it.is_dir()).cloned().collect();
    let mut recipe = Recipe {
        files: library.files(&model, vae, text_encoders)?,
        lora_folders: folder(&library.folders.loras),
        embedding_folders: folder(&library.folders.embeddings),
        ..Recipe::default()
    };
    recipe.find_demo(&library.paths)?;
    Ok(recipe)
}

pub(crate) fn format(name: &str) -> Result<Format, Fault> {
    Format::of_ending(&name.to_lowercase()).ok_or_else(|| unknown("format", name, ["png", "jpeg", "webp"]))
}

fn unknown(what: &str, name: &str, known: impl IntoIterator<Item = &'static str>) -> Fault {
    let known: Vec<&str> = known.into_iter().collect();
    let guess = did_you_mean(name, known.iter().copied());
    Fault::invalid(format!("there is no {what} {name:?}{guess} (known: {})", known.join(", ")))
}

/// A seed in the 32 bits that other programs accept.
pub(crate) fn any_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() >> 32
}
