//! One row of outputs of a depthwise convolution with channels last.

use super::{
    level::Level,
    vector::{Vector, Work, dispatch},
};
use std::ops::Range;

/// Channels whose weights are stored together.
pub(crate) const LANES: usize = 16;
/// Neighbouring outputs computed together: their sums hide each other's latency, and they share input columns.
const OUTPUTS: usize = 4;

/// The operands of a row of outputs.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    /// The input from the first row of the window on. Rows have `columns * channels` elements.
    pub(crate) seen: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) row_step: usize,
    pub(crate) channels: usize,
    /// Columns of the input. `pad` columns of zeros come before them, and as many after them as the outputs see.
    pub(crate) columns: usize,
    pub(crate) pad: usize,
    /// Columns of the window, their distance, and the distance of neighbouring windows.
    pub(crate) width: usize,
    pub(crate) dilation: usize,
    pub(crate) stride: usize,
    /// For each [`LANES`] channels, `width` weights for each row of the window. Groups of channels are `taps` weights apart.
    pub(crate) weights: &'a [[f32; LANES]],
    pub(crate) taps: usize,
    /// One element for each channel.
    pub(crate) bias: Option<&'a [f32]>,
    /// Bounds of the result. A NaN stays a NaN.
    pub(crate) clip: [f32; 2],
}

impl Row<'_> {
    /// Fills `out`, which has `channels` elements for each output.
    pub(crate) fn compute(self, level: Level, out: &mut [f32]) {
        let Row { seen, rows, row_step, channels, columns, width, .. } = self;
        let end =
            |count: usize, step: usize, len: usize| count.checked_sub(1).map_or(0, |last| last * step + len);
        assert!(end(rows, row_step, columns * channels) <= seen.len(), "rows outside the input");
        assert!(
            end(channels.div_ceil(LANES), self.taps, rows * width) <= self.weights.len(),
            "taps outside the weights"
        );
        assert!(self.bias.is_none_or(|bias| bias.len() >= channels), "a bias of fewer channels");
        let outputs = Outputs { row: self, count: out.len() / channels, out: out.as_mut_ptr() };
        // SAFETY: all accesses lie inside the slices, as checked above.
        unsafe { dispatch(level, &outputs) }
    }
}

struct Outputs<'a> {
    row: Row<'a>,
    count: usize,
    out: *mut f32,
}

/// Some of the outputs.
struct Block {
    first: usize,
    /// How many, at most [`OUTPUTS`].
    count: usize,
    /// The range of the columns seen by [`OUTPUTS`] outputs that is inside the input.
    inside: [usize; 2],
}

/// The value of `STRIDE` for windows of any kind. Other strides mean windows of three adjacent columns. `WHOLE` means that all
/// [`OUTPUTS`] exist and see no padding.
const ANY: usize = 0;

impl Work for Outputs<'_> {
    #[inline(always)]
    unsafe fn run<V: Vector>(&self) {
        let Row { channels, columns, pad, width, dilation, stride, .. } = self.row;
        let most = channels / V::LANES * V::LANES;
        for first in (0..self.count).step_by(OUTPUTS) {
            let count = OUTPUTS.min(self.count - first);
            let start = pad.saturating_sub(first * stride);
            let end = (pad + columns).saturating_sub(first * stride);
            let whole = count == OUTPUTS && start == 0 && end >= (OUTPUTS - 1) * stride + width;
            let block = Block { first, count, inside: [start, end] };
            // SAFETY: by the trait's contract.
            unsafe {
                match (width, dilation, stride, whole) {
                    (3, 1, 1, true) => self.block::<V, 1, true>(&block, 0..most),
                    (3, 1, 1, false) => self.block::<V, 1, false>(&block, 0..most),
                    (3, 1, 2, true) => self.block::<V, 2, true>(&block, 0..most),
                    (3, 1, 2, false) => self.block::<V, 2, false>(&block, 0..most),
                    _ => self.block::<V, ANY, false>(&block, 0..most),
                }
                self.block::<f32, ANY, false>(&block, most..channels);
            }
        }
    }
}

impl Outputs<'_> {
    /// Computes a range of channels whose length is a multiple of the register's.
    ///
    /// # Safety
    /// As [`Work::run`].
    #[inline(always)]
    unsafe fn block<V: Vector, const STRIDE: usize, const WHOLE: bool>(
        &self,
        block: &Block,
        range: Range<usize>,
    ) {
        let Row { rows, channels, bias, clip, .. } = self.row;
        // SAFETY: all operands have these channels.
        unsafe {
            let [least, most] = clip.map(|bound| V::splat(bound));
            for channel in range.step_by(V::LANES) {
                let bias = bias.map_or(V::splat(0.0), |bias| V::load(bias.as_ptr().add(channel)));
                let mut sums = [bias; OUTPUTS];
                for row in 0..rows {
                    sums = self.add::<V, STRIDE, WHOLE>(block, channel, row, sums);
                }
                let out = self.out.add(block.first * channels + channel);
                for (i, sum) in sums.iter().enumerate() {
                    if WHOLE || i < block.count {
                        sum.clip(least, most).store(out.add(i * channels));
                    }
                }
            }
        }
    }

    /// Adds the products of one row of the window, for one register of channels.
    ///
    /// # Safety
    /// As [`Work::run`].
    #[inline(always)]
    unsafe fn add<V: Vector, const STRIDE: usize, const WHOLE: bool>(
        &self,
        block: &Block,
        channel: usize,
        row: usize,
        mut sums: [V; OUTPUTS],
    ) -> [V; OUTPUTS] {
        let Row { seen, row_step, channels, pad, width, dilation, stride, weights, taps, .. } = self.row;
        let weights = weights.as_ptr().wrapping_add(channel / LANES * taps + row * width).cast::<f32>();
        let weights = weights.wrapping_add(channel % LANES);
        // This may point before the input if the first column is padding.
        let start = (block.first * stride).wrapping_sub(pad).wrapping_mul(channels);
        let from = seen.as_ptr().wrapping_add(start).wrapping_add(row * row_step + channel);
        let column = |i: usize| {
            if WHOLE || (block.inside[0]..block.inside[1]).contains(&i) {
                // SAFETY: the column is inside the input.
                unsafe { V::load(from.wrapping_add(i * channels)) }
            } else {
                // SAFETY: the processor has the register.
                unsafe { V::splat(0.0) }
            }
        };
        // SAFETY: taps of the window.
        let weight = |i: usize| unsafe { V::load(weights.wrapping_add(i * LANES)) };
        if STRIDE == ANY {
            for k in 0..width {
                let weight = weight(k);
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: the processor has the register.
                    *sum = unsafe { weight.mul_add(column(i * stride + k * dilation), *sum) };
                }
            }
            return sums;
        }
        let weights: [V; 3] = std::array::from_fn(weight);
        // Room for the widest stride. Columns that no output sees are not read.
        let columns: [V; 2 * OUTPUTS + 1] =
            std::array::from_fn(|i| column(if i < (OUTPUTS - 1) * STRIDE + 3 { i } else { 0 }));
        for (i, sum) in sums.iter_mut().enumerate() {
            for (k, weight) in weights.iter().enumerate() {
                // SAFETY: the processor has the register.
                *sum = unsafe { weight.mul_add(columns[i * STRIDE + k], *sum) };
            }
        }
        sums
    }
}
