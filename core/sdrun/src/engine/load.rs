//! Loading an engine from a file.

use super::Engine;
use crate::{EngineFile, EngineManifest, Error, Isolation, Provider, Registry, Result};
use sdrun_abi::{BuildSpec, Compatibility, Device, Error as AbiError, Hint, Host};
use std::{path::Path, time::Instant};

/// How to load an engine file.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The device: an id, an index, or a part of its name. `None` takes the first device of the class that the engine was
    /// built for.
    pub device: Option<String>,
    /// Threads for CPU devices; `None` is all cores.
    pub threads: Option<usize>,
    /// Where the provider's code runs.
    pub isolation: Isolation,
}

impl LoadOptions {
    /// The first matching device, all cores, and a worker only if the provider's manifest asks for one.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Registry {
    /// Opens an engine file and loads it on the provider that built it. Opens the file and computes its checksum only once.
    ///
    /// # Errors
    /// `DataLoss` if the file is damaged; `NotFound` if its provider is not installed; the errors of
    /// [`open`](Registry::open) and [`Provider::load`].
    pub fn load_engine(
        &self,
        path: impl AsRef<Path>,
        options: &LoadOptions,
        host: &dyn Host,
    ) -> Result<Engine> {
        self.load_file(&EngineFile::open(path.as_ref())?, options, host)
    }

    /// As [`load_engine`](Registry::load_engine), from an open file.
    pub fn load_file(&self, file: &EngineFile, options: &LoadOptions, host: &dyn Host) -> Result<Engine> {
        let provider = self.open_with(&file.manifest.provider, &options.isolation, host)?;
        let device = match &options.device {
            Some(which) => provider.device(Some(which))?,
            None => {
                let devices = provider.devices()?;
                let fits = |d: &&Device| d.class == file.manifest.device_class && d.absent.is_none();
                // If no device matches, the provider refuses the engine and says why.
                match devices.iter().find(fits) {
                    Some(device) => device.clone(),
                    None => provider.device(None)?,
                }
            }
        };
        provider.load_file(file, &device, options.threads, host)
    }
}

impl Provider {
    /// Loads an engine file. Refuses, with the reason, an engine of another provider, or one for an incompatible
    /// runtime or device.
    pub fn load(
        &self,
        path: impl AsRef<Path>,
        device: &Device,
        threads: Option<usize>,
        host: &dyn Host,
    ) -> Result<Engine> {
        self.load_file(&EngineFile::open(path.as_ref())?, device, threads, host)
    }

    /// As [`load`](Provider::load), from an open file.
    pub fn load_file(
        &self,
        file: &EngineFile,
        device: &Device,
        threads: Option<usize>,
        host: &dyn Host,
    ) -> Result<Engine> {
        let started = Instant::now();
        let mut spec = file.manifest.spec.clone();
        spec.device = device.id.clone();
        spec.threads = threads;
        let mut engine = self.load_with(file, device, &spec, host)?;
        engine.seconds = started.elapsed().as_secs_f64();
        Ok(engine)
    }

    pub(super) fn load_with(
        &self,
        file: &EngineFile,
        device: &Device,
        spec: &BuildSpec,
        host: &dyn Host,
    ) -> Result<Engine> {
        let manifest = &file.manifest;
        let refuse = |why: String| {
            Error::of(self.id())(
                AbiError::precondition(format!("cannot load this engine: {why}")).with_hint(Hint::Rebuild),
            )
        };
        if manifest.provider != self.id() {
            return Err(refuse(format!("it was built by the provider `{}`", manifest.provider)));
        }
        if manifest.build_id != self.manifest().build_id {
            return Err(refuse(format!(
                "it was built by another build of the provider ({}, this is {})",
                manifest.build_id,
                self.manifest().build_id
            )));
        }
        let verdict =
            self.driver().check(&manifest.info.compatibility, &spec.device).map_err(Error::of(self.id()))?;
        match verdict {
            Compatibility::Optimal => {}
            Compatibility::PreferRecompile(why) => {
                tracing::warn!("{}: a rebuild would be better: {why}", self.id())
            }
            Compatibility::Unsupported(why) => return Err(refuse(why)),
        }
        let inner = self.driver().load(file.payload(), spec, host).map_err(Error::of(self.id()))?;
        if inner.info() != &manifest.info {
            return Err(refuse("its manifest and its payload describe different engines".into()));
        }
        let manifest = EngineManifest { spec: spec.clone(), ..manifest.clone() };
        Ok(Engine {
            inner,
            provider: self.clone(),
            device: device.clone(),
            manifest,
            cached: true,
            seconds: 0.0,
        })
    }
}
