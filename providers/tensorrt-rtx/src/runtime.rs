//! The loaded TensorRT-RTX and, where there is one, the CUDA driver.

use crate::ffi::{Library, cuda::Driver};
use sdrun_abi::{Error, InitConfig, Result, RuntimeInfo};
use sdrun_provider_common::{locate, runtime_spec};
use std::{
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

/// What [`init`] loaded. Lives as long as the process.
pub(crate) struct Runtime {
    pub(crate) library: Library,
    /// Why there is no GPU to run on, where there is none.
    driver: Result<Driver>,
    /// Where compiled kernels are kept.
    pub(crate) cache_dir: Option<PathBuf>,
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// Loads the library from the folder the host found. Again with the same library is the same runtime; with another it
/// is an error, because a process can hold only one. A missing GPU is none: engines can be built without.
pub(crate) fn init(config: &InitConfig) -> Result<RuntimeInfo> {
    static INIT: Mutex<()> = Mutex::new(());
    let _one_at_a_time = INIT.lock().unwrap_or_else(PoisonError::into_inner);
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
    let runtime = match RUNTIME.get() {
        Some(runtime) if runtime.library.file() == file => runtime,
        Some(runtime) => {
            return Err(Error::precondition(format!(
                "this process has loaded {} and cannot load {} besides",
                runtime.library.file().display(),
                file.display()
            ))
            .with_hint("use one TensorRT-RTX in a process, or run the provider isolated"));
        }
        None => {
            let library = Library::load(&file)?;
            let driver = Driver::load(driver);
            RUNTIME.get_or_init(|| Runtime { library, driver, cache_dir: config.cache_dir.clone() })
        }
    };
    Ok(RuntimeInfo {
        name: "tensorrt-rtx".into(),
        version: runtime.library.version.clone(),
        library: Some(runtime.library.file().to_path_buf()),
    })
}

/// What [`init`] loaded; `FailedPrecondition` before it has succeeded.
pub(crate) fn get() -> Result<&'static Runtime> {
    RUNTIME.get().ok_or_else(|| Error::precondition("the tensorrt-rtx provider is not initialised"))
}

impl Runtime {
    /// The CUDA driver; the error says why nothing can be run here.
    pub(crate) fn driver(&'static self) -> Result<&'static Driver> {
        self.driver.as_ref().map_err(Clone::clone)
    }
}
