//! Building, storing and loading engines; sessions over them.

mod build;
mod check;
mod finite;
mod key;
mod load;
mod options;
mod session;

pub(crate) use check::check_options;
pub use check::{check_input, check_inputs, check_weights, find_input};
pub use load::LoadOptions;
pub use options::{BuildOptions, CachePolicy};
pub use session::Session;

use crate::{EngineFile, EngineManifest, Error, Provider, Result};
use check::{fingerprint, has_its_weights};
use sdrun_abi::{Device, Engine as DriverEngine, EngineInfo, Host, WeightSource};
use sdrun_weights::{Cast, check_complete};
use std::{path::Path, time::Instant};

/// A compiled graph on a provider, with or without weights inside.
pub struct Engine {
    inner: Box<dyn DriverEngine>,
    provider: Provider,
    device: Device,
    manifest: EngineManifest,
    cached: bool,
    seconds: f64,
}

impl Engine {
    /// Describes the engine.
    pub fn manifest(&self) -> &EngineManifest {
        &self.manifest
    }
    /// Inputs, outputs and the weights it needs.
    pub fn info(&self) -> &EngineInfo {
        self.inner.info()
    }
    /// The provider it runs on.
    pub fn provider(&self) -> &Provider {
        &self.provider
    }
    /// The device it was built or loaded for.
    pub fn device(&self) -> &Device {
        &self.device
    }
    /// Whether it was loaded from a file instead of built.
    pub fn was_loaded(&self) -> bool {
        self.cached
    }
    /// How long building or loading took, in seconds.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Writes the engine to a file, atomically. Returns the size of its payload in bytes.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<u64> {
        let payload = self.inner.serialize().map_err(Error::of(self.provider.id()))?;
        EngineFile::write(path.as_ref(), &self.manifest, &payload)?;
        Ok(payload.len() as u64)
    }

    /// An engine with these weights inside: it loads faster but accepts no others. Only if the provider supports it
    /// ([`Capabilities::bake`](sdrun_abi::Capabilities::bake)).
    pub fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Engine> {
        let started = Instant::now();
        if self.manifest.baked.is_some() {
            return Err(has_its_weights());
        }
        let specs = &self.inner.info().weights;
        let cast = Cast::new(weights, specs);
        check_complete(specs, &cast)?;
        let baked = Some(fingerprint(specs, &cast)?);
        let inner = self.inner.bake(&cast, host).map_err(Error::of(self.provider.id()))?;
        let mut manifest =
            EngineManifest { key: String::new(), info: inner.info().clone(), baked, ..self.manifest.clone() };
        manifest.spec.bake = true;
        Ok(Engine {
            inner,
            provider: self.provider.clone(),
            device: self.device.clone(),
            manifest,
            cached: false,
            seconds: started.elapsed().as_secs_f64(),
        })
    }
}
