//! The one place that loads code.
#![allow(unsafe_code)]

use crate::check_image;
use libloading::Library;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{error::Error as _, path::Path};

/// Loads a vendor's library by absolute path, after [`check_image`]. The error includes the loader's message. On
/// Windows, the library's dependencies are searched in its own folder.
///
/// The library must never be unloaded: keep or forget the handle.
pub fn open(file: &Path) -> Result<Library> {
    check_image(file)?;
    // SAFETY: loading runs the library's initialisers. It is the vendor's runtime, which the user installed and the
    // host chose, and the file was checked to be complete. Path and flags are plain values.
    let library = unsafe {
        #[cfg(windows)]
        {
            use libloading::os::windows;
            windows::Library::load_with_flags(file, windows::LOAD_WITH_ALTERED_SEARCH_PATH).map(Library::from)
        }
        #[cfg(not(windows))]
        Library::new(file)
    };
    library.map_err(|error| {
        // The error itself names only the failed call; its source is the loader's message.
        let words = error.source().map_or_else(|| error.to_string(), |words| words.to_string());
        Error::new(ErrorCode::FailedPrecondition, format!("cannot load {}: {words}", file.display()))
            .with_file(file)
            .with_hint("install the runtime again, or the library its message names as missing")
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_words_are_kept() {
        // A complete ELF library with an overwritten dynamic section passes the check but not the loader.
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("libthing.so");
        let mut bytes = vec![0u8; 8192];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16] = 3;
        bytes[18..20]
            .copy_from_slice(&(if cfg!(target_arch = "aarch64") { 183u16 } else { 62 }).to_le_bytes());
        bytes[32] = 64; // program headers at 64
        bytes[54] = 56;
        bytes[56] = 1;
        std::fs::write(&file, &bytes).unwrap();
        check_image(&file).unwrap();
        let error = open(&file).unwrap_err();
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        let words = error.message.split_once(": ").unwrap().1;
        assert!(words.contains("libthing.so") && words.len() > 20, "{error}");
    }
}
