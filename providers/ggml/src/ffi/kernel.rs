//! Operations of ours inside a ggml graph (`GGML_OP_CUSTOM`).

use super::{
    api::*,
    builder::Type,
    product::{Block, Words},
};
use std::{
    any::Any,
    ffi::{c_int, c_void},
    marker::PhantomData,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// Most inputs a kernel can have: ggml keeps ten sources, of which a custom operation may use nine.
pub(crate) const MAX_INPUTS: usize = MAX_SRC - 1;

/// An operation that computes its output tile by tile, the tiles in any order and on any thread.
pub(crate) trait Kernel: Send + Sync {
    /// How the output is cut into tiles when `workers` threads work on it.
    fn grid(&self, workers: usize) -> Grid;

    /// How many multiplications the output takes, where that is more than one for each element.
    fn multiplications(&self) -> usize {
        0
    }
    /// What it multiplies.
    fn words(&self) -> Words {
        Words::F32
    }

    /// Whether it can write its output over input 0, of the same size: each tile then holds its part of that input, of which
    /// it needs no other, and [`Inputs::is_over`] tells so.
    fn can_be_over(&self) -> bool {
        false
    }

    /// Computes one tile.
    ///
    /// # Errors
    /// One sentence; the run ends with it.
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
}

impl Grid {
    /// A flat output of `len` elements, cut into runs of `run`.
    pub(crate) fn flat(len: usize, run: usize) -> Self {
        Grid { planes: 1, rows: 1, cols: len, tile_rows: 1, tile_cols: run.max(1) }
    }
    /// A flat output cut so that each of `workers` gets some runs, none of them too small to be worth it.
    pub(crate) fn even(len: usize, workers: usize) -> Self {
        Self::flat(len, len.div_ceil(workers.max(1) * 4).max(4096))
    }
    /// `rows` rows of `cols` elements, `tile_rows` of them at a time.
    pub(crate) fn rows(rows: usize, cols: usize, tile_rows: usize) -> Self {
        Grid { planes: 1, rows, cols, tile_rows: tile_rows.max(1), tile_cols: cols.max(1) }
    }
    /// Elements of the output.
    pub(crate) fn len(&self) -> usize {
        self.planes * self.rows * self.cols
    }
    fn tiles(&self) -> usize {
        self.planes * self.rows.div_ceil(self.tile_rows) * self.cols.div_ceil(self.tile_cols)
    }
    fn tile(&self, index: usize) -> (usize, Range<usize>, Range<usize>) {
        let (down, across) = (self.rows.div_ceil(self.tile_rows), self.cols.div_ceil(self.tile_cols));
        let (plane, rest) = (index / (down * across), index % (down * across));
        let (row, col) = (rest / across * self.tile_rows, rest % across * self.tile_cols);
        (plane, row..(row + self.tile_rows).min(self.rows), col..(col + self.tile_cols).min(self.cols))
    }
}

/// The part of an output that one call of [`Kernel::tile`] has to itself.
pub(crate) struct Tile<'a> {
    /// Which matrix.
    pub(crate) plane: usize,
    /// Which of its rows.
    pub(crate) rows: Range<usize>,
    /// Which of its columns.
    pub(crate) cols: Range<usize>,
    data: *mut u8,
    /// Which element of the output `data` begins with.
    first: usize,
    type_: Type,
    grid: Grid,
    exclusive: PhantomData<&'a mut [u8]>,
}

impl<'a> Tile<'a> {
    /// Rows of `cols` elements of a matrix, of which `data` holds no others.
    pub(crate) fn of_rows(data: &'a mut [f32], rows: Range<usize>, cols: usize) -> Self {
        assert_eq!(data.len(), rows.len() * cols, "rows of another length");
        let grid = Grid::rows(rows.end, cols, rows.len());
        Tile {
            plane: 0,
            first: rows.start * cols,
            rows,
            cols: 0..cols,
            data: data.as_mut_ptr().cast(),
            type_: Type::F32,
            grid,
            exclusive: PhantomData,
        }
    }
    /// Some of its rows.
    pub(crate) fn part(&mut self, rows: Range<usize>) -> Tile<'_> {
        assert!(self.rows.start <= rows.start && rows.end <= self.rows.end, "rows outside the tile");
        Tile { rows, cols: self.cols.clone(), exclusive: PhantomData, ..*self }
    }
    /// Where in `data` an element is.
    fn place(&self, row: usize, col: usize) -> usize {
        (self.plane * self.grid.rows + row) * self.grid.cols + col - self.first
    }
    /// The bytes of the tile's columns in row `row`, which is one of `self.rows`.
    pub(crate) fn row_bytes(&mut self, row: usize) -> &mut [u8] {
        assert!(self.rows.contains(&row), "row {row} is not in the tile's {:?}", self.rows);
        let size = self.type_.size();
        let start = self.place(row, self.cols.start);
        // SAFETY: `start..start + cols.len()` lies inside the output, whose length is the grid's, and only
        // this tile covers it; the borrow of `self` keeps two rows from being lent at once.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start * size), self.cols.len() * size) }
    }
    /// The elements of an f32 output, as [`row_bytes`](Self::row_bytes).
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert_eq!(self.type_, Type::F32, "a kernel writes f32 into another type");
        let bytes = self.row_bytes(row);
        // SAFETY: every bit pattern is an f32; ggml aligns tensors to 32 bytes and `start` counts elements.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / 4) }
    }
    /// A part of an f32 tile: from row `row` (one of `self.rows`) and column `col` (one of `self.cols`) on.
    pub(crate) fn block(&mut self, row: usize, col: usize, rows: usize, cols: usize) -> Block<'_> {
        assert_eq!(self.type_, Type::F32, "a kernel writes f32 into another type");
        assert!(self.rows.start <= row && row + rows <= self.rows.end, "rows outside the tile");
        assert!(self.cols.start <= col && col + cols <= self.cols.end, "columns outside the tile");
        let start = self.place(row, col);
        // SAFETY: inside the output, and only this tile covers it; the borrow of `self` keeps it to the block.
        unsafe { Block::from_raw(self.data.cast::<f32>().add(start), self.grid.cols, rows, cols) }
    }
    /// The words of a tile of one row of 32-bit elements, or of pairs of 16-bit elements.
    pub(crate) fn words(&mut self) -> &mut [u32] {
        let bytes = self.row_bytes(self.rows.start);
        // SAFETY: every bit pattern is a u32; the prefix and suffix that are not aligned are left out.
        let (before, words, after) = unsafe { bytes.align_to_mut() };
        assert!(before.is_empty() && after.is_empty(), "a tile that is not in words");
        words
    }
    /// The bytes of a tile of one row.
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
    /// Whether the output is written over input 0, which cannot be asked for then.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }
    /// Type of input `i`.
    pub(crate) fn type_of(&self, i: usize) -> Type {
        self.slots[i].0
    }
    /// Bytes of input `i`.
    pub(crate) fn bytes(&self, i: usize) -> &'a [u8] {
        assert!(i < self.len, "a kernel with {} inputs reads input {i}", self.len);
        assert!(i > 0 || !self.over, "a kernel reads what it writes over");
        self.slots[i].1
    }
    /// Elements of input `i`, which is f32.
    pub(crate) fn f32(&self, i: usize) -> &'a [f32] {
        assert_eq!(self.type_of(i), Type::F32, "a kernel reads f32 from another type");
        let bytes = self.bytes(i);
        // SAFETY: every bit pattern is an f32; ggml aligns tensors to 32 bytes.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 4) }
    }
    /// Input `i` in words of 32 bits: f32, or pairs of bf16.
    pub(crate) fn words(&self, i: usize) -> &'a [u32] {
        let bytes = self.bytes(i);
        // SAFETY: every bit pattern is a u32; ggml aligns tensors to 32 bytes.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 4) }
    }
    /// Elements of input `i`, which is f16 or bf16, as their bits.
    pub(crate) fn u16(&self, i: usize) -> &'a [u16] {
        assert_eq!(self.type_of(i).size(), 2, "a kernel reads two bytes from another type");
        let bytes = self.bytes(i);
        // SAFETY: every bit pattern is a u16; ggml aligns tensors to 32 bytes.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 2) }
    }
}

/// The words of f32 elements.
pub(crate) fn as_words(values: &[f32]) -> &[u32] {
    // SAFETY: every bit pattern is a u32, of the same size and alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) }
}

/// The words of f32 elements, to be written.
pub(crate) fn as_words_mut(values: &mut [f32]) -> &mut [u32] {
    // SAFETY: as above, and every u32 is the bits of an f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), values.len()) }
}

/// Words as the f32 elements whose bits they are.
pub(crate) fn as_floats(words: &[u32]) -> &[f32] {
    // SAFETY: every bit pattern is an f32, of the same size and alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// The bytes of words.
#[cfg(test)]
pub(crate) fn as_bytes(words: &[u32]) -> &[u8] {
    // SAFETY: every word is four bytes.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len() * 4) }
}

/// What ended a run early.
#[derive(Default)]
pub(super) struct Failure {
    set: AtomicBool,
    message: Mutex<Option<String>>,
}

impl Failure {
    pub(super) fn is_set(&self) -> bool {
        self.set.load(Ordering::Relaxed)
    }
    fn record(&self, text: String) {
        self.message.lock().unwrap_or_else(|p| p.into_inner()).get_or_insert(text);
        self.set.store(true, Ordering::Relaxed);
    }
    /// The first message since the last call.
    pub(super) fn take(&self) -> Option<String> {
        self.set.store(false, Ordering::Relaxed);
        self.message.lock().unwrap_or_else(|p| p.into_inner()).take()
    }
}

/// A kernel as ggml's user data.
pub(super) struct Cell {
    pub(super) kernel: Box<dyn Kernel>,
    /// What the graph calls the operation, for messages.
    pub(super) name: String,
    pub(super) inputs: usize,
    pub(super) failure: std::sync::Arc<Failure>,
    pub(super) shares: Shares,
    /// Whether it writes over its input 0; said before the first run.
    pub(super) over: AtomicBool,
}

/// Most shares that tiles are divided into.
const MAX_SHARES: usize = 64;

/// Tiles for each worker, one after the other; who has done his own takes of the others', so that nobody waits long for a
/// slower core. Which worker computes a tile does not change it.
#[derive(Debug)]
pub(super) struct Shares([AtomicUsize; MAX_SHARES]);

impl Default for Shares {
    fn default() -> Self {
        Shares([const { AtomicUsize::new(0) }; MAX_SHARES])
    }
}

impl Shares {
    /// Nothing is taken. Not while workers take tiles.
    pub(super) fn reset(&self) {
        self.0.iter().for_each(|taken| taken.store(0, Ordering::Relaxed));
    }

    /// Tiles for worker `ith` of `nth`, until none of `tiles` is left.
    fn take(&self, tiles: usize, ith: usize, nth: usize) -> impl Iterator<Item = usize> {
        let count = nth.min(MAX_SHARES);
        (0..count).flat_map(move |turn| {
            let share = (ith + turn) % count;
            let (first, end) = (tiles * share / count, tiles * (share + 1) / count);
            std::iter::from_fn(move || {
                let index = first + self.0[share].fetch_add(1, Ordering::Relaxed);
                (index < end).then_some(index)
            })
        })
    }
}

/// Runs tiles of a kernel for worker `ith` of `nth`.
///
/// # Safety
/// Called by ggml for a node made by `Builder::custom`: `data` is the node's `Cell`, `dst` and its sources are
/// allocated, contiguous, and do not overlap, but for its first source and where `over` says so.
pub(super) unsafe extern "C" fn trampoline(dst: TensorPtr, ith: c_int, nth: c_int, data: *mut c_void) {
    // SAFETY: by this function's contract.
    let cell = unsafe { &*data.cast::<Cell>() };
    if cell.failure.is_set() {
        return;
    }
    let share = AssertUnwindSafe(|| {
        // SAFETY: by this function's contract.
        unsafe { work(cell, dst, ith as usize, nth as usize) }
    });
    match catch_unwind(share) {
        Ok(Ok(())) => {}
        Ok(Err(why)) => cell.failure.record(format!("{}: {why}", cell.name)),
        Err(panic) => cell.failure.record(format!("{}: panic: {}", cell.name, panic_text(&*panic))),
    }
}

/// # Safety
/// As [`trampoline`].
unsafe fn work(cell: &Cell, dst: TensorPtr, ith: usize, nth: usize) -> Result<(), String> {
    let over = cell.over.load(Ordering::Relaxed);
    let mut inputs = Inputs { slots: [(Type::F32, &[]); MAX_INPUTS], len: cell.inputs, over };
    // What is written over is not lent to be read too.
    for (i, slot) in inputs.slots.iter_mut().enumerate().take(cell.inputs).skip(usize::from(over)) {
        // SAFETY: `Builder::custom` set this many sources; they are contiguous and allocated.
        unsafe {
            let source = &*(*dst).src[i];
            let type_ = Type::from_raw(source.type_).ok_or("a source has an unknown type")?;
            let len = source.ne.iter().product::<i64>() as usize * type_.size();
            *slot = (type_, std::slice::from_raw_parts(source.data.cast::<u8>(), len));
        }
    }
    // SAFETY: a valid tensor.
    let (data, type_, len) =
        unsafe { ((*dst).data.cast::<u8>(), (*dst).type_, (*dst).ne.iter().product::<i64>()) };
    let type_ = Type::from_raw(type_).ok_or("the output has an unknown type")?;
    let grid = cell.kernel.grid(nth);
    if grid.len() != len as usize {
        return Err(format!("a grid of {} elements for an output of {len}", grid.len()));
    }
    let tiles = grid.tiles();
    for index in cell.shares.take(tiles, ith, nth) {
        if cell.failure.is_set() {
            return Ok(());
        }
        let (plane, rows, cols) = grid.tile(index);
        let tile = Tile { plane, rows, cols, data, first: 0, type_, grid, exclusive: PhantomData };
        cell.kernel.tile(&inputs, tile)?;
    }
    Ok(())
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// The address of an output that several threads fill.
#[cfg(test)]
struct Filled(*mut u8);

// SAFETY: each tile is computed once, and tiles of a grid do not overlap.
#[cfg(test)]
unsafe impl Sync for Filled {}

/// What a kernel makes of f32 (or 32-bit word) inputs when `workers` threads share its tiles. The threads take them in an
/// order that is another one for each number of workers.
#[cfg(test)]
pub(crate) fn run_kernel(kernel: &dyn Kernel, inputs: &[&[u32]], workers: usize) -> Vec<u32> {
    let mut slots = Inputs { slots: [(Type::F32, &[]); MAX_INPUTS], len: inputs.len(), over: false };
    for (slot, words) in slots.slots.iter_mut().zip(inputs) {
        *slot = (Type::F32, as_bytes(words));
    }
    let grid = kernel.grid(workers);
    // What no tile writes shows as a NaN.
    let mut out = vec![f32::NAN.to_bits(); grid.len()];
    let mut order: Vec<usize> = (0..grid.tiles()).collect();
    // Fisher-Yates, with the numbers of Knuth's MMIX generator.
    let mut state = workers as u64;
    for last in (1..order.len()).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    let (next, filled) = (AtomicUsize::new(0), Filled(out.as_mut_ptr().cast()));
    let start = std::sync::Barrier::new(workers);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let filled: &Filled = &filled;
                start.wait();
                while let Some(index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (plane, rows, cols) = grid.tile(*index);
                    let (data, type_) = (filled.0, Type::F32);
                    let tile =
                        Tile { plane, rows, cols, data, first: 0, type_, grid, exclusive: PhantomData };
                    kernel.tile(&slots, tile).unwrap();
                }
            });
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the turn in which a tile is computed, as a kernel would that keeps something between its tiles.
    struct Turns(AtomicUsize);

    impl Kernel for Turns {
        fn grid(&self, _: usize) -> Grid {
            Grid::flat(64, 1)
        }
        fn tile(&self, _: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
            tile.row(0).fill(self.0.fetch_add(1, Ordering::Relaxed) as f32);
            Ok(())
        }
    }

    #[test]
    fn a_kernel_whose_tiles_depend_on_their_order_is_seen() {
        let turns = |workers| run_kernel(&Turns(AtomicUsize::new(0)), &[], workers);
        assert_eq!(turns(1), turns(1));
        assert_ne!(turns(1), turns(3));
    }

    #[test]
    fn every_tile_is_taken_once() {
        for (tiles, workers) in [(0, 1), (1, 2), (100, 1), (100, 3), (1000, 100)] {
            let shares = Shares::default();
            for _ in 0..2 {
                shares.reset();
                let all = std::sync::Mutex::new(Vec::new());
                std::thread::scope(|scope| {
                    for ith in 0..workers {
                        let (all, shares) = (&all, &shares);
                        scope.spawn(move || {
                            let mine: Vec<usize> = shares.take(tiles, ith, workers).collect();
                            all.lock().unwrap().extend(mine);
                        });
                    }
                });
                let mut all = all.into_inner().unwrap();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..tiles), "{tiles} tiles, {workers} workers");
            }
        }
    }

    #[test]
    fn tiles_cover_every_element_once() {
        let grid = Grid { planes: 2, rows: 7, cols: 10, tile_rows: 3, tile_cols: 4 };
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
