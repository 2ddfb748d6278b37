//! The memory of one weight.

use super::api::*;
use sdrun_abi::Result;
use std::{marker::PhantomData, sync::Mutex};

/// Where a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Home {
    /// In main memory.
    Host,
    /// In the memory of the GPU.
    Device,
}

/// Exclusive access to the memory of one tensor of a [`Store`](super::Store).
pub(crate) struct Room<'a> {
    api: &'a Api,
    raw: TensorPtr,
    home: Home,
    len: usize,
    store: PhantomData<&'a mut ()>,
}

// SAFETY: each tensor has at most one `Room`, and the memory of different tensors does not overlap.
unsafe impl Send for Room<'_> {}

/// Held during copies to and from a device.
static TRANSFER: Mutex<()> = Mutex::new(());

impl<'a> Room<'a> {
    /// The memory of a tensor of `len` bytes.
    ///
    /// # Safety
    /// The tensor has memory of that size at `home`, which only this value uses during `'a`.
    pub(super) unsafe fn new(api: &'a Api, raw: TensorPtr, home: Home, len: usize) -> Self {
        Room { api, raw, home, len, store: PhantomData }
    }
    /// Lets `fill` write all bytes of the tensor, in place or into a copy that then goes to the device.
    pub(crate) fn fill<T>(&mut self, fill: impl FnOnce(&mut [u8]) -> Result<T>) -> Result<T> {
        if self.home == Home::Host {
            // SAFETY: host memory of this length, borrowed exclusively through the store.
            return fill(unsafe { std::slice::from_raw_parts_mut((*self.raw).data.cast(), self.len) });
        }
        let mut bytes = vec![0; self.len];
        let filled = fill(&mut bytes)?;
        let _transfer = TRANSFER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: the tensor has memory of exactly this many bytes.
        unsafe { (self.api.ggml_backend_tensor_set)(self.raw, bytes.as_ptr().cast(), 0, bytes.len()) };
        Ok(filled)
    }

    /// A copy of the tensor's bytes.
    pub(crate) fn copy(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        if self.home == Home::Host {
            // SAFETY: host memory of this length.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts((*self.raw).data.cast::<u8>(), self.len)
            });
            return bytes;
        }
        bytes.resize(self.len, 0);
        let _transfer = TRANSFER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: the tensor has exactly this many bytes.
        unsafe { (self.api.ggml_backend_tensor_get)(self.raw, bytes.as_mut_ptr().cast(), 0, bytes.len()) };
        bytes
    }
}
