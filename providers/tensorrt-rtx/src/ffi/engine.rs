//! Turns a plan into results: deserializes, refits and runs it.

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

/// Makes the error of a failed call from the first error the library logged during it.
fn failed(what: &str, host: &dyn Host) -> Error {
    let words = log::deliver(host).unwrap_or_else(|| "no reason is given".into());
    let memory = words.to_lowercase().contains("out of memory");
    let code = if memory { ErrorCode::ResourceExhausted } else { ErrorCode::Internal };
    Error::new(code, format!("TensorRT-RTX cannot {what}: {words}"))
}

/// A plan on a GPU.
pub(crate) struct Engine {
    library: &'static Library,
    /// Outlives everything created from it; each call runs with it current.
    context: Arc<Context>,
    runtime: *mut raw::Runtime,
    engine: *mut raw::CudaEngine,
}

// SAFETY: any thread may use the library's objects. Two threads must not change one at once; `&mut` and the caller's
// order ensure that.
unsafe impl Send for Engine {}
// SAFETY: shared references only read.
unsafe impl Sync for Engine {}

/// An input or output of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    pub(crate) name: String,
    /// `None` for a type sdrun does not support.
    pub(crate) dtype: Option<DType>,
    /// Whether its values must be in host memory.
    pub(crate) on_host: bool,
}

/// `EngineInvalidityDiagnostics` in words.
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
    /// Loads a plan on the GPU of `context`.
    pub(crate) fn load(
        library: &'static Library,
        context: &Arc<Context>,
        plan: &[u8],
        host: &dyn Host,
    ) -> Result<Self> {
        context.enter()?;
        log::deliver(host);
        // SAFETY: calls an entry point of the library with the library's own logger.
        let runtime =
            unsafe { raw::sd_runtime_new(library.symbol("createInferRuntime_INTERNAL")?, library.logger) };
        if runtime.is_null() {
            return Err(failed("start", host));
        }
        let mut engine = Engine { library, context: context.clone(), runtime, engine: null_mut() };
        let mut diagnostics = 0u64;
        // SAFETY: the call only reads `plan`, and the out parameter is valid.
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
            let why = if why.is_empty() { "no reason is given".into() } else { why.join(", ") };
            return Err(Error::precondition(format!("TensorRT-RTX cannot use this engine here: {why}"))
                .with_hint("build it again for this GPU")
                .with_native(format!("diagnostics {diagnostics:#x}")));
        }
        // SAFETY: the library copies what it needs from `plan`.
        engine.engine = unsafe { raw::sd_engine_load(runtime, plan.as_ptr().cast(), plan.len()) };
        match engine.engine.is_null() {
            true => Err(failed("load the engine", host)),
            false => Ok(engine),
        }
    }

    /// Its inputs and outputs.
    pub(crate) fn io(&self) -> Result<Vec<Io>> {
        // SAFETY: the engine is alive, and owns the name strings for as long as it lives.
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

    /// Bytes of all its weights, if the library reports them.
    pub(crate) fn weight_bytes(&self) -> Option<u64> {
        // SAFETY: the engine is alive. 0 is kTOTAL_WEIGHTS_SIZE.
        u64::try_from(unsafe { raw::sd_engine_stat(self.engine, 0) }).ok()
    }

    /// Bytes of GPU memory one execution needs for intermediate values.
    pub(crate) fn activation_bytes(&self) -> Option<u64> {
        // SAFETY: the engine is alive.
        u64::try_from(unsafe { raw::sd_engine_activations(self.engine) }).ok()
    }

    /// Bytes of weights that can be streamed from the host.
    pub(crate) fn streamable_bytes(&self) -> u64 {
        // SAFETY: the engine is alive.
        u64::try_from(unsafe { raw::sd_engine_streamable(self.engine) }).unwrap_or(0)
    }

    /// Limits the weights on the GPU to `bytes`. Call it before the first run.
    pub(crate) fn set_budget(&mut self, bytes: u64, host: &dyn Host) -> Result<()> {
        let bytes = bytes.min(self.streamable_bytes());
        self.context.enter()?;
        // SAFETY: the engine is alive.
        match unsafe { raw::sd_engine_set_budget(self.engine, bytes as i64) } {
            0 => Err(failed(&format!("limit its weights to {bytes} bytes of GPU memory"), host)),
            _ => Ok(()),
        }
    }

    /// Serializes the plan with its current weights.
    pub(crate) fn bake(&mut self, host: &dyn Host) -> Result<HostMemory> {
        self.context.enter()?;
        // SAFETY: the engine is alive.
        let plan = unsafe { raw::sd_engine_bake(self.engine) };
        match plan.is_null() {
            true => Err(failed("write the engine with its weights", host)),
            false => Ok(HostMemory(plan)),
        }
    }

    /// Creates a refitter for the engine. The values it receives must live for `'w`.
    pub(crate) fn refitter<'w>(&'w self, host: &dyn Host) -> Result<Refitter<'w>> {
        self.context.enter()?;
        log::deliver(host);
        let create = self.library.symbol("createInferRefitter_INTERNAL")?;
        // SAFETY: calls an entry point of the library with one of its engines and its logger.
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
        // SAFETY: the library created both; each is freed once, the engine before the runtime.
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
        // SAFETY: the size is 0, so nothing is written.
        let count = unsafe { list(self.refitter, 0, null_mut()) };
        let mut names = vec![null(); count.max(0) as usize];
        // SAFETY: there is room for `count` pointers. The engine owns their strings.
        unsafe {
            list(self.refitter, count.max(0), names.as_mut_ptr());
            names.into_iter().map(|name| text(name)).collect()
        }
    }

    /// The refittable weights.
    pub(crate) fn all(&self) -> Vec<String> {
        self.names(raw::sd_refitter_all)
    }

    /// The weights that must be set before [`refit`](Refitter::refit).
    pub(crate) fn missing(&self) -> Vec<String> {
        self.names(raw::sd_refitter_missing)
    }

    /// `nvinfer1::DataType` and number of elements of a weight.
    pub(crate) fn prototype(&self, name: &str) -> Result<(i32, i64)> {
        let name = c_name(name)?;
        // SAFETY: the refitter is alive, and `name` lives during the call.
        let prototype = unsafe { raw::sd_refitter_prototype(self.refitter, name.as_ptr()) };
        Ok((prototype.type_, prototype.count))
    }

    /// Sets the values of a weight.
    pub(crate) fn set(
        &mut self,
        name: &str,
        data_type: i32,
        count: u64,
        values: &'w [u8],
        host: &dyn Host,
    ) -> Result<()> {
        let c_name = c_name(name)?;
        // SAFETY: `values` outlives the refitter; type and count match the prototype.
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

    /// Writes the values that were set into the engine, and waits until the GPU has them.
    pub(crate) fn refit(&mut self, stream: &Stream, host: &dyn Host) -> Result<()> {
        // SAFETY: the stream and the refitter live until the wait ends.
        if unsafe { raw::sd_refitter_refit(self.refitter, stream.raw()) } == 0 {
            return Err(failed("put the weights into the engine", host));
        }
        stream.wait()?;
        // SAFETY: no work is queued. The library allocates this memory again on demand.
        if unsafe { raw::sd_refitter_release(self.refitter) } == 0 {
            host.log(
                sdrun_abi::LogLevel::Warn,
                "tensorrt-rtx",
                "the memory used to change weights was not released",
            );
        }
        log::deliver(host);
        Ok(())
    }
}

impl Drop for Refitter<'_> {
    fn drop(&mut self) {
        // SAFETY: the library created it, and it is freed once.
        unsafe { raw::sd_refitter_free(self.refitter) }
    }
}

/// An engine ready to run.
pub(crate) struct Execution {
    context: *mut raw::Context,
    cache: *mut raw::RuntimeCache,
    config: *mut raw::RuntimeConfig,
    /// Dropped after the objects created from it.
    engine: Arc<Engine>,
}

// SAFETY: only one thread uses it at a time, and it may be any thread.
unsafe impl Send for Execution {}

impl Execution {
    /// `kernels` is an earlier result of [`kernels`](Execution::kernels); the returned flag says whether they are in
    /// use.
    pub(crate) fn new(
        engine: &Arc<Engine>,
        cuda_graph: bool,
        kernels: Option<&[u8]>,
        host: &dyn Host,
    ) -> Result<(Self, bool)> {
        engine.context.enter()?;
        log::deliver(host);
        // SAFETY: every object comes from a live engine and is checked before use.
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

    /// The kernels compiled for this GPU so far.
    pub(crate) fn kernels(&self) -> Option<HostMemory> {
        if self.cache.is_null() {
            return None;
        }
        // SAFETY: the cache is alive.
        let bytes = unsafe { raw::sd_cache_store(self.cache) };
        (!bytes.is_null()).then(|| HostMemory(bytes))
    }

    /// Sets the shape of an input.
    pub(crate) fn set_shape(&mut self, name: &CString, shape: &[usize], host: &dyn Host) -> Result<()> {
        let mut dims = raw::SdDims { rank: shape.len() as i32, d: [0; 8] };
        let fits = shape.len() <= dims.d.len();
        if fits {
            dims.d.iter_mut().zip(shape).for_each(|(d, n)| *d = *n as i64);
        }
        // SAFETY: the context is alive; name and shape live during the call.
        if !fits || unsafe { raw::sd_context_set_shape(self.context, name.as_ptr(), &dims) } == 0 {
            let what = format!("take the shape {shape:?} for input {name:?}");
            return Err(Error { code: ErrorCode::InvalidArgument, ..failed(&what, host) }
                .with_hint("build the engine for a range of shapes that holds this one"));
        }
        Ok(())
    }

    /// The shape of an input or output for the input shapes set before; -1 where it depends on values.
    pub(crate) fn shape(&self, name: &CString) -> Option<Vec<i64>> {
        // SAFETY: the context is alive, and the name lives during the call.
        let dims = unsafe { raw::sd_context_shape(self.context, name.as_ptr()) };
        Some(dims.d.get(..usize::try_from(dims.rank).ok()?)?.to_vec())
    }

    /// Sets the address of an input or output. The memory must live until another address is set, or as long as `self`.
    pub(crate) fn set_device(
        &mut self,
        name: &CString,
        memory: &DeviceMemory,
        host: &dyn Host,
    ) -> Result<()> {
        self.set_address(name, memory.address(), host)
    }

    /// Like [`set_device`](Execution::set_device), for values in host memory.
    pub(crate) fn set_host(&mut self, name: &CString, memory: &PinnedMemory, host: &dyn Host) -> Result<()> {
        self.set_address(name, memory.address(), host)
    }

    fn set_address(&mut self, name: &CString, address: *mut c_void, host: &dyn Host) -> Result<()> {
        // SAFETY: the context is alive. `enqueue` uses the address, and the caller keeps the memory until then.
        match unsafe { raw::sd_context_set_address(self.context, name.as_ptr(), address) } {
            0 => Err(failed(&format!("use memory for {name:?}"), host)),
            _ => Ok(()),
        }
    }

    /// Queues a run.
    pub(crate) fn enqueue(&mut self, stream: &Stream, host: &dyn Host) -> Result<()> {
        self.engine.context.enter()?;
        // SAFETY: context and stream are alive, and all addresses are set.
        match unsafe { raw::sd_context_enqueue(self.context, stream.raw()) } {
            0 => Err(failed("run the engine", host)),
            _ => Ok(()),
        }
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        let _ = self.engine.context.enter();
        // SAFETY: the library created them; each is freed once, in this order.
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
