//! For build scripts that compile against files of a package that is never compiled itself. Its version and
//! checksum are pinned in Cargo.toml under `[target.'cfg(any())'.dependencies]`.

use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
    process::Command,
};

/// The unpacked folder of `package`. Asks cargo, which downloads the package if it is missing.
/// `hint` tells the user what else to do and appears in errors.
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
