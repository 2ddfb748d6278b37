//! What runs the graphs of a session.

use super::{
    api::*,
    library::{Target, status_error},
    pages,
    profile::Profile,
    program::{Program, memory_of},
    store::Store,
    streams::{Plan, Turns, at_node},
    threads::{MAX_THREADS, Threads},
};
use crate::{ffi::kernel::Failure, memory};
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ffi::{CStr, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

/// ggml's backends on a target: the device, where there is one besides the CPU, and the CPU.
pub(super) struct Backends {
    pub(super) target: Target,
    cpu: Ptr,
    device: Option<Ptr>,
    /// Of the CPU's.
    threads: Option<Threads>,
}

// SAFETY: ggml ties none of it to a thread; what is done with it is done through one `Executor`.
unsafe impl Send for Backends {}
// SAFETY: as above.
unsafe impl Sync for Backends {}

impl Backends {
    fn open(target: Target, threads: usize) -> Result<Self> {
        let api = &target.ggml.api;
        let init = |device: Ptr, name: &str| {
            // SAFETY: a device of this ggml.
            let backend = unsafe { (api.ggml_backend_dev_init)(device, std::ptr::null()) };
            let failed = || Error::precondition(format!("ggml cannot open its device {name}"));
            if backend.is_null() { Err(failed()) } else { Ok(backend) }
        };
        let cpu = init(target.ggml.cpu.device, "cpu")?;
        let mut backends = Backends { target, cpu, device: None, threads: None };
        // SAFETY: the CPU's backend, which is freed after them.
        backends.threads = Some(unsafe { Threads::new(&target.ggml.cpu, cpu, threads)? });
        if let Some(gpu) = target.gpu() {
            backends.device = Some(init(gpu.device, &gpu.id)?);
        }
        Ok(backends)
    }
}

impl Drop for Backends {
    fn drop(&mut self) {
        self.threads = None;
        for backend in self.device.into_iter().chain([self.cpu]) {
            // SAFETY: made by `ggml_backend_dev_init`, freed once.
            unsafe { (self.target.ggml.api.ggml_backend_free)(backend) };
        }
    }
}

/// Runs programs one at a time. On the CPU they share one piece of memory for their activations, as large as the
/// largest needs; on another device each has its own.
pub(crate) struct Executor {
    backends: Arc<Backends>,
    /// `ggml_gallocr`.
    activations: Ptr,
    /// Bytes of activations that there was memory for.
    room: u64,
    /// The program that the activations are laid out for.
    placed: Option<u64>,
}

// SAFETY: as for `Backends`.
unsafe impl Send for Executor {}

impl Drop for Executor {
    fn drop(&mut self) {
        // SAFETY: made by `ggml_gallocr_new`, freed once; no program runs any more.
        unsafe { (self.backends.target.ggml.api.ggml_gallocr_free)(self.activations) };
    }
}

/// How the nodes of a graph are spread over a device and the CPU.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spread {
    /// Pieces of the graph that run one after the other.
    pub(crate) splits: usize,
    /// Nodes on the device.
    pub(crate) on_device: usize,
    /// Operations that run on the CPU, and how many nodes of each.
    pub(crate) on_cpu: BTreeMap<String, usize>,
    /// Tensors that are copied from one to the other in every run, and their bytes.
    pub(crate) copies: (usize, u64),
}

/// What the abort callback asks while a graph runs.
struct Watch<'a> {
    cancelled: &'a dyn Fn() -> bool,
    failure: &'a Failure,
    profile: Option<&'a Profile>,
}

impl Executor {
    /// Opens the device, for programs of at most so many threads.
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

    /// Lays out the memory of a program's activations, unless they are. What its inputs held is lost where they were not.
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
            // SAFETY: the CPU is the last backend, as ggml wants it; the scheduler goes with the program, which keeps
            // the backends.
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
        // SAFETY: the tensors of the graph have no memory but that of weights and constants.
        if !unsafe { (api.ggml_gallocr_alloc_graph)(self.activations, program.graph) } {
            return Err(exhausted());
        }
        // SAFETY: the allocator has one buffer or none.
        let bytes = unsafe { (api.ggml_gallocr_get_buffer_size)(self.activations, 0) as u64 };
        if bytes > self.room {
            // A new buffer, of which nothing is in memory before a program runs in it.
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
        // What a node reads that is none of the program's tensors, the scheduler has put there: a copy.
        let mut seen: HashSet<TensorPtr> = program.tensors().iter().copied().collect();
        for raw in program.nodes() {
            // SAFETY: a node of the graph; descriptions are C strings.
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

    /// Runs the graph once, with the weights in `store`, after [`place`](Self::place); `cancelled` is asked between
    /// nodes.
    ///
    /// # Errors
    /// `Internal` where the graph was made for another store; `Cancelled`; what a kernel reported, as
    /// `InvalidArgument`; ggml's own failures.
    pub(crate) fn compute(
        &mut self,
        program: &mut Program,
        store: &Store,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<()> {
        // Borrowed, so that nobody writes weights meanwhile.
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
        // SAFETY: the callback is withdrawn before `watch` goes; backends and graph belong together.
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
        if let Some(message) = program.failure().take() {
            return Err(Error::invalid(message));
        }
        match status {
            STATUS_SUCCESS => Ok(()),
            STATUS_ABORTED => Err(Error::new(ErrorCode::Cancelled, "the run was cancelled")),
            other => Err(status_error(other)),
        }
    }

    /// Bytes of the activations that programs share, and of those that `programs` have for themselves; and how many of
    /// them are in the memory of the device besides the CPU.
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

/// The turns that weights take on the device when the program runs, if they do. The nodes are those of the scheduler, for backends
/// change their order when it allocates the graph.
fn turns(program: &Program, store: &Store) -> Result<Option<Plan>> {
    let streams = store.streams();
    if streams.turns.is_empty() {
        return Ok(None);
    }
    let nodes = program.nodes();
    let uses = nodes.iter().map(|raw| {
        // SAFETY: a node of the graph.
        let (is_view, sources) = unsafe { (!(**raw).view_src.is_null(), (**raw).src) };
        // A view reads nothing.
        let sources = sources.into_iter().filter(|source| !is_view && !source.is_null());
        let turns: BTreeSet<usize> =
            sources.filter_map(|source| streams.turn_of.get(&memory_of(source)).copied()).collect();
        turns.into_iter().collect()
    });
    let uses: Vec<Vec<usize>> = uses.collect();
    let plan = Plan::new(streams, &nodes, &uses).map_err(|_| {
        Error::new(
            ErrorCode::ResourceExhausted,
            "an operation reads more weights than have room on the device",
        )
        .with_hint("give a larger budget")
    })?;
    Ok(Some(plan))
}

/// Runs a graph, with weights that take turns.
///
/// # Safety
/// The scheduler has allocated the graph, whose nodes the plan was made of; nobody writes weights meanwhile.
unsafe fn compute_in_turns(
    api: &'static Api,
    scheduler: Ptr,
    graph: Ptr,
    plan: &Plan,
    cancelled: &dyn Fn() -> bool,
) -> c_int {
    thread::scope(|scope| {
        // SAFETY: by this function's contract; the callback is withdrawn before `turns` goes.
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
