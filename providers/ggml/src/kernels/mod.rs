//! Operations ggml lacks, or runs slowly on the CPU, as tiles of safe code. Each runs in ggml's thread pool.
//!
//! Every tensor they see is contiguous and row-major; shapes are those of the ONNX graph, outermost first.

use crate::ffi::{Inputs, Type};
use half::{
    bf16, f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};
use std::ops::Range;

mod broadcast;
mod concat;
mod conv;
mod gather;
mod group_norm;
mod host;
mod host_elementwise;
mod map;
mod pad;
mod pool;
mod strided;

pub(crate) use broadcast::{Broadcast, BroadcastOp};
pub(crate) use concat::Concat;
pub(crate) use conv::{Conv, DepthwiseConv, PackPanels, Window, pack_panels, panels_len};
pub(crate) use gather::Gather;
pub(crate) use group_norm::GroupNorm;
pub(crate) use host::{Argument, Extract, HostNode, Produced};
pub(crate) use host_elementwise::HostElementwise;
pub(crate) use map::{Function, Map, RmsNorm};
pub(crate) use pad::Pad;
pub(crate) use pool::{Pool, PoolKind};
pub(crate) use strided::StridedCopy;

/// Elements of a weight in f32: where they lie, or widened into `buffer`.
fn widen<'a>(inputs: &Inputs<'a>, input: usize, range: Range<usize>, buffer: &'a mut Vec<f32>) -> &'a [f32] {
    match inputs.type_of(input) {
        Type::F16 => {
            buffer.resize(range.len(), 0.0);
            inputs.u16(input)[range].reinterpret_cast::<f16>().convert_to_f32_slice(buffer);
            buffer
        }
        Type::Bf16 => {
            buffer.resize(range.len(), 0.0);
            inputs.u16(input)[range].reinterpret_cast::<bf16>().convert_to_f32_slice(buffer);
            buffer
        }
        _ => &inputs.f32(input)[range],
    }
}
