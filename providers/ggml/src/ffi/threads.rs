//! Threads of ggml's CPU backend that stay from one run to the next. Without them ggml starts and ends its threads in every
//! run, and what kernels keep for each thread is lost.

use super::{api::*, library::Cpu};
use sdrun_abi::{Error, ErrorCode, Result};
use std::ffi::c_int;

/// `GGML_MAX_N_THREADS`.
pub(crate) const MAX_THREADS: usize = 512;

/// `struct ggml_threadpool_params`.
#[repr(C)]
pub(super) struct Params {
    /// None set: wherever the system puts them.
    cpu_mask: [bool; MAX_THREADS],
    n_threads: c_int,
    /// `enum ggml_sched_priority`: 0 is the normal one.
    priority: c_int,
    poll: u32,
    strict_cpu: bool,
    paused: bool,
}

/// How long threads look for the next run before they sleep, in 131072 pauses of the processor: 2 to 6 ms.
const POLL: u32 = 1;

/// The threads of a backend.
pub(super) struct Threads {
    cpu: &'static Cpu,
    backend: Ptr,
    /// `ggml_threadpool`.
    pool: Ptr,
}

impl Threads {
    /// Gives a CPU backend as many, the caller of a run among them.
    ///
    /// # Safety
    /// The backend is one of `cpu`'s device and outlives what is made.
    pub(super) unsafe fn new(cpu: &'static Cpu, backend: Ptr, threads: usize) -> Result<Self> {
        let n_threads = threads.clamp(1, MAX_THREADS) as c_int;
        let mut params = Params {
            cpu_mask: [false; MAX_THREADS],
            n_threads,
            priority: 0,
            poll: POLL,
            strict_cpu: false,
            paused: false,
        };
        // SAFETY: parameters as ggml.h states them, read during the call; by this function's contract.
        unsafe {
            let pool = (cpu.threadpool_new)(&mut params);
            if pool.is_null() {
                return Err(Error::new(ErrorCode::ResourceExhausted, "ggml cannot start its threads"));
            }
            (cpu.set_threadpool)(backend, pool);
            Ok(Threads { cpu, backend, pool })
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // SAFETY: no graph runs any more; the backend forgets the pool before it is freed, once.
        unsafe {
            (self.cpu.set_threadpool)(self.backend, std::ptr::null_mut());
            (self.cpu.threadpool_free)(self.pool);
        }
    }
}
