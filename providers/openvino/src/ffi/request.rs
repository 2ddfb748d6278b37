use super::{CompiledModel, check, handle, model::take_shape};
use openvino_sys::{self as ov, ov_element_type_e, ov_status_e};
use sdrun_abi::{DType, Error, OutputSpec, Result, TensorView};
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

/// How long a wait lasts before the host is asked whether to stop, in milliseconds.
const POLL_MS: i64 = 50;

/// `ov::InferRequest`, bound to memory that is lent for one run at a time.
pub(crate) struct InferRequest {
    request: NonNull<ov::ov_infer_request_t>,
    inputs: Vec<Io>,
    outputs: Vec<Io>,
    /// OpenVINO's number of each input; `None` where it dropped one that nothing uses.
    ports: Vec<Option<usize>>,
    /// What each input and output is bound to.
    bound_inputs: Vec<Option<Binding>>,
    bound_outputs: Vec<Option<Binding>>,
    model: Arc<CompiledModel>,
}

// SAFETY: a request may be used from any thread, by one at a time; methods that run it take `&mut self`.
unsafe impl Send for InferRequest {}

/// Memory a port of the request is bound to. Between runs it may be gone: the request only reads and
/// writes tensors while it infers, and each run first binds what has changed.
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

    /// Another request on the same model, bound to nothing.
    pub(crate) fn again(&self) -> Result<InferRequest> {
        self.model.request(self.inputs.clone(), self.outputs.clone())
    }

    /// One inference from `inputs` into `outputs`, both used where they lie. `cancelled` is polled while it
    /// runs; without it the calling thread computes, which saves handing the work to another.
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
            // SAFETY: request and tensor are alive; the memory is lent for the length of this method.
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

    /// One inference into memory of OpenVINO's own, for outputs whose shapes are known only afterwards.
    /// Read them with [`InferRequest::output`]. Never mixed with [`InferRequest::run`] on one request.
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

    /// Copies output `index` of the last [`InferRequest::run_into_own`] into `buffer`, which must be as
    /// long as it is.
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
            // The C API wants a mutable pointer; OpenVINO does not write to inputs.
            let tensor = Tensor::over(input.dtype, input.shape, data.cast_mut())?;
            // SAFETY: request and tensor are alive; the memory is lent for the length of the run.
            let status = unsafe {
                ov::ov_infer_request_set_input_tensor_by_index(self.request.as_ptr(), port, tensor.0.as_ptr())
            };
            check(status, &format!("take input `{}`", io.name))?;
            self.bound_inputs[index] = Some(Binding { data, shape: input.shape.to_vec() });
        }
        Ok(())
    }

    /// Runs to the end: when this returns or unwinds, the request touches none of the lent memory any more.
    fn infer(&mut self, cancelled: Option<&dyn Fn() -> bool>) -> Result<()> {
        let request = self.request.as_ptr();
        let Some(cancelled) = cancelled else {
            // SAFETY: the request is alive and what it is bound to is lent for the length of the run.
            return check(unsafe { ov::ov_infer_request_infer(request) }, "run the model");
        };
        // SAFETY: as above; `running` waits for the end, also where `cancelled` panics.
        check(unsafe { ov::ov_infer_request_start_async(request) }, "start the model")?;
        let running = Running(request);
        let mut asked = false;
        // SAFETY: the request is alive.
        while unsafe { ov::ov_infer_request_wait_for(request, POLL_MS) } == ov_status_e::RESULT_NOT_READY {
            if !asked && cancelled() {
                asked = true;
                // SAFETY: as above. A failure changes nothing: the run is waited for in any case.
                let _ = unsafe { ov::ov_infer_request_cancel(request) };
            }
        }
        check(running.wait(), "run the model")
    }
}

/// A run under way.
struct Running(*mut ov::ov_infer_request_t);

impl Running {
    fn wait(self) -> ov_status_e {
        let request = self.0;
        std::mem::forget(self);
        // SAFETY: the request outlives its run: `InferRequest::infer` borrows it.
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
        // SAFETY: created by the C API, freed once; no run is under way, because runs are waited for.
        unsafe { ov::ov_infer_request_free(self.request.as_ptr()) }
    }
}

fn count_mismatch(what: &str, needed: usize, given: usize) -> Error {
    Error::invalid(format!("the model has {needed} {what}, {given} were given"))
}

/// The host has checked this; here it also guards memory.
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

/// `ov::Tensor`. Dropping one over lent memory leaves the memory alone.
struct Tensor(NonNull<ov::ov_tensor_t>);

impl Tensor {
    /// A view of memory that the caller vouches for; nothing is read or written here.
    fn over(dtype: DType, shape: &[usize], data: *mut u8) -> Result<Self> {
        let element = element_type(dtype);
        let mut dims = shape
            .iter()
            .map(|d| i64::try_from(*d).map_err(|_| Error::invalid(format!("dimension {d} is too large"))))
            .collect::<Result<Vec<i64>>>()?;
        let shape = ov::ov_shape_t { rank: dims.len() as i64, dims: dims.as_mut_ptr() };
        let mut tensor = ptr::null_mut();
        // SAFETY: the shape is copied by the call; the pointer is stored and is not null (slices never are).
        let status =
            unsafe { ov::ov_tensor_create_from_host_ptr(element, shape, data.cast::<c_void>(), &mut tensor) };
        check(status, "wrap a tensor")?;
        Ok(Tensor(handle(tensor)?))
    }

    fn shape(&self) -> Result<Vec<usize>> {
        let mut shape = ov::ov_shape_t { rank: 0, dims: ptr::null_mut() };
        // SAFETY: the tensor is alive, the out structure valid; on success the library filled it.
        unsafe {
            check(ov::ov_tensor_get_shape(self.0.as_ptr(), &mut shape), "tell the shape of an output")?;
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
                    "output `{name}` has {len} bytes where its type and shape make {}",
                    buffer.len()
                )));
            }
            if len > 0 {
                check(ov::ov_tensor_data(self.0.as_ptr(), &mut data), "deliver an output")?;
                // The tensor owns `len` bytes at `data`, and `buffer` is as long.
                ptr::copy_nonoverlapping(data.cast::<u8>().cast_const(), buffer.as_mut_ptr(), len);
            }
        }
        Ok(())
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: created by the C API, freed once.
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
        // The crate's spelling of f8e5m2.
        DType::F8E5M2 => E::F8E5M3,
    }
}
