//! Weights in blocks of 8 or 4 bits, arranged in panels.
//!
//! The numbers are those of ggml's `q8_0` and `q4_K`
//! (<https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>), blocks along the depth; their place is ours, so that a
//! run of a panel becomes the words that products multiply, a few instructions for 16 of them.

use super::{
    Panels,
    panels::{Order, interleave},
};
use crate::{
    ffi::{
        product::Words,
        simd::{Vectorized, mul_add, vectorize},
    },
    storage::f16_to_f32,
};
use half::f16;
use std::ops::Range;

/// How the elements of panels are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Blocks {
    /// 32 integers of 8 bits with a scale in f16.
    Q8_0,
    /// 32 integers of 4 bits with a scale and an offset of 6 bits each, multiples of two f16 that 8 such blocks share.
    Q4K,
}

/// Elements of a row that share a scale.
pub(super) const BLOCK: usize = 32;
/// Blocks that share what their scales are multiples of.
pub(super) const GROUP: usize = 8;
/// Steps of the depth that lie together: first the lower elements of all their words, then the upper ones.
const STEPS: usize = 8;
/// Rows of a panel, at most.
const MAX_ROWS: usize = 32;
/// Elements of the same half of words that lie together, at most.
const MAX_SPAN: usize = STEPS * MAX_ROWS;

/// Where things lie in the bytes of a panel: integers, scales of blocks, what these are multiples of.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    blocks: Blocks,
    /// Rows of the panel.
    rows: usize,
    /// Elements of a word.
    halves: usize,
    /// Runs of [`STEPS`] steps, of each of which all rows lie together.
    runs: usize,
}

impl Plan {
    pub(super) fn new(blocks: Blocks, panels: &Panels) -> Self {
        let halves = if panels.words == Words::Bf16 { 2 } else { 1 };
        assert_ne!(panels.order, Order::Tiles, "weights lie in columns");
        Plan { blocks, rows: panels.block, halves, runs: panels.steps().div_ceil(STEPS) }
    }
    /// Rows of the panel.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }
    /// Elements of one half of a run.
    fn span(&self) -> usize {
        STEPS * self.rows
    }
    /// Where a half of a run has the element of a step and a row.
    #[inline(always)]
    fn at(&self, step: usize, row: usize) -> usize {
        step * self.rows + row
    }
    /// Elements of a row, with those that fill up the last run.
    fn line(&self) -> usize {
        self.runs * STEPS * self.halves
    }
    /// Bytes of the integers of a run.
    pub(super) fn run_bytes(&self) -> usize {
        let elements = self.halves * self.span();
        if self.blocks == Blocks::Q4K { elements / 2 } else { elements }
    }
    fn runs_of_block(&self) -> usize {
        BLOCK / (STEPS * self.halves)
    }
    fn count(&self) -> usize {
        self.runs.div_ceil(self.runs_of_block())
    }
    /// Where the scales of a block begin: two bytes for each row.
    pub(super) fn scales(&self, block: usize) -> usize {
        self.runs * self.run_bytes() + block * 2 * self.rows
    }
    /// Where the factors of a group of blocks begin: four bytes for each row.
    pub(super) fn factors(&self, group: usize) -> usize {
        self.scales(self.count()) + group * 4 * self.rows
    }
    pub(super) fn bytes(&self) -> usize {
        match self.blocks {
            Blocks::Q8_0 => self.scales(self.count()),
            Blocks::Q4K => self.factors(self.count().div_ceil(GROUP)),
        }
    }
    /// Integer `i` of a row's block, in a panel of words of one element.
    pub(super) fn integer(&self, panel: &[u8], block: usize, row: usize, i: usize) -> u8 {
        let run = block * self.runs_of_block() + i / STEPS;
        let (start, place) = (run * self.run_bytes(), self.at(i % STEPS, row));
        match self.blocks {
            Blocks::Q8_0 => panel[start + place],
            Blocks::Q4K if place < self.run_bytes() => panel[start + place] & 15,
            Blocks::Q4K => panel[start + place - self.run_bytes()] >> 4,
        }
    }
    /// Calls `put` for each integer of a row's block: its run, its place in that run, and it.
    #[inline(always)]
    pub(super) fn place(
        &self,
        block: usize,
        row: usize,
        integers: &[u8; BLOCK],
        mut put: impl FnMut(usize, usize, u8),
    ) {
        let first = block * self.runs_of_block();
        let runs = first..(first + self.runs_of_block()).min(self.runs);
        for (run, integers) in runs.zip(integers.chunks_exact(STEPS * self.halves)) {
            for (step, word) in integers.chunks_exact(self.halves).enumerate() {
                for (half, integer) in word.iter().enumerate() {
                    put(run, half * self.span() + self.at(step, row), *integer);
                }
            }
        }
    }
}

impl Blocks {
    /// Bytes of one panel.
    pub(crate) fn panel_bytes(self, panels: &Panels) -> usize {
        Plan::new(self, panels).bytes()
    }

    /// Bytes of a stack of matrices.
    pub(crate) fn bytes(self, panels: &Panels) -> usize {
        panels.groups * panels.per_group() * self.panel_bytes(panels)
    }

    /// Steps of a panel, `bytes`, in words.
    pub(crate) fn expand(self, panels: &Panels, bytes: &[u8], steps: Range<usize>, words: &mut [u32]) {
        vectorize(Expand { plan: Plan::new(self, panels), bytes, steps, words });
    }

    /// Packs a stack of row-major matrices as [`Panels::pack`] does; `write` takes the bytes of a panel.
    pub(crate) fn pack(
        self,
        panels: &Panels,
        transposed: bool,
        read: impl Fn(usize, &mut [f32]),
        mut write: impl FnMut(usize, &[u8]),
    ) {
        let Panels { groups, rows, depth, block, words, taps, .. } = *panels;
        let plan = Plan::new(self, panels);
        // A little apart, so that elements of neighbouring rows do not fall on the same cache sets.
        let pitch = plan.line() + 16;
        let (mut lines, mut bytes) = (vec![0f32; block * pitch], vec![0; plan.bytes()]);
        let mut values = vec![0f32; if transposed { block } else { depth }];
        let place = |d: usize| match words {
            Words::F32 => d,
            // A pair is the same tap of two runs.
            Words::Bf16 => {
                let (run, tap) = (d / taps, d % taps);
                2 * panels.step_of(run / 2, tap) + run % 2
            }
        };
        let places: Vec<usize> = (0..depth).map(place).collect();
        for group in 0..groups {
            let start = group * rows * depth;
            for (index, first) in (0..rows).step_by(block).enumerate() {
                let height = block.min(rows - first);
                if transposed {
                    for (d, place) in places.iter().enumerate() {
                        let values = &mut values[..height];
                        read(start + d * rows + first, values);
                        let to = lines[*place..].iter_mut().step_by(pitch);
                        to.zip(&*values).for_each(|(to, value)| *to = *value);
                    }
                } else {
                    for (row, line) in lines.chunks_mut(pitch).take(height).enumerate() {
                        read(start + (first + row) * depth, &mut values);
                        values.iter().zip(&places).for_each(|(value, place)| line[*place] = *value);
                    }
                }
                bytes.fill(0);
                for (row, line) in lines.chunks(pitch).take(height).enumerate() {
                    vectorize(Quantize { plan, row, line: &line[..plan.line()], bytes: &mut bytes });
                }
                write((group * panels.per_group() + index) * bytes.len(), &bytes);
            }
        }
    }
}

#[inline(always)]
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

struct Expand<'a> {
    plan: Plan,
    bytes: &'a [u8],
    steps: Range<usize>,
    words: &'a mut [u32],
}

/// What integers of all rows are multiplied with, and what is taken from the products, repeated for each step of a run.
struct Scales {
    scale: [f32; MAX_SPAN],
    offset: [f32; MAX_SPAN],
}

impl Scales {
    #[inline(always)]
    fn read(&mut self, plan: &Plan, bytes: &[u8], block: usize) {
        let (rows, at) = (plan.rows, plan.scales(block));
        let Scales { scale, offset } = self;
        let (mut scales, mut offsets) = ([0.0; MAX_ROWS], [0.0; MAX_ROWS]);
        match plan.blocks {
            Blocks::Q8_0 => {
                for (row, scale) in scales[..rows].iter_mut().enumerate() {
                    *scale = f16_at(bytes, at + 2 * row);
                }
            }
            Blocks::Q4K => {
                let factors = plan.factors(block / GROUP);
                for row in 0..rows {
                    scales[row] = f16_at(bytes, factors + 2 * row) * f32::from(bytes[at + row]);
                    offsets[row] =
                        f16_at(bytes, factors + 2 * (rows + row)) * f32::from(bytes[at + rows + row]);
                }
            }
        }
        for step in 0..STEPS {
            let to = step * rows..(step + 1) * rows;
            scale[to.clone()].copy_from_slice(&scales[..rows]);
            offset[to].copy_from_slice(&offsets[..rows]);
        }
    }
}

impl Vectorized for Expand<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Expand { plan, bytes, steps, words } = self;
        let (rows, span) = (plan.rows, plan.span());
        let mut scales = Scales { scale: [0.0; MAX_SPAN], offset: [0.0; MAX_SPAN] };
        let (mut low, mut high) = ([0f32; MAX_SPAN], [0f32; MAX_SPAN]);
        let mut part = [0; MAX_SPAN];
        let mut block = None;
        for run in steps.start / STEPS..steps.end.div_ceil(STEPS) {
            let current = run / plan.runs_of_block();
            if block != Some(current) {
                block = Some(current);
                scales.read(&plan, bytes, current);
            }
            let first = run * STEPS;
            let (from, to) = (steps.start.max(first) - first, steps.end.min(first + STEPS) - first);
            let out = &mut words[(first + from - steps.start) * rows..][..(to - from) * rows];
            let whole = out.len() == span;
            let target = if whole { &mut *out } else { &mut part[..span] };
            let integers = &bytes[run * plan.run_bytes()..][..plan.run_bytes()];
            let (low, high) = (&mut low[..span], &mut high[..span]);
            match (plan.blocks, plan.halves) {
                (Blocks::Q8_0, 1) => scale_bytes(integers, &scales.scale, low),
                (Blocks::Q8_0, _) => {
                    scale_bytes(&integers[..span], &scales.scale, low);
                    scale_bytes(&integers[span..], &scales.scale, high);
                }
                (Blocks::Q4K, 1) => {
                    let (first, second) = low.split_at_mut(span / 2);
                    scale_nibbles::<FMA>(integers, &scales, first, second);
                }
                (Blocks::Q4K, _) => scale_nibbles::<FMA>(integers, &scales, low, high),
            }
            match plan.halves {
                1 => target.iter_mut().zip(&*low).for_each(|(word, x)| *word = x.to_bits()),
                _ => interleave(low, high, target),
            }
            if !whole {
                out.copy_from_slice(&part[from * rows..to * rows]);
            }
        }
    }
}

#[inline(always)]
fn scale_bytes(integers: &[u8], scale: &[f32; MAX_SPAN], out: &mut [f32]) {
    let count = out.len();
    let (integers, scale) = (&integers[..count], &scale[..count]);
    for i in 0..count {
        out[i] = f32::from(integers[i].cast_signed()) * scale[i];
    }
}

/// The scales repeat with the rows, so those of the first elements are also those of the others.
#[inline(always)]
fn scale_nibbles<const FMA: bool>(integers: &[u8], scales: &Scales, low: &mut [f32], high: &mut [f32]) {
    let count = low.len();
    let (integers, high) = (&integers[..count], &mut high[..count]);
    let (scale, offset) = (&scales.scale[..count], &scales.offset[..count]);
    for i in 0..count {
        low[i] = mul_add::<FMA>(f32::from(integers[i] & 15), scale[i], -offset[i]);
        high[i] = mul_add::<FMA>(f32::from(integers[i] >> 4), scale[i], -offset[i]);
    }
}

/// Writes a row of a panel.
struct Quantize<'a> {
    plan: Plan,
    row: usize,
    line: &'a [f32],
    /// Of the panel; the row's own are 0.
    bytes: &'a mut [u8],
}

impl Vectorized for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Quantize { plan, row, line, bytes } = self;
        match plan.blocks {
            Blocks::Q8_0 => q8_0(plan, row, line, bytes),
            Blocks::Q4K => q4_k(plan, row, line, bytes),
        }
    }
}

#[inline(always)]
fn q8_0(plan: Plan, row: usize, line: &[f32], bytes: &mut [u8]) {
    for (block, values) in line.chunks(BLOCK).enumerate() {
        let values = padded(values);
        let largest = reduce(each(&values, f32::abs), |a, b| if b > a { b } else { a });
        let scale = if is_finite(&values) { largest / 127.0 } else { f32::NAN };
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let at = plan.scales(block) + 2 * row;
        bytes[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        let integers = bytes_of(&each(&values, |x| (x * inverse).round_ties_even()));
        plan.place(block, row, &integers, |run, place, q| bytes[run * plan.run_bytes() + place] = q);
    }
}

#[inline(always)]
fn q4_k(plan: Plan, row: usize, line: &[f32], bytes: &mut [u8]) {
    for (group, values) in line.chunks(GROUP * BLOCK).enumerate() {
        let (mut fits, mut finite) = ([Fit::default(); GROUP], true);
        for (fit, values) in fits.iter_mut().zip(values.chunks(BLOCK)) {
            let values = padded(values);
            *fit = Fit::of(&values);
            finite &= is_finite(&values);
        }
        let most = |of: fn(&Fit) -> f32| fits.iter().map(of).fold(0f32, f32::max) / 63.0;
        let factors = match finite {
            true => [most(|fit| fit.scale), most(|fit| fit.offset)].map(f16::from_f32),
            false => [f16::NAN; 2],
        };
        let at = plan.factors(group) + 2 * row;
        for (factor, at) in factors.iter().zip([at, at + 2 * plan.rows]) {
            bytes[at..at + 2].copy_from_slice(&factor.to_le_bytes());
        }
        let whole = |value: f32, factor: f16| match factor.to_f32() {
            0.0 => 0.0,
            factor => (value / factor).round_ties_even().min(63.0),
        };
        for (i, (values, fit)) in values.chunks(BLOCK).zip(fits).enumerate() {
            let (scale, offset) = (whole(fit.scale, factors[0]), whole(fit.offset, factors[1]));
            let at = plan.scales(group * GROUP + i) + row;
            (bytes[at], bytes[at + plan.rows]) = (scale as u8, offset as u8);
            let (scale, offset) = (scale * factors[0].to_f32(), offset * factors[1].to_f32());
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let rounded = |x: f32| ((x + offset) * inverse).round_ties_even().clamp(0.0, 15.0);
            let integers = bytes_of(&each(&padded(values), rounded));
            let half = plan.run_bytes();
            plan.place(group * GROUP + i, row, &integers, |run, place, q| {
                let (at, q) = if place < half { (place, q) } else { (place - half, q << 4) };
                bytes[run * half + at] |= q;
            });
        }
    }
}

/// The best `scale · q - offset` for a block, q from 0 to 15: of some that are tried, the one with the least sum of squared
/// errors, each weighted with the value's size, by which it counts in a product.
#[derive(Clone, Copy, Default)]
struct Fit {
    scale: f32,
    offset: f32,
}

impl Fit {
    #[inline(always)]
    fn of(block: &[f32; BLOCK]) -> Self {
        /// Ranges that are tried: of `15 + shift` steps each.
        const SHIFTS: [f32; 5] = [-1.0, -0.5, 0.0, 0.5, 1.0];
        let least = reduce(*block, |a, b| if b < a { b } else { a }).min(0.0);
        let most = reduce(*block, |a, b| if b > a { b } else { a });
        if most <= least {
            return Fit { scale: 0.0, offset: -least };
        }
        let size = (dot(block, block) / BLOCK as f32).sqrt();
        let weights = each(block, |x| size + x.abs());
        let weighted = products(&weights, block);
        // Σw, Σwx, Σwx².
        let (w, x, xx) = (reduce(weights, add), reduce(weighted, add), dot(&weighted, block));
        let mut best = (f32::INFINITY, Fit { scale: (most - least) / 15.0, offset: -least });
        for shift in SHIFTS {
            let inverse = (15.0 + shift) / (most - least);
            let integers = each(block, |x| ((x - least) * inverse).round_ties_even().clamp(0.0, 15.0));
            let scaled = products(&weights, &integers);
            // Σwq, Σwq², Σwxq.
            let (q, qq, xq) = (reduce(scaled, add), dot(&scaled, &integers), dot(&weighted, &integers));
            let determinant = w * qq - q * q;
            let mut fit = ((w * xq - x * q) / determinant, (q * xq - qq * x) / determinant);
            if fit.1 < 0.0 {
                // Offsets are not negative.
                fit = (xq / qq, 0.0);
            }
            let (s, b) = (fit.0, -fit.1);
            let error = xx + s * s * qq + b * b * w + 2.0 * (s * b * q - s * xq - b * x);
            // Neither holds for a NaN, of a determinant that is 0.
            if error < best.0 && s > 0.0 {
                best = (error, Fit { scale: s, offset: fit.1 });
            }
        }
        best.1
    }
}

#[inline(always)]
fn add(a: f32, b: f32) -> f32 {
    a + b
}

/// All values in one, the halves first, so that registers of any width do the same.
#[inline(always)]
fn reduce(mut values: [f32; BLOCK], with: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = BLOCK / 2;
    while half > 0 {
        for i in 0..half {
            values[i] = with(values[i], values[i + half]);
        }
        half /= 2;
    }
    values[0]
}

#[inline(always)]
fn dot(a: &[f32; BLOCK], b: &[f32; BLOCK]) -> f32 {
    reduce(products(a, b), add)
}

/// Blocks cannot say that one of their values is infinite or a NaN: all of such a block become NaNs, which show in what is
/// computed with them.
#[inline(always)]
fn is_finite(values: &[f32; BLOCK]) -> bool {
    reduce(each(values, |x| x * 0.0), add) == 0.0
}

/// A block of the last values, filled up with zeros.
#[inline(always)]
fn padded(values: &[f32]) -> [f32; BLOCK] {
    let mut block = [0.0; BLOCK];
    block[..values.len()].copy_from_slice(values);
    block
}

// Loops over numbers: what arrays and iterators offer is not inlined into code for wider registers.

#[inline(always)]
fn products(a: &[f32; BLOCK], b: &[f32; BLOCK]) -> [f32; BLOCK] {
    let mut products = [0.0; BLOCK];
    for i in 0..BLOCK {
        products[i] = a[i] * b[i];
    }
    products
}

/// The lowest bytes of whole numbers.
#[inline(always)]
fn bytes_of(values: &[f32; BLOCK]) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    for i in 0..BLOCK {
        bytes[i] = values[i] as i32 as u8;
    }
    bytes
}

#[inline(always)]
fn each(values: &[f32; BLOCK], f: impl Fn(f32) -> f32) -> [f32; BLOCK] {
    let mut out = [0.0; BLOCK];
    for i in 0..BLOCK {
        out[i] = f(values[i]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element of a stack, read back from panels in steps of all sizes.
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
            let mut all = Vec::new();
            let mut start = 0;
            while start < panels.steps() {
                let end = (start + 1 + start % 13).min(panels.steps());
                let mut run = vec![7; (end - start) * block];
                blocks.expand(panels, bytes, start..end, &mut run);
                all.extend(run);
                start = end;
            }
            let (group, first) = (index / panels.per_group(), index % panels.per_group() * block);
            for (i, word) in all.iter().enumerate() {
                let (step, row) = (i / block, first + i % block);
                let mut put = |d: usize, x: f32| {
                    if row < rows && d < depth {
                        let at = if transposed { d * rows + row } else { row * depth + d };
                        out[group * rows * depth + at] = x;
                    } else {
                        // What goes on behind a row meets zeros.
                        assert!(row < rows || x == 0.0, "a row that is not there is 0");
                    }
                };
                match words {
                    Words::F32 => put(step, f32::from_bits(*word)),
                    Words::Bf16 => {
                        let (pair, tap) = panels.pair_of(step);
                        put(2 * pair * taps + tap, f32::from_bits(word << 16));
                        put((2 * pair + 1) * taps + tap, f32::from_bits(word & 0xffff_0000));
                    }
                }
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
            ] {
                let panels = Panels { groups, rows, depth, block, words, taps, order };
                for transposed in [false, true] {
                    // The largest error in a block is half a step of its range, and what halves and 6 bits round away.
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
    fn what_blocks_can_say_is_kept() {
        // Multiples of a power of two, up to 127 of them in q8_0, 15 above an offset in q4_K.
        let integers = |i: usize, most: usize| if i.is_multiple_of(32) { most } else { i * 7 % most };
        let eights: Vec<f32> = (0..8 * 64).map(|i| integers(i, 127) as f32 / 64.0).collect();
        let panels = Panels::columns([1, 8, 64], 8);
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
