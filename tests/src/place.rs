//! Where the programs and data under test are: in the folders named by environment variables, which `cargo xtask test` sets, else
//! where it leaves them in the target folder.

use std::path::PathBuf;

/// The purpose of a folder.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// sdrun and its plugins, laid out as installed (`SDRUN_DIST`).
    Dist,
    /// Installed vendor runtimes (`SDRUN_DATA_DIR`).
    Data,
    /// Built-in models and engines (`SDRUN_CACHE_DIR`).
    Cache,
    /// The library for C with its header (`SDRUN_C_LIBRARY`).
    CLibrary,
}

impl Place {
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Place::Dist => ("SDRUN_DIST", "dist-test"),
            Place::Data => ("SDRUN_DATA_DIR", "data"),
            Place::Cache => ("SDRUN_CACHE_DIR", "cache"),
            Place::CLibrary => ("SDRUN_C_LIBRARY", "c-library"),
        }
    }

    /// Finds the folder. The error says how to create it.
    pub fn find(self) -> Result<PathBuf, String> {
        let (variable, name) = self.names();
        let path = match std::env::var_os(variable) {
            Some(path) => PathBuf::from(path),
            None => sdrun_tiny::target().map_err(|why| format!("{why:#}"))?.join(name),
        };
        if path.is_dir() {
            return Ok(path);
        }
        Err(format!(
            "there is no {}: run `cargo xtask test`, which creates it, or set {variable}",
            path.display()
        ))
    }
}
