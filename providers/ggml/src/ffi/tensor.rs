//! Element types of tensors, and descriptions of tensors in ggml's contexts.

use super::{api::*, library::Ggml};
use sdrun_abi::{Error, ErrorCode, Result};
use std::ffi::c_int;

/// Element types of stored tensors. ggml computes in f32 only. Block types are for matrices on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub(crate) enum Type {
    F32 = 0,
    F16 = 1,
    Q8_0 = 8,
    Q4K = 12,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    Bf16 = 30,
}

impl Type {
    pub(super) fn from_raw(raw: c_int) -> Option<Self> {
        use Type::*;
        [F32, F16, Q8_0, Q4K, I8, I16, I32, I64, F64, Bf16].into_iter().find(|type_| *type_ as c_int == raw)
    }
    /// Bytes of one element, or of one block.
    pub(crate) fn size(self) -> usize {
        match self {
            Type::I8 => 1,
            Type::F16 | Type::Bf16 | Type::I16 => 2,
            Type::F32 | Type::I32 => 4,
            Type::I64 | Type::F64 => 8,
            Type::Q8_0 => 34,
            Type::Q4K => 144,
        }
    }
    /// Elements of one block; 1 for types without blocks.
    pub(super) fn block(self) -> usize {
        match self {
            Type::Q8_0 => 32,
            Type::Q4K => 256,
            _ => 1,
        }
    }
    /// Bytes of `count` elements.
    pub(crate) fn bytes(self, count: usize) -> usize {
        count / self.block() * self.size()
    }
}

/// A tensor of one [`Builder`](super::Builder) and the [`Program`](super::Program) it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tensor(u32);

impl Tensor {
    pub(super) fn new(index: usize) -> Self {
        Tensor(index as u32)
    }
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Elements of each dimension, the innermost first.
pub(crate) type Extent = [usize; 4];
/// Byte strides of dimensions 1 to 3. Dimension 0 is always dense.
pub(super) type Strides = [usize; 3];

/// Tensors that fit in one ggml context.
const CHUNK: usize = 512;

/// A pool of tensor descriptions. Their data is elsewhere.
pub(super) struct Context {
    pub(super) raw: Ptr,
    used: usize,
    /// Whether tensors were added since its last allocation.
    pub(super) pending: bool,
}

/// Describes a tensor, without memory, in a context from [`reserve`].
pub(super) fn new_tensor(ggml: &Ggml, context: Ptr, type_: Type, extent: Extent) -> Result<TensorPtr> {
    count(extent)?.checked_mul(type_.size()).ok_or_else(too_large)?;
    let ne = signed(extent);
    // SAFETY: `reserve` made room in the context.
    Ok(unsafe { (ggml.api.ggml_new_tensor_4d)(context, type_ as c_int, ne[0], ne[1], ne[2], ne[3]) })
}

/// Returns a context with room for one more tensor.
pub(super) fn reserve(ggml: &Ggml, contexts: &mut Vec<Context>) -> Result<Ptr> {
    if contexts.last().is_none_or(|context| context.used == CHUNK) {
        let params = InitParams {
            // SAFETY: the function has no parameters.
            mem_size: CHUNK * unsafe { (ggml.api.ggml_tensor_overhead)() },
            mem_buffer: std::ptr::null_mut(),
            no_alloc: true,
        };
        // SAFETY: ggml allocates the memory itself.
        let raw = unsafe { (ggml.api.ggml_init)(params) };
        if raw.is_null() {
            return Err(Error::new(ErrorCode::ResourceExhausted, "no memory for a ggml context"));
        }
        contexts.push(Context { raw, used: 0, pending: false });
    }
    match contexts.last_mut() {
        Some(context) => {
            context.used += 1;
            context.pending = true;
            Ok(context.raw)
        }
        None => Err(Error::internal("no ggml context")),
    }
}

/// The number of elements, at least one, as ggml requires.
pub(super) fn count(extent: Extent) -> Result<usize> {
    let len =
        extent.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).filter(|n| *n <= i64::MAX as usize / 16);
    let len = len.ok_or_else(too_large)?;
    check(len > 0, "tensor", "at least one element")?;
    Ok(len)
}

fn too_large() -> Error {
    Error::new(ErrorCode::ResourceExhausted, "a tensor is larger than the address space")
}

pub(super) fn signed(extent: Extent) -> [i64; 4] {
    extent.map(|n| n as i64)
}

pub(super) fn check(holds: bool, what: &str, needs: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::internal(format!("ggml operation {what} needs {needs}"))) }
}
