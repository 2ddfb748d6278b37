//! The files of ggml's libraries.

use libloading::Library;
use sdrun_abi::{Error, Result};
use std::path::{Path, PathBuf};

/// The folder where the build script put the libraries. Only unit tests know it: a plugin that remembered its build folder would
/// load libraries from there on a user's machine.
#[cfg(test)]
pub(crate) const LIBRARY_DIR: &str = env!("SDRUN_GGML_LIB_DIR");

/// The shared libraries of a folder in alphabetical order: the name without prefix, and the path.
pub(super) fn libraries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let cannot = |e: std::io::Error| Error::io("list", folder, &e);
    let mut files = Vec::new();
    for entry in folder.read_dir().map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(name) = name.strip_prefix(std::env::consts::DLL_PREFIX) else { continue };
        if name.contains(std::env::consts::DLL_SUFFIX) && path.is_file() {
            files.push((name.to_string(), path));
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a library's name is `wanted`, with or without a suffix.
pub(super) fn is_named(name: &str, wanted: &str) -> bool {
    name.strip_prefix(wanted).is_some_and(|rest| rest.starts_with(['-', '.']))
}

/// Loads a library and never unloads it.
pub(super) fn open(file: &Path) -> Result<&'static Library> {
    Ok(Box::leak(Box::new(sdrun_provider_common::open(file)?)))
}

/// The file name of one of our own libraries. Windows identifies libraries by file name alone, so the name there differs from that
/// of any other ggml in the process.
pub(crate) fn library_file(name: &str) -> String {
    let prefix = if cfg!(windows) { "sdrun-" } else { std::env::consts::DLL_PREFIX };
    format!("{prefix}{name}{}", std::env::consts::DLL_SUFFIX)
}
