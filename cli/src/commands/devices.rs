//! `sdrun devices`

use crate::{complete, context::Context, exit, format, provider::PROBE_LIMIT};
use sdrun::abi::{Capabilities, Device, RuntimeInfo};
use serde::Serialize;
use std::{
    io::{self, Write},
    process::ExitCode,
};

/// List the devices of every provider
///
/// Loads each provider in a worker process with a time limit, so a provider that crashes or hangs becomes a line with the
/// reason. Other commands take the id, the index or part of the name as --device.
///
/// Example: sdrun devices --provider openvino --json
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List only this provider; fail if it does not work
    #[arg(short, long, value_name = "ID", add = complete::providers())]
    provider: Option<String>,
}

#[derive(Serialize)]
struct Report {
    providers: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    provider: String,
    runtime: Option<RuntimeInfo>,
    devices: Vec<DeviceRow>,
    error: Option<String>,
    hint: Option<String>,
}

#[derive(Serialize)]
struct DeviceRow {
    #[serde(flatten)]
    device: Device,
    capabilities: Capabilities,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let registry = context.registry()?;
    let usable = registry.usable();
    let ids: Vec<&str> = match &args.provider {
        Some(id) => vec![registry.entry(id)?.id.as_str()],
        None => usable.iter().map(|p| p.id.as_str()).collect(),
    };
    let task = context.task("asking providers for their devices");
    let found = registry.probe(&ids, PROBE_LIMIT);
    drop(task);
    context.go_on()?;
    let mut rows = Vec::new();
    for (id, found) in ids.iter().zip(found) {
        let (runtime, devices, error) = match found {
            Ok(found) => (Some(found.runtime), found.devices, None),
            Err(e) if args.provider.is_some() => return Err(e.into()),
            Err(e) => (None, Vec::new(), Some(e)),
        };
        rows.push(Row {
            provider: id.to_string(),
            runtime,
            devices: devices
                .into_iter()
                .map(|(device, capabilities)| DeviceRow { device, capabilities })
                .collect(),
            hint: error.as_ref().and_then(|e| e.hint()).as_ref().map(exit::advice),
            error: error.map(|e| e.to_string()),
        });
    }
    let report = Report { providers: rows };
    context.present(&report, |out| show(out, &report.providers))?;
    if ids.is_empty() {
        context.note("no usable provider; `sdrun providers --explain` and `sdrun doctor` say why");
    }
    Ok(ExitCode::SUCCESS)
}

fn show(out: &mut dyn Write, rows: &[Row]) -> io::Result<()> {
    let mut table =
        format::table(["provider", "index", "id", "name", "kind", "memory", "precisions", "weights"]);
    for row in rows {
        for DeviceRow { device, capabilities } in &row.devices {
            table.add_row([
                row.provider.clone(),
                device.index.to_string(),
                device.id.clone(),
                device.name.clone(),
                format::word(&device.kind),
                match (&device.absent, device.memory_bytes) {
                    (Some(_), _) => "not here".into(),
                    (None, memory) => memory.map_or("?".into(), format::bytes),
                },
                format::list(capabilities.precisions.iter().map(|p| p.name())),
                format::word(&capabilities.weight_update),
            ]);
        }
    }
    if table.row_count() > 0 {
        writeln!(out, "{table}")?;
    }
    for row in rows {
        if let Some(error) = &row.error {
            writeln!(out, "{error}")?;
            if let Some(hint) = &row.hint {
                writeln!(out, "  hint: {hint}")?;
            }
        } else if row.devices.is_empty() {
            writeln!(out, "{}: no device on this machine", row.provider)?;
        } else if let Some(why) = row.devices.iter().find_map(|d| d.device.absent.as_ref()) {
            writeln!(out, "{}: builds engines for absent devices but cannot run them: {why}", row.provider)?;
        }
    }
    Ok(())
}
