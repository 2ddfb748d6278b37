use crate::{Error, ErrorCode, Result};
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
    ///
    /// # Errors
    /// As [`resize`](Self::resize).
    pub fn new(len: usize) -> Result<Self> {
        let mut buffer = Self::default();
        buffer.resize(len)?;
        Ok(buffer)
    }
    /// A copy of `bytes`.
    ///
    /// # Errors
    /// As [`resize`](Self::resize).
    pub fn copy_of(bytes: &[u8]) -> Result<Self> {
        let mut buffer = Self::new(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer)
    }
    /// Changes the length. A buffer that stays within its capacity does not move.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system has no memory for it; the buffer is then as before.
    pub fn resize(&mut self, len: usize) -> Result<()> {
        let lines = len.div_ceil(64);
        let more = lines.saturating_sub(self.lines.len());
        self.lines.try_reserve_exact(more).map_err(|_| {
            Error::new(ErrorCode::ResourceExhausted, format!("no memory for a tensor of {len} bytes"))
        })?;
        self.lines.resize(lines, Line([0; 64]));
        self.len = len;
        Ok(())
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
