//! Memory aligned to cache lines.

use std::{
    ops::{Deref, DerefMut},
    panic::resume_unwind,
};

/// 32-bit elements of a cache line.
const LINE: usize = 16;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line<T>([T; LINE]);

/// A kernel could not allocate its scratch memory.
pub(crate) struct NoMemory {
    pub(crate) bytes: usize,
}

/// A vector aligned to cache lines, so that a row of whole lines never straddles one more.
#[derive(Default)]
pub(crate) struct Lines<T> {
    lines: Vec<Line<T>>,
    len: usize,
}

/// 32-bit types for which every bit pattern is valid.
pub(crate) trait Element: Copy + Default {}
impl Element for f32 {}
impl Element for u32 {}

impl<T: Element> Lines<T> {
    /// Sets the length. New elements are 0, or the old values if the vector was longer before.
    ///
    /// # Panics
    /// With [`NoMemory`], and without printing a message, if it cannot allocate the memory, which can be tens of megabytes.
    pub(crate) fn resize(&mut self, len: usize) {
        let lines = len.div_ceil(LINE);
        if let Some(more) = lines.checked_sub(self.lines.len()) {
            if self.lines.try_reserve_exact(more).is_err() {
                resume_unwind(Box::new(NoMemory { bytes: lines * size_of::<Line<T>>() }));
            }
            self.lines.resize(lines, Line([T::default(); LINE]));
        }
        self.len = len;
    }
}

impl<T: Element> Deref for Lines<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: a line is exactly `LINE` elements, and there are at least `len / LINE` of them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

/// Prefetches elements into the first-level cache. Does nothing on processors without such an instruction.
pub(crate) fn prefetch(elements: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    for line in elements.chunks(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch changes only the cache.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = elements;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_begin_at_lines_and_keep_what_they_hold() {
        let mut lines = Lines::<f32>::default();
        for len in [1, 40, 7, 1000] {
            lines.resize(len);
            assert_eq!((lines.len(), lines.as_ptr().addr() % 64), (len, 0));
            lines.fill(len as f32);
        }
        lines.resize(7);
        assert_eq!(*lines, [1000.0; 7]);
    }
}
