//! Memory that begins at a cache line.

use std::ops::{Deref, DerefMut};

/// Elements of 32 bits of a cache line.
const LINE: usize = 16;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line<T>([T; LINE]);

/// A vector that begins at a cache line, so that rows of whole lines lie in as many of them.
#[derive(Default)]
pub(crate) struct Lines<T> {
    lines: Vec<Line<T>>,
    len: usize,
}

/// Elements of 32 bits any of whose bit patterns is valid.
pub(crate) trait Element: Copy + Default {}
impl Element for f32 {}
impl Element for u32 {}

impl<T: Element> Lines<T> {
    /// Makes it `len` elements long; those that are new are 0, or what was there before it was made shorter.
    pub(crate) fn resize(&mut self, len: usize) {
        self.len = len;
        let lines = len.div_ceil(LINE);
        if lines > self.lines.len() {
            self.lines.resize(lines, Line([T::default(); LINE]));
        }
    }
}

impl<T: Element> Deref for Lines<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: lines are arrays of so many elements and nothing else, and there are enough of them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

/// Asks for memory that will be read soon, where there is an instruction for that.
pub(crate) fn fetch(elements: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    for line in elements.chunks(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: changes nothing but what lies in the cache.
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
