//! The thread of a device: draws one job after the other.

use crate::{
    fault::Fault,
    job::{Drawn, Job, State},
    library::Library,
    metrics::Metrics,
    queue::Queue,
    task::{Draw, Enlarge, Output, Resized, Task, check_pixels, check_sizes},
};
use image::RgbImage;
use sdrun::{
    BuildOptions, Provider, Registry, TracingHost, Wishes,
    abi::{Device, ErrorCode, Flow, Host, LogLevel},
};
use sdrun_diffusion::{
    file::{self, JPEG_QUALITY},
    metadata::{POSTPROCESSING, Record, Upscale},
    picture::Fit,
    pipeline::{
        self, Engines, Event, Group, Kept, LoadedNetwork, Opened, Picture, Progress, Recording, Request,
        Resolved, Upscaler, Wildcards, generate, groups, upscale, warnings,
    },
    preview::{Pace, enlarged},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Instant,
};

/// How a device runs networks.
pub struct Lane {
    /// The provider and device to use; `None` chooses the best.
    pub only: Option<(Provider, Device)>,
    /// Preferred providers, the device, and where providers run.
    pub wishes: Wishes,
}

/// How to build engines for a device.
pub type Options = dyn Fn(Device) -> BuildOptions + Send + Sync;

/// What the thread of a device works with.
pub(crate) struct Studio {
    pub(crate) registry: Arc<Registry>,
    pub(crate) library: Arc<Library>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) options: Arc<Options>,
    pub(crate) lane: Lane,
}

impl Studio {
    /// Does jobs until the queue is closed.
    pub(crate) fn work(self, queue: &Queue) {
        let options = &*self.options;
        let only = self.lane.only.clone();
        let mut engines =
            Engines { only, wishes: self.lane.wishes.clone(), options, kept: Some(Kept::default()) };
        while let Some(job) = queue.next() {
            let Some(task) = job.take() else { continue };
            let began = Instant::now();
            job.change(|status| {
                status.state = State::Running;
                status.phase = "opening the model".into();
            });
            // A panic ends a job, not the server.
            let done = catch_unwind(AssertUnwindSafe(|| self.task(&job, task, &engines)));
            let done = done.unwrap_or_else(|_| Err(Fault::internal("sdrun has a bug: see its log")));
            if done.as_ref().is_err_and(|fault| fault.status >= 500)
                && let Some(kept) = &engines.kept
            {
                // A network may be in any state, and its memory is needed if it ran out.
                kept.clear();
            }
            if done.is_err() {
                self.reopen(&mut engines);
            }
            let state = match &done {
                Ok(()) => State::Done,
                Err(_) if job.is_cancelled() => State::Cancelled,
                Err(_) => State::Failed,
            };
            if let Err(fault) = &done {
                tracing::info!("job {}: {}", job.id, fault.message);
            }
            self.metrics.ended(state, began.elapsed());
            job.change(|status| {
                status.state = state;
                status.fault = done.err().filter(|_| state == State::Failed);
                status.seconds = Some(began.elapsed().as_secs_f64());
                status.seconds_left = None;
                status.phase = String::new();
            });
        }
    }

    /// Opens the user's provider again if its process has ended.
    fn reopen(&self, engines: &mut Engines<'_>) {
        let Some((provider, device)) = &mut engines.only else { return };
        if !provider.has_ended() {
            return;
        }
        match self.registry.open(provider.id(), &self.lane.wishes.isolation) {
            Ok(new) => match new.present_device(Some(&device.id)) {
                Ok(found) => (*provider, *device) = (new, found),
                Err(error) => tracing::warn!("{error}"),
            },
            // The next job says why.
            Err(error) => tracing::warn!("{error}"),
        }
    }

    fn task(&self, job: &Arc<Job>, task: Task, engines: &Engines<'_>) -> Result<(), Fault> {
        match task {
            Task::Draw(draw) => self.draw(job, &draw, engines),
            Task::Enlarge(enlarge) => self.enlarge(job, *enlarge, engines),
            Task::Unload => {
                engines.kept.as_ref().inspect(|kept| kept.clear());
                Ok(())
            }
        }
    }

    fn draw(&self, job: &Arc<Job>, draw: &Draw, engines: &Engines<'_>) -> Result<(), Fault> {
        let wildcards = self.library.folders.wildcards.as_deref().filter(|folder| folder.is_dir());
        let wildcards = wildcards.map(Wildcards::open).transpose()?;
        let (first, others) = groups(&draw.wanted.request, [true; 2], wildcards.as_ref())?;
        let mut progress = None;
        for group in std::iter::once(&first).chain(&others) {
            let host = &JobHost { job, skips: true };
            let paths = &self.library.paths;
            let opened = draw.recipe.open(&group.prompt, &group.negative, paths, host)?;
            let request = draw.wanted.request(&opened.parts)?;
            let resolved = group.resolve(&request, &opened)?;
            check_sizes(&resolved)?;
            job.change(|status| status.warnings = warnings(&resolved, &opened.parts));
            let progress = progress.get_or_insert_with(|| {
                Progress::new(&resolved, &opened.parts, request.count.max(1), Instant::now())
            });
            self.group(job, draw, &request, group, &opened, engines, progress)?;
        }
        Ok(())
    }

    /// Draws pictures with the same prompts. After a picture that was left out, goes on with the next.
    #[expect(clippy::too_many_arguments, reason = "each is a thing of its own, and one caller has them all")]
    fn group(
        &self,
        job: &Arc<Job>,
        draw: &Draw,
        request: &Request,
        group: &Group,
        opened: &Opened,
        engines: &Engines<'_>,
        progress: &mut Progress,
    ) -> Result<(), Fault> {
        let host = &JobHost { job, skips: true };
        let whole = &JobHost { job, skips: false };
        thread::scope(|scope| {
            // Leaving out a picture does not stop it.
            let mut files = Recording::start(scope, &draw.recipe, opened, &self.library.paths, whole, |_| ());
            let mut group = group.clone();
            while group.count > 0 {
                let resolved = group.resolve(request, opened)?;
                let mut drawn = 0;
                let mut listener = Listener {
                    studio: self,
                    job,
                    output: draw.output,
                    request: &resolved,
                    opened,
                    progress: &mut *progress,
                    pace: Pace::new(None),
                    fault: None,
                };
                let mut hear = |event: Event<'_>| {
                    listener.hear(&event);
                    if let Event::Picture(picture) = event {
                        drawn += 1;
                        listener.keep(picture, files.found());
                    }
                };
                let done = generate(&self.registry, &opened.parts, &resolved, engines, host, &mut hear);
                if let Some(fault) = listener.fault {
                    return Err(fault);
                }
                match done {
                    Ok(()) => return Ok(()),
                    Err(_) if job.is_cancelled() => return Err(Fault::cancelled()),
                    Err(error) if error.code() == ErrorCode::Cancelled && job.skipped() => {
                        let over = (drawn + 1).min(group.count);
                        (group.first, group.count) = (group.first + over, group.count - over);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        })
    }

    fn enlarge(&self, job: &Arc<Job>, task: Enlarge, engines: &Engines<'_>) -> Result<(), Fault> {
        let Enlarge { picture, mut texts, upscaler, size, output } = task;
        let host = &JobHost { job, skips: true };
        let mut large = picture.clone();
        if let Some(file) = &upscaler {
            let upscaler = Upscaler::open(file, &self.library.paths, host)?;
            let repeats = match size {
                Resized::Factor(factor) => upscaler.repeats(factor),
                Resized::Pixels(width, height, _) => {
                    let factor = |new: u32, old: u32| f64::from(new) / f64::from(old.max(1));
                    upscaler.repeats(factor(width, picture.width()).max(factor(height, picture.height())))
                }
            };
            let mut hear = |event: Event<'_>| match event {
                Event::Tile { tile, tiles, .. } => job.change(|status| {
                    status.phase = format!("tile {} of {tiles}", tile + 1);
                    (status.done, status.total) = (tile + 1, tiles);
                }),
                event => loaded(self, job, &event),
            };
            let source = picture.clone();
            large = upscale(&self.registry, &upscaler, source, repeats, engines, host, &mut hear)?;
            let name = Upscale::new(&file.to_string_lossy(), None, upscaler.factor(repeats));
            texts.retain(|(key, _)| key != POSTPROCESSING);
            texts.push((POSTPROCESSING.into(), name.infotext()));
        }
        let (width, height) = match size {
            Resized::Factor(factor) => {
                let side = |pixels: u32| ((f64::from(pixels) * factor).round() as u32).max(1);
                (side(picture.width()), side(picture.height()))
            }
            Resized::Pixels(width, height, _) => (width, height),
        };
        if large.dimensions() != (width, height) {
            check_pixels(width as usize, height as usize)?;
            let fit = if matches!(size, Resized::Pixels(.., true)) { Fit::Crop } else { Fit::Stretch };
            large = fit.picture(&large, width, height).map_err(pipeline::Error::from)?;
        }
        let texts: Vec<(&str, &str)> = texts.iter().map(|(key, text)| (&**key, &**text)).collect();
        let drawn = encoded(output, &large, &texts, None, String::new())?;
        job.change(|status| status.pictures.push(Arc::new(drawn)));
        self.metrics.picture();
        Ok(())
    }
}

/// Keeps what the pipeline does with a request in the job's status.
struct Listener<'a> {
    studio: &'a Studio,
    job: &'a Arc<Job>,
    output: Output,
    request: &'a Resolved,
    opened: &'a Opened,
    progress: &'a mut Progress,
    pace: Pace,
    fault: Option<Fault>,
}

impl Listener<'_> {
    fn hear(&mut self, event: &Event<'_>) {
        self.progress.hear(event, Instant::now());
        let progress = &*self.progress;
        let (done, total, left) = (progress.done(), progress.total(), progress.seconds_left());
        let number = |picture: usize| format!("{} of {}", picture + 1, progress.pictures());
        let phase = match event {
            Event::Loading { part } => Some(format!("loading {part}")),
            Event::Step { running, .. } => {
                self.studio.metrics.step(*running);
                Some(format!("drawing picture {}", number(progress.drawn())))
            }
            Event::Decoding { .. } => Some(format!("decoding picture {}", number(progress.drawn()))),
            Event::Tile { tile, tiles, .. } => Some(format!("enlarging: tile {} of {tiles}", tile + 1)),
            Event::Widened { part, from } => {
                tracing::warn!("{part} gave values that are not finite in {from}; it runs in fp32 now");
                None
            }
            _ => None,
        };
        let preview = match event {
            Event::Step { clean, shape, step, .. } if self.output.previews => {
                self.preview(clean, *shape, *step)
            }
            _ => None,
        };
        loaded(self.studio, self.job, event);
        self.job.change(|status| {
            (status.done, status.total, status.seconds_left) = (done, total, left);
            if let Event::Step { step, steps, .. } = event {
                status.step = (step + 1, *steps);
            }
            if let Event::Widened { part, from } = event {
                status.warnings.push(format!(
                    "{part} gave values that are not finite in {from}, so that it ran again in fp32"
                ));
            }
            status.phase = phase.unwrap_or(std::mem::take(&mut status.phase));
            if let Some(bytes) = preview {
                let number = status.preview.as_ref().map_or(1, |(number, _)| number + 1);
                status.preview = Some((number, bytes));
            }
        });
    }

    fn preview(&mut self, clean: &[f32], shape: [usize; 3], step: usize) -> Option<Arc<[u8]>> {
        let began = Instant::now();
        if !self.pace.is_due(step, began) {
            return None;
        }
        let picture = enlarged(self.opened.parts.family, clean, shape)?;
        let bytes = file::encode(file::Format::Jpeg, &picture, JPEG_QUALITY, &[]).ok()?;
        self.pace.took(began, Instant::now());
        Some(bytes.into())
    }

    fn keep(&mut self, picture: Picture, files: &Record) {
        let (seed, variation) = (picture.seed, picture.variation);
        let networks = self.job.status().networks.iter().map(LoadedNetwork::record).collect();
        let record = Record { networks, ..self.request.record(files, seed, variation) };
        let texts = file::texts(&record);
        let texts: Vec<(&str, &str)> = texts.iter().map(|(key, text)| (*key, text.as_str())).collect();
        let parameters = texts[0].1.to_string();
        match encoded(self.output, &picture.into_rgb(), &texts, Some(record), parameters) {
            Ok(drawn) => self.job.change(|status| status.pictures.push(Arc::new(drawn))),
            Err(fault) => self.fault = Some(fault),
        }
        self.studio.metrics.picture();
    }
}

/// Notes a network that was loaded.
fn loaded(studio: &Studio, job: &Job, event: &Event<'_>) {
    let Event::Loaded(loaded) = event else { return };
    studio.metrics.network(loaded.origin, loaded.seconds);
    job.change(|status| {
        // Of a network that comes several times, the first time tells where it came from.
        if !status.networks.iter().any(|known| known.part == loaded.part) {
            status.networks.push((*loaded).clone());
        }
    });
}

fn encoded(
    output: Output,
    picture: &RgbImage,
    texts: &[(&str, &str)],
    record: Option<Record>,
    parameters: String,
) -> Result<Drawn, Fault> {
    let bytes = file::encode(output.format, picture, output.quality, texts)
        .map_err(|why| Fault::invalid(format!("the picture cannot be stored: {why}")))?;
    let (width, height) = picture.dimensions();
    Ok(Drawn { width, height, media_type: output.format.media_type(), bytes, record, parameters })
}

/// Logs, and stops the work of a job that is cancelled.
struct JobHost<'a> {
    job: &'a Arc<Job>,
    /// Whether leaving out a picture stops the work.
    skips: bool,
}

impl Host for JobHost<'_> {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        TracingHost.log(level, target, message);
    }

    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        if self.cancelled() { Flow::Cancel } else { Flow::Continue }
    }

    fn cancelled(&self) -> bool {
        self.job.is_cancelled() || (self.skips && self.job.is_skipped())
    }
}

/// A lane for the provider and the device that a user names, with providers of its own: lanes work at the same time.
///
/// # Errors
/// Providers and devices that cannot be opened.
pub fn lane(registry: &Registry, provider: Option<&str>, wishes: Wishes) -> sdrun::Result<Lane> {
    let only = match provider {
        None => None,
        Some(id) => {
            let provider = registry.open(id, &wishes.isolation)?;
            let device = provider.present_device(wishes.device.as_deref())?;
            Some((provider, device))
        }
    };
    Ok(Lane { only, wishes: wishes.with_own_providers() })
}
