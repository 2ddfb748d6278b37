//! Pages of memory: large ones, and those of files.

use memmap2::{MmapMut, MmapOptions};
use std::{fs::File, path::Path};

/// Offsets of maps are multiples of this everywhere: of the pages of Linux and macOS, and of what Windows asks for.
const UNIT: u64 = 64 << 10;

/// The pages of a regular file with `len` bytes from `offset` on, and where in them those begin. What is written to them is
/// seen by nobody else. `None` where there are none, or where the elements would lie at an address that is no multiple of 4.
pub(super) fn of_file(path: &Path, offset: u64, len: usize) -> Option<(MmapMut, usize)> {
    // Looked at before it is opened: opening a pipe would wait for a writer.
    if !offset.is_multiple_of(4) || !path.metadata().ok()?.is_file() {
        return None;
    }
    let file = File::open(path).ok()?;
    if offset.checked_add(len as u64)? > file.metadata().ok()?.len() {
        return None;
    }
    let skip = (offset % UNIT) as usize;
    let mut options = MmapOptions::new();
    // SAFETY: the map is private. Its contents are numbers, of which every pattern is one: a writer elsewhere can change
    // values but break no invariant; what comes of shortening the file is said where the map is kept.
    let map = unsafe { options.offset(offset - skip as u64).len(skip.checked_add(len)?).map_copy(&file) };
    Some((map.ok()?, skip))
}

/// Asks the system to back a range with large pages: filling fresh memory is several times as fast, for each page is
/// cleared and entered once. What the system makes of it changes no result.
///
/// # Safety
/// `start..start + len` is mapped.
pub(super) unsafe fn prefer_huge(start: *mut u8, len: usize) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let skip = start.align_offset(HUGE);
        if len > skip + HUGE {
            // Where the system has no large pages it says so, and small ones do.
            // SAFETY: whole pages inside the range; the advice changes no content.
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
