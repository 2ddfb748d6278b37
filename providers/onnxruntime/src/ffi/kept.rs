use super::{
    check,
    devices::EpDevice,
    handle,
    memory::{Allocated, CpuMemory},
    session::{OrtSession, Owned, alone},
    tensor::Tensor,
};
use ort::{AsPointer, environment::Environment, sys};
use sdrun_abi::{DeviceTensor, Error, Host, Input, OutputSpec, Result};
use std::{
    ptr::{self, NonNull},
    slice,
    sync::Arc,
};

/// A tensor in the memory of a device.
pub(crate) struct Kept {
    /// `None` only while it is dropped.
    value: Option<Tensor<'static>>,
    /// The session that made it. WebGPU 0.4.0 crashes if a tensor is released after its session.
    _session: Arc<Owned>,
    spec: OutputSpec,
    device: &'static EpDevice,
    environment: Environment,
}

// SAFETY: a value that nobody changes can be used from any thread; sessions and copies that read it run one at a time (`alone`), and so
// does its release.
unsafe impl Send for Kept {}
// SAFETY: as for `Send`.
unsafe impl Sync for Kept {}

impl Kept {
    /// The value, if it is on this device.
    fn on<'t>(tensor: &'t dyn DeviceTensor, device: &EpDevice) -> Result<&'t Tensor<'static>> {
        let kept = tensor.downcast_ref::<Self>().filter(|kept| ptr::eq(kept.device, device));
        kept.and_then(|kept| kept.value.as_ref()).ok_or_else(|| {
            Error::invalid("a tensor on another device cannot be an input")
                .with_hint("make both sessions on one device, or copy the tensor to main memory")
        })
    }
}

impl DeviceTensor for Kept {
    fn spec(&self) -> &OutputSpec {
        &self.spec
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let Some(value) = &self.value else { return Err(Error::internal("the tensor is gone")) };
        let here = Tensor::writing(self.spec.dtype, &self.spec.shape, bytes)?;
        let _alone = alone();
        let (from, mut to) = (value.as_ptr().cast_const(), here.as_ptr().cast_const());
        // SAFETY: both arrays have one live value of the same type and shape; without a stream, the copy is done when this returns.
        let status = unsafe {
            (ort::api().CopyTensors)(self.environment.ptr().cast_mut(), &from, &mut to, ptr::null_mut(), 1)
        };
        check(status, "copy a tensor from the device")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _alone = alone();
        self.value = None;
    }
}

/// `OrtIoBinding`, released when dropped.
struct Binding(NonNull<sys::OrtIoBinding>);

impl Drop for Binding {
    fn drop(&mut self) {
        let _alone = alone();
        // SAFETY: released once, by the owner.
        unsafe { (ort::api().ReleaseIoBinding)(self.0.as_ptr()) }
    }
}

impl OrtSession {
    /// Runs one inference. The outputs that `keep` marks stay on the device. `deliver` receives the types and shapes of the others and
    /// returns buffers to copy them to.
    pub(crate) fn run_on_device<'s>(
        &mut self,
        (device, environment): (&'static EpDevice, &Environment),
        inputs: &[Input<'_>],
        keep: &[bool],
        host: Option<&dyn Host>,
        deliver: impl FnOnce(&[OutputSpec]) -> Result<Vec<&'s mut [u8]>>,
    ) -> Result<Vec<Kept>> {
        let there = device.memory().ok_or_else(|| Error::unsupported("cannot keep tensors on its device"))?;
        let (here, api) = (CpuMemory::new()?, ort::api());
        let stays = |at: usize| keep.get(at).copied().unwrap_or(false);
        // Values from the host live until the end of the run.
        let mut given = Vec::new();
        let mut binding = ptr::null_mut();
        // SAFETY: the session is alive; the out pointer is valid.
        check(unsafe { (api.CreateIoBinding)(self.as_ptr(), &mut binding) }, "prepare a run")?;
        let binding = Binding(handle(binding)?);
        {
            // Inputs from the host are copied to the device here.
            let _alone = alone();
            for (input, name) in inputs.iter().zip(self.input_names().iter().copied()) {
                let value = match input {
                    Input::Host(view) => {
                        given.push(Tensor::reading(view.dtype, view.shape, view.data)?);
                        given.last().map_or(ptr::null_mut(), Tensor::as_ptr)
                    }
                    Input::Device(tensor) => Kept::on(*tensor, device)?.as_ptr(),
                };
                // SAFETY: binding, name and value are alive; the binding holds a reference to the value.
                check(unsafe { (api.BindInput)(binding.0.as_ptr(), name, value) }, "take an input")?;
            }
            for (at, name) in self.output_names().iter().copied().enumerate() {
                let place = if stays(at) { there } else { here.as_ptr() };
                // SAFETY: binding, name and description of the memory are alive.
                let status = unsafe { (api.BindOutputToDevice)(binding.0.as_ptr(), name, place) };
                check(status, "place an output")?;
            }
        }
        let values = self.bound(&binding, host)?;
        let (mut kept, mut brought) = (Vec::new(), Vec::new());
        for ((at, value), stated) in values.into_iter().enumerate().zip(self.outputs()) {
            let spec = OutputSpec { dtype: stated.dtype, shape: value.shape()? };
            match stays(at) {
                true => kept.push(Kept {
                    value: Some(value),
                    _session: self.shared(),
                    spec,
                    device,
                    environment: environment.clone(),
                }),
                false => brought.push((value, &stated.name, spec)),
            }
        }
        let specs: Vec<OutputSpec> = brought.iter().map(|(.., spec)| spec.clone()).collect();
        let buffers = deliver(&specs)?;
        for ((value, name, _), buffer) in brought.iter().zip(buffers) {
            value.copy_to(buffer, name)?;
        }
        Ok(kept)
    }

    /// Runs with a binding; returns its outputs in order.
    fn bound(&mut self, binding: &Binding, host: Option<&dyn Host>) -> Result<Vec<Tensor<'static>>> {
        let session = self.as_ptr();
        self.run_options.terminable(host, |options| {
            let api = ort::api();
            let _alone = alone();
            // SAFETY: session, options and binding are alive, and only this call uses them.
            check(unsafe { (api.RunWithBinding)(session, options, binding.0.as_ptr()) }, "run the model")?;
            // SAFETY: as above.
            check(unsafe { (api.SynchronizeBoundOutputs)(binding.0.as_ptr()) }, "wait for the device")?;
            let (mut array, mut count) = (Allocated::none()?, 0);
            let (allocator, place) = (array.allocator(), array.place().cast());
            // SAFETY: the binding is alive; out pointers are valid.
            let status =
                unsafe { (api.GetBoundOutputValues)(binding.0.as_ptr(), allocator, place, &mut count) };
            check(status, "return the outputs")?;
            let first = array.memory().cast::<*mut sys::OrtValue>();
            if first.is_null() {
                return Ok(Vec::new());
            }
            // SAFETY: the array has as many values as stated.
            let values = unsafe { slice::from_raw_parts(first, count) };
            // SAFETY: each is a live tensor that now belongs to us.
            let own = |value: &*mut sys::OrtValue| Ok(unsafe { Tensor::from_raw(handle(*value)?) });
            values.iter().map(own).collect()
        })
    }
}
