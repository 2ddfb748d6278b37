//! Shows what the pipeline does, and keeps what it draws.

use super::{
    draw::Session,
    output::{numbered, write},
    report::{Drawn, Line, log, step_line},
};
use sdrun_diffusion::{
    metadata::Record,
    pipeline::{Event, Group, LoadedNetwork, Parts, Picture, Recording, Resolved},
};
use std::time::Instant;

/// Hears what the pipeline does with a request.
pub(super) struct Listener<'a, 's> {
    pub(super) session: &'a mut Session<'s>,
    pub(super) request: &'a Resolved,
    pub(super) parts: &'a Parts,
    /// For the pictures' metadata.
    pub(super) files: Option<Recording<'a>>,
    /// Which pictures the request draws.
    pub(super) group: &'a Group,
    /// What the progress bar says.
    pub(super) phase: String,
    /// The first picture or line that could not be written.
    pub(super) fault: Option<anyhow::Error>,
}

impl Listener<'_, '_> {
    pub(super) fn hear(&mut self, event: Event<'_>) {
        self.session.progress.hear(&event, Instant::now());
        log(&event);
        match event {
            Event::Prompt { part, tokens, lost } => {
                self.phase("encoding prompts".into());
                self.line(&Line::Prompt { part, tokens, lost });
                if lost > 0 {
                    tracing::warn!("{part} takes {} of the prompt's {tokens} tokens", tokens - lost);
                }
            }
            Event::Loading { part } => {
                self.phase(format!("loading {part}"));
                self.line(&Line::Loading { part });
            }
            Event::Loaded(network) => {
                self.runs(&network.part);
                self.line(&Line::Loaded(network));
                self.session.report.add(network);
            }
            Event::Widened { part, from } => {
                self.line(&Line::Widened { part, from: from.to_string() });
            }
            Event::Tiled { part, tiles, asked } => {
                self.line(&Line::Tiled { part, tiles });
                if !asked {
                    tracing::warn!(
                        "{part} works on {tiles} tiles, because the memory is too small for the whole picture"
                    );
                }
            }
            Event::Step { picture, pass, step, steps, shape, clean, running, .. } => {
                let passes = self.session.progress.passes();
                let pass_name =
                    if passes > 1 { format!(", pass {} of {passes}", pass + 1) } else { String::new() };
                self.phase(format!("drawing {}{pass_name}", self.number(picture)));
                self.show(&step_line(step, steps, pass, &self.session.progress));
                let (done, total) = (self.session.progress.done(), self.session.progress.total());
                let seconds_left = self.session.progress.seconds_left();
                let (number, pass) = (self.group.first + picture + 1, pass + 1);
                let line = Line::Step {
                    picture: number,
                    pass,
                    step: step + 1,
                    steps,
                    done,
                    total,
                    running,
                    seconds_left,
                };
                self.line(&line);
                if running == 0.0 && self.request.reuse.is_some() {
                    self.session.report.reused += 1;
                }
                self.preview(picture, clean, shape, step);
            }
            Event::Decoding { picture } => {
                self.phase(format!("decoding {}", self.number(picture)));
                self.line(&Line::Decoding { picture: self.group.first + picture + 1 });
                self.show("");
            }
            Event::Tile { picture, tile, tiles } => {
                self.phase(format!("upscaling {}", self.number(picture)));
                self.line(&Line::Tile { picture: self.group.first + picture + 1, tile: tile + 1, tiles });
                self.show(&format!("tile {} of {tiles}", tile + 1));
            }
            Event::Picture(picture) => self.keep(picture),
            _ => {}
        }
    }

    /// Says what happens now.
    fn phase(&mut self, what: String) {
        if self.phase != what {
            self.session.task.rename(&what);
            self.phase = what;
        }
    }

    /// A network is loaded and starts to run.
    fn runs(&mut self, part: &str) {
        let models = || [Some(self.parts), self.parts.refiner.as_deref()].into_iter().flatten();
        let encodes =
            |parts: &Parts| parts.encoders.iter().flatten().any(|encoder| encoder.part.name == part);
        if models().any(encodes) {
            self.phase("encoding prompts".into());
        } else if self.parts.vae_encoder.as_ref().is_some_and(|encoder| encoder.name == part) {
            self.phase("encoding the picture".into());
        } else if models().any(|parts| parts.denoiser.name == part) {
            self.phase(format!(
                "drawing {}",
                self.number(self.session.progress.drawn().saturating_sub(self.group.first))
            ));
            self.show("");
        }
    }

    /// `picture 2 of 4`: a picture of this request, counted from 0.
    fn number(&self, picture: usize) -> String {
        format!("picture {} of {}", self.group.first + picture + 1, self.session.progress.pictures())
    }

    fn show(&self, message: &str) {
        let Session { task, progress, .. } = &self.session;
        task.step(message, progress.done() as u64, progress.total() as u64);
    }

    /// Shows a preview if one is due. If that fails, drawing goes on without previews.
    fn preview(&mut self, picture: usize, clean: &[f32], shape: [usize; 3], step: usize) {
        let Some(mut preview) = self.session.preview.take() else { return };
        match preview.show(self.parts.family, clean, shape, step) {
            Ok(file) => {
                if let Some(file) = file {
                    self.line(&Line::Preview { picture: self.group.first + picture + 1, file });
                }
                self.session.preview = Some(preview);
            }
            Err(error) => tracing::warn!("there are no more previews: {error}"),
        }
    }

    /// Prints an event with `--json`.
    fn line(&mut self, line: &Line<'_>) {
        if let Err(error) = self.session.context.event(line) {
            self.fault = self.fault.take().or(Some(error));
        }
    }

    /// Writes a picture.
    fn keep(&mut self, picture: Picture) {
        let Session { args, task, report, .. } = &mut *self.session;
        let file = numbered(&args.output, report.pictures.len());
        let (seed, variation) = (picture.seed, picture.variation);
        let record = self.files.as_mut().map(|files| {
            if files.is_running() {
                task.rename("hashing the model for the picture's metadata");
            }
            let files = files.found();
            // A text encoder isn't loaded again if its prompts were encoded before, so this lists earlier networks too.
            let networks = report.networks.iter().map(LoadedNetwork::record).collect();
            Record { networks, ..self.request.record(files, seed, variation) }
        });
        match write(&file, picture, record.as_ref()) {
            Ok(()) => {
                let prompt = self.request.prompt.clone();
                let has_choices = args.prompt.as_ref().is_some_and(|given| *given != self.group.prompt);
                let drawn = Drawn { file, seed, variation, prompt, has_choices };
                self.line(&Line::Picture(&drawn));
                self.session.report.pictures.push(drawn);
            }
            Err(error) => self.fault = self.fault.take().or(Some(error)),
        }
    }
}
