//! Checks that a provider computes what it should on a device, in about ten minutes and with nothing but an installed sdrun: built-in
//! networks against stored outputs, engines without weights, refits, adapters, open shapes, cancelling, a killed worker, and pictures
//! whose content is judged. The [`Report`] is one file to send to the makers of sdrun. It holds no user names, paths or serial numbers.

mod anonymous;
mod checks;
mod html;
pub mod judge;
mod listener;
mod networks;
mod pictures;
pub mod references;
mod report;
mod rig;

pub use html::page;
pub use report::{Absent, Check, Network, Report, SCHEMA_VERSION, Sample, State, Subject};

use rig::Rig;
use sdrun::{
    Registry, Result,
    abi::{Device, DeviceKind, Error, Host},
    bench::Environment,
};
use std::time::{Duration, Instant};

/// What to check, and how long that may take.
#[derive(Clone, Debug)]
pub struct Options {
    /// Only this provider; `None` checks all that work here.
    pub provider: Option<String>,
    /// Only this device: an id, an index or a part of the name. `None` checks all.
    pub device: Option<String>,
    /// Threads on CPU devices; `None` is all cores.
    pub threads: Option<usize>,
    /// Time for everything. What does not fit is reported as not run.
    pub time: Duration,
    /// Limit of a call into a provider. A provider that takes longer is killed, and the check fails.
    pub time_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            provider: None,
            device: None,
            threads: None,
            time: Duration::from_secs(600),
            time_limit: Duration::from_secs(300),
        }
    }
}

/// What happens, for progress.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The checks of a device begin.
    Subject {
        /// The provider's id.
        provider: &'a str,
        /// The device's name.
        device: &'a str,
    },
    /// A check begins.
    Started(&'a str),
    /// A check ended.
    Ended(&'a Check),
    /// A network was checked.
    Network(&'a Network),
}

/// Time for a provider to load and to list its devices.
const PROBE_LIMIT: Duration = Duration::from_secs(60);

/// Checks providers and devices one after the other, those that are not CPUs first. Each provider runs in a worker.
///
/// # Errors
/// `FailedPrecondition` if there is no device to check, the error of a provider that was named, and `Cancelled`. A check that fails is
/// no error.
pub fn run(
    registry: &Registry,
    options: &Options,
    host: &dyn Host,
    listen: &mut dyn FnMut(Event<'_>),
) -> Result<Report> {
    let started = Instant::now();
    let (devices, absent) = devices(registry, options)?;
    if devices.is_empty() {
        let why: Vec<String> = absent.iter().map(|a| a.reason.clone()).collect();
        let hint = "install a provider's runtime and its driver, then try again";
        return Err(Error::precondition(format!("no device to check: {}", why.join("; ")))
            .with_hint(hint)
            .into());
    }
    let mut report = Report {
        schema: SCHEMA_VERSION,
        sdrun: env!("CARGO_PKG_VERSION").into(),
        environment: Environment::here(),
        seconds: 0.0,
        subjects: Vec::new(),
        absent,
    };
    let count = devices.len();
    for (at, (provider, device)) in devices.into_iter().enumerate() {
        listen(Event::Subject { provider: &provider, device: &device.name });
        let left = options.time.saturating_sub(started.elapsed());
        let share = left / (count - at) as u32;
        let mut rig = Rig::new(registry, &provider, device, options, Instant::now() + share, host);
        report.subjects.push(rig.subject(listen)?);
    }
    report.seconds = started.elapsed().as_secs_f64();
    anonymous::hide(&mut report, registry.paths())?;
    Ok(report)
}

/// A provider's id, and a device.
type Target = (String, Device);

/// What to check, and the providers that have nothing to check.
fn devices(registry: &Registry, options: &Options) -> Result<(Vec<Target>, Vec<Absent>)> {
    let usable = registry.usable();
    let ids: Vec<&str> = match &options.provider {
        Some(id) => vec![registry.entry(id)?.id.as_str()],
        None => usable.iter().map(|provide| provide.id.as_str()).collect(),
    };
    let (mut found, mut absent) = (Vec::new(), Vec::new());
    for (id, probe) in ids.iter().zip(registry.probe(&ids, PROBE_LIMIT)) {
        let probe = match probe {
            Ok(probe) => probe,
            Err(error) if options.provider.is_some() => return Err(error),
            Err(error) => {
                absent.push(Absent { provider: id.to_string(), reason: error.to_string() });
                continue;
            }
        };
        let before = found.len();
        let mut reasons = Vec::new();
        for (device, _) in probe.devices {
            match &device.absent {
                Some(why) => reasons.push(format!("{id}: {why}")),
                None if !wanted(&device, options.device.as_deref()) => {}
                None => found.push((id.to_string(), device)),
            }
        }
        if found.len() == before {
            let reason = reasons.first().cloned().unwrap_or_else(|| match &options.device {
                Some(device) => format!("{id}: has no device `{device}`"),
                None => format!("{id}: found no device"),
            });
            absent.push(Absent { provider: id.to_string(), reason });
        }
    }
    found.sort_by_key(|(_, device)| device.kind == DeviceKind::Cpu);
    Ok((found, absent))
}

fn wanted(device: &Device, which: Option<&str>) -> bool {
    which.is_none_or(|which| {
        device.id == which
            || which.parse() == Ok(device.index)
            || device.name.to_lowercase().contains(&which.to_lowercase())
    })
}
