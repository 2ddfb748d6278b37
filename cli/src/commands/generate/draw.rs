//! Draws the pictures of a command.

use super::{
    Args, explain,
    hashing::Hashing,
    listener::Listener,
    model::{ModelArgs, Opened},
    output::numbered,
    preview::Preview,
    prompts::{self, Group},
    report::Report,
    upscaling, wanted,
};
use crate::{
    context::Context,
    files::{self, picture},
    progress::Task,
};
use sdrun::{Registry, abi::Host};
use sdrun_diffusion::{
    demo,
    metadata::Record,
    pipeline::{self, Engines, Event, Kept, Parts, Progress, Request, Resolved},
};
use std::{thread, time::Instant};

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
    let model = args.model.settled(from.as_ref(), context, registry.paths())?;
    for group in &others {
        model.check_tags(&group.prompt)?;
    }
    let open = |group: &Group| model.open(&group.prompt, &group.negative, registry.paths(), &host);
    let opened = open(&first)?;
    let request = with_inputs(args, request, from.as_ref(), &opened.parts)?;
    let resolved = of_group(&request, &first, &opened)?;
    warn(&resolved, &opened.parts);

    let threads = args.provider.threads(context);
    let options = |device| args.build.options(device, false, context).threads(threads);
    let mut engines = args.provider.engines(&registry, args.isolate, context, &options)?;
    // Pictures with different prompts are several requests.
    engines.kept = (!others.is_empty()).then(Kept::default);
    if args.explain {
        let plan = pipeline::plan(&registry, &opened.parts, &resolved, &engines, &host)?;
        explain::show(&plan, context)?;
    }
    let pictures = args.batch_count.max(1);
    let mut session = Session {
        args,
        model: &model,
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
        let opened = open(group)?;
        let resolved = of_group(&request, group, &opened)?;
        session.draw(&opened, &resolved, group)?;
    }
    session.report.seconds = started.elapsed().as_secs_f64();
    Ok(session.report)
}

/// The request with the pictures that it starts from and follows, the second pass, and how often results are enlarged.
fn with_inputs(
    args: &Args,
    request: Request,
    from: Option<&Record>,
    parts: &Parts,
) -> anyhow::Result<Request> {
    let family = parts.family;
    let size = (request.width.unwrap_or(family.size), request.height.unwrap_or(family.size));
    let upscaler = parts.upscaler.as_ref();
    let hires = args.inputs.hires(size, family.multiple, upscaler.is_some())?.or(request.hires);
    Ok(Request {
        start: args.inputs.start()?,
        references: args.inputs.references()?,
        controls: args.inputs.controls(args.model.control_nets.len(), family, size)?,
        hires,
        upscale_repeats: upscaling::repeats(args.inputs.upscale_repeats, upscaler, hires, from),
        ..request
    })
}

/// The request for a group of pictures.
fn of_group(request: &Request, group: &Group, opened: &Opened) -> anyhow::Result<Resolved> {
    let request = Request {
        prompt: opened.prompt.clone(),
        negative: group.negative.clone(),
        seed: request.seed.wrapping_add(group.first as u64),
        count: group.count,
        ..request.clone()
    };
    Ok(request.resolve(&opened.parts)?)
}

/// What all requests share.
pub(super) struct Session<'a> {
    pub(super) args: &'a Args,
    model: &'a ModelArgs,
    pub(super) context: &'a Context,
    pub(super) task: &'a Task,
    registry: &'a Registry,
    engines: &'a Engines<'a>,
    host: &'a dyn Host,
    /// The settings that are repeated.
    from: Option<&'a Record>,
    pub(super) progress: Progress,
    pub(super) report: Report,
    pub(super) preview: Option<Preview>,
}

impl Session<'_> {
    /// Draws a request.
    fn draw(&mut self, opened: &Opened, request: &Resolved, group: &Group) -> anyhow::Result<()> {
        let Self { registry, engines, host, from, model, .. } = *self;
        thread::scope(|scope| {
            let files = (!self.args.no_metadata)
                .then(|| Hashing::start(scope, model, opened, registry.paths(), from));
            let mut listener = Listener {
                parts: &opened.parts,
                request,
                files,
                group,
                phase: String::new(),
                fault: None,
                session: self,
            };
            let mut hear = |event: Event<'_>| listener.hear(event);
            pipeline::generate(registry, &opened.parts, request, engines, host, &mut hear)?;
            listener.fault.map_or(Ok(()), Err)
        })
    }
}

/// Says what contradicts the model.
fn warn(request: &Resolved, parts: &Parts) {
    let family = parts.family;
    if family.id == demo::NAME {
        let unknown = demo::unknown_words(&request.prompt, parts);
        if !unknown.is_empty() {
            tracing::warn!("the demo model does not know these words: {}", unknown.join(", "));
        }
    }
    let scale = request.guidance.scale;
    if family.defaults.scale == 1.0 && scale != 1.0 {
        tracing::warn!(
            "{} was trained without a negative prompt: --cfg-scale {scale} takes twice the time and mostly makes pictures worse",
            family.title
        );
    }
}
