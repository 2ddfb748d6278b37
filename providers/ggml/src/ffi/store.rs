//! The weights: tensors whose memory outlives the graphs that read them.

use super::{
    api::*,
    library::{Ggml, Target, status_error},
    pages,
    room::{Home, Room},
    streams::{Share, Streams, Twins, share},
    tensor::{Context, Extent, Type, new_tensor, reserve},
};
use crate::memory;
use memmap2::MmapMut;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

/// A tensor of one [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stored(u32);

impl Stored {
    /// The index in [`Store::rooms`].
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where weights in main memory begin: at a cache line.
const LINE: usize = 64;

/// Bytes at both ends of a mapped weight that are compared with the expected ones. Comparing all would mean reading all.
const EDGE: usize = 4096;

/// The weights of a session, shared by its graphs of all shapes.
pub(crate) struct Store {
    target: Target,
    pools: Arc<Pools>,
    tensors: Vec<Item>,
    /// Bytes of the GPU's memory that weights use, including the part in which they take turns.
    device_bytes: u64,
    /// Whether the GPU's memory has been divided.
    divided: bool,
}

/// A tensor as graphs know it.
#[derive(Clone, Copy)]
struct Item {
    raw: TensorPtr,
    home: Home,
    /// The index of its context among those of its home.
    context: usize,
    /// The tensor in main memory that holds its elements, if it takes turns on the device.
    twin: Option<TensorPtr>,
}

/// The memory of a store. It lives until the last program that reads it is dropped.
pub(super) struct Pools {
    ggml: &'static Ggml,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    host: Vec<Context>,
    device: Vec<Context>,
    /// Contexts of the twins.
    twins: Vec<Context>,
    buffers: Vec<Ptr>,
    /// Buffers over files, with the maps that they lie in.
    mapped: Vec<(Ptr, MmapMut)>,
    streams: Arc<Streams>,
}

// SAFETY: only this value owns the memory behind the pointers, and ggml ties none of it to a thread.
unsafe impl Send for Store {}
// SAFETY: shared references only read.
unsafe impl Sync for Store {}
// SAFETY: as for `Store`, and the mutex guards the lists.
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
        // SAFETY: each was created by the matching function and is freed once, memory before its description.
        unsafe {
            let buffers = inner.buffers.iter().chain(inner.mapped.iter().map(|(buffer, _)| buffer));
            buffers.for_each(|buffer| (self.ggml.api.ggml_backend_buffer_free)(*buffer));
            let contexts = inner.host.iter().chain(&inner.device).chain(&inner.twins);
            contexts.for_each(|context| (self.ggml.api.ggml_free)(context.raw));
        }
    }
}

impl Store {
    /// An empty store.
    pub(crate) fn new(target: Target) -> Self {
        let pools = Arc::new(Pools { ggml: target.ggml, inner: Mutex::default() });
        Store { target, pools, tensors: Vec::new(), device_bytes: 0, divided: false }
    }

    /// Adds a tensor. Tensors must come in the order in which they are used. [`allocate`](Self::allocate) gives it memory at `home`, or
    /// a turn on the device if there is a budget. Once the budget is divided, further tensors stay in main memory, and ggml's
    /// scheduler copies them for each operation on the device that reads them.
    pub(crate) fn add(&mut self, type_: Type, extent: Extent, mut home: Home) -> Result<Stored> {
        if self.divided && home == Home::Device {
            match self.target.budget {
                Some(_) => home = Home::Host,
                None => self.device_bytes += type_.bytes(extent.iter().product()) as u64,
            }
        }
        let mut inner = self.pools.lock();
        let contexts = if home == Home::Host { &mut inner.host } else { &mut inner.device };
        let raw = new_tensor(self.target.ggml, reserve(self.target.ggml, contexts)?, type_, extent)?;
        self.tensors.push(Item { raw, home, context: contexts.len() - 1, twin: None });
        Ok(Stored(self.tensors.len() as u32 - 1))
    }

    /// Divides the memory of the device among the tensors that belong there.
    ///
    /// # Errors
    /// `ResourceExhausted`, naming the smallest budget that suffices.
    fn divide(&mut self) -> Result<()> {
        let (api, Some(gpu)) = (&self.target.ggml.api, self.target.gpu()) else { return Ok(()) };
        let here: Vec<usize> =
            (0..self.tensors.len()).filter(|i| self.tensors[*i].home == Home::Device).collect();
        // SAFETY: a device of this ggml, and tensors of this store.
        let (type_, sizes): (Ptr, Vec<usize>) = unsafe {
            let type_ = (api.ggml_backend_dev_buffer_type)(gpu.device);
            let unit = (api.ggml_backend_buft_get_alignment)(type_).max(1);
            let size = |i: &usize| (api.ggml_backend_buft_get_alloc_size)(type_, self.tensors[*i].raw);
            (type_, here.iter().map(|i| size(i).next_multiple_of(unit)).collect())
        };
        let budget =
            self.target.budget.map_or(usize::MAX, |budget| usize::try_from(budget).unwrap_or(usize::MAX));
        let Share { half, slots } = share(&sizes, budget).map_err(|least| {
            let message = format!("a budget of {budget} bytes on the device is too small for these weights");
            Error::new(ErrorCode::ResourceExhausted, message).with_hint(format!(
                "give at least {least} bytes, for the small weights and twice the largest"
            ))
        })?;
        let stays = sizes.iter().zip(&slots).filter(|(_, slot)| slot.is_none());
        self.device_bytes = (stays.map(|(size, _)| size).sum::<usize>() + 2 * half) as u64;
        if half == 0 {
            return Ok(());
        }
        let mut inner = self.pools.lock();
        // SAFETY: the buffer has room for two halves. Slots lie inside a half and do not overlap others of the same turn. The
        // tensors have no memory so far.
        unsafe {
            let buffer = (api.ggml_backend_buft_alloc_buffer)(type_, 2 * half);
            if buffer.is_null() {
                let message = "no memory for the weights that take turns on the device";
                return Err(Error::new(ErrorCode::ResourceExhausted, message));
            }
            inner.buffers.push(buffer);
            (api.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS);
            let base = (api.ggml_backend_buffer_get_base)(buffer);
            let mut streams = Streams::default();
            for (i, slot) in here.iter().zip(slots).filter_map(|(i, slot)| Some((*i, slot?))) {
                let item = &mut self.tensors[i];
                let at = base.wrapping_byte_add(slot.turn % 2 * half + slot.offset);
                let status = (api.ggml_backend_tensor_alloc)(buffer, item.raw, at);
                if status != STATUS_SUCCESS {
                    return Err(status_error(status));
                }
                let type_ =
                    Type::from_raw((*item.raw).type_).ok_or_else(|| Error::internal("an unknown type"))?;
                let context = reserve(self.target.ggml, &mut inner.twins)?;
                let twin = new_tensor(self.target.ggml, context, type_, (*item.raw).ne.map(|n| n as usize))?;
                item.twin = Some(twin);
                streams.add(slot.turn, Twins { device: item.raw, host: twin });
            }
            inner.streams = Arc::new(streams);
        }
        Ok(())
    }

    /// Gives memory to the tensors that have none.
    ///
    /// # Errors
    /// `ResourceExhausted`.
    pub(crate) fn allocate(&mut self) -> Result<()> {
        if !self.divided {
            self.divide()?;
            self.divided = true;
        }
        let api = &self.target.ggml.api;
        let main = self
            .tensors
            .iter()
            .filter_map(|item| item.twin.or((item.home == Home::Host).then_some(item.raw)));
        // SAFETY: tensors of this store.
        let missing = main.filter(|raw| unsafe { (**raw).data.is_null() });
        // SAFETY: as above.
        enough(missing.map(|raw| unsafe { (api.ggml_nbytes)(raw) as u64 }).sum())?;
        let (cpu, gpu) = (self.target.ggml.cpu.device, self.target.gpu().map(|gpu| gpu.device));
        let mut inner = self.pools.lock();
        let Inner { host, device, twins, buffers, .. } = &mut *inner;
        // SAFETY: devices of this ggml.
        let (of_host, of_device, of_twins) = unsafe {
            let of = |device| (api.ggml_backend_dev_buffer_type)(device);
            // Pinned memory, from which the device can copy while it computes, if it has such a type.
            let pinned = gpu.map(|gpu| (api.ggml_backend_dev_host_buffer_type)(gpu));
            (of(cpu), gpu.map(of), pinned.filter(|type_| !type_.is_null()))
        };
        let waits = |home: Home, context: usize| {
            let mut all = self.tensors.iter();
            all.any(|item| (item.home, item.context) == (home, context) && item.twin.is_none())
        };
        let homes = [
            (host, Some(of_host), Some(Home::Host)),
            (device, of_device, Some(Home::Device)),
            (twins, Some(of_twins.unwrap_or(of_host)), None),
        ];
        for (contexts, type_, home) in homes {
            let type_of = || type_.ok_or_else(|| Error::internal("a weight for a missing device"));
            for (i, context) in contexts.iter_mut().enumerate().filter(|(_, context)| context.pending) {
                if home.is_some_and(|home| !waits(home, i)) {
                    context.pending = false;
                    continue;
                }
                let buffer = if home == Some(Home::Host) {
                    let here =
                        self.tensors.iter().filter(|item| (item.home, item.context) == (Home::Host, i));
                    // SAFETY: tensors of this store, and a type of host memory of its ggml.
                    unsafe { place_at_lines(api, type_of()?, here.map(|item| item.raw))? }
                } else {
                    // SAFETY: a context of this store, and a type of memory of its ggml.
                    unsafe { (api.ggml_backend_alloc_ctx_tensors_from_buft)(context.raw, type_of()?) }
                };
                if buffer.is_null() {
                    return Err(Error::new(ErrorCode::ResourceExhausted, "no memory for the weights"));
                }
                context.pending = false;
                buffers.push(buffer);
                if home.is_some() {
                    // SAFETY: the buffer was just created.
                    unsafe { self.mark(buffer) };
                }
            }
        }
        Ok(())
    }

    /// Marks a buffer as one of weights. The scheduler of a GPU then reuses the memory of a weight's copy for the next copy.
    ///
    /// # Safety
    /// The buffer belongs to this ggml.
    unsafe fn mark(&self, buffer: Ptr) {
        if self.target.gpu().is_some() {
            // SAFETY: by this function's contract.
            unsafe { (self.target.ggml.api.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS) };
        }
    }

    /// Maps a tensor in main memory that has no memory yet to a file, whose bytes at `offset` are `data`. Later writes stay in this
    /// process. Returns `false` and changes nothing if the file cannot be mapped or no longer has these bytes.
    ///
    /// The file stays mapped as long as the weights live. If another process shortens it, reading the lost part ends this process,
    /// as it would while weights are loaded. Replacing or removing the file does no harm.
    pub(crate) fn map(&mut self, tensor: Stored, (path, offset): (&Path, u64), data: &[u8]) -> Result<bool> {
        let api = &self.target.ggml.api;
        let Item { raw, home, .. } = self.tensors[tensor.index()];
        // SAFETY: a tensor of this store.
        let (waits, len) = unsafe { ((*raw).data.is_null(), (api.ggml_nbytes)(raw)) };
        if !waits || home != Home::Host || len != data.len() {
            return Err(Error::internal("a ggml weight that cannot be mapped to a file"));
        }
        let Some((mut map, skip)) = pages::of_file(path, offset, len) else { return Ok(false) };
        let there = &map[skip..];
        let (first, last) = (len.min(EDGE), len.saturating_sub(EDGE));
        if there[..first] != data[..first] || there[last..] != data[last..] {
            return Ok(false);
        }
        let base: Ptr = map.as_mut_ptr().cast();
        // SAFETY: the map begins at a page, outlives the buffer over it, and has room for the tensor after `skip`.
        unsafe {
            let buffer = (api.ggml_backend_cpu_buffer_from_ptr)(base, map.len());
            if buffer.is_null() {
                return Ok(false);
            }
            let status = (api.ggml_backend_tensor_alloc)(buffer, raw, base.wrapping_byte_add(skip));
            if status != STATUS_SUCCESS {
                (api.ggml_backend_buffer_free)(buffer);
                return Err(status_error(status));
            }
            self.mark(buffer);
            self.pools.lock().mapped.push((buffer, map));
        }
        Ok(true)
    }

    /// Gives one tensor in main memory its own buffer.
    ///
    /// # Errors
    /// `ResourceExhausted`.
    pub(crate) fn allocate_alone(&mut self, tensor: Stored) -> Result<Room<'_>> {
        let (api, raw) = (&self.target.ggml.api, self.raw(tensor));
        // SAFETY: a tensor of this store.
        enough(unsafe { (api.ggml_nbytes)(raw) } as u64)?;
        // SAFETY: a tensor of this store in main memory, and the CPU of this ggml.
        let (buffer, len) = unsafe {
            let type_ = (api.ggml_backend_dev_buffer_type)(self.target.ggml.cpu.device);
            (place_at_lines(api, type_, [raw].into_iter())?, (api.ggml_nbytes)(raw))
        };
        if buffer.is_null() {
            return Err(Error::new(ErrorCode::ResourceExhausted, "no memory for the weights"));
        }
        // SAFETY: the buffer was just created.
        unsafe { self.mark(buffer) };
        self.pools.lock().buffers.push(buffer);
        // SAFETY: memory that was just allocated; the store stays borrowed.
        Ok(unsafe { Room::new(api, raw, Home::Host, len) })
    }

    /// The memory of every tensor, in the order in which tensors were added.
    ///
    /// # Errors
    /// `Internal` if a tensor has no memory yet.
    pub(crate) fn rooms(&mut self) -> Result<Vec<Room<'_>>> {
        let api = &self.target.ggml.api;
        let room = |item: &Item| {
            let (raw, home) = item.twin.map_or((item.raw, item.home), |twin| (twin, Home::Host));
            // SAFETY: a tensor of this store.
            let (data, len) = unsafe { ((*raw).data, (api.ggml_nbytes)(raw)) };
            if data.is_null() {
                return Err(Error::internal("a ggml weight without memory"));
            }
            // SAFETY: memory of different tensors does not overlap, and the store stays borrowed.
            Ok(unsafe { Room::new(api, raw, home, len) })
        };
        self.tensors.iter().map(room).collect()
    }

    /// Bytes of the GPU's memory that are for weights.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Makes the weights look as if they had memory, and returns the bytes that they will take in main memory.
    ///
    /// # Safety
    /// The weights still have no memory. After this call, do not call [`rooms`](Self::rooms), and do not run a program that uses this store.
    pub(super) unsafe fn pretend(&self) -> u64 {
        let mut bytes = 0;
        for item in &self.tensors {
            // SAFETY: a tensor of this store. The caller sees to it that nobody follows the pointer.
            unsafe {
                bytes += ((self.target.ggml.api.ggml_nbytes)(item.raw) as u64).next_multiple_of(LINE as u64);
                (*item.raw).data = std::ptr::dangling_mut::<u64>().cast();
            }
        }
        bytes
    }

    /// Bytes of all weights, in memory and in files.
    pub(crate) fn bytes(&self) -> u64 {
        let api = &self.target.ggml.api;
        // SAFETY: buffers of this store.
        let size = |buffer: &Ptr| unsafe { (api.ggml_backend_buffer_get_size)(*buffer) as u64 };
        let allocated: u64 = self.pools.lock().buffers.iter().map(size).sum();
        allocated + self.mapped_bytes()
    }

    /// Bytes of the weights that lie in mapped files. Only the pages that are read take memory.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.pools.lock().mapped.iter().map(|(_, map)| map.len() as u64).sum()
    }

    pub(super) fn raw(&self, tensor: Stored) -> TensorPtr {
        self.tensors[tensor.index()].raw
    }
    /// The tensors that take turns on the device.
    pub(super) fn streams(&self) -> Arc<Streams> {
        self.pools.lock().streams.clone()
    }
    pub(super) fn pools(&self) -> &Arc<Pools> {
        &self.pools
    }
}

/// An error if main memory has no room for `bytes` of weights.
fn enough(bytes: u64) -> Result<()> {
    memory::ensure(
        bytes,
        "the weights",
        "close other programs, or build the engine in a precision with smaller weights: fp16, bf16, q8_0 or q4_k",
    )
}

/// Allocates one buffer for those tensors that have no memory. Each tensor begins at a cache line, so that panel rows of whole lines
/// never straddle one more; ggml's own allocator aligns to 32 bytes only. Returns null if there is no memory.
///
/// # Safety
/// The tensors belong to this ggml, and `type_` is a type of its host memory.
unsafe fn place_at_lines(api: &Api, type_: Ptr, tensors: impl Iterator<Item = TensorPtr>) -> Result<Ptr> {
    let mut len = LINE;
    let mut places = Vec::new();
    // SAFETY: by this function's contract. Tensors lie one after the other inside the buffer.
    unsafe {
        for raw in tensors.filter(|raw| (**raw).data.is_null()) {
            places.push((raw, len - LINE));
            len += (api.ggml_backend_buft_get_alloc_size)(type_, raw).next_multiple_of(LINE);
        }
        let buffer = (api.ggml_backend_buft_alloc_buffer)(type_, len);
        if !buffer.is_null() {
            let base = (api.ggml_backend_buffer_get_base)(buffer);
            pages::prefer_huge(base.cast(), (api.ggml_backend_buffer_get_size)(buffer));
            let first = base.wrapping_byte_add(base.align_offset(LINE));
            for (raw, offset) in places {
                let status = (api.ggml_backend_tensor_alloc)(buffer, raw, first.wrapping_byte_add(offset));
                if status != STATUS_SUCCESS {
                    (api.ggml_backend_buffer_free)(buffer);
                    return Err(status_error(status));
                }
            }
        }
        Ok(buffer)
    }
}
