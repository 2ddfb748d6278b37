//! `sdrun selftest`

use crate::{complete, context::Context, exit, files, format, parse::duration};
use sdrun::Observer;
use sdrun_selftest::{Check, Event, Network, Options, Report, State, page, run as run_all};
use std::{
    io::{self, Write},
    num::NonZeroUsize,
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

/// Check what the providers compute on this machine, and write a report to send to the makers of sdrun
///
/// For hardware that they may never have seen. On each device, checks built-in networks at two sizes in every precision against stored
/// outputs; engines without weights, saved and loaded; refits, a LoRA, several shapes, tensors on the device, cancelling, a budget of
/// device memory, a process that dies; and pictures of the demo model by what they show. Weights are generated in memory, so nothing is
/// downloaded and no model file is written.
///
/// The report also has times, memory and what the providers logged. It holds no user names, folders or serial numbers. The exit code is
/// 1 if a check failed.
///
/// Example: sdrun selftest
///
/// Example: sdrun selftest -p acme --device gpu:0 -o report.html
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Check only this provider [default: all that work here]
    #[arg(short, long, value_name = "ID", add = complete::providers())]
    provider: Option<String>,

    /// Check only this device: an id, an index or part of a name [default: all]
    #[arg(long, value_name = "DEVICE", add = complete::devices())]
    device: Option<String>,

    /// Number of threads on CPU devices [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,

    /// Time for everything; what does not fit is reported as not run
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = duration)]
    time: Duration,

    /// Limit for each call into a provider; a provider that exceeds it is killed, and the check fails
    #[arg(long, value_name = "TIME", default_value = "5min", value_parser = duration)]
    time_limit: Duration,

    /// Where to write the report
    #[arg(short, long, value_name = "FILE", default_value = "sdrun-selftest.html")]
    output: PathBuf,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    files::check_target(&args.output)?;
    let registry = context.registry()?;
    let options = Options {
        provider: args.provider.clone(),
        device: args.device.clone(),
        threads: args.threads.or(context.config.threads).map(NonZeroUsize::get),
        time: args.time,
        time_limit: args.time_limit,
    };
    context.saves_when_cancelled();
    let host = Observer::new(|_, _, _| {}, context.cancel_flag());
    let (mut task, mut on) = (None, String::new());
    let mut listen = |event: Event<'_>| match event {
        Event::Subject { provider, device } => on = format!("{provider} on {device}"),
        Event::Started(what) => task = Some(context.task(&format!("{on}: {what}"))),
        Event::Ended(_) | Event::Network(_) => task = None,
    };
    let report = run_all(&registry, &options, &host, &mut listen)?;
    drop(task);
    files::write(&args.output, |out| out.write_all(page(&report).as_bytes()))?;
    context.present(&report, |out| show(out, &report))?;
    context.note(&format!("the report is in {}; it is safe to send", args.output.display()));
    Ok(ExitCode::from(if report.passed() { 0 } else { exit::NO }))
}

fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    for subject in &report.subjects {
        writeln!(out, "{} on {}", subject.provider, subject.device.name)?;
        let mut table = format::table(["check", "result", "found"]);
        for Check { name, state, detail, .. } in &subject.checks {
            table.add_row([name.clone(), word(*state), detail.clone()]);
        }
        writeln!(out, "{table}\n")?;
        if subject.networks.is_empty() {
            continue;
        }
        let mut table = format::table(["network", "input", "precision", "result", "cosine", "load", "run"]);
        format::right(&mut table, 4..7);
        for network in &subject.networks {
            table.add_row(cells(network));
        }
        writeln!(out, "{table}")?;
        for (reason, networks) in by_reason(&subject.networks) {
            let [model, shape, precision, ..] = cells(networks[0]);
            let others = match networks.len() {
                1 => String::new(),
                count => format!(" and {} more", count - 1),
            };
            writeln!(out, "  {model}, {shape}, {precision}{others}: {reason}")?;
        }
        writeln!(out)?;
    }
    for absent in &report.absent {
        writeln!(out, "not checked: {}", absent.reason)?;
    }
    writeln!(
        out,
        "{} passed, {} failed, {} not offered, {} not run, in {}",
        report.count(State::Passed),
        report.count(State::Failed),
        report.count(State::NotOffered),
        report.count(State::NotRun),
        format::seconds(report.seconds)
    )
}

/// The networks with a reason, together where it is the same.
fn by_reason(networks: &[Network]) -> Vec<(&str, Vec<&Network>)> {
    let mut found: Vec<(&str, Vec<&Network>)> = Vec::new();
    for network in networks {
        let Some(reason) = network.reason.as_deref() else { continue };
        match found.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, networks)) => networks.push(network),
            None => found.push((reason, vec![network])),
        }
    }
    found
}

fn cells(network: &Network) -> [String; 7] {
    let shape: Vec<String> = network.shape.iter().map(ToString::to_string).collect();
    [
        network.model.clone(),
        shape.join("x"),
        network.precision.to_string(),
        word(network.state),
        network.worst.as_ref().map_or(String::new(), |worst| format!("{:.6}", worst.cosine)),
        network.load_seconds.map_or(String::new(), format::seconds),
        network.run_ms.map_or(String::new(), |ms| format::seconds(ms / 1e3)),
    ]
}

fn word(state: State) -> String {
    format::word(&state)
}
