//! Threads of ggml's CPU backend that stay alive between runs. Otherwise ggml would start and end its threads in every run, and
//! kernels would lose what they keep per thread.

use super::{api::*, library::Cpu};
use sdrun_abi::{Error, ErrorCode, Result};
use std::ffi::c_int;

/// How long threads poll for the next run before they sleep, in units of 131072 pause instructions: 2 to 6 ms.
const POLL: u32 = 1;

/// The threads of a backend.
pub(super) struct Threads {
    cpu: &'static Cpu,
    backend: Ptr,
    /// `ggml_threadpool`.
    pool: Ptr,
}

impl Threads {
    /// Gives a CPU backend `threads` threads. The thread that calls a run is one of them.
    ///
    /// # Safety
    /// The backend belongs to `cpu`'s device and outlives the returned value.
    pub(super) unsafe fn new(cpu: &'static Cpu, backend: Ptr, threads: usize) -> Result<Self> {
        let n_threads = threads.clamp(1, MAX_THREADS) as c_int;
        let mut params = ThreadParams {
            cpu_mask: [false; MAX_THREADS],
            n_threads,
            priority: 0,
            poll: POLL,
            strict_cpu: false,
            paused: false,
        };
        // SAFETY: the parameters have the layout of ggml.h and are read during the call only; the rest by this function's contract.
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
        // SAFETY: no graph runs any more. The backend drops its pointer to the pool before the pool is freed, once.
        unsafe {
            (self.cpu.set_threadpool)(self.backend, std::ptr::null_mut());
            (self.cpu.threadpool_free)(self.pool);
        }
    }
}
