//! The loaded MIGraphX.

use crate::ffi::{Api, Hip, Program};
use sdrun_abi::{Error, Host, InitConfig, LogLevel, Result, RuntimeInfo};
use sdrun_provider_common::{Loaded, locate, refuse_options, runtime_spec};
use std::path::{Path, PathBuf};

/// MIGraphX as loaded by [`init`]. Lives as long as the process.
pub(crate) struct Runtime {
    pub(crate) api: Api,
    /// `None` without a HIP runtime. Then only the target `ref` exists.
    pub(crate) hip: Option<Hip>,
    /// For example `2.14.0`.
    pub(crate) version: String,
    temp_dir: PathBuf,
    library: PathBuf,
}

static RUNTIME: Loaded<Runtime> = Loaded::new("MIGraphX");

/// Loads MIGraphX from the folder that the host found.
pub(crate) fn init(config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
    refuse_options("migraphx", &config.options)?;
    let library = locate(&runtime_spec(crate::MANIFEST)?, config.runtime_dir.as_deref())?;
    let runtime = RUNTIME.load(&library, |library| {
        let dir = library.parent().unwrap_or(Path::new("/"));
        check_neighbours(dir)?;
        let api = Api::load(library)?;
        let version = version(&api, &config.temp_dir)?;
        let hip = Hip::load(dir).unwrap_or_else(|error| {
            host.log(LogLevel::Warn, "migraphx", &error.to_string());
            None
        });
        Ok(Runtime { api, hip, version, temp_dir: config.temp_dir.clone(), library: library.to_path_buf() })
    })?;
    Ok(RuntimeInfo::new("migraphx", runtime.version.clone(), Some(runtime.library.clone())))
}

/// Checks the libraries that MIGraphX loads by itself, some of them later. A truncated one would end the process.
fn check_neighbours(dir: &Path) -> Result<()> {
    let entries = std::fs::read_dir(dir).map_err(|e| Error::io("read the folder", dir, &e))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.starts_with("libmigraphx") && name.contains(".so") {
            sdrun_provider_common::check_image(&path)?;
        }
    }
    Ok(())
}

/// Reads the version. The library has no call for it, but writes it into the programs it stores.
fn version(api: &Api, temp_dir: &Path) -> Result<String> {
    let file = temporary_file(temp_dir)?;
    Program::write_empty_json(api, file.path())?;
    let text = std::fs::read_to_string(file.path()).map_err(|e| Error::io("read", file.path(), &e))?;
    let program: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| Error::internal(format!("MIGraphX wrote a program that is not JSON: {e}")))?;
    let version = program["migraphx_version"].as_str();
    version.map(str::to_string).ok_or_else(|| {
        Error::unsupported("MIGraphX wrote a program without its version")
            .with_hint("ROCm 6 or newer is needed")
    })
}

fn temporary_file(dir: &Path) -> Result<tempfile::NamedTempFile> {
    tempfile::Builder::new().prefix("migraphx-").tempfile_in(dir).map_err(|e| Error::io("write to", dir, &e))
}

/// The loaded MIGraphX; `FailedPrecondition` before [`init`] has succeeded.
pub(crate) fn get() -> Result<&'static Runtime> {
    RUNTIME.get()
}

impl Runtime {
    /// A temporary file for this process alone, removed on drop.
    pub(crate) fn temporary_file(&self) -> Result<tempfile::NamedTempFile> {
        temporary_file(&self.temp_dir)
    }

    /// A temporary folder for this process alone, removed on drop.
    pub(crate) fn temporary_folder(&self) -> Result<tempfile::TempDir> {
        let dir = tempfile::Builder::new().prefix("migraphx-").tempdir_in(&self.temp_dir);
        dir.map_err(|e| Error::io("make a folder in", &self.temp_dir, &e))
    }
}
