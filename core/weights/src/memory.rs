//! Memory for tensors.

use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
};

/// Room for `len` bytes, or `ResourceExhausted`.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| {
        Error::new(ErrorCode::ResourceExhausted, format!("no memory for {len} bytes of a tensor"))
    })?;
    data.resize(len, 0);
    Ok(data)
}

/// Buffers that are kept for the next tensor.
const KEPT: usize = 2;

/// Memory of tensors that were delivered and dropped, for the ones after them: mapping fresh pages takes longer than
/// computing what goes into them. Clones share it; it goes with the last of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl Buffers {
    /// A buffer of `len` bytes, whatever they are. `ResourceExhausted` where there is no memory.
    pub(crate) fn take(&self, len: usize) -> Result<Buffer> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut data = kept.unwrap_or_default();
        if data.len() < len {
            // Nothing of the old content has to be moved.
            drop(data);
            data = zeroed(len)?;
        }
        Ok(Buffer { data, len, home: self.clone() })
    }
}

/// A buffer on loan.
#[derive(Debug)]
pub(crate) struct Buffer {
    data: Vec<u8>,
    len: usize,
    home: Buffers,
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.data[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.data[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut kept = self.home.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(std::mem::take(&mut self.data));
        // The largest serve the most tensors.
        kept.sort_by_key(Vec::len);
        let surplus = kept.len().saturating_sub(KEPT);
        kept.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_and_few_are_kept() {
        let buffers = Buffers::default();
        let mut first = buffers.take(100).unwrap();
        first.fill(7);
        assert_eq!(first.len(), 100);
        drop(first);
        let again = buffers.take(50).unwrap();
        assert_eq!(again[..], [7; 50], "the same memory");
        let other = buffers.take(10).unwrap();
        assert_eq!(other[..], [0; 10]);
        let more = buffers.take(20).unwrap();
        drop((again, other, more));
        let kept: Vec<usize> = buffers.0.lock().unwrap().iter().map(Vec::len).collect();
        assert_eq!(kept, [20, 100]);
    }
}
