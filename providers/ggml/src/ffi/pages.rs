//! Pages of memory: huge pages, and mapped files.

use memmap2::{MmapMut, MmapOptions};
use std::{fs::File, path::Path};

/// A multiple of this is a valid map offset on every system: it covers the pages of Linux and macOS, and Windows' granularity.
const UNIT: u64 = 64 << 10;

/// Maps the `len` bytes at `offset` of a regular file, copy-on-write. Returns the map and where in it the bytes begin. `None` if the
/// file lacks these bytes or cannot be mapped, or if the offset is no multiple of 4, so that the elements would be misaligned.
pub(super) fn of_file(path: &Path, offset: u64, len: usize) -> Option<(MmapMut, usize)> {
    // Check before opening: opening a pipe would wait for a writer.
    if !offset.is_multiple_of(4) || !path.metadata().ok()?.is_file() {
        return None;
    }
    let file = File::open(path).ok()?;
    if offset.checked_add(len as u64)? > file.metadata().ok()?.len() {
        return None;
    }
    let skip = (offset % UNIT) as usize;
    let mut options = MmapOptions::new();
    // SAFETY: the map is private. Its contents are numbers, for which every bit pattern is valid: another process that writes
    // to the file can change values but break no invariant. `Store::map` says what happens if the file is shortened.
    let map = unsafe { options.offset(offset - skip as u64).len(skip.checked_add(len)?).map_copy(&file) };
    Some((map.ok()?, skip))
}

/// Asks the system to back a range with huge pages, which makes filling fresh memory several times as fast. Has no effect on
/// results.
///
/// # Safety
/// `start..start + len` is mapped.
pub(super) unsafe fn prefer_huge(start: *mut u8, len: usize) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let skip = start.align_offset(HUGE);
        if len > skip + HUGE {
            // Without huge pages the call fails, and small pages serve.
            // SAFETY: whole pages inside the range; the advice does not change their contents.
            let _ = unsafe {
                rustix::mm::madvise(
                    start.add(skip).cast(),
                    (len - skip) / HUGE * HUGE,
                    rustix::mm::Advice::LinuxHugepage,
                )
            };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, len);
}
