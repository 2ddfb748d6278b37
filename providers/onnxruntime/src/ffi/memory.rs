use super::{check, handle};
use ort::sys;
use sdrun_abi::Result;
use std::{
    ffi::c_void,
    ptr::{self, NonNull},
};

/// `OrtMemoryInfo` of main memory.
pub(super) struct CpuMemory(NonNull<sys::OrtMemoryInfo>);

impl CpuMemory {
    pub(super) fn new() -> Result<Self> {
        let mut info = ptr::null_mut();
        let (allocator, kind) =
            (sys::OrtAllocatorType::OrtDeviceAllocator, sys::OrtMemType::OrtMemTypeDefault);
        // SAFETY: the out pointer is valid.
        check(unsafe { (ort::api().CreateCpuMemoryInfo)(allocator, kind, &mut info) }, "describe memory")?;
        Ok(CpuMemory(handle(info)?))
    }

    pub(super) fn as_ptr(&self) -> *const sys::OrtMemoryInfo {
        self.0.as_ptr()
    }
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        // SAFETY: released once, by the owner.
        unsafe { (ort::api().ReleaseMemoryInfo)(self.0.as_ptr()) }
    }
}

/// Memory that ONNX Runtime's default allocator gave out, freed when dropped.
pub(super) struct Allocated {
    allocator: *mut sys::OrtAllocator,
    memory: *mut c_void,
}

impl Allocated {
    pub(super) fn none() -> Result<Self> {
        let mut allocator = ptr::null_mut();
        // SAFETY: the out pointer is valid; the allocator belongs to the library.
        check(unsafe { (ort::api().GetAllocatorWithDefaultOptions)(&mut allocator) }, "find its allocator")?;
        Ok(Allocated { allocator, memory: ptr::null_mut() })
    }

    pub(super) fn allocator(&self) -> *mut sys::OrtAllocator {
        self.allocator
    }

    /// Where a call writes the address of memory that it takes from the allocator.
    pub(super) fn place(&mut self) -> *mut *mut c_void {
        &mut self.memory
    }

    /// What a call has written there; null if nothing.
    pub(super) fn memory(&self) -> *mut c_void {
        self.memory
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if !self.memory.is_null() {
            // SAFETY: the allocator lives as long as the library. It gave out this memory, which nobody else frees.
            let status = unsafe { (ort::api().AllocatorFree)(self.allocator, self.memory) };
            // It cannot fail; and if it did, nothing could be done.
            let _ = check(status, "free memory");
        }
    }
}
