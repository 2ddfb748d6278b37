//! `#[repr(C)]` structs, exactly as `docs/provider-spec.md` lists them. Fields are only ever appended;
//! the assertions at the end of the file stop a build in which a size or an offset has moved.
//!
//! Every call takes a pointer to one argument struct whose first fields are `struct_size` and `ext`, and
//! returns null or an [`RawError`] that the receiver releases. A callee reads only what lies inside
//! `struct_size`. Strings are UTF-8, pointer and length, and valid during the call.
#![allow(missing_docs)]

use std::ffi::c_void;

/// UTF-8 text or plain bytes that the receiver does not own.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawStr {
    pub ptr: *const u8,
    pub len: usize,
}

/// A link of an extension chain.
#[repr(C)]
pub struct RawExt {
    pub struct_size: u32,
    pub kind: u32,
    pub next: *mut RawExt,
}

/// An error as a value. `release` frees it, on whichever side made it.
#[repr(C)]
pub struct RawError {
    pub struct_size: u32,
    pub code: u32,
    pub message: RawStr,
    pub hint: RawStr,
    pub native_code: RawStr,
    pub file: RawStr,
    pub owner: *mut c_void,
    pub release: Option<unsafe extern "C" fn(*mut RawError)>,
}

/// Bytes made by a plugin (a JSON document, an engine). `release` frees them; it may be called on a zeroed buffer.
#[repr(C)]
pub struct RawBuffer {
    pub ptr: *const u8,
    pub len: usize,
    pub owner: *mut c_void,
    pub release: Option<unsafe extern "C" fn(*mut RawBuffer)>,
}

/// What a plugin may call. All functions: any thread.
#[repr(C)]
pub struct RawHost {
    pub struct_size: u32,
    pub reserved: u32,
    pub ctx: *const c_void,
    pub log: Option<unsafe extern "C" fn(ctx: *const c_void, level: u32, target: RawStr, message: RawStr)>,
    /// Returns 0 to continue, 1 to cancel.
    pub progress:
        Option<unsafe extern "C" fn(ctx: *const c_void, phase: RawStr, step: u64, total: u64) -> i32>,
    /// Returns 1 once the call should stop.
    pub cancelled: Option<unsafe extern "C" fn(ctx: *const c_void) -> i32>,
}

/// One tensor delivered by a weight source. Valid until handed to `release`.
#[repr(C)]
pub struct RawWeight {
    pub struct_size: u32,
    pub dtype: u32,
    pub rank: usize,
    pub dims: *const u64,
    pub data: *const u8,
    pub len: usize,
    /// Path of a file that holds the same bytes at `offset`; empty where there is none.
    pub file: RawStr,
    pub offset: u64,
    pub owner: *mut c_void,
}

/// Named weights, pulled by the plugin. Both functions: any thread.
#[repr(C)]
pub struct RawWeightSource {
    pub struct_size: u32,
    pub reserved: u32,
    pub ctx: *const c_void,
    pub get:
        Option<unsafe extern "C" fn(ctx: *const c_void, name: RawStr, out: *mut RawWeight) -> *mut RawError>,
    pub release: Option<unsafe extern "C" fn(ctx: *const c_void, weight: *mut RawWeight)>,
}

/// A borrowed tensor, 64-byte aligned.
#[repr(C)]
pub struct RawTensor {
    pub dtype: u32,
    pub reserved: u32,
    pub rank: usize,
    pub dims: *const u64,
    pub data: *const u8,
    pub len: usize,
}

/// An output that stays on its device. `dims` lives as long as the tensor, which `RawDeviceTensors::destroy` ends.
#[repr(C)]
pub struct RawDeviceTensor {
    pub tensor: *mut c_void,
    pub dtype: u32,
    pub reserved: u32,
    pub rank: usize,
    pub dims: *const u64,
}

/// Type and shape of one output.
#[repr(C)]
pub struct RawOutputSpec {
    pub dtype: u32,
    pub reserved: u32,
    pub rank: usize,
    pub dims: *const u64,
}

/// Where a run puts its outputs. Called by the thread that runs.
#[repr(C)]
pub struct RawOutputSink {
    pub struct_size: u32,
    pub reserved: u32,
    pub ctx: *mut c_void,
    /// Fills `buffers[0..count]`; called once in a run.
    pub allocate: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            specs: *const RawOutputSpec,
            count: usize,
            buffers: *mut *mut u8,
        ) -> *mut RawError,
    >,
}

macro_rules! args {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $t:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        pub struct $name {
            pub struct_size: u32,
            pub reserved: u32,
            pub ext: *mut RawExt,
            $(pub $field: $t,)*
        }
    )*};
}

args! {
    /// in: config (JSON `InitConfig`), host. out: runtime (JSON `RuntimeInfo`).
    InitArgs { config: RawStr, host: *const RawHost, runtime: RawBuffer }
    /// out: devices (JSON list of `Device`).
    DevicesArgs { devices: RawBuffer }
    /// in: device id. out: capabilities (JSON `Capabilities`).
    CapabilitiesArgs { device: RawStr, capabilities: RawBuffer }
    /// in: model (ONNX bytes), spec (JSON `BuildSpec`), weights, host. out: engine.
    BuildArgs { model: RawStr, spec: RawStr, weights: *const RawWeightSource, host: *const RawHost, engine: *mut c_void }
    /// in: payload, spec (JSON `BuildSpec`), host. out: engine.
    EngineLoadArgs { payload: RawStr, spec: RawStr, host: *const RawHost, engine: *mut c_void }
    /// in: compatibility string, device id. out: verdict (JSON `Compatibility`).
    EngineCheckArgs { compatibility: RawStr, device: RawStr, verdict: RawBuffer }
    /// in: engine. out: info (JSON `EngineInfo`).
    EngineInfoArgs { engine: *mut c_void, info: RawBuffer }
    /// in: engine. out: payload.
    EngineSerializeArgs { engine: *mut c_void, payload: RawBuffer }
    /// in: engine, weights, host. out: engine with these weights inside.
    EngineBakeArgs { engine: *mut c_void, weights: *const RawWeightSource, host: *const RawHost, baked: *mut c_void }
    /// in: engine, weights, host. out: session.
    SessionCreateArgs { engine: *mut c_void, weights: *const RawWeightSource, host: *const RawHost, session: *mut c_void }
    /// in: session, names of changed weights, weights, host. out: report (JSON `RefitReport`).
    SessionRefitArgs { session: *mut c_void, changed: *const RawStr, changed_count: usize, weights: *const RawWeightSource, host: *const RawHost, report: RawBuffer }
    /// in: session, inputs, sink, host.
    SessionRunArgs { session: *mut c_void, inputs: *const RawTensor, input_count: usize, sink: *const RawOutputSink, host: *const RawHost }
    /// in: session; inputs, each with a device tensor or, where that is null, bytes; for each output whether it stays
    /// (1); sink for those that do not; host. out: `kept`, room for each output, filled where it stays.
    SessionRunOnDeviceArgs { session: *mut c_void, inputs: *const RawTensor, tensors: *const *mut c_void, input_count: usize, keep: *const u8, kept: *mut RawDeviceTensor, output_count: usize, sink: *const RawOutputSink, host: *const RawHost }
    /// in: device tensor, room for its bytes.
    TensorReadArgs { tensor: *mut c_void, bytes: *mut u8, len: usize }
    /// in: session. out: report (JSON `MemoryReport`).
    SessionMemoryArgs { session: *mut c_void, report: RawBuffer }
}

/// A plugin: what `sdrun_plugin_query_v1` answers. The first four fields never change.
/// All calls: any thread; calls on one session never overlap; destroy is never concurrent with another call on the same object.
#[repr(C)]
pub struct RawPlugin {
    pub struct_size: u32,
    pub abi_major: u16,
    pub abi_minor: u16,
    pub ext: *mut RawExt,
    pub id: RawStr,
    pub vendor: RawStr,
    pub version: RawStr,
    /// Hash of the plugin's sources: part of every cache key.
    pub build_id: RawStr,
    pub init: Option<unsafe extern "C" fn(*mut InitArgs) -> *mut RawError>,
    pub shutdown: Option<unsafe extern "C" fn() -> *mut RawError>,
    pub devices: Option<unsafe extern "C" fn(*mut DevicesArgs) -> *mut RawError>,
    pub capabilities: Option<unsafe extern "C" fn(*mut CapabilitiesArgs) -> *mut RawError>,
    pub build: Option<unsafe extern "C" fn(*mut BuildArgs) -> *mut RawError>,
    pub engine_load: Option<unsafe extern "C" fn(*mut EngineLoadArgs) -> *mut RawError>,
    pub engine_check: Option<unsafe extern "C" fn(*mut EngineCheckArgs) -> *mut RawError>,
    pub engine_info: Option<unsafe extern "C" fn(*mut EngineInfoArgs) -> *mut RawError>,
    pub engine_serialize: Option<unsafe extern "C" fn(*mut EngineSerializeArgs) -> *mut RawError>,
    pub engine_bake: Option<unsafe extern "C" fn(*mut EngineBakeArgs) -> *mut RawError>,
    pub engine_destroy: Option<unsafe extern "C" fn(engine: *mut c_void)>,
    pub session_create: Option<unsafe extern "C" fn(*mut SessionCreateArgs) -> *mut RawError>,
    pub session_refit: Option<unsafe extern "C" fn(*mut SessionRefitArgs) -> *mut RawError>,
    pub session_run: Option<unsafe extern "C" fn(*mut SessionRunArgs) -> *mut RawError>,
    pub session_memory: Option<unsafe extern "C" fn(*mut SessionMemoryArgs) -> *mut RawError>,
    pub session_destroy: Option<unsafe extern "C" fn(session: *mut c_void)>,
    /// String-named extensions of the plugin; null for an unknown name.
    pub get_extension: Option<unsafe extern "C" fn(id: RawStr) -> *const c_void>,
}

/// Name of the extension whose table is [`RawDeviceTensors`].
pub const DEVICE_TENSORS: &str = "sdrun.device_tensors";

/// Tensors that stay on their device: what [`RawPlugin::get_extension`] answers to [`DEVICE_TENSORS`].
#[repr(C)]
pub struct RawDeviceTensors {
    pub struct_size: u32,
    pub reserved: u32,
    pub run: Option<unsafe extern "C" fn(*mut SessionRunOnDeviceArgs) -> *mut RawError>,
    /// Calls on one tensor may overlap, also with runs that have it as their input.
    pub read: Option<unsafe extern "C" fn(*mut TensorReadArgs) -> *mut RawError>,
    pub destroy: Option<unsafe extern "C" fn(tensor: *mut c_void)>,
}

// SAFETY: a plugin table is immutable once published and points to functions and static strings only.
unsafe impl Sync for RawPlugin {}
// SAFETY: as above.
unsafe impl Send for RawPlugin {}

/// Type of the exported symbol. `max_minor` is the newest minor version the host speaks; the answer's
/// `abi_minor` is at most that, or the answer is null. `host` may be null and is valid during the call.
pub type QueryFn = unsafe extern "C" fn(max_minor: u32, host: *const RawHost) -> *const RawPlugin;

impl RawStr {
    /// An empty string.
    pub const EMPTY: RawStr = RawStr { ptr: std::ptr::null(), len: 0 };
    /// Borrows `bytes`.
    pub const fn new(bytes: &[u8]) -> Self {
        RawStr { ptr: bytes.as_ptr(), len: bytes.len() }
    }
    /// The bytes.
    ///
    /// # Safety
    /// `ptr` and `len` describe readable memory that outlives `'a`, or `len` is zero.
    pub unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 || self.ptr.is_null() {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
    /// The text, with invalid UTF-8 replaced.
    ///
    /// # Safety
    /// As [`RawStr::bytes`].
    pub unsafe fn text(self) -> String {
        // SAFETY: the caller's promise.
        String::from_utf8_lossy(unsafe { self.bytes() }).into_owned()
    }
}

impl RawBuffer {
    /// Nothing; what an out field holds before the call.
    pub const EMPTY: RawBuffer =
        RawBuffer { ptr: std::ptr::null(), len: 0, owner: std::ptr::null_mut(), release: None };
}

/// Size and last offset of every struct on 64-bit targets. A moved field stops the build here.
#[cfg(target_pointer_width = "64")]
mod layout {
    use super::*;
    use std::mem::offset_of;

    macro_rules! layout {
        ($($t:ident: $size:literal, $last:ident @ $offset:literal;)*) => {$(
            const _: () = assert!(size_of::<$t>() == $size && offset_of!($t, $last) == $offset, stringify!($t));
        )*};
    }

    layout! {
        RawStr: 16, len @ 8;
        RawExt: 16, next @ 8;
        RawError: 88, release @ 80;
        RawBuffer: 32, release @ 24;
        RawHost: 40, cancelled @ 32;
        RawWeight: 72, owner @ 64;
        RawWeightSource: 32, release @ 24;
        RawTensor: 40, len @ 32;
        RawDeviceTensor: 32, dims @ 24;
        RawOutputSpec: 24, dims @ 16;
        RawOutputSink: 24, allocate @ 16;
        InitArgs: 72, runtime @ 40;
        DevicesArgs: 48, devices @ 16;
        CapabilitiesArgs: 64, capabilities @ 32;
        BuildArgs: 72, engine @ 64;
        EngineLoadArgs: 64, engine @ 56;
        EngineCheckArgs: 80, verdict @ 48;
        EngineInfoArgs: 56, info @ 24;
        EngineSerializeArgs: 56, payload @ 24;
        EngineBakeArgs: 48, baked @ 40;
        SessionCreateArgs: 48, session @ 40;
        SessionRefitArgs: 88, report @ 56;
        SessionRunArgs: 56, host @ 48;
        SessionRunOnDeviceArgs: 88, host @ 80;
        TensorReadArgs: 40, len @ 32;
        SessionMemoryArgs: 56, report @ 24;
        RawDeviceTensors: 32, destroy @ 24;
        RawPlugin: 216, get_extension @ 208;
    }
    const _: () = assert!(offset_of!(RawPlugin, abi_major) == 4 && offset_of!(RawPlugin, ext) == 8);
    const _: () = assert!(offset_of!(InitArgs, ext) == 8 && offset_of!(SessionRunArgs, ext) == 8);
}
