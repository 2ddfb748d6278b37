//! Draws pictures, shows how far it is, and writes each picture as soon as it is done.

use super::{
    Args,
    hashing::Hashing,
    model::Opened,
    preview::Preview,
    prompts::{self, Group},
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
use sdrun::{Paths, Registry, abi::Host};
use sdrun_diffusion::{
    family::Family,
    metadata::{PARAMETERS, Record, SDRUN},
    pipeline::{self, Engines, Event, Parts, Picture, Progress, Request, Resolved},
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
    let preview = args.preview.open(&args.output, args.batch_count.max(1))?;
    let registry = context.registry()?;
    let task = context.task("opening the model");
    let host = task.host(context.cancel_flag());
    let (request, from) = wanted(args)?;
    let (first, others) = prompts::groups(args, &request)?;
    for group in &others {
        args.model.check_tags(&group.prompt)?;
    }
    let open = |group: &Group| prepare(args, &request, group, registry.paths(), &host);
    let (opened, resolved) = open(&first)?;
    warn(&resolved, opened.parts.family);

    let threads = args.provider.threads(context);
    let options = |device| args.build.options(device, false, context).threads(threads);
    let engines = Engines {
        only: args.provider.named(&registry, args.isolate, false, context)?,
        wishes: args.provider.wishes(args.isolate, false, context),
        options: &options,
    };
    let pictures = args.batch_count.max(1);
    let mut session = Session {
        args,
        context,
        task: &task,
        registry: &registry,
        engines: &engines,
        host: &host,
        from: from.as_ref(),
        progress: Progress::new(&resolved, &opened.parts, pictures, Instant::now()),
        report: Report::new(opened.parts.family, &resolved),
        preview,
    };
    session.draw(&opened, &resolved, &first)?;
    drop(opened);
    for group in &others {
        let (opened, resolved) = open(group)?;
        session.draw(&opened, &resolved, group)?;
    }
    session.report.seconds = started.elapsed().as_secs_f64();
    Ok(session.report)
}

/// The model and the request for a group of pictures.
fn prepare(
    args: &Args,
    request: &Request,
    group: &Group,
    paths: &Paths,
    host: &dyn Host,
) -> anyhow::Result<(Opened, Resolved)> {
    let opened = args.model.open(&group.prompt, &group.negative, paths, host)?;
    let family = opened.parts.family;
    let size = (request.width.unwrap_or(family.size), request.height.unwrap_or(family.size));
    let request = Request {
        prompt: opened.prompt.clone(),
        negative: group.negative.clone(),
        seed: request.seed.wrapping_add(group.first as u64),
        count: group.count,
        start: args.inputs.start()?,
        controls: args.inputs.controls(args.model.control_nets.len(), family, size)?,
        hires: args.inputs.hires(size, family.multiple)?.or(request.hires),
        ..request.clone()
    };
    let resolved = request.resolve(&opened.parts)?;
    Ok((opened, resolved))
}

/// What all requests share.
struct Session<'a> {
    args: &'a Args,
    context: &'a Context,
    task: &'a Task,
    registry: &'a Registry,
    engines: &'a Engines<'a>,
    host: &'a dyn Host,
    /// The settings that are repeated.
    from: Option<&'a Record>,
    progress: Progress,
    report: Report,
    preview: Option<Preview>,
}

impl Session<'_> {
    /// Draws a request.
    fn draw(&mut self, opened: &Opened, request: &Resolved, group: &Group) -> anyhow::Result<()> {
        let (registry, engines, host, from) = (self.registry, self.engines, self.host, self.from);
        let model = &self.args.model;
        thread::scope(|scope| {
            let files = (!self.args.no_metadata)
                .then(|| Hashing::start(scope, model, opened, registry.paths(), from));
            let mut listener = Listener {
                parts: &opened.parts,
                request,
                files,
                group,
                phase: String::new(),
                networks: Vec::new(),
                fault: None,
                session: self,
            };
            let mut hear = |event: Event<'_>| listener.hear(event);
            pipeline::generate(registry, &opened.parts, request, engines, host, &mut hear)?;
            listener.fault.map_or(Ok(()), Err)
        })
    }
}

/// Hears what the pipeline does with a request.
struct Listener<'a, 's> {
    session: &'a mut Session<'s>,
    request: &'a Resolved,
    parts: &'a Parts,
    /// For the pictures' metadata.
    files: Option<Hashing<'a>>,
    /// Which pictures the request draws.
    group: &'a Group,
    /// What the progress bar says.
    phase: String,
    networks: Vec<Network>,
    /// The first picture that could not be written.
    fault: Option<anyhow::Error>,
}

impl Listener<'_, '_> {
    fn hear(&mut self, event: Event<'_>) {
        self.session.progress.hear(&event, Instant::now());
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
                let network = Network { part, provider, device, precision, built, seconds };
                self.session.report.add(&network);
                self.networks.push(network);
            }
            Event::Widened { part, from } => {
                tracing::warn!("{part} gave values that are not finite in {from}; it runs in fp32 now");
            }
            Event::Tiled { part, tiles, asked: false } => {
                tracing::warn!(
                    "{part} works on {tiles} tiles, because the memory is too small for the whole picture"
                );
            }
            Event::Step { picture, pass, step, steps, shape, clean, .. } => {
                let passes = self.session.progress.passes();
                let pass_name =
                    if passes > 1 { format!(", pass {} of {passes}", pass + 1) } else { String::new() };
                self.phase(format!("drawing {}{pass_name}", self.number(picture)));
                self.show(&step_line(step, steps, pass, &self.session.progress));
                self.preview(clean, shape, step);
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
            self.session.task.rename(&what);
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
            self.phase(format!("drawing {}", self.number(self.session.progress.drawn() - self.group.first)));
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

    /// Shows a preview if it is time to. Without one, the pictures are drawn all the same.
    fn preview(&mut self, clean: &[f32], shape: [usize; 3], step: usize) {
        let Some(preview) = &mut self.session.preview else { return };
        if let Err(error) = preview.show(self.parts.family, clean, shape, step) {
            tracing::warn!("there are no more previews: {error}");
            self.session.preview = None;
        }
    }

    /// Writes a picture.
    fn keep(&mut self, picture: Picture) {
        let Session { args, context, task, report, .. } = &mut *self.session;
        let file = numbered(&args.output, report.pictures.len());
        let seed = picture.seed;
        let record = self.files.as_mut().map(|files| {
            let files = files.record(task, context);
            let networks = self.networks.iter().map(Network::record).collect();
            Record { networks, ..self.request.record(files, seed) }
        });
        match write(&file, picture, record.as_ref()) {
            Ok(()) => {
                let prompt = self.request.prompt.clone();
                let has_choices = args.prompt.as_ref().is_some_and(|given| *given != self.group.prompt);
                report.pictures.push(Drawn { file, seed, prompt, has_choices });
            }
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
pub(super) fn numbered(file: &Path, number: usize) -> PathBuf {
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
