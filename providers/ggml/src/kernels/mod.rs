//! Operations that ggml lacks or runs slowly on the CPU. They compute tiles in safe code and run in ggml's thread pool.
//!
//! All tensors are contiguous and row-major. Shapes are those of the ONNX graph, the outermost dimension first.

use crate::storage::f16_to_f32;
use crate::{
    ffi::{Inputs, Type},
    simd::{Vectorized, Words, as_words, as_words_mut, product::STEPS, vectorize},
};
use std::ops::Range;

mod activation;
mod attention;
mod batch_norm;
mod blocks;
mod broadcast;
mod concat;
mod conv;
mod depthwise_nchw;
mod depthwise_nhwc;
mod dynamic_quantize;
mod function;
mod gather;
mod gemm;
mod ggml_blocks;
mod glu;
mod group_norm;
mod host;
mod host_elementwise;
mod integer_product;
mod layer_norm;
mod overlap_add;
mod pad;
mod panels;
mod pool;
mod quads;
mod quantize;
mod recurrent;
mod reduce;
mod repack;
mod resample;
mod rotary;
mod scatter;
mod strided;
#[cfg(test)]
mod tests;
mod window;

pub(crate) use attention::{Attention, Heads};
pub(crate) use batch_norm::BatchNorm;
pub(crate) use blocks::Blocks;
pub(crate) use broadcast::{Broadcast, BroadcastOp};
pub(crate) use concat::Concat;
pub(crate) use conv::Conv;
pub(crate) use depthwise_nchw::DepthwiseNchw;
pub(crate) use depthwise_nhwc::DepthwiseNhwc;
pub(crate) use dynamic_quantize::{FindRange, QuantizeRows};
#[cfg(test)]
pub(crate) use function::Map;
pub(crate) use function::{Elementwise, Function};
pub(crate) use gather::Gather;
pub(crate) use gemm::{Gemm, Patches};
pub(crate) use glu::Glu;
pub(crate) use group_norm::GroupNorm;
pub(crate) use host::{Argument, Extract, HostNode, Produced};
pub(crate) use host_elementwise::HostElementwise;
pub(crate) use integer_product::{Finish, IntegerProduct, Right, Zeros};
pub(crate) use layer_norm::LayerNorm;
pub(crate) use overlap_add::OverlapAdd;
pub(crate) use pad::Pad;
pub(crate) use panels::{Layout, PackPanels, Panels};
pub(crate) use pool::{Pool, PoolKind};
pub(crate) use quads::{PackQuads, Quads};
pub(crate) use quantize::{Dequantize, DynamicRange, Granularity, Quantize};
pub(crate) use recurrent::{Recurrent, State};
pub(crate) use reduce::{ArgExtreme, CumulativeSum, Reduce, Reduction};
pub(crate) use repack::Encoding;
pub(crate) use resample::{Elements, Resample};
pub(crate) use rotary::Rotary;
pub(crate) use scatter::{Pick, Places, Scatter, Update};
pub(crate) use sdrun_graph::fused::Activation;
pub(crate) use strided::StridedCopy;
pub(crate) use window::Window;

/// The elements of a weight in f32: borrowed if it is f32, else widened into `buffer`.
fn widen<'a>(inputs: &Inputs<'a>, input: usize, range: Range<usize>, buffer: &'a mut Vec<f32>) -> &'a [f32] {
    let type_ = inputs.type_of(input);
    if type_ == Type::F32 {
        return &inputs.f32(input)[range];
    }
    buffer.resize(range.len(), 0.0);
    vectorize(Widen { halves: &inputs.u16(input)[range], bf16: type_ == Type::Bf16, out: buffer });
    buffer
}

/// Some steps of a panel as words. The panel may be stored as words, as f32 in half precision, or in blocks.
fn panel_words<'a>(
    inputs: &Inputs<'a>,
    input: usize,
    (panels, blocks): (&Panels, Option<Blocks>),
    panel: usize,
    steps: Range<usize>,
    buffer: &'a mut Vec<f32>,
) -> &'a [u32] {
    if let Some(blocks) = blocks {
        if blocks.are_words(panels) {
            let Range { start, end } = blocks.integers(panels, panel, steps);
            return &inputs.words(input)[start / 4..end / 4];
        }
        buffer.resize(steps.len() * panels.block, 0.0);
        let words = as_words_mut(buffer);
        blocks.expand(panels, blocks.panel(panels, inputs.bytes(input), panel), steps, words);
        return words;
    }
    let range = panels.words_of(panel, steps);
    match panels.words {
        Words::F32 => as_words(widen(inputs, input, range, buffer)),
        _ => &inputs.words(input)[range],
    }
}

/// The scales and offsets of some steps of a panel whose words are bytes; nothing for other words.
fn panel_scales<'a>(
    inputs: &Inputs<'_>,
    input: usize,
    (panels, blocks): (&Panels, Option<Blocks>),
    panel: usize,
    steps: Range<usize>,
    buffer: &'a mut Vec<f32>,
) -> &'a [f32] {
    let Some(blocks) = blocks.filter(|_| panels.words == Words::Bytes) else { return &[] };
    buffer.resize(steps.len() / STEPS * 2 * panels.block, 0.0);
    blocks.scales(panels, blocks.panel(panels, inputs.bytes(input), panel), steps, buffer);
    buffer
}

/// The bytes that [`panel_words`] reads for some steps of a panel.
fn panel_bytes<'a>(
    inputs: &Inputs<'a>,
    input: usize,
    (panels, blocks): (&Panels, Option<Blocks>),
    panel: usize,
    steps: Range<usize>,
) -> &'a [u8] {
    let range = match blocks {
        Some(blocks) => blocks.integers(panels, panel, steps),
        None => {
            let Range { start, end } = panels.words_of(panel, steps);
            let size = if panels.words == Words::Bf16 { 4 } else { inputs.type_of(input).size() };
            start * size..end * size
        }
    };
    &inputs.bytes(input)[range]
}

/// Divides what is prefetched among some products, then yields nothing more.
fn shares(ahead: &[u8], products: usize) -> impl Iterator<Item = &[u8]> {
    ahead.chunks(ahead.len().div_ceil(products).max(1)).chain(std::iter::repeat(&[][..]))
}

struct Widen<'a> {
    halves: &'a [u16],
    bf16: bool,
    out: &'a mut [f32],
}

impl Vectorized for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let pairs = self.out.iter_mut().zip(self.halves);
        if self.bf16 {
            pairs.for_each(|(out, half)| *out = f32::from_bits(u32::from(*half) << 16));
        } else {
            pairs.for_each(|(out, half)| *out = f16_to_f32(*half));
        }
    }
}
