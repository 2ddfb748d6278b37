use super::quads::TURN;
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, vectorize},
};

/// A quantization to u8, as defined by `DynamicQuantizeLinear` of ONNX.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Range {
    pub(crate) scale: f32,
    pub(crate) zero: u8,
}

impl Range {
    /// The quantization for these values and zero.
    pub(crate) fn of(values: &[f32]) -> Self {
        let [least, most] = vectorize(Bounds(values));
        let scale = (most - least) / 255.0;
        let scale = if scale == 0.0 { 1.0 } else { scale };
        Range { scale, zero: (-least / scale).round_ties_even().clamp(0.0, 255.0) as u8 }
    }
    /// Quantizes values to the left operand of products of bytes.
    pub(crate) fn quantize(self, values: &[f32], out: &mut [u8]) {
        vectorize(Quantize(self, values, out));
    }
}

struct Bounds<'a>(&'a [f32]);

impl Vectorized for Bounds<'_> {
    type Output = [f32; 2];

    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    fn run<const FMA: bool>(self) -> [f32; 2] {
        let mut bounds = [[0f32; 16]; 2];
        let (chunks, rest) = self.0.as_chunks::<16>();
        let mut take = |i: usize, x: f32| {
            bounds[0][i] = if x < bounds[0][i] { x } else { bounds[0][i] };
            bounds[1][i] = if x > bounds[1][i] { x } else { bounds[1][i] };
        };
        for chunk in chunks {
            for i in 0..16 {
                take(i, chunk[i]);
            }
        }
        rest.iter().enumerate().for_each(|(i, x)| take(i, *x));
        [bounds[0].iter().fold(0.0, |m, x| x.min(m)), bounds[1].iter().fold(0.0, |m, x| x.max(m))]
    }
}

struct Quantize<'a>(Range, &'a [f32], &'a mut [u8]);

impl Vectorized for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Quantize(Range { scale, zero }, values, out) = self;
        let zero = i32::from(zero);
        for (out, x) in out.iter_mut().zip(values) {
            // The conversion saturates and turns a NaN into zero.
            let value = ((*x / scale).round_ties_even() as i32).saturating_add(zero);
            *out = value.clamp(0, 255) as u8 ^ TURN;
        }
    }
}

/// Computes the scale (f32, four bytes) and zero point (u8) of input 0.
pub(crate) struct FindRange;

impl FindRange {
    /// Bytes of the output.
    pub(crate) const BYTES: usize = 8;
}

impl Kernel for FindRange {
    fn grid(&self, _: usize) -> Grid {
        Grid::flat(Self::BYTES, Self::BYTES)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let Range { scale, zero } = Range::of(inputs.f32(0));
        let out = tile.run_bytes();
        out.fill(0);
        out[..4].copy_from_slice(&scale.to_le_bytes());
        out[4] = zero;
        Ok(())
    }
}

/// Quantizes the rows of input 0, with the range in input 1, to [`Quads::Rows`](super::Quads::Rows) without taps.
pub(crate) struct QuantizeRows {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
}

impl Kernel for QuantizeRows {
    fn grid(&self, workers: usize) -> Grid {
        let bytes = self.depth.next_multiple_of(4);
        Grid::rows(self.rows, bytes, self.rows.div_ceil(4 * workers).max(4096 / bytes.max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let range = inputs.bytes(1);
        let scale = range.first_chunk().map_or(1.0, |bytes| f32::from_le_bytes(*bytes));
        let range = Range { scale, zero: range[4] };
        for row in tile.rows.clone() {
            let (out, rest) = tile.row_bytes(row).split_at_mut(self.depth);
            range.quantize(&inputs.f32(0)[row * self.depth..][..self.depth], out);
            rest.fill(0);
        }
        Ok(())
    }
}
