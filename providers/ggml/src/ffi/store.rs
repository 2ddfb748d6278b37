//! Tensors whose memory outlives the graphs that read them: the weights.

use super::{
    api::*,
    builder::{Context, Extent, Type, new_tensor, reserve},
    library::Ggml,
    pages,
};
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::c_void,
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

/// The weights of a session, shared by its graphs of all shapes.
pub(crate) struct Store {
    ggml: &'static Ggml,
    pools: Arc<Pools>,
    tensors: Vec<TensorPtr>,
}

/// What lies behind a store; goes with the last program that reads it.
pub(super) struct Pools {
    ggml: &'static Ggml,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    contexts: Vec<Context>,
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
            inner.contexts.iter().for_each(|context| (self.ggml.api.ggml_free)(context.raw));
        }
    }
}

impl Store {
    /// Without tensors.
    pub(crate) fn new(ggml: &'static Ggml) -> Self {
        let pools = Arc::new(Pools { ggml, inner: Mutex::default() });
        Store { ggml, pools, tensors: Vec::new() }
    }

    /// Describes a tensor; [`allocate`](Self::allocate) gives it memory.
    pub(crate) fn add(&mut self, type_: Type, extent: Extent) -> Result<Stored> {
        let context = reserve(self.ggml, &mut self.pools.lock().contexts)?;
        self.tensors.push(new_tensor(self.ggml, context, type_, extent)?);
        Ok(Stored(self.tensors.len() as u32 - 1))
    }

    /// Gives memory to the tensors that have none.
    ///
    /// # Errors
    /// `ResourceExhausted`.
    pub(crate) fn allocate(&mut self) -> Result<()> {
        let mut inner = self.pools.lock();
        let api = &self.ggml.api;
        let Inner { contexts, buffers } = &mut *inner;
        for context in contexts.iter_mut().filter(|context| context.pending) {
            // SAFETY: a context of this store; the buffer type is the CPU's own.
            let buffer = unsafe {
                let type_ = (api.ggml_backend_dev_buffer_type)(self.ggml.cpu.device);
                (api.ggml_backend_alloc_ctx_tensors_from_buft)(context.raw, type_)
            };
            if buffer.is_null() {
                return Err(Error::new(ErrorCode::ResourceExhausted, "no memory for the weights"));
            }
            buffers.push(buffer);
            context.pending = false;
            // SAFETY: a buffer of host memory of this size.
            unsafe {
                let (base, len) =
                    ((api.ggml_backend_buffer_get_base)(buffer), (api.ggml_backend_buffer_get_size)(buffer));
                pages::prefer_huge(base.cast(), len);
            }
        }
        Ok(())
    }

    /// The memory of every tensor, in the order in which they were added.
    ///
    /// # Errors
    /// `Internal` where a tensor has none yet.
    pub(crate) fn rooms(&mut self) -> Result<Vec<Room<'_>>> {
        let room = |raw: &TensorPtr| {
            // SAFETY: a tensor of this store.
            let (data, len) = unsafe { ((**raw).data, (self.ggml.api.ggml_nbytes)(*raw)) };
            if data.is_null() {
                return Err(Error::internal("a ggml weight without memory"));
            }
            Ok(Room { data, len, store: PhantomData })
        };
        self.tensors.iter().map(room).collect()
    }

    /// Bytes of the buffers.
    pub(crate) fn bytes(&self) -> u64 {
        // SAFETY: buffers of this store.
        let size = |buffer: &Ptr| unsafe { (self.ggml.api.ggml_backend_buffer_get_size)(*buffer) as u64 };
        self.pools.lock().buffers.iter().map(size).sum()
    }

    pub(super) fn raw(&self, tensor: Stored) -> TensorPtr {
        self.tensors[tensor.index()]
    }
    pub(super) fn pools(&self) -> &Arc<Pools> {
        &self.pools
    }
}

/// The memory of one tensor of a [`Store`] that nobody else uses as long as this lives.
pub(crate) struct Room<'a> {
    data: *mut c_void,
    len: usize,
    store: PhantomData<&'a mut Store>,
}

// SAFETY: the memory of different tensors does not overlap, and there is one `Room` for each.
unsafe impl Send for Room<'_> {}

impl Room<'_> {
    /// The tensor's bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: host memory of this length, borrowed exclusively through the store.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.len) }
    }
}
