use super::{Activation, Window, activation::Activate, widen};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, mul_add, vectorize},
};
use std::{cell::RefCell, ops::Range};

/// Depthwise convolution with channels first. Inputs: `[batch, channels, h, w]`, weights `[channels, kh, kw]` (f32, f16 or bf16) and,
/// with `bias`, `[channels]`.
///
/// It copies a strip of a channel, with its padding, into the cache. Each phase of the strides gets a separate plane, in which
/// neighbouring outputs see neighbouring elements. Each tap then reads a plane at another offset. A strip is computed as one long row,
/// including the columns between rows.
pub(crate) struct DepthwiseNchw {
    batch: usize,
    channels: usize,
    window: Window,
    bias: bool,
    activation: Option<Activation>,
    /// Rows and columns of the output in a strip.
    strip: [usize; 2],
    /// Rows and columns of a plane.
    plane: [usize; 2],
    /// The offset at which each tap reads.
    taps: Vec<usize>,
}

/// Outputs of a strip. It fits the L1 cache, and overlaps the next strip little.
const PIXELS: usize = 2048;
/// Outputs that are summed together.
const LANES: usize = 16;
/// Taps that are read together: those of a 3 x 3 window.
const TAPS: usize = 9;

#[derive(Default)]
struct Scratch {
    planes: Vec<f32>,
    sums: Vec<f32>,
    weights: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl DepthwiseNchw {
    pub(crate) fn new(
        batch: usize,
        channels: usize,
        window: Window,
        bias: bool,
        activation: Option<Activation>,
    ) -> Self {
        let Window { kernel, output, .. } = &window;
        let cols = output[1].min(PIXELS);
        let strip = [(PIXELS / cols).clamp(1, output[0]), cols];
        let plane = [strip[0] + window.reach(0), strip[1] + window.reach(1)];
        let taps = (0..kernel[0] * kernel[1]).map(|tap| window.tap(tap, plane)).collect();
        DepthwiseNchw { batch, channels, bias, activation, strip, plane, taps, window }
    }
}

impl Kernel for DepthwiseNchw {
    fn grid(&self, workers: usize) -> Grid {
        let rows = self.batch * self.channels;
        Grid::rows(rows, self.window.output.iter().product(), rows.div_ceil(workers * 4))
    }

    fn multiplications(&self) -> usize {
        let outputs: usize = self.window.output.iter().product();
        self.batch * self.channels * outputs * self.taps.len()
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        SCRATCH.with_borrow_mut(|scratch| self.filter(inputs, &mut tile, scratch));
        Ok(())
    }
}

impl DepthwiseNchw {
    fn filter(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, scratch: &mut Scratch) {
        let Scratch { planes, sums, weights: widened } = scratch;
        let ([height, width], taps) = (self.window.output, self.taps.len());
        let [_, sx] = self.window.stride;
        let span = (self.strip[0] * self.plane[1]).next_multiple_of(LANES);
        sums.resize(span, 0.0);
        // The last outputs, and those between rows, read past the strip. Those elements must exist but do not matter.
        planes.clear();
        planes
            .resize(self.window.stride[0] * sx * self.plane[0] * self.plane[1] + self.plane[1] + LANES, 0.0);
        let single = self.strip == self.window.output;
        let pixels: usize = self.window.input.iter().product();
        for plane in tile.rows.clone() {
            let channel = plane % self.channels;
            let image = &inputs.f32(0)[plane * pixels..][..pixels];
            let weights = widen(inputs, 1, channel * taps..(channel + 1) * taps, widened);
            let bias = if self.bias { inputs.f32(2)[channel] } else { 0.0 };
            let out = tile.row(plane);
            for top in (0..height).step_by(self.strip[0]) {
                for left in (0..width).step_by(self.strip[1]) {
                    if !single {
                        planes.fill(0.0);
                    }
                    let rows = top..(top + self.strip[0]).min(height);
                    let cols = left..(left + self.strip[1]).min(width);
                    vectorize(Strip { conv: self, image, weights, bias, rows, cols, planes, sums, out });
                }
            }
        }
    }
}

/// A rectangle of a channel's output.
struct Strip<'a> {
    conv: &'a DepthwiseNchw,
    image: &'a [f32],
    weights: &'a [f32],
    bias: f32,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Zero outside the input.
    planes: &'a mut [f32],
    sums: &'a mut [f32],
    /// The output of the channel.
    out: &'a mut [f32],
}

impl Vectorized for Strip<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Strip { conv, image, weights, bias, rows, cols, planes, sums, out } = self;
        fill(conv, image, &rows, &cols, planes);
        let (pitch, width) = (conv.plane[1], conv.window.output[1]);
        let span = (rows.len() * pitch).next_multiple_of(LANES);
        let sums = &mut sums[..span];
        sums.fill(bias);
        let (some_taps, other_taps) = conv.taps.as_chunks::<TAPS>();
        let (some_weights, other_weights) = weights.as_chunks::<TAPS>();
        for i in 0..some_taps.len() {
            add_taps::<FMA, TAPS>(planes, &some_taps[i], &some_weights[i], sums);
        }
        for i in 0..other_taps.len() {
            add_taps::<FMA, 1>(planes, &[other_taps[i]], &[other_weights[i]], sums);
        }
        for (i, row) in rows.clone().enumerate() {
            out[row * width..][cols.clone()].copy_from_slice(&sums[i * pitch..][..cols.len()]);
        }
        if let Some(activation) = conv.activation {
            // Strips of several rows have whole rows.
            let out = &mut out[rows.start * width + cols.start..(rows.end - 1) * width + cols.end];
            Activate(activation, out).run::<FMA>();
        }
    }
}

/// Copies the inputs of a strip into planes.
#[inline(always)]
fn fill(conv: &DepthwiseNchw, image: &[f32], rows: &Range<usize>, cols: &Range<usize>, planes: &mut [f32]) {
    let Window { input, stride: [sy, sx], pad, .. } = conv.window;
    let [height, pitch] = conv.plane;
    let reach = [conv.window.reach(0), conv.window.reach(1)];
    for phase in 0..sy * sx {
        let (py, px) = (phase / sx, phase % sx);
        if !conv.window.sees(0, py) || !conv.window.sees(1, px) {
            continue;
        }
        // Column x of the plane is column `first + x * sx - pad` of the input.
        let first = cols.start * sx + px;
        let from = pad[1].saturating_sub(first).div_ceil(sx);
        let to = (input[1] + pad[1]).saturating_sub(first).div_ceil(sx).min(cols.len() + reach[1]);
        if from >= to {
            continue;
        }
        let start = first + from * sx - pad[1];
        for y in 0..rows.len() + reach[0] {
            let iy = ((rows.start + y) * sy + py).wrapping_sub(pad[0]);
            if iy >= input[0] {
                continue;
            }
            let out = &mut planes[(phase * height + y) * pitch..][from..to];
            let row = &image[iy * input[1]..][start..input[1]];
            match sx {
                1 => out.copy_from_slice(&row[..out.len()]),
                2 => every_second(row, out),
                _ => out.iter_mut().enumerate().for_each(|(i, out)| *out = row[i * sx]),
            }
        }
    }
}

#[inline(always)]
fn every_second(row: &[f32], out: &mut [f32]) {
    let pairs = row.as_chunks::<2>().0;
    let count = pairs.len().min(out.len());
    let (some, last) = out.split_at_mut(count);
    let pairs = &pairs[..count];
    for i in 0..count {
        some[i] = pairs[i][0];
    }
    if let Some(last) = last.first_mut() {
        *last = row[2 * count];
    }
}

/// Adds the products of weights and the inputs of a run at their taps.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn add_taps<const FMA: bool, const N: usize>(
    planes: &[f32],
    taps: &[usize; N],
    weights: &[f32; N],
    sums: &mut [f32],
) {
    // Loops over indices, because iterators are not inlined into code for wider registers.
    let mut seen: [&[[f32; LANES]]; N] = [&[]; N];
    for i in 0..N {
        seen[i] = planes[taps[i]..][..sums.len()].as_chunks().0;
    }
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    for at in 0..sums.len() {
        let mut sum = sums[at];
        for i in 0..N {
            let x = &seen[i][at];
            for lane in 0..LANES {
                sum[lane] = mul_add::<FMA>(weights[i], x[lane], sum[lane]);
            }
        }
        sums[at] = sum;
    }
}
