//! What a [`Product`] reads and writes.

use crate::simd::{Level, Words, lines::prefetch};
use std::marker::PhantomData;

/// The memory layout of the left operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// For each step of the depth, a column with the rows of a [`Level::block`]. Columns are this many words apart.
    Columns(usize),
    /// Rows, [`ROW_STRIDE`] words apart.
    Rows,
    /// For each [`TILE`] of steps, the rows of a [`Level::block`], with one word for each step. Only for levels with tiles.
    Tiles,
    /// Rows [`TILE`] words apart, in which the taps find each step of the depth. The right operand then has a row with the
    /// columns of a [`Level::block`] for each step. Only for levels with tiles.
    Taps,
}

/// Most words of depth of one call with [`Left::Rows`]. Most widths of diffusion models are multiples of it, and each further call reads
/// and writes the output again.
pub(crate) const DEPTH: usize = 320;
/// Words from row to row. A cache line more than the depth, so that rows do not share cache sets.
pub(crate) const ROW_STRIDE: usize = DEPTH + 16;

/// Words of bytes, and so steps of the depth, that share a scale.
pub(crate) const STEPS: usize = 8;
/// Scales from row to row.
pub(crate) const SCALES: usize = DEPTH / STEPS;

/// The scales of bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Scales<'a> {
    /// For every [`STEPS`] steps of a row, its scale, and the sum of its integers times the scale. Rows are [`SCALES`] apart.
    pub(crate) rows: &'a [[f32; 2]],
    /// For every [`STEPS`] steps, the scale of each column, then the offset of each column. An integer `q` of the right operand stands for
    /// `scale * q - offset`.
    pub(crate) cols: &'a [f32],
}

/// Rows and columns of an AMX tile, and pairs of the depth that one AMX instruction multiplies.
pub(crate) const TILE: usize = 16;

/// The offset of each step of the depth, in words: of its row in the right operand, or with [`Left::Taps`] of the first row's word
/// in the left operand.
#[derive(Clone, Debug)]
pub(crate) struct Taps {
    pub(super) offsets: Vec<u32>,
    /// The largest offset up to each step.
    pub(super) reach: Vec<u32>,
    /// The distance of the steps inside each [`TILE`], if it is the same everywhere.
    pub(super) in_tiles: Option<u32>,
}

impl Taps {
    pub(crate) fn new(offsets: impl IntoIterator<Item = usize>) -> Self {
        let offsets: Vec<u32> = offsets.into_iter().map(|o| u32::try_from(o).unwrap_or(u32::MAX)).collect();
        let mut largest = 0;
        let reach = offsets.iter().map(|offset| {
            largest = largest.max(*offset);
            largest
        });
        let mut steps = offsets
            .chunks_exact(TILE)
            .flat_map(|tile| tile.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])));
        let in_tiles = steps.next().filter(|first| steps.all(|step| step == *first));
        Taps { reach: reach.collect(), in_tiles, offsets }
    }
    /// `depth` rows that are `stride` words apart.
    pub(crate) fn dense(depth: usize, stride: usize) -> Self {
        Self::new((0..depth).map(|i| i * stride))
    }
}

/// A matrix inside a larger one, borrowed exclusively.
pub(crate) struct Block<'a> {
    pub(super) data: *mut f32,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    exclusive: PhantomData<&'a mut [f32]>,
}

impl<'a> Block<'a> {
    /// The first `rows` x `cols` elements of a matrix with rows of `stride` elements.
    pub(crate) fn new(data: &'a mut [f32], stride: usize, rows: usize, cols: usize) -> Self {
        assert!(cols <= stride && rows > 0 && (rows - 1) * stride + cols <= data.len(), "a block outside");
        Block { data: data.as_mut_ptr(), stride, rows, cols, exclusive: PhantomData }
    }
    /// # Safety
    /// During `'a`, nothing else accesses the `rows` rows of `cols` elements that begin at `data`, `stride` elements apart.
    pub(crate) unsafe fn from_raw(data: *mut f32, stride: usize, rows: usize, cols: usize) -> Self {
        Block { data, stride, rows, cols, exclusive: PhantomData }
    }
    /// Prefetches the block.
    pub(crate) fn prefetch(&mut self) {
        (0..self.rows).for_each(|row| prefetch(self.row(row)));
    }
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: one of the rows this value owns.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride), self.cols) }
    }
}

/// A panel of the left matrix times a panel of the right one. Each of `depth` steps multiplies a column of the left panel by `cols`
/// words of the right panel, from the tap's offset on.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) level: Level,
    pub(crate) words: Words,
    pub(crate) left: Left,
    pub(crate) depth: usize,
    pub(crate) a: &'a [u32],
    /// At least the words that the last tap and the columns of a [`Level::block`] need, even if the output is narrower.
    pub(crate) b: &'a [u32],
    pub(crate) taps: &'a Taps,
    /// Only for [`Words::Bytes`], whose left operand is in [`Left::Rows`] and whose taps are dense.
    pub(crate) scales: Scales<'a>,
    /// The addend.
    pub(crate) start: Start<'a>,
    /// Bytes that will be read soon. Levels of x86-64 without tiles prefetch them during the product, a little with each step: all at once,
    /// they would only delay the product, and without it each panel of weights is waited for.
    pub(crate) ahead: &'a [u8],
    /// Bounds of the result. A NaN stays a NaN.
    pub(crate) clip: Option<[f32; 2]>,
}

impl Product<'_> {
    /// Where to prefetch from, and how many bytes further with each step.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[inline(always)]
    pub(super) fn ahead(&self) -> (*const i8, usize) {
        // A step prefetches no more than one line. If there is nothing to prefetch, it hits the cache.
        let start = if self.ahead.is_empty() { self.a.as_ptr().cast() } else { self.ahead.as_ptr().cast() };
        (start, (self.ahead.len() / self.depth.max(1)).min(64))
    }
}

/// What a product is added to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Start<'a> {
    /// Nothing.
    Zero,
    /// An element for each column.
    Row(&'a [f32]),
    /// The present contents of the output.
    Output,
}
