//! Output sinks across the ABI.

use super::{contain, dtype_from_raw, error_from_raw, error_to_raw, shape_from_raw};
use crate::{
    Error, OutputSink, OutputSpec, Result,
    ffi::{prefix, raw::*},
};
use std::{ffi::c_void, marker::PhantomData, ptr};

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
            let dtype = dtype_from_raw(dtype, || format!("output {i}"))?;
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

/// Lends a sink to C for the duration of `body`.
pub fn with_sink<T>(sink: &mut dyn OutputSink, body: impl FnOnce(&RawOutputSink) -> T) -> T {
    let mut reference = SinkRef(sink);
    body(&RawOutputSink {
        struct_size: size_of::<RawOutputSink>() as u32,
        reserved: 0,
        ctx: (&raw mut reference).cast(),
        allocate: Some(sink_allocate),
    })
}

/// A sink on the other side of the ABI.
pub struct ForeignSink<'a>(Option<RawOutputSink>, PhantomData<&'a RawOutputSink>);

impl ForeignSink<'_> {
    /// # Safety
    /// `raw` is null or valid for the lifetime of the value.
    pub unsafe fn new(raw: *const RawOutputSink) -> Self {
        // SAFETY: guaranteed by the caller.
        ForeignSink(unsafe { prefix::read(raw) }, PhantomData)
    }
}

impl OutputSink for ForeignSink<'_> {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        let (sink, allocate) = self
            .0
            .and_then(|s| Some((s, s.allocate?)))
            .ok_or_else(|| Error::precondition("the host provided no output sink"))?;
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
                // SAFETY: the host lends `len` bytes for the rest of the run, and the buffers do not overlap.
                Some(len) if !buffer.is_null() => Ok(unsafe { std::slice::from_raw_parts_mut(buffer, len) }),
                _ => Err(Error::internal("the host provided no buffer for an output")),
            })
            .collect()
    }
}
