//! Draws the pictures of a command.

use super::{
    Args, explain, listener::Listener, output::numbered, preview::Preview, report::Report, upscaling, wanted,
};
use crate::{
    context::Context,
    files::{self, picture},
    progress::Task,
};
use sdrun::{Registry, abi::Host};
use sdrun_diffusion::{
    metadata::Record,
    pipeline::{
        self, Engines, Event, Group, Kept, Opened, Parts, Progress, Recipe, Recording, Request, Resolved,
        Wanted, Wildcards, groups, warnings,
    },
};
use std::{thread, time::Instant};

/// Draws the pictures and writes each as soon as it is done.
pub(super) fn draw(args: &Args, context: &Context) -> anyhow::Result<Report> {
    let started = Instant::now();
    picture::format_of(&args.output)?;
    for number in 0..args.batch_count.max(1) {
        files::check_target(&numbered(&args.output, number))?;
    }
    let preview = args.preview.open(&args.output, args.batch_count.max(1))?;
    let registry = context.registry()?;
    let task = context.task("opening the model");
    let host = task.host(context.cancel_flag());
    let (request, from) = wanted(args)?;
    let wildcards = args.wildcard_dir.as_deref().map(Wildcards::open).transpose()?;
    let given = [args.prompt.is_some(), args.negative_prompt.is_some()];
    let (first, others) = groups(&request, given, wildcards.as_ref())?;
    let recipe = args.model.recipe(from.as_ref(), context, registry.paths())?;
    for group in &others {
        recipe.check_tags(&group.prompt)?;
    }
    let open = |group: &Group| recipe.open(&group.prompt, &group.negative, registry.paths(), &host);
    let opened = open(&first)?;
    let request = with_inputs(args, request, from.as_ref(), &opened.parts)?;
    let resolved = first.resolve(&request, &opened)?;
    for warning in warnings(&resolved, &opened.parts) {
        tracing::warn!("{warning}");
    }

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
        recipe: &recipe,
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
        let resolved = group.resolve(&request, &opened)?;
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
    let upscaler = parts.upscaler.as_ref();
    let wanted = Wanted {
        request: Request { start: args.inputs.start()?, references: args.inputs.references()?, ..request },
        edit: None,
        hints: args.inputs.hints(args.model.control_nets.len(), parts.family)?,
        second: args.inputs.second(upscaler.is_some())?,
        repeats: upscaling::repeats(args.inputs.upscale_repeats, upscaler, from),
    };
    Ok(wanted.request(parts)?)
}

/// What all requests share.
pub(super) struct Session<'a> {
    pub(super) args: &'a Args,
    recipe: &'a Recipe,
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
        let Self { registry, engines, host, from, recipe, .. } = *self;
        thread::scope(|scope| {
            let files = (!self.args.no_metadata).then(|| {
                Recording::start(scope, recipe, opened, registry.paths(), host, move |found| {
                    compare(from, found);
                })
            });
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

/// Says how the model differs from that of the picture `from`.
fn compare(from: Option<&Record>, found: &Record) {
    let (Some(old), Some(new)) = (from.and_then(|from| from.model.as_ref()), &found.model) else { return };
    if old.hash.is_some() && new.hash.is_some() && old.hash != new.hash {
        tracing::warn!(
            "the picture was made with the model {}, whose file differs from {}",
            old.name,
            new.name
        );
    }
}
