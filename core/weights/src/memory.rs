//! Memory for tensors.

use memmap2::MmapMut;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
};

/// Returns `len` zero bytes, or `ResourceExhausted`.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| exhausted(len))?;
    data.resize(len, 0);
    Ok(data)
}

fn exhausted(len: usize) -> Error {
    Error::new(ErrorCode::ResourceExhausted, format!("no memory for {len} bytes of a tensor"))
}

/// Returns `len` bytes, more than 0, in huge pages if the system has them. A transpose writes to many places, and with
/// small pages each write misses the TLB.
fn large_pages(len: usize) -> Result<MmapMut> {
    let map = MmapMut::map_anon(len).map_err(|_| exhausted(len))?;
    // Small pages work too.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}

/// Buffers kept for reuse.
const KEPT: usize = 2;

/// A pool of tensor memory: mapping fresh pages takes longer than computing their contents. Clones share the pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers(Arc<Mutex<Vec<MmapMut>>>);

impl Buffers {
    /// A buffer of `len` bytes of any content. `ResourceExhausted` if there is no memory.
    pub(crate) fn take(&self, len: usize) -> Result<Buffer> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // A smaller one is unmapped first.
        let data = kept.filter(|kept| kept.len() >= len);
        let data = data.map_or_else(|| large_pages(len.max(1)), Ok)?;
        Ok(Buffer { data: Some(data), len, home: self.clone() })
    }
}

/// A buffer of the pool.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Until it is dropped.
    data: Option<MmapMut>,
    len: usize,
    home: Buffers,
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.data.as_deref().map_or(&[], |data| &data[..self.len])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.data.as_deref_mut().map_or(&mut [], |data| &mut data[..self.len])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut kept = self.home.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(self.data.take());
        // The largest buffers fit the most tensors.
        kept.sort_by_key(|data| data.len());
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
        let kept: Vec<usize> = buffers.0.lock().unwrap().iter().map(|data| data.len()).collect();
        assert_eq!(kept, [20, 100]);
    }
}
