//! The CUDA driver, loaded at run time: devices, memory, streams. The bindings are written by hand: they are few, and
//! the crate for the driver API ends the process if a function is missing.

use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    path::{Path, PathBuf},
    ptr::null_mut,
    sync::Arc,
};

type Status = c_int;
type Ctx = *mut c_void;
type DevicePtr = u64;

/// The oldest CUDA version that a driver must support, in the notation of `cuDriverGetVersion`. TensorRT-RTX 1.7 is released
/// for CUDA 12 and 13. When it loads an engine, the library itself checks whether the driver is new enough for it.
const LEAST_CUDA: c_int = 12_000;
/// `CUDA_ERROR_OUT_OF_MEMORY`
const OUT_OF_MEMORY: Status = 2;
/// `CUDA_ERROR_NO_DEVICE`
const NO_DEVICE: Status = 100;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: Status = 600;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`, `…_MINOR`
const CAPABILITY: [c_int; 2] = [75, 76];

macro_rules! functions {
    ($($field:ident = $symbol:literal : fn($($arg:ty),*);)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($arg),*) -> Status,)* }

        impl Functions {
            fn of(library: &libloading::Library, file: &Path) -> Result<Self> {
                $(
                    // SAFETY: the signature is that of cuda.h (CUDA driver API, stable since CUDA 12).
                    let $field = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Status>($symbol) };
                    let $field = *$field.map_err(|_| too_old(file, $symbol))?;
                )*
                Ok(Functions { $($field,)* })
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_pci = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Ctx, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    context_set = "cuCtxSetCurrent": fn(Ctx);
    stream_new = "cuStreamCreate": fn(*mut *mut c_void, c_uint);
    stream_free = "cuStreamDestroy_v2": fn(*mut c_void);
    stream_query = "cuStreamQuery": fn(*mut c_void);
    stream_wait = "cuStreamSynchronize": fn(*mut c_void);
    mem_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    mem_new = "cuMemAlloc_v2": fn(*mut DevicePtr, usize);
    mem_free = "cuMemFree_v2": fn(DevicePtr);
    pinned_new = "cuMemAllocHost_v2": fn(*mut *mut c_void, usize);
    pinned_free = "cuMemFreeHost": fn(*mut c_void);
    upload = "cuMemcpyHtoDAsync_v2": fn(DevicePtr, *const c_void, usize, *mut c_void);
    download = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, DevicePtr, usize, *mut c_void);
    error_string = "cuGetErrorString": fn(Status, *mut *const c_char);
}

fn too_old(file: &Path, symbol: &str) -> Error {
    Error::precondition(format!("the CUDA driver {} is too old: it has no `{symbol}`", file.display()))
        .with_hint("install a current NVIDIA driver")
}

/// The loaded driver. It is never unloaded.
pub(crate) struct Driver {
    call: Functions,
    _library: libloading::Library,
    /// CUDA version the driver supports, for example `13.0`.
    pub(crate) version: String,
}

/// A GPU as the driver describes it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Gpu {
    /// The driver's ordinal of the GPU.
    pub(crate) ordinal: c_int,
    /// PCI address: `0000:01:00.0`.
    pub(crate) pci: String,
    pub(crate) name: String,
    pub(crate) memory: u64,
    /// Compute capability times ten.
    pub(crate) capability: u32,
}

impl Driver {
    /// Loads the driver from `file`, or by the name the system's loader knows. Returns `FailedPrecondition` if there is
    /// none.
    pub(crate) fn load(file: Option<&Path>) -> Result<Self> {
        let name = match file {
            Some(file) => file.to_path_buf(),
            None => PathBuf::from(if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" }),
        };
        let library = match file {
            Some(file) => sdrun_provider_common::open(file)?,
            // SAFETY: runs only the initialisers of the system's own driver.
            None => unsafe { libloading::Library::new(&name) }.map_err(|_| {
                Error::precondition("needs an NVIDIA GPU: no CUDA driver found")
                    .with_hint("on a machine with an NVIDIA GPU, install its driver")
            })?,
        };
        let call = Functions::of(&library, &name)?;
        let mut driver = Driver { call, _library: library, version: String::new() };
        // SAFETY: the arguments are plain values, and the out parameters are valid.
        let status = unsafe { (driver.call.init)(0) };
        if status == NO_DEVICE {
            return Err(Error::precondition("needs an NVIDIA GPU: the CUDA driver found none"));
        }
        driver.check(status, "start")?;
        let mut version = 0;
        // SAFETY: as above.
        driver.check(unsafe { (driver.call.driver_version)(&mut version) }, "report its version")?;
        driver.version = format!("{}.{}", version / 1000, version % 1000 / 10);
        if version < LEAST_CUDA {
            return Err(Error::precondition(format!(
                "the CUDA driver is too old: it supports CUDA {}, TensorRT-RTX 1.7 needs 12.0 or newer",
                driver.version
            ))
            .with_hint("install a current NVIDIA driver"));
        }
        Ok(driver)
    }

    /// The GPUs in the driver's order: fastest first, unless the user configured the driver otherwise.
    pub(crate) fn gpus(&self) -> Result<Vec<Gpu>> {
        let mut count = 0;
        // SAFETY: the out parameter is valid.
        self.check(unsafe { (self.call.device_count)(&mut count) }, "count GPUs")?;
        (0..count).map(|ordinal| self.gpu(ordinal)).collect()
    }

    fn gpu(&self, ordinal: c_int) -> Result<Gpu> {
        let (mut device, mut memory, mut capability) = (0, 0usize, [0; 2]);
        let (mut name, mut pci) = ([0 as c_char; 256], [0 as c_char; 32]);
        // SAFETY: the out parameters are valid and have the stated lengths.
        unsafe {
            self.check((self.call.device_get)(&mut device, ordinal), "open a GPU")?;
            self.check((self.call.device_name)(name.as_mut_ptr(), 255, device), "name a GPU")?;
            self.check((self.call.device_pci)(pci.as_mut_ptr(), 31, device), "report a GPU's address")?;
            self.check((self.call.device_memory)(&mut memory, device), "report a GPU's memory")?;
            for (value, attribute) in capability.iter_mut().zip(CAPABILITY) {
                self.check((self.call.device_attribute)(value, attribute, device), "describe a GPU")?;
            }
        }
        // SAFETY: the last character of both buffers is still 0.
        let (name, pci) = unsafe { (super::text(name.as_ptr()), super::text(pci.as_ptr())) };
        let [major, minor] = capability;
        Ok(Gpu {
            ordinal: device,
            pci: pci.to_lowercase(),
            name,
            memory: memory as u64,
            capability: (major * 10 + minor).max(0) as u32,
        })
    }

    fn check(&self, status: Status, doing: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut words: *const c_char = std::ptr::null();
        // SAFETY: the out parameter is valid, and the string is static.
        let words = unsafe {
            match (self.call.error_string)(status, &mut words) {
                0 if !words.is_null() => CStr::from_ptr(words).to_string_lossy().into_owned(),
                _ => "unknown error".into(),
            }
        };
        let code = if status == OUT_OF_MEMORY { ErrorCode::ResourceExhausted } else { ErrorCode::Internal };
        Err(Error::new(code, format!("the CUDA driver cannot {doing}: {words}"))
            .with_native(format!("CUDA error {status}")))
    }
}

/// A GPU in use, through its primary context. The vendor's library uses the same context.
pub(crate) struct Context {
    driver: &'static Driver,
    gpu: Gpu,
    context: Ctx,
}

// SAFETY: any thread can make the context current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn of(driver: &'static Driver, gpu: &Gpu) -> Result<Arc<Self>> {
        let mut context = null_mut();
        // SAFETY: the out parameter is valid, and the driver listed this GPU.
        let status = unsafe { (driver.call.context_retain)(&mut context, gpu.ordinal) };
        driver.check(status, &format!("open {}", gpu.name))?;
        let context = Arc::new(Context { driver, gpu: gpu.clone(), context });
        context.enter()?;
        Ok(context)
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained until `self` is dropped.
        self.driver.check(unsafe { (self.driver.call.context_set)(self.context) }, "switch to a GPU")
    }

    /// Whether both contexts share one GPU's memory.
    pub(crate) fn is_of_same_gpu(&self, other: &Context) -> bool {
        self.gpu.ordinal == other.gpu.ordinal
    }

    /// Free bytes of GPU memory, counting all processes.
    pub(crate) fn free_memory(&self) -> Result<u64> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out parameters are valid.
        let status = unsafe { (self.driver.call.mem_info)(&mut free, &mut total) };
        self.driver.check(status, "report free memory")?;
        Ok(free as u64)
    }

    pub(crate) fn stream(self: &Arc<Self>) -> Result<Stream> {
        self.enter()?;
        let mut stream = null_mut();
        // SAFETY: the out parameter is valid. 1 is CU_STREAM_NON_BLOCKING.
        self.driver.check(unsafe { (self.driver.call.stream_new)(&mut stream, 1) }, "create a stream")?;
        Ok(Stream { context: self.clone(), stream })
    }

    /// Allocates `bytes` of GPU memory, at least one byte.
    pub(crate) fn device_memory(self: &Arc<Self>, bytes: usize) -> Result<DeviceMemory> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: the out parameter is valid.
        let status = unsafe { (self.driver.call.mem_new)(&mut address, bytes.max(1)) };
        self.driver.check(status, &format!("allocate {bytes} bytes on {}", self.gpu.name))?;
        Ok(DeviceMemory { context: self.clone(), address, bytes })
    }

    /// Allocates `bytes` of zeroed, pinned host memory.
    pub(crate) fn pinned_memory(self: &Arc<Self>, bytes: usize) -> Result<PinnedMemory> {
        self.enter()?;
        let mut address = null_mut();
        // SAFETY: the out parameter is valid, and the allocation holds `bytes`.
        unsafe {
            let status = (self.driver.call.pinned_new)(&mut address, bytes.max(1));
            self.driver.check(status, &format!("pin {bytes} bytes of memory"))?;
            address.cast::<u8>().write_bytes(0, bytes);
        }
        Ok(PinnedMemory { context: self.clone(), address: address.cast(), bytes })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once and is released once.
        unsafe { (self.driver.call.context_release)(self.gpu.ordinal) };
    }
}

/// A queue of work for a GPU.
pub(crate) struct Stream {
    context: Arc<Context>,
    stream: *mut c_void,
}

// SAFETY: only one thread uses it at a time, and it may be any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn raw(&self) -> *mut c_void {
        self.stream
    }

    /// Queues a copy to the GPU. The caller keeps both buffers alive until it has synchronised the stream.
    pub(crate) fn upload(&self, from: &PinnedMemory, to: &DeviceMemory, bytes: usize) -> Result<()> {
        check_copy(bytes, from.bytes, to.bytes)?;
        // SAFETY: both hold `bytes`, and the caller keeps them alive.
        let status =
            unsafe { (self.context.driver.call.upload)(to.address, from.address.cast(), bytes, self.stream) };
        self.context.driver.check(status, "copy to the GPU")
    }

    /// Queues a copy from the GPU. The caller keeps both buffers alive until it has synchronised the stream.
    pub(crate) fn download(&self, from: &DeviceMemory, to: &mut PinnedMemory, bytes: usize) -> Result<()> {
        check_copy(bytes, from.bytes, to.bytes)?;
        // SAFETY: both hold `bytes`, and the caller keeps them alive.
        let status = unsafe {
            (self.context.driver.call.download)(to.address.cast(), from.address, bytes, self.stream)
        };
        self.context.driver.check(status, "copy from the GPU")
    }

    /// Whether all queued work is done.
    pub(crate) fn is_done(&self) -> Result<bool> {
        // SAFETY: the stream is alive.
        match unsafe { (self.context.driver.call.stream_query)(self.stream) } {
            NOT_READY => Ok(false),
            status => self.context.driver.check(status, "run the engine").map(|()| true),
        }
    }

    /// Waits until all queued work is done.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        let status = unsafe { (self.context.driver.call.stream_wait)(self.stream) };
        self.context.driver.check(status, "run the engine")
    }
}

fn check_copy(bytes: usize, from: usize, to: usize) -> Result<()> {
    match bytes <= from && bytes <= to {
        true => Ok(()),
        false => Err(Error::internal(format!("a copy of {bytes} bytes between buffers of {from} and {to}"))),
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: created once and destroyed once, after all queued work is done.
        unsafe {
            (self.context.driver.call.stream_wait)(self.stream);
            (self.context.driver.call.stream_free)(self.stream);
        }
    }
}

/// GPU memory.
pub(crate) struct DeviceMemory {
    context: Arc<Context>,
    address: DevicePtr,
    pub(crate) bytes: usize,
}

impl DeviceMemory {
    pub(super) fn address(&self) -> *mut c_void {
        self.address as usize as *mut c_void
    }

    /// The GPU it belongs to.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: allocated once and freed once.
        unsafe { (self.context.driver.call.mem_free)(self.address) };
    }
}

/// Pinned host memory.
pub(crate) struct PinnedMemory {
    context: Arc<Context>,
    address: *mut u8,
    bytes: usize,
}

// SAFETY: the memory has one owner.
unsafe impl Send for PinnedMemory {}

impl std::ops::Deref for PinnedMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `self` owns `bytes` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}

impl std::ops::DerefMut for PinnedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl PinnedMemory {
    pub(super) fn address(&self) -> *mut c_void {
        self.address.cast()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: allocated once and freed once.
        unsafe { (self.context.driver.call.pinned_free)(self.address.cast()) };
    }
}
