//! Where the things under test are: environment variables that `cargo xtask test` sets, else the places in
//! the target folder where it leaves them.

use std::path::PathBuf;

/// What one of the folders is good for.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// sdrun and its plugins, laid out as installed (`SDRUN_DIST`).
    Dist,
    /// Installed vendor runtimes (`SDRUN_DATA_DIR`).
    Data,
    /// Built-in models and engines (`SDRUN_CACHE_DIR`).
    Cache,
}

impl Place {
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Place::Dist => ("SDRUN_DIST", "dist-test"),
            Place::Data => ("SDRUN_DATA_DIR", "data"),
            Place::Cache => ("SDRUN_CACHE_DIR", "cache"),
        }
    }

    /// The folder; the error says how to make it.
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
            "there is no {}: run `cargo xtask test`, which makes it, or set {variable}",
            path.display()
        ))
    }
}
