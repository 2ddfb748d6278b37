//! For build scripts that compile against files of a package which is never compiled itself: its version and
//! checksum are pinned in Cargo.toml under `[target.'cfg(any())'.dependencies]`.

use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
    process::Command,
};

/// The unpacked folder of `package`. Asks cargo, which makes it download the package if it is not there yet.
/// `hint` says what else can be done, for errors.
pub(crate) fn folder(package: &str, hint: &str) -> Result<PathBuf, Box<dyn Error>> {
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
        .find(|entry| entry["name"] == package)
        .and_then(|entry| entry["manifest_path"].as_str())
        .ok_or_else(|| format!("`cargo metadata` does not list {package}; {hint}"))?;
    Ok(Path::new(manifest).parent().ok_or("manifest without a folder")?.to_path_buf())
}
