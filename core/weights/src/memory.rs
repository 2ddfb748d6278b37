//! Memory for tensors.

use memmap2::MmapMut;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
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
/// Buffers of fewer bytes are not kept: norms and biases come between the large weights, and are mapped in no time.
const SMALL: usize = 1 << 20;
/// After so many uses in a row for less than three quarters of it, a buffer is given back. Some providers take the largest weights first and
/// need no large buffer any more; others return to large weights after a few small ones.
const PATIENCE: u8 = 16;

/// A pool of tensor memory: mapping fresh pages takes longer than computing their contents. Clones share the pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers(Arc<Mutex<Vec<Kept>>>);

#[derive(Debug)]
struct Kept {
    data: MmapMut,
    /// Uses in a row for much less.
    spare: u8,
}

impl Buffers {
    /// A buffer of `len` bytes of any content. `ResourceExhausted` if there is no memory.
    pub(crate) fn take(&self, len: usize) -> Result<Buffer> {
        let kept = if len < SMALL { None } else { lock(&self.0).pop() };
        let kept = match kept.filter(|kept| kept.data.len() >= len) {
            Some(kept) => kept,
            // A smaller one is unmapped first.
            None => Kept { data: large_pages(len.max(1))?, spare: 0 },
        };
        Ok(Buffer { kept: Some(kept), len, home: self.clone() })
    }
}

/// A buffer of the pool.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Until it is dropped.
    kept: Option<Kept>,
    len: usize,
    home: Buffers,
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.kept.as_ref().map_or(&[], |kept| &kept.data[..self.len])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.kept.as_mut().map_or(&mut [], |kept| &mut kept.data[..self.len])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(mut used) = self.kept.take() else { return };
        let fits = self.len / 3 >= used.data.len() / 4;
        used.spare = if fits { 0 } else { used.spare + 1 };
        if self.len < SMALL || used.spare > PATIENCE {
            return;
        }
        let mut kept = lock(&self.home.0);
        kept.push(used);
        // The largest buffers fit the most tensors.
        kept.sort_by_key(|kept| kept.data.len());
        let surplus = kept.len().saturating_sub(KEPT);
        kept.drain(..surplus);
    }
}

/// Locks, also after another thread panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(buffers: &Buffers) -> Vec<usize> {
        buffers.0.lock().unwrap().iter().map(|kept| kept.data.len()).collect()
    }

    #[test]
    fn buffers_are_used_again_and_few_are_kept() {
        let buffers = Buffers::default();
        let mut first = buffers.take(10 * SMALL).unwrap();
        first.fill(7);
        assert_eq!(first.len(), 10 * SMALL);
        drop(first);
        let again = buffers.take(5 * SMALL).unwrap();
        assert_eq!(again[..5], [7; 5], "the same memory");
        let other = buffers.take(SMALL).unwrap();
        assert_eq!(other[..5], [0; 5]);
        let more = buffers.take(2 * SMALL).unwrap();
        let small = buffers.take(100).unwrap();
        assert_eq!(small.len(), 100);
        drop((again, other, more, small));
        assert_eq!(kept(&buffers), [2 * SMALL, 10 * SMALL]);
    }

    #[test]
    fn a_buffer_that_stays_too_large_is_given_back() {
        let buffers = Buffers::default();
        drop(buffers.take(10 * SMALL).unwrap());
        for _ in 0..PATIENCE {
            drop(buffers.take(SMALL).unwrap());
        }
        drop(buffers.take(8 * SMALL).unwrap());
        assert_eq!(kept(&buffers), [10 * SMALL], "it was needed again in time");
        for _ in 0..=PATIENCE {
            drop(buffers.take(SMALL).unwrap());
        }
        drop(buffers.take(SMALL).unwrap());
        assert_eq!(kept(&buffers), [SMALL]);
    }
}
