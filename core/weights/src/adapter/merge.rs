//! Applies changes to weights: `W' = W + Σ strength · ΔW`, in f32, cast once.

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

/// Elements of a block of whole rows. In f32, a block fits the second-level cache.
const BLOCK_ELEMENTS: usize = 1 << 17;

/// Minimum number of rows of such a block, even if it then exceeds that cache, because a matrix product is slow on fewer.
const BLOCK_ROWS: usize = 32;

/// Bytes of the pristine tensor that are copied into the cache at a time, and the minimum number of its rows: four are
/// multiplied at once.
const STAGED: usize = 1 << 19;
const FEWEST_ROWS: usize = 8;

/// Elements that are handed on at a time: they leave room in the second-level cache for what is made of them.
const TAKEN: usize = 1 << 15;

/// Columns that are copied into the cache at a time when a transpose is written.
const MOST_COLUMNS: usize = 4096;

/// Rows of a tile processed at a time: with the factors and the output they fit the first-level cache.
const STRIP: usize = 16;

/// Bytes copied at a time if there is no change.
const COPY: usize = 1 << 20;

/// The changes of one tensor, with all factors loaded as f32. Computes any rows of the changed tensor from the same rows of
/// the pristine one.
///
/// Each delta applies to the result of the deltas before it. The order of additive ones affects only rounding; [`Kind::Glora`](super::Kind::Glora), [`Kind::Ia3`](super::Kind::Ia3),
/// [`Kind::Oft`](super::Kind::Oft) and DoRA do not commute.
///
/// DoRA follows one of two rules, see [`DoraRule`](super::DoraRule).
#[derive(Clone, Debug)]
pub struct Merge {
    shape: Vec<usize>,
    ops: Vec<Op>,
}

impl Merge {
    /// The deltas of a tensor of this shape with their strengths, in the user's order. Deltas of strength 0 are skipped, so
    /// they change no bit.
    ///
    /// `InvalidArgument` if a strength is not finite or a delta belongs to a tensor of another shape.
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

    /// Whether the tensor stays unchanged.
    pub fn is_identity(&self) -> bool {
        self.ops.is_empty()
    }

    /// Whether rows can be computed independently.
    pub fn is_row_local(&self) -> bool {
        self.extent() < Extent::Whole
    }

    /// Whether the changed tensor of type `from` is sure to fit the type `to`, from a bound on its values, without computing it. False
    /// says nothing: then only the computation tells. `largest` finds the largest magnitude of the pristine tensor, as
    /// [`largest`](super::largest) does.
    pub fn surely_fits(&self, from: DType, to: DType, largest: impl FnOnce() -> Option<f32>) -> bool {
        if !is_convertible(from) || !is_convertible(to) || from == DType::F64 {
            return false;
        }
        if matches!(to, DType::F32 | DType::F64) {
            return true;
        }
        // Sums round.
        const SLACK: f32 = 1.01;
        let growth = self.ops.iter().try_fold(0.0, |sum, op| Some(sum + op.growth()?));
        let most = growth.and_then(|growth| Some(growth + largest()?));
        most.is_some_and(|most| most * SLACK < overflow_limit(to))
    }

    fn extent(&self) -> Extent {
        self.ops.iter().map(Op::extent).max().unwrap_or(Extent::Tile)
    }

    /// Rows and columns of the tensor as a matrix.
    fn dimensions(&self) -> (usize, usize) {
        let rows = self.shape.first().copied().unwrap_or(1);
        (rows, product(self.shape.get(1..).unwrap_or_default()))
    }

    /// Computes rows `rows` of the changed tensor, `out`, from the same rows of the pristine one, `base`: contiguous,
    /// little-endian, f32, f16, bf16 or f64 each. In parallel, in blocks that fit a core's cache; rounds once.
    ///
    /// `InvalidArgument` if lengths or rows do not match; `FailedPrecondition` for less than all rows if
    /// [`is_row_local`](Merge::is_row_local) is false; `Unimplemented` for other types; `OutOfRange` if a finite
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
            Extent::Tile => ((STAGED / (columns * from.size())).clamp(FEWEST_ROWS, TILE), TILE),
            Extent::Rows => ((BLOCK_ELEMENTS / columns.max(1)).max(BLOCK_ROWS), columns),
            Extent::Whole => (rows.len(), columns),
        };
        let tasks = out.par_chunks_mut((height * columns * to.size()).max(1)).enumerate();
        let base = Base { dtype: from, bytes: base, top: rows.start, left: 0, stride: columns };
        tasks.try_for_each_init(Scratch::default, |scratch, (task, out)| {
            let top = rows.start + task * height;
            self.band(top..rows.end.min(top + height), width, &base, scratch, (to, out))
        })
    }

    /// Computes consecutive rows of the changed tensor, in blocks of `width` columns.
    fn band(
        &self,
        rows: Range<usize>,
        width: usize,
        base: &Base<'_>,
        Scratch { staged, values, .. }: &mut Scratch,
        (to, out): (DType, &mut [u8]),
    ) -> Result<()> {
        let columns = base.stride;
        let base = match width < columns {
            true => base.staged(&Place { rows: rows.clone(), columns: 0..columns }, staged),
            false => *base,
        };
        for left in (0..columns).step_by(width.max(1)) {
            let place = Place { rows: rows.clone(), columns: left..columns.min(left + width) };
            self.block(&place, &base, values, to, &mut out[left * to.size()..], columns)?;
        }
        Ok(())
    }

    /// As [`tensor`](Merge::tensor), on this thread, a few rows at a time: `take` receives the index of the first row, and the bytes of a
    /// multiple of `step` rows, or of those that are left. They are in the cache. False, before any call of `take`, if
    /// [`is_row_local`](Merge::is_row_local) is false.
    pub fn strips(
        &self,
        base: (DType, &[u8]),
        to: DType,
        step: usize,
        take: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<bool> {
        let (from, base) = base;
        let (rows, columns) = self.dimensions();
        if !self.is_row_local() || base.is_empty() || step == 0 {
            return Ok(false);
        }
        if from.bytes_of(&self.shape) != Some(base.len()) {
            return Err(Error::invalid(format!(
                "{} bytes of {from} for a tensor {:?}",
                base.len(),
                self.shape
            )));
        }
        let height = (TAKEN / columns / step).max(1) * step;
        let width = if self.extent() == Extent::Tile { TILE } else { columns };
        let mut out = vec![0; height.min(rows) * columns * to.size()];
        let mut scratch = Scratch::default();
        for (top, base) in (0..rows).step_by(height).zip(base.chunks(height * columns * from.size())) {
            let high = top..rows.min(top + height);
            let out = &mut out[..high.len() * columns * to.size()];
            if self.is_copy(&high, (from, base), (to, out))? {
                out.copy_from_slice(base);
            } else {
                let base = Base { dtype: from, bytes: base, top, left: 0, stride: columns };
                self.band(high, width, &base, &mut scratch, (to, out))?;
            }
            take(top, out)?;
        }
        Ok(true)
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
        let base = Base { dtype: from, bytes: base, top: 0, left: 0, stride: columns };
        // Each task reads consecutive rows and writes the columns they become.
        let bands = simd::bands(out, rows * size, TILE * size);
        bands.into_par_iter().enumerate().try_for_each_init(Scratch::default, |scratch, (task, mut band)| {
            let Scratch { staged, values, straight, turned } = scratch;
            straight.resize(STRIP * TILE * size, 0);
            turned.resize(TILE * TILE * size, 0);
            let high = task * TILE..rows.min((task + 1) * TILE);
            for all in (0..columns).step_by(MOST_COLUMNS).map(|left| left..columns.min(left + MOST_COLUMNS)) {
                let base = base.staged(&Place { rows: high.clone(), columns: all.clone() }, staged);
                for left in all.clone().step_by(TILE) {
                    let wide = left..all.end.min(left + TILE);
                    // They arrive during the computation.
                    wide.clone().for_each(|column| band.fetch(column));
                    for top in high.clone().step_by(STRIP) {
                        let rows = top..high.end.min(top + STRIP);
                        let place = Place { rows: rows.clone(), columns: wide.clone() };
                        self.block(&place, &base, values, to, straight, TILE)?;
                        let turned = &mut turned[(top - high.start) * size..];
                        transpose_block(size, straight, TILE, [rows.len(), wide.len()], turned, TILE);
                    }
                    for (column, line) in wide.zip(turned.chunks_exact(TILE * size)) {
                        band.row(column).copy_from_slice(&line[..high.len() * size]);
                    }
                }
            }
            Ok(())
        })
    }

    /// Checks sizes and types. Returns whether there is nothing to compute.
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

    /// Computes a block of the changed tensor whose rows begin `stride` elements apart.
    fn block(
        &self,
        place: &Place,
        base: &Base<'_>,
        values: &mut Vec<f32>,
        to: DType,
        out: &mut [u8],
        stride: usize,
    ) -> Result<()> {
        // The fast path of most LoRAs on most checkpoints. The slow path below reports values out of range.
        if let [Op::LowRank { product, scale }] = &*self.ops
            && let Some(half) = half_of(to).filter(|_| to == base.dtype)
            && product.merge_halves(
                half,
                *scale,
                [&place.rows, &place.columns],
                (&base.bytes[base.offset(place)..], base.stride),
                (out, stride),
            )
        {
            return Ok(());
        }
        let values_stride = place.values_stride();
        values.resize(place.rows.len() * values_stride, 0.0);
        base.load(place, values)?;
        let (rows, columns) = (place.rows.clone(), place.columns.clone());
        let mut block = Block { values, stride: values_stride, rows, columns };
        self.ops.iter().try_for_each(|op| op.apply(&mut block))?;
        store(values, place, to, out, stride)
    }
}

/// Scratch memory of a thread.
#[derive(Default)]
struct Scratch {
    staged: Vec<u8>,
    values: Vec<f32>,
    straight: Vec<u8>,
    turned: Vec<u8>,
}

/// A block of a matrix.
struct Place {
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Place {
    /// Values from one row to the next in a block in separate memory.
    fn values_stride(&self) -> usize {
        self.columns.len().next_multiple_of(simd::PANEL)
    }
}

/// The pristine tensor, or the part from row `top` and column `left` on, with rows `stride` elements apart.
#[derive(Clone, Copy)]
struct Base<'a> {
    dtype: DType,
    bytes: &'a [u8],
    top: usize,
    left: usize,
    stride: usize,
}

impl Base<'_> {
    /// Offset of a block in bytes.
    fn offset(&self, place: &Place) -> usize {
        ((place.rows.start - self.top) * self.stride + place.columns.start - self.left) * self.dtype.size()
    }

    fn rows<'b>(&'b self, place: &Place) -> impl Iterator<Item = &'b [u8]> {
        let size = self.dtype.size();
        let start = self.offset(place);
        let length = place.columns.len() * size;
        self.bytes[start..].chunks(self.stride * size).take(place.rows.len()).map(move |row| &row[..length])
    }

    /// Copies a block line by line, the fastest way to read memory. The tiles processed afterwards are then in the cache, on
    /// few pages.
    fn staged<'b>(&self, place: &Place, scratch: &'b mut Vec<u8>) -> Base<'b> {
        scratch.clear();
        self.rows(place).for_each(|row| scratch.extend_from_slice(row));
        let (top, left, stride) = (place.rows.start, place.columns.start, place.columns.len());
        Base { dtype: self.dtype, bytes: scratch, top, left, stride }
    }

    fn load(&self, place: &Place, values: &mut [f32]) -> Result<()> {
        let stride = place.values_stride();
        if let Some(half) = half_of(self.dtype) {
            let (rows, columns) = (place.rows.len(), place.columns.len());
            let block = simd::Block { rows, columns, from_stride: self.stride, to_stride: stride };
            simd::widen(half, &self.bytes[self.offset(place)..], values, block);
            return Ok(());
        }
        for (line, values) in self.rows(place).zip(values.chunks_mut(stride)) {
            if let Some(value) =
                convert::load(line, self.dtype, DType::F32, &mut values[..place.columns.len()])
            {
                return Err(too_large(value, DType::F32));
            }
        }
        Ok(())
    }
}

/// Writes a block to rows that begin `stride` elements apart.
fn store(values: &[f32], place: &Place, to: DType, out: &mut [u8], stride: usize) -> Result<()> {
    let (rows, columns, from_stride) = (place.rows.len(), place.columns.len(), place.values_stride());
    if let Some(half) = half_of(to) {
        let block = simd::Block { rows, columns, from_stride, to_stride: stride };
        if simd::narrow(half, values, out, block) {
            return Ok(());
        }
        // Infinities and NaNs of the pristine tensor may pass.
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
