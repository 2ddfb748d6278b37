//! The host's side: a loaded plugin table as a [`Provider`].

use super::{callbacks::*, raw::*};
use crate::{
    ABI_MAJOR, ABI_MINOR, BuildSpec, Capabilities, Compatibility, DType, Device, DeviceTensor, Engine,
    EngineInfo, Error, Host, InitConfig, Input, MemoryReport, OutputSink, OutputSpec, Provider, RefitReport,
    Result, RuntimeInfo, Session, TensorView, WeightSource,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{ffi::c_void, ptr};

/// A plugin behind its function table. Engines and sessions made by it refer to the table, which lives as
/// long as the process: plugins are never unloaded.
#[derive(Clone, Copy)]
pub struct Plugin {
    raw: &'static RawPlugin,
}

/// Who a plugin says it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct PluginIdentity {
    pub id: String,
    pub vendor: String,
    pub version: String,
    pub build_id: String,
    pub abi: (u16, u16),
}

/// The function at `$field`, or an error naming it.
macro_rules! function {
    ($raw:expr, $field:ident) => {
        $raw.$field.ok_or_else(|| {
            Error::unsupported(concat!("the plugin does not offer `", stringify!($field), "`"))
        })?
    };
}

/// An argument struct with its header and the given fields.
macro_rules! args {
    ($name:ident { $($field:ident $(: $value:expr)?),* $(,)? }) => {
        $name { struct_size: size_of::<$name>() as u32, reserved: 0, ext: ptr::null_mut(), $($field $(: $value)?),* }
    };
}

fn text(s: &str) -> RawStr {
    RawStr::new(s.as_bytes())
}

fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))
}

/// Reads the document a plugin answered.
fn from_json<T: DeserializeOwned>(what: &str, buffer: &mut RawBuffer) -> Result<T> {
    // SAFETY: an out field: still empty, or filled by the plugin.
    let bytes = unsafe { buffer_from_raw(buffer) };
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::internal(format!("the plugin's {what} is not valid: {e}"))
            .with_hint("the plugin breaks the ABI; `sdrun doctor` shows which file it is")
    })
}

impl Plugin {
    /// Asks the query symbol of a library and checks its answer.
    ///
    /// # Safety
    /// `query` is the `sdrun_plugin_query_v1` of a library that stays loaded for the life of the process.
    pub unsafe fn query(query: QueryFn) -> Result<Self> {
        // SAFETY: the caller's promise.
        let raw = unsafe { query(u32::from(ABI_MINOR), ptr::null()).as_ref() }.ok_or_else(|| {
            Error::precondition(format!("the plugin needs a newer host than ABI {ABI_MAJOR}.{ABI_MINOR}"))
                .with_hint("update sdrun, or install the plugin version that belongs to this sdrun")
        })?;
        if raw.abi_major != ABI_MAJOR
            || raw.abi_minor > ABI_MINOR
            || (raw.struct_size as usize) < size_of::<RawPlugin>()
        {
            return Err(Error::precondition(format!(
                "the plugin speaks ABI {}.{} with a table of {} bytes; this host speaks {ABI_MAJOR}.{ABI_MINOR} with {}",
                raw.abi_major,
                raw.abi_minor,
                raw.struct_size,
                size_of::<RawPlugin>()
            ))
            .with_hint("install the plugin version that belongs to this sdrun"));
        }
        Ok(Plugin { raw })
    }

    /// Who the plugin says it is.
    pub fn identity(&self) -> PluginIdentity {
        // SAFETY: the strings of a table are static.
        unsafe {
            PluginIdentity {
                id: self.raw.id.text(),
                vendor: self.raw.vendor.text(),
                version: self.raw.version.text(),
                build_id: self.raw.build_id.text(),
                abi: (self.raw.abi_major, self.raw.abi_minor),
            }
        }
    }
}

// In all calls below, SAFETY rests on the same facts: the function belongs to the plugin's table, the argument
// struct is ours and complete, what it points to outlives the call, and handles are live ones of this plugin.

impl Provider for Plugin {
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        let (config, call) = (to_json(config)?, function!(self.raw, init));
        with_host(host, |host| {
            let mut a = args!(InitArgs { config: text(&config), host, runtime: RawBuffer::EMPTY });
            // SAFETY: see above.
            unsafe { error_from_raw(call(&mut a))? };
            from_json("runtime information", &mut a.runtime)
        })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let mut a = args!(DevicesArgs { devices: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.raw, devices)(&mut a))? };
        from_json("device list", &mut a.devices)
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        let mut a = args!(CapabilitiesArgs { device: text(device), capabilities: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.raw, capabilities)(&mut a))? };
        from_json("capabilities", &mut a.capabilities)
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let (spec, call) = (to_json(spec)?, function!(self.raw, build));
        let handle = with_host(host, |host| {
            with_source(weights, |weights| {
                let mut a = args!(BuildArgs {
                    model: RawStr::new(model),
                    spec: text(&spec),
                    weights,
                    host,
                    engine: ptr::null_mut(),
                });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a))? };
                Ok(a.engine)
            })
        })?;
        engine_of(self.raw, handle)
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let (spec, call) = (to_json(spec)?, function!(self.raw, engine_load));
        let handle = with_host(host, |host| {
            let mut a = args!(EngineLoadArgs {
                payload: RawStr::new(payload),
                spec: text(&spec),
                host,
                engine: ptr::null_mut(),
            });
            // SAFETY: see above.
            unsafe { error_from_raw(call(&mut a))? };
            Ok(a.engine)
        })?;
        engine_of(self.raw, handle)
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        let mut a = args!(EngineCheckArgs {
            compatibility: text(compatibility),
            device: text(device),
            verdict: RawBuffer::EMPTY,
        });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.raw, engine_check)(&mut a))? };
        from_json("verdict", &mut a.verdict)
    }
}

/// The engine a call answered with.
fn engine_of(raw: &'static RawPlugin, handle: *mut c_void) -> Result<Box<dyn Engine>> {
    if handle.is_null() {
        return Err(Error::internal("the plugin answered success without an engine"));
    }
    let mut engine = PluginEngine {
        raw,
        handle,
        info: EngineInfo { inputs: vec![], outputs: vec![], weights: vec![], compatibility: String::new() },
    };
    let mut a = args!(EngineInfoArgs { engine: handle, info: RawBuffer::EMPTY });
    // SAFETY: a live engine of this plugin.
    unsafe { error_from_raw(function!(raw, engine_info)(&mut a))? };
    engine.info = from_json("engine information", &mut a.info)?;
    Ok(Box::new(engine))
}

struct PluginEngine {
    raw: &'static RawPlugin,
    handle: *mut c_void,
    info: EngineInfo,
}

// SAFETY: the ABI lets every engine call come from any thread.
unsafe impl Send for PluginEngine {}
// SAFETY: as above; calls on an engine may overlap.
unsafe impl Sync for PluginEngine {}

impl Drop for PluginEngine {
    fn drop(&mut self) {
        if let Some(destroy) = self.raw.engine_destroy {
            // SAFETY: a live engine, destroyed once.
            unsafe { destroy(self.handle) }
        }
    }
}

impl Engine for PluginEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let mut a = args!(EngineSerializeArgs { engine: self.handle, payload: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe {
            error_from_raw(function!(self.raw, engine_serialize)(&mut a))?;
            Ok(buffer_from_raw(&mut a.payload))
        }
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let call = function!(self.raw, engine_bake);
        let handle = with_host(host, |host| {
            with_source(weights, |weights| {
                let mut a =
                    args!(EngineBakeArgs { engine: self.handle, weights, host, baked: ptr::null_mut() });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a))? };
                Ok(a.baked)
            })
        })?;
        engine_of(self.raw, handle)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let call = function!(self.raw, session_create);
        let handle = with_host(host, |host| {
            with_source(weights, |weights| {
                let mut a =
                    args!(SessionCreateArgs { engine: self.handle, weights, host, session: ptr::null_mut() });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a))? };
                Ok(a.session)
            })
        })?;
        if handle.is_null() {
            return Err(Error::internal("the plugin answered success without a session"));
        }
        Ok(Box::new(PluginSession { raw: self.raw, handle }))
    }
}

/// The plugin's table for tensors on devices.
fn device_tensors(raw: &RawPlugin) -> Result<&'static RawDeviceTensors> {
    // SAFETY: the plugin's own function; a table it answers is static.
    let table = raw
        .get_extension
        .and_then(|get| unsafe { get(text(DEVICE_TENSORS)).cast::<RawDeviceTensors>().as_ref() });
    table.filter(|table| table.struct_size as usize >= size_of::<RawDeviceTensors>()).ok_or_else(|| {
        Error::unsupported("the plugin cannot leave tensors on its device")
            .with_hint("run it with tensors in main memory")
    })
}

fn dims(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|d| *d as u64).collect()
}

fn raw_tensor(dtype: DType, dims: &[u64], data: &[u8]) -> RawTensor {
    RawTensor {
        dtype: dtype as u32,
        reserved: 0,
        rank: dims.len(),
        dims: dims.as_ptr(),
        data: data.as_ptr(),
        len: data.len(),
    }
}

struct PluginTensor {
    raw: &'static RawPlugin,
    table: &'static RawDeviceTensors,
    handle: *mut c_void,
    spec: OutputSpec,
}

// SAFETY: the ABI lets calls on a tensor come from any thread.
unsafe impl Send for PluginTensor {}
// SAFETY: as above; they may overlap.
unsafe impl Sync for PluginTensor {}

impl PluginTensor {
    /// The tensor, where it is one of the same plugin.
    fn of<'t>(tensor: &'t dyn DeviceTensor, raw: &'static RawPlugin) -> Result<&'t Self> {
        tensor.downcast_ref::<Self>().filter(|tensor| ptr::eq(tensor.raw, raw)).ok_or_else(|| {
            Error::invalid("a tensor on a device of another provider cannot be an input")
                .with_hint("copy it to main memory")
        })
    }

    /// # Safety
    /// `made` is what a run has answered, taken over once.
    unsafe fn from_raw(
        raw: &'static RawPlugin,
        table: &'static RawDeviceTensors,
        made: &RawDeviceTensor,
    ) -> Result<Self> {
        if made.tensor.is_null() {
            return Err(Error::internal("the plugin answered success without a tensor that was to stay"));
        }
        // SAFETY: the caller's promise; `dims` lives as long as the tensor.
        let shape = unsafe { shape_from_raw(made.dims, made.rank) };
        let spec = OutputSpec { dtype: DType::F32, shape };
        let mut tensor = PluginTensor { raw, table, handle: made.tensor, spec };
        tensor.spec.dtype = DType::from_onnx(made.dtype as i32).ok_or_else(|| {
            Error::internal(format!("a device tensor has the unknown dtype {}", made.dtype))
        })?;
        Ok(tensor)
    }
}

impl Drop for PluginTensor {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.destroy {
            // SAFETY: a live tensor, destroyed once.
            unsafe { destroy(self.handle) }
        }
    }
}

impl DeviceTensor for PluginTensor {
    fn spec(&self) -> &OutputSpec {
        &self.spec
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let mut a =
            args!(TensorReadArgs { tensor: self.handle, bytes: bytes.as_mut_ptr(), len: bytes.len() });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.table, read)(&mut a)) }
    }
}

struct PluginSession {
    raw: &'static RawPlugin,
    handle: *mut c_void,
}

// SAFETY: the ABI lets session calls come from any thread, one at a time (`&mut self`).
unsafe impl Send for PluginSession {}

impl Drop for PluginSession {
    fn drop(&mut self) {
        if let Some(destroy) = self.raw.session_destroy {
            // SAFETY: a live session, destroyed once.
            unsafe { destroy(self.handle) }
        }
    }
}

/// Holds a plugin to "exactly once".
struct CheckedSink<'a> {
    sink: &'a mut dyn OutputSink,
    calls: usize,
}

impl OutputSink for CheckedSink<'_> {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        self.calls += 1;
        if self.calls > 1 {
            return Err(Error::internal("the plugin asked twice for output buffers in one run"));
        }
        self.sink.allocate(outputs)
    }
}

impl Session for PluginSession {
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let call = function!(self.raw, session_refit);
        let names: Vec<RawStr> = changed.iter().map(|n| text(n)).collect();
        with_host(host, |host| {
            with_source(weights, |weights| {
                let mut a = args!(SessionRefitArgs {
                    session: self.handle,
                    changed: names.as_ptr(),
                    changed_count: names.len(),
                    weights,
                    host,
                    report: RawBuffer::EMPTY,
                });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a))? };
                from_json("refit report", &mut a.report)
            })
        })
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        let call = function!(self.raw, session_run);
        let dims: Vec<_> = inputs.iter().map(|t| dims(t.shape)).collect();
        let tensors: Vec<_> =
            inputs.iter().zip(&dims).map(|(t, dims)| raw_tensor(t.dtype, dims, t.data)).collect();
        let mut checked = CheckedSink { sink: outputs, calls: 0 };
        with_host(host, |host| {
            with_sink(&mut checked, |sink| {
                let mut a = args!(SessionRunArgs {
                    session: self.handle,
                    inputs: tensors.as_ptr(),
                    input_count: tensors.len(),
                    sink,
                    host,
                });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a)) }
            })
        })?;
        if checked.calls == 0 {
            return Err(Error::internal("the plugin finished a run without any output"));
        }
        Ok(())
    }

    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        let table = device_tensors(self.raw)?;
        let call = function!(table, run);
        let dims: Vec<_> = inputs.iter().map(|input| dims(input.spec().1)).collect();
        let mut tensors = Vec::with_capacity(inputs.len());
        let mut handles = Vec::with_capacity(inputs.len());
        for (input, dims) in inputs.iter().zip(&dims) {
            let (handle, data) = match input {
                Input::Host(view) => (ptr::null_mut(), view.data),
                Input::Device(tensor) => (PluginTensor::of(*tensor, self.raw)?.handle, &[][..]),
            };
            handles.push(handle);
            tensors.push(raw_tensor(input.spec().0, dims, data));
        }
        let keep: Vec<u8> = keep.iter().map(|keep| u8::from(*keep)).collect();
        let nothing =
            || RawDeviceTensor { tensor: ptr::null_mut(), dtype: 0, reserved: 0, rank: 0, dims: ptr::null() };
        let mut kept: Vec<RawDeviceTensor> = keep.iter().map(|_| nothing()).collect();
        let mut checked = CheckedSink { sink: outputs, calls: 0 };
        with_host(host, |host| {
            with_sink(&mut checked, |sink| {
                let mut a = args!(SessionRunOnDeviceArgs {
                    session: self.handle,
                    inputs: tensors.as_ptr(),
                    tensors: handles.as_ptr(),
                    input_count: tensors.len(),
                    keep: keep.as_ptr(),
                    kept: kept.as_mut_ptr(),
                    output_count: keep.len(),
                    sink,
                    host,
                });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a)) }
            })
        })?;
        // All are owned before the first is looked at.
        let kept: Vec<_> = kept
            .iter()
            .zip(keep)
            .filter(|(_, keep)| *keep != 0)
            // SAFETY: the plugin's answer to this call.
            .map(|(made, _)| unsafe { PluginTensor::from_raw(self.raw, table, made) })
            .collect();
        if checked.calls == 0 {
            return Err(Error::internal("the plugin finished a run without any output"));
        }
        kept.into_iter().map(|tensor| Ok(Box::new(tensor?) as Box<dyn DeviceTensor>)).collect()
    }

    fn memory(&self) -> Result<MemoryReport> {
        let mut a = args!(SessionMemoryArgs { session: self.handle, report: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.raw, session_memory)(&mut a))? };
        from_json("memory report", &mut a.report)
    }
}
