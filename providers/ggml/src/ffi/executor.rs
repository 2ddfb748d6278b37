//! Runs the graphs of a session.

use super::{
    api::*,
    backends::Backends,
    custom::Failure,
    library::{Target, status_error},
    pages,
    profile::Profile,
    program::{Program, memory_of},
    store::Store,
    streams::{Plan, Turns, at_node},
};
use crate::memory;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ffi::{CStr, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

/// Runs programs one at a time. On the CPU, they share one buffer for their activations, as large as the largest program needs. On
/// another device, each program has its own.
pub(crate) struct Executor {
    backends: Arc<Backends>,
    /// `ggml_gallocr`.
    activations: Ptr,
    /// Bytes of activations that passed the check for memory.
    room: u64,
    /// The program for which the activations are laid out.
    placed: Option<u64>,
}

// SAFETY: as for `Backends`.
unsafe impl Send for Executor {}

impl Drop for Executor {
    fn drop(&mut self) {
        // SAFETY: created by `ggml_gallocr_new` and freed once, when no program runs any more.
        unsafe { (self.backends.target.ggml.api.ggml_gallocr_free)(self.activations) };
    }
}

/// How a graph is divided between a device and the CPU.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spread {
    /// Parts of the graph, which run one after the other.
    pub(crate) splits: usize,
    /// Nodes on the device.
    pub(crate) on_device: usize,
    /// Operations on the CPU, with their number of nodes.
    pub(crate) on_cpu: BTreeMap<String, usize>,
    /// The number and bytes of the tensors that every run copies between them.
    pub(crate) copies: (usize, u64),
}

/// The data of the abort callback while a graph runs.
struct Watch<'a> {
    cancelled: &'a dyn Fn() -> bool,
    failure: &'a Failure,
    profile: Option<&'a Profile>,
}

impl Executor {
    /// Opens the device for programs of at most `threads` threads.
    pub(crate) fn new(target: Target, threads: usize) -> Result<Self> {
        let backends = Backends::open(target, threads)?;
        let api = &target.ggml.api;
        // SAFETY: the CPU's backend.
        let activations =
            unsafe { (api.ggml_gallocr_new)((api.ggml_backend_get_default_buffer_type)(backends.cpu)) };
        if activations.is_null() {
            return Err(Error::new(ErrorCode::ResourceExhausted, "no memory for ggml's allocator"));
        }
        Ok(Executor { backends: Arc::new(backends), activations, room: 0, placed: None })
    }

    /// Lays out the memory of a program's activations, unless it is laid out already. The inputs lose their contents if it was not.
    /// Returns how the graph is divided, when it is first laid out for a device.
    ///
    /// # Errors
    /// `ResourceExhausted`.
    pub(crate) fn place(&mut self, program: &mut Program, store: &Store) -> Result<Option<Spread>> {
        let exhausted = || Error::new(ErrorCode::ResourceExhausted, "no memory for the activations");
        let api = &self.backends.target.ggml.api;
        if let Some(device) = self.backends.device {
            if program.scheduler.is_some() {
                return Ok(None);
            }
            let mut backends = [device, self.backends.cpu];
            // SAFETY: the CPU is the last backend, as ggml requires. The program owns the scheduler and keeps the backends
            // alive.
            unsafe {
                let (null, size) = (std::ptr::null_mut(), program.size);
                let scheduler =
                    (api.ggml_backend_sched_new)(backends.as_mut_ptr(), null, 2, size, false, false);
                if scheduler.is_null() {
                    return Err(exhausted());
                }
                program.scheduler = Some((scheduler, self.backends.clone()));
                for node in program.nodes().into_iter().filter(|node| program.is_for_device(*node)) {
                    (api.ggml_backend_sched_set_tensor_backend)(scheduler, node, device);
                }
                if !(api.ggml_backend_sched_alloc_graph)(scheduler, program.graph) {
                    return Err(exhausted());
                }
                program.turns = turns(program, store)?;
                return Ok(Some(self.spread(program, scheduler, device)));
            }
        }
        if self.placed == Some(program.id) {
            return Ok(None);
        }
        self.placed = None;
        program.forget_activations();
        // SAFETY: only weights and constants of the graph have memory so far.
        if !unsafe { (api.ggml_gallocr_alloc_graph)(self.activations, program.graph) } {
            return Err(exhausted());
        }
        // SAFETY: the allocator has one buffer or none.
        let bytes = unsafe { (api.ggml_gallocr_get_buffer_size)(self.activations, 0) as u64 };
        if bytes > self.room {
            // The buffer is new. Its pages take memory only when a program writes them.
            memory::ensure(bytes, "the activations", "close other programs, or give smaller inputs")?;
            self.room = bytes;
        }
        self.placed = Some(program.id);
        if let Some(buffer) = program.activation_buffer() {
            // SAFETY: the buffer is host memory of this size.
            unsafe {
                let base = (api.ggml_backend_buffer_get_base)(buffer);
                pages::prefer_huge(base.cast(), (api.ggml_backend_buffer_get_size)(buffer));
            }
        }
        Ok(None)
    }

    /// # Safety
    /// The scheduler has allocated the program's graph.
    unsafe fn spread(&self, program: &Program, scheduler: Ptr, device: Ptr) -> Spread {
        let api = &self.backends.target.ggml.api;
        let mut spread = Spread { splits: 0, on_device: 0, on_cpu: BTreeMap::new(), copies: (0, 0) };
        // A source that is not a tensor of the program is a copy that the scheduler inserted.
        let mut seen: HashSet<TensorPtr> = program.tensors().iter().copied().collect();
        for raw in program.nodes() {
            // SAFETY: a node of the graph. Descriptions are C strings.
            let (is_view, on_device, name, sources) = unsafe {
                let backend = (api.ggml_backend_sched_get_tensor_backend)(scheduler, raw);
                let name = CStr::from_ptr((api.ggml_op_desc)(raw)).to_string_lossy().into_owned();
                (!(*raw).view_src.is_null(), backend == device, name, (*raw).src)
            };
            for source in sources.into_iter().filter(|source| !source.is_null() && seen.insert(*source)) {
                // SAFETY: a tensor of the scheduler.
                let bytes = unsafe { (api.ggml_nbytes)(source) } as u64;
                spread.copies = (spread.copies.0 + 1, spread.copies.1 + bytes);
            }
            match (is_view, on_device) {
                (true, _) => {}
                (false, true) => spread.on_device += 1,
                (false, false) => {
                    *spread.on_cpu.entry(program.operation(raw).unwrap_or(name)).or_default() += 1
                }
            }
        }
        for raw in program.turns.iter().flat_map(Plan::copied) {
            // SAFETY: a tensor of the store.
            let bytes = unsafe { (api.ggml_nbytes)(raw) } as u64;
            spread.copies = (spread.copies.0 + 1, spread.copies.1 + bytes);
        }
        // SAFETY: by this function's contract.
        spread.splits = unsafe { (api.ggml_backend_sched_get_n_splits)(scheduler) }.max(0) as usize;
        spread
    }

    /// Runs the graph once with the weights in `store`, after [`place`](Self::place). Calls `cancelled` between nodes.
    ///
    /// # Errors
    /// `Internal` if the graph belongs to another store; `Cancelled`; `InvalidArgument` with the message of a kernel; ggml's own
    /// failures.
    pub(crate) fn compute(
        &mut self,
        program: &mut Program,
        store: &Store,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<()> {
        // The borrow of `store` prevents writes to weights during the run.
        program.check_store(store)?;
        if program.scheduler.is_none() && self.placed != Some(program.id) {
            return Err(Error::internal("a ggml graph without memory"));
        }
        program.restart();
        let ggml = self.backends.target.ggml;
        if let Some(profile) = &mut program.profile {
            profile.start();
        }
        let watch = Watch { cancelled, failure: program.failure(), profile: program.profile.as_ref() };
        let (cpu, set) = (self.backends.cpu, ggml.cpu.set_abort_callback);
        // SAFETY: the callback is removed before `watch` is dropped. The graph belongs to these backends.
        let status = unsafe {
            (ggml.cpu.set_n_threads)(cpu, program.threads.clamp(1, MAX_THREADS) as c_int);
            set(cpu, Some(should_stop), (&raw const watch).cast_mut().cast());
            let status = match &program.scheduler {
                Some((scheduler, _)) => match &program.turns {
                    Some(plan) => compute_in_turns(&ggml.api, *scheduler, program.graph, plan, cancelled),
                    None => (ggml.api.ggml_backend_sched_graph_compute)(*scheduler, program.graph),
                },
                None => (ggml.api.ggml_backend_graph_compute)(cpu, program.graph),
            };
            set(cpu, None, std::ptr::null_mut());
            status
        };
        if let Some(error) = program.failure().take() {
            return Err(error);
        }
        match status {
            STATUS_SUCCESS => Ok(()),
            STATUS_ABORTED => Err(Error::new(ErrorCode::Cancelled, "the run was cancelled")),
            other => Err(status_error(other)),
        }
    }

    /// Bytes of all activations, shared or owned by one of `programs`, and how many of these bytes are in the memory of the GPU.
    pub(crate) fn activation_bytes<'p>(&self, programs: impl Iterator<Item = &'p Program>) -> (u64, u64) {
        let api = &self.backends.target.ggml.api;
        // SAFETY: the allocator has one buffer.
        let mut all = unsafe { (api.ggml_gallocr_get_buffer_size)(self.activations, 0) as u64 };
        let mut on_device = 0;
        for (scheduler, backends) in programs.filter_map(|program| program.scheduler.as_ref()) {
            // SAFETY: the schedulers know both backends.
            let on =
                |backend| unsafe { (api.ggml_backend_sched_get_buffer_size)(*scheduler, backend) as u64 };
            on_device += backends.device.map_or(0, on);
            all += on(backends.cpu) + backends.device.map_or(0, on);
        }
        (all, on_device)
    }
}

/// The turns that weights take on the device when the program runs, if they do. Must run after the scheduler allocated the graph,
/// because backends then reorder the nodes.
fn turns(program: &Program, store: &Store) -> Result<Option<Plan>> {
    let streams = store.streams();
    if streams.turns.is_empty() {
        return Ok(None);
    }
    let nodes = program.nodes();
    let uses = nodes.iter().map(|raw| {
        // SAFETY: a node of the graph.
        let (is_view, sources) = unsafe { (!(**raw).view_src.is_null(), (**raw).src) };
        // Views read nothing.
        let sources = sources.into_iter().filter(|source| !is_view && !source.is_null());
        let turns: BTreeSet<usize> =
            sources.filter_map(|source| streams.turn_of.get(&memory_of(source)).copied()).collect();
        turns.into_iter().collect()
    });
    let uses: Vec<Vec<usize>> = uses.collect();
    let plan = Plan::new(streams, &nodes, &uses).map_err(|_| {
        Error::new(
            ErrorCode::ResourceExhausted,
            "the weights of one operation do not fit into the device's memory budget",
        )
        .with_hint("give a larger budget")
    })?;
    Ok(Some(plan))
}

/// Runs a graph whose weights take turns on the device.
///
/// # Safety
/// The scheduler has allocated the graph, and the plan was made from its nodes. Nothing writes weights during the run.
unsafe fn compute_in_turns(
    api: &'static Api,
    scheduler: Ptr,
    graph: Ptr,
    plan: &Plan,
    cancelled: &dyn Fn() -> bool,
) -> c_int {
    thread::scope(|scope| {
        // SAFETY: by this function's contract. The callback is removed before `turns` is dropped.
        unsafe {
            let turns = Turns::start(plan, api, cancelled, scope);
            let data = (&raw const turns).cast_mut().cast();
            (api.ggml_backend_sched_set_eval_callback)(scheduler, Some(at_node), data);
            let status = (api.ggml_backend_sched_graph_compute)(scheduler, graph);
            (api.ggml_backend_sched_set_eval_callback)(scheduler, None, std::ptr::null_mut());
            if turns.succeeded() { status } else { STATUS_ABORTED }
        }
    })
}

/// # Safety
/// `data` is the [`Watch`] of the running [`Executor::compute`].
unsafe extern "C" fn should_stop(data: *mut c_void) -> bool {
    // SAFETY: by this function's contract.
    let watch = unsafe { &*data.cast::<Watch<'_>>() };
    if let Some(profile) = watch.profile {
        profile.mark();
    }
    watch.failure.is_set() || catch_unwind(AssertUnwindSafe(|| (watch.cancelled)())).unwrap_or(true)
}
