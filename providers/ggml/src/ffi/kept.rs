//! Outputs that stay on the device, in memory of their own.

use super::{
    api::*,
    library::Target,
    program::Program,
    tensor::{Tensor, new_tensor},
};
use sdrun_abi::{Error, ErrorCode, Result};

/// A copy of a program's output on its device.
pub(crate) struct Kept {
    target: Target,
    context: Ptr,
    /// Null if the tensor has no elements.
    buffer: Ptr,
    raw: TensorPtr,
    bytes: usize,
}

// SAFETY: only this value owns the memory behind the pointers, and ggml ties none of it to a thread.
unsafe impl Send for Kept {}
// SAFETY: shared references only read.
unsafe impl Sync for Kept {}

impl Drop for Kept {
    fn drop(&mut self) {
        let api = &self.target.ggml.api;
        // SAFETY: each was created by the matching function and is freed once, memory before its description.
        unsafe {
            if !self.buffer.is_null() {
                (api.ggml_backend_buffer_free)(self.buffer);
            }
            (api.ggml_free)(self.context);
        }
    }
}

impl Kept {
    /// Copies a tensor of `program`.
    ///
    /// # Errors
    /// `ResourceExhausted`; `Internal` if the tensor has no memory.
    pub(crate) fn copy_of(program: &Program, tensor: Tensor) -> Result<Self> {
        let exhausted =
            || Error::new(ErrorCode::ResourceExhausted, "no memory for an output that stays on the device");
        let (target, type_, count) = program.describe(tensor);
        let (ggml, api) = (target.ggml, &target.ggml.api);
        let bytes = program.size(tensor);
        let from = program.placed(tensor, bytes)?;
        // SAFETY: ggml allocates the memory itself. The context has room for one tensor.
        let context = unsafe {
            let mem_size = 2 * (api.ggml_tensor_overhead)();
            (api.ggml_init)(InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true })
        };
        if context.is_null() {
            return Err(exhausted());
        }
        let null = std::ptr::null_mut();
        let mut kept = Kept { target, context, buffer: null, raw: null.cast(), bytes };
        kept.raw = new_tensor(ggml, context, type_, [count, 1, 1, 1])?;
        if bytes == 0 {
            return Ok(kept);
        }
        let device = target.gpu().map_or(ggml.cpu.device, |gpu| gpu.device);
        // SAFETY: the context's only tensor gets memory on the device. Then both tensors have the same number of bytes.
        unsafe {
            let type_ = (api.ggml_backend_dev_buffer_type)(device);
            kept.buffer = (api.ggml_backend_alloc_ctx_tensors_from_buft)(context, type_);
            if kept.buffer.is_null() {
                return Err(exhausted());
            }
            (api.ggml_backend_tensor_copy)(&mut in_a_row(from, kept.raw), kept.raw);
        }
        Ok(kept)
    }

    /// Copies it into an input of `program`, which runs on the same device.
    ///
    /// # Errors
    /// `Internal` if the input has another type or size.
    pub(crate) fn give(&self, program: &mut Program, input: Tensor) -> Result<()> {
        let to = program.placed(input, self.bytes)?;
        // SAFETY: tensors of this value and of the program.
        if unsafe { (*to).type_ != (*self.raw).type_ } {
            return Err(Error::internal("a ggml input and the tensor for it have different types"));
        }
        if self.bytes > 0 {
            // SAFETY: both have memory of the same size.
            unsafe {
                (self.target.ggml.api.ggml_backend_tensor_copy)(self.raw, &mut in_a_row(to, self.raw));
            }
        }
        Ok(())
    }

    /// Replaces the contents.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.bytes {
            return Err(Error::internal(format!("{} bytes for a tensor of {}", bytes.len(), self.bytes)));
        }
        if self.bytes > 0 {
            let api = &self.target.ggml.api;
            // SAFETY: the tensor has exactly this many bytes.
            unsafe { (api.ggml_backend_tensor_set)(self.raw, bytes.as_ptr().cast(), 0, bytes.len()) };
        }
        Ok(())
    }

    /// The number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it is on this device of this ggml.
    pub(crate) fn is_on(&self, target: &Target) -> bool {
        std::ptr::eq(self.target.ggml, target.ggml) && self.target.gpu == target.gpu
    }

    /// Copies the contents into `bytes`, which must have their size.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> Result<()> {
        if bytes.len() != self.bytes {
            return Err(Error::internal(format!("{} bytes for a tensor of {}", bytes.len(), self.bytes)));
        }
        if self.bytes > 0 {
            let api = &self.target.ggml.api;
            // SAFETY: the tensor has exactly this many bytes.
            unsafe { (api.ggml_backend_tensor_get)(self.raw, bytes.as_mut_ptr().cast(), 0, bytes.len()) };
        }
        Ok(())
    }
}

/// The memory of `raw` with the dimensions of `like`. ggml copies only between tensors of one layout, but an output with four
/// dimensions may become an input with two.
///
/// # Safety
/// `raw` is a tensor with memory. `like` has the same type and number of elements. Both are contiguous.
unsafe fn in_a_row(raw: TensorPtr, like: TensorPtr) -> RawTensor {
    // SAFETY: by this function's contract. The result is a plain description that owns nothing.
    unsafe {
        let mut tensor = raw.read();
        if !tensor.view_src.is_null() {
            tensor.buffer = (*tensor.view_src).buffer;
        }
        (tensor.ne, tensor.nb) = ((*like).ne, (*like).nb);
        (tensor.op, tensor.src) = (OP_NONE, [std::ptr::null_mut(); MAX_SRC]);
        (tensor.view_src, tensor.view_offs) = (std::ptr::null_mut(), 0);
        tensor
    }
}
