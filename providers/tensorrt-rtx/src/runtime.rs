//! The loaded TensorRT-RTX and, if present, the CUDA driver.

use crate::ffi::{Library, cuda::Driver};
use sdrun_abi::{Error, InitConfig, Result, RuntimeInfo};
use sdrun_provider_common::{Loaded, locate, runtime_spec};
use std::path::{Path, PathBuf};

/// The result of [`init`]. Lives as long as the process.
pub(crate) struct Runtime {
    pub(crate) library: Library,
    /// The driver, or why there is no GPU to run on.
    driver: Result<Driver>,
    /// Folder for compiled kernels.
    pub(crate) cache_dir: Option<PathBuf>,
}

static RUNTIME: Loaded<Runtime> = Loaded::new("TensorRT-RTX");

/// Loads the library from the folder the host found. A missing GPU is not an error: engines can be built without one.
pub(crate) fn init(config: &InitConfig) -> Result<RuntimeInfo> {
    let mut driver = None;
    for (key, value) in &config.options {
        match key.as_str() {
            "driver" => driver = Some(Path::new(value)),
            _ => {
                return Err(Error::invalid(format!("tensorrt-rtx has no option `{key}`"))
                    .with_hint("it takes `driver`, the file of another CUDA driver; leave it out"));
            }
        }
    }
    let file = locate(&runtime_spec(crate::MANIFEST)?, config.runtime_dir.as_deref())?;
    let runtime = RUNTIME.load(&file, |file| {
        let library = Library::load(file)?;
        Ok(Runtime { library, driver: Driver::load(driver), cache_dir: config.cache_dir.clone() })
    })?;
    Ok(RuntimeInfo::new(
        "tensorrt-rtx",
        runtime.library.version.clone(),
        Some(runtime.library.file().to_path_buf()),
    ))
}

/// The result of [`init`]; `FailedPrecondition` before it has succeeded.
pub(crate) fn get() -> Result<&'static Runtime> {
    RUNTIME.get()
}

impl Runtime {
    /// The CUDA driver, or the reason why nothing can run here.
    pub(crate) fn driver(&'static self) -> Result<&'static Driver> {
        self.driver.as_ref().map_err(Clone::clone)
    }
}
