//! Pictures from prompts.

use crate::{failed, invalid, not_drawn, registry, wishes, work};
use image::RgbImage;
use pyo3::{prelude::*, types::PyBytes};
use sdrun::{
    BuildOptions, Isolation, Provider, Registry, Wishes,
    abi::{Device, ErrorCode, Precision},
};
use sdrun_diffusion::{
    file, names,
    picture::Fit,
    pipeline::{
        Engines, Error, Event, Files, Kept, Named, Picture, Recipe, Request, Start, generate, groups,
    },
};
use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// Width, height, RGB bytes, seed, and texts for the file by their key.
type Drawn<'py> = (usize, usize, Bound<'py, PyBytes>, u64, Vec<(&'static str, String)>);

/// A model that draws. Its networks stay loaded between calls. One call at a time; others wait.
#[pyclass(frozen)]
pub(crate) struct Pipeline {
    registry: Registry,
    recipe: Recipe,
    only: Option<(Provider, Device)>,
    wishes: Wishes,
    precision: Option<Precision>,
    threads: Option<usize>,
    kept: Mutex<Kept>,
    /// Name of the model's family.
    #[pyo3(get)]
    family: String,
}

/// What to draw; `None` is the default of the model's family.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Wanted {
    prompt: String,
    negative_prompt: String,
    width: Option<usize>,
    height: Option<usize>,
    steps: Option<usize>,
    guidance: Option<f64>,
    sampler: Option<String>,
    schedule: Option<String>,
    seed: u64,
    count: usize,
    clip_skip: Option<usize>,
    /// Width, height, RGB bytes.
    image: Option<(u32, u32, Vec<u8>)>,
    strength: f64,
}

impl Wanted {
    fn request(self) -> PyResult<Request> {
        let mut request = Request {
            prompt: self.prompt,
            negative: self.negative_prompt,
            width: self.width,
            height: self.height,
            steps: self.steps,
            scale: self.guidance,
            seed: self.seed,
            count: self.count,
            clip_skip: self.clip_skip,
            ..Request::default()
        };
        if let Some(name) = self.sampler {
            let unknown = || invalid(format!("there is no sampler {name:?}"));
            let (sampler, schedule) = names::sampler(&name).ok_or_else(unknown)?;
            (request.sampler, request.schedule) = (Some(sampler), schedule);
        }
        if let Some(name) = self.schedule {
            let unknown = || invalid(format!("there is no schedule {name:?}"));
            request.schedule = Some(names::schedule(&name).ok_or_else(unknown)?);
        }
        if let Some((width, height, bytes)) = self.image {
            let picture = RgbImage::from_raw(width, height, bytes);
            let picture = picture.ok_or_else(|| invalid("the image has too few bytes"))?;
            request.start = Some(Start { picture, fit: Fit::Crop, strength: self.strength, inpaint: None });
        }
        Ok(request)
    }
}

#[pymethods]
impl Pipeline {
    /// Opens a model: a checkpoint, a diffusers folder, or an Optimum folder; `None` is the demo model.
    #[new]
    #[pyo3(signature = (files, loras, lora_folders, embedding_folders, provider, device, precision, threads))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        files: [Option<PathBuf>; 8],
        loras: Vec<(PathBuf, f32)>,
        lora_folders: Vec<PathBuf>,
        embedding_folders: Vec<PathBuf>,
        provider: Option<String>,
        device: Option<String>,
        precision: Option<&str>,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let precision = crate::precision(precision)?;
        let [model, denoiser, clip_l, clip_g, t5, t5_vocabulary, llm, autoencoder] = files;
        let named = |(file, strength)| Named { file, strength, text_encoder_strength: strength };
        let mut recipe = Recipe {
            files: Files {
                model,
                denoiser,
                clip_l,
                clip_g,
                t5,
                t5_vocabulary,
                llm,
                autoencoder,
                ..Files::default()
            },
            loras: loras.into_iter().map(named).collect(),
            lora_folders,
            embedding_folders,
            ..Recipe::default()
        };
        work::run(py, None, move |host, _| {
            let registry = registry().map_err(failed)?;
            if recipe.files == Files::default() {
                recipe.files.model = Some(sdrun_diffusion::demo::NAME.into());
            }
            recipe.find_demo(registry.paths()).map_err(failed)?;
            // Says now what is wrong with the files, and not when the first picture is wanted.
            let opened = recipe.open("", "", registry.paths(), host).map_err(not_drawn)?;
            let only = match &provider {
                Some(id) => {
                    let provider = registry.open_with(id, &Isolation::default(), host).map_err(failed)?;
                    let device = provider.present_device(device.as_deref()).map_err(failed)?;
                    Some((provider, device))
                }
                None => None,
            };
            Ok(Pipeline {
                family: opened.parts.family.title.to_string(),
                wishes: wishes(device),
                kept: Mutex::default(),
                registry,
                recipe,
                only,
                precision,
                threads,
            })
        })?
    }

    /// Draws.
    fn generate<'py>(
        &self,
        py: Python<'py>,
        wanted: Wanted,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Drawn<'py>>> {
        let request = wanted.request()?;
        let drawn = work::run(py, progress, |host, tell| {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let options = |device: Device| {
                let mut options = BuildOptions::new(device);
                options.threads = self.threads;
                options.precision = self.precision.unwrap_or(options.precision);
                options
            };
            let mut engines = Engines::new(&options);
            (engines.only, engines.wishes) = (self.only.clone(), self.wishes.clone());
            engines.kept = Some(std::mem::take(&mut *kept));
            let done = self.draw(&request, &engines, host, tell);
            // A network may be in any state after a failure, and its memory is needed if it ran out.
            let harmless = |e: &Error| matches!(e.code(), ErrorCode::InvalidArgument | ErrorCode::Cancelled);
            let sound = done.as_ref().err().is_none_or(harmless);
            if sound {
                *kept = engines.kept.take().unwrap_or_default();
            }
            done
        })?
        .map_err(not_drawn)?;
        let for_python = |(picture, texts): (Picture, Vec<_>)| {
            (picture.width, picture.height, PyBytes::new(py, &picture.bytes), picture.seed, texts)
        };
        Ok(drawn.into_iter().map(for_python).collect())
    }
}

impl Pipeline {
    fn draw(
        &self,
        request: &Request,
        engines: &Engines<'_>,
        host: &dyn sdrun::abi::Host,
        tell: &std::sync::mpsc::Sender<work::Progress>,
    ) -> Result<Vec<(Picture, Vec<(&'static str, String)>)>, Error> {
        let paths = self.registry.paths();
        let mut drawn = Vec::new();
        let (first, others) = groups(request, [true; 2], None)?;
        for group in std::iter::once(&first).chain(&others) {
            let opened = self.recipe.open(&group.prompt, &group.negative, paths, host)?;
            let resolved = group.resolve(request, &opened)?;
            let files = self.recipe.record(&opened, paths, host);
            let mut pictures = Vec::new();
            generate(&self.registry, &opened.parts, &resolved, engines, host, &mut |event| match event {
                Event::Loading { part } => drop(tell.send((format!("loading {part}"), 0, 0))),
                Event::Step { step, steps, .. } => {
                    drop(tell.send(("step".into(), step as u64 + 1, steps as u64)));
                }
                Event::Picture(picture) => pictures.push(picture),
                _ => {}
            })?;
            drawn.extend(pictures.into_iter().map(|picture| {
                let texts = file::texts(&resolved.record(&files, picture.seed, picture.variation));
                (picture, texts.into())
            }));
        }
        Ok(drawn)
    }
}
