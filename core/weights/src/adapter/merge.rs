//! Changing weights: `W' = W + Σ strength · ΔW`, in f32, cast once.

use super::{
    delta::Delta,
    module::product,
    op::{Block, Extent, Op},
};
use crate::{
    convert::{self, half_of, is_convertible, overflow_limit},
    layout::{TILE, transpose, transpose_block},
    memory::zeroed,
    simd,
};
use rayon::prelude::*;
use sdrun_abi::{DType, Error, ErrorCode, Result};
use std::ops::Range;

/// Elements of a block of whole rows: in f32, it stays in the second-level cache.
const BLOCK_ELEMENTS: usize = 1 << 17;

/// Rows of such a block at least, though it then may leave that cache: a matrix product is slow on fewer.
const BLOCK_ROWS: usize = 32;

/// Columns that a task makes of a transpose at most.
const MOST_COLUMNS: usize = 512;

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
        self.extent() < Extent::Whole
    }

    fn extent(&self) -> Extent {
        self.ops.iter().map(Op::extent).max().unwrap_or(Extent::Tile)
    }

    /// Rows and columns of the tensor as a matrix.
    fn dimensions(&self) -> (usize, usize) {
        let rows = self.shape.first().copied().unwrap_or(1);
        (rows, product(self.shape.get(1..).unwrap_or_default()))
    }

    /// Makes rows `rows` of the changed tensor, `out`, from the same rows of the pristine one, `base`: contiguous,
    /// little-endian, f32, f16, bf16 or f64 each. In parallel, in blocks that fit a core's cache; rounds once.
    ///
    /// `InvalidArgument` where lengths or rows do not fit; `FailedPrecondition` for less than all rows where
    /// [`is_row_local`](Merge::is_row_local) is false; `Unimplemented` for other types; `OutOfRange` where a finite
    /// value would become infinite.
    pub fn rows(&self, rows: Range<usize>, base: (DType, &[u8]), out: (DType, &mut [u8])) -> Result<()> {
        let ((from, base), (to, out)) = (base, out);
        if self.is_copy(&rows, (from, base), (to, out))? {
            let pairs = out.par_chunks_mut(COPY).zip(base.par_chunks(COPY));
            pairs.for_each(|(out, base)| out.copy_from_slice(base));
            return Ok(());
        }
        let (_, columns) = self.dimensions();
        let (height, width) = match self.extent() {
            Extent::Tile => (TILE, TILE),
            Extent::Rows => ((BLOCK_ELEMENTS / columns.max(1)).max(BLOCK_ROWS), columns),
            Extent::Whole => (rows.len(), columns),
        };
        let tasks = out.par_chunks_mut((height * columns * to.size()).max(1)).enumerate();
        tasks.try_for_each_init(Vec::new, |values, (task, out)| {
            let first = task * height;
            let high = height.min(rows.len() - first);
            for left in (0..columns).step_by(width) {
                let at = |left: usize| Place {
                    rows: first..first + high,
                    columns: left..columns.min(left + width),
                    stride: columns,
                };
                let place = at(left);
                if left + width < columns {
                    at(left + width).prefetch((from, base));
                }
                self.block(rows.start, &place, (from, base), values)?;
                store(values, &place, to, &mut out[left * to.size()..], columns)?;
            }
            Ok(())
        })
    }

    /// The whole tensor.
    pub fn tensor(&self, base: (DType, &[u8]), out: (DType, &mut [u8])) -> Result<()> {
        self.rows(0..self.dimensions().0, base, out)
    }

    /// The transpose of the whole tensor, a matrix. Errors are those of [`rows`](Merge::rows).
    pub fn transposed(&self, base: (DType, &[u8]), out: (DType, &mut [u8])) -> Result<()> {
        let ((from, base), (to, out)) = (base, out);
        let (rows, columns) = self.dimensions();
        if self.is_copy(&(0..rows), (from, base), (to, out))? {
            transpose(base, to.size(), &[rows, columns], out);
            return Ok(());
        }
        if self.extent() > Extent::Tile {
            let mut straight = zeroed(out.len())?;
            self.tensor((from, base), (to, &mut straight))?;
            transpose(&straight, to.size(), &[rows, columns], out);
            return Ok(());
        }
        let size = to.size();
        // Wide, so that of every page of the file much is read at a time, but enough for all threads.
        let share = columns.div_ceil(2 * rayon::current_num_threads());
        let width = share.next_multiple_of(TILE).min(MOST_COLUMNS);
        let tasks = out.par_chunks_mut((width * rows * size).max(1)).enumerate();
        tasks.try_for_each_init(Default::default, |scratch: &mut (Vec<f32>, Vec<u8>), (task, out)| {
            let (values, straight) = scratch;
            straight.resize(TILE * TILE * size, 0);
            let all = task * width..columns.min((task + 1) * width);
            for top in (0..rows).step_by(TILE) {
                let high = |top: usize| top..rows.min(top + TILE);
                if top + TILE < rows {
                    Place { rows: high(top + TILE), columns: all.clone(), stride: columns }
                        .prefetch((from, base));
                }
                for left in all.clone().step_by(TILE) {
                    let wide = left..all.end.min(left + TILE);
                    let place = Place { rows: high(top), columns: wide, stride: columns };
                    self.block(0, &place, (from, base), values)?;
                    store(values, &place, to, straight, TILE)?;
                    let dimensions = [place.rows.len(), place.columns.len()];
                    let out = &mut out[((left - all.start) * rows + top) * size..];
                    transpose_block(size, straight, TILE, dimensions, out, rows);
                }
            }
            Ok(())
        })
    }

    /// Checks sizes and types. Whether there is nothing to compute.
    fn is_copy(&self, rows: &Range<usize>, base: (DType, &[u8]), out: (DType, &[u8])) -> Result<bool> {
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
        if base.is_empty() || (self.ops.is_empty() && from == to) {
            return Ok(true);
        }
        if !is_convertible(from) || !is_convertible(to) {
            return Err(Error::unsupported(format!(
                "weights of type {from} cannot be merged and become {to}"
            )));
        }
        if !self.is_row_local() && *rows != (0..all) {
            return Err(Error::precondition("an adapter that mixes rows needs all of them"));
        }
        Ok(false)
    }

    /// Makes a block of the changed tensor; the rows of `base` are those from `first` on.
    fn block(&self, first: usize, place: &Place, base: (DType, &[u8]), values: &mut Vec<f32>) -> Result<()> {
        let stride = place.values_stride();
        values.resize(place.rows.len() * stride, 0.0);
        load(place, base, values)?;
        let rows = place.rows.start + first..place.rows.end + first;
        let mut block = Block { values, stride, rows, columns: place.columns.clone() };
        self.ops.iter().try_for_each(|op| op.apply(&mut block))
    }
}

/// A block of a matrix.
struct Place {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Elements of a row of the matrix.
    stride: usize,
}

impl Place {
    /// Has the block brought to the cache while another is worked on.
    fn prefetch(&self, base: (DType, &[u8])) {
        let (from, base) = base;
        // A type of another size is told in halves.
        let halves = from.size() / 2;
        let start = (self.rows.start * self.stride + self.columns.start) * from.size();
        let (columns, stride) = (self.columns.len() * halves, self.stride * halves);
        simd::prefetch(base.get(start..).unwrap_or_default(), self.rows.len(), columns, stride);
    }

    /// Values from one row to the next where the block lies by itself.
    fn values_stride(&self) -> usize {
        self.columns.len().next_multiple_of(simd::PANEL)
    }
}

fn load(place: &Place, base: (DType, &[u8]), values: &mut [f32]) -> Result<()> {
    let (from, base) = base;
    let base = &base[(place.rows.start * place.stride + place.columns.start) * from.size()..];
    let (rows, columns, stride) = (place.rows.len(), place.columns.len(), place.values_stride());
    if let Some(half) = half_of(from) {
        let block = simd::Block { rows, columns, from_stride: place.stride, to_stride: stride };
        simd::widen(half, base, values, block);
        return Ok(());
    }
    let lines = base.chunks(place.stride * from.size()).zip(values.chunks_mut(stride));
    for (line, values) in lines {
        let line = &line[..columns * from.size()];
        if let Some(value) = convert::load(line, from, DType::F32, &mut values[..columns]) {
            return Err(too_large(value, DType::F32));
        }
    }
    Ok(())
}

/// Writes a block to rows that begin `stride` elements apart.
fn store(values: &[f32], place: &Place, to: DType, out: &mut [u8], stride: usize) -> Result<()> {
    let (rows, columns, from_stride) = (place.rows.len(), place.columns.len(), place.values_stride());
    if let Some(half) = half_of(to) {
        let block = simd::Block { rows, columns, from_stride, to_stride: stride };
        if simd::narrow(half, values, out, block) {
            return Ok(());
        }
        // Infinities and NaNs that were there before may pass.
        let limit = overflow_limit(to);
        let written = values.chunks(from_stride).flat_map(|line| &line[..columns]);
        return match written.copied().find(|v| v.is_finite() && v.abs() >= limit) {
            Some(value) => Err(too_large(f64::from(value), to)),
            None => Ok(()),
        };
    }
    let lines = values.chunks(from_stride).zip(out.chunks_mut(stride * to.size()));
    for (line, out) in lines {
        convert::store(&line[..columns], to, &mut out[..columns * to.size()]);
    }
    Ok(())
}

fn too_large(value: f64, dtype: DType) -> Error {
    let message = format!("the value {value:e} is out of {dtype}'s range");
    Error::new(ErrorCode::OutOfRange, message)
        .with_hint("lower the adapters' strengths, or use a higher precision")
}
