//! The only place that maps files into memory for reading.
#![allow(unsafe_code)]

use crate::{Links, open_regular};
use memmap2::{Mmap, MmapOptions};
use sdrun_abi::{Error, Result};
use std::{
    fs::File,
    io,
    ops::{Deref, Range},
    path::Path,
};

/// Smaller parts stay resident: reading their pages again would cost more than it saves.
#[cfg(unix)]
const WORTH_RELEASING: usize = 64 << 10;

/// A private read-only mapping of a regular file; its bytes are read on first access.
///
/// If another process truncates the file, accessing the lost part ends this process. No portable guard exists, so
/// models and weight files must not be edited in place while they are in use.
#[derive(Debug)]
pub struct Map(Option<Mmap>);

impl Map {
    /// Opens and maps a file.
    ///
    /// # Errors
    /// Those of [`open_regular`], and those of [`Error::io`] if the system cannot map it.
    pub fn open(path: &Path, links: Links) -> Result<Self> {
        let file = open_regular(path, links)?;
        Self::of(&file).map_err(|error| Error::io("map", path, &error))
    }

    /// Maps the whole file; an empty file gives an empty slice.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn of(file: &File) -> io::Result<Self> {
        let length = file.metadata()?.len().try_into().map_err(io::Error::other)?;
        Self::of_part(file, 0, length)
    }

    /// Maps `length` bytes from `offset`, which must lie within the file.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn of_part(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        if length == 0 {
            return Ok(Map(None));
        }
        // SAFETY: the mapping is private and read-only, and references into it borrow it. Its bytes count as
        // untrusted, so another process that writes to the file can change values but not break an invariant.
        // Truncation is the documented hazard above.
        let map = unsafe { MmapOptions::new().offset(offset).len(length).map_copy_read_only(file)? };
        Ok(Map(Some(map)))
    }

    /// The bytes in `range`; `None` if they are not within the file.
    pub fn part(&self, range: Range<usize>) -> Option<Part<'_>> {
        self.get(range.clone()).is_some().then(|| Part { map: self, range })
    }
}

impl Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Bytes of a mapped file that leave this process's memory on drop. Otherwise, a process that has copied a checkpoint
/// would seem to hold it twice. The page cache may keep them.
pub struct Part<'a> {
    map: &'a Map,
    range: Range<usize>,
}

impl Deref for Part<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

#[cfg(unix)]
impl Drop for Part<'_> {
    fn drop(&mut self) {
        if let Some(map) = &self.map.0
            && self.range.len() >= WORTH_RELEASING
        {
            // SAFETY: nothing writes to this private mapping, so released pages are read from the file again when
            // neighbours of this part, or other holders of the same part, access them.
            let _ = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    self.range.start,
                    self.range.len(),
                )
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_can_be_read_again_after_release() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 4096 + i) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let map = Map::open(&path, Links::Refuse).unwrap();
        // Starts and ends off page boundaries.
        let (first, second) = (map.part(100..500_001).unwrap(), map.part(500_001..1 << 20).unwrap());
        assert!(first[..] == bytes[100..500_001] && second[..] == bytes[500_001..]);
        drop(first);
        assert!(second[..] == bytes[500_001..], "a neighbour");
        drop(second);
        assert!(map.part(100..1 << 20).unwrap()[..] == bytes[100..]);
        assert!(map.part(0..(1 << 20) + 1).is_none() && map.part(2 << 20..3 << 20).is_none());
        #[cfg(target_os = "linux")]
        assert!(resident(&path) < 16 << 10, "{} bytes are resident", resident(&path));
    }

    /// Resident bytes of the mapped file in this process.
    #[cfg(target_os = "linux")]
    fn resident(path: &Path) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_file = maps.split_once(path.to_str().unwrap()).unwrap().1;
        let line = of_file.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
    }
}
