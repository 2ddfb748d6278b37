//! Pictures from prompts.

use crate::{
    calls::{Calls, Image},
    failure::{Failure, Result, caught, text},
    given::{self, Versioned},
    registry::{Place, Placed, Registry, out_of_range},
    session::Lora,
};
use image::{GrayImage, RgbImage};
use sdrun::{
    abi::{Host, LogLevel},
    files::{Existing, write},
};
use sdrun_diffusion::{
    file::{Format, JPEG_QUALITY, encode},
    noise::Variation,
    picture::{Fit, Hint, Mask},
    pipeline::{
        Artist, Content, Event, Files, Finished, HintPicture, Inpaint, Lane, Named, Recipe, Request, Second,
        Size, Start, Told, Upscale, Wanted, named,
    },
    preview::{Pace, enlarged},
};
use std::{
    ffi::{CString, c_char},
    path::Path,
    ptr,
    time::Instant,
};

/// A model that draws. All fields may be zero: the demo model, which draws coloured shapes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PipelineOptions {
    /// `sizeof(sdrun_pipeline_options)`.
    pub struct_size: usize,
    /// A checkpoint of any layout, a diffusers folder, or a folder of ONNX models.
    pub model: *const c_char,
    /// The denoiser alone.
    pub diffusion_model: *const c_char,
    /// CLIP-L alone.
    pub clip_l: *const c_char,
    /// CLIP-G alone.
    pub clip_g: *const c_char,
    /// T5-XXL alone.
    pub t5xxl: *const c_char,
    /// The vocabulary of T5.
    pub t5_tokenizer: *const c_char,
    /// A language model as the text encoder.
    pub llm: *const c_char,
    /// The autoencoder alone.
    pub vae: *const c_char,
    /// Adapters.
    pub loras: *const Lora,
    /// Their number.
    pub lora_count: usize,
    /// A folder of adapters that prompts name as `<lora:NAME:0.8>`.
    pub lora_dir: *const c_char,
    /// A folder of embeddings that prompts name by their file's name.
    pub embedding_dir: *const c_char,
    /// ControlNets.
    pub control_nets: *const *const c_char,
    /// Their number.
    pub control_net_count: usize,
    /// The model of the last steps.
    pub refiner: *const c_char,
    /// An ESRGAN.
    pub upscaler: *const c_char,
    /// Where it runs.
    pub place: Place,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers and numbers.
unsafe impl Versioned for PipelineOptions {}

/// A mask in memory: `width * height` bytes, row by row; 255 where a picture shall be drawn anew.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MaskImage {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// The bytes; null is no mask.
    pub grey: *const u8,
}

/// A picture that a ControlNet follows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ControlImage {
    /// The picture, of any size.
    pub image: Image,
    /// What the network shall see of it: `none` (null), `canny`, `invert`, `tile`, …
    pub hint: *const c_char,
    /// How strongly to follow it; 0 is 1.
    pub strength: f64,
    /// After which share of the steps it begins.
    pub start: f64,
    /// After which share of the steps it ends; 0 is 1.
    pub end: f64,
}

/// What to draw. All fields but `prompt` may be zero: what is usual for the model's family.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Order {
    /// `sizeof(sdrun_order)`.
    pub struct_size: usize,
    /// What the picture shows, in A1111's language.
    pub prompt: *const c_char,
    /// What it does not show.
    pub negative_prompt: *const c_char,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Steps.
    pub steps: u32,
    /// Number of pictures; those after the first have the next seeds.
    pub count: u32,
    /// Seed of the first picture.
    pub seed: u64,
    /// Another seed, of whose noise the pictures get a share.
    pub variation_seed: u64,
    /// That share, from 0 to 1.
    pub variation: f64,
    /// Guidance scale.
    pub guidance: f64,
    /// How far to restore the contrast that a high scale changes, from 0 to 1.
    pub guidance_rescale: f64,
    /// Guidance of models that take it as an input.
    pub distilled_guidance: f64,
    /// Sampler, under its name in any program.
    pub sampler: *const c_char,
    /// Schedule, under its name in any program.
    pub schedule: *const c_char,
    /// The program whose pictures to repeat: `diffusers`, `a1111` or `comfy`.
    pub seed_like: *const c_char,
    /// Which of the last layers of the text encoder to use.
    pub clip_skip: u32,
    /// Sides in pixels of tiles for the autoencoder.
    pub tile: u32,
    /// A picture to start from; its `rgb` is null without one.
    pub image: Image,
    /// How much to change it, from 0 to 1; 0 is 0.75.
    pub strength: f64,
    /// How it is brought to another size: `crop` (null), `fill` or `stretch`.
    pub fit: *const c_char,
    /// Which part of it to change. Every other pixel keeps its value.
    pub mask: MaskImage,
    /// How soft the mask's edge is, in pixels.
    pub mask_blur: f32,
    /// 0 draws the whole picture, n only the masked part and n pixels around it.
    pub only_masked: u32,
    /// What is under the mask at the start: `original` (null), `surroundings`, `noise` or `nothing`.
    pub mask_content: *const c_char,
    /// Pictures to edit as the prompt says, for models that do so.
    pub references: *const Image,
    /// Their number.
    pub reference_count: usize,
    /// Pictures for the ControlNets, in their order.
    pub controls: *const ControlImage,
    /// Their number.
    pub control_count: usize,
    /// Factor of a second pass over the enlarged picture: above 1, at most 8; 0 for none.
    pub hires_scale: f64,
    /// How much it changes, from 0 to 1; 0 is 0.5.
    pub hires_strength: f64,
    /// How it enlarges: `lanczos` (null), `latent` or `upscaler`.
    pub hires_upscaler: *const c_char,
    /// Its steps.
    pub hires_steps: u32,
    /// How often the upscaler enlarges finished pictures. 0 is once, but not if it works between two passes.
    pub upscale_repeats: u32,
    /// After which share of the steps the refiner takes over; 0 is 0.8.
    pub refiner_start: f64,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers and numbers.
unsafe impl Versioned for Order {}

/// A finished picture. What it points to lives as long as the list.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PictureInfo {
    /// `sizeof(sdrun_picture_info)`, set by the caller.
    pub struct_size: usize,
    /// The picture.
    pub image: Image,
    /// Its seed.
    pub seed: u64,
    /// Its settings as A1111 writes them.
    pub parameters: *const c_char,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers and numbers.
unsafe impl Versioned for PictureInfo {}

/// A model that draws. Its networks stay loaded between pictures.
pub struct Pipeline {
    artist: Artist,
    family: CString,
}

/// Finished pictures.
pub struct Pictures(Vec<(Finished, CString)>);

/// Opens a model. Says what is wrong with its files; reads no weights yet. `calls` may be null.
///
/// # Safety
/// Pointers are null or valid; `pipeline` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pipeline_open(
    registry: *const Registry,
    options: *const PipelineOptions,
    calls: *const Calls,
    pipeline: *mut *mut Pipeline,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (registry, calls, out, recipe, place) = unsafe {
            let out = given::out(pipeline)?;
            let options = given::options(options)?;
            let (recipe, place) = (recipe(&options)?, options.place.read()?);
            (&given::object(registry)?.0, Calls::read(calls)?, out, recipe, place)
        };
        let lane = lane(registry, &place, &calls)?;
        let artist = Artist::open(registry.clone(), recipe, lane, &calls)?;
        let family = text(artist.family().title);
        *out = Box::into_raw(Box::new(Pipeline { artist, family }));
        Ok(())
    })
}

fn lane(registry: &sdrun::Registry, place: &Placed, calls: &Calls) -> Result<Lane> {
    let only = place.only(registry, calls)?;
    Ok(Lane { only, wishes: place.wishes(), options: Box::new(place.options()) })
}

/// # Safety
/// Pointers are null or valid.
unsafe fn recipe(options: &PipelineOptions) -> Result<Recipe> {
    // SAFETY: as the caller promises.
    unsafe {
        let mut loras = Vec::new();
        for lora in given::array(options.loras, options.lora_count) {
            let file = given::path(lora.file)?.ok_or_else(|| Failure::invalid("an adapter has no file"))?;
            loras.push(Named { file, strength: lora.strength, text_encoder_strength: lora.strength });
        }
        Ok(Recipe {
            files: Files {
                model: given::path(options.model)?,
                denoiser: given::path(options.diffusion_model)?,
                clip_l: given::path(options.clip_l)?,
                clip_g: given::path(options.clip_g)?,
                t5: given::path(options.t5xxl)?,
                t5_vocabulary: given::path(options.t5_tokenizer)?,
                llm: given::path(options.llm)?,
                autoencoder: given::path(options.vae)?,
                ..Files::default()
            },
            loras,
            lora_folders: given::path(options.lora_dir)?.into_iter().collect(),
            embedding_folders: given::path(options.embedding_dir)?.into_iter().collect(),
            refiner: given::path(options.refiner)?,
            control_nets: given::paths(options.control_nets, options.control_net_count)?,
            upscaler: given::path(options.upscaler)?,
        })
    }
}

/// Frees a pipeline. Null is allowed.
///
/// # Safety
/// `pipeline` is null or comes from `sdrun_pipeline_open`, and nobody uses it afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pipeline_free(pipeline: *mut Pipeline) {
    // SAFETY: as the function's contract says.
    unsafe { given::free(pipeline) };
}

/// Name of the model's family. It lives as long as the pipeline.
///
/// # Safety
/// `pipeline` is null or comes from `sdrun_pipeline_open` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pipeline_family(pipeline: *const Pipeline) -> *const c_char {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { pipeline.as_ref() }.map_or(ptr::null(), |pipeline| pipeline.family.as_ptr())
}

/// Draws. Calls from several threads wait for each other. After a failure, `pictures` has those that were finished before, or is null if
/// there are none. What is unusual about the order goes to `calls.log` as a warning. `calls` may be null.
///
/// # Safety
/// Pointers are null or valid; `pictures` can be written. Nobody changes the order during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pipeline_generate(
    pipeline: *const Pipeline,
    order: *const Order,
    calls: *const Calls,
    pictures: *mut *mut Pictures,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (pipeline, calls, out, wanted) = unsafe {
            let out = given::out(pictures)?;
            let order = given::options(order)?;
            (given::object(pipeline)?, Calls::read(calls)?, out, wanted(&order)?)
        };
        let mut drawn = Vec::new();
        let mut pace = Pace::new(None);
        let artist = &pipeline.artist;
        let done = artist.draw(&wanted, &calls, &mut |told| match told {
            Told::Warnings(sentences) => {
                sentences.iter().for_each(|sentence| calls.log(LogLevel::Warn, "", sentence));
            }
            Told::Event(Event::Loading { part }) => {
                calls.progress(&format!("loading {part}"), 0, 0);
            }
            Told::Event(Event::Step { step, steps, clean, shape, .. }) => {
                let now = Instant::now();
                if calls.preview.is_some()
                    && pace.is_due(*step, now)
                    && let Some(shown) = enlarged(artist.family(), clean, *shape)
                {
                    calls.preview(&shown);
                    pace.took(now, Instant::now());
                }
                calls.progress("step", *step as u64 + 1, *steps as u64);
            }
            Told::Event(_) => {}
            Told::Picture(finished) => {
                let parameters = text(&*finished.texts[0].1);
                drawn.push((finished, parameters));
            }
        });
        if !drawn.is_empty() {
            *out = Box::into_raw(Box::new(Pictures(drawn)));
        }
        Ok(done?)
    })
}

/// A number that is not 0.
fn some(number: f64) -> Option<f64> {
    (number != 0.0).then_some(number)
}

fn count(number: u32) -> Option<usize> {
    (number > 0).then_some(number as usize)
}

/// # Safety
/// Pointers are null or valid.
unsafe fn rgb(image: &Image) -> Result<Option<RgbImage>> {
    let Image { width, height, rgb } = *image;
    if rgb.is_null() {
        return Ok(None);
    }
    let bytes = (width as usize).checked_mul(height as usize).and_then(|pixels| pixels.checked_mul(3));
    let bytes = bytes.ok_or_else(|| Failure::invalid(format!("an image of {width} x {height} pixels")))?;
    // SAFETY: as the caller promises.
    let bytes = unsafe { given::array(rgb, bytes) };
    Ok(RgbImage::from_raw(width, height, bytes.to_vec()))
}

/// # Safety
/// Pointers are null or valid.
unsafe fn mask(mask: &MaskImage) -> Result<Option<Mask>> {
    let MaskImage { width, height, grey } = *mask;
    if grey.is_null() {
        return Ok(None);
    }
    let bytes = (width as usize).checked_mul(height as usize);
    let bytes = bytes.ok_or_else(|| Failure::invalid(format!("a mask of {width} x {height} pixels")))?;
    // SAFETY: as the caller promises.
    let bytes = unsafe { given::array(grey, bytes) };
    Ok(GrayImage::from_raw(width, height, bytes.to_vec()).map(Mask::new))
}

/// # Safety
/// Pointers are null or valid.
unsafe fn wanted(order: &Order) -> Result<Wanted> {
    // SAFETY: as the caller promises.
    unsafe {
        let word = |word: *const c_char| Ok::<_, Failure>(given::text(word)?.filter(|word| !word.is_empty()));
        let prompt =
            given::text(order.prompt)?.ok_or_else(|| Failure::invalid("the order's prompt is null"))?;
        let (sampler, usual) = word(order.sampler)?.map(named::sampler).transpose()?.unzip();
        let schedule = word(order.schedule)?.map(named::schedule).transpose()?;
        let fit = word(order.fit)?.map(named::fit).transpose()?.unwrap_or(Fit::Crop);
        let content = word(order.mask_content)?.map(named::content).transpose()?.unwrap_or(Content::Original);
        let upscale =
            word(order.hires_upscaler)?.map(named::upscale).transpose()?.unwrap_or(Upscale::Lanczos);
        let only_masked = (order.only_masked > 0).then_some(order.only_masked);
        let inpaint =
            mask(&order.mask)?.map(|mask| Inpaint { mask, blur: order.mask_blur, content, only_masked });
        let start = match rgb(&order.image)? {
            Some(picture) => {
                Some(Start { picture, fit, strength: some(order.strength).unwrap_or(0.75), inpaint })
            }
            None if inpaint.is_some() => {
                return Err(Failure::invalid("a mask needs the image that it belongs to"));
            }
            None => None,
        };
        let mut references = Vec::new();
        for image in given::array(order.references, order.reference_count) {
            references.push(rgb(image)?.ok_or_else(|| Failure::invalid("a reference has no picture"))?);
        }
        let mut hints = Vec::new();
        for control in given::array(order.controls, order.control_count) {
            let picture = rgb(&control.image)?;
            hints.push(HintPicture {
                picture: picture.ok_or_else(|| Failure::invalid("a control has no picture"))?,
                hint: word(control.hint)?.map(named::hint).transpose()?.unwrap_or(Hint::None),
                fit,
                strength: some(control.strength).unwrap_or(1.0),
                interval: (control.start, some(control.end).unwrap_or(1.0)),
            });
        }
        let variation =
            some(order.variation).map(|strength| Variation { seed: order.variation_seed, strength });
        let second = some(order.hires_scale).map(|factor| Second {
            size: Size::Factor(factor),
            steps: count(order.hires_steps),
            strength: some(order.hires_strength).unwrap_or(0.5),
            upscale,
        });
        let request = Request {
            prompt: prompt.into(),
            negative: given::text(order.negative_prompt)?.unwrap_or_default().into(),
            width: count(order.width),
            height: count(order.height),
            steps: count(order.steps),
            scale: some(order.guidance),
            rescale: order.guidance_rescale,
            distilled_guidance: some(order.distilled_guidance),
            sampler,
            schedule: schedule.or(usual.flatten()),
            seed: order.seed,
            variation,
            like: word(order.seed_like)?.map(named::program).transpose()?,
            count: order.count as usize,
            clip_skip: count(order.clip_skip),
            refiner_start: some(order.refiner_start),
            tile: count(order.tile),
            start,
            references,
            ..Request::default()
        };
        Ok(Wanted { request, edit: None, hints, second, repeats: count(order.upscale_repeats) })
    }
}

/// The number of pictures.
///
/// # Safety
/// `pictures` is null or comes from `sdrun_pipeline_generate` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pictures_count(pictures: *const Pictures) -> usize {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { pictures.as_ref() }.map_or(0, |pictures| pictures.0.len())
}

/// The picture with this number, from 0.
///
/// # Safety
/// As `sdrun_pictures_count`; `info` points to a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pictures_get(
    pictures: *const Pictures,
    number: usize,
    info: *mut PictureInfo,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (Finished { picture, .. }, parameters) = unsafe { picture(pictures, number)? };
        let (width, height) = (picture.width as u32, picture.height as u32);
        let image = Image { width, height, rgb: picture.bytes.as_ptr() };
        let value =
            PictureInfo { struct_size: 0, image, seed: picture.seed, parameters: parameters.as_ptr() };
        // SAFETY: as the function's contract says.
        unsafe { given::fill(info, &value) }
    })
}

/// # Safety
/// As [`sdrun_pictures_count`].
unsafe fn picture<'a>(pictures: *const Pictures, number: usize) -> Result<&'a (Finished, CString)> {
    // SAFETY: as the caller promises.
    let pictures = unsafe { given::object(pictures)? };
    pictures.0.get(number).ok_or_else(|| out_of_range("picture", number, pictures.0.len()))
}

/// Writes a picture with its settings to a file whose name ends with `.png`, `.jpg` or `.webp`. The file is there as a whole or not at
/// all.
///
/// # Safety
/// As `sdrun_pictures_count`; `file` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pictures_save(
    pictures: *const Pictures,
    number: usize,
    file: *const c_char,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (finished, file) = unsafe { (&picture(pictures, number)?.0, given::path(file)?) };
        let file = file.ok_or_else(|| Failure::invalid("the picture's file is null"))?;
        save(finished, &file)
    })
}

fn save(Finished { picture, texts }: &Finished, file: &Path) -> Result<()> {
    let ending = file.extension().map(|ending| ending.to_string_lossy().to_lowercase()).unwrap_or_default();
    let format = Format::of_ending(&ending).ok_or_else(|| {
        Failure::invalid(format!("{} does not end with .png, .jpg or .webp", file.display()))
    })?;
    let texts: Vec<(&str, &str)> = texts.iter().map(|(key, text)| (*key, &**text)).collect();
    let bytes = encode(format, &picture.clone().into_rgb(), JPEG_QUALITY, &texts)
        .map_err(|why| Failure::invalid(format!("cannot encode {}: {why}", file.display())))?;
    Ok(write(file, Existing::OfUser, |out| out.write_all(&bytes)).map_err(sdrun::Error::from)?)
}

/// Frees pictures. Null is allowed.
///
/// # Safety
/// As `sdrun_pictures_count`; nobody uses them afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_pictures_free(pictures: *mut Pictures) {
    // SAFETY: as the function's contract says.
    unsafe { given::free(pictures) };
}
