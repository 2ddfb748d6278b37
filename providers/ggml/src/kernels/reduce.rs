use super::activation::exp;
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
    simd::{Vectorized, vectorize},
};
use std::cmp::Ordering;

/// What becomes of the elements that are reduced to one.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub(crate) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    Product,
    /// The sum of magnitudes.
    L1,
    /// The square root of the sum of squares.
    L2,
    SumOfSquares,
    LogOfSum,
    /// Shifted by the maximum, so that it does not overflow.
    LogOfSumOfExp,
}

/// A reduction over some axes of an input that is read with strides. If the last axis that is kept is contiguous, its elements
/// are reduced side by side. Sums are taken in f64, so their order makes no difference that is visible in f32. A NaN stays.
pub(crate) struct Reduce {
    /// The axes that are kept, except for the last one if it is contiguous.
    pub(crate) outer: (Vec<usize>, Vec<isize>),
    /// Elements of the last kept axis; 1 if it is not contiguous.
    pub(crate) run: usize,
    /// The reduced axes.
    pub(crate) gone: (Vec<usize>, Vec<isize>),
    pub(crate) reduction: Reduction,
}

/// Fewest elements of the last axis that a thread takes.
const LEAST: usize = 64;

impl Kernel for Reduce {
    fn grid(&self, workers: usize) -> Grid {
        let rows = shape::len(&self.outer.0);
        if self.run == 1 {
            return Grid::rows(rows, 1, rows.div_ceil(4 * workers));
        }
        let tile_cols = self.run.div_ceil((2 * workers).div_ceil(rows)).max(LEAST);
        Grid { together: 1, planes: 1, rows, cols: self.run, tile_rows: 1, tile_cols }
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let x = inputs.f32(0);
        let count = shape::len(&self.gone.0) as f64;
        let mut results = vec![0f64; tile.cols.len()];
        for row in tile.rows.clone() {
            let start = shape::offset(row, &self.outer.0, &self.outer.1).unsigned_abs() + tile.cols.start;
            self.reduce(x, start, &mut results);
            let finish = |v: f64| match self.reduction {
                Reduction::Mean => v / count,
                Reduction::L2 => v.sqrt(),
                Reduction::LogOfSum => v.ln(),
                _ => v,
            };
            tile.row(row).iter_mut().zip(&results).for_each(|(out, v)| *out = finish(*v) as f32);
        }
        Ok(())
    }
}

impl Reduce {
    fn reduce(&self, x: &[f32], start: usize, out: &mut [f64]) {
        match self.reduction {
            Reduction::Sum | Reduction::Mean | Reduction::LogOfSum => {
                self.fold(x, start, out, 0.0, |_| 0.0, |sum, x, _| sum + f64::from(x), |a, b| a + b);
            }
            Reduction::L1 => {
                self.fold(x, start, out, 0.0, |_| 0.0, |sum, x, _| sum + f64::from(x.abs()), |a, b| a + b);
            }
            Reduction::L2 | Reduction::SumOfSquares => {
                let add = |sum, x, _| sum + f64::from(x) * f64::from(x);
                self.fold(x, start, out, 0.0, |_| 0.0, add, |a, b| a + b);
            }
            Reduction::Product => {
                self.fold(x, start, out, 1.0, |_| 0.0, |all, x, _| all * f64::from(x), |a, b| a * b);
            }
            Reduction::Max => {
                self.fold(x, start, out, f64::NEG_INFINITY, |_| 0.0, |m, x, _| larger(m, x.into()), larger)
            }
            Reduction::Min => {
                self.fold(x, start, out, f64::INFINITY, |_| 0.0, |m, x, _| smaller(m, x.into()), smaller)
            }
            Reduction::LogOfSumOfExp => {
                let mut maxima = vec![0f64; out.len()];
                let max = |m, x: f32, _| larger(m, x.into());
                self.fold(x, start, &mut maxima, f64::NEG_INFINITY, |_| 0.0, max, larger);
                let shift = |i: usize| if maxima[i].is_finite() { maxima[i] as f32 } else { 0.0 };
                let add = |sum: f64, x: f32, shift: f32| sum + f64::from(exp::<false>(x - shift));
                self.fold(x, start, out, 0.0, shift, add, |a, b| a + b);
                out.iter_mut().enumerate().for_each(|(i, v)| *v = v.ln() + f64::from(shift(i)));
            }
        }
    }

    /// Sets `out` to `first` and adds to each the elements that are reduced to it with `step`, which gets the element's shift;
    /// `join` joins two partial results.
    #[allow(clippy::too_many_arguments)]
    fn fold(
        &self,
        x: &[f32],
        start: usize,
        out: &mut [f64],
        first: f64,
        shift: impl Fn(usize) -> f32,
        step: impl Fn(f64, f32, f32) -> f64,
        join: impl Fn(f64, f64) -> f64,
    ) {
        out.fill(first);
        let (dims, strides) = &self.gone;
        if self.run > 1 {
            for i in 0..shape::len(dims) {
                let from = start + shape::offset(i, dims, strides).unsigned_abs();
                vectorize(SideBySide { x: &x[from..from + out.len()], out, shift: &shift, step: &step });
            }
            return;
        }
        // Rows of the innermost reduced axis.
        let Some(last) = dims.len().checked_sub(1) else {
            out[0] = step(first, x[start], shift(0));
            return;
        };
        for i in 0..shape::len(&dims[..last]) {
            let from = start + shape::offset(i, &dims[..last], &strides[..last]).unsigned_abs();
            let stride = strides[last].unsigned_abs();
            let partial = if stride == 1 {
                vectorize(Row {
                    x: &x[from..from + dims[last]],
                    first,
                    shift: shift(0),
                    step: &step,
                    join: &join,
                })
            } else {
                (0..dims[last]).fold(first, |all, k| step(all, x[from + k * stride], shift(0)))
            };
            out[0] = join(out[0], partial);
        }
    }
}

/// The larger of two; a NaN stays.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// The smaller of two; a NaN stays.
#[inline(always)]
fn smaller(a: f64, b: f64) -> f64 {
    if b < a || b.is_nan() { b } else { a }
}

/// Adds each element to the result in its place.
struct SideBySide<'a, T, S> {
    x: &'a [f32],
    out: &'a mut [f64],
    shift: &'a T,
    step: &'a S,
}

impl<T: Fn(usize) -> f32, S: Fn(f64, f32, f32) -> f64> Vectorized for SideBySide<'_, T, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let pairs = self.out.iter_mut().zip(self.x).enumerate();
        pairs.for_each(|(i, (out, x))| *out = (self.step)(*out, *x, (self.shift)(i)));
    }
}

/// Reduces contiguous elements to one, in lanes.
struct Row<'a, S, J> {
    x: &'a [f32],
    first: f64,
    shift: f32,
    step: &'a S,
    join: &'a J,
}

impl<S: Fn(f64, f32, f32) -> f64, J: Fn(f64, f64) -> f64> Vectorized for Row<'_, S, J> {
    type Output = f64;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> f64 {
        let mut lanes = [self.first; 16];
        let (chunks, rest) = self.x.as_chunks::<16>();
        for chunk in chunks {
            lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane = (self.step)(*lane, *x, self.shift));
        }
        let rest = rest.iter().fold(self.first, |all, x| (self.step)(all, *x, self.shift));
        lanes.into_iter().fold(rest, |all, lane| (self.join)(all, lane))
    }
}

/// The index of the largest or smallest of `len` elements, `inner` apart, as i64. A NaN is above all numbers.
pub(crate) struct ArgExtreme {
    pub(crate) outer: usize,
    pub(crate) len: usize,
    pub(crate) inner: usize,
    pub(crate) largest: bool,
    /// Of equal ones the last instead of the first.
    pub(crate) last: bool,
}

impl Kernel for ArgExtreme {
    fn grid(&self, workers: usize) -> Grid {
        Grid::flat(self.outer * self.inner, (self.outer * self.inner).div_ceil(4 * workers))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let x = inputs.f32(0);
        let wanted = if self.largest { Ordering::Greater } else { Ordering::Less };
        let cols = tile.cols.clone();
        let (out, _) = tile.run_bytes().as_chunks_mut::<8>();
        for (i, out) in cols.zip(out) {
            let start = i / self.inner * self.len * self.inner + i % self.inner;
            let mut best = (0, x[start]);
            for k in 1..self.len {
                let v = x[start + k * self.inner];
                let order = v.partial_cmp(&best.1).unwrap_or_else(|| v.is_nan().cmp(&best.1.is_nan()));
                if order == wanted || self.last && order == Ordering::Equal {
                    best = (k, v);
                }
            }
            *out = (best.0 as i64).to_le_bytes();
        }
        Ok(())
    }
}

/// Running sums of `len` elements, `inner` apart.
pub(crate) struct CumulativeSum {
    pub(crate) outer: usize,
    pub(crate) len: usize,
    pub(crate) inner: usize,
    /// Whether an element is not part of its own sum.
    pub(crate) exclusive: bool,
    pub(crate) reverse: bool,
}

impl Kernel for CumulativeSum {
    fn grid(&self, workers: usize) -> Grid {
        let tile_cols = self.inner.div_ceil((2 * workers).div_ceil(self.outer)).max(LEAST);
        Grid {
            together: 1,
            planes: self.outer,
            rows: self.len,
            cols: self.inner,
            tile_rows: self.len,
            tile_cols,
        }
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (x, cols) = (inputs.f32(0), tile.cols.clone());
        let mut sums = vec![0f32; cols.len()];
        for k in 0..self.len {
            let row = if self.reverse { self.len - 1 - k } else { k };
            let start = (tile.plane * self.len + row) * self.inner;
            let from = &x[start + cols.start..start + cols.end];
            for ((sum, x), out) in sums.iter_mut().zip(from).zip(tile.row(row)) {
                let before = *sum;
                *sum += x;
                *out = if self.exclusive { before } else { *sum };
            }
        }
        Ok(())
    }
}
