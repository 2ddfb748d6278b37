//! Changing weights: `W' = W + Σ strength · ΔW`, in f32, cast once.

use super::{delta::Delta, module::product, op::Op};
use crate::convert::{self, BLOCK, is_convertible, overflow_limit};
use ndarray::ArrayViewMut2;
use rayon::prelude::*;
use sdrun_abi::{DType, Error, ErrorCode, Result};
use std::ops::Range;

/// Elements of the block of whole rows that is converted, changed and converted back at a time: in f32, it stays in
/// the second-level cache.
const BLOCK_ELEMENTS: usize = 1 << 17;

/// Rows of a block at least, though it then may leave that cache: a matrix product is slow on fewer.
const BLOCK_ROWS: usize = 32;

/// Bytes copied at a time where nothing changes.
const COPY: usize = 1 << 20;

/// The changes of one tensor, with all factors at hand in f32: makes any rows of the changed tensor from the same
/// rows of the pristine one.
///
/// Every kind of delta works on the tensor as the deltas before it left it. Additive ones may come in any order
/// without changing more than rounding; [`Kind::Glora`](super::Kind::Glora), [`Kind::Ia3`](super::Kind::Ia3),
/// [`Kind::Oft`](super::Kind::Oft) and DoRA do not commute.
///
/// DoRA at strength s is PEFT's, `m · (W + s·ΔW) / ‖W + s·ΔW‖`; ComfyUI has `W + s · (m · (W + ΔW) / ‖W + ΔW‖ − W)`
/// instead. They are the same at 1.
#[derive(Clone, Debug)]
pub struct Merge {
    shape: Vec<usize>,
    ops: Vec<Op>,
}

impl Merge {
    /// The deltas of a tensor of this shape with their strengths, in the user's order. What has strength 0 is left
    /// out: it leaves every bit as it is.
    ///
    /// `InvalidArgument` where a strength is not finite or a delta belongs to a tensor of another shape.
    pub fn new(shape: &[usize], deltas: &[(&Delta, f32)]) -> Result<Self> {
        let mut ops = Vec::new();
        for (delta, strength) in deltas {
            if !strength.is_finite() {
                return Err(Error::invalid(format!("an adapter cannot have strength {strength}")));
            }
            if *strength != 0.0 {
                ops.extend(delta.ops(shape, *strength)?);
            }
        }
        Ok(Merge { shape: shape.to_vec(), ops })
    }

    /// Whether the tensor stays what it is.
    pub fn is_identity(&self) -> bool {
        self.ops.is_empty()
    }

    /// Whether rows can be made without the others.
    pub fn is_row_local(&self) -> bool {
        self.ops.iter().all(Op::is_row_local)
    }

    /// Rows and columns of the tensor as a matrix.
    fn dimensions(&self) -> (usize, usize) {
        let rows = self.shape.first().copied().unwrap_or(1);
        (rows, product(self.shape.get(1..).unwrap_or_default()))
    }

    /// Rows to work on at a time.
    fn block_rows(&self) -> usize {
        let (rows, columns) = self.dimensions();
        if self.is_row_local() { (BLOCK_ELEMENTS / columns.max(1)).max(BLOCK_ROWS) } else { rows }
    }

    /// Makes rows `rows` of the changed tensor, `out`, from the same rows of the pristine one, `base`: contiguous,
    /// little-endian, f32, f16, bf16 or f64 each. In parallel, in blocks that fit a core's cache; rounds once.
    ///
    /// `InvalidArgument` where lengths or rows do not fit; `FailedPrecondition` for less than all rows where
    /// [`is_row_local`](Merge::is_row_local) is false; `Unimplemented` for other types; `OutOfRange` where a finite
    /// value would become infinite.
    pub fn rows(&self, rows: Range<usize>, base: (DType, &[u8]), out: (DType, &mut [u8])) -> Result<()> {
        let ((from, base), (to, out)) = (base, out);
        let (all, columns) = self.dimensions();
        let bytes = |dtype: DType| rows.len().checked_mul(columns)?.checked_mul(dtype.size());
        if rows.start > rows.end
            || rows.end > all
            || bytes(from) != Some(base.len())
            || bytes(to) != Some(out.len())
        {
            let (shape, base, out) = (&self.shape, base.len(), out.len());
            let message =
                format!("rows {rows:?} of a tensor {shape:?}: {base} bytes of {from}, {out} of {to}");
            return Err(Error::invalid(message));
        }
        if base.is_empty() {
            return Ok(());
        }
        if self.ops.is_empty() && from == to {
            out.par_chunks_mut(COPY)
                .zip(base.par_chunks(COPY))
                .for_each(|(out, base)| out.copy_from_slice(base));
            return Ok(());
        }
        if !is_convertible(from) || !is_convertible(to) {
            return Err(Error::unsupported(format!(
                "weights of type {from} cannot be merged and become {to}"
            )));
        }
        if !self.is_row_local() && rows != (0..all) {
            return Err(Error::precondition("an adapter that mixes rows needs all of them"));
        }
        let height = self.block_rows();
        out.par_chunks_mut(height * columns * to.size())
            .zip(base.par_chunks(height * columns * from.size()))
            .enumerate()
            .try_for_each_init(Vec::new, |values: &mut Vec<f32>, (i, (out, base))| {
                values.resize(base.len() / from.size(), 0.0);
                load(from, base, values)?;
                let mut block = view(values, columns)?;
                self.ops.iter().for_each(|op| op.apply(block.view_mut(), rows.start + i * height));
                store(values, to, out)
            })
    }

    /// The whole tensor.
    pub fn tensor(&self, base: (DType, &[u8]), out: (DType, &mut [u8])) -> Result<()> {
        self.rows(0..self.dimensions().0, base, out)
    }

    /// The whole tensor in f32.
    fn values(&self, base: &[f32], out: &mut [f32]) -> Result<()> {
        let (rows, columns) = self.dimensions();
        if rows.checked_mul(columns) != Some(base.len()) || base.len() != out.len() {
            let (shape, base, out) = (&self.shape, base.len(), out.len());
            return Err(Error::invalid(format!("a tensor {shape:?}: {base} values, room for {out}")));
        }
        if base.is_empty() {
            return Ok(());
        }
        let height = self.block_rows();
        let blocks = out.par_chunks_mut(height * columns).zip(base.par_chunks(height * columns));
        blocks.enumerate().try_for_each(|(i, (out, base))| {
            out.copy_from_slice(base);
            let mut block = view(out, columns)?;
            self.ops.iter().for_each(|op| op.apply(block.view_mut(), i * height));
            Ok(())
        })
    }
}

/// `W' = W + Σ strength · ΔW` for a tensor in f32: `base` and `out` are row-major, of `shape`. See [`Merge`].
pub fn merge(base: &[f32], shape: &[usize], deltas: &[(&Delta, f32)], out: &mut [f32]) -> Result<()> {
    Merge::new(shape, deltas)?.values(base, out)
}

fn load(from: DType, bytes: &[u8], values: &mut [f32]) -> Result<()> {
    for (bytes, values) in bytes.chunks(BLOCK * from.size()).zip(values.chunks_mut(BLOCK)) {
        if let Some(value) = convert::load(bytes, from, DType::F32, values) {
            return Err(too_large(value, DType::F32));
        }
    }
    Ok(())
}

fn store(values: &[f32], to: DType, bytes: &mut [u8]) -> Result<()> {
    let limit = overflow_limit(to);
    for (values, bytes) in values.chunks(BLOCK).zip(bytes.chunks_mut(BLOCK * to.size())) {
        // A loop without a way out runs on many values at once; infinities, which may pass, are rare.
        if limit.is_finite()
            && values.iter().fold(false, |any, v| any | (v.abs() >= limit))
            && let Some(value) = values.iter().find(|v| v.abs() >= limit && v.is_finite())
        {
            return Err(too_large(f64::from(*value), to));
        }
        convert::store(values, to, bytes);
    }
    Ok(())
}

fn too_large(value: f64, dtype: DType) -> Error {
    let message = format!("the value {value:e} is out of {dtype}'s range");
    Error::new(ErrorCode::OutOfRange, message)
        .with_hint("lower the adapters' strengths, or use a higher precision")
}

fn view(values: &mut [f32], columns: usize) -> Result<ArrayViewMut2<'_, f32>> {
    let rows = values.len() / columns;
    ArrayViewMut2::from_shape((rows, columns), values).map_err(|e| Error::internal(e.to_string()))
}
