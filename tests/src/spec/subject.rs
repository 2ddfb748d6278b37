//! The plugin under test.

use super::{fixture::Fixture, raw};
use sdrun::{Paths, abi::ffi::Plugin, runtime};
use sdrun_abi::{
    BuildSpec, Capabilities, Device, Engine, InitConfig, NoHost, Precision, Provide, Provider, RuntimeInfo,
};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A plugin that is not loaded yet.
pub struct Subject {
    /// Its manifest.
    pub(super) provide: Provide,
    /// Its library.
    pub(super) library: PathBuf,
    /// Folder of its manifest.
    pub(super) dir: PathBuf,
    /// A temporary folder for this check.
    pub(super) scratch: TempDir,
}

/// A plugin after `init`, with its first device and the fixture's model.
pub(super) struct Ready {
    pub(super) plugin: Plugin,
    pub(super) runtime: RuntimeInfo,
    pub(super) device: Device,
    pub(super) capabilities: Capabilities,
    pub(super) fixture: Fixture,
}

impl Subject {
    /// Reads the manifest.
    pub(super) fn open(manifest: &Path) -> Result<Self, String> {
        let provide = sdrun::read_manifest(manifest).map_err(|e| e.to_string())?.provider;
        let dir = manifest.parent().unwrap_or(Path::new("/")).to_path_buf();
        let library = dir.join(&provide.library.path);
        let scratch = tempfile::tempdir().map_err(|e| format!("cannot make a temporary folder: {e}"))?;
        Ok(Subject { provide, library, dir, scratch })
    }

    /// Loads the library.
    pub(super) fn load(&self) -> Result<Plugin, String> {
        raw::load(&self.library).map_err(|e| e.to_string())
    }

    /// The configuration that a host passes to `init`, with `runtime_dir` instead of the installed runtime's folder.
    pub(super) fn config(&self, runtime_dir: Option<PathBuf>) -> InitConfig {
        InitConfig {
            plugin_dir: self.dir.clone(),
            runtime_dir,
            temp_dir: self.scratch.path().to_path_buf(),
            ..InitConfig::default()
        }
    }

    /// The folder of the runtime, found like in a host. `None` for a plugin without a runtime.
    pub(super) fn runtime_dir(&self) -> Result<Option<PathBuf>, String> {
        let Some(spec) = &self.provide.runtime else { return Ok(None) };
        let paths = Paths::default_for_user().map_err(|e| e.to_string())?;
        match runtime::find(spec, &paths) {
            Some(found) => Ok(Some(found.dir)),
            None => Err(format!("the {} runtime is not installed; this check needs it", spec.name)),
        }
    }

    /// Why nothing can run on the first device, if its hardware is not in this machine.
    pub(super) fn absent(&self) -> Option<String> {
        self.ready().ok()?.device.absent
    }

    /// Loads and initialises the plugin.
    pub(super) fn ready(&self) -> Result<Ready, String> {
        let plugin = self.load()?;
        let runtime =
            plugin.init(&self.config(self.runtime_dir()?), &NoHost).map_err(|e| format!("init: {e}"))?;
        let device = plugin.devices().map_err(|e| format!("devices: {e}"))?.into_iter().next();
        let device = device.ok_or("it has no device")?;
        let capabilities = plugin.capabilities(&device.id).map_err(|e| format!("capabilities: {e}"))?;
        let fixture = Fixture::new(self.scratch.path())?;
        Ok(Ready { plugin, runtime, device, capabilities, fixture })
    }
}

impl Ready {
    /// The default build specification of the fixture.
    pub(super) fn spec(&self) -> BuildSpec {
        BuildSpec { threads: Some(1), ..BuildSpec::new(&self.device.id, Precision::Fp32) }
    }

    /// Builds the fixture.
    pub(super) fn build(&self) -> Result<Box<dyn Engine>, String> {
        self.build_with(&self.spec())
    }

    /// Builds the fixture with the given specification.
    pub(super) fn build_with(&self, spec: &BuildSpec) -> Result<Box<dyn Engine>, String> {
        let weights = self.fixture.weights(0);
        self.plugin.build(&self.fixture.bytes, spec, &weights, &NoHost).map_err(|e| format!("build: {e}"))
    }
}
