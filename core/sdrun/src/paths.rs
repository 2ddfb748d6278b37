//! The folders that sdrun uses on this machine.

use crate::{Error, OwnedFolder, Result, trust};
use etcetera::BaseStrategy;
use std::path::{Path, PathBuf};

/// The folders sdrun uses. [`Paths::default_for_user`] follows the platform's conventions;
/// `SDRUN_DATA_DIR` and `SDRUN_CACHE_DIR` override them unless the process is elevated.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Files the user installed: runtimes, plugins.
    pub data: PathBuf,
    /// Files that can be recreated: engines, built-in models.
    pub cache: PathBuf,
}

impl Paths {
    /// The folders of the current user.
    ///
    /// # Errors
    /// `FailedPrecondition` if the user has no home folder and no variable names a folder.
    pub fn default_for_user() -> Result<Self> {
        Self::for_user(None, None)
    }

    /// As [`default_for_user`](Self::default_for_user), with folders from a program's own settings. Environment
    /// variables take precedence over them.
    pub fn for_user(data: Option<&Path>, cache: Option<&Path>) -> Result<Self> {
        let base = etcetera::choose_base_strategy().map_err(|e| {
            sdrun_abi::Error::precondition(format!("cannot find the user's home folder: {e}"))
                .with_hint("set SDRUN_DATA_DIR and SDRUN_CACHE_DIR")
        });
        let folder = |variable: &str, set: Option<&Path>, of: fn(&_) -> PathBuf| -> Result<PathBuf> {
            match (trust::environment(variable), set) {
                (Some(dir), _) => std::path::absolute(&dir).map_err(|e| Error::io("resolve", &dir, &e)),
                (None, Some(dir)) => Ok(dir.to_path_buf()),
                (None, None) => Ok(of(base.as_ref().map_err(Clone::clone)?).join("sdrun")),
            }
        };
        Ok(Paths {
            data: folder("SDRUN_DATA_DIR", data, BaseStrategy::data_dir)?,
            cache: folder("SDRUN_CACHE_DIR", cache, BaseStrategy::cache_dir)?,
        })
    }

    /// Path of the user's config file for sdrun's programs; `None` without a home folder. The library does not read
    /// it.
    pub fn config_file() -> Option<PathBuf> {
        let base = etcetera::choose_base_strategy().ok()?;
        Some(base.config_dir().join("sdrun").join("config.toml"))
    }

    /// Folder of installed runtimes.
    pub fn runtimes(&self) -> PathBuf {
        self.data.join("runtimes")
    }
    /// Folder of plugins the user installed.
    pub fn providers(&self) -> PathBuf {
        self.data.join("providers")
    }
    /// Folder of cached engines.
    pub fn engines(&self) -> PathBuf {
        self.cache.join("engines")
    }
    /// Folder of built-in models with their weights.
    pub fn models(&self) -> PathBuf {
        self.cache.join("models")
    }
    /// Folder for files that the provider `id` can recreate.
    pub fn provider_cache(&self, id: &str) -> PathBuf {
        self.cache.join("providers").join(id)
    }
    /// Folder for temporary files of providers and workers.
    pub fn temp(&self) -> PathBuf {
        self.cache.join("tmp")
    }

    /// A private, writable folder for temporary files: [`temp`](Paths::temp), else one in the system's temporary
    /// folder.
    ///
    /// # Errors
    /// Why neither can be made or written.
    pub fn scratch(&self) -> Result<PathBuf> {
        let ours = self.temp();
        match private_dir(&ours).and_then(|()| writable(&ours)) {
            Ok(()) => Ok(ours),
            Err(why) => {
                let elsewhere = system_scratch()?;
                tracing::warn!("temporary files go to {}, since sdrun {why}", elsewhere.display());
                Ok(elsewhere)
            }
        }
    }

    /// A new folder in [`scratch`](Paths::scratch).
    ///
    /// # Errors
    /// Why it cannot be made.
    pub fn temporary(&self) -> Result<OwnedFolder> {
        let scratch = self.scratch()?;
        OwnedFolder::make(&scratch, "temporary-").map_err(|e| Error::io("create a folder in", &scratch, &e))
    }
}

fn writable(dir: &Path) -> Result<()> {
    tempfile::tempfile_in(dir).map(drop).map_err(|e| Error::io("write to", dir, &e))
}

/// A private folder of this user in a folder that all users share.
fn system_scratch() -> Result<PathBuf> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let user = rustix::process::geteuid().as_raw();
        let dir = std::env::temp_dir().join(format!("sdrun-{user}"));
        private_dir(&dir)?;
        let metadata = std::fs::symlink_metadata(&dir).map_err(|e| Error::io("use", &dir, &e))?;
        if !metadata.is_dir() || metadata.uid() != user || metadata.mode() & 0o077 != 0 {
            return Err(sdrun_abi::Error::new(
                sdrun_abi::ErrorCode::PermissionDenied,
                format!("{} is not a private folder of this user", dir.display()),
            )
            .with_file(&dir)
            .with_hint("remove it, or make the cache folder writable")
            .into());
        }
        writable(&dir)?;
        Ok(dir)
    }
    #[cfg(not(unix))]
    {
        let dir = std::env::temp_dir().join("sdrun");
        private_dir(&dir)?;
        writable(&dir)?;
        Ok(dir)
    }
}

/// Creates a folder (and its parents) that only the user can access.
///
/// # Errors
/// Errors of creating it, with its name.
pub fn private_dir(dir: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::DirBuilderExt;
        builder.mode(0o700);
    }
    builder.create(dir).map_err(|e| {
        let hint = "choose other folders with SDRUN_CACHE_DIR and SDRUN_DATA_DIR";
        sdrun_abi::Error::io("create the folder", dir, &e).with_hint(hint).into()
    })
}
