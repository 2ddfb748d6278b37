//! The plugin's side: a C table over a [`Provider`], created by [`export_provider!`].
//!
//! [`export_provider!`]: crate::export_provider

use super::{
    callbacks::*,
    prefix::{self, Prefixed},
    raw::*,
};
use crate::{
    ABI_MAJOR, ABI_MINOR, DType, DeviceTensor, Engine, Error, Hint, Input, OutputSpec, Provider, Result,
    Session, TensorView,
};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// Turns a crate into a plugin: exports `sdrun_plugin_query_v1` over a provider.
///
/// The crate needs a feature `plugin`, on by default. A host that links several providers as rlibs turns it off,
/// because each exports the same symbol name.
///
/// ```ignore
/// sdrun_abi::export_provider! {
///     id: "ggml", vendor: "sdrun", version: env!("CARGO_PKG_VERSION"),
///     build_id: env!("SDRUN_BUILD_ID"), provider: GgmlProvider::default()
/// }
/// ```
#[macro_export]
macro_rules! export_provider {
    (id: $id:expr, vendor: $vendor:expr, version: $version:expr, build_id: $build:expr, provider: $provider:expr $(,)?) => {
        #[doc(hidden)]
        pub struct ExportedPlugin;

        impl $crate::ffi::export::Export for ExportedPlugin {
            fn state() -> &'static $crate::ffi::export::State {
                static STATE: $crate::ffi::export::State =
                    $crate::ffi::export::State::new(|| ::std::boxed::Box::new($provider));
                &STATE
            }
        }

        /// The plugin's only symbol: its function table. It serves hosts of every minor version, because each side
        /// reads only the fields that it knows.
        #[allow(unsafe_code)]
        #[cfg_attr(feature = "plugin", unsafe(no_mangle))]
        pub extern "C" fn sdrun_plugin_query_v1(_max_minor: u32) -> *const $crate::ffi::raw::RawPlugin {
            static PLUGIN: $crate::ffi::raw::RawPlugin =
                $crate::ffi::export::table::<ExportedPlugin>($id, $vendor, $version, $build);
            &PLUGIN
        }
    };
}

/// Where the generic entry points find their provider. Implemented by `export_provider!`.
pub trait Export {
    /// The plugin's state.
    fn state() -> &'static State;
}

/// A provider, and whether it has panicked.
pub struct State {
    provider: LazyLock<Box<dyn Provider>>,
    poisoned: AtomicBool,
}

impl State {
    /// State over the provider that `make` creates on the first call.
    pub const fn new(make: fn() -> Box<dyn Provider>) -> Self {
        State { provider: LazyLock::new(make), poisoned: AtomicBool::new(false) }
    }
}

/// The function table of `E`.
pub const fn table<E: Export>(
    id: &'static str,
    vendor: &'static str,
    version: &'static str,
    build_id: &'static str,
) -> RawPlugin {
    RawPlugin {
        struct_size: size_of::<RawPlugin>() as u32,
        abi_major: ABI_MAJOR,
        abi_minor: ABI_MINOR,
        id: RawStr::new(id.as_bytes()),
        vendor: RawStr::new(vendor.as_bytes()),
        version: RawStr::new(version.as_bytes()),
        build_id: RawStr::new(build_id.as_bytes()),
        init: Some(init::<E>),
        devices: Some(devices::<E>),
        capabilities: Some(capabilities::<E>),
        build: Some(build::<E>),
        engine_load: Some(engine_load::<E>),
        engine_check: Some(engine_check::<E>),
        engine_info: Some(engine_info::<E>),
        engine_serialize: Some(engine_serialize::<E>),
        engine_destroy: Some(engine_destroy),
        engine_bake: Some(engine_bake::<E>),
        session_create: Some(session_create::<E>),
        session_refit: Some(session_refit::<E>),
        session_run: Some(session_run::<E>),
        session_memory: Some(session_memory::<E>),
        session_destroy: Some(session_destroy),
        get_extension: Some(get_extension::<E>),
    }
}

/// Runs an entry point on a copy of the caller's argument struct, and writes the copy back on success. Refuses if the
/// plugin is poisoned or the struct is too short. Contains panics.
///
/// # Safety
/// `args` is null or points to a struct that is not shared and has at least `struct_size` bytes.
unsafe fn enter<E: Export, A: Prefixed>(
    args: *mut A,
    what: &str,
    body: impl FnOnce(&mut A, &dyn Provider) -> Result<()>,
) -> *mut RawError {
    let state = E::state();
    if state.poisoned.load(Relaxed) {
        return error_to_raw(Err(Error::precondition(format!(
            "{what}: the plugin panicked earlier and can no longer be used"
        ))
        .with_hint(Hint::All(vec!["restart the program".into(), Hint::Isolate]))));
    }
    // SAFETY: guaranteed by the caller.
    let mut known = match unsafe { prefix::read_whole(&format!("{what}: the argument struct"), args) } {
        Ok(known) => known,
        Err(error) => return error_to_raw(Err(error)),
    };
    let mut finished = false;
    let result = contain(what, || {
        let result = body(&mut known, state.provider.as_ref());
        finished = true;
        result
    });
    if !finished {
        state.poisoned.store(true, Relaxed);
    }
    if result.is_ok() {
        // SAFETY: guaranteed by the caller.
        unsafe { prefix::write(args, &known) };
    }
    error_to_raw(result)
}

fn json<T: Serialize>(value: &T) -> Result<RawBuffer> {
    serde_json::to_vec(value)
        .map(buffer_to_raw)
        .map_err(|e| Error::internal(format!("cannot write JSON: {e}")))
}

fn parse<T: DeserializeOwned>(what: &str, text: RawStr) -> Result<T> {
    // SAFETY: strings are valid during the call.
    serde_json::from_slice(unsafe { text.bytes() })
        .map_err(|e| Error::invalid(format!("{what} is not valid: {e}")))
}

/// Thin pointers for C.
struct EngineBox(Box<dyn Engine>);
struct SessionBox(Box<dyn Session>);
struct TensorBox {
    tensor: Box<dyn DeviceTensor>,
    dims: Vec<u64>,
}

impl TensorBox {
    /// Passes ownership of the tensor to the host.
    fn into_raw(tensor: Box<dyn DeviceTensor>) -> RawDeviceTensor {
        let spec = tensor.spec();
        let (dtype, dims) = (spec.dtype as u32, spec.shape.iter().map(|d| *d as u64).collect());
        let owned = Box::new(TensorBox { tensor, dims });
        let (rank, dims) = (owned.dims.len(), owned.dims.as_ptr());
        RawDeviceTensor { tensor: Box::into_raw(owned).cast(), dtype, reserved: 0, rank, dims }
    }
}

/// # Safety
/// `handle` came from this plugin and has not been destroyed.
unsafe fn engine<'a>(handle: *mut c_void) -> Result<&'a dyn Engine> {
    // SAFETY: guaranteed by the caller.
    unsafe { handle.cast::<EngineBox>().as_ref() }
        .map(|e| e.0.as_ref())
        .ok_or_else(|| Error::invalid("the engine is null"))
}

/// # Safety
/// `handle` came from this plugin, has not been destroyed, and no other call uses it.
unsafe fn session<'a>(handle: *mut c_void) -> Result<&'a mut dyn Session> {
    // SAFETY: guaranteed by the caller.
    match unsafe { handle.cast::<SessionBox>().as_mut() } {
        Some(s) => Ok(s.0.as_mut()),
        None => Err(Error::invalid("the session is null")),
    }
}

/// # Safety
/// `handle` came from this plugin and has not been destroyed.
unsafe fn tensor<'a>(handle: *mut c_void) -> Result<&'a dyn DeviceTensor> {
    // SAFETY: guaranteed by the caller.
    unsafe { handle.cast::<TensorBox>().as_ref() }
        .map(|t| t.tensor.as_ref())
        .ok_or_else(|| Error::invalid("the device tensor is null"))
}

/// An input: type, shape and bytes.
type Given<'a> = (DType, Vec<usize>, &'a [u8]);

/// # Safety
/// `inputs` points to `count` tensors that live as long as `'a`.
unsafe fn given<'a>(inputs: *const RawTensor, count: usize) -> Result<Vec<Given<'a>>> {
    let one = |i: usize| {
        // SAFETY: guaranteed by the caller.
        let (t, shape, data) = unsafe {
            let t = &*inputs.add(i);
            (t, shape_from_raw(t.dims, t.rank), RawStr { ptr: t.data, len: t.len }.bytes())
        };
        let dtype = dtype_from_raw(t.dtype, || format!("input {i}"))?;
        Ok((dtype, shape, data))
    };
    (0..count).map(one).collect()
}

fn view<'a>((dtype, shape, data): &'a Given<'_>) -> TensorView<'a> {
    TensorView { dtype: *dtype, shape, data }
}

/// Declares the C entry points: `name<E>(args: Type) |a, provider| body`.
macro_rules! entries {
    ($($name:ident($args:ty) |$a:ident, $provider:ident| $body:block)*) => {$(
        unsafe extern "C" fn $name<E: Export>(args: *mut $args) -> *mut RawError {
            let body = |$a: &mut $args, $provider: &dyn Provider| {
                // SAFETY: the host guarantees that pointers in argument structs are valid during the call, and that
                // handles are live ones of this plugin.
                #[allow(unused_unsafe)]
                unsafe {
                    $body
                }
            };
            // SAFETY: the host passes its own argument struct.
            unsafe { enter::<E, $args>(args, stringify!($name), body) }
        }
    )*};
}

entries! {
    init(InitArgs) |a, provider| {
        let config = parse("the init configuration", a.config)?;
        a.runtime = json(&provider.init(&config, &ForeignHost::new(a.host))?)?;
        Ok(())
    }
    devices(DevicesArgs) |a, provider| {
        a.devices = json(&provider.devices()?)?;
        Ok(())
    }
    capabilities(CapabilitiesArgs) |a, provider| {
        a.capabilities = json(&provider.capabilities(&a.device.text())?)?;
        Ok(())
    }
    build(BuildArgs) |a, provider| {
        let spec = parse("the build specification", a.spec)?;
        let (weights, host) = (ForeignSource::new(a.weights), ForeignHost::new(a.host));
        let engine = provider.build(a.model.bytes(), &spec, &weights, &host)?;
        a.engine = Box::into_raw(Box::new(EngineBox(engine))).cast();
        Ok(())
    }
    engine_load(EngineLoadArgs) |a, provider| {
        let spec = parse("the build specification", a.spec)?;
        let engine = provider.load(a.payload.bytes(), &spec, &ForeignHost::new(a.host))?;
        a.engine = Box::into_raw(Box::new(EngineBox(engine))).cast();
        Ok(())
    }
    assess(AssessArgs) |a, provider| {
        let spec = parse("the build specification", a.spec)?;
        a.assessment = json(&provider.assess(a.model.bytes(), &spec)?)?;
        Ok(())
    }
    engine_check(EngineCheckArgs) |a, provider| {
        a.verdict = json(&provider.check(&a.compatibility.text(), &a.device.text())?)?;
        Ok(())
    }
    engine_info(EngineInfoArgs) |a, _provider| {
        a.info = json(engine(a.engine)?.info())?;
        Ok(())
    }
    engine_serialize(EngineSerializeArgs) |a, _provider| {
        a.payload = buffer_to_raw(engine(a.engine)?.serialize()?);
        Ok(())
    }
    engine_bake(EngineBakeArgs) |a, _provider| {
        let (weights, host) = (ForeignSource::new(a.weights), ForeignHost::new(a.host));
        let baked = engine(a.engine)?.bake(&weights, &host)?;
        a.baked = Box::into_raw(Box::new(EngineBox(baked))).cast();
        Ok(())
    }
    session_create(SessionCreateArgs) |a, _provider| {
        let (weights, host) = (ForeignSource::new(a.weights), ForeignHost::new(a.host));
        let session = engine(a.engine)?.session(&weights, &host)?;
        a.session = Box::into_raw(Box::new(SessionBox(session))).cast();
        Ok(())
    }
    session_refit(SessionRefitArgs) |a, _provider| {
        let names: Vec<String> = (0..a.changed_count).map(|i| (*a.changed.add(i)).text()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (weights, host) = (ForeignSource::new(a.weights), ForeignHost::new(a.host));
        a.report = json(&session(a.session)?.refit(&names, &weights, &host)?)?;
        Ok(())
    }
    session_run(SessionRunArgs) |a, _provider| {
        let inputs = given(a.inputs, a.input_count)?;
        let inputs: Vec<TensorView> = inputs.iter().map(view).collect();
        session(a.session)?.run(&inputs, &mut ForeignSink::new(a.sink), &ForeignHost::new(a.host))
    }
    session_run_on_device(SessionRunOnDeviceArgs) |a, _provider| {
        let inputs = given(a.inputs, a.input_count)?;
        let input = |(i, bytes)| match *a.tensors.add(i) {
            handle if handle.is_null() => Ok(Input::Host(view(bytes))),
            handle => tensor(handle).map(Input::Device),
        };
        let inputs = inputs.iter().enumerate().map(input).collect::<Result<Vec<_>>>()?;
        let keep: Vec<bool> = (0..a.output_count).map(|i| *a.keep.add(i) != 0).collect();
        let (mut sink, host) = (ForeignSink::new(a.sink), ForeignHost::new(a.host));
        let tensors = session(a.session)?.run_on_device(&inputs, &keep, &mut sink, &host)?;
        let places: Vec<usize> = (0..keep.len()).filter(|i| keep[*i]).collect();
        if places.len() != tensors.len() {
            let (kept, asked) = (tensors.len(), places.len());
            return Err(Error::internal(format!("the run kept {kept} outputs on the device instead of {asked}")));
        }
        for (place, tensor) in places.into_iter().zip(tensors) {
            a.kept.add(place).write(TensorBox::into_raw(tensor));
        }
        Ok(())
    }
    tensor_read(TensorReadArgs) |a, _provider| {
        let tensor = tensor(a.tensor)?;
        let spec = tensor.spec();
        if spec.dtype.bytes_of(&spec.shape) != Some(a.len) {
            let (len, OutputSpec { dtype, shape }) = (a.len, spec);
            return Err(Error::invalid(format!("{len} bytes do not match a {dtype} tensor of shape {shape:?}")));
        }
        match a.len {
            0 => Ok(()),
            len => tensor.read(std::slice::from_raw_parts_mut(a.bytes, len)),
        }
    }
    session_memory(SessionMemoryArgs) |a, _provider| {
        a.report = json(&session(a.session)?.memory()?)?;
        Ok(())
    }
}

unsafe extern "C" fn engine_destroy(handle: *mut c_void) {
    if !handle.is_null() {
        // SAFETY: a live engine of this plugin, destroyed once. A panicking destructor must not unwind into C.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(handle.cast::<EngineBox>()) })));
    }
}

unsafe extern "C" fn session_destroy(handle: *mut c_void) {
    if !handle.is_null() {
        // SAFETY: a live session of this plugin, destroyed once.
        let _ =
            catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(handle.cast::<SessionBox>()) })));
    }
}

unsafe extern "C" fn tensor_destroy(handle: *mut c_void) {
    if !handle.is_null() {
        // SAFETY: a live tensor of this plugin, destroyed once.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(handle.cast::<TensorBox>()) })));
    }
}

unsafe extern "C" fn get_extension<E: Export>(id: RawStr) -> *const c_void {
    let device_tensors = const {
        &RawDeviceTensors {
            struct_size: size_of::<RawDeviceTensors>() as u32,
            reserved: 0,
            run: Some(session_run_on_device::<E>),
            read: Some(tensor_read::<E>),
            destroy: Some(tensor_destroy),
        }
    };
    let assess = const {
        &RawAssess { struct_size: size_of::<RawAssess>() as u32, reserved: 0, assess: Some(assess::<E>) }
    };
    // SAFETY: strings are valid during the call.
    match unsafe { id.bytes() } {
        id if id == DEVICE_TENSORS.as_bytes() => (&raw const *device_tensors).cast(),
        id if id == ASSESS.as_bytes() => (&raw const *assess).cast(),
        _ => ptr::null(),
    }
}
