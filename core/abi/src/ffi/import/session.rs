//! Sessions of a plugin.

use super::{
    Table, from_json,
    tensor::{PluginTensor, device_tensors, dims, raw_tensor},
    text,
};
use crate::{
    DeviceTensor, Error, Host, Input, MemoryReport, OutputSink, OutputSpec, RefitReport, Result, Session,
    TensorView, WeightSource,
    ffi::{callbacks::*, raw::*},
};
use std::{ffi::c_void, ptr};

pub(super) struct PluginSession {
    raw: &'static Table,
    handle: *mut c_void,
}

impl PluginSession {
    pub(super) fn new(raw: &'static Table, handle: *mut c_void) -> Self {
        PluginSession { raw, handle }
    }
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

/// Ensures that a plugin calls `allocate` exactly once.
struct CheckedSink<'a> {
    sink: &'a mut dyn OutputSink,
    calls: usize,
}

impl OutputSink for CheckedSink<'_> {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        self.calls += 1;
        if self.calls > 1 {
            return Err(Error::internal("the plugin requested output buffers twice in one run"));
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
            return Err(Error::internal("the plugin finished a run without requesting output buffers"));
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
        // Take ownership of all tensors before inspecting the first.
        let kept: Vec<_> = kept
            .iter()
            .zip(keep)
            .filter(|(_, keep)| *keep != 0)
            // SAFETY: the plugin returned it from this call.
            .map(|(made, _)| unsafe { PluginTensor::from_raw(self.raw, table, made) })
            .collect();
        if checked.calls == 0 {
            return Err(Error::internal("the plugin finished a run without requesting output buffers"));
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
