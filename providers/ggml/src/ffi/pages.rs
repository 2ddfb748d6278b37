//! Large pages for large memory.

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
