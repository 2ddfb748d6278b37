//! A stand-in for the HIP runtime (`libamdhip64`), preloaded (`LD_PRELOAD`) before the real one in tests without an AMD GPU. It
//! has one device whose memory is host memory. Compilers, loaders and copies work. Kernels are counted and not run, so output
//! buffers keep their previous contents.
//!
//! `FAKE_HIP_ARCH` names the architecture (default `gfx1100`). `FAKE_HIP_COUNTS` names a file. Synchronising a stream appends the
//! kernels launched since the last synchronisation to it, one name per line.
//!
//! Signatures are those of hip_runtime_api.h (HIP 6). The functions are those that MIGraphX 2.14, MIOpen and hipBLASLt call.
#![allow(unsafe_code, non_snake_case, missing_docs, clippy::missing_safety_doc)]

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::Mutex,
};

type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const ALIGNMENT: usize = 256;
const TOTAL: usize = 24 << 30;

struct State {
    /// Allocations by address, with their sizes in bytes.
    memory: BTreeMap<usize, usize>,
    /// Kernels launched since the last report.
    launched: Vec<String>,
}

static STATE: Mutex<State> = Mutex::new(State { memory: BTreeMap::new(), launched: Vec::new() });

fn state() -> std::sync::MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
}

unsafe fn allocate(out: *mut *mut c_void, bytes: usize) -> Status {
    let Some(layout) = layout(bytes) else { return INVALID_VALUE };
    // SAFETY: the layout has a non-zero size, and callers pass valid out pointers.
    unsafe {
        let address = alloc(layout);
        if address.is_null() {
            return 2;
        }
        state().memory.insert(address.addr(), bytes);
        *out = address.cast();
    }
    SUCCESS
}

unsafe fn release(address: *mut c_void) -> Status {
    if address.is_null() {
        return SUCCESS;
    }
    let bytes = state().memory.remove(&address.addr());
    match bytes.and_then(layout) {
        // SAFETY: `allocate` made it with this layout, and the entry is removed, so it is freed only once.
        Some(layout) => unsafe { dealloc(address.cast(), layout) },
        None => return INVALID_VALUE,
    }
    SUCCESS
}

unsafe fn copy(to: *mut c_void, from: *const c_void, bytes: usize) -> Status {
    // SAFETY: callers guarantee `bytes` valid bytes on both sides.
    unsafe { ptr::copy(from.cast::<u8>(), to.cast::<u8>(), bytes) };
    SUCCESS
}

fn launch(kernel: String) -> Status {
    state().launched.push(kernel);
    SUCCESS
}

fn report() {
    let Some(file) = std::env::var_os("FAKE_HIP_COUNTS") else { return };
    let launched = std::mem::take(&mut state().launched);
    if !launched.is_empty() {
        use std::io::Write;
        if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(file) {
            let _ = writeln!(file, "{}\n--", launched.join("\n"));
        }
    }
}

/// Creates an opaque object.
unsafe fn token(out: *mut *mut c_void) -> Status {
    // SAFETY: callers pass valid out pointers. The few objects are leaked.
    unsafe { *out = Box::into_raw(Box::new([0u64; 8])).cast() };
    SUCCESS
}

/// Functions that only return success.
macro_rules! nothing {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        $(#[unsafe(no_mangle)]
        pub extern "C" fn $name($(_: $type),*) -> Status {
            SUCCESS
        })*
    };
}

nothing! {
    hipInit(flags: c_uint);
    hipSetDevice(device: c_int);
    hipDeviceSynchronize();
    hipGetLastError();
    hipPeekAtLastError();
    hipHostRegister(address: *mut c_void, bytes: usize, flags: c_uint);
    hipHostUnregister(address: *mut c_void);
    hipStreamDestroy(stream: *mut c_void);
    hipStreamQuery(stream: *mut c_void);
    hipStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint);
    hipEventDestroy(event: *mut c_void);
    hipEventRecord(event: *mut c_void, stream: *mut c_void);
    hipEventSynchronize(event: *mut c_void);
    hipModuleUnload(module: *mut c_void);
    hipMemPoolTrimTo(pool: *mut c_void, bytes: usize);
}

/// Functions that write one value.
macro_rules! answers {
    ($($name:ident($out:ident: $type:ty $(, $arg:ident: $of:ty)*) = $value:expr;)*) => {
        $(#[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($out: *mut $type $(, _: $of)*) -> Status {
            // SAFETY: callers pass valid out pointers.
            unsafe { *$out = $value };
            SUCCESS
        })*
    };
}

answers! {
    hipGetDevice(device: c_int) = 0;
    hipGetDeviceCount(count: c_int) = 1;
    hipRuntimeGetVersion(version: c_int) = 60_443_484;
    hipDriverGetVersion(version: c_int) = 60_443_484;
    hipDeviceTotalMem(bytes: usize, device: c_int) = TOTAL;
    hipStreamIsCapturing(capturing: c_int, stream: *mut c_void) = 0;
    hipEventElapsedTime(milliseconds: f32, start: *mut c_void, stop: *mut c_void) = 0.01;
    hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(blocks: c_int, kernel: *mut c_void, threads: c_int, shared: usize) = 4;
}

/// Functions that create an object.
macro_rules! makes {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        $(#[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut *mut c_void $(, _: $type)*) -> Status {
            // SAFETY: callers pass valid out pointers.
            unsafe { token(out) }
        })*
    };
}

makes! {
    hipStreamCreate();
    hipStreamCreateWithFlags(flags: c_uint);
    hipEventCreate();
    hipEventCreateWithFlags(flags: c_uint);
    hipModuleLoad(file: *const c_char);
    hipModuleLoadData(image: *const c_void);
    hipDeviceGetDefaultMemPool(device: c_int);
}

/// Functions that allocate or free memory.
macro_rules! memory {
    ($($name:ident($($arg:ident: $type:ty),*) $what:ident;)*) => {
        $(memory!(@$what $name($($arg: $type),*));)*
    };
    (@gets $name:ident($($arg:ident: $type:ty),*)) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: *mut *mut c_void, bytes: usize $(, _: $type)*) -> Status {
            // SAFETY: callers pass valid out pointers.
            unsafe { allocate(out, bytes) }
        }
    };
    (@frees $name:ident($($arg:ident: $type:ty),*)) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(address: *mut c_void $(, _: $type)*) -> Status {
            // SAFETY: unknown addresses are not freed.
            unsafe { release(address) }
        }
    };
    (@copies $name:ident($($arg:ident: $type:ty),*)) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(to: *mut c_void, from: *const c_void, bytes: usize, _: c_int $(, _: $type)*) -> Status {
            // SAFETY: callers guarantee `bytes` valid bytes on both sides.
            unsafe { copy(to, from, bytes) }
        }
    };
    (@fills $name:ident($($arg:ident: $type:ty),*)) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(to: *mut c_void, value: c_int, bytes: usize $(, _: $type)*) -> Status {
            // SAFETY: callers guarantee that many bytes.
            unsafe { ptr::write_bytes(to.cast::<u8>(), value as u8, bytes) };
            SUCCESS
        }
    };
}

memory! {
    hipMalloc() gets;
    hipHostMalloc(flags: c_uint) gets;
    hipMallocAsync(stream: *mut c_void) gets;
    hipFree() frees;
    hipHostFree() frees;
    hipFreeAsync(stream: *mut c_void) frees;
    hipMemcpy() copies;
    hipMemcpyAsync(stream: *mut c_void) copies;
    hipMemcpyWithStream(stream: *mut c_void) copies;
    hipMemset() fills;
    hipMemsetAsync(stream: *mut c_void) fills;
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(status: Status) -> *const c_char {
    if status == SUCCESS { c"no error".as_ptr() } else { c"error of the stand-in".as_ptr() }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamSynchronize(_: *mut c_void) -> Status {
    report();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Status {
    let used: usize = state().memory.values().sum();
    // SAFETY: callers pass valid out pointers.
    unsafe { (*free, *total) = (TOTAL - used.min(TOTAL), TOTAL) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostGetDevicePointer(
    out: *mut *mut c_void,
    host: *mut c_void,
    _: c_uint,
) -> Status {
    // SAFETY: callers pass valid out pointers.
    unsafe { *out = host };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemPtrGetInfo(address: *mut c_void, bytes: *mut usize) -> Status {
    // SAFETY: callers pass valid out pointers.
    unsafe { *bytes = state().memory.get(&address.addr()).copied().unwrap_or_default() };
    SUCCESS
}

/// `hipPointerAttribute_t`.
#[repr(C)]
pub struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: *const c_void,
    host_pointer: *const c_void,
    managed: c_int,
    flags: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipPointerGetAttributes(
    out: *mut PointerAttributes,
    address: *const c_void,
) -> Status {
    const DEVICE: c_int = 2;
    let known = (state().memory.range(..=address.addr()).next_back())
        .is_some_and(|(start, bytes)| address.addr() < start + bytes);
    if !known {
        return INVALID_VALUE;
    }
    let attributes = PointerAttributes {
        kind: DEVICE,
        device: 0,
        device_pointer: address,
        host_pointer: address,
        managed: 0,
        flags: 0,
    };
    // SAFETY: callers pass valid out pointers.
    unsafe { *out = attributes };
    SUCCESS
}

/// Fills in `hipDeviceProp_tR0600`, which has 1472 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevicePropertiesR0600(out: *mut u8, _: c_int) -> Status {
    let arch = std::env::var("FAKE_HIP_ARCH").unwrap_or_else(|_| "gfx1100".into());
    let wide = arch.starts_with("gfx9");
    let mut bytes = [0u8; 1472];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, b"Stand-in for an AMD GPU");
    put(1160, arch.as_bytes());
    for (at, value) in [(288, TOTAL as u64), (296, 65_536), (352, i32::MAX as u64), (1416, 65_536)] {
        put(at, &value.to_ne_bytes());
    }
    let numbers: [(usize, i32); 21] = [
        (304, 65_536),                     // regsPerBlock
        (308, if wide { 64 } else { 32 }), // warpSize
        (320, 1024),                       // maxThreadsPerBlock
        (324, 1024),                       // maxThreadsDim
        (328, 1024),
        (332, 1024),
        (336, i32::MAX), // maxGridSize
        (340, i32::MAX),
        (344, i32::MAX),
        (348, 2_400_000),                 // clockRate
        (360, if wide { 9 } else { 11 }), // major
        (388, 48),                        // multiProcessorCount
        (400, 1),                         // canMapHostMemory
        (584, 3),                         // pciBusID
        (588, 0),
        (592, 0),
        (608, 1_250_000), // memoryClockRate
        (612, 384),       // memoryBusWidth
        (616, 6 << 20),   // l2CacheSize
        (624, 2048),      // maxThreadsPerMultiProcessor
        (688, 1),         // cooperativeLaunch
    ];
    for (at, value) in numbers {
        put(at, &value.to_ne_bytes());
    }
    // SAFETY: the caller's structure has this size.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), out, bytes.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(out: *mut c_int, attribute: c_int, _: c_int) -> Status {
    let value = match attribute {
        63 | 10_015 => 48, // multiprocessors
        87 => 32,          // warp size
        56 => 1024,        // threads of a block
        74 => 65_536,      // shared memory of a block
        5 => 2_400_000,    // clock rate
        _ => 0,
    };
    // SAFETY: callers pass valid out pointers.
    unsafe { *out = value };
    SUCCESS
}

/// A kernel is represented by its name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleGetFunction(
    out: *mut *mut c_void,
    _: *mut c_void,
    name: *const c_char,
) -> Status {
    // SAFETY: the name is NUL-terminated. The copy is leaked, because the library keeps it.
    unsafe { *out = CStr::from_ptr(name).to_owned().into_raw().cast() };
    SUCCESS
}

unsafe fn launch_function(kernel: *mut c_void) -> Status {
    // SAFETY: kernels come from `hipModuleGetFunction`.
    launch(unsafe { CStr::from_ptr(kernel.cast()) }.to_string_lossy().into_owned())
}

macro_rules! launches {
    ($($symbol:literal $name:ident($($type:ty),*);)*) => {
        $(#[unsafe(export_name = $symbol)]
        pub unsafe extern "C" fn $name(kernel: *mut c_void $(, _: $type)*) -> Status {
            // SAFETY: as in `launch_function`.
            unsafe { launch_function(kernel) }
        })*
    };
}

launches! {
    "hipModuleLaunchKernel" module_launch(c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut c_void, *mut c_void);
    "hipModuleLaunchCooperativeKernel" cooperative_launch(c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut c_void);
    "hipExtModuleLaunchKernel" extended_launch(u32, u32, u32, u32, u32, u32, usize, *mut c_void, *mut c_void, *mut c_void, *mut c_void, *mut c_void, u32);
    // The same for C++ callers.
    "_Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j" extended_launch_cpp(u32, u32, u32, u32, u32, u32, usize, *mut c_void, *mut c_void, *mut c_void, *mut c_void, *mut c_void, u32);
}

/// `dim3`, passed by value.
#[repr(C)]
pub struct Dim3(u32, u32, u32);

#[unsafe(no_mangle)]
pub extern "C" fn hipLaunchKernel(
    _: *const c_void,
    _: Dim3,
    _: Dim3,
    _: *mut *mut c_void,
    _: usize,
    _: *mut c_void,
) -> Status {
    launch("static".into())
}
