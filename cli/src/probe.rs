//! Probes whether providers work: opens them all at once, each in a worker with a time limit.

use crate::model;
use sdrun::{
    Registry, Result,
    abi::{Capabilities, Device, RuntimeInfo},
};
use std::time::{Duration, Instant};

/// A working provider answers within this time.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// The answer of a working provider.
pub(crate) struct Found {
    pub(crate) runtime: RuntimeInfo,
    pub(crate) devices: Vec<(Device, Capabilities)>,
    /// How long it took to load and answer.
    pub(crate) seconds: f64,
}

/// Probes these providers. Results are in the same order.
pub(crate) fn all(registry: &Registry, ids: &[&str], limit: Duration) -> Vec<Result<Found>> {
    std::thread::scope(|scope| {
        let probes: Vec<_> = ids.iter().map(|id| scope.spawn(move || one(registry, id, limit))).collect();
        probes
            .into_iter()
            .map(|probe| {
                probe.join().unwrap_or_else(|_| Err(sdrun::abi::Error::internal("the probe panicked").into()))
            })
            .collect()
    })
}

fn one(registry: &Registry, id: &str, limit: Duration) -> Result<Found> {
    let started = Instant::now();
    let provider = registry.open(id, &model::isolation(true, Some(limit)))?;
    let devices = provider.devices()?;
    let devices = devices
        .into_iter()
        .map(|device| provider.capabilities(&device).map(|capabilities| (device, capabilities)))
        .collect::<Result<Vec<_>>>()?;
    Ok(Found { runtime: provider.runtime().clone(), devices, seconds: started.elapsed().as_secs_f64() })
}
