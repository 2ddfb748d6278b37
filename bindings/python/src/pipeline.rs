//! Pictures from prompts.

use crate::{invalid, not_drawn, registry, wishes, work};
use image::{GrayImage, RgbImage};
use pyo3::{prelude::*, types::PyBytes};
use sdrun::{BuildOptions, Isolation, abi::Device};
use sdrun_diffusion::{
    noise::Variation,
    picture::Mask,
    pipeline::{
        Artist, Event, Files, Finished, HintPicture, Inpaint, Lane, Named, Recipe, Request, Second, Size,
        Start, Told, Wanted, named,
    },
    preview::{Pace, enlarged},
};
use std::{path::PathBuf, time::Instant};

/// Width, height, RGB bytes, seed, and texts for the file by their key.
type Drawn<'py> = (usize, usize, Bound<'py, PyBytes>, u64, Vec<(&'static str, String)>);

/// A model that draws. Its networks stay loaded between calls. One call at a time; others wait.
#[pyclass(frozen)]
pub(crate) struct Pipeline {
    artist: Artist,
    /// Name of the model's family.
    #[pyo3(get)]
    family: &'static str,
}

/// Where networks run. `None` leaves the choice to sdrun.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Place {
    provider: Option<String>,
    device: Option<String>,
    precision: Option<String>,
    threads: Option<usize>,
}

/// The files of a model.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Model {
    model: Option<PathBuf>,
    diffusion_model: Option<PathBuf>,
    clip_l: Option<PathBuf>,
    clip_g: Option<PathBuf>,
    t5xxl: Option<PathBuf>,
    t5_tokenizer: Option<PathBuf>,
    llm: Option<PathBuf>,
    vae: Option<PathBuf>,
    loras: Vec<(PathBuf, f32)>,
    lora_folders: Vec<PathBuf>,
    embedding_folders: Vec<PathBuf>,
    control_nets: Vec<PathBuf>,
    refiner: Option<PathBuf>,
    upscaler: Option<PathBuf>,
}

impl Model {
    fn recipe(self) -> Recipe {
        let named = |(file, strength)| Named { file, strength, text_encoder_strength: strength };
        Recipe {
            files: Files {
                model: self.model,
                denoiser: self.diffusion_model,
                clip_l: self.clip_l,
                clip_g: self.clip_g,
                t5: self.t5xxl,
                t5_vocabulary: self.t5_tokenizer,
                llm: self.llm,
                autoencoder: self.vae,
                ..Files::default()
            },
            loras: self.loras.into_iter().map(named).collect(),
            lora_folders: self.lora_folders,
            embedding_folders: self.embedding_folders,
            refiner: self.refiner,
            control_nets: self.control_nets,
            upscaler: self.upscaler,
        }
    }
}

/// Width, height and bytes of a picture.
type Pixels = (u32, u32, Vec<u8>);

/// What to draw; `None` is the default of the model's family.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Order {
    prompt: String,
    negative_prompt: String,
    width: Option<usize>,
    height: Option<usize>,
    steps: Option<usize>,
    guidance: Option<f64>,
    guidance_rescale: f64,
    distilled_guidance: Option<f64>,
    sampler: Option<String>,
    schedule: Option<String>,
    seed: u64,
    variation: Option<(u64, f64)>,
    seed_like: Option<String>,
    count: usize,
    clip_skip: Option<usize>,
    refiner_start: Option<f64>,
    tile: Option<usize>,
    image: Option<Pixels>,
    strength: f64,
    fit: String,
    /// Grey bytes.
    mask: Option<Pixels>,
    mask_blur: f32,
    mask_content: String,
    only_masked: Option<u32>,
    references: Vec<Pixels>,
    /// Picture, hint, strength, start, end.
    controls: Vec<(Pixels, String, f64, f64, f64)>,
    /// Factor, strength, steps, way to enlarge.
    hires: Option<(f64, f64, Option<usize>, String)>,
    upscale_repeats: Option<usize>,
}

fn rgb((width, height, bytes): Pixels) -> PyResult<RgbImage> {
    RgbImage::from_raw(width, height, bytes).ok_or_else(|| invalid("an image has too few bytes"))
}

impl Order {
    fn wanted(self) -> PyResult<Wanted> {
        let (sampler, usual) =
            self.sampler.as_deref().map(named::sampler).transpose().map_err(not_drawn)?.unzip();
        let schedule = self.schedule.as_deref().map(named::schedule).transpose().map_err(not_drawn)?;
        let like = self.seed_like.as_deref().map(named::program).transpose().map_err(not_drawn)?;
        let fit = named::fit(&self.fit).map_err(not_drawn)?;
        let content = named::content(&self.mask_content).map_err(not_drawn)?;
        let mask = |(width, height, bytes): Pixels| {
            let grey = GrayImage::from_raw(width, height, bytes);
            grey.map(Mask::new).ok_or_else(|| invalid("the mask has too few bytes"))
        };
        let inpaint = self.mask.map(mask).transpose()?.map(|mask| Inpaint {
            mask,
            blur: self.mask_blur,
            content,
            only_masked: self.only_masked,
        });
        let start = match self.image {
            Some(image) => Some(Start { picture: rgb(image)?, fit, strength: self.strength, inpaint }),
            None if inpaint.is_some() => return Err(invalid("a mask needs the image that it belongs to")),
            None => None,
        };
        let hint = |(picture, name, strength, begin, end): (Pixels, String, f64, f64, f64)| {
            let hint = named::hint(&name).map_err(not_drawn)?;
            Ok(HintPicture { picture: rgb(picture)?, hint, fit, strength, interval: (begin, end) })
        };
        let second = |(factor, strength, steps, way): (f64, f64, Option<usize>, String)| {
            let upscale = named::upscale(&way).map_err(not_drawn)?;
            Ok::<_, PyErr>(Second { size: Size::Factor(factor), steps, strength, upscale })
        };
        Ok(Wanted {
            request: Request {
                prompt: self.prompt,
                negative: self.negative_prompt,
                width: self.width,
                height: self.height,
                steps: self.steps,
                scale: self.guidance,
                rescale: self.guidance_rescale,
                distilled_guidance: self.distilled_guidance,
                sampler,
                schedule: schedule.or(usual.flatten()),
                seed: self.seed,
                variation: self.variation.map(|(seed, strength)| Variation { seed, strength }),
                like,
                count: self.count,
                clip_skip: self.clip_skip,
                refiner_start: self.refiner_start,
                tile: self.tile,
                start,
                references: self.references.into_iter().map(rgb).collect::<PyResult<_>>()?,
                ..Request::default()
            },
            edit: None,
            hints: self.controls.into_iter().map(hint).collect::<PyResult<_>>()?,
            second: self.hires.map(second).transpose()?,
            repeats: self.upscale_repeats,
        })
    }
}

#[pymethods]
impl Pipeline {
    /// Opens a model.
    #[new]
    fn new(py: Python<'_>, model: Model, place: Place) -> PyResult<Self> {
        let Place { provider, device, precision, threads } = place;
        let precision = crate::precision(precision.as_deref())?;
        let recipe = model.recipe();
        work::run(py, None, move |host, _| {
            let registry = registry()?;
            let only = match &provider {
                Some(id) => {
                    let provider = registry.open_with(id, &Isolation::default(), host)?;
                    let device = provider.present_device(device.as_deref())?;
                    Some((provider, device))
                }
                None => None,
            };
            let options = Box::new(move |device: Device| {
                let mut options = BuildOptions::new(device);
                (options.threads, options.precision) = (threads, precision.unwrap_or(options.precision));
                options
            });
            let lane = Lane { only, wishes: wishes(device), options };
            Artist::open(registry, recipe, lane, host)
        })?
        .map(|artist| Pipeline { family: artist.family().title, artist })
        .map_err(not_drawn)
    }

    /// Draws. `hear` is called with steps, warnings and, if `previews` is set, unfinished pictures.
    fn generate<'py>(
        &self,
        py: Python<'py>,
        order: Order,
        hear: Option<Py<PyAny>>,
        previews: bool,
    ) -> PyResult<Vec<Drawn<'py>>> {
        let wanted = order.wanted()?;
        let drawn = work::run(py, hear, |host, tell| {
            let mut pictures = Vec::new();
            let mut pace = Pace::new(None);
            self.artist.draw(&wanted, host, &mut |told| match told {
                Told::Warnings(sentences) => {
                    for sentence in sentences {
                        let _ = tell.send(work::Told::Warning(sentence));
                    }
                }
                Told::Event(Event::Loading { part }) => {
                    let _ = tell.send(work::Told::Step(format!("loading {part}"), 0, 0));
                }
                Told::Event(Event::Step { step, steps, clean, shape, .. }) => {
                    let now = Instant::now();
                    if previews
                        && pace.is_due(*step, now)
                        && let Some(shown) = enlarged(self.artist.family(), clean, *shape)
                    {
                        let (width, height) = shown.dimensions();
                        let _ = tell.send(work::Told::Preview(width, height, shown.into_raw()));
                        pace.took(now, Instant::now());
                    }
                    let _ = tell.send(work::Told::Step("step".into(), *step as u64 + 1, *steps as u64));
                }
                Told::Event(_) => {}
                Told::Picture(finished) => pictures.push(finished),
            })?;
            Ok(pictures)
        })?
        .map_err(not_drawn)?;
        let for_python = |Finished { picture, texts }: Finished| {
            (picture.width, picture.height, PyBytes::new(py, &picture.bytes), picture.seed, texts.into())
        };
        Ok(drawn.into_iter().map(for_python).collect())
    }
}
