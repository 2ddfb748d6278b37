//! A compute graph with memory, ready to run.

use super::{
    api::*,
    builder::{Builder, Tensor},
    kernel::Failure,
    library::status_error,
    pages,
    product::Words,
    profile::{Note, Profile},
    store::Store,
};
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::{c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

/// A graph with its constants, activations and threads. Not thread-safe: one run at a time.
pub(crate) struct Program {
    // The order matters: memory goes before the contexts that describe it.
    memory: Memory,
    graph: Ptr,
    builder: Builder,
    profile: Option<Profile>,
}

/// What ggml allocated for a graph.
struct Memory {
    api: &'static Api,
    backend: Ptr,
    /// Buffers of the tensors that the graph alone reads.
    constants: Vec<Ptr>,
    activations: Ptr,
    graph_context: Ptr,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: each was made by the matching function, is freed once, and null where it was not made.
        unsafe {
            if !self.activations.is_null() {
                (self.api.ggml_gallocr_free)(self.activations);
            }
            for buffer in &self.constants {
                (self.api.ggml_backend_buffer_free)(*buffer);
            }
            if !self.backend.is_null() {
                (self.api.ggml_backend_free)(self.backend);
            }
            (self.api.ggml_free)(self.graph_context);
        }
    }
}

// SAFETY: the pointers are to memory that this value alone owns; ggml ties none of it to a thread.
unsafe impl Send for Program {}

/// What the abort callback asks while a graph runs.
struct Watch<'a> {
    cancelled: &'a dyn Fn() -> bool,
    failure: &'a Failure,
    profile: Option<&'a Profile>,
}

impl Program {
    pub(super) fn new(builder: Builder, outputs: &[Tensor], threads: usize) -> Result<Self> {
        let (ggml, api) = (builder.ggml, &builder.ggml.api);
        let exhausted =
            |what: &str| Error::new(ErrorCode::ResourceExhausted, format!("no memory for {what}"));
        // Every tensor can be a node or a leaf of the graph.
        let size = builder.tensors.len() + 1;
        // SAFETY: takes numbers, returns one.
        let mem_size = unsafe { (api.ggml_graph_overhead_custom)(size, false) };
        // SAFETY: ggml allocates the memory itself.
        let graph_context = unsafe {
            (api.ggml_init)(InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true })
        };
        if graph_context.is_null() {
            return Err(exhausted("the ggml graph"));
        }
        let null = std::ptr::null_mut();
        let mut memory =
            Memory { api, backend: null, constants: Vec::new(), activations: null, graph_context };
        // SAFETY: the context has the size ggml states for a graph of `size` nodes; all tensors are the
        // builder's; every result is checked before it is used.
        unsafe {
            let graph = (api.ggml_new_graph_custom)(graph_context, size, false);
            for tensor in builder.inputs.iter().chain(outputs) {
                (api.ggml_build_forward_expand)(graph, builder.raw(*tensor));
            }
            for output in outputs {
                let mut raw = builder.raw(*output);
                (api.ggml_set_output)(raw);
                if !(*raw).view_src.is_null() {
                    raw = (*raw).view_src;
                    (api.ggml_set_output)(raw);
                }
            }
            memory.backend = (api.ggml_backend_dev_init)(ggml.cpu.device, std::ptr::null());
            if memory.backend.is_null() {
                return Err(Error::internal("ggml cannot open its CPU device"));
            }
            (ggml.cpu.set_n_threads)(memory.backend, c_int::try_from(threads.clamp(1, 512)).unwrap_or(1));
            for context in &builder.weights {
                let buffer = (api.ggml_backend_alloc_ctx_tensors)(context.raw, memory.backend);
                if buffer.is_null() {
                    return Err(exhausted("the constants"));
                }
                memory.constants.push(buffer);
            }
            memory.activations =
                (api.ggml_gallocr_new)((api.ggml_backend_get_default_buffer_type)(memory.backend));
            if memory.activations.is_null() || !(api.ggml_gallocr_alloc_graph)(memory.activations, graph) {
                return Err(exhausted("the activations"));
            }
            if let Some(buffer) = activation_buffer(&builder, outputs) {
                let base = (api.ggml_backend_buffer_get_base)(buffer);
                pages::prefer_huge(base.cast(), (api.ggml_backend_buffer_get_size)(buffer));
            }
            let profile = Profile::wanted(threads, || notes(&builder, graph));
            Ok(Program { memory, graph, builder, profile })
        }
    }

    /// Fills a constant or an input.
    pub(crate) fn write(&mut self, tensor: Tensor, bytes: &[u8]) -> Result<()> {
        let raw = self.placed(tensor, bytes.len())?;
        // SAFETY: the tensor has memory for exactly this many bytes.
        unsafe { (self.memory.api.ggml_backend_tensor_set)(raw, bytes.as_ptr().cast(), 0, bytes.len()) };
        Ok(())
    }
    /// Copies a tensor out.
    pub(crate) fn read(&self, tensor: Tensor, bytes: &mut [u8]) -> Result<()> {
        let raw = self.placed(tensor, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { (self.memory.api.ggml_backend_tensor_get)(raw, bytes.as_mut_ptr().cast(), 0, bytes.len()) };
        Ok(())
    }
    /// Bytes of a tensor.
    pub(crate) fn size(&self, tensor: Tensor) -> usize {
        self.builder.len(tensor) * self.builder.type_of(tensor).size()
    }

    fn placed(&self, tensor: Tensor, len: usize) -> Result<TensorPtr> {
        let raw = self.builder.raw(tensor);
        // SAFETY: a tensor of this program.
        let placed =
            unsafe { !(*raw).data.is_null() && (!(*raw).buffer.is_null() || !(*raw).view_src.is_null()) };
        if !placed || len != self.size(tensor) {
            return Err(Error::internal(format!(
                "{len} bytes for a ggml tensor of {} bytes{}",
                self.size(tensor),
                if placed { "" } else { " without memory" }
            )));
        }
        Ok(raw)
    }

    /// Runs the graph once, with the weights in `store`; `cancelled` is asked between nodes.
    ///
    /// # Errors
    /// `Internal` where the graph was made for another store; `Cancelled`; what a kernel reported, as `InvalidArgument`; ggml's own failures.
    pub(crate) fn compute(&mut self, store: &Store, cancelled: &dyn Fn() -> bool) -> Result<()> {
        // Borrowed, so that nobody writes weights meanwhile.
        if self.builder.pools.as_ref().is_some_and(|pools| !Arc::ptr_eq(pools, store.pools())) {
            return Err(Error::internal("the ggml graph reads the weights of another session"));
        }
        if let Some(profile) = &mut self.profile {
            profile.start();
        }
        let watch = Watch { cancelled, failure: &self.builder.failure, profile: self.profile.as_ref() };
        let set = self.builder.ggml.cpu.set_abort_callback;
        // SAFETY: the callback is withdrawn before `watch` goes; backend and graph are this program's own.
        let status = unsafe {
            set(self.memory.backend, Some(should_stop), (&raw const watch).cast_mut().cast());
            let status = (self.memory.api.ggml_backend_graph_compute)(self.memory.backend, self.graph);
            set(self.memory.backend, None, std::ptr::null_mut());
            status
        };
        if let Some(message) = self.builder.failure.take() {
            return Err(Error::invalid(message));
        }
        match status {
            STATUS_SUCCESS => Ok(()),
            STATUS_ABORTED => Err(Error::new(ErrorCode::Cancelled, "the run was cancelled")),
            other => Err(status_error(other)),
        }
    }

    /// Where the time of the last run went, if the environment asks for it.
    pub(crate) fn profile(&self) -> Option<String> {
        self.profile.as_ref().map(Profile::table)
    }
    /// Bytes of the constants' buffers.
    pub(crate) fn constant_bytes(&self) -> u64 {
        // SAFETY: buffers of this program.
        let size = |buffer: &Ptr| unsafe { (self.memory.api.ggml_backend_buffer_get_size)(*buffer) as u64 };
        self.memory.constants.iter().map(size).sum()
    }
    /// Bytes of the activations' buffer.
    pub(crate) fn activation_bytes(&self) -> u64 {
        // SAFETY: the allocator of this program, which has one buffer.
        unsafe { (self.memory.api.ggml_gallocr_get_buffer_size)(self.memory.activations, 0) as u64 }
    }
}

/// The nodes of a graph that take time, in the order they run.
fn notes(builder: &Builder, graph: Ptr) -> Vec<Note> {
    let api = &builder.ggml.api;
    // SAFETY: a graph of the builder's tensors.
    let nodes = unsafe {
        (0..(api.ggml_graph_n_nodes)(graph)).map(|i| (api.ggml_graph_node)(graph, i)).collect::<Vec<_>>()
    };
    // SAFETY: valid tensors.
    let computed = nodes.into_iter().filter(|node| unsafe { (**node).view_src.is_null() });
    let name = |node: TensorPtr| {
        // SAFETY: ggml answers with a static string.
        let name = unsafe { std::ffi::CStr::from_ptr((api.ggml_op_desc)(node)) };
        Note { name: format!("ggml {}", name.to_string_lossy()), multiplications: 0, words: Words::F32 }
    };
    computed.map(|node| builder.notes.get(&node).cloned().unwrap_or_else(|| name(node))).collect()
}

/// The buffer of the activations.
///
/// # Safety
/// The tensors have memory.
unsafe fn activation_buffer(builder: &Builder, outputs: &[Tensor]) -> Option<Ptr> {
    // SAFETY: by this function's contract; views have the buffer of what they show.
    let buffer = |tensor: &Tensor| unsafe { (*builder.raw(*tensor)).buffer };
    builder.inputs.iter().chain(outputs).map(buffer).find(|buffer| !buffer.is_null())
}

/// # Safety
/// `data` is the [`Watch`] of the running [`Program::compute`].
unsafe extern "C" fn should_stop(data: *mut c_void) -> bool {
    // SAFETY: by this function's contract.
    let watch = unsafe { &*data.cast::<Watch<'_>>() };
    if let Some(profile) = watch.profile {
        profile.mark();
    }
    watch.failure.is_set() || catch_unwind(AssertUnwindSafe(|| (watch.cancelled)())).unwrap_or(true)
}
