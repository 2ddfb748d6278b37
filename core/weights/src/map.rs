//! The one place that maps files into memory.
#![allow(unsafe_code)]

use memmap2::{Mmap, MmapOptions};
use sdrun_abi::{Error, Result};
use std::{
    fs::File,
    ops::{Deref, Range},
    path::Path,
};

/// Smaller parts stay in memory: asking for each page again would take longer than they are worth.
#[cfg(unix)]
const WORTH_RELEASING: usize = 64 << 10;

/// The whole of a regular file as bytes that are read when they are touched.
///
/// A file that another process shortens while it is mapped ends this process when the lost part is touched;
/// there is no portable guard against that, so weight files must not be edited in place while in use.
#[derive(Debug)]
pub(crate) struct FileMap(Option<Mmap>);

impl FileMap {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |error| Error::io("open", path, &error);
        // Looked at before it is opened: opening a pipe would wait for a writer.
        if !path.metadata().map_err(failed)?.is_file() {
            return Err(Error::invalid(format!("{} is not a regular file", path.display())).with_file(path));
        }
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() == 0 {
            return Ok(FileMap(None));
        }
        // SAFETY: the mapping is private and read-only, and references into it borrow it. Its contents are only
        // ever treated as untrusted bytes, so a writer elsewhere can change values but not break an invariant;
        // shortening the file is the documented hazard above.
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file) }
            .map_err(|error| Error::io("map", path, &error))?;
        Ok(FileMap(Some(map)))
    }

    /// A tensor's bytes, `None` where they do not lie in the file.
    pub(crate) fn part(&self, range: Range<usize>) -> Option<Part<'_>> {
        self.get(range.clone()).is_some().then(|| Part { map: self, range })
    }
}

impl Deref for FileMap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

/// Bytes of a mapped file, of which nothing stays in this process's memory once they are dropped: a provider that has
/// copied a checkpoint would else seem to hold it twice. The system may keep them in its cache.
pub(crate) struct Part<'a> {
    map: &'a FileMap,
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
            // SAFETY: nobody writes to this private mapping of a file, so that pages which go are read from the file
            // when they are touched again, by neighbours of this part or by others who hold the same one.
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
    fn parts_are_read_again_after_they_were_let_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 4096 + i) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let map = FileMap::open(&path).unwrap();
        // Neither begins nor ends with a page.
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

    /// Bytes of a mapped file that this process has resident.
    #[cfg(target_os = "linux")]
    fn resident(path: &Path) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_file = maps.split_once(path.to_str().unwrap()).unwrap().1;
        let line = of_file.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
    }
}
