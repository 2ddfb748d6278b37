use super::{InferRequest, Io, c_path, c_string, check, handle, take_string};
use openvino_sys as ov;
use sdrun_abi::{AlignedBuffer, Error, Result};
use std::{
    ffi::c_char,
    path::Path,
    ptr::{self, NonNull},
    sync::Arc,
};

/// `ov::Model`: a model as read, before compilation.
pub(crate) struct Model(pub(super) NonNull<ov::ov_model_t>);

// SAFETY: an `ov::Model` is a graph on the heap that is not bound to a thread, and `&mut` and `Drop` are exclusive.
unsafe impl Send for Model {}
// SAFETY: methods with `&self` only count inputs and outputs, or pass the model to `ov::Core::compile_model`, which
// works on a copy.
unsafe impl Sync for Model {}

impl Model {
    /// The numbers of inputs and outputs.
    pub(crate) fn io_counts(&self) -> Result<(usize, usize)> {
        let (mut inputs, mut outputs) = (0, 0);
        // SAFETY: the model is alive, the out pointers are valid.
        unsafe {
            check(ov::ov_model_inputs_size(self.0.as_ptr(), &mut inputs), "count the model's inputs")?;
            check(ov::ov_model_outputs_size(self.0.as_ptr(), &mut outputs), "count the model's outputs")?;
        }
        Ok((inputs, outputs))
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: created by the C API and freed once.
        unsafe { ov::ov_model_free(self.0.as_ptr()) }
    }
}

/// `ov::CompiledModel`: a model compiled for a device.
pub(crate) struct CompiledModel {
    pub(super) compiled: NonNull<ov::ov_compiled_model_t>,
    /// The blob of an imported model; empty for a compiled one. An imported model reads its weights there, because
    /// `ov_core_import_model` copies nothing (seen with 2026.4.1).
    pub(super) _blob: AlignedBuffer,
}

// SAFETY: an `ov::CompiledModel` does not change after compilation, and any thread may call its methods; OpenVINO's
// own documentation creates infer requests of one model from several threads.
unsafe impl Send for CompiledModel {}
// SAFETY: as above.
unsafe impl Sync for CompiledModel {}

impl CompiledModel {
    /// A property of the compiled model, as text.
    pub(crate) fn property(&self, key: &str) -> Result<String> {
        let c_key = c_string(key)?;
        let mut value: *mut c_char = ptr::null_mut();
        // SAFETY: the compiled model is alive, string and out pointer are valid.
        let status =
            unsafe { ov::ov_compiled_model_get_property(self.compiled.as_ptr(), c_key.as_ptr(), &mut value) };
        check(status, &format!("tell {key} of the compiled model"))?;
        // SAFETY: on success the value is a new string.
        Ok(unsafe { take_string(value) }.unwrap_or_default())
    }

    /// Writes the compiled model with its weights to a file.
    pub(crate) fn export(&self, file: &Path) -> Result<()> {
        let path = c_path(file)?;
        // SAFETY: the compiled model is alive, the path valid.
        let status = unsafe { ov::ov_compiled_model_export_model(self.compiled.as_ptr(), path.as_ptr()) };
        check(status, "export the compiled model")
    }

    /// Shapes of the outputs in order; `None` for an open shape.
    pub(crate) fn output_shapes(&self) -> Result<Vec<Option<Vec<usize>>>> {
        let mut count = 0;
        // SAFETY: the compiled model is alive, the out pointer valid.
        let status = unsafe { ov::ov_compiled_model_outputs_size(self.compiled.as_ptr(), &mut count) };
        check(status, "count the outputs")?;
        (0..count)
            .map(|index| {
                let mut port = ptr::null_mut();
                // SAFETY: as above.
                let status = unsafe {
                    ov::ov_compiled_model_output_by_index(self.compiled.as_ptr(), index, &mut port)
                };
                check(status, "describe an output")?;
                let port = Port(handle(port)?);
                Ok(port.shape())
            })
            .collect()
    }

    /// Creates a request that runs this model with these inputs and outputs.
    pub(crate) fn request(self: &Arc<Self>, inputs: Vec<Io>, outputs: Vec<Io>) -> Result<InferRequest> {
        let mut request = ptr::null_mut();
        // SAFETY: the compiled model is alive, the out pointer valid.
        let status =
            unsafe { ov::ov_compiled_model_create_infer_request(self.compiled.as_ptr(), &mut request) };
        check(status, "create an inference request")?;
        let request = handle(request)?;
        let ports = self.ports(&inputs)?;
        Ok(InferRequest::new(request, self.clone(), inputs, outputs, ports))
    }

    /// OpenVINO's index of each input. OpenVINO keeps the order of inputs and drops unused ones.
    fn ports(&self, inputs: &[Io]) -> Result<Vec<Option<usize>>> {
        let mut count = 0;
        // SAFETY: the compiled model is alive, the out pointer valid.
        let status = unsafe { ov::ov_compiled_model_inputs_size(self.compiled.as_ptr(), &mut count) };
        check(status, "count the inputs")?;
        if count == inputs.len() {
            return Ok((0..count).map(Some).collect());
        }
        let names = (0..count)
            .map(|index| {
                let mut port = ptr::null_mut();
                // SAFETY: as above.
                let status =
                    unsafe { ov::ov_compiled_model_input_by_index(self.compiled.as_ptr(), index, &mut port) };
                check(status, "describe an input")?;
                Port(handle(port)?).name()
            })
            .collect::<Result<Vec<String>>>()?;
        if let Some(unknown) = names.iter().find(|name| inputs.iter().all(|input| input.name != **name)) {
            return Err(Error::unsupported(format!(
                "OpenVINO expects an input `{unknown}` that the model does not have"
            )));
        }
        Ok(inputs.iter().map(|input| names.iter().position(|name| *name == input.name)).collect())
    }
}

impl Drop for CompiledModel {
    fn drop(&mut self) {
        // SAFETY: created by the C API and freed once, before the blob.
        unsafe { ov::ov_compiled_model_free(self.compiled.as_ptr()) }
    }
}

/// An input or output of a compiled model.
struct Port(NonNull<ov::ov_output_const_port_t>);

impl Port {
    /// Any one of the tensor's names.
    fn name(&self) -> Result<String> {
        let mut name: *mut c_char = ptr::null_mut();
        // SAFETY: the port is alive, the out pointer valid.
        check(unsafe { ov::ov_port_get_any_name(self.0.as_ptr(), &mut name) }, "name an input")?;
        // SAFETY: on success the name is a new string.
        Ok(unsafe { take_string(name) }.unwrap_or_default())
    }

    /// The shape; `None` if a dimension is open, because the C API does not report such a shape.
    fn shape(&self) -> Option<Vec<usize>> {
        let mut shape = ov::ov_shape_t { rank: 0, dims: ptr::null_mut() };
        // SAFETY: the port is alive, the out structure valid.
        if unsafe { ov::ov_const_port_get_shape(self.0.as_ptr(), &mut shape) } != ov::ov_status_e::OK {
            return None;
        }
        // SAFETY: on success the library has filled the shape.
        Some(unsafe { take_shape(&mut shape) })
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: created by the C API and freed once.
        unsafe { ov::ov_output_const_port_free(self.0.as_ptr()) }
    }
}

/// Copies and frees a shape that the library allocated.
///
/// # Safety
/// The library has filled `shape`, and it has not been freed.
pub(super) unsafe fn take_shape(shape: &mut ov::ov_shape_t) -> Vec<usize> {
    // SAFETY: the caller guarantees it; `dims` holds `rank` numbers.
    unsafe {
        let rank = usize::try_from(shape.rank).unwrap_or(0);
        let dims = (0..rank).map(|i| usize::try_from(*shape.dims.add(i)).unwrap_or(0)).collect();
        ov::ov_shape_free(shape);
        dims
    }
}
