//! The one place that maps files into memory.
#![allow(unsafe_code)]

use bytes::Bytes;
use std::{fs::File, io};

/// The whole of a regular file as bytes that are read when they are touched. Slices share the mapping.
///
/// A file that another process shortens while it is mapped ends this process when the lost part is
/// touched; there is no portable guard against that, so models must not be edited in place while in use.
pub(crate) fn map_file(file: &File) -> io::Result<Bytes> {
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the mapping is private and read-only, and no reference into it outlives it, because `Bytes` owns
    // it. Its contents are only ever treated as untrusted bytes, so a writer elsewhere can change values but
    // not break an invariant; shortening the file is the documented hazard above.
    let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(file)? };
    Ok(Bytes::from_owner(map))
}
