//! From a plan to results: deserializing, refitting, running.

use super::{
    HostMemory, Library, c_name,
    cuda::{Context, DeviceMemory, PinnedMemory, Stream},
    dtype, log, raw, text,
};
use sdrun_abi::{DType, Error, ErrorCode, Host, Result};
use std::{
    ffi::{CString, c_void},
    marker::PhantomData,
    ptr::{null, null_mut},
    sync::Arc,
};

/// The error for a call that failed: the first that the library logged during it.
fn failed(what: &str, host: &dyn Host) -> Error {
    let words = log::deliver(host).unwrap_or_else(|| "it gives no reason".into());
    let memory = words.to_lowercase().contains("out of memory");
    let code = if memory { ErrorCode::ResourceExhausted } else { ErrorCode::Internal };
    Error::new(code, format!("TensorRT-RTX cannot {what}: {words}"))
}

/// A plan on a GPU.
pub(crate) struct Engine {
    library: &'static Library,
    /// Outlives what is made in it; every call is made inside of it.
    context: Arc<Context>,
    runtime: *mut raw::Runtime,
    engine: *mut raw::CudaEngine,
}

// SAFETY: the library's objects may be used from any thread; not by two at once where they change, which `&mut` and
// the caller's order see to.
unsafe impl Send for Engine {}
// SAFETY: shared use is reading.
unsafe impl Sync for Engine {}

/// An input or output of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    pub(crate) name: String,
    /// `None` for a type sdrun has not.
    pub(crate) dtype: Option<DType>,
    /// Whether its values are needed in host memory.
    pub(crate) on_host: bool,
}

/// `EngineInvalidityDiagnostics`, as words.
const DIAGNOSTICS: [&str; 7] = [
    "it was written by another release of TensorRT-RTX",
    "it is not for a GPU of this kind",
    "the CUDA driver is older than the one it was built with",
    "the CUDA runtime is older than the one it was built with",
    "the GPU's memory cannot hold its weights",
    "it is damaged",
    "the CUDA driver does not work",
];

impl Engine {
    /// Puts a plan on the GPU of `context`.
    pub(crate) fn load(
        library: &'static Library,
        context: &Arc<Context>,
        plan: &[u8],
        host: &dyn Host,
    ) -> Result<Self> {
        context.enter()?;
        log::deliver(host);
        // SAFETY: an entry point of the library and its own logger.
        let runtime =
            unsafe { raw::sd_runtime_new(library.symbol("createInferRuntime_INTERNAL")?, library.logger) };
        if runtime.is_null() {
            return Err(failed("start", host));
        }
        let mut engine = Engine { library, context: context.clone(), runtime, engine: null_mut() };
        let mut diagnostics = 0u64;
        // SAFETY: `plan` is read during the call; a valid out parameter.
        let validity =
            unsafe { raw::sd_runtime_validity(runtime, plan.as_ptr().cast(), plan.len(), &mut diagnostics) };
        // 2: kINVALID
        if validity == 2 {
            log::deliver(host);
            let why: Vec<&str> = DIAGNOSTICS
                .iter()
                .enumerate()
                .filter(|(bit, _)| diagnostics >> bit & 1 == 1)
                .map(|(_, words)| *words)
                .collect();
            let why = if why.is_empty() { "it gives no reason".into() } else { why.join(", ") };
            return Err(Error::precondition(format!("TensorRT-RTX cannot use this engine here: {why}"))
                .with_hint("build it again for this GPU")
                .with_native(format!("diagnostics {diagnostics:#x}")));
        }
        // SAFETY: the library copies what it needs of `plan`.
        engine.engine = unsafe { raw::sd_engine_load(runtime, plan.as_ptr().cast(), plan.len()) };
        match engine.engine.is_null() {
            true => Err(failed("load the engine", host)),
            false => Ok(engine),
        }
    }

    /// Its inputs and outputs.
    pub(crate) fn io(&self) -> Result<Vec<Io>> {
        // SAFETY: the engine lives; names are its own strings, alive as long as it is.
        let count = unsafe { raw::sd_engine_io_count(self.engine) };
        (0..count)
            .map(|index| {
                // SAFETY: as above.
                let name = unsafe { text(raw::sd_engine_io_name(self.engine, index)) };
                let c_name = c_name(&name)?;
                // SAFETY: as above.
                let (data_type, on_host) = unsafe {
                    (
                        raw::sd_engine_io_type(self.engine, c_name.as_ptr()),
                        raw::sd_engine_io_on_host(self.engine, c_name.as_ptr()) != 0,
                    )
                };
                Ok(Io { name, dtype: dtype(data_type), on_host })
            })
            .collect()
    }

    /// Bytes of all its weights, where the library tells.
    pub(crate) fn weight_bytes(&self) -> Option<u64> {
        // SAFETY: the engine lives. 0: kTOTAL_WEIGHTS_SIZE.
        u64::try_from(unsafe { raw::sd_engine_stat(self.engine, 0) }).ok()
    }

    /// Bytes of GPU memory one execution needs for what it computes.
    pub(crate) fn activation_bytes(&self) -> Option<u64> {
        // SAFETY: the engine lives.
        u64::try_from(unsafe { raw::sd_engine_activations(self.engine) }).ok()
    }

    /// Bytes of weights that need not stay on the GPU.
    pub(crate) fn streamable_bytes(&self) -> u64 {
        // SAFETY: the engine lives.
        u64::try_from(unsafe { raw::sd_engine_streamable(self.engine) }).unwrap_or(0)
    }

    /// Limits the weights on the GPU to so many bytes. Before anything is run.
    pub(crate) fn set_budget(&mut self, bytes: u64, host: &dyn Host) -> Result<()> {
        let bytes = bytes.min(self.streamable_bytes());
        self.context.enter()?;
        // SAFETY: the engine lives.
        match unsafe { raw::sd_engine_set_budget(self.engine, bytes as i64) } {
            0 => Err(failed(&format!("limit its weights to {bytes} bytes of GPU memory"), host)),
            _ => Ok(()),
        }
    }

    /// The plan with the weights it has now inside.
    pub(crate) fn bake(&mut self, host: &dyn Host) -> Result<HostMemory> {
        self.context.enter()?;
        // SAFETY: the engine lives.
        let plan = unsafe { raw::sd_engine_bake(self.engine) };
        match plan.is_null() {
            true => Err(failed("write the engine with its weights", host)),
            false => Ok(HostMemory(plan)),
        }
    }

    /// For changing its weights. `'w` is how long values have to live.
    pub(crate) fn refitter<'w>(&'w self, host: &dyn Host) -> Result<Refitter<'w>> {
        self.context.enter()?;
        log::deliver(host);
        let create = self.library.symbol("createInferRefitter_INTERNAL")?;
        // SAFETY: an entry point of the library, an engine of its and its logger.
        let refitter = unsafe { raw::sd_refitter_new(create, self.engine, self.library.logger) };
        match refitter.is_null() {
            true => Err(failed("change the weights of the engine", host)),
            false => Ok(Refitter { refitter, values: PhantomData }),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: made by the library, freed once: the engine before the runtime.
        unsafe {
            if !self.engine.is_null() {
                raw::sd_engine_free(self.engine);
            }
            raw::sd_runtime_free(self.runtime);
        }
    }
}

/// Changes the weights of an engine.
pub(crate) struct Refitter<'w> {
    refitter: *mut raw::Refitter,
    values: PhantomData<&'w [u8]>,
}

type Names = unsafe extern "C" fn(*mut raw::Refitter, i32, *mut *const std::ffi::c_char) -> i32;

impl<'w> Refitter<'w> {
    fn names(&self, list: Names) -> Vec<String> {
        // SAFETY: no room is offered, so that nothing is written.
        let count = unsafe { list(self.refitter, 0, null_mut()) };
        let mut names = vec![null(); count.max(0) as usize];
        // SAFETY: there is room for `count` pointers. Their strings are the engine's.
        unsafe {
            list(self.refitter, count.max(0), names.as_mut_ptr());
            names.into_iter().map(|name| text(name)).collect()
        }
    }

    /// The weights that can be changed.
    pub(crate) fn all(&self) -> Vec<String> {
        self.names(raw::sd_refitter_all)
    }

    /// Those that have to be set before [`refit`](Refitter::refit).
    pub(crate) fn missing(&self) -> Vec<String> {
        self.names(raw::sd_refitter_missing)
    }

    /// `nvinfer1::DataType` and elements of a weight.
    pub(crate) fn prototype(&self, name: &str) -> Result<(i32, i64)> {
        let name = c_name(name)?;
        // SAFETY: the refitter lives; `name` during the call.
        let prototype = unsafe { raw::sd_refitter_prototype(self.refitter, name.as_ptr()) };
        Ok((prototype.type_, prototype.count))
    }

    /// Gives a weight its values.
    pub(crate) fn set(
        &mut self,
        name: &str,
        data_type: i32,
        count: u64,
        values: &'w [u8],
        host: &dyn Host,
    ) -> Result<()> {
        let c_name = c_name(name)?;
        // SAFETY: `values` lives as long as the refitter; type and count were compared with the prototype.
        let taken = unsafe {
            raw::sd_refitter_set(
                self.refitter,
                c_name.as_ptr(),
                data_type,
                values.as_ptr().cast(),
                count as i64,
            )
        };
        match taken {
            0 => Err(failed(&format!("take the weight `{name}`"), host)),
            _ => Ok(()),
        }
    }

    /// Puts the values that were set into the engine, and waits until they are there.
    pub(crate) fn refit(&mut self, stream: &Stream, host: &dyn Host) -> Result<()> {
        // SAFETY: stream and refitter live until the wait is over.
        if unsafe { raw::sd_refitter_refit(self.refitter, stream.raw()) } == 0 {
            return Err(failed("put the weights into the engine", host));
        }
        stream.wait()?;
        // SAFETY: nothing is queued any more. What it frees is made again when it is needed.
        if unsafe { raw::sd_refitter_release(self.refitter) } == 0 {
            host.log(
                sdrun_abi::LogLevel::Warn,
                "tensorrt-rtx",
                "memory that was used to change weights is not released",
            );
        }
        log::deliver(host);
        Ok(())
    }
}

impl Drop for Refitter<'_> {
    fn drop(&mut self) {
        // SAFETY: made by the library, freed once.
        unsafe { raw::sd_refitter_free(self.refitter) }
    }
}

/// An engine ready to run.
pub(crate) struct Execution {
    context: *mut raw::Context,
    cache: *mut raw::RuntimeCache,
    config: *mut raw::RuntimeConfig,
    /// After what is made of it.
    engine: Arc<Engine>,
}

// SAFETY: used by one thread at a time, any thread.
unsafe impl Send for Execution {}

impl Execution {
    /// `kernels` are what [`kernels`](Execution::kernels) gave before; the flag says whether they are in use.
    pub(crate) fn new(
        engine: &Arc<Engine>,
        cuda_graph: bool,
        kernels: Option<&[u8]>,
        host: &dyn Host,
    ) -> Result<(Self, bool)> {
        engine.context.enter()?;
        log::deliver(host);
        // SAFETY: everything is made of a living engine and checked before it is used.
        unsafe {
            let config = raw::sd_config_new(engine.engine);
            if config.is_null() {
                return Err(failed("prepare a run", host));
            }
            let mut execution =
                Execution { context: null_mut(), cache: null_mut(), config, engine: engine.clone() };
            if cuda_graph && raw::sd_config_cuda_graph(config, 1) == 0 {
                return Err(failed("record runs (`cuda-graph=on`)", host));
            }
            execution.cache = raw::sd_cache_new(config);
            let mut used = false;
            if let Some(kernels) = kernels.filter(|_| !execution.cache.is_null()) {
                used = raw::sd_cache_load(execution.cache, kernels.as_ptr().cast(), kernels.len()) != 0;
            }
            execution.context = raw::sd_context_new(engine.engine, config);
            match execution.context.is_null() {
                true => Err(failed("prepare a run", host)),
                false => Ok((execution, used)),
            }
        }
    }

    /// The kernels that were compiled for this GPU so far.
    pub(crate) fn kernels(&self) -> Option<HostMemory> {
        if self.cache.is_null() {
            return None;
        }
        // SAFETY: the cache lives.
        let bytes = unsafe { raw::sd_cache_store(self.cache) };
        (!bytes.is_null()).then(|| HostMemory(bytes))
    }

    /// States the shape of an input.
    pub(crate) fn set_shape(&mut self, name: &CString, shape: &[usize], host: &dyn Host) -> Result<()> {
        let mut dims = raw::SdDims { rank: shape.len() as i32, d: [0; 8] };
        let fits = shape.len() <= dims.d.len();
        if fits {
            dims.d.iter_mut().zip(shape).for_each(|(d, n)| *d = *n as i64);
        }
        // SAFETY: the context lives; name and shape during the call.
        if !fits || unsafe { raw::sd_context_set_shape(self.context, name.as_ptr(), &dims) } == 0 {
            let what = format!("take the shape {shape:?} for input {name:?}");
            return Err(Error { code: ErrorCode::InvalidArgument, ..failed(&what, host) }
                .with_hint("build the engine for a range of shapes that holds this one"));
        }
        Ok(())
    }

    /// The shape of an input or output for the shapes stated; -1 where it depends on values.
    pub(crate) fn shape(&self, name: &CString) -> Option<Vec<i64>> {
        // SAFETY: the context lives; the name during the call.
        let dims = unsafe { raw::sd_context_shape(self.context, name.as_ptr()) };
        Some(dims.d.get(..usize::try_from(dims.rank).ok()?)?.to_vec())
    }

    /// Where an input or output is. The memory lives until other memory is named, or as long as this.
    pub(crate) fn set_device(
        &mut self,
        name: &CString,
        memory: &DeviceMemory,
        host: &dyn Host,
    ) -> Result<()> {
        self.set_address(name, memory.address(), host)
    }

    /// As [`set_device`](Execution::set_device), for values that are needed on the host.
    pub(crate) fn set_host(&mut self, name: &CString, memory: &PinnedMemory, host: &dyn Host) -> Result<()> {
        self.set_address(name, memory.address(), host)
    }

    fn set_address(&mut self, name: &CString, address: *mut c_void, host: &dyn Host) -> Result<()> {
        // SAFETY: the context lives; the address is used by `enqueue`, until when the caller keeps the memory.
        match unsafe { raw::sd_context_set_address(self.context, name.as_ptr(), address) } {
            0 => Err(failed(&format!("use memory for {name:?}"), host)),
            _ => Ok(()),
        }
    }

    /// Queues a run.
    pub(crate) fn enqueue(&mut self, stream: &Stream, host: &dyn Host) -> Result<()> {
        self.engine.context.enter()?;
        // SAFETY: context and stream live; all addresses are set.
        match unsafe { raw::sd_context_enqueue(self.context, stream.raw()) } {
            0 => Err(failed("run the engine", host)),
            _ => Ok(()),
        }
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        let _ = self.engine.context.enter();
        // SAFETY: made by the library, freed once, in this order.
        unsafe {
            if !self.context.is_null() {
                raw::sd_context_free(self.context);
            }
            if !self.cache.is_null() {
                raw::sd_cache_free(self.cache);
            }
            raw::sd_config_free(self.config);
        }
    }
}
