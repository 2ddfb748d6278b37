//! The one place that maps files into memory.
#![allow(unsafe_code)]

use bytes::Bytes;
use sdrun_abi::{Error, Result};
use std::{fs::File, path::Path};

/// The whole of a regular file as bytes that are read when they are touched. Slices share the mapping.
///
/// A file that another process shortens while it is mapped ends this process when the lost part is touched;
/// there is no portable guard against that, so weight files must not be edited in place while in use.
pub(crate) fn map_file(path: &Path) -> Result<Bytes> {
    let failed = |error| Error::io("open", path, &error);
    // Looked at before it is opened: opening a pipe would wait for a writer.
    if !path.metadata().map_err(failed)?.is_file() {
        return Err(Error::invalid(format!("{} is not a regular file", path.display())).with_file(path));
    }
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the mapping is private and read-only, and no reference into it outlives it, because `Bytes` owns
    // it. Its contents are only ever treated as untrusted bytes, so a writer elsewhere can change values but
    // not break an invariant; shortening the file is the documented hazard above.
    let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file) }
        .map_err(|error| Error::io("map", path, &error))?;
    Ok(Bytes::from_owner(map))
}
