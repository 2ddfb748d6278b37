//! Errors, buffers, hosts, weight sources and sinks across the border, each in both directions.
//! "to C" functions lend a Rust value for the length of a call; "from C" types implement the Rust trait
//! over a lent C struct.

use super::raw::*;
use crate::{
    DType, Error, ErrorCode, Flow, Hint, Host, LogLevel, OutputSink, OutputSpec, Result, Weight, WeightSource,
};
use std::{
    ffi::c_void,
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};

/// Runs `body`; a panic becomes an `Internal` error whose message holds the panic's.
pub fn contain<T>(what: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|s| s.to_string())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".into());
        Err(Error::internal(format!("panic in {what}: {text}")))
    })
}

// ---- errors ----

struct OwnedError {
    raw: RawError,
    error: Error,
    hint: Option<String>,
}

unsafe extern "C" fn release_error(raw: *mut RawError) {
    if !raw.is_null() {
        // SAFETY: `owner` is the box leaked by `error_to_raw`, released once.
        drop(unsafe { Box::from_raw((*raw).owner.cast::<OwnedError>()) });
    }
}

/// Null for `Ok`; else an error that the receiver releases.
pub fn error_to_raw(result: Result<()>) -> *mut RawError {
    let Err(error) = result else { return ptr::null_mut() };
    let text = |s: &Option<String>| s.as_ref().map_or(RawStr::EMPTY, |s| RawStr::new(s.as_bytes()));
    let mut owned = Box::new(OwnedError {
        raw: RawError {
            struct_size: size_of::<RawError>() as u32,
            code: error.code as u32,
            message: RawStr::EMPTY,
            hint: RawStr::EMPTY,
            native_code: RawStr::EMPTY,
            file: RawStr::EMPTY,
            owner: ptr::null_mut(),
            release: Some(release_error),
        },
        hint: error.hint.as_ref().map(Hint::to_wire),
        error,
    });
    owned.raw.message = RawStr::new(owned.error.message.as_bytes());
    owned.raw.hint = text(&owned.hint);
    owned.raw.native_code = text(&owned.error.native_code);
    owned.raw.file = text(&owned.error.file);
    let leaked = Box::into_raw(owned);
    // SAFETY: `leaked` was just leaked; `release_error` takes it back through `owner`.
    unsafe {
        (*leaked).raw.owner = leaked.cast();
        &raw mut (*leaked).raw
    }
}

/// Takes over what a call returned.
///
/// # Safety
/// `raw` is null or an error nobody has released.
pub unsafe fn error_from_raw(raw: *mut RawError) -> Result<()> {
    if raw.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise; the strings live until `release`.
    unsafe {
        let e = &*raw;
        let optional = |s: RawStr| (s.len > 0).then(|| s.text());
        let error = Error {
            code: ErrorCode::from_u32(e.code),
            message: e.message.text(),
            hint: optional(e.hint).map(Hint::of_wire),
            native_code: optional(e.native_code),
            file: optional(e.file),
        };
        if let Some(release) = e.release {
            release(raw);
        }
        Err(error)
    }
}

// ---- buffers ----

unsafe extern "C" fn release_buffer(raw: *mut RawBuffer) {
    // SAFETY: `owner` is the vector leaked by `buffer_to_raw`; the buffer is emptied, so that a second
    // release does nothing.
    unsafe {
        if !raw.is_null() && !(*raw).owner.is_null() {
            drop(Box::from_raw((*raw).owner.cast::<Vec<u8>>()));
            raw.write(RawBuffer::EMPTY);
        }
    }
}

/// Gives `bytes` to the other side.
pub fn buffer_to_raw(bytes: Vec<u8>) -> RawBuffer {
    let leaked = Box::into_raw(Box::new(bytes));
    // SAFETY: just leaked.
    let (ptr, len) = unsafe { ((*leaked).as_ptr(), (*leaked).len()) };
    RawBuffer { ptr, len, owner: leaked.cast(), release: Some(release_buffer) }
}

/// Copies a buffer out and releases it.
///
/// # Safety
/// `raw` is empty or was made by the other side and not released.
pub unsafe fn buffer_from_raw(raw: &mut RawBuffer) -> Vec<u8> {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = RawStr { ptr: raw.ptr, len: raw.len }.bytes().to_vec();
        if let Some(release) = raw.release {
            release(raw);
        }
        bytes
    }
}

// ---- host ----

/// `&dyn Host` behind a thin pointer.
struct HostRef<'a>(&'a dyn Host);

unsafe extern "C" fn host_log(ctx: *const c_void, level: u32, target: RawStr, message: RawStr) {
    // SAFETY: `ctx` is the `HostRef` lent by `with_host`; strings are valid during the call. A panic of the
    // host's logger must not unwind into foreign code.
    let _ = catch_unwind(|| unsafe {
        (*ctx.cast::<HostRef>()).0.log(LogLevel::from_u32(level), &target.text(), &message.text());
    });
}

unsafe extern "C" fn host_progress(ctx: *const c_void, phase: RawStr, step: u64, total: u64) -> i32 {
    // SAFETY: as in `host_log`. A panicking host cancels.
    let flow = catch_unwind(|| unsafe { (*ctx.cast::<HostRef>()).0.progress(&phase.text(), step, total) });
    (flow.unwrap_or(Flow::Cancel) == Flow::Cancel) as i32
}

unsafe extern "C" fn host_cancelled(ctx: *const c_void) -> i32 {
    // SAFETY: as in `host_log`. A panicking host cancels.
    catch_unwind(|| unsafe { (*ctx.cast::<HostRef>()).0.cancelled() }).unwrap_or(true) as i32
}

/// Lends a host to C for the length of `body`.
pub fn with_host<T>(host: &dyn Host, body: impl FnOnce(&RawHost) -> T) -> T {
    let reference = HostRef(host);
    body(&RawHost {
        struct_size: size_of::<RawHost>() as u32,
        reserved: 0,
        ctx: (&raw const reference).cast(),
        log: Some(host_log),
        progress: Some(host_progress),
        cancelled: Some(host_cancelled),
    })
}

/// A host on the other side of the border.
pub struct ForeignHost<'a>(Option<&'a RawHost>);

// SAFETY: the ABI says that all functions of a host may be called from any thread.
unsafe impl Sync for ForeignHost<'_> {}

impl ForeignHost<'_> {
    /// # Safety
    /// `raw` is null or valid as long as the value lives.
    pub unsafe fn new(raw: *const RawHost) -> Self {
        // SAFETY: the caller's promise.
        ForeignHost(unsafe { raw.as_ref() })
    }
}

impl Host for ForeignHost<'_> {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        if let Some((raw, log)) = self.0.and_then(|h| Some((h, h.log?))) {
            // SAFETY: the host's own function with the host's own context.
            unsafe {
                log(raw.ctx, level as u32, RawStr::new(target.as_bytes()), RawStr::new(message.as_bytes()))
            }
        }
    }
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        let Some((raw, progress)) = self.0.and_then(|h| Some((h, h.progress?))) else {
            return Flow::Continue;
        };
        // SAFETY: as above.
        let answer = unsafe { progress(raw.ctx, RawStr::new(phase.as_bytes()), step, total) };
        if answer == 0 { Flow::Continue } else { Flow::Cancel }
    }
    fn cancelled(&self) -> bool {
        // SAFETY: as above.
        self.0.and_then(|h| Some((h, h.cancelled?))).is_some_and(|(raw, poll)| unsafe { poll(raw.ctx) != 0 })
    }
}

// ---- weight sources ----

struct SourceRef<'a>(&'a dyn WeightSource);

/// Keeps a delivered weight, its dimensions and its path alive until `release`.
struct LentWeight<'a> {
    weight: Weight<'a>,
    dims: Vec<u64>,
    path: String,
}

unsafe extern "C" fn source_get(ctx: *const c_void, name: RawStr, out: *mut RawWeight) -> *mut RawError {
    error_to_raw(contain("the host's weight source", || {
        // SAFETY: `ctx` is the `SourceRef` lent by `with_source`, `name` valid during the call.
        let (source, name) = unsafe { ((*ctx.cast::<SourceRef>()).0, name.text()) };
        let mut weight = source.get(&name)?;
        let (path, offset) = match weight.file.take() {
            // A path that is not UTF-8 cannot cross; the bytes still can.
            Some((path, offset)) => (path.into_os_string().into_string().unwrap_or_default(), offset),
            None => (String::new(), 0),
        };
        let dims = weight.shape.iter().map(|d| *d as u64).collect();
        let lent = Box::new(LentWeight { weight, dims, path });
        let raw = RawWeight {
            struct_size: size_of::<RawWeight>() as u32,
            dtype: lent.weight.dtype as u32,
            rank: lent.dims.len(),
            dims: lent.dims.as_ptr(),
            data: lent.weight.data().as_ptr(),
            len: lent.weight.data().len(),
            file: RawStr::new(lent.path.as_bytes()),
            offset,
            owner: Box::into_raw(lent).cast(),
        };
        // SAFETY: `out` points to a `RawWeight` of the caller.
        unsafe { out.write(raw) };
        Ok(())
    }))
}

unsafe extern "C" fn source_release(_: *const c_void, weight: *mut RawWeight) {
    // SAFETY: `owner` is the box leaked by `source_get`, handed back once.
    let _ = catch_unwind(|| unsafe {
        if !weight.is_null() && !(*weight).owner.is_null() {
            drop(Box::from_raw((*weight).owner.cast::<LentWeight>()));
            (*weight).owner = ptr::null_mut();
        }
    });
}

/// Lends a weight source to C for the length of `body`.
pub fn with_source<T>(source: &dyn WeightSource, body: impl FnOnce(&RawWeightSource) -> T) -> T {
    let reference = SourceRef(source);
    body(&RawWeightSource {
        struct_size: size_of::<RawWeightSource>() as u32,
        reserved: 0,
        ctx: (&raw const reference).cast(),
        get: Some(source_get),
        release: Some(source_release),
    })
}

/// A weight source on the other side of the border.
pub struct ForeignSource<'a>(Option<&'a RawWeightSource>);

// SAFETY: the ABI says that both functions of a source may be called from any thread.
unsafe impl Sync for ForeignSource<'_> {}

impl ForeignSource<'_> {
    /// # Safety
    /// `raw` is null or valid as long as the value lives.
    pub unsafe fn new(raw: *const RawWeightSource) -> Self {
        // SAFETY: the caller's promise.
        ForeignSource(unsafe { raw.as_ref() })
    }
}

struct ForeignBytes<'a> {
    source: &'a RawWeightSource,
    raw: RawWeight,
}

// SAFETY: the ABI lets a weight be released by any thread, and its bytes are read only.
unsafe impl Send for ForeignBytes<'_> {}

impl Deref for ForeignBytes<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the source keeps the bytes until `release`, which happens on drop.
        unsafe { RawStr { ptr: self.raw.data, len: self.raw.len }.bytes() }
    }
}

impl Drop for ForeignBytes<'_> {
    fn drop(&mut self) {
        if let Some(release) = self.source.release {
            // SAFETY: released once, here.
            unsafe { release(self.source.ctx, &mut self.raw) }
        }
    }
}

impl WeightSource for ForeignSource<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let (source, get) = self
            .0
            .and_then(|s| Some((s, s.get?)))
            .ok_or_else(|| Error::precondition("the host gave no weight source"))?;
        let mut raw = RawWeight {
            struct_size: size_of::<RawWeight>() as u32,
            dtype: 0,
            rank: 0,
            dims: ptr::null(),
            data: ptr::null(),
            len: 0,
            file: RawStr::EMPTY,
            offset: 0,
            owner: ptr::null_mut(),
        };
        // SAFETY: the source's own function; `raw` is ours.
        unsafe { error_from_raw(get(source.ctx, RawStr::new(name.as_bytes()), &mut raw))? };
        let bytes = ForeignBytes { source, raw };
        let dtype = DType::from_onnx(bytes.raw.dtype as i32).ok_or_else(|| {
            Error::invalid(format!("weight {name:?} has the unknown dtype {}", bytes.raw.dtype))
        })?;
        // SAFETY: `dims` has `rank` numbers and lives until release.
        let (shape, path) =
            unsafe { (shape_from_raw(bytes.raw.dims, bytes.raw.rank), bytes.raw.file.text()) };
        let offset = bytes.raw.offset;
        let weight = Weight::new(dtype, shape, bytes)?;
        Ok(if path.is_empty() { weight } else { weight.in_file(path.into(), offset) })
    }
}

/// # Safety
/// `dims` points to `rank` numbers, or `rank` is zero.
pub(super) unsafe fn shape_from_raw(dims: *const u64, rank: usize) -> Vec<usize> {
    if rank == 0 || dims.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(dims, rank) }.iter().map(|d| *d as usize).collect()
}

// ---- output sinks ----

struct SinkRef<'a>(&'a mut dyn OutputSink);

unsafe extern "C" fn sink_allocate(
    ctx: *mut c_void,
    specs: *const RawOutputSpec,
    count: usize,
    buffers: *mut *mut u8,
) -> *mut RawError {
    error_to_raw(contain("the host's output sink", || {
        let mut outputs = Vec::new();
        for i in 0..count {
            // SAFETY: `specs` has `count` entries, each with `rank` dims.
            let (dtype, shape) = unsafe {
                let spec = &*specs.add(i);
                (spec.dtype, shape_from_raw(spec.dims, spec.rank))
            };
            let dtype = DType::from_onnx(dtype as i32)
                .ok_or_else(|| Error::invalid(format!("output {i} has the unknown dtype {dtype}")))?;
            outputs.push(OutputSpec { dtype, shape });
        }
        // SAFETY: `ctx` is the `SinkRef` lent by `with_sink`, used by the running thread only.
        let slices = unsafe { (*ctx.cast::<SinkRef>()).0.allocate(&outputs)? };
        for (i, slice) in slices.into_iter().enumerate() {
            // SAFETY: `buffers` has room for `count` pointers.
            unsafe { buffers.add(i).write(slice.as_mut_ptr()) };
        }
        Ok(())
    }))
}

/// Lends a sink to C for the length of `body`.
pub fn with_sink<T>(sink: &mut dyn OutputSink, body: impl FnOnce(&RawOutputSink) -> T) -> T {
    let mut reference = SinkRef(sink);
    body(&RawOutputSink {
        struct_size: size_of::<RawOutputSink>() as u32,
        reserved: 0,
        ctx: (&raw mut reference).cast(),
        allocate: Some(sink_allocate),
    })
}

/// A sink on the other side of the border.
pub struct ForeignSink<'a>(Option<&'a RawOutputSink>);

impl ForeignSink<'_> {
    /// # Safety
    /// `raw` is null or valid as long as the value lives.
    pub unsafe fn new(raw: *const RawOutputSink) -> Self {
        // SAFETY: the caller's promise.
        ForeignSink(unsafe { raw.as_ref() })
    }
}

impl OutputSink for ForeignSink<'_> {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        let (sink, allocate) = self
            .0
            .and_then(|s| Some((s, s.allocate?)))
            .ok_or_else(|| Error::precondition("the host gave no output sink"))?;
        let dims: Vec<Vec<u64>> =
            outputs.iter().map(|o| o.shape.iter().map(|d| *d as u64).collect()).collect();
        let specs: Vec<RawOutputSpec> = outputs
            .iter()
            .zip(&dims)
            .map(|(o, d)| RawOutputSpec {
                dtype: o.dtype as u32,
                reserved: 0,
                rank: d.len(),
                dims: d.as_ptr(),
            })
            .collect();
        let mut buffers = vec![ptr::null_mut(); outputs.len()];
        // SAFETY: the sink's own function; both arrays have `outputs.len()` entries.
        unsafe { error_from_raw(allocate(sink.ctx, specs.as_ptr(), specs.len(), buffers.as_mut_ptr()))? };
        outputs
            .iter()
            .zip(buffers)
            .map(|(o, buffer)| match o.dtype.bytes_of(&o.shape) {
                Some(0) => Ok(&mut [][..]),
                // SAFETY: the host lends `len` bytes for the rest of the run, each buffer apart from the others.
                Some(len) if !buffer.is_null() => Ok(unsafe { std::slice::from_raw_parts_mut(buffer, len) }),
                _ => Err(Error::internal("the host lent no buffer for an output")),
            })
            .collect()
    }
}
