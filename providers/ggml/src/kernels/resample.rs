use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, vectorize},
};
use sdrun_graph::eval::Taps;

/// Weighted sums of elements along one axis (a step of ONNX Resize): input `[outer, len, inner]`, output
/// `[outer, taps.len(), inner]`.
pub(crate) struct Resample {
    pub(crate) outer: usize,
    pub(crate) len: usize,
    pub(crate) inner: usize,
    pub(crate) taps: Vec<Taps>,
    /// What positions outside of the input take.
    pub(crate) outside: f64,
    /// Of an element: f32, or integers of 8 bits, which are rounded to even.
    pub(crate) elements: Elements,
}

/// Element types that are resampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Elements {
    F32,
    U8,
    I8,
}

impl Kernel for Resample {
    fn grid(&self, workers: usize) -> Grid {
        if self.inner == 1 {
            // Positions along the axis are the columns.
            let cols = self.taps.len();
            return Grid::rows(self.outer, cols, self.outer.div_ceil(workers * 4).max(4096 / cols.max(1)));
        }
        let rows = self.outer * self.taps.len();
        Grid::rows(rows, self.inner, rows.div_ceil(workers * 4).max(4096 / self.inner))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        for row in tile.rows.clone() {
            match self.elements {
                Elements::F32 => self.floats(row, inputs.f32(0), tile.row(row)),
                Elements::U8 => {
                    self.integers(row, inputs.bytes(0), tile.row_bytes(row), f64::from, |v| v as u8)
                }
                Elements::I8 => {
                    let wide = |byte: u8| f64::from(byte as i8);
                    self.integers(row, inputs.bytes(0), tile.row_bytes(row), wide, |v| v as i8 as u8);
                }
            }
        }
        Ok(())
    }
}

impl Resample {
    /// A row of floats.
    fn floats(&self, row: usize, x: &[f32], out: &mut [f32]) {
        if self.inner == 1 {
            let x = &x[row * self.len..(row + 1) * self.len];
            for (out, taps) in out.iter_mut().zip(&self.taps) {
                *out = match taps {
                    None => self.outside as f32,
                    Some(taps) => taps.iter().fold(0.0, |sum, (i, weight)| sum + *weight as f32 * x[*i]),
                };
            }
            return;
        }
        let (outer, position) = (row / self.taps.len(), row % self.taps.len());
        let Some(taps) = &self.taps[position] else { return out.fill(self.outside as f32) };
        if taps.is_empty() {
            out.fill(0.0);
        }
        for (k, (i, weight)) in taps.iter().enumerate() {
            let from = &x[(outer * self.len + i) * self.inner..][..self.inner];
            vectorize(Add { from, weight: *weight as f32, first: k == 0, out });
        }
    }

    /// A row of integers, summed in f64 so that ties are the exact ones.
    fn integers(
        &self,
        row: usize,
        x: &[u8],
        out: &mut [u8],
        wide: impl Fn(u8) -> f64,
        narrow: impl Fn(f64) -> u8,
    ) {
        for (j, out) in out.iter_mut().enumerate() {
            let (outer, position, behind) = match self.inner {
                1 => (row, j, 0),
                _ => (row / self.taps.len(), row % self.taps.len(), j),
            };
            let of = |i: usize| wide(x[(outer * self.len + i) * self.inner + behind]);
            let sum = match &self.taps[position] {
                None => self.outside,
                Some(taps) => taps.iter().fold(0.0, |sum, (i, weight)| sum + weight * of(*i)),
            };
            *out = narrow(sum.round_ties_even());
        }
    }
}

/// Adds a row times its weight, or stores it if it is the first.
struct Add<'a> {
    from: &'a [f32],
    weight: f32,
    first: bool,
    out: &'a mut [f32],
}

impl Vectorized for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let pairs = self.out.iter_mut().zip(self.from);
        if self.first {
            pairs.for_each(|(out, x)| *out = self.weight * x);
        } else {
            pairs.for_each(|(out, x)| *out += self.weight * x);
        }
    }
}
