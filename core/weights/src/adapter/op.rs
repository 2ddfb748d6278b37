//! The steps that a change of a weight consists of, on rows of it in f32.

use ndarray::{Array2, ArrayViewMut2, Axis, linalg::general_mat_mul, s};

/// One step, with its factors in f32 and in the order of the target's rows. A weight `[out, in, k…]` is a matrix
/// `[rows, columns]` of `out` rows; `kernel` is the product of `k…`.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// `+ scale · up [rows, r] · down [r, columns]`.
    LowRank { up: Array2<f32>, down: Array2<f32>, scale: f32 },
    /// `+ scale · (up₁ · down₁) ∘ (up₂ · down₂)`.
    Hadamard { one: (Array2<f32>, Array2<f32>), two: (Array2<f32>, Array2<f32>), scale: f32 },
    /// `+ scale · w1 [a, b] ⊗ w2 [c, d]`; row i of the target is row `rows[i]` of the product.
    Kronecker { w1: Array2<f32>, w2: Array2<f32>, rows: Vec<usize>, scale: f32 },
    /// `+ scale · values`.
    Add { values: Array2<f32>, scale: f32 },
    /// Each row to the norm given for it.
    NormalizeRows { norms: Vec<f32> },
    /// Each input (`kernel` columns of all rows) to the norm given for it.
    NormalizeInputs { norms: Vec<f32>, kernel: usize },
    /// Each row times its factor.
    ScaleRows { factors: Vec<f32> },
    /// Each input times its factor.
    ScaleInputs { factors: Vec<f32>, kernel: usize },
    /// `+ scale · W · a1 [in, r] · a2 [r, in]` for every place of the kernel.
    Inputs { a1: Array2<f32>, a2: Array2<f32>, kernel: usize, scale: f32 },
    /// Block i of rows becomes `blocks[i] ·` itself.
    Rotate { blocks: Vec<Array2<f32>> },
}

impl Op {
    /// Whether it works on any rows by themselves, else it needs all.
    pub(super) fn is_row_local(&self) -> bool {
        !matches!(self, Op::NormalizeInputs { .. } | Op::Rotate { .. })
    }

    /// Changes `block`, the rows of the weight from `row` on.
    pub(super) fn apply(&self, mut block: ArrayViewMut2<'_, f32>, row: usize) {
        let rows = row..row + block.nrows();
        match self {
            Op::LowRank { up, down, scale } => {
                general_mat_mul(*scale, &up.slice(s![rows, ..]), down, 1.0, &mut block);
            }
            Op::Hadamard { one, two, scale } => {
                let product =
                    |(up, down): &(Array2<f32>, Array2<f32>)| up.slice(s![rows.clone(), ..]).dot(down);
                let (one, two) = (product(one), product(two));
                ndarray::Zip::from(&mut block).and(&one).and(&two).for_each(|w, a, b| *w += scale * (a * b));
            }
            Op::Kronecker { w1, w2, rows: sources, scale } => {
                for (mut target, source) in block.rows_mut().into_iter().zip(&sources[rows]) {
                    let (i, p) = (source / w2.nrows(), source % w2.nrows());
                    let second = w2.row(p);
                    for (mut place, first) in target.exact_chunks_mut(w2.ncols()).into_iter().zip(w1.row(i)) {
                        place.scaled_add(scale * first, &second);
                    }
                }
            }
            Op::Add { values, scale } => block.scaled_add(*scale, &values.slice(s![rows, ..])),
            Op::NormalizeRows { norms } => {
                for (mut target, norm) in block.rows_mut().into_iter().zip(&norms[rows]) {
                    let now = target.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                    target *= ratio(*norm, now);
                }
            }
            Op::NormalizeInputs { norms, kernel } => {
                for (mut input, norm) in block.axis_chunks_iter_mut(Axis(1), *kernel).zip(norms) {
                    let now = input.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                    input *= ratio(*norm, now);
                }
            }
            Op::ScaleRows { factors } => {
                for (mut target, factor) in block.rows_mut().into_iter().zip(&factors[rows]) {
                    target *= *factor;
                }
            }
            Op::ScaleInputs { factors, kernel } => {
                for (mut input, factor) in block.axis_chunks_iter_mut(Axis(1), *kernel).zip(factors) {
                    input *= *factor;
                }
            }
            Op::Inputs { a1, a2, kernel, scale } => {
                for k in 0..*kernel {
                    let mut place = block.slice_mut(s![.., k..;*kernel]);
                    let middle = place.dot(a1);
                    general_mat_mul(*scale, &middle, a2, 1.0, &mut place);
                }
            }
            Op::Rotate { blocks } => {
                let size = blocks.first().map_or(1, Array2::nrows);
                for (mut target, rotation) in block.axis_chunks_iter_mut(Axis(0), size).zip(blocks) {
                    let rotated = rotation.dot(&target);
                    target.assign(&rotated);
                }
            }
        }
    }
}

/// `wanted / now`. What has no direction stays what it is: nothing.
fn ratio(wanted: f32, now: f64) -> f32 {
    if now == 0.0 { 0.0 } else { (f64::from(wanted) / now) as f32 }
}
