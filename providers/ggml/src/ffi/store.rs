//! Tensors whose memory outlives the graphs that read them: the weights.

use super::{
    api::*,
    builder::{Context, Extent, Type, new_tensor, reserve},
    library::{Ggml, Target},
    pages,
};
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard},
};

/// A tensor of one [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stored(u32);

impl Stored {
    /// Its position in [`Store::rooms`].
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a tensor of a [`Store`] lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Home {
    /// In main memory.
    Host,
    /// In the memory of the device besides the CPU.
    Device,
}

/// The weights of a session, shared by its graphs of all shapes.
pub(crate) struct Store {
    target: Target,
    pools: Arc<Pools>,
    tensors: Vec<(TensorPtr, Home)>,
    /// Of the tensors in the memory of the device.
    device_bytes: u64,
}

/// What lies behind a store; goes with the last program that reads it.
pub(super) struct Pools {
    ggml: &'static Ggml,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    host: Vec<Context>,
    device: Vec<Context>,
    buffers: Vec<Ptr>,
}

// SAFETY: the pointers are to memory that this value alone owns; ggml ties none of it to a thread.
unsafe impl Send for Store {}
// SAFETY: a shared `Store` is only read.
unsafe impl Sync for Store {}
// SAFETY: as for `Store`; the mutex guards the lists.
unsafe impl Send for Pools {}
// SAFETY: as above.
unsafe impl Sync for Pools {}

impl Pools {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Pools {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: each was made by the matching function and is freed once, memory before its description.
        unsafe {
            inner.buffers.iter().for_each(|buffer| (self.ggml.api.ggml_backend_buffer_free)(*buffer));
            let contexts = inner.host.iter().chain(&inner.device);
            contexts.for_each(|context| (self.ggml.api.ggml_free)(context.raw));
        }
    }
}

impl Store {
    /// Without tensors.
    pub(crate) fn new(target: Target) -> Self {
        let pools = Arc::new(Pools { ggml: target.ggml, inner: Mutex::default() });
        Store { target, pools, tensors: Vec::new(), device_bytes: 0 }
    }

    /// Describes a tensor; [`allocate`](Self::allocate) gives it memory: at home, or with the host where the budget of the
    /// device is spent. ggml's scheduler then copies it for each operation of the device that reads it.
    pub(crate) fn add(&mut self, type_: Type, extent: Extent, mut home: Home) -> Result<Stored> {
        if home == Home::Device {
            let bytes = type_.bytes(extent.iter().product()) as u64;
            match self.target.budget {
                Some(budget) if self.device_bytes + bytes > budget => home = Home::Host,
                _ => self.device_bytes += bytes,
            }
        }
        let mut inner = self.pools.lock();
        let contexts = if home == Home::Host { &mut inner.host } else { &mut inner.device };
        let context = reserve(self.target.ggml, contexts)?;
        self.tensors.push((new_tensor(self.target.ggml, context, type_, extent)?, home));
        Ok(Stored(self.tensors.len() as u32 - 1))
    }

    /// Gives memory to the tensors that have none.
    ///
    /// # Errors
    /// `ResourceExhausted`.
    pub(crate) fn allocate(&mut self) -> Result<()> {
        let mut inner = self.pools.lock();
        let api = &self.target.ggml.api;
        let Inner { host, device, buffers } = &mut *inner;
        let gpu = self.target.gpu().map(|gpu| gpu.device);
        let homes = [(host, Some(self.target.ggml.cpu.device)), (device, gpu)];
        for (contexts, device) in homes {
            for context in contexts.iter_mut().filter(|context| context.pending) {
                let device =
                    device.ok_or_else(|| Error::internal("a weight for a device that is not there"))?;
                // SAFETY: a context of this store and a device of its ggml.
                let buffer = unsafe {
                    let type_ = (api.ggml_backend_dev_buffer_type)(device);
                    (api.ggml_backend_alloc_ctx_tensors_from_buft)(context.raw, type_)
                };
                if buffer.is_null() {
                    return Err(Error::new(ErrorCode::ResourceExhausted, "no memory for the weights"));
                }
                buffers.push(buffer);
                context.pending = false;
                if gpu.is_some() {
                    // SAFETY: a buffer that was just made. The scheduler then gives a copy's memory to the next one.
                    unsafe { (api.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS) };
                }
                if device == self.target.ggml.cpu.device {
                    // SAFETY: a buffer of host memory of this size.
                    unsafe {
                        let base = (api.ggml_backend_buffer_get_base)(buffer);
                        pages::prefer_huge(base.cast(), (api.ggml_backend_buffer_get_size)(buffer));
                    }
                }
            }
        }
        Ok(())
    }

    /// The memory of every tensor, in the order in which they were added.
    ///
    /// # Errors
    /// `Internal` where a tensor has none yet.
    pub(crate) fn rooms(&mut self) -> Result<Vec<Room<'_>>> {
        let api = &self.target.ggml.api;
        let room = |(raw, home): &(TensorPtr, Home)| {
            // SAFETY: a tensor of this store.
            let (data, len) = unsafe { ((**raw).data, (api.ggml_nbytes)(*raw)) };
            if data.is_null() {
                return Err(Error::internal("a ggml weight without memory"));
            }
            Ok(Room { api, raw: *raw, home: *home, len, store: PhantomData })
        };
        self.tensors.iter().map(room).collect()
    }

    /// Bytes of the tensors that lie in the memory of the device besides the CPU.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Bytes of the buffers.
    pub(crate) fn bytes(&self) -> u64 {
        let api = &self.target.ggml.api;
        // SAFETY: buffers of this store.
        let size = |buffer: &Ptr| unsafe { (api.ggml_backend_buffer_get_size)(*buffer) as u64 };
        self.pools.lock().buffers.iter().map(size).sum()
    }

    pub(super) fn raw(&self, tensor: Stored) -> TensorPtr {
        self.tensors[tensor.index()].0
    }
    pub(super) fn pools(&self) -> &Arc<Pools> {
        &self.pools
    }
}

/// The memory of one tensor of a [`Store`] that nobody else uses as long as this lives.
pub(crate) struct Room<'a> {
    api: &'a Api,
    raw: TensorPtr,
    home: Home,
    len: usize,
    store: PhantomData<&'a mut Store>,
}

// SAFETY: the memory of different tensors does not overlap, and there is one `Room` for each.
unsafe impl Send for Room<'_> {}

/// Held while something is copied to or from a device.
static TRANSFER: Mutex<()> = Mutex::new(());

impl Room<'_> {
    /// Lets `fill` write all of the tensor's bytes: in place, or into a copy that is sent to the device.
    pub(crate) fn fill(&mut self, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        if self.home == Home::Host {
            // SAFETY: host memory of this length, borrowed exclusively through the store.
            return fill(unsafe { std::slice::from_raw_parts_mut((*self.raw).data.cast(), self.len) });
        }
        let mut bytes = vec![0; self.len];
        fill(&mut bytes)?;
        let _transfer = TRANSFER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: the tensor has memory for exactly this many bytes.
        unsafe { (self.api.ggml_backend_tensor_set)(self.raw, bytes.as_ptr().cast(), 0, bytes.len()) };
        Ok(())
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
