//! A compute graph with its constants. An [`Executor`](super::Executor) gives it memory for activations and runs it.

use super::{
    api::*,
    backends::Backends,
    builder::Builder,
    custom::{Cell, Failure},
    library::{Target, status_error},
    order::{Step, plan},
    profile::{Note, Profile},
    store::Store,
    streams::Plan,
    tensor::{Tensor, Type},
};
use crate::simd::Words;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    collections::{HashMap, HashSet},
    ffi::CStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// A graph with its own constants.
pub(crate) struct Program {
    // Fields drop in order: memory before the contexts that describe it.
    memory: Memory,
    pub(super) graph: Ptr,
    /// The most nodes and leaves that the graph can have.
    pub(super) size: usize,
    /// `ggml_backend_sched`, and its backends, which must outlive it.
    pub(super) scheduler: Option<(Ptr, Arc<Backends>)>,
    pub(super) id: u64,
    pub(super) threads: usize,
    builder: Builder,
    pub(super) profile: Option<Profile>,
    /// The turns that weights take on the device, if they do.
    pub(super) turns: Option<Plan>,
}

/// The memory that ggml allocated for a graph.
struct Memory {
    api: &'static Api,
    constants: Vec<Ptr>,
    graph_context: Ptr,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: each was created by the matching function and is freed once.
        unsafe {
            for buffer in &self.constants {
                (self.api.ggml_backend_buffer_free)(*buffer);
            }
            (self.api.ggml_free)(self.graph_context);
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some((scheduler, _)) = &self.scheduler {
            // SAFETY: created by `ggml_backend_sched_new` and freed once, before its backends.
            unsafe { (self.memory.api.ggml_backend_sched_free)(*scheduler) };
        }
    }
}

// SAFETY: only this value owns the memory behind the pointers, and ggml ties none of it to a thread.
unsafe impl Send for Program {}

impl Program {
    /// A program that computes `outputs` on `threads` threads. Nodes they do not need are not run.
    ///
    /// # Errors
    /// `ResourceExhausted` if there is not enough memory.
    pub(crate) fn new(builder: Builder, outputs: &[Tensor], threads: usize) -> Result<Self> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let (ggml, api) = (builder.target.ggml, &builder.target.ggml.api);
        let exhausted =
            |what: &str| Error::new(ErrorCode::ResourceExhausted, format!("no memory for {what}"));
        // Every tensor can be a node or a leaf of the graph.
        let size = builder.tensors.len() + 1;
        // SAFETY: the function takes and returns numbers only.
        let mem_size = unsafe { (api.ggml_graph_overhead_custom)(size, false) };
        // SAFETY: ggml allocates the memory itself.
        let graph_context = unsafe {
            (api.ggml_init)(InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true })
        };
        if graph_context.is_null() {
            return Err(exhausted("the ggml graph"));
        }
        let mut memory = Memory { api, constants: Vec::new(), graph_context };
        // SAFETY: the context has the size that ggml states for a graph of `size` nodes. All tensors belong to the builder.
        // Every result is checked before use.
        unsafe {
            let graph = (api.ggml_new_graph_custom)(graph_context, size, false);
            for output in outputs {
                let raw = builder.raw(*output);
                (api.ggml_set_output)(raw);
                (api.ggml_set_output)(memory_of(raw));
            }
            if builder.target.gpu().is_some() {
                locate_views(&builder)?;
            }
            let inputs = builder.inputs.iter().map(|input| builder.raw(*input));
            let steps = match builder.target.gpu() {
                None => arrange(&builder, outputs),
                // Tensors that a scheduler copies between devices cannot be overwritten, and weights take turns in graph order.
                Some(_) => in_order(&builder, outputs),
            };
            for raw in inputs.chain(steps).chain(outputs.iter().map(|output| builder.raw(*output))) {
                (api.ggml_build_forward_expand)(graph, raw);
            }
            let homes = [Some(ggml.cpu.device), builder.target.gpu().map(|gpu| gpu.device)];
            for (contexts, device) in builder.constants.iter().zip(homes) {
                for context in contexts {
                    let nowhere = || Error::internal("a constant for a missing device");
                    let type_ = (api.ggml_backend_dev_buffer_type)(device.ok_or_else(nowhere)?);
                    let buffer = (api.ggml_backend_alloc_ctx_tensors_from_buft)(context.raw, type_);
                    if buffer.is_null() {
                        return Err(exhausted("the constants"));
                    }
                    memory.constants.push(buffer);
                }
            }
            let id = IDS.fetch_add(1, Ordering::Relaxed);
            let mut program = Program {
                memory,
                graph,
                size,
                scheduler: None,
                id,
                threads,
                builder,
                profile: None,
                turns: None,
            };
            // ggml does not report the end of nodes on other devices.
            if program.builder.target.gpu().is_none() {
                program.profile = Profile::wanted(threads, || program.notes());
            }
            Ok(program)
        }
    }

    /// Fills a constant or an input.
    pub(crate) fn write(&mut self, tensor: Tensor, bytes: &[u8]) -> Result<()> {
        let raw = self.placed(tensor, bytes.len())?;
        // SAFETY: the tensor has memory of exactly this many bytes.
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
    /// The bytes of a tensor.
    pub(crate) fn size(&self, tensor: Tensor) -> usize {
        self.builder.type_of(tensor).bytes(self.builder.len(tensor))
    }

    /// The target of a tensor, its type and its number of elements.
    pub(super) fn describe(&self, tensor: Tensor) -> (Target, Type, usize) {
        (self.builder.target, self.builder.type_of(tensor), self.builder.len(tensor))
    }

    /// The tensor, after checking that it has memory of `len` bytes.
    pub(super) fn placed(&self, tensor: Tensor, len: usize) -> Result<TensorPtr> {
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

    /// Detaches inputs and nodes from their memory, because another graph has used it since.
    pub(super) fn forget_activations(&mut self) {
        let inputs: Vec<TensorPtr> =
            self.builder.inputs.iter().map(|input| self.builder.raw(*input)).collect();
        for raw in inputs.into_iter().chain(self.nodes()) {
            // SAFETY: a tensor of this program, which is not running.
            unsafe {
                (*raw).data = std::ptr::null_mut();
                (*raw).buffer = std::ptr::null_mut();
            }
        }
    }
    /// All tensors of the builder.
    pub(super) fn tensors(&self) -> &[TensorPtr] {
        &self.builder.tensors
    }
    /// The nodes of the graph. Weights and constants are not nodes.
    pub(super) fn nodes(&self) -> Vec<TensorPtr> {
        let api = self.memory.api;
        // SAFETY: the graph belongs to the program, and the indices are inside it.
        unsafe {
            let count = (api.ggml_graph_n_nodes)(self.graph);
            (0..count).map(|i| (api.ggml_graph_node)(self.graph, i)).collect()
        }
    }
    /// Whether the GPU runs a node.
    pub(super) fn is_for_device(&self, node: TensorPtr) -> bool {
        self.builder.device_nodes.contains(&node)
    }
    /// The buffer of the activations, if the graph has any.
    pub(super) fn activation_buffer(&self) -> Option<Ptr> {
        let node = |raw: &TensorPtr| {
            // SAFETY: a node of the graph.
            unsafe { ((**raw).view_src.is_null()).then_some((**raw).buffer) }
        };
        self.nodes().iter().find_map(node).filter(|buffer| !buffer.is_null())
    }
    /// Notes for the profile on all nodes that take time, in the order in which they run.
    fn notes(&self) -> Vec<Note> {
        let api = self.memory.api;
        let note = |node: TensorPtr| match self.builder.cell(node) {
            Some(Cell { name, kernel, .. }) => {
                let (multiplications, words) = (kernel.multiplications(), kernel.words());
                Some(Note { name: name.clone(), multiplications, words })
            }
            // SAFETY: a node of the graph.
            None if unsafe { !(*node).view_src.is_null() } => None,
            None => {
                // SAFETY: ggml returns a static string.
                let name = unsafe { CStr::from_ptr((api.ggml_op_desc)(node)) };
                let name = format!("ggml {}", name.to_string_lossy());
                Some(Note { name, multiplications: 0, words: Words::F32 })
            }
        };
        self.nodes().into_iter().filter_map(note).collect()
    }
    /// The ONNX operator that a node with one of our kernels computes.
    pub(super) fn operation(&self, raw: TensorPtr) -> Option<String> {
        let name = &self.builder.cell(raw)?.name;
        Some(name.split(" of ").next().unwrap_or(name).trim_start_matches("operator ").to_string())
    }
    /// Makes the kernels begin again at their first tiles.
    pub(super) fn restart(&self) {
        self.builder.kernels.iter().for_each(|cell| cell.shares.reset());
    }
    pub(super) fn failure(&self) -> &Failure {
        &self.builder.failure
    }
    pub(super) fn check_store(&self, store: &Store) -> Result<()> {
        if self.builder.pools.as_ref().is_some_and(|pools| !Arc::ptr_eq(pools, store.pools())) {
            return Err(Error::internal("the ggml graph reads the weights of another session"));
        }
        Ok(())
    }

    /// Bytes that weights and activations of a program on the CPU will take. Consumes both, because the weights have no memory.
    pub(crate) fn measure(self, weights: Store) -> Result<[u64; 2]> {
        let (ggml, mut activations) = (self.builder.target.ggml, 0);
        // SAFETY: the store and the program end here, and the allocator below reads no elements.
        let bytes = self.constant_bytes() + unsafe { weights.pretend() };
        // SAFETY: the CPU's buffer type exists as long as the library. The graph and its tensors exist. The allocator is freed once.
        unsafe {
            let allocator =
                (ggml.api.ggml_gallocr_new)((ggml.api.ggml_backend_dev_buffer_type)(ggml.cpu.device));
            if allocator.is_null() {
                return Err(Error::new(ErrorCode::ResourceExhausted, "no memory for ggml's allocator"));
            }
            let any = std::ptr::null();
            (ggml.api.ggml_gallocr_reserve_n_size)(allocator, self.graph, any, any, &mut activations);
            (ggml.api.ggml_gallocr_free)(allocator);
        }
        Ok([bytes, activations as u64])
    }

    /// The profile of the last run, if profiling is on.
    pub(crate) fn profile(&self) -> Option<String> {
        self.profile.as_ref().map(Profile::table)
    }
    /// The bytes of the constants' buffers.
    pub(crate) fn constant_bytes(&self) -> u64 {
        // SAFETY: buffers of this program.
        let size = |buffer: &Ptr| unsafe { (self.memory.api.ggml_backend_buffer_get_size)(*buffer) as u64 };
        self.memory.constants.iter().map(size).sum()
    }
}

/// The tensor that owns the memory: the tensor itself, or the source of a view.
pub(super) fn memory_of(raw: TensorPtr) -> TensorPtr {
    // SAFETY: a tensor of a builder.
    let source = unsafe { (*raw).view_src };
    if source.is_null() { raw } else { source }
}

/// Sets the buffer of views of weights, by which the scheduler recognizes weights.
fn locate_views(builder: &Builder) -> Result<()> {
    for raw in &builder.tensors {
        // SAFETY: a tensor of the builder, and its source, a tensor of the builder or of its store.
        let status = unsafe {
            let source = (**raw).view_src;
            let known = source.is_null() || (*source).buffer.is_null() || !(**raw).buffer.is_null();
            if known { STATUS_SUCCESS } else { (builder.target.ggml.api.ggml_backend_view_init)(*raw) }
        };
        if status != STATUS_SUCCESS {
            return Err(status_error(status));
        }
    }
    Ok(())
}

/// The nodes that `outputs` need, in the order in which they run. Turns nodes that run in place into views of the tensor that they
/// overwrite.
fn arrange(builder: &Builder, outputs: &[Tensor]) -> Vec<TensorPtr> {
    let nodes = computed(builder, outputs);
    let index: HashMap<TensorPtr, usize> = nodes.iter().enumerate().map(|(i, raw)| (*raw, i)).collect();
    let bytes = |raw: TensorPtr| {
        // SAFETY: a tensor of the builder.
        unsafe { (builder.target.ggml.api.ggml_nbytes)(raw) }
    };
    let step = |raw: &TensorPtr| {
        // SAFETY: a node of the builder, and its sources.
        let node = unsafe { &**raw };
        let sources = || node.src.iter().filter(|source| !source.is_null());
        let mut reads: Vec<usize> =
            sources().filter_map(|source| index.get(&memory_of(*source))).copied().collect();
        let part = node.src[0];
        let over = (!part.is_null()).then(|| index.get(&memory_of(part)).copied()).flatten();
        let over = over.filter(|over| {
            let whole = nodes[*over];
            let once = reads.iter().filter(|read| *read == over).count() == 1;
            let same = [bytes(part), bytes(*raw)] == [bytes(whole); 2];
            // SAFETY: nodes of the builder.
            let kept = unsafe { ((*whole).flags | node.flags) & FLAG_OUTPUT != 0 };
            once && same && !kept && builder.cell(*raw).is_some_and(|cell| cell.kernel.can_be_over())
        });
        reads.sort_unstable();
        reads.dedup();
        Step { reads, bytes: bytes(*raw), over }
    };
    let steps: Vec<Step> = nodes.iter().map(step).collect();
    let (order, over) = plan(&steps);
    // The tensors whose memory in-place nodes use. Such a node can overwrite another in-place node.
    let mut moved: HashMap<TensorPtr, TensorPtr> = HashMap::new();
    for at in order.iter().copied().filter(|at| over[*at]) {
        let (Some(target), Some(cell)) = (steps[at].over, builder.cell(nodes[at])) else { continue };
        let target = moved.get(&nodes[target]).copied().unwrap_or(nodes[target]);
        moved.insert(nodes[at], target);
        cell.over.store(true, Ordering::Relaxed);
    }
    for raw in &builder.tensors {
        // SAFETY: tensors of the builder without memory so far.
        unsafe {
            if let Some(target) = moved.get(raw).or_else(|| moved.get(&(**raw).view_src)) {
                (**raw).view_src = *target;
            }
        }
    }
    order.into_iter().map(|at| nodes[at]).collect()
}

/// The nodes that `outputs` need, in the order in which they were added.
fn in_order(builder: &Builder, outputs: &[Tensor]) -> Vec<TensorPtr> {
    let needed: HashSet<TensorPtr> = computed(builder, outputs).into_iter().collect();
    builder.tensors.iter().copied().filter(|raw| needed.contains(raw)).collect()
}

/// The nodes that `outputs` need, without views, in ggml's own order: depth first, sources in order.
fn computed(builder: &Builder, outputs: &[Tensor]) -> Vec<TensorPtr> {
    let mut nodes = Vec::new();
    let mut seen = HashSet::new();
    for output in outputs {
        let mut path = vec![(builder.raw(*output), 0)];
        while let Some((raw, next)) = path.pop() {
            // SAFETY: a tensor of the builder, or of its store.
            let tensor = unsafe { &*raw };
            if next == 0 && (tensor.op == OP_NONE || !seen.insert(raw)) {
                continue;
            }
            if let Some(source) = tensor.src.get(next) {
                path.push((raw, next + 1));
                if !source.is_null() {
                    path.push((*source, 0));
                }
            } else if tensor.view_src.is_null() {
                nodes.push(raw);
            }
        }
    }
    nodes
}
