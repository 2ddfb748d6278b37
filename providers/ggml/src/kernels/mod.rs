//! Operations ggml lacks, or runs slowly on the CPU, as tiles of safe code. Each runs in ggml's thread pool.
//!
//! Every tensor they see is contiguous and row-major; shapes are those of the ONNX graph, outermost first.

mod broadcast;
mod concat;
mod conv;
mod gather;
mod group_norm;
mod host;
mod pool;
mod strided;

pub(crate) use broadcast::{Broadcast, BroadcastOp};
pub(crate) use concat::Concat;
pub(crate) use conv::{Conv, DepthwiseConv, PackPanels, Window, pack_panels, panels_len};
pub(crate) use gather::Gather;
pub(crate) use group_norm::GroupNorm;
pub(crate) use host::{Argument, Extract, HostNode, Produced};
pub(crate) use pool::{Pool, PoolKind};
pub(crate) use strided::StridedCopy;

/// Widens elements of a weight as it is stored to f32.
fn widen(inputs: &crate::ffi::Inputs<'_>, input: usize, range: std::ops::Range<usize>, out: &mut [f32]) {
    use crate::ffi::Type;
    use half::{
        bf16, f16,
        slice::{HalfBitsSliceExt, HalfFloatSliceExt},
    };
    match inputs.type_of(input) {
        Type::F16 => inputs.u16(input)[range].reinterpret_cast::<f16>().convert_to_f32_slice(out),
        Type::Bf16 => inputs.u16(input)[range].reinterpret_cast::<bf16>().convert_to_f32_slice(out),
        _ => out.copy_from_slice(&inputs.f32(input)[range]),
    }
}
