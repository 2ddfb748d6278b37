//! Read-only mappings of files.
#![allow(unsafe_code)]

use std::{fs::File, io, ops::Deref};

/// A mapped file. As with every mapping, a file that another process shortens meanwhile faults; sdrun maps
/// files of its own cache and files the user names.
pub(crate) struct Map(Option<memmap2::Mmap>);

impl Map {
    /// Maps the whole file; an empty file is an empty slice.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() == 0 {
            return Ok(Map(None));
        }
        // SAFETY: the mapping is private and read only; see the type's documentation.
        Ok(Map(Some(unsafe { memmap2::Mmap::map(file)? })))
    }
}

impl Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}
