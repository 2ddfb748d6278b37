use super::{CompiledModel, check, handle, model::take_shape};
use openvino_sys::{self as ov, ov_element_type_e, ov_status_e};
use sdrun_abi::{DType, Error, OutputSpec, Result, TensorView};
use sdrun_provider_common::unsupported;
use std::{
    ffi::c_void,
    ptr::{self, NonNull},
    sync::Arc,
};

/// Name and type of an input or output.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    pub(crate) name: String,
    pub(crate) dtype: DType,
}

/// Interval in milliseconds at which a running inference asks the host whether to stop.
const POLL_MS: i64 = 50;

/// `ov::InferRequest`, bound to memory that is lent for one run at a time.
pub(crate) struct InferRequest {
    request: NonNull<ov::ov_infer_request_t>,
    inputs: Vec<Io>,
    outputs: Vec<Io>,
    /// OpenVINO's index of each input; `None` for an unused input that OpenVINO dropped.
    ports: Vec<Option<usize>>,
    /// The current binding of each input and output.
    bound_inputs: Vec<Option<Binding>>,
    bound_outputs: Vec<Option<Binding>>,
    model: Arc<CompiledModel>,
}

// SAFETY: any thread may use a request, but only one at a time; methods that run it take `&mut self`.
unsafe impl Send for InferRequest {}

/// Memory that a port of the request is bound to. It may be freed between runs. That is safe because the request
/// accesses tensors only while it infers, and each run first rebinds what has changed.
#[derive(Debug)]
struct Binding {
    data: *const u8,
    shape: Vec<usize>,
}

impl Binding {
    fn is(&self, data: *const u8, shape: &[usize]) -> bool {
        self.data == data && self.shape == shape
    }
}

impl InferRequest {
    pub(super) fn new(
        request: NonNull<ov::ov_infer_request_t>,
        model: Arc<CompiledModel>,
        inputs: Vec<Io>,
        outputs: Vec<Io>,
        ports: Vec<Option<usize>>,
    ) -> Self {
        let (i, o) = (inputs.len(), outputs.len());
        InferRequest {
            request,
            inputs,
            outputs,
            ports,
            bound_inputs: (0..i).map(|_| None).collect(),
            bound_outputs: (0..o).map(|_| None).collect(),
            model,
        }
    }

    /// Creates another request for the same model, with nothing bound.
    pub(crate) fn again(&self) -> Result<InferRequest> {
        self.model.request(self.inputs.clone(), self.outputs.clone())
    }

    /// Runs one inference from `inputs` into `outputs`, both without a copy. If `cancelled` is given, it is polled
    /// during the run. Without it, the calling thread computes, which saves passing the work to another thread.
    pub(crate) fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut [(&OutputSpec, &mut [u8])],
        cancelled: Option<&dyn Fn() -> bool>,
    ) -> Result<()> {
        self.bind_inputs(inputs)?;
        if outputs.len() != self.outputs.len() {
            return Err(count_mismatch("outputs", self.outputs.len(), outputs.len()));
        }
        for (index, (spec, buffer)) in outputs.iter_mut().enumerate() {
            let io = &self.outputs[index];
            check_tensor("output", io, spec.dtype, &spec.shape, buffer.len())?;
            if self.bound_outputs[index].as_ref().is_some_and(|b| b.is(buffer.as_ptr(), &spec.shape)) {
                continue;
            }
            self.bound_outputs[index] = None;
            let tensor = Tensor::over(spec.dtype, &spec.shape, buffer.as_mut_ptr())?;
            // SAFETY: request and tensor are alive, and the memory is lent for the duration of this method.
            let status = unsafe {
                ov::ov_infer_request_set_output_tensor_by_index(
                    self.request.as_ptr(),
                    index,
                    tensor.0.as_ptr(),
                )
            };
            check(status, &format!("take the buffer of output `{}`", io.name))?;
            self.bound_outputs[index] = Some(Binding { data: buffer.as_ptr(), shape: spec.shape.clone() });
        }
        self.infer(cancelled)
    }

    /// Runs one inference into OpenVINO's own memory, for outputs whose shapes are known only after the run. Read
    /// them with [`InferRequest::output`]. Do not mix with [`InferRequest::run`] on one request.
    pub(crate) fn run_into_own(
        &mut self,
        inputs: &[TensorView<'_>],
        cancelled: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<OutputSpec>> {
        self.bind_inputs(inputs)?;
        self.infer(cancelled)?;
        (0..self.outputs.len())
            .map(|index| {
                let tensor = self.output_tensor(index)?;
                Ok(OutputSpec { dtype: self.outputs[index].dtype, shape: tensor.shape()? })
            })
            .collect()
    }

    /// Copies output `index` of the last [`InferRequest::run_into_own`] into `buffer`, which must have exactly its
    /// length.
    pub(crate) fn output(&self, index: usize, buffer: &mut [u8]) -> Result<()> {
        self.output_tensor(index)?.copy_to(buffer, &self.outputs[index].name)
    }

    fn output_tensor(&self, index: usize) -> Result<Tensor> {
        let mut tensor = ptr::null_mut();
        // SAFETY: the request is alive, the out pointer valid.
        let status = unsafe {
            ov::ov_infer_request_get_output_tensor_by_index(self.request.as_ptr(), index, &mut tensor)
        };
        check(status, "deliver an output")?;
        Ok(Tensor(handle(tensor)?))
    }

    fn bind_inputs(&mut self, inputs: &[TensorView<'_>]) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            return Err(count_mismatch("inputs", self.inputs.len(), inputs.len()));
        }
        for (index, input) in inputs.iter().enumerate() {
            let io = &self.inputs[index];
            check_tensor("input", io, input.dtype, input.shape, input.data.len())?;
            let Some(port) = self.ports[index] else { continue };
            let data = input.data.as_ptr();
            if self.bound_inputs[index].as_ref().is_some_and(|b| b.is(data, input.shape)) {
                continue;
            }
            self.bound_inputs[index] = None;
            // The C API takes a mutable pointer, but OpenVINO does not write to inputs.
            let tensor = Tensor::over(input.dtype, input.shape, data.cast_mut())?;
            // SAFETY: request and tensor are alive, and the memory is lent for the duration of the run.
            let status = unsafe {
                ov::ov_infer_request_set_input_tensor_by_index(self.request.as_ptr(), port, tensor.0.as_ptr())
            };
            check(status, &format!("take input `{}`", io.name))?;
            self.bound_inputs[index] = Some(Binding { data, shape: input.shape.to_vec() });
        }
        Ok(())
    }

    /// Runs to the end. When this returns or unwinds, the request no longer accesses the lent memory.
    fn infer(&mut self, cancelled: Option<&dyn Fn() -> bool>) -> Result<()> {
        let request = self.request.as_ptr();
        let Some(cancelled) = cancelled else {
            // SAFETY: the request is alive, and its bound memory is lent for the duration of the run.
            return check(unsafe { ov::ov_infer_request_infer(request) }, "run the model")
                .map_err(unsupported);
        };
        // SAFETY: as above. `running` waits for the end, even if `cancelled` panics.
        check(unsafe { ov::ov_infer_request_start_async(request) }, "start the model")?;
        let running = Running(request);
        let mut asked = false;
        // SAFETY: the request is alive.
        while unsafe { ov::ov_infer_request_wait_for(request, POLL_MS) } == ov_status_e::RESULT_NOT_READY {
            if !asked && cancelled() {
                asked = true;
                // SAFETY: as above. If cancelling fails, the loop still waits for the run.
                let _ = unsafe { ov::ov_infer_request_cancel(request) };
            }
        }
        check(running.wait(), "run the model").map_err(unsupported)
    }
}

/// A run in progress.
struct Running(*mut ov::ov_infer_request_t);

impl Running {
    fn wait(self) -> ov_status_e {
        let request = self.0;
        std::mem::forget(self);
        // SAFETY: the request outlives its run, because `InferRequest::infer` borrows it.
        unsafe { ov::ov_infer_request_wait(request) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // SAFETY: as in `wait`.
        unsafe {
            let _ = ov::ov_infer_request_cancel(self.0);
            let _ = ov::ov_infer_request_wait(self.0);
        }
    }
}

impl Drop for InferRequest {
    fn drop(&mut self) {
        // SAFETY: created by the C API and freed once. No run is in progress, because every run is waited for.
        unsafe { ov::ov_infer_request_free(self.request.as_ptr()) }
    }
}

fn count_mismatch(what: &str, needed: usize, given: usize) -> Error {
    Error::invalid(format!("the model has {needed} {what}, {given} were given"))
}

/// Checks a tensor. The host has checked it already; here the check protects memory.
fn check_tensor(what: &str, io: &Io, dtype: DType, shape: &[usize], len: usize) -> Result<()> {
    if dtype != io.dtype {
        return Err(Error::invalid(format!("{what} `{}` must be {}, not {dtype}", io.name, io.dtype)));
    }
    match dtype.bytes_of(shape) {
        Some(bytes) if bytes == len => Ok(()),
        _ => Err(Error::invalid(format!(
            "{what} `{}` has {len} bytes, which is not {dtype} {shape:?}",
            io.name
        ))),
    }
}

/// `ov::Tensor`. Dropping a tensor over lent memory does not free that memory.
struct Tensor(NonNull<ov::ov_tensor_t>);

impl Tensor {
    /// A view of memory that the caller guarantees to be valid. This call does not access it.
    fn over(dtype: DType, shape: &[usize], data: *mut u8) -> Result<Self> {
        let element = element_type(dtype);
        let mut dims = shape
            .iter()
            .map(|d| i64::try_from(*d).map_err(|_| Error::invalid(format!("dimension {d} is too large"))))
            .collect::<Result<Vec<i64>>>()?;
        let shape = ov::ov_shape_t { rank: dims.len() as i64, dims: dims.as_mut_ptr() };
        let mut tensor = ptr::null_mut();
        // SAFETY: the call copies the shape and stores the pointer, which is not null (slices never are).
        let status =
            unsafe { ov::ov_tensor_create_from_host_ptr(element, shape, data.cast::<c_void>(), &mut tensor) };
        check(status, "wrap a tensor")?;
        Ok(Tensor(handle(tensor)?))
    }

    fn shape(&self) -> Result<Vec<usize>> {
        let mut shape = ov::ov_shape_t { rank: 0, dims: ptr::null_mut() };
        let mut elements = 0;
        // SAFETY: the tensor is alive and the out structures valid; on success the library has filled them.
        unsafe {
            let status = ov::ov_tensor_get_shape(self.0.as_ptr(), &mut shape);
            // The C API of 2026.4 calls the shape of a single number an invalid parameter.
            if status == ov_status_e::INVALID_C_PARAM
                && ov::ov_tensor_get_size(self.0.as_ptr(), &mut elements) == ov_status_e::OK
                && elements == 1
            {
                return Ok(Vec::new());
            }
            check(status, "tell the shape of an output")?;
            Ok(take_shape(&mut shape))
        }
    }

    fn copy_to(&self, buffer: &mut [u8], name: &str) -> Result<()> {
        let (mut len, mut data) = (0, ptr::null_mut());
        // SAFETY: the tensor is alive, the out pointers are valid.
        unsafe {
            check(ov::ov_tensor_get_byte_size(self.0.as_ptr(), &mut len), "tell the size of an output")?;
            if len != buffer.len() {
                return Err(Error::internal(format!(
                    "output `{name}` has {len} bytes, but its type and shape need {}",
                    buffer.len()
                )));
            }
            if len > 0 {
                check(ov::ov_tensor_data(self.0.as_ptr(), &mut data), "deliver an output")?;
                // The tensor owns `len` bytes at `data`, and `buffer` has the same length.
                ptr::copy_nonoverlapping(data.cast::<u8>().cast_const(), buffer.as_mut_ptr(), len);
            }
        }
        Ok(())
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: created by the C API and freed once.
        unsafe { ov::ov_tensor_free(self.0.as_ptr()) }
    }
}

fn element_type(dtype: DType) -> ov_element_type_e {
    use ov_element_type_e as E;
    match dtype {
        DType::F32 => E::F32,
        DType::U8 => E::U8,
        DType::I8 => E::I8,
        DType::U16 => E::U16,
        DType::I16 => E::I16,
        DType::I32 => E::I32,
        DType::I64 => E::I64,
        DType::Bool => E::OV_BOOLEAN,
        DType::F16 => E::F16,
        DType::F64 => E::F64,
        DType::U32 => E::U32,
        DType::U64 => E::U64,
        DType::BF16 => E::BF16,
        DType::F8E4M3 => E::F8E4M3,
        // How the crate spells f8e5m2.
        DType::F8E5M2 => E::F8E5M3,
    }
}
