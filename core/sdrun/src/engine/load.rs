//! Loading an engine from a file.

use super::Engine;
use crate::{EngineFile, EngineManifest, Error, Provider, Result};
use sdrun_abi::{BuildSpec, Compatibility, Device, Error as AbiError, Host};
use std::{path::Path, time::Instant};

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
        let mut engine = self.load_with(file, &spec, host)?;
        engine.seconds = started.elapsed().as_secs_f64();
        Ok(engine)
    }

    pub(super) fn load_with(&self, file: &EngineFile, spec: &BuildSpec, host: &dyn Host) -> Result<Engine> {
        let manifest = &file.manifest;
        let refuse = |why: String| {
            Error::of(self.id())(
                AbiError::precondition(format!("cannot load this engine: {why}"))
                    .with_hint("build it again on this machine"),
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
        Ok(Engine { inner, provider: self.clone(), manifest, cached: true, seconds: 0.0 })
    }
}
