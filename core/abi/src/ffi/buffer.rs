use std::ops::{Deref, DerefMut};

/// Sixty-four bytes, the unit of [`AlignedBuffer`].
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Bytes aligned to 64, as the ABI requires of tensors. Growing does not preserve the contents.
#[derive(Default)]
pub struct AlignedBuffer {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBuffer {
    /// A zeroed buffer of `len` bytes.
    pub fn new(len: usize) -> Self {
        let mut buffer = Self::default();
        buffer.resize(len);
        buffer
    }
    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
    /// Changes the length. A buffer that stays within its capacity does not move.
    pub fn resize(&mut self, len: usize) {
        self.lines.resize(len.div_ceil(64), Line([0; 64]));
        self.len = len;
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `Line` is 64 plain bytes without padding and `len <= lines.len() * 64`.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the borrow of `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl std::fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuffer({} bytes)", self.len)
    }
}
