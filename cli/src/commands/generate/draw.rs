//! Draws pictures, shows how far it is, and writes each picture as soon as it is done.

use super::{
    Args,
    hashing::Hashing,
    report::{Drawn, Network, Report, step_line},
    wanted,
};
use crate::{
    context::Context,
    files::{
        self,
        picture::{self, JPEG_QUALITY},
    },
    progress::Task,
};
use sdrun_diffusion::{
    family::Family,
    metadata::{PARAMETERS, Record, SDRUN},
    pipeline::{self, Engines, Event, Parts, Picture, Progress, Resolved},
};
use std::{
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

/// Draws the pictures and writes each as soon as it is done.
pub(super) fn draw(args: &Args, context: &Context) -> anyhow::Result<Report> {
    let started = Instant::now();
    picture::Format::of(&args.output)?;
    for number in 0..args.batch_count.max(1) {
        files::check_target(&numbered(&args.output, number))?;
    }
    let registry = context.registry()?;
    let task = context.task("opening the model");
    let host = task.host(context.cancel_flag());
    let (mut request, from) = wanted(args)?;
    let opened = args.model.open(&request.prompt, &request.negative, registry.paths(), &host)?;
    let parts = &opened.parts;
    request.prompt = opened.prompt.clone();
    let family = parts.family;
    let size = (request.width.unwrap_or(family.size), request.height.unwrap_or(family.size));
    request.start = args.inputs.start()?;
    request.controls = args.inputs.controls(args.model.control_nets.len(), family, size)?;
    request.hires = args.inputs.hires(size, family.multiple)?.or(request.hires);
    let request = request.resolve(parts)?;
    warn(&request, family);

    let threads = args.provider.threads(context);
    let options = |device| args.build.options(device, false, context).threads(threads);
    let engines = Engines {
        only: args.provider.named(&registry, args.isolate, false, context)?,
        wishes: args.provider.wishes(args.isolate, false, context),
        options: &options,
    };
    let (networks, drawn) = thread::scope(|scope| {
        let files = (!args.no_metadata)
            .then(|| Hashing::start(scope, &args.model, &opened, registry.paths(), from.as_ref()));
        let progress = Progress::new(&request, parts, request.count, Instant::now());
        let mut listener = Listener {
            args,
            context,
            task: &task,
            request: &request,
            parts,
            progress,
            files,
            phase: String::new(),
            networks: Vec::new(),
            drawn: Vec::new(),
            fault: None,
        };
        pipeline::generate(&registry, parts, &request, &engines, &host, &mut |event| listener.hear(event))?;
        match listener.fault {
            Some(error) => Err(error),
            None => Ok((listener.networks, listener.drawn)),
        }
    })?;
    Ok(Report::new(family, &request, networks, drawn, started.elapsed().as_secs_f64()))
}

/// Hears what the pipeline does.
struct Listener<'a> {
    args: &'a Args,
    context: &'a Context,
    task: &'a Task,
    request: &'a Resolved,
    parts: &'a Parts,
    progress: Progress,
    /// For the pictures' metadata.
    files: Option<Hashing<'a>>,
    /// What the progress bar says.
    phase: String,
    networks: Vec<Network>,
    drawn: Vec<Drawn>,
    /// The first picture that could not be written.
    fault: Option<anyhow::Error>,
}

impl Listener<'_> {
    fn hear(&mut self, event: Event<'_>) {
        self.progress.hear(&event, Instant::now());
        match event {
            Event::Prompt { part, tokens, lost } => {
                self.phase("encoding prompts".into());
                if lost > 0 {
                    tracing::warn!("{part} takes {} of the prompt's {tokens} tokens", tokens - lost);
                }
            }
            Event::Loading { part } => self.phase(format!("loading {part}")),
            Event::Loaded { part, provider, device, precision, built, seconds } => {
                tracing::info!("{part} on {provider} ({device}, {precision}) after {seconds:.1} s");
                self.runs(part);
                let [part, provider, device] = [part, provider, device].map(str::to_string);
                let precision = precision.to_string();
                self.networks.push(Network { part, provider, device, precision, built, seconds });
            }
            Event::Widened { part, from } => {
                tracing::warn!("{part} gave values that are not finite in {from}; it runs in fp32 now");
            }
            Event::Tiled { part, tiles, asked: false } => {
                tracing::warn!(
                    "{part} works on {tiles} tiles, because the memory is too small for the whole picture"
                );
            }
            Event::Step { picture, pass, step, steps, .. } => {
                let passes = self.progress.passes();
                let of_pass =
                    if passes > 1 { format!(", pass {} of {passes}", pass + 1) } else { String::new() };
                self.phase(format!("drawing {}{of_pass}", self.number(picture)));
                self.show(&step_line(step, steps, pass, &self.progress));
            }
            Event::Decoding { picture } => {
                self.phase(format!("decoding {}", self.number(picture)));
                self.show("");
            }
            Event::Picture(picture) => self.keep(picture),
            _ => {}
        }
    }

    /// Says what happens now.
    fn phase(&mut self, what: String) {
        if self.phase != what {
            self.task.rename(&what);
            self.phase = what;
        }
    }

    /// A network is loaded and starts to run.
    fn runs(&mut self, part: &str) {
        let Parts { encoders, denoiser, vae_encoder, .. } = self.parts;
        if encoders.iter().flatten().any(|encoder| encoder.part.name == part) {
            self.phase("encoding prompts".into());
        } else if vae_encoder.as_ref().is_some_and(|encoder| encoder.name == part) {
            self.phase("encoding the picture".into());
        } else if denoiser.name == part {
            self.phase(format!("drawing {}", self.number(self.progress.drawn())));
            self.show("");
        }
    }

    fn number(&self, picture: usize) -> String {
        format!("picture {} of {}", picture + 1, self.progress.pictures())
    }

    fn show(&self, message: &str) {
        self.task.step(message, self.progress.done() as u64, self.progress.total() as u64);
    }

    /// Writes a picture.
    fn keep(&mut self, picture: Picture) {
        let file = numbered(&self.args.output, self.drawn.len());
        let seed = picture.seed;
        let record = self.files.as_mut().map(|files| {
            let files = files.record(self.task, self.context);
            let networks = self.networks.iter().map(Network::record).collect();
            Record { networks, ..self.request.record(files, seed) }
        });
        match write(&file, picture, record.as_ref()) {
            Ok(()) => self.drawn.push(Drawn { file, seed }),
            Err(error) => self.fault = self.fault.take().or(Some(error)),
        }
    }
}

/// Says what contradicts the model.
fn warn(request: &Resolved, family: &Family) {
    let scale = request.guidance.scale;
    if family.defaults.scale == 1.0 && scale != 1.0 {
        tracing::warn!(
            "{} was trained without a negative prompt: --cfg-scale {scale} takes twice the time and mostly makes pictures worse",
            family.title
        );
    }
}

/// `NAME.png`, `NAME-2.png` and so on.
fn numbered(file: &Path, number: usize) -> PathBuf {
    if number == 0 {
        return file.to_path_buf();
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let ending = file.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    file.with_file_name(format!("{stem}-{}{ending}", number + 1))
}

fn write(file: &Path, picture: Picture, record: Option<&Record>) -> anyhow::Result<()> {
    let image = picture::rgb(picture.width, picture.height, picture.bytes)?;
    let texts = record.map(|record| [(PARAMETERS, record.infotext().to_string()), (SDRUN, record.to_json())]);
    let texts: Vec<(&str, &str)> = texts.iter().flatten().map(|(key, text)| (*key, text.as_str())).collect();
    picture::write(file, &image, JPEG_QUALITY, &texts)
}

#[cfg(test)]
mod tests {
    use super::numbered;
    use std::path::Path;

    #[test]
    fn further_pictures_have_a_number() {
        assert_eq!(numbered(Path::new("a/fox.png"), 0), Path::new("a/fox.png"));
        assert_eq!(numbered(Path::new("a/fox.png"), 1), Path::new("a/fox-2.png"));
        assert_eq!(numbered(Path::new("fox"), 2), Path::new("fox-3"));
    }
}
