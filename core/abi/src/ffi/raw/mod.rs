//! The C structs of the plugin ABI. `include/sdrun_provider.h` is generated from this folder, and
//! `docs/provider-spec.md` has the rules.
//!
//! Every struct that can grow starts with `struct_size`: its size in bytes in the version of the side that created
//! it. Fields are only appended. A reader copies the bytes that both sides know and sets the rest to zero
//! ([`prefix`]), so plugins and hosts of different minor versions work together. Structs without `struct_size`
//! (strings, buffers and array elements) never change.
//!
//! [`prefix`]: super::prefix
#![allow(missing_docs)]

mod args;
mod layout;

pub use args::*;

use std::ffi::c_void;

/// UTF-8 text or raw bytes that the receiver does not own. Valid during the call. Not zero-terminated.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawStr {
    pub ptr: *const u8,
    pub len: usize,
}

/// An error as a value. The receiver calls `release` once, if it is not null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawError {
    pub struct_size: u32,
    /// One of the canonical codes: 1 cancelled, 2 unknown, 3 invalid argument, 4 deadline exceeded, 5 not found,
    /// 6 already exists, 7 permission denied, 8 resource exhausted, 9 failed precondition, 10 aborted,
    /// 11 out of range, 12 unimplemented, 13 internal, 14 unavailable, 15 data loss.
    pub code: u32,
    /// One sentence: what, where, why.
    pub message: RawStr,
    /// What to do about it: a sentence, or a JSON object that starts with `{` (see `Hint`). May be empty.
    pub hint: RawStr,
    /// The vendor's own error code. May be empty.
    pub native_code: RawStr,
    /// The file at fault. May be empty.
    pub file: RawStr,
    pub owner: *mut c_void,
    pub release: Option<unsafe extern "C" fn(error: *mut RawError)>,
}

/// Bytes that a plugin allocated (a JSON document, an engine). The host calls `release` once, if it is not null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawBuffer {
    pub ptr: *const u8,
    pub len: usize,
    pub owner: *mut c_void,
    pub release: Option<unsafe extern "C" fn(buffer: *mut RawBuffer)>,
}

/// The host's functions, valid during one call. Any thread may call them until the call returns. They must not call
/// back into the plugin.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawHost {
    pub struct_size: u32,
    pub reserved: u32,
    pub ctx: *const c_void,
    /// `level`: 0 trace, 1 debug, 2 info, 3 warning, 4 error, 5 the plugin breaks a rule, 6 the host breaks a rule.
    pub log: Option<unsafe extern "C" fn(ctx: *const c_void, level: u32, target: RawStr, message: RawStr)>,
    /// Returns 0 to continue, 1 to cancel. A `total` of 0 means unknown.
    pub progress:
        Option<unsafe extern "C" fn(ctx: *const c_void, phase: RawStr, step: u64, total: u64) -> i32>,
    /// Returns 1 if the call should stop.
    pub cancelled: Option<unsafe extern "C" fn(ctx: *const c_void) -> i32>,
}

/// A weight from a source: contiguous, little-endian, row-major. Valid until `release` is called.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawWeight {
    pub struct_size: u32,
    /// Element type, a number of ONNX's `TensorProto.DataType`; 0 if `encoding` is not empty.
    pub dtype: u32,
    pub rank: usize,
    pub dims: *const u64,
    pub data: *const u8,
    pub len: usize,
    /// Path of a file that holds the same bytes at `offset`; empty if there is none.
    pub file: RawStr,
    pub offset: u64,
    pub owner: *mut c_void,
    /// Name of a block encoding, for example `q8_0`; empty for a plain weight. Blocks run along the last dimension, or along
    /// the first of two where the name ends in `:transposed`.
    pub encoding: RawStr,
}

/// Named weights that the plugin pulls. Any thread may call all functions until the call returns.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawWeightSource {
    pub struct_size: u32,
    pub reserved: u32,
    pub ctx: *const c_void,
    /// Fills `out`, whose `struct_size` the caller has set.
    pub get:
        Option<unsafe extern "C" fn(ctx: *const c_void, name: RawStr, out: *mut RawWeight) -> *mut RawError>,
    pub release: Option<unsafe extern "C" fn(ctx: *const c_void, weight: *mut RawWeight)>,
    /// As `get`, in one of `encodings`. If the source has the weight in none of them, leaves `out.encoding` empty,
    /// and there is nothing to release. May be null.
    pub get_encoded: Option<
        unsafe extern "C" fn(
            ctx: *const c_void,
            name: RawStr,
            encodings: *const RawStr,
            encoding_count: usize,
            out: *mut RawWeight,
        ) -> *mut RawError,
    >,
    /// Fails where `get` would fail, usually without making the weight. May be null or missing: then `get` tells.
    pub check: Option<unsafe extern "C" fn(ctx: *const c_void, name: RawStr) -> *mut RawError>,
    /// Calls `take` for the rows of a weight in order, a few at a time, and sets `delivered` to 1. Rows run along the first dimension, or
    /// along that of the transpose unless `transposed` is 0. `first` is the index of the first row in `rows`, whose number is a multiple of
    /// `step`, except at the end. An error of `take` ends the calls and is returned. `rows` lives until `take` returns and has no
    /// owner. Leaves `delivered` as it is, without a call of `take`, if the source gains nothing from this: then use `get`. May be null or
    /// missing.
    pub get_rows: Option<
        unsafe extern "C" fn(
            ctx: *const c_void,
            name: RawStr,
            transposed: u32,
            step: usize,
            taker: *mut c_void,
            take: unsafe extern "C" fn(
                taker: *mut c_void,
                first: usize,
                rows: *const RawWeight,
            ) -> *mut RawError,
            delivered: *mut u32,
        ) -> *mut RawError,
    >,
}

/// A borrowed tensor: contiguous, little-endian, row-major, aligned to 64 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawTensor {
    pub dtype: u32,
    pub reserved: u32,
    pub rank: usize,
    pub dims: *const u64,
    pub data: *const u8,
    pub len: usize,
}

/// An output that stays on its device. `dims` lives until `RawDeviceTensors::destroy`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawDeviceTensor {
    pub tensor: *mut c_void,
    pub dtype: u32,
    pub reserved: u32,
    pub rank: usize,
    pub dims: *const u64,
}

/// Type and shape of an output.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawOutputSpec {
    pub dtype: u32,
    pub reserved: u32,
    pub rank: usize,
    pub dims: *const u64,
}

/// Allocates the output buffers of a run. Called by the thread that runs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawOutputSink {
    pub struct_size: u32,
    pub reserved: u32,
    pub ctx: *mut c_void,
    /// Fills `buffers[0..count]`, each aligned to 64 bytes. Called exactly once per run.
    pub allocate: Option<
        unsafe extern "C" fn(
            ctx: *mut c_void,
            specs: *const RawOutputSpec,
            count: usize,
            buffers: *mut *mut u8,
        ) -> *mut RawError,
    >,
}

/// A plugin's function table. It never changes and lives as long as the process.
///
/// Threads: any thread may call any function. Calls on one engine may overlap. Calls on one session never overlap. A
/// destroy function never overlaps another call on the same object.
///
/// Functions marked "optional" may be null. A host refuses a plugin that lacks any other function.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawPlugin {
    pub struct_size: u32,
    pub abi_major: u16,
    /// The minor version that the plugin was built against.
    pub abi_minor: u16,
    pub id: RawStr,
    pub vendor: RawStr,
    pub version: RawStr,
    /// Hash of the plugin's sources; part of every cache key.
    pub build_id: RawStr,
    pub init: Option<unsafe extern "C" fn(args: *mut InitArgs) -> *mut RawError>,
    pub devices: Option<unsafe extern "C" fn(args: *mut DevicesArgs) -> *mut RawError>,
    pub capabilities: Option<unsafe extern "C" fn(args: *mut CapabilitiesArgs) -> *mut RawError>,
    pub build: Option<unsafe extern "C" fn(args: *mut BuildArgs) -> *mut RawError>,
    pub engine_load: Option<unsafe extern "C" fn(args: *mut EngineLoadArgs) -> *mut RawError>,
    pub engine_check: Option<unsafe extern "C" fn(args: *mut EngineCheckArgs) -> *mut RawError>,
    pub engine_info: Option<unsafe extern "C" fn(args: *mut EngineInfoArgs) -> *mut RawError>,
    pub engine_serialize: Option<unsafe extern "C" fn(args: *mut EngineSerializeArgs) -> *mut RawError>,
    /// Optional: needed only if the capabilities declare `bake`.
    pub engine_bake: Option<unsafe extern "C" fn(args: *mut EngineBakeArgs) -> *mut RawError>,
    pub engine_destroy: Option<unsafe extern "C" fn(engine: *mut c_void)>,
    pub session_create: Option<unsafe extern "C" fn(args: *mut SessionCreateArgs) -> *mut RawError>,
    pub session_refit: Option<unsafe extern "C" fn(args: *mut SessionRefitArgs) -> *mut RawError>,
    pub session_run: Option<unsafe extern "C" fn(args: *mut SessionRunArgs) -> *mut RawError>,
    pub session_memory: Option<unsafe extern "C" fn(args: *mut SessionMemoryArgs) -> *mut RawError>,
    pub session_destroy: Option<unsafe extern "C" fn(session: *mut c_void)>,
    /// Optional. Returns the table of a named extension, which lives as long as the process; null for an unknown name.
    pub get_extension: Option<unsafe extern "C" fn(id: RawStr) -> *const c_void>,
}

/// Name of the extension whose table is [`RawDeviceTensors`].
pub const DEVICE_TENSORS: &str = "sdrun.device_tensors";
/// Name of the extension whose table is [`RawAssess`].
pub const ASSESS: &str = "sdrun.assess";

/// Extension: tensors that stay on their device. Any thread may call any function.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawDeviceTensors {
    pub struct_size: u32,
    pub reserved: u32,
    /// Counts as a call on the session, so it never overlaps another one.
    pub run: Option<unsafe extern "C" fn(args: *mut SessionRunOnDeviceArgs) -> *mut RawError>,
    /// Calls on one tensor may overlap, including runs that have it as an input.
    pub read: Option<unsafe extern "C" fn(args: *mut TensorReadArgs) -> *mut RawError>,
    pub destroy: Option<unsafe extern "C" fn(tensor: *mut c_void)>,
}

/// Extension: what a graph needs, determined without building it. Any thread may call it; calls may overlap.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawAssess {
    pub struct_size: u32,
    pub reserved: u32,
    pub assess: Option<unsafe extern "C" fn(args: *mut AssessArgs) -> *mut RawError>,
}

// SAFETY: a published plugin table never changes and contains only pointers to functions and static strings.
unsafe impl Sync for RawPlugin {}
// SAFETY: as above.
unsafe impl Send for RawPlugin {}

/// Type of the exported symbol. `max_minor` is the newest minor version that the host supports. Returns the table, or
/// null if the plugin needs a newer host. Any thread may call it, more than once; it returns the same table each
/// time.
pub type QueryFn = unsafe extern "C" fn(max_minor: u32) -> *const RawPlugin;

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
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
    /// The text, with invalid UTF-8 replaced.
    ///
    /// # Safety
    /// As [`RawStr::bytes`].
    pub unsafe fn text(self) -> String {
        // SAFETY: guaranteed by the caller.
        String::from_utf8_lossy(unsafe { self.bytes() }).into_owned()
    }
}

impl RawBuffer {
    /// An empty buffer, the value of an out field before the call.
    pub const EMPTY: RawBuffer =
        RawBuffer { ptr: std::ptr::null(), len: 0, owner: std::ptr::null_mut(), release: None };
}

impl RawWeight {
    /// An empty weight with its size set, for a source to fill.
    pub const EMPTY: RawWeight = RawWeight {
        struct_size: size_of::<RawWeight>() as u32,
        dtype: 0,
        rank: 0,
        dims: std::ptr::null(),
        data: std::ptr::null(),
        len: 0,
        file: RawStr::EMPTY,
        offset: 0,
        owner: std::ptr::null_mut(),
        encoding: RawStr::EMPTY,
    };
}
