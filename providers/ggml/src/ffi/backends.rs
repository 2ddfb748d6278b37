//! ggml's backends for a target.

use super::{api::*, library::Target, threads::Threads};
use sdrun_abi::{Error, Result};

/// ggml's backends for a target: the CPU, and the GPU if there is one.
pub(super) struct Backends {
    pub(super) target: Target,
    pub(super) cpu: Ptr,
    pub(super) device: Option<Ptr>,
    /// The threads of the CPU's backend.
    threads: Option<Threads>,
}

// SAFETY: ggml ties none of it to a thread, and only one `Executor` uses it.
unsafe impl Send for Backends {}
// SAFETY: as above.
unsafe impl Sync for Backends {}

impl Backends {
    pub(super) fn open(target: Target, threads: usize) -> Result<Self> {
        let api = &target.ggml.api;
        let init = |device: Ptr, name: &str| {
            // SAFETY: a device of this ggml.
            let backend = unsafe { (api.ggml_backend_dev_init)(device, std::ptr::null()) };
            let failed = || Error::precondition(format!("ggml cannot open its device {name}"));
            if backend.is_null() { Err(failed()) } else { Ok(backend) }
        };
        let cpu = init(target.ggml.cpu.device, "cpu")?;
        let mut backends = Backends { target, cpu, device: None, threads: None };
        // SAFETY: the backend belongs to the CPU and is freed after the threads.
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
