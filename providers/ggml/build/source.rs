//! Where the sources of ggml are.

use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::Command,
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
            None => pinned_package()?.join("llama.cpp").join("ggml"),
        };
        let version = version(&root.join("CMakeLists.txt"))?;
        Ok(Source { root, version })
    }
}

/// Asks cargo for the unpacked package, which makes it download the package if it is not there yet.
fn pinned_package() -> Result<PathBuf, Box<dyn Error>> {
    let hint = format!(
        "set {OVERRIDE} to a ggml source folder, or let cargo reach its registry once (`cargo fetch`)"
    );
    let cargo = env::var_os("CARGO").ok_or("cargo did not set CARGO")?;
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked"])
        .output()
        .map_err(|error| format!("`cargo metadata` does not start: {error}; {hint}"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(format!("`cargo metadata --locked` failed: {}; {hint}", words.trim()).into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let manifest = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == PACKAGE)
        .and_then(|package| package["manifest_path"].as_str())
        .ok_or_else(|| format!("`cargo metadata` does not list {PACKAGE}; {hint}"))?;
    Ok(Path::new(manifest).parent().ok_or("manifest without a folder")?.to_path_buf())
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
