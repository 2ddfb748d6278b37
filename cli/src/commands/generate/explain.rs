//! `--explain`: what a request will load, before the work starts.

use super::report::Line;
use crate::{context::Context, format};
use sdrun::memory;
use sdrun_diffusion::pipeline::{Plan, Planned};
use std::io::{self, Write};

/// Prints a plan.
pub(super) fn show(plan: &Plan, context: &Context) -> anyhow::Result<()> {
    if context.has_lines() {
        return context.event(&Line::Plan(plan));
    }
    context.print(|out| write(plan, out))
}

fn write(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    let mut table =
        format::table(["what", "network", "provider", "device", "precision", "engine", "memory", "why"]);
    for phase in &plan.phases {
        for (number, network) in phase.networks.iter().enumerate() {
            let what = if number == 0 { phase.what } else { "" };
            table.add_row([
                what.to_string(),
                name(network),
                network.provider.clone(),
                network.device.clone(),
                network.precision.to_string(),
                engine(network).to_string(),
                format::bytes(bytes(network)),
                network.why.clone(),
            ]);
        }
    }
    format::right(&mut table, 6..7);
    writeln!(out, "{}\n{table}", plan.family)?;
    let [main, device] = plan.peak();
    let free = memory::available().map(|free| format!(" of {} that are free", format::bytes(free)));
    write!(out, "needs at least {}{}", format::bytes(main), free.unwrap_or_default())?;
    match device {
        0 => {}
        device => write!(out, ", and {} of device memory", format::bytes(device))?,
    }
    match plan.own {
        Some(own) => writeln!(out, "; sdrun itself already uses {}", format::bytes(own)),
        None => writeln!(out),
    }
}

fn name(network: &Planned) -> String {
    match network.tiles {
        Some([height, width]) => format!("{}, tiles of {width}x{height}", network.part),
        None => network.part.clone(),
    }
}

fn engine(network: &Planned) -> &'static str {
    match (network.has_engine, network.session_compiles) {
        (true, false) => "from the cache",
        (true, true) => "from the cache, compiled when loaded",
        (false, _) => "to be built",
    }
}

fn bytes(network: &Planned) -> u64 {
    let memory = &network.memory;
    let all =
        [memory.host_weights, memory.host_activations, memory.device_weights, memory.device_activations];
    all.into_iter().flatten().fold(0, u64::saturating_add)
}
