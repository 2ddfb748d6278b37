//! The interface of our kernels: how they divide an output, and what they see of tensors.

use super::{api::MAX_SRC, tensor::Type};
use crate::simd::{Words, product::Block};
use std::{marker::PhantomData, ops::Range};

/// The most inputs of a kernel. A ggml tensor has ten sources, of which a custom operation may use nine.
pub(crate) const MAX_INPUTS: usize = MAX_SRC - 1;

/// An operation that computes its output tile by tile, in any order and on any thread.
pub(crate) trait Kernel: Send + Sync {
    /// How the output is cut into tiles when `workers` threads work on it.
    fn grid(&self, workers: usize) -> Grid;

    /// Multiplications for the whole output, if more than one per element.
    fn multiplications(&self) -> usize {
        0
    }
    /// The rough cost, in multiplications, of what a tile of these rows and columns does beside its share of the multiplications, such as
    /// packing operands that other tiles also pack.
    #[cfg(test)]
    fn repeated(&self, _tile: [usize; 2]) -> usize {
        0
    }
    /// The words that it multiplies.
    fn words(&self) -> Words {
        Words::F32
    }

    /// Whether it can overwrite input 0, which then has the size of the output. If [`Inputs::is_over`], each tile initially holds its
    /// part of that input, and the kernel must need no other part.
    fn can_be_over(&self) -> bool {
        false
    }

    /// Computes one tile.
    ///
    /// # Errors
    /// One sentence, which becomes the error of the run.
    fn tile(&self, inputs: &Inputs<'_>, tile: Tile<'_>) -> Result<(), String>;
}

/// An output seen as `planes` matrices of `rows` x `cols` elements, cut into tiles of at most
/// `tile_rows` x `tile_cols`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(crate) planes: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) tile_rows: usize,
    pub(crate) tile_cols: usize,
    /// How many consecutive planes a tile covers. The number of planes is a multiple of it.
    pub(crate) together: usize,
}

impl Grid {
    /// A flat output of `len` elements, cut into runs of `run`.
    pub(crate) fn flat(len: usize, run: usize) -> Self {
        Grid { together: 1, planes: 1, rows: 1, cols: len, tile_rows: 1, tile_cols: run.max(1) }
    }
    /// A flat output cut into about four runs for each of `workers`, but none too small to pay off.
    pub(crate) fn even(len: usize, workers: usize) -> Self {
        Self::flat(len, len.div_ceil(workers.max(1) * 4).max(4096))
    }
    /// `rows` rows of `cols` elements, `tile_rows` of them at a time.
    pub(crate) fn rows(rows: usize, cols: usize, tile_rows: usize) -> Self {
        Grid { together: 1, planes: 1, rows, cols, tile_rows: tile_rows.max(1), tile_cols: cols.max(1) }
    }
    /// Elements of the output.
    pub(crate) fn len(&self) -> usize {
        self.planes * self.rows * self.cols
    }
    pub(super) fn tiles(&self) -> usize {
        let planes = self.planes / self.together;
        planes * self.rows.div_ceil(self.tile_rows) * self.cols.div_ceil(self.tile_cols)
    }
    pub(super) fn tile(&self, index: usize) -> (usize, Range<usize>, Range<usize>) {
        let (down, across) = (self.rows.div_ceil(self.tile_rows), self.cols.div_ceil(self.tile_cols));
        let (plane, rest) = (index / (down * across) * self.together, index % (down * across));
        let (row, col) = (rest / across * self.tile_rows, rest % across * self.tile_cols);
        (plane, row..(row + self.tile_rows).min(self.rows), col..(col + self.tile_cols).min(self.cols))
    }
}

/// The part of an output that one call of [`Kernel::tile`] owns.
pub(crate) struct Tile<'a> {
    /// Which matrix; the first, if there are several.
    pub(crate) plane: usize,
    /// Which of its rows.
    pub(crate) rows: Range<usize>,
    /// Which of its columns.
    pub(crate) cols: Range<usize>,
    data: *mut u8,
    type_: Type,
    grid: Grid,
    exclusive: PhantomData<&'a mut [u8]>,
}

impl<'a> Tile<'a> {
    /// Tile `index` of `grid`, of an output of elements of `type_` at `data`.
    ///
    /// # Safety
    /// `data` is the whole output. During `'a`, nothing else reads or writes this tile of it.
    pub(super) unsafe fn of_output(data: *mut u8, type_: Type, grid: Grid, index: usize) -> Self {
        let (plane, rows, cols) = grid.tile(index);
        Tile { plane, rows, cols, data, type_, grid, exclusive: PhantomData }
    }
    /// The part of the tile in one of its planes.
    ///
    /// # Panics
    /// If the tile does not cover the plane.
    pub(crate) fn of_plane(&mut self, plane: usize) -> Tile<'_> {
        let inside = plane.checked_sub(self.plane).is_some_and(|i| i < self.grid.together);
        assert!(inside, "plane {plane} is not in the tile");
        let (rows, cols, grid) = (self.rows.clone(), self.cols.clone(), Grid { together: 1, ..self.grid });
        Tile { plane, rows, cols, grid, data: self.data, type_: self.type_, exclusive: PhantomData }
    }
    /// The index of an element in the output.
    fn place(&self, row: usize, col: usize) -> usize {
        (self.plane * self.grid.rows + row) * self.grid.cols + col
    }
    /// The bytes of the tile's columns in row `row`.
    ///
    /// # Panics
    /// If `row` is outside `self.rows`.
    pub(crate) fn row_bytes(&mut self, row: usize) -> &mut [u8] {
        assert!(self.rows.contains(&row), "row {row} is not in the tile's {:?}", self.rows);
        let size = self.type_.size();
        let start = self.place(row, self.cols.start);
        // SAFETY: `start..start + cols.len()` lies inside the output, which has the grid's length, and only this tile covers
        // it. The borrow of `self` prevents a second reference.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start * size), self.cols.len() * size) }
    }
    /// As [`row_bytes`](Self::row_bytes), the elements of an f32 output.
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert_eq!(self.type_, Type::F32, "a kernel writes f32 into another type");
        let bytes = self.row_bytes(row);
        // SAFETY: every bit pattern is an f32; ggml aligns tensors to 32 bytes and `start` counts elements.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / 4) }
    }
    /// A block of an f32 tile that begins at row `row` and column `col` of the output.
    ///
    /// # Panics
    /// If the block is outside the tile.
    pub(crate) fn block(&mut self, row: usize, col: usize, rows: usize, cols: usize) -> Block<'_> {
        assert_eq!(self.type_, Type::F32, "a kernel writes f32 into another type");
        assert!(self.rows.start <= row && row + rows <= self.rows.end, "rows outside the tile");
        assert!(self.cols.start <= col && col + cols <= self.cols.end, "columns outside the tile");
        let start = self.place(row, col);
        // SAFETY: the block lies inside the output, and only this tile covers it. The borrow of `self` prevents a second reference.
        unsafe { Block::from_raw(self.data.cast::<f32>().add(start), self.grid.cols, rows, cols) }
    }
    /// The words of a one-row tile of 32-bit elements, or of pairs of 16-bit elements.
    pub(crate) fn words(&mut self) -> &mut [u32] {
        let bytes = self.row_bytes(self.rows.start);
        // SAFETY: every bit pattern is a u32. `align_to_mut` leaves out the unaligned prefix and suffix.
        let (before, words, after) = unsafe { bytes.align_to_mut() };
        assert!(before.is_empty() && after.is_empty(), "a tile that is not aligned to words");
        words
    }
    /// The bytes of a one-row tile.
    pub(crate) fn run_bytes(&mut self) -> &mut [u8] {
        self.row_bytes(self.rows.start)
    }
}

/// The inputs of a kernel, each contiguous.
pub(crate) struct Inputs<'a> {
    slots: [(Type, &'a [u8]); MAX_INPUTS],
    len: usize,
    over: bool,
}

impl<'a> Inputs<'a> {
    /// `len` inputs, the first of them at `slots[0]`. With `over`, the kernel writes its output over input 0.
    pub(super) fn new(slots: [(Type, &'a [u8]); MAX_INPUTS], len: usize, over: bool) -> Self {
        Inputs { slots, len, over }
    }
    /// Whether the kernel overwrites input 0. That input is then inside the tile and cannot be read here.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }
    /// The type of input `i`.
    pub(crate) fn type_of(&self, i: usize) -> Type {
        self.slots[i].0
    }
    /// The bytes of input `i`.
    pub(crate) fn bytes(&self, i: usize) -> &'a [u8] {
        assert!(i < self.len, "a kernel with {} inputs reads input {i}", self.len);
        assert!(i > 0 || !self.over, "a kernel reads the input that it overwrites");
        self.slots[i].1
    }
    /// The elements of input `i`, which is f32.
    pub(crate) fn f32(&self, i: usize) -> &'a [f32] {
        assert_eq!(self.type_of(i), Type::F32, "a kernel reads f32 from another type");
        let bytes = self.bytes(i);
        // SAFETY: every bit pattern is an f32; ggml aligns tensors to 32 bytes.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 4) }
    }
    /// Input `i` as 32-bit words: f32, or bf16 pairs.
    pub(crate) fn words(&self, i: usize) -> &'a [u32] {
        let bytes = self.bytes(i);
        // SAFETY: every bit pattern is a u32; ggml aligns tensors to 32 bytes.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 4) }
    }
    /// The bits of the elements of input `i`, which is f16 or bf16.
    pub(crate) fn u16(&self, i: usize) -> &'a [u16] {
        assert_eq!(self.type_of(i).size(), 2, "a kernel reads two bytes from another type");
        let bytes = self.bytes(i);
        // SAFETY: every bit pattern is a u16; ggml aligns tensors to 32 bytes.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 2) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_element_once() {
        let grid = Grid { together: 1, planes: 2, rows: 7, cols: 10, tile_rows: 3, tile_cols: 4 };
        let mut seen = vec![0; grid.len()];
        for index in 0..grid.tiles() {
            let (plane, rows, cols) = grid.tile(index);
            for row in rows {
                for col in cols.clone() {
                    seen[(plane * grid.rows + row) * grid.cols + col] += 1;
                }
            }
        }
        assert!(seen.iter().all(|n| *n == 1));
    }
}
