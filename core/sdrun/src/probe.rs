//! Opens providers to see whether they work: all at once, each in its own worker with a time limit.

use crate::{
    Isolation, Registry, Result,
    worker::{Confinement, Limits, WorkerProvider},
};
use sdrun_abi::{Capabilities, Device, Error as AbiError, RuntimeInfo};
use std::time::{Duration, Instant};

/// What a working provider reports.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The runtime that was loaded.
    pub runtime: RuntimeInfo,
    /// Its devices and what it can do on each.
    pub devices: Vec<(Device, Capabilities)>,
    /// How far its worker was confined.
    pub confinement: Confinement,
    /// How long it took to load and respond.
    pub seconds: f64,
}

impl Registry {
    /// Loads each of these providers in a worker and asks for its devices; results are in the same order. If a provider
    /// crashes or exceeds `limit` in a call, only its own result is an error.
    pub fn probe(&self, ids: &[&str], limit: Duration) -> Vec<Result<Probe>> {
        std::thread::scope(|scope| {
            let probes: Vec<_> =
                ids.iter().map(|id| scope.spawn(move || self.probe_one(id, limit))).collect();
            let panicked = |_| Err(AbiError::internal("the probe panicked").into());
            probes.into_iter().map(|probe| probe.join().unwrap_or_else(panicked)).collect()
        })
    }

    fn probe_one(&self, id: &str, limit: Duration) -> Result<Probe> {
        let started = Instant::now();
        let provider = self.open(id, &Isolation::worker(Limits::all(limit)))?;
        let devices = provider
            .devices()?
            .into_iter()
            .map(|device| provider.capabilities(&device).map(|capabilities| (device, capabilities)))
            .collect::<Result<Vec<_>>>()?;
        let confinement = provider.worker().map_or(Confinement::None, WorkerProvider::confinement);
        let seconds = started.elapsed().as_secs_f64();
        Ok(Probe { runtime: provider.runtime().clone(), devices, confinement, seconds })
    }
}
