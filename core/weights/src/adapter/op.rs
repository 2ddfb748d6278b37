//! The steps of a change, on blocks of a weight in f32.

use crate::simd::{self, Half, PANEL, Panels};
use ndarray::{Array2, ArrayViewMut2, Axis, ShapeBuilder, linalg::general_mat_mul, s};
use sdrun_abi::{Error, Result};
use std::ops::Range;

/// One step, with its factors in f32 and in the order of the target's rows. A weight `[out, in, k…]` is a matrix
/// `[rows, columns]` of `out` rows; `kernel` is the product of `k…`.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// `+ scale · up · down`.
    LowRank { product: LowRank, scale: f32 },
    /// `+ scale · (up₁ · down₁) ∘ (up₂ · down₂)`.
    Hadamard { one: LowRank, two: LowRank, scale: f32 },
    /// `+ scale · w1 [a, b] ⊗ w2 [c, d]`; row i of the target is row `rows[i]` of the product.
    Kronecker { w1: Array2<f32>, w2: Array2<f32>, rows: Vec<usize>, scale: f32 },
    /// `+ scale · values`.
    Add { values: Array2<f32>, scale: f32 },
    /// Scales each row to its given norm.
    NormalizeRows { norms: Vec<f32> },
    /// Scales each input (`kernel` columns of all rows) to its given norm.
    NormalizeInputs { norms: Vec<f32>, kernel: usize },
    /// DoRA by ComfyUI's rule: `W + strength · (norm · (W + changes) / (n + ε) − W)`, where `n` is the norm of each row of
    /// `W`, or, with `inputs` columns for each input, the norm of each input of `W + changes`.
    Decompose { changes: Vec<Op>, norms: Vec<f32>, inputs: Option<usize>, strength: f32 },
    /// Multiplies each row by its factor.
    ScaleRows { factors: Vec<f32> },
    /// Multiplies each column by its factor.
    ScaleColumns { factors: Vec<f32> },
    /// `+ scale · W · a1 [in, r] · a2 [r, in]` for every position of the kernel.
    Inputs { a1: Array2<f32>, a2: Array2<f32>, kernel: usize, scale: f32 },
    /// Multiplies block i of rows by `blocks[i]` from the left.
    Rotate { blocks: Vec<Array2<f32>> },
}

/// `up [rows, rank] · down [rank, columns]`.
#[derive(Clone, Debug)]
pub(super) struct LowRank {
    up: Vec<f32>,
    down: Panels,
}

impl LowRank {
    /// `InvalidArgument` if the inner dimensions differ or a factor is empty.
    pub(super) fn new(up: &Array2<f32>, down: &Array2<f32>) -> Result<Self> {
        let (rank, columns) = down.dim();
        if up.ncols() != rank || up.is_empty() || down.is_empty() {
            let message = format!("factors {:?} and {:?} have no product", up.dim(), down.dim());
            return Err(Error::invalid(message));
        }
        let (up, down) = (up.as_standard_layout(), down.as_standard_layout());
        let row_major = |matrix: &[f32]| Panels::new(matrix, rank, columns);
        let down = down.as_slice().map(row_major);
        down.zip(up.as_slice().map(<[f32]>::to_vec))
            .map(|(down, up)| LowRank { up, down })
            .ok_or_else(|| Error::internal("a matrix in standard layout is not contiguous"))
    }

    pub(super) fn rows(&self) -> usize {
        self.up.len() / self.down.rank()
    }

    pub(super) fn columns(&self) -> usize {
        self.down.columns()
    }

    /// No element of the product is larger.
    fn most(&self) -> f32 {
        self.down.rank() as f32 * largest(&self.up) * largest(self.down.values())
    }

    /// The rows of the left factor.
    fn up(&self, rows: &Range<usize>) -> &[f32] {
        let rank = self.down.rank();
        &self.up[rows.start * rank..rows.end * rank]
    }

    /// Changes a tile of one panel of columns, from halves to halves; see [`Panels::factors`].
    pub(super) fn merge_halves(
        &self,
        half: Half,
        scale: f32,
        [rows, columns]: [&Range<usize>; 2],
        (from, from_stride): (&[u8], usize),
        (to, to_stride): (&mut [u8], usize),
    ) -> bool {
        let up = self.up(rows);
        let block = simd::Block { rows: rows.len(), columns: columns.len(), from_stride, to_stride };
        self.down.factors(columns.start / PANEL, up, scale).merge_halves(half, from, to, block)
    }

    fn add(&self, scale: f32, block: &mut Block<'_>) {
        let up = self.up(&block.rows);
        for first in block.columns.clone().step_by(PANEL) {
            let tile = &mut block.values[first - block.columns.start..];
            self.down.add(first / PANEL, up, scale, tile, block.stride);
        }
    }
}

/// How much of a weight a step needs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Extent {
    /// Any part.
    Tile,
    /// Whole rows.
    Rows,
    /// All of it.
    Whole,
}

/// A part of a weight in f32. Its columns begin at a multiple of [`PANEL`] and are padded to whole panels; the values of the
/// padding do not matter.
pub(super) struct Block<'a> {
    /// Row by row, `stride` apart.
    pub(super) values: &'a mut [f32],
    pub(super) stride: usize,
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl Block<'_> {
    fn view(&mut self) -> Result<ArrayViewMut2<'_, f32>> {
        let shape = (self.rows.len(), self.columns.len()).strides((self.stride, 1));
        ArrayViewMut2::from_shape(shape, self.values).map_err(|e| Error::internal(e.to_string()))
    }
}

impl Op {
    /// How much of the weight it needs.
    pub(super) fn extent(&self) -> Extent {
        match self {
            Op::LowRank { .. }
            | Op::Hadamard { .. }
            | Op::Add { .. }
            | Op::ScaleRows { .. }
            | Op::ScaleColumns { .. } => Extent::Tile,
            Op::Kronecker { .. } | Op::NormalizeRows { .. } | Op::Inputs { .. } => Extent::Rows,
            Op::NormalizeInputs { .. } | Op::Rotate { .. } => Extent::Whole,
            Op::Decompose { inputs: Some(_), .. } => Extent::Whole,
            Op::Decompose { changes, .. } => changes.iter().map(Op::extent).fold(Extent::Rows, Extent::max),
        }
    }

    /// No element grows by more; `None` where that depends on the weight.
    pub(super) fn growth(&self) -> Option<f32> {
        let (most, scale) = match self {
            Op::LowRank { product, scale } => (product.most(), scale),
            Op::Hadamard { one, two, scale } => (one.most() * two.most(), scale),
            Op::Kronecker { w1, w2, scale, .. } => (largest(w1) * largest(w2), scale),
            Op::Add { values, scale } => (largest(values), scale),
            _ => return None,
        };
        Some(most * scale.abs())
    }

    /// Changes a block.
    pub(super) fn apply(&self, block: &mut Block<'_>) -> Result<()> {
        let (rows, columns) = (block.rows.clone(), block.columns.clone());
        match self {
            Op::LowRank { product, scale } => product.add(*scale, block),
            Op::Hadamard { one, two, scale } => {
                let product = |factors: &LowRank| {
                    let mut values = vec![0f32; block.values.len()];
                    let (rows, columns) = (rows.clone(), columns.clone());
                    factors.add(1.0, &mut Block { values: &mut values, stride: block.stride, rows, columns });
                    values
                };
                let (one, two) = (product(one), product(two));
                let factors = one.into_iter().zip(two);
                block.values.iter_mut().zip(factors).for_each(|(w, (a, b))| *w += scale * (a * b));
            }
            Op::Kronecker { w1, w2, rows: sources, scale } => {
                for (mut target, source) in block.view()?.rows_mut().into_iter().zip(&sources[rows]) {
                    let (i, p) = (source / w2.nrows(), source % w2.nrows());
                    let second = w2.row(p);
                    for (mut place, first) in target.exact_chunks_mut(w2.ncols()).into_iter().zip(w1.row(i)) {
                        place.scaled_add(scale * first, &second);
                    }
                }
            }
            Op::Add { values, scale } => block.view()?.scaled_add(*scale, &values.slice(s![rows, columns])),
            Op::NormalizeRows { norms } => {
                for (mut target, norm) in block.view()?.rows_mut().into_iter().zip(&norms[rows]) {
                    let now = length(target.iter());
                    target *= ratio(*norm, now);
                }
            }
            Op::NormalizeInputs { norms, kernel } => {
                for (mut input, norm) in block.view()?.axis_chunks_iter_mut(Axis(1), *kernel).zip(norms) {
                    let now = length(input.iter());
                    input *= ratio(*norm, now);
                }
            }
            Op::Decompose { changes, norms, inputs, strength } => {
                let mut before = block.values.to_vec();
                let before =
                    &mut Block { values: &mut before, stride: block.stride, rows: rows.clone(), columns };
                changes.iter().try_for_each(|op| op.apply(block))?;
                let (before, mut after) = (before.view()?, block.view()?);
                match inputs {
                    None => {
                        let norms = &norms[rows];
                        for ((mut after, before), norm) in
                            after.rows_mut().into_iter().zip(before.rows()).zip(norms)
                        {
                            after *= ratio_eps(*norm, length(before.iter()));
                        }
                    }
                    Some(kernel) => {
                        for (mut input, norm) in after.axis_chunks_iter_mut(Axis(1), *kernel).zip(norms) {
                            let now = length(input.iter());
                            input *= ratio_eps(*norm, now);
                        }
                    }
                }
                if *strength != 1.0 {
                    after.zip_mut_with(&before, |after, before| {
                        *after = before + strength * (*after - before)
                    });
                }
            }
            Op::ScaleRows { factors } => {
                for (mut target, factor) in block.view()?.rows_mut().into_iter().zip(&factors[rows]) {
                    target *= *factor;
                }
            }
            Op::ScaleColumns { factors } => {
                for row in block.view()?.rows_mut() {
                    row.into_iter()
                        .zip(&factors[columns.clone()])
                        .for_each(|(value, factor)| *value *= factor);
                }
            }
            Op::Inputs { a1, a2, kernel, scale } => {
                let mut block = block.view()?;
                for k in 0..*kernel {
                    let mut place = block.slice_mut(s![.., k..;*kernel]);
                    let middle = place.dot(a1);
                    general_mat_mul(*scale, &middle, a2, 1.0, &mut place);
                }
            }
            Op::Rotate { blocks } => {
                let size = blocks.first().map_or(1, Array2::nrows);
                for (mut target, rotation) in block.view()?.axis_chunks_iter_mut(Axis(0), size).zip(blocks) {
                    let rotated = rotation.dot(&target);
                    target.assign(&rotated);
                }
            }
        }
        Ok(())
    }
}

/// The largest magnitude.
fn largest<'a>(values: impl IntoIterator<Item = &'a f32>) -> f32 {
    values.into_iter().fold(0.0, |most, value| if value.abs() > most { value.abs() } else { most })
}

/// The Euclidean norm.
fn length<'a>(values: impl Iterator<Item = &'a f32>) -> f64 {
    values.map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// `wanted / now`. A zero vector stays zero.
fn ratio(wanted: f32, now: f64) -> f32 {
    if now == 0.0 { 0.0 } else { (f64::from(wanted) / now) as f32 }
}

/// `wanted / (now + ε)` as ComfyUI divides, with f32's ε.
fn ratio_eps(wanted: f32, now: f64) -> f32 {
    (f64::from(wanted) / (now + f64::from(f32::EPSILON))) as f32
}
