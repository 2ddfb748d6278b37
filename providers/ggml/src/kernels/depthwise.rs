use super::{Activation, Conv, activation::Activate, widen};
use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    simd::{Vectorized, mul_add, vectorize},
};
use std::cell::RefCell;

/// Convolution with one input and one output channel in each group: inputs `[batch, channels, h, w]`, weights
/// `[channels, kh, kw]` (f32, f16 or bf16) and, with `bias`, `[channels]`.
pub(crate) struct DepthwiseConv {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) bias: bool,
    pub(crate) activation: Option<Activation>,
    /// How a channel is padded and read: a convolution in f32 of one channel with one filter.
    pub(crate) one: Conv,
}

/// Outputs that are summed at a time.
const LANES: usize = 32;

thread_local! {
    static PLANES: RefCell<Vec<u32>> = RefCell::default();
}

impl Kernel for DepthwiseConv {
    fn grid(&self, workers: usize) -> Grid {
        let rows = self.batch * self.channels;
        Grid::rows(rows, self.one.outputs().iter().product(), rows.div_ceil(workers * 4))
    }

    fn multiplications(&self) -> usize {
        let outputs: usize = self.one.outputs().iter().product();
        self.batch * self.channels * outputs * self.one.taps().len()
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        PLANES.with_borrow_mut(|planes| self.filter(inputs, &mut tile, planes));
        Ok(())
    }
}

impl DepthwiseConv {
    fn filter(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, planes: &mut Vec<u32>) {
        let ([height, width], taps) = (self.one.outputs(), self.one.taps());
        let ([strip_rows, strip_cols], pitch) = self.one.strip_size();
        planes.resize(self.one.strip_len() + LANES, 0);
        let (mut widened, mut flat) = (Vec::new(), Vec::new());
        for plane in tile.rows.clone() {
            let channel = plane % self.channels;
            let weights = widen(inputs, 1, channel * taps.len()..(channel + 1) * taps.len(), &mut widened);
            let bias = if self.bias { inputs.f32(2)[channel] } else { 0.0 };
            for top in (0..height).step_by(strip_rows) {
                let rows = top..(top + strip_rows).min(height);
                for left in (0..width).step_by(strip_cols) {
                    let cols = left..(left + strip_cols).min(width);
                    self.one.fill(inputs, plane, 0..1, rows.clone(), cols.clone(), planes);
                    if self.one.is_flat() {
                        flat.resize((rows.len() - 1) * pitch + width, 0.0);
                        vectorize(Row { planes, taps, weights, bias, out: &mut flat });
                        for (out, sums) in
                            tile.row(plane)[top * width..].chunks_exact_mut(width).zip(flat.chunks(pitch))
                        {
                            out.copy_from_slice(&sums[..width]);
                        }
                        continue;
                    }
                    for (i, row) in rows.clone().enumerate() {
                        let out = &mut tile.row(plane)[row * width + cols.start..row * width + cols.end];
                        vectorize(Row { planes: &planes[i * pitch..], taps, weights, bias, out });
                    }
                }
            }
            if let Some(activation) = self.activation {
                vectorize(Activate(activation, tile.row(plane)));
            }
        }
    }
}

struct Row<'a> {
    planes: &'a [u32],
    taps: &'a [u32],
    weights: &'a [f32],
    bias: f32,
    out: &'a mut [f32],
}

impl Vectorized for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Row { planes, taps, weights, bias, out } = self;
        for (i, out) in out.chunks_mut(LANES).enumerate() {
            let mut sums = [bias; LANES];
            let at = i * LANES;
            for (tap, weight) in taps.iter().zip(weights) {
                let Some(x) = planes[*tap as usize + at..].first_chunk::<LANES>() else { continue };
                sums.iter_mut()
                    .zip(x)
                    .for_each(|(sum, x)| *sum = mul_add::<FMA>(*weight, f32::from_bits(*x), *sum));
            }
            match out.first_chunk_mut::<LANES>() {
                Some(out) => *out = sums,
                None => out.copy_from_slice(&sums[..out.len()]),
            }
        }
    }
}
