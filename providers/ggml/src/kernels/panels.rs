use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
    simd::{
        Level, Vectorized, Words, as_words, bf16,
        product::{Left, STEPS, TILE},
        transpose::{SQUARE, Squares, transpose},
        vectorize,
    },
    storage::f32_to_bf16,
};
use std::ops::Range;

/// The layout of a stack of `groups` matrices of `rows` x `depth` for [`Product`](crate::simd::product::Product): panels of `block`
/// rows, with missing rows zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Panels {
    pub(crate) groups: usize,
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) block: usize,
    pub(crate) words: Words,
    /// A row is `depth / taps` runs of `taps` elements. A bf16 pair holds the same tap of two runs.
    pub(crate) taps: usize,
    pub(crate) order: Order,
}

/// The order of the words of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Order {
    /// Columns with one word of each row. The taps of a run, or of a pair of runs, follow each other.
    Columns,
    /// Columns of a multiple of [`TILE`] rows. The same tap of [`TILE`] pairs follows each other, with zero pairs at the end.
    Sixteens,
    /// As `Sixteens`, but each tile is stored row by row.
    Tiles,
}

/// The offset of an element of a matrix: `start + row * row_step + depth * depth_step`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) start: usize,
    pub(crate) row_step: usize,
    pub(crate) depth_step: usize,
}

impl Panels {
    /// `[groups, rows, depth]` as the left operand of a level's products.
    pub(crate) fn left(level: Level, words: Words, [groups, rows, depth]: [usize; 3]) -> Self {
        let order = if level.has_tiles(words) { Order::Tiles } else { Order::Columns };
        Panels { groups, rows, depth, block: level.block(words).0, words, taps: 1, order }
    }
    /// `[groups, columns, depth]` as the right operand of a level's products.
    pub(crate) fn right(level: Level, words: Words, [groups, rows, depth]: [usize; 3]) -> Self {
        let order = if level.has_tiles(words) { Order::Sixteens } else { Order::Columns };
        Panels { groups, rows, depth, block: level.block(words).1, words, taps: 1, order }
    }
    /// `[groups, filters, channels * taps]` as an operand of [`Conv`](super::Conv): the right operand for levels with tiles, else the
    /// left one.
    pub(crate) fn filters(level: Level, words: Words, shape: [usize; 3], taps: usize) -> Self {
        let side = if level.has_tiles(words) { Self::right } else { Self::left };
        Panels { taps, ..side(level, words, shape) }
    }
    /// `[groups, rows, depth]` as columns of `block` rows of f32.
    pub(crate) fn columns([groups, rows, depth]: [usize; 3], block: usize) -> Self {
        Panels { groups, rows, depth, block, words: Words::F32, taps: 1, order: Order::Columns }
    }

    /// A panel as the left operand of a product.
    pub(crate) fn as_left(&self) -> Left {
        if self.order == Order::Tiles { Left::Tiles } else { Left::Columns(self.block) }
    }
    /// The number of pairs of the same tap that follow each other.
    pub(super) fn unit(&self) -> usize {
        if self.order == Order::Columns { 1 } else { TILE }
    }
    /// Columns of a panel.
    pub(crate) fn steps(&self) -> usize {
        match self.words {
            Words::F32 => self.depth,
            Words::Bf16 => (self.depth / self.taps).div_ceil(2).next_multiple_of(self.unit()) * self.taps,
            // Whole blocks, which share a scale.
            Words::Bytes => self.depth.div_ceil(4).next_multiple_of(STEPS),
        }
    }
    /// The pair of runs, and the tap, of a step.
    #[inline(always)]
    pub(super) fn pair_of(&self, step: usize) -> (usize, usize) {
        let unit = self.unit();
        (step / unit / self.taps * unit + step % unit, step / unit % self.taps)
    }
    /// The step of a tap of a pair of runs.
    pub(super) fn step_of(&self, pair: usize, tap: usize) -> usize {
        let unit = self.unit();
        (pair / unit * self.taps + tap) * unit + pair % unit
    }
    /// Words of a panel.
    pub(crate) fn panel_len(&self) -> usize {
        self.steps() * self.block
    }
    /// Where some steps of a panel are among the words of all panels.
    pub(super) fn words_of(&self, panel: usize, steps: Range<usize>) -> Range<usize> {
        let at = |step: usize| panel * self.panel_len() + step * self.block;
        at(steps.start)..at(steps.end)
    }
    /// Panels of one matrix.
    pub(crate) fn per_group(&self) -> usize {
        self.rows.div_ceil(self.block)
    }
    /// Words of all panels.
    pub(crate) fn len(&self) -> usize {
        self.groups * self.per_group() * self.panel_len()
    }

    /// Fills panel `index` of the matrix that lies in `values` with `layout`.
    pub(crate) fn fill(&self, values: &[f32], layout: Layout, index: usize, panel: &mut [u32]) {
        vectorize(Fill { panels: self, values, layout, first: index * self.block, panel });
    }

    /// Packs a stack of consecutive row-major matrices, which are `depth` x `rows` if `transposed`. `read` fills a slice with elements
    /// from an index on. `write` receives an index and the words from there on. Intermediate data stays in the cache.
    pub(crate) fn pack(
        &self,
        transposed: bool,
        read: impl Fn(usize, &mut [f32]),
        mut write: impl FnMut(usize, &[u32]),
    ) {
        let Panels { groups, rows, depth, block, .. } = *self;
        // Parts of whole pairs are packed exactly as within the whole matrix.
        let pairs = 2 * self.taps * self.unit();
        let tall = if transposed { (WIDE / block).max(1) * block } else { block };
        let deep = (PART / tall.min(rows.max(1)) / pairs).max(1) * pairs;
        let (mut values, mut words) = (Vec::new(), Vec::new());
        for group in 0..groups {
            let (start, panel) = (group * rows * depth, group * self.per_group());
            for top in (0..rows).step_by(tall) {
                for first in (0..depth).step_by(deep) {
                    let (height, len) = (tall.min(rows - top), deep.min(depth - first));
                    // Lines are consecutive elements.
                    let (from, line, step, layout) = match transposed {
                        true => (first * rows + top, height, rows, [1, height]),
                        false => (top * depth + first, len, depth, [len, 1]),
                    };
                    values.resize(height * len, 0.0);
                    for (i, values) in values.chunks_exact_mut(line).enumerate() {
                        read(start + from + i * step, values);
                    }
                    let layout = Layout { start: 0, row_step: layout[0], depth_step: layout[1] };
                    let part = Panels { groups: 1, rows: height, depth: len, ..*self };
                    words.resize(part.panel_len(), 0);
                    let before = Panels { depth: first, ..*self }.panel_len();
                    for index in 0..part.per_group() {
                        part.fill(&values, layout, index, &mut words);
                        write((panel + top / block + index) * self.panel_len() + before, &words);
                    }
                }
            }
        }
    }

    /// As [`pack`](Self::pack), from and to slices.
    #[cfg(test)]
    pub(crate) fn packed(&self, values: &[f32], transposed: bool) -> Vec<u32> {
        let mut packed = vec![7; self.len()];
        let read = |start: usize, to: &mut [f32]| to.copy_from_slice(&values[start..][..to.len()]);
        self.pack(transposed, read, |start, words| packed[start..][..words.len()].copy_from_slice(words));
        packed
    }
}

/// Elements that are packed together.
const PART: usize = 1 << 16;
/// The most rows of a transposed matrix that are packed together. With more, each panel would get only a few words at a time.
const WIDE: usize = 1024;

struct Fill<'a> {
    panels: &'a Panels,
    values: &'a [f32],
    layout: Layout,
    /// The first row of the panel.
    first: usize,
    panel: &'a mut [u32],
}

/// Columns that are filled for one row before the next row, so that they stay in the L1 cache.
const RUN: usize = 32;
/// The most rows of a panel.
const MAX_BLOCK: usize = 32;

impl Fill<'_> {
    /// Writes the words of a [`TILE`] of pair steps, row by row.
    #[inline(always)]
    fn tile(&self, tile: usize, rows: usize, words: &mut [u32]) {
        let Fill { panels, values, layout, first, .. } = *self;
        let (taps, runs) = (panels.taps, panels.depth / panels.taps);
        // The distance of the two elements of a pair.
        let step = taps * layout.depth_step;
        let (pairs, tap) = panels.pair_of(tile * TILE);
        let whole = (runs / 2).saturating_sub(pairs).min(TILE);
        let odd = 2 * (pairs + whole) + 1 == runs && whole < TILE;
        let from = layout.start + first * layout.row_step + (2 * pairs * taps + tap) * layout.depth_step;
        for (i, words) in words.chunks_exact_mut(TILE).take(rows).enumerate() {
            let row = from + i * layout.row_step;
            let (some, rest) = words.split_at_mut(whole);
            rest.fill(0);
            if odd {
                rest[0] = pair(values[row + 2 * whole * step], 0.0);
            }
            if whole > 0 && step == 1 {
                let pairs = values[row..][..2 * whole].as_chunks::<2>().0;
                narrow(pairs, some);
            } else if whole > 0 {
                let row = &values[row..][..(2 * whole - 1) * step + 1];
                for (k, word) in some.iter_mut().enumerate() {
                    *word = pair(row[2 * k * step], row[(2 * k + 1) * step]);
                }
            }
        }
    }

    /// Writes the words of a row for the pairs of runs from `first` on, in [`Order::Columns`].
    #[inline(always)]
    fn pairs(&self, row: &[f32], first: usize, words: &mut [u32]) {
        let (taps, step) = (self.panels.taps, self.layout.depth_step);
        let runs = self.panels.depth / taps;
        if taps == 1 && step == 1 {
            let (pairs, odd) = row[2 * first..runs.min(2 * (first + words.len()))].as_chunks::<2>();
            let (whole, last) = words.split_at_mut(pairs.len());
            narrow(pairs, whole);
            last.iter_mut().zip(odd).for_each(|(word, x)| *word = pair(*x, 0.0));
            return;
        }
        for (run, words) in (2 * first..).step_by(2).zip(words.chunks_exact_mut(taps)) {
            let (low, both) = (run * taps, run + 1 < runs);
            if step == 1 && both {
                let (low, high) = row[low..][..2 * taps].split_at(taps);
                interleave(low, high, words);
                continue;
            }
            for (at, word) in (low..).zip(words) {
                let high = if both { row[(at + taps) * step] } else { 0.0 };
                *word = pair(row[at * step], high);
            }
        }
    }
}

impl Vectorized for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        let panel = std::mem::take(&mut self.panel);
        let Fill { panels, values, layout, first, .. } = self;
        let Panels { block, words, taps, .. } = *panels;
        assert_ne!(words, Words::Bytes, "bytes are packed in blocks");
        let height = block.min(panels.rows - first);
        if height < block {
            panel.fill(0);
        }
        let start = layout.start + first * layout.row_step;
        if panels.order == Order::Tiles {
            for (tile, words) in panel.chunks_exact_mut(TILE * block).enumerate() {
                self.tile(tile, height, words);
            }
            return;
        }
        if layout.row_step == 1 {
            let runs = panels.depth / taps;
            // The one or two elements of a step.
            let elements = |step: usize| match words {
                Words::Bf16 => {
                    let (pair, tap) = panels.pair_of(step);
                    let low = 2 * pair * taps + tap;
                    ((2 * pair < runs).then_some(low), (2 * pair + 1 < runs).then_some(low + taps))
                }
                _ => (Some(step), None),
            };
            for (step, column) in panel.chunks_exact_mut(block).enumerate() {
                let (low, high) = elements(step);
                let run = |depth: usize| &values[start + depth * layout.depth_step..][..height];
                let column = &mut column[..height];
                match (words, low, high) {
                    (_, None, _) => column.fill(0),
                    (Words::Bf16, Some(low), Some(high)) => interleave(run(low), run(high), column),
                    (Words::Bf16, Some(low), None) => {
                        column.iter_mut().zip(run(low)).for_each(|(word, x)| *word = pair(*x, 0.0));
                    }
                    (_, Some(low), _) => {
                        column.iter_mut().zip(run(low)).for_each(|(w, x)| *w = x.to_bits());
                    }
                }
            }
            return;
        }
        if panels.order == Order::Sixteens {
            let mut rows = vec![0; TILE * block];
            let [from, to] = [(TILE * TILE, TILE), (TILE, block)].map(|(step, row)| Squares { step, row });
            for (tile, columns) in panel.chunks_exact_mut(TILE * block).enumerate() {
                self.tile(tile, height, &mut rows);
                transpose(block / TILE, (&rows, from), (columns, to));
            }
            return;
        }
        // Whole pairs of runs at a time, first row by row, then in squares.
        let run = RUN.next_multiple_of(taps);
        let squares = run.div_ceil(SQUARE);
        assert!(block <= MAX_BLOCK, "a panel with more rows");
        let mut rows = vec![0u32; MAX_BLOCK * squares * SQUARE];
        let mut turned = vec![0u32; squares * SQUARE * MAX_BLOCK];
        let [of_rows, of_columns] = [(SQUARE, squares * SQUARE), (SQUARE * MAX_BLOCK, MAX_BLOCK)]
            .map(|(step, row)| Squares { step, row });
        for (index, columns) in panel.chunks_mut(run * block).enumerate() {
            let count = columns.len() / block;
            for i in 0..height {
                let row = &values[start + i * layout.row_step..];
                let words_of_row = &mut rows[i * of_rows.row..][..count];
                match words {
                    Words::Bf16 => self.pairs(row, index * run / taps, words_of_row),
                    _ => {
                        let row = &row[index * run * layout.depth_step..];
                        if layout.depth_step == 1 {
                            words_of_row.copy_from_slice(as_words(&row[..count]));
                        } else {
                            let words = words_of_row.iter_mut().enumerate();
                            words.for_each(|(k, word)| *word = row[k * layout.depth_step].to_bits());
                        }
                    }
                }
            }
            for first in (0..height).step_by(SQUARE) {
                let source = &rows[first * of_rows.row..];
                transpose(count.div_ceil(SQUARE), (source, of_rows), (&mut turned[first..], of_columns));
            }
            // A column may be copied with words after its last row, which the next column overwrites.
            for (k, from) in turned.as_chunks::<MAX_BLOCK>().0[..count].iter().enumerate() {
                let to = &mut columns[k * block..];
                let copied = if block <= SQUARE { SQUARE } else { MAX_BLOCK };
                if to.len() < copied {
                    to[..block].copy_from_slice(&from[..block]);
                } else if copied == SQUARE {
                    to[..SQUARE].copy_from_slice(&from[..SQUARE]);
                } else {
                    to[..MAX_BLOCK].copy_from_slice(from);
                }
            }
        }
    }
}

/// Rounds two values to a word of bf16, the first in the lower half.
#[inline(always)]
pub(super) fn pair(low: f32, high: f32) -> u32 {
    u32::from(f32_to_bf16(low)) | u32::from(f32_to_bf16(high)) << 16
}

/// Rounds neighbouring elements to bf16 pairs.
#[inline(always)]
pub(super) fn narrow(elements: &[[f32; 2]], words: &mut [u32]) {
    if bf16::narrow(elements, words) {
        return;
    }
    words.iter_mut().zip(elements).for_each(|(word, [low, high])| *word = pair(*low, *high));
}

/// Rounds the elements of two rows to bf16 pairs.
#[inline(always)]
pub(super) fn interleave(low: &[f32], high: &[f32], words: &mut [u32]) {
    if bf16::interleave(low, high, words) {
        return;
    }
    words.iter_mut().zip(low.iter().zip(high)).for_each(|(word, (low, high))| *word = pair(*low, *high));
}

/// Packs matrices that the graph computes. The output has the words of one panel in each row. Input 0 is read with strides.
pub(crate) struct PackPanels {
    pub(crate) panels: Panels,
    /// The dimensions and strides of the stack.
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<isize>,
    /// Of one matrix.
    pub(crate) layout: Layout,
}

impl Kernel for PackPanels {
    fn grid(&self, _: usize) -> Grid {
        Grid::rows(self.panels.groups * self.panels.per_group(), self.panels.panel_len(), 1)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let per_group = self.panels.per_group();
        let (group, index) = (tile.rows.start / per_group, tile.rows.start % per_group);
        let offset = shape::offset(group, &self.dims, &self.strides);
        let layout = Layout { start: self.layout.start.wrapping_add_signed(offset), ..self.layout };
        self.panels.fill(inputs.f32(0), layout, index, tile.words());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_of_every_layout() {
        // The last one is packed in parts.
        for (rows, runs) in [(5, 3), (37, 35), (PART / 3, 3)] {
            panels_of(rows, runs);
        }
    }

    fn panels_of(rows: usize, runs: usize) {
        let (groups, taps) = (2, 2);
        let depth = runs * taps;
        let value = |g: usize, r: usize, d: usize| (1 + g * 100 + r * 10 + d) as f32;
        let plain: Vec<f32> = (0..groups * rows * depth)
            .map(|i| value(i / (rows * depth), i / depth % rows, i % depth))
            .collect();
        let turned: Vec<f32> = (0..groups * rows * depth)
            .map(|i| value(i / (rows * depth), i % rows, i / rows % depth))
            .collect();
        let orders = [Order::Columns, Order::Sixteens, Order::Tiles].map(|order| (Words::Bf16, order));
        for (words, order) in [(Words::F32, Order::Columns)].into_iter().chain(orders) {
            let block = if order == Order::Columns { 4 } else { 16 };
            let panels = Panels { groups, rows, depth, block, words, taps, order };
            for (values, transposed) in [(&plain, false), (&turned, true)] {
                let packed = panels.packed(values, transposed);
                for (i, word) in packed.iter().enumerate() {
                    let (panel, word_of_panel) = (i / panels.panel_len(), i % panels.panel_len());
                    let (step, row) = match order {
                        Order::Tiles => (word_of_panel / 256 * 16 + i % 16, word_of_panel / 16 % 16),
                        _ => (word_of_panel / block, i % block),
                    };
                    let row = row + panel % panels.per_group() * block;
                    let at = |d: usize| {
                        if row < rows && d < depth { value(panel / panels.per_group(), row, d) } else { 0.0 }
                    };
                    let expected = match words {
                        Words::F32 | Words::Bytes => at(step).to_bits(),
                        Words::Bf16 => {
                            let (pair, tap) = match order {
                                Order::Columns => (step / taps, step % taps),
                                _ => (step / (16 * taps) * 16 + step % 16, step / 16 % taps),
                            };
                            let low = pair * 2 * taps + tap;
                            let bits = |x| u32::from(half::bf16::from_f32(x).to_bits());
                            bits(at(low)) | bits(at(low + taps)) << 16
                        }
                    };
                    assert_eq!(*word, expected, "{words:?} {order:?} {transposed} word {i}");
                }
            }
        }
    }

    #[test]
    fn bf16_is_rounded_to_nearest_even() {
        for i in 0..200_000u32 {
            let x = f32::from_bits(i.wrapping_mul(2_654_435_761));
            let expected = half::bf16::from_f32(x).to_bits();
            assert_eq!(pair(x, 0.0) & 0xffff, u32::from(expected), "{x}");
        }
    }
}
