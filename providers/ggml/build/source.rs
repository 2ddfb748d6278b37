//! Locates the sources of ggml.

use super::pinned_package;
use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

/// Environment variable that names another ggml source folder.
pub(crate) const OVERRIDE: &str = "SDRUN_GGML_SOURCE";
/// The package whose ggml copy is compiled; Cargo.toml pins its version.
const PACKAGE: &str = "llama-cpp-sys-2";

/// A ggml source tree.
pub(crate) struct Source {
    /// The folder that holds `include` and `src`.
    pub(crate) root: PathBuf,
    /// `MAJOR.MINOR.PATCH` of ggml.
    pub(crate) version: String,
}

impl Source {
    /// The tree named by [`OVERRIDE`], or the one inside the pinned package.
    pub(crate) fn locate() -> Result<Self, Box<dyn Error>> {
        let root = match env::var_os(OVERRIDE) {
            Some(folder) => PathBuf::from(folder),
            None => pinned_package::folder(PACKAGE, &hint())?.join("llama.cpp").join("ggml"),
        };
        let version = version(&root.join("CMakeLists.txt"))?;
        Ok(Source { root, version })
    }
}

fn hint() -> String {
    format!("set {OVERRIDE} to a ggml source folder, or let cargo reach its registry once (`cargo fetch`)")
}

/// Reads the three version numbers out of ggml's CMakeLists.txt.
fn version(file: &Path) -> Result<String, Box<dyn Error>> {
    let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let part = |name: &str| {
        let prefix = format!("set(GGML_VERSION_{name} ");
        text.lines()
            .find_map(|line| line.trim().strip_prefix(&prefix)?.strip_suffix(')'))
            .ok_or_else(|| format!("{} does not set GGML_VERSION_{name}", file.display()))
    };
    Ok(format!("{}.{}.{}", part("MAJOR")?, part("MINOR")?, part("PATCH")?))
}
