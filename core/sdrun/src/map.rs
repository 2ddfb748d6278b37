//! Read-only mappings of files.
#![allow(unsafe_code)]

use std::{fs::File, io, ops::Deref};

/// A mapped file. As with every mapping, a file that another process shortens meanwhile faults; sdrun maps
/// files of its own cache and files the user names.
pub(crate) struct Map(Option<memmap2::Mmap>);

impl Map {
    /// Maps the whole file; an empty file is an empty slice.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let length = file.metadata()?.len().try_into().map_err(io::Error::other)?;
        Self::of_part(file, 0, length)
    }

    /// Maps `length` bytes from `offset` on, which lie in the file.
    pub(crate) fn of_part(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        if length == 0 {
            return Ok(Map(None));
        }
        // SAFETY: the mapping is private and read only; see the type's documentation.
        Ok(Map(Some(unsafe { memmap2::MmapOptions::new().offset(offset).len(length).map(file)? })))
    }
}

impl Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}
