//! The HIP runtime (`libamdhip64`): devices, their memory, streams. Only the target `gpu` needs it.

use libloading::Library;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    path::Path,
    ptr,
};

type Status = c_int;
const OUT_OF_MEMORY: Status = 2;
const NO_DEVICE: Status = 100;

/// Size of `hipDeviceProp_tR0600` in bytes, and offsets in it (hip_runtime_api.h of HIP 6.4; the symbol's name fixes
/// the layout).
const PROPERTIES: usize = 1472;
const NAME: usize = 0;
const TOTAL_MEMORY: usize = 288;
const PCI: usize = 584;
const GCN_ARCH: usize = 1160;

/// Flag of `hipStreamCreateWithFlags`: the stream does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
const HOST_TO_DEVICE: c_int = 1;
/// `hipMemcpyDefault`: the runtime infers the direction of a copy from the addresses.
const FROM_ANYWHERE: c_int = 4;

macro_rules! functions {
    ($( $name:ident ( $($arg:ty),* ); )*) => {
        /// The functions that this crate calls.
        #[allow(non_snake_case)]
        pub(crate) struct Hip {
            $( $name: unsafe extern "C" fn($($arg),*) -> Status, )*
            error_string: unsafe extern "C" fn(Status) -> *const c_char,
        }

        impl Hip {
            fn table(library: &Library) -> std::result::Result<Self, &'static str> {
                Ok(Hip {
                    // SAFETY: the symbols have had these signatures since HIP 6 (hip_runtime_api.h).
                    $( $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|_| stringify!($name))?, )*
                    // SAFETY: as above.
                    error_string: *unsafe { library.get(b"hipGetErrorString\0") }.map_err(|_| "hipGetErrorString")?,
                })
            }
        }
    };
}

functions! {
    hipGetDeviceCount(*mut c_int);
    hipGetDevicePropertiesR0600(*mut u8, c_int);
    hipSetDevice(c_int);
    hipRuntimeGetVersion(*mut c_int);
    hipMemGetInfo(*mut usize, *mut usize);
    hipMalloc(*mut *mut c_void, usize);
    hipFree(*mut c_void);
    hipMemcpy(*mut c_void, *const c_void, usize, c_int);
    hipStreamCreateWithFlags(*mut *mut c_void, c_uint);
    hipStreamSynchronize(*mut c_void);
    hipStreamDestroy(*mut c_void);
}

/// A device as HIP describes it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HipDevice {
    /// HIP's index of the device.
    pub(crate) ordinal: c_int,
    /// Marketing name of the device.
    pub(crate) name: String,
    /// Architecture with its features, for example `gfx90a:sramecc+:xnack-`.
    pub(crate) arch: String,
    /// PCI address as `domain:bus:device`, in the form that tools print.
    pub(crate) pci: String,
    /// Size of its memory in bytes.
    pub(crate) memory: u64,
}

/// File names of the HIP runtime, best first: those that `libmigraphx_gpu` in `dir` lists as needed libraries, or
/// else all known names.
fn names(dir: &Path) -> Vec<String> {
    const KNOWN: [&str; 3] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];
    let all = || KNOWN.map(String::from).to_vec();
    let Ok(entries) = std::fs::read_dir(dir) else { return all() };
    let files =
        entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("libmigraphx_gpu.so"));
    let bytes: Vec<u8> = files.filter_map(|entry| std::fs::read(entry.path()).ok()).flatten().collect();
    // The string table holds the names of needed libraries, each terminated by a zero byte.
    let needs = |name: &&str| memchr::memmem::find(&bytes, &[name.as_bytes(), &[0]].concat()).is_some();
    let needed: Vec<String> = KNOWN.iter().filter(|name| needs(name)).map(|name| name.to_string()).collect();
    if needed.is_empty() { all() } else { needed }
}

impl Hip {
    /// Loads the library from `dir` if it is there, else from where the system's loader finds it. Returns `None` if
    /// there is none. If there are several releases, picks the one that MIGraphX's own libraries in `dir` need,
    /// because a process must not load two.
    pub(crate) fn load(dir: &Path) -> Result<Option<Self>> {
        let names = names(dir);
        let beside = names.iter().map(|name| dir.join(name)).find(|file| file.is_file());
        let library = match beside {
            Some(file) => sdrun_provider_common::open(&file)?,
            // SAFETY: loading runs the library's initialisers. It is the vendor's runtime, which the user installed.
            None => match names.iter().find_map(|name| unsafe { Library::new(name) }.ok()) {
                Some(library) => library,
                None => return Ok(None),
            },
        };
        // Look up functions in the whole process, not only in this library. Preloaded tools that intercept HIP
        // (tracers, the stand-in of the tests) must see our calls as well as MIGraphX's own.
        #[cfg(unix)]
        let process: Library = {
            use libloading::os::unix;
            let interposed: Library = unix::Library::this().into();
            // SAFETY: the symbol is only looked up.
            match unsafe { interposed.get::<unsafe extern "C" fn()>(b"hipGetDeviceCount\0") } {
                Ok(_) => interposed,
                Err(_) => library,
            }
        };
        #[cfg(not(unix))]
        let process = library;
        let table = Self::table(&process).map_err(|name| {
            Error::precondition(format!("the HIP runtime lacks {name}: HIP 6 or newer is needed"))
                .with_hint("install a newer ROCm")
        })?;
        std::mem::forget(process);
        Ok(Some(table))
    }

    fn check(&self, status: Status, doing: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function returns a static string or null.
        let words = unsafe {
            let words = (self.error_string)(status);
            if words.is_null() { "unknown error".into() } else { CStr::from_ptr(words).to_string_lossy() }
        };
        let code = if status == OUT_OF_MEMORY { ErrorCode::ResourceExhausted } else { ErrorCode::Internal };
        Err(Error::new(code, format!("HIP cannot {doing}: {words}"))
            .with_native(format!("hipError_t {status}")))
    }

    /// HIP's version as one number, for example 60443484.
    pub(crate) fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: the out pointer is valid.
        let status = unsafe { (self.hipRuntimeGetVersion)(&mut version) };
        self.check(status, "tell its version")?;
        Ok(version)
    }

    /// All devices in HIP's order. Empty if there is no driver.
    pub(crate) fn devices(&self) -> Result<Vec<HipDevice>> {
        let mut count = 0;
        // SAFETY: the out pointer is valid.
        match unsafe { (self.hipGetDeviceCount)(&mut count) } {
            NO_DEVICE => return Ok(Vec::new()),
            status => self.check(status, "count its devices")?,
        }
        (0..count).map(|ordinal| self.device(ordinal)).collect()
    }

    fn device(&self, ordinal: c_int) -> Result<HipDevice> {
        // Larger than needed, and aligned like the structure.
        let mut words = [0u64; PROPERTIES / 8 + 64];
        // SAFETY: the structure that this symbol fills has PROPERTIES bytes.
        let status = unsafe { (self.hipGetDevicePropertiesR0600)(words.as_mut_ptr().cast(), ordinal) };
        self.check(status, "describe a device")?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let text = |at: usize| {
            let field = &bytes[at..at + 256];
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(&field[..end]).trim().to_string()
        };
        let number = |at: usize| {
            let mut field = [0; 4];
            field.copy_from_slice(&bytes[at..at + 4]);
            i32::from_ne_bytes(field)
        };
        let (bus, device, domain) = (number(PCI), number(PCI + 4), number(PCI + 8));
        Ok(HipDevice {
            ordinal,
            name: text(NAME),
            arch: text(GCN_ARCH),
            pci: format!("{domain:04x}:{bus:02x}:{device:02x}"),
            memory: words[TOTAL_MEMORY / 8],
        })
    }

    /// Makes a device current for the calling thread.
    pub(crate) fn set_device(&self, ordinal: c_int) -> Result<()> {
        // SAFETY: the arguments are plain numbers.
        let status = unsafe { (self.hipSetDevice)(ordinal) };
        self.check(status, "select the device")
    }

    /// Copies to `to` from device or host memory that this runtime manages.
    ///
    /// # Safety
    /// At least `to.len()` bytes are readable at `from`, and nothing writes them during the call.
    pub(super) unsafe fn read(&self, from: *const c_void, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller guarantees it. A copy to the host has finished when the call returns.
        let status = unsafe { (self.hipMemcpy)(to.as_mut_ptr().cast(), from, to.len(), FROM_ANYWHERE) };
        self.check(status, "copy from the device")
    }

    /// Bytes in use on the current device, by all processes.
    pub(crate) fn memory_in_use(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are valid.
        let status = unsafe { (self.hipMemGetInfo)(&mut free, &mut total) };
        self.check(status, "tell the memory in use")?;
        Ok(total.saturating_sub(free) as u64)
    }
}

/// Memory on a device.
pub(crate) struct DeviceBuffer {
    hip: &'static Hip,
    address: *mut c_void,
    len: usize,
}

// SAFETY: a device address is valid in every thread, and any thread may call HIP's functions.
unsafe impl Send for DeviceBuffer {}
// SAFETY: as above, and a shared reference only reads.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// Allocates `len` bytes on the current device. Their contents are undefined.
    pub(crate) fn new(hip: &'static Hip, len: usize) -> Result<Self> {
        let mut address = ptr::null_mut();
        // SAFETY: the out pointer is valid.
        let status = unsafe { (hip.hipMalloc)(&mut address, len.max(1)) };
        hip.check(status, &format!("get {len} bytes of device memory"))?;
        Ok(DeviceBuffer { hip, address, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn address(&self) -> *mut c_void {
        self.address
    }

    /// Copies `bytes` to the device; they must fill the buffer. When this returns, every stream sees them.
    pub(crate) fn upload(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.len {
            return Err(Error::internal(format!("{} bytes for a buffer of {}", bytes.len(), self.len)));
        }
        // SAFETY: both sides have `len` bytes. `hipMemcpy` may return as soon as it has read pageable memory. So wait
        // for its stream, the default one: other streams that do not wait for it use the buffer.
        let status = unsafe {
            match (self.hip.hipMemcpy)(self.address, bytes.as_ptr().cast(), bytes.len(), HOST_TO_DEVICE) {
                0 => (self.hip.hipStreamSynchronize)(ptr::null_mut()),
                status => status,
            }
        };
        self.hip.check(status, "copy to the device")
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `hipMalloc` and owned only by this value; hipFree waits for work that uses it.
        unsafe { (self.hip.hipFree)(self.address) };
    }
}

/// A queue of device work.
pub(crate) struct Stream {
    hip: &'static Hip,
    handle: *mut c_void,
}

// SAFETY: any thread may call HIP's functions.
unsafe impl Send for Stream {}

impl Stream {
    /// Creates a stream on the current device.
    pub(crate) fn new(hip: &'static Hip) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: the out pointer is valid.
        let status = unsafe { (hip.hipStreamCreateWithFlags)(&mut handle, NON_BLOCKING) };
        hip.check(status, "make a stream")?;
        Ok(Stream { hip, handle })
    }

    pub(super) fn hip(&self) -> &'static Hip {
        self.hip
    }

    pub(super) fn handle(&self) -> *mut c_void {
        self.handle
    }

    /// Waits until all queued work has finished.
    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is live.
        let status = unsafe { (self.hip.hipStreamSynchronize)(self.handle) };
        self.hip.check(status, "finish a run")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is live and only this value owns it.
        unsafe { (self.hip.hipStreamDestroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, PoisonError};

    /// Copies to the device that have not finished: address, bytes. As on a GPU, a copy from pageable memory
    /// continues after `hipMemcpy` has returned.
    static UNDER_WAY: Mutex<Vec<(usize, Vec<u8>)>> = Mutex::new(Vec::new());

    fn under_way() -> std::sync::MutexGuard<'static, Vec<(usize, Vec<u8>)>> {
        UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
    }

    unsafe extern "C" fn copy(to: *mut c_void, from: *const c_void, len: usize, kind: c_int) -> Status {
        // SAFETY: the tests pass `len` bytes on both sides.
        unsafe {
            match kind {
                HOST_TO_DEVICE => {
                    under_way().push((to as usize, std::slice::from_raw_parts(from.cast(), len).to_vec()));
                }
                _ => ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), len),
            }
        }
        0
    }

    unsafe extern "C" fn synchronize(stream: *mut c_void) -> Status {
        if stream.is_null() {
            for (address, bytes) in under_way().drain(..) {
                // SAFETY: the test's buffers are alive.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
            }
        }
        0
    }

    unsafe extern "C" fn allocate(address: *mut *mut c_void, len: usize) -> Status {
        // SAFETY: the out pointer is valid. The memory is leaked.
        unsafe { *address = vec![0u8; len].leak().as_mut_ptr().cast() };
        0
    }

    unsafe extern "C" fn keep(_: *mut c_void) -> Status {
        0
    }

    fn hip() -> &'static Hip {
        unsafe extern "C" fn number(_: *mut c_int) -> Status {
            1
        }
        unsafe extern "C" fn properties(_: *mut u8, _: c_int) -> Status {
            1
        }
        unsafe extern "C" fn ordinal(_: c_int) -> Status {
            1
        }
        unsafe extern "C" fn memory(_: *mut usize, _: *mut usize) -> Status {
            1
        }
        unsafe extern "C" fn stream(_: *mut *mut c_void, _: c_uint) -> Status {
            1
        }
        unsafe extern "C" fn words(_: Status) -> *const c_char {
            c"error of the test".as_ptr()
        }
        Box::leak(Box::new(Hip {
            hipGetDeviceCount: number,
            hipGetDevicePropertiesR0600: properties,
            hipSetDevice: ordinal,
            hipRuntimeGetVersion: number,
            hipMemGetInfo: memory,
            hipMalloc: allocate,
            hipFree: keep,
            hipMemcpy: copy,
            hipStreamCreateWithFlags: stream,
            hipStreamSynchronize: synchronize,
            hipStreamDestroy: keep,
            error_string: words,
        }))
    }

    #[test]
    fn an_upload_has_arrived_when_it_returns() {
        let mut buffer = DeviceBuffer::new(hip(), 4).unwrap();
        buffer.upload(&[1, 2, 3, 4]).unwrap();
        assert!(under_way().is_empty());
        let mut all = [0; 4];
        // SAFETY: the buffer has four bytes.
        unsafe { buffer.hip.read(buffer.address(), &mut all).unwrap() };
        assert_eq!(all, [1, 2, 3, 4]);
        // Reads part of a buffer, as for an output that is a slice of an input.
        let mut part = [0; 2];
        // SAFETY: two bytes follow the second one.
        unsafe { buffer.hip.read(buffer.address().byte_add(1), &mut part).unwrap() };
        assert_eq!(part, [2, 3]);
        assert!(buffer.upload(&[1]).is_err());
    }

    #[test]
    fn the_hip_that_migraphx_needs_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(names(dir.path()).len(), 3);
        std::fs::write(dir.path().join("libmigraphx_gpu.so.2"), b"..libc.so.6\0libamdhip64.so.6\0..")
            .unwrap();
        assert_eq!(names(dir.path()), ["libamdhip64.so.6"]);
        assert_eq!(names(&dir.path().join("gone")).len(), 3);
    }
}
