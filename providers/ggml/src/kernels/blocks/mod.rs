//! Weights in blocks of 8-bit or 4-bit integers, arranged in panels.
//!
//! The numbers are those of ggml's `q8_0` and `q4_K` (<https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>), with blocks
//! along the depth. Their order is our own, so that a few instructions expand 16 of them to the words that products multiply.

mod expand;
mod quantize;

use super::{
    Panels,
    panels::{Layout, Order},
    quads::TURN,
};
use crate::simd::{Words, as_words_mut, vectorize};
use expand::{Expand, ReadScales};
pub(super) use quantize::eight;
use quantize::{Columns, LANES, Quantize};
use std::ops::Range;

/// A block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Blocks {
    /// 32 8-bit integers with an f16 scale.
    Q8_0,
    /// 32 4-bit integers with a 6-bit scale and a 6-bit offset. These are multiples of two f16 factors that 8 blocks share.
    Q4K,
}

/// Elements of a block: they share a scale.
pub(super) const BLOCK: usize = 32;
/// Blocks that share their factors.
pub(super) const GROUP: usize = 8;
/// Steps of the depth in a run. A run holds the lower elements of all its words, then the upper ones; or whole words of bytes.
const STEPS: usize = 8;
/// The most rows of a panel.
const MAX_ROWS: usize = 32;
/// Panels of a transposed matrix that are packed together.
const TOGETHER: usize = 4;
/// The most elements in one half of a run.
const MAX_SPAN: usize = STEPS * MAX_ROWS;

/// The layout of a panel's bytes: integers, then scales of blocks, then factors of groups.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    blocks: Blocks,
    /// Rows of the panel.
    rows: usize,
    /// Elements in a word.
    elements: usize,
    /// Runs of [`STEPS`] steps. The rows of a step lie together.
    runs: usize,
}

impl Plan {
    pub(super) fn new(blocks: Blocks, panels: &Panels) -> Self {
        let elements = panels.words.elements();
        assert_ne!(panels.order, Order::Tiles, "weights lie in columns");
        Plan { blocks, rows: panels.block, elements, runs: panels.steps().div_ceil(STEPS) }
    }
    /// Rows of the panel.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }
    /// Elements in one half of a run.
    fn span(&self) -> usize {
        STEPS * self.rows
    }
    /// The index in a half of a run of the element at a step and row.
    #[inline(always)]
    fn at(&self, step: usize, row: usize) -> usize {
        step * self.rows + row
    }
    /// Elements of a row, padded to whole runs.
    fn line(&self) -> usize {
        self.runs * STEPS * self.elements
    }
    /// Bytes of a run's integers.
    pub(super) fn run_bytes(&self) -> usize {
        let elements = self.elements * self.span();
        if self.blocks == Blocks::Q4K { elements / 2 } else { elements }
    }
    fn runs_of_block(&self) -> usize {
        BLOCK / (STEPS * self.elements)
    }
    fn count(&self) -> usize {
        self.runs.div_ceil(self.runs_of_block())
    }
    /// The offset of a block's scales, two bytes for each row.
    pub(super) fn scales(&self, block: usize) -> usize {
        self.runs * self.run_bytes() + block * 2 * self.rows
    }
    /// The offset of a group's factors, four bytes for each row.
    pub(super) fn factors(&self, group: usize) -> usize {
        self.scales(self.count()) + group * 4 * self.rows
    }
    pub(super) fn bytes(&self) -> usize {
        match self.blocks {
            Blocks::Q8_0 => self.scales(self.count()),
            Blocks::Q4K => self.factors(self.count().div_ceil(GROUP)),
        }
    }
    /// The runs that hold a block.
    fn runs_of(&self, block: usize) -> Range<usize> {
        let first = block * self.runs_of_block();
        first..(first + self.runs_of_block()).min(self.runs)
    }
    /// The byte in a run that holds an element of the word at a step and row, and the lowest bit of the element in it.
    #[inline(always)]
    fn byte(&self, step: usize, row: usize, element: usize) -> (usize, u32) {
        let at = self.at(step, row);
        let place = if self.elements == 4 { 4 * at + element } else { element * self.span() + at };
        match self.blocks {
            Blocks::Q4K if place >= self.run_bytes() => (place - self.run_bytes(), 4),
            Blocks::Q8_0 | Blocks::Q4K => (place, 0),
        }
    }
    /// The bits in which a stored integer differs from the block's.
    fn turn(&self) -> u8 {
        if self.blocks == Blocks::Q8_0 && self.elements == 4 { TURN } else { 0 }
    }
    /// Integer `i` of a row's block. The words of the panel must have one element.
    pub(super) fn integer(&self, panel: &[u8], block: usize, row: usize, i: usize) -> u8 {
        let (byte, shift) = self.byte(i % STEPS, row, 0);
        let run = block * self.runs_of_block() + i / STEPS;
        panel[run * self.run_bytes() + byte] >> shift & self.blocks.largest()
    }
    /// Writes the integers of a row's block to a panel where they are 0.
    pub(super) fn put(&self, block: usize, row: usize, integers: &[u8; BLOCK], panel: &mut [u8]) {
        for (run, integers) in self.runs_of(block).zip(integers.chunks_exact(STEPS * self.elements)) {
            let bytes = &mut panel[run * self.run_bytes()..][..self.run_bytes()];
            for (i, integer) in integers.iter().enumerate() {
                let (byte, shift) = self.byte(i / self.elements, row, i % self.elements);
                bytes[byte] |= (integer ^ self.turn()) << shift;
            }
        }
    }
}

impl Blocks {
    /// Bytes of one panel.
    pub(crate) fn panel_bytes(self, panels: &Panels) -> usize {
        Plan::new(self, panels).bytes()
    }

    /// Where the integers of some steps of a panel are among the bytes of all panels.
    pub(crate) fn integers(self, panels: &Panels, panel: usize, steps: Range<usize>) -> Range<usize> {
        let plan = Plan::new(self, panels);
        let at = |run: usize| panel * plan.bytes() + run * plan.run_bytes();
        at(steps.start / STEPS)..at(steps.end.div_ceil(STEPS))
    }

    /// Bytes of a stack of matrices.
    pub(crate) fn bytes(self, panels: &Panels) -> usize {
        panels.groups * panels.per_group() * self.panel_bytes(panels)
    }

    /// The largest of the integers that products multiply.
    pub(crate) fn largest(self) -> u8 {
        match self {
            Blocks::Q8_0 => 255,
            Blocks::Q4K => 15,
        }
    }

    /// Whether products multiply the integers as they are stored.
    pub(crate) fn are_words(self, panels: &Panels) -> bool {
        self == Blocks::Q8_0 && panels.words == Words::Bytes
    }

    /// The bytes of one panel, among those of all.
    pub(crate) fn panel<'a>(self, panels: &Panels, all: &'a [u8], panel: usize) -> &'a [u8] {
        let len = self.panel_bytes(panels);
        &all[panel * len..][..len]
    }

    /// The scales and offsets of some steps of the panel in `bytes`, as [`Scales::cols`](crate::simd::product::Scales) has them.
    pub(crate) fn scales(self, panels: &Panels, bytes: &[u8], steps: Range<usize>, out: &mut [f32]) {
        vectorize(ReadScales { plan: Plan::new(self, panels), bytes, steps, out });
    }

    /// Expands some steps of the panel in `bytes` to words.
    pub(crate) fn expand(self, panels: &Panels, bytes: &[u8], steps: Range<usize>, words: &mut [u32]) {
        vectorize(Expand { plan: Plan::new(self, panels), bytes, steps, words });
    }

    /// Packs a stack of row-major matrices, as [`Panels::pack`] does. `write` receives the offset and bytes of each panel.
    pub(crate) fn pack(
        self,
        panels: &Panels,
        transposed: bool,
        read: impl Fn(usize, &mut [f32]),
        mut write: impl FnMut(usize, &[u8]),
    ) {
        let Panels { groups, rows, depth, block, words, taps, .. } = *panels;
        let plan = Plan::new(self, panels);
        // A part of the depth has whole pairs of runs and whole groups of blocks.
        let part = (GROUP * BLOCK * taps).min(plan.line().next_multiple_of(BLOCK));
        let mut order = vec![usize::MAX; part];
        for d in 0..part.min(depth) {
            let place = match words {
                Words::F32 | Words::Bytes => d,
                // A pair holds the same tap of two runs of taps.
                Words::Bf16 => {
                    let (run, tap) = (d / taps, d % taps);
                    2 * panels.step_of(run / 2, tap) + run % 2
                }
            };
            order[place] = d;
        }
        // Panels that share the cache lines of a transposed matrix are packed together.
        let width = if transposed { TOGETHER * block } else { block };
        let mut values = vec![0f32; if transposed { 0 } else { block * part }];
        let mut tile = vec![0f32; (part + 1) * width + LANES];
        let mut bytes = vec![0; width / block * plan.bytes()];
        let strips = (0..groups).flat_map(|group| (0..rows).step_by(width).map(move |top| (group, top)));
        for (group, top) in strips {
            let (start, height) = (group * rows * depth, width.min(rows - top));
            bytes.fill(0);
            for first in (0..plan.line()).step_by(part) {
                let len = part.min(depth.saturating_sub(first));
                if transposed {
                    for (d, column) in (first..first + len).zip(tile.chunks_exact_mut(width)) {
                        read(start + d * rows + top, &mut column[..height]);
                        column[height..].fill(0.0);
                    }
                } else {
                    let values = &mut values[..height * len];
                    for (row, values) in (top..).zip(values.chunks_exact_mut(len.max(1))) {
                        read(start + row * depth + first, values);
                    }
                    let layout = Layout { start: 0, row_step: len, depth_step: 1 };
                    let tile = as_words_mut(&mut tile[..len * width]);
                    Panels::columns([1, height, len], width).fill(values, layout, 0, tile);
                }
                tile[len * width..][..width].fill(0.0);
                let order = &order[..part.min((plan.line() - first).next_multiple_of(BLOCK))];
                for (left, bytes) in (0..height).step_by(block).zip(bytes.chunks_exact_mut(plan.bytes())) {
                    for row in (0..block).step_by(LANES) {
                        let columns = Columns { values: &tile[left + row..], pitch: width, len, order };
                        vectorize(Quantize { plan, row, block: first / BLOCK, columns, bytes });
                    }
                }
            }
            let panel = group * panels.per_group() + top / block;
            let packed = bytes.chunks_exact(plan.bytes()).take(height.div_ceil(block));
            (panel..).zip(packed).for_each(|(panel, bytes)| write(panel * bytes.len(), bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Blocks {
        /// The numbers that the bytes of a panel stand for: those of each row of each step.
        pub(in crate::kernels) fn numbers(self, panels: &Panels, bytes: &[u8]) -> Vec<[f32; 4]> {
            let (steps, block) = (panels.steps(), panels.block);
            let mut words = vec![7; steps * block];
            if self.are_words(panels) {
                for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(*bytes);
                }
            } else {
                self.expand(panels, bytes, 0..steps, &mut words);
            }
            let mut scales = vec![0.0; 2 * block * steps / STEPS];
            self.scales(panels, bytes, 0..steps, &mut scales);
            let number = |(i, word): (usize, &u32)| {
                let (step, row) = (i / block, i % block);
                let scales = &scales[step / STEPS * 2 * block..];
                let [scale, offset] = [scales[row], scales[block + row]].map(f64::from);
                word.to_le_bytes().map(|q| (scale * f64::from(q) - offset) as f32)
            };
            words.iter().enumerate().map(number).collect()
        }
    }

    /// Packs a stack and expands it again, in ranges of steps of all sizes.
    fn restored(blocks: Blocks, panels: &Panels, values: &[f32], transposed: bool) -> Vec<f32> {
        let Panels { rows, depth, block, words, taps, .. } = *panels;
        let mut bytes = vec![0; blocks.bytes(panels)];
        blocks.pack(
            panels,
            transposed,
            |start, to| to.copy_from_slice(&values[start..][..to.len()]),
            |start, panel| bytes[start..][..panel.len()].copy_from_slice(panel),
        );
        let mut out = vec![f32::NAN; values.len()];
        for (index, bytes) in bytes.chunks(blocks.panel_bytes(panels)).enumerate() {
            let (group, first) = (index / panels.per_group(), index % panels.per_group() * block);
            let mut put = |row: usize, d: usize, x: f32| {
                let row = first + row;
                if row < rows && d < depth {
                    let at = if transposed { d * rows + row } else { row * depth + d };
                    out[group * rows * depth + at] = x;
                } else {
                    // Padding must expand to zeros.
                    assert!(row < rows || x == 0.0, "a missing row is 0");
                }
            };
            if words == Words::Bytes {
                for (i, numbers) in blocks.numbers(panels, bytes).iter().enumerate() {
                    (i / block * 4..).zip(numbers).for_each(|(d, x)| put(i % block, d, *x));
                }
                continue;
            }
            let mut all = Vec::new();
            let mut start = 0;
            while start < panels.steps() {
                let end = (start + 1 + start % 13).min(panels.steps());
                let mut run = vec![7; (end - start) * block];
                blocks.expand(panels, bytes, start..end, &mut run);
                all.extend(run);
                start = end;
            }
            for (i, word) in all.iter().enumerate() {
                let (step, row) = (i / block, i % block);
                if words == Words::F32 {
                    put(row, step, f32::from_bits(*word));
                    continue;
                }
                let (pair, tap) = panels.pair_of(step);
                put(row, 2 * pair * taps + tap, f32::from_bits(word << 16));
                put(row, (2 * pair + 1) * taps + tap, f32::from_bits(word & 0xffff_0000));
            }
        }
        out
    }

    #[test]
    fn blocks_keep_what_their_bits_can() {
        for (rows, runs, taps) in [(5, 40, 1), (33, 301, 1), (14, 31, 9)] {
            let (groups, depth) = (2, runs * taps);
            let values: Vec<f32> = (0..groups * rows * depth)
                .map(|i: usize| {
                    ((i * i % 8191) as f32 / 4096.0 - 1.0) * if i.is_multiple_of(97) { 3.0 } else { 1.0 }
                })
                .collect();
            for (words, block, order) in [
                (Words::F32, 14, Order::Columns),
                (Words::F32, 32, Order::Columns),
                (Words::Bf16, 14, Order::Columns),
                (Words::Bf16, 32, Order::Columns),
                (Words::Bf16, 32, Order::Sixteens),
                (Words::Bytes, 16, Order::Columns),
                (Words::Bytes, 32, Order::Columns),
            ] {
                if words == Words::Bytes && taps > 1 {
                    continue;
                }
                let panels = Panels { groups, rows, depth, block, words, taps, order };
                for transposed in [false, true] {
                    // The largest error is half a step of the block's range, plus the rounding of f16 and 6-bit scales.
                    for (blocks, limit, typical) in
                        [(Blocks::Q8_0, 3.1 / 127.0, 6e-3), (Blocks::Q4K, 0.35, 0.08)]
                    {
                        let out = restored(blocks, &panels, &values, transposed);
                        let errors = || values.iter().zip(&out).map(|(a, b)| f64::from(a - b));
                        let worst = errors().fold(0f64, |worst, e| worst.max(e.abs()));
                        let squares =
                            |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
                        let size = squares(&mut values.iter().map(|x| f64::from(*x)));
                        let rms = squares(&mut errors()) / size;
                        let what = format!("{blocks:?} {panels:?} {transposed}: {worst} {rms}");
                        assert!(worst <= limit && rms <= typical, "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn any_values_become_eight_bits() {
        for (largest, exact) in [(0.0, true), (1e-44, false), (1e-38, false), (1e-30, true), (3e38, true)] {
            let mut values = [0.0; BLOCK];
            (values[3], values[5]) = (largest, -largest / 2.0);
            let (scale, integers, sum) = eight(&values);
            let number = |i: usize| scale * f32::from(integers[i].cast_signed());
            assert_eq!(sum, integers.iter().map(|q| f32::from(q.cast_signed())).sum::<f32>());
            assert!((number(3) - largest).abs() <= if exact { 1e-6 * largest } else { largest }, "{largest}");
            assert!((number(5) + largest / 2.0).abs() <= largest, "{largest}");
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                values[9] = wrong;
                assert!(eight(&values).0.is_nan(), "{largest} {wrong}");
            }
        }
    }

    #[test]
    fn panels_have_the_numbers_of_single_blocks() {
        let value = |i: usize| ((i * 7919 % 10007) as f32 - 5000.0) * [1e-3, 1.0, 1e-41, 1e2][i / 40 % 4];
        for (rows, depth, block) in [(6, 64, 6), (21, 40, 14), (40, 96, 32), (16, 33, 16)] {
            let values: Vec<f32> = (0..rows * depth).map(value).collect();
            let turned: Vec<f32> = (0..rows * depth).map(|i| values[i % rows * depth + i / rows]).collect();
            let mut expected = vec![0.0; rows * depth];
            for (values, out) in values.chunks(depth).zip(expected.chunks_mut(depth)) {
                for (values, out) in values.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
                    let mut padded = [0.0; BLOCK];
                    padded[..values.len()].copy_from_slice(values);
                    let (scale, integers, _) = eight(&padded);
                    let scale = half::f16::from_f32(scale).to_f32();
                    out.iter_mut().zip(integers).for_each(|(x, q)| *x = scale * f32::from(q.cast_signed()));
                }
            }
            let panels = Panels::columns([1, rows, depth], block);
            assert_eq!(restored(Blocks::Q8_0, &panels, &values, false), expected, "{panels:?}");
            let transposed = restored(Blocks::Q8_0, &panels, &turned, true);
            assert!((0..rows * depth).all(|i| transposed[i] == expected[i % rows * depth + i / rows]));
        }
    }

    #[test]
    fn what_blocks_can_say_is_kept() {
        // Multiples of a power of two, up to 127 of them in q8_0, 15 above an offset in q4_K.
        let integers = |i: usize, most: usize| if i.is_multiple_of(32) { most } else { i * 7 % most };
        let eights: Vec<f32> = (0..8 * 64).map(|i| integers(i, 127) as f32 / 64.0).collect();
        let panels = Panels::columns([1, 8, 64], 8);
        let bytes = Panels { words: Words::Bytes, ..panels };
        assert_eq!(restored(Blocks::Q8_0, &bytes, &eights, false), eights);
        assert_eq!(restored(Blocks::Q8_0, &panels, &eights, false), eights);
        let fours: Vec<f32> =
            (0..8 * 64).map(|i| if i % 32 == 1 { 0.0 } else { integers(i, 15) as f32 * 0.25 }).collect();
        let out = restored(Blocks::Q4K, &panels, &fours, false);
        let worst = fours.iter().zip(&out).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(worst <= 15.0 * 0.25 / 2048.0, "{worst}");
        assert_eq!(restored(Blocks::Q4K, &panels, &[0.0; 8 * 64], false), [0.0; 8 * 64]);
        for (blocks, share) in [(Blocks::Q8_0, 32), (Blocks::Q4K, 64)] {
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = eights.clone();
                values[3 * 64 + 5] = wrong;
                let nans = restored(blocks, &panels, &values, false).iter().filter(|x| x.is_nan()).count();
                assert_eq!(nans, share, "{blocks:?} {wrong}");
            }
        }
    }
}
