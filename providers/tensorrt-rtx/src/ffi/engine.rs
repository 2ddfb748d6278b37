//! Turns a plan into results: deserializes, refits and runs it.

use super::{
    HostMemory, Library, bridge,
    cuda::{Context, DeviceMemory, PinnedMemory, Stream},
    dtype, log, thrown,
};
use cxx::UniquePtr;
use sdrun_abi::{DType, Error, ErrorCode, Host, Result};
use std::{marker::PhantomData, sync::Arc};

/// Makes the error of a failed call from the first error the library logged during it.
fn failed(what: &str, host: &dyn Host) -> Error {
    let words = log::deliver(host).unwrap_or_else(|| "no reason is given".into());
    let memory = words.to_lowercase().contains("out of memory");
    let code = if memory { ErrorCode::ResourceExhausted } else { ErrorCode::Internal };
    Error::new(code, format!("TensorRT-RTX cannot {what}: {words}"))
}

/// Converts a result that is null if the call failed.
fn made<T: cxx::memory::UniquePtrTarget>(
    object: UniquePtr<T>,
    what: &str,
    host: &dyn Host,
) -> Result<UniquePtr<T>> {
    match object.is_null() {
        true => Err(failed(what, host)),
        false => Ok(object),
    }
}

/// A plan on a GPU.
pub(crate) struct Engine {
    // Fields are in the order in which they must be dropped.
    engine: UniquePtr<bridge::ICudaEngine>,
    runtime: UniquePtr<bridge::IRuntime>,
    library: &'static Library,
    /// Outlives everything created from it; each call runs with it current.
    context: Arc<Context>,
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
        let create = library.symbol("createInferRuntime_INTERNAL")?;
        // SAFETY: the address is that of the entry point, and the library's logger is never freed.
        let runtime = unsafe { bridge::new_runtime(create, &library.logger) }.map_err(thrown)?;
        let runtime = made(runtime, "start", host)?;
        let found = bridge::validity_of(&runtime, plan);
        if !found.valid {
            log::deliver(host);
            let why: Vec<&str> = DIAGNOSTICS
                .iter()
                .enumerate()
                .filter(|(bit, _)| found.diagnostics >> bit & 1 == 1)
                .map(|(_, words)| *words)
                .collect();
            let why = if why.is_empty() { "no reason is given".into() } else { why.join(", ") };
            return Err(Error::precondition(format!("TensorRT-RTX cannot use this engine here: {why}"))
                .with_hint("build it again for this GPU")
                .with_native(format!("diagnostics {:#x}", found.diagnostics)));
        }
        let mut engine = Engine { engine: UniquePtr::null(), runtime, library, context: context.clone() };
        // SAFETY: the engine is dropped before the runtime. The library copies what it needs from `plan`.
        let loaded = unsafe { bridge::load_engine(engine.runtime.pin_mut(), plan) };
        engine.engine = made(loaded, "load the engine", host)?;
        Ok(engine)
    }

    /// Its inputs and outputs.
    pub(crate) fn io(&self) -> Result<Vec<Io>> {
        let found = bridge::io_of(&self.engine).map_err(thrown)?;
        let io = |io: bridge::IoTensor| Io { name: io.name, dtype: dtype(io.data_type), on_host: io.on_host };
        Ok(found.into_iter().map(io).collect())
    }

    /// Bytes of all its weights, if the library reports them.
    pub(crate) fn weight_bytes(&self) -> Option<u64> {
        u64::try_from(bridge::weight_bytes(&self.engine)).ok()
    }

    /// Bytes of GPU memory one execution needs for intermediate values.
    pub(crate) fn activation_bytes(&self) -> Option<u64> {
        u64::try_from(self.engine.activation_bytes()).ok()
    }

    /// Bytes of weights that can be streamed from the host.
    pub(crate) fn streamable_bytes(&self) -> u64 {
        u64::try_from(self.engine.streamable_bytes()).unwrap_or(0)
    }

    /// Limits the weights on the GPU to `bytes`. Call it before the first run.
    pub(crate) fn set_budget(&mut self, bytes: u64, host: &dyn Host) -> Result<()> {
        let bytes = bytes.min(self.streamable_bytes());
        self.context.enter()?;
        match self.engine.pin_mut().set_budget(bytes as i64) {
            false => Err(failed(&format!("limit its weights to {bytes} bytes of GPU memory"), host)),
            true => Ok(()),
        }
    }

    /// Serializes the plan with its current weights.
    pub(crate) fn bake(&mut self, host: &dyn Host) -> Result<HostMemory> {
        self.context.enter()?;
        let plan = HostMemory::of(bridge::bake(self.engine.pin_mut()));
        plan.ok_or_else(|| failed("write the engine with its weights", host))
    }

    /// Creates a refitter for the engine. The values it receives must live for `'w`.
    pub(crate) fn refitter<'w>(&'w self, host: &dyn Host) -> Result<Refitter<'w>> {
        self.context.enter()?;
        log::deliver(host);
        let create = self.library.symbol("createInferRefitter_INTERNAL")?;
        // SAFETY: the address is that of the entry point. The borrow keeps the engine alive, and the logger is never freed.
        // A session refits on one thread while it does not run.
        let refitter = unsafe { bridge::new_refitter(create, &self.engine, &self.library.logger) };
        let refitter = made(refitter.map_err(thrown)?, "change the weights of the engine", host)?;
        Ok(Refitter { refitter, values: PhantomData })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The fields that are dropped next free GPU memory.
        let _ = self.context.enter();
    }
}

/// Changes the weights of an engine.
pub(crate) struct Refitter<'w> {
    refitter: UniquePtr<bridge::IRefitter>,
    values: PhantomData<&'w [u8]>,
}

impl<'w> Refitter<'w> {
    /// The refittable weights.
    pub(crate) fn all(&mut self) -> Result<Vec<String>> {
        bridge::refittable(self.refitter.pin_mut()).map_err(thrown)
    }

    /// The weights that must be set before [`refit`](Refitter::refit).
    pub(crate) fn missing(&mut self) -> Result<Vec<String>> {
        bridge::missing(self.refitter.pin_mut()).map_err(thrown)
    }

    /// `nvinfer1::DataType` and number of elements of a weight.
    pub(crate) fn prototype(&self, name: &str) -> Result<(i32, i64)> {
        let found = bridge::prototype(&self.refitter, name).map_err(thrown)?;
        Ok((found.data_type, found.count))
    }

    /// Sets the values of a weight. Type and number of elements are those of [`prototype`](Refitter::prototype).
    pub(crate) fn set(
        &mut self,
        name: &str,
        dtype: DType,
        count: u64,
        values: &'w [u8],
        host: &dyn Host,
    ) -> Result<()> {
        let code = super::data_type(dtype).unwrap_or(-1);
        if dtype.bytes_of(&[count as usize]) != Some(values.len()) {
            return Err(Error::internal(format!("{} bytes for {count} {dtype} of `{name}`", values.len())));
        }
        // SAFETY: `values` holds `count` elements and outlives the refitter.
        let taken = unsafe { bridge::set_weight(self.refitter.pin_mut(), name, code, count as i64, values) };
        match taken.map_err(thrown)? {
            false => Err(failed(&format!("take the weight `{name}`"), host)),
            true => Ok(()),
        }
    }

    /// Writes the values that were set into the engine, and waits until they are on the GPU.
    pub(crate) fn refit(&mut self, stream: &Stream, host: &dyn Host) -> Result<()> {
        // SAFETY: the stream and the values live until the wait ends.
        if !unsafe { self.refitter.pin_mut().refit(stream.raw().cast()) } {
            return Err(failed("put the weights into the engine", host));
        }
        stream.wait()?;
        // The library allocates this memory again on demand.
        if !self.refitter.pin_mut().release() {
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

/// An engine ready to run.
pub(crate) struct Execution {
    // Fields are in the order in which they must be dropped: a field precedes the fields it was created from.
    context: UniquePtr<bridge::IExecutionContext>,
    cache: UniquePtr<bridge::IRuntimeCache>,
    config: UniquePtr<bridge::IRuntimeConfig>,
    engine: Arc<Engine>,
}

// SAFETY: only one thread uses it at a time, and it may be any thread.
unsafe impl Send for Execution {}

impl Execution {
    /// `kernels` is an earlier result of [`kernels`](Execution::kernels). The returned flag says whether they are used.
    pub(crate) fn new(
        engine: &Arc<Engine>,
        cuda_graph: bool,
        kernels: Option<&[u8]>,
        host: &dyn Host,
    ) -> Result<(Self, bool)> {
        engine.context.enter()?;
        log::deliver(host);
        let what = if cuda_graph { "prepare a recorded run (`cuda-graph=on`)" } else { "prepare a run" };
        let mut execution = Execution {
            context: UniquePtr::null(),
            cache: UniquePtr::null(),
            // SAFETY: the engine is dropped last.
            config: made(unsafe { bridge::new_config(&engine.engine, cuda_graph) }, what, host)?,
            engine: engine.clone(),
        };
        // SAFETY: the cache is dropped before the config and the engine.
        execution.cache = unsafe { bridge::new_cache(execution.config.pin_mut()) };
        let used = match (kernels, execution.cache.as_mut()) {
            (Some(kernels), Some(cache)) => bridge::load_cache(cache, kernels),
            _ => false,
        };
        // SAFETY: the context is dropped before the others.
        let context = unsafe { bridge::new_context(&engine.engine, execution.config.pin_mut()) };
        execution.context = made(context, what, host)?;
        Ok((execution, used))
    }

    /// The kernels compiled for this GPU so far.
    pub(crate) fn kernels(&self) -> Option<HostMemory> {
        HostMemory::of(bridge::store_cache(self.cache.as_ref()?))
    }

    /// Sets the shape of an input.
    pub(crate) fn set_shape(&mut self, name: &str, shape: &[usize], host: &dyn Host) -> Result<()> {
        let dims: Vec<i64> = shape.iter().map(|n| *n as i64).collect();
        match bridge::set_shape(self.context.pin_mut(), name, &dims).map_err(thrown)? {
            true => Ok(()),
            false => {
                let what = format!("take the shape {shape:?} for input `{name}`");
                Err(Error { code: ErrorCode::InvalidArgument, ..failed(&what, host) }
                    .with_hint("build the engine for a range of shapes that holds this one"))
            }
        }
    }

    /// The shape of an input or output for the input shapes set before; -1 if it depends on values. `None` if the library
    /// does not report it.
    pub(crate) fn shape(&self, name: &str) -> Option<Vec<i64>> {
        bridge::shape_of(&self.context, name).ok()
    }

    /// Sets the address of an input or output. The memory must live until another address is set, or as long as `self`.
    pub(crate) fn set_device(&mut self, name: &str, memory: &DeviceMemory, host: &dyn Host) -> Result<()> {
        self.set_address(name, memory.address() as usize, host)
    }

    /// Like [`set_device`](Execution::set_device), for values in host memory.
    pub(crate) fn set_host(&mut self, name: &str, memory: &PinnedMemory, host: &dyn Host) -> Result<()> {
        self.set_address(name, memory.address() as usize, host)
    }

    fn set_address(&mut self, name: &str, address: usize, host: &dyn Host) -> Result<()> {
        // SAFETY: `enqueue` uses the address, and the caller keeps the memory until then.
        let taken = unsafe { bridge::set_address(self.context.pin_mut(), name, address) };
        match taken.map_err(thrown)? {
            false => Err(failed(&format!("use memory for `{name}`"), host)),
            true => Ok(()),
        }
    }

    /// Queues a run.
    pub(crate) fn enqueue(&mut self, stream: &Stream, host: &dyn Host) -> Result<()> {
        self.engine.context.enter()?;
        // SAFETY: context and stream are alive, and all addresses are set.
        match unsafe { self.context.pin_mut().enqueue(stream.raw().cast()) } {
            false => Err(failed("run the engine", host)),
            true => Ok(()),
        }
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        // The fields that are dropped next free GPU memory.
        let _ = self.engine.context.enter();
    }
}
