//! Quantizes values to blocks.

use super::{BLOCK, Blocks, GROUP, Plan, STEPS};
use crate::simd::Vectorized;
use half::f16;
use std::ops::Range;

/// Rows that are quantized together. Nothing is added or compared across them, so they fill vectors.
pub(super) const LANES: usize = 8;

/// The elements of these rows at one depth.
pub(super) type Column = [f32; LANES];

/// Rows of a matrix, as columns with an element of each row.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    /// The columns, `pitch` elements apart. The column `len` has zeros.
    pub(super) values: &'a [f32],
    pub(super) pitch: usize,
    pub(super) len: usize,
    /// The columns in the order of whole blocks. Those from `len` on are missing.
    pub(super) order: &'a [usize],
}

impl Columns<'_> {
    #[inline(always)]
    fn block(&self, order: &[usize; BLOCK]) -> [Column; BLOCK] {
        let mut columns = [[0.0; LANES]; BLOCK];
        for (column, d) in columns.iter_mut().zip(order) {
            let values = &self.values[self.pitch * *d.min(&self.len)..][..LANES];
            *column = lanes(|l| values[l]);
        }
        columns
    }
}

/// Quantizes rows of a panel.
pub(super) struct Quantize<'a> {
    pub(super) plan: Plan,
    /// The first of the rows.
    pub(super) row: usize,
    /// The first block, which begins a group.
    pub(super) block: usize,
    pub(super) columns: Columns<'a>,
    /// The bytes of the panel. Those of the rows are 0.
    pub(super) bytes: &'a mut [u8],
}

impl Vectorized for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Quantize { plan, row, block: first, columns, bytes } = self;
        let rows = row..plan.rows.min(row + LANES);
        let order = columns.order.as_chunks::<BLOCK>().0;
        match plan.blocks {
            Blocks::Q8_0 => {
                for (block, order) in (first..).zip(order) {
                    let columns = &columns.block(order);
                    let (scales, inverses) = eights(columns);
                    for (row, scale) in rows.clone().zip(scales) {
                        let at = plan.scales(block) + 2 * row;
                        bytes[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
                    }
                    let rounded = |x: f32, l: usize| x * inverses[l];
                    write(plan, block, rows.clone(), &whole(columns, rounded), bytes);
                }
            }
            Blocks::Q4K => {
                for (group, order) in (first / GROUP..).zip(order.chunks(GROUP)) {
                    let mut blocks = [[[0.0; LANES]; BLOCK]; GROUP];
                    for (block, order) in blocks.iter_mut().zip(order) {
                        *block = columns.block(order);
                    }
                    q4_k(plan, group, rows.clone(), &blocks[..order.len()], bytes);
                }
            }
        }
    }
}

/// What `of` makes of each lane. One loop for each result, because only such loops become vectors.
#[inline(always)]
fn lanes<T: Copy + Default>(of: impl Fn(usize) -> T) -> [T; LANES] {
    let mut all = [T::default(); LANES];
    #[expect(clippy::needless_range_loop, reason = "iterators are not inlined into code for wider registers")]
    for l in 0..LANES {
        all[l] = of(l);
    }
    all
}

/// The scales of blocks in 8 bits, and their inverses, as [`eight`] has them.
#[inline(always)]
fn eights(columns: &[Column; BLOCK]) -> (Column, Column) {
    let mut largest = [0.0; LANES];
    for column in columns {
        largest = lanes(|l| if column[l].abs() > largest[l] { column[l].abs() } else { largest[l] });
    }
    let finite = are_finite(columns);
    let scales = lanes(|l| if finite[l] { largest[l] / 127.0 } else { f32::NAN });
    (scales, lanes(|l| inverse_of(scales[l])))
}

/// [`is_finite`] for a block of each row.
#[inline(always)]
fn are_finite(columns: &[Column; BLOCK]) -> [bool; LANES] {
    let mut zeros = [0.0; LANES];
    for column in columns {
        zeros = lanes(|l| zeros[l] + column[l] * 0.0);
    }
    lanes(|l| zeros[l] == 0.0)
}

/// The nearest whole numbers, ties to even, of what `of` makes of each value and its lane, as bytes. It makes at most 255 of a value.
#[inline(always)]
fn whole(columns: &[Column; BLOCK], of: impl Fn(f32, usize) -> f32) -> [[u32; LANES]; BLOCK] {
    /// A sum with it is rounded to a whole number, which its lower bits hold.
    const ROUND: f32 = 1.5 * (1 << 23) as f32;
    let mut integers = [[0; LANES]; BLOCK];
    for (integers, column) in integers.iter_mut().zip(columns) {
        *integers = lanes(|l| (of(column[l], l) + ROUND).to_bits() & 0xff);
    }
    integers
}

/// Writes the integers of a block of each row, as [`Plan::put`] does.
#[inline(always)]
fn write(plan: Plan, block: usize, rows: Range<usize>, integers: &[[u32; LANES]; BLOCK], bytes: &mut [u8]) {
    let turn = u32::from_ne_bytes([plan.turn(); 4]);
    for (run, integers) in plan.runs_of(block).zip(integers.chunks_exact(STEPS * plan.elements)) {
        let bytes = &mut bytes[run * plan.run_bytes()..][..plan.run_bytes()];
        for (step, word) in integers.chunks_exact(plan.elements).enumerate() {
            if let [a, b, c, d] = word {
                let (at, shift) = plan.byte(step, rows.start, 0);
                for (l, out) in bytes[at..].as_chunks_mut::<4>().0.iter_mut().take(rows.len()).enumerate() {
                    let word = (a[l] | b[l] << 8 | c[l] << 16 | d[l] << 24) ^ turn;
                    *out = (u32::from_le_bytes(*out) | word << shift).to_le_bytes();
                }
                continue;
            }
            for (i, integers) in word.iter().enumerate() {
                let (at, shift) = plan.byte(step, rows.start, i);
                let out = &mut bytes[at..][..rows.len()];
                match out.as_chunks_mut::<LANES>().0.first_mut() {
                    Some(out) => {
                        let new: [u8; LANES] = lanes(|l| (integers[l] << shift) as u8);
                        *out = (u64::from_le_bytes(*out) | u64::from_le_bytes(new)).to_le_bytes();
                    }
                    None => out.iter_mut().zip(integers).for_each(|(out, q)| *out |= (q << shift) as u8),
                }
            }
        }
    }
}

#[inline(always)]
fn q4_k(plan: Plan, group: usize, rows: Range<usize>, columns: &[[Column; BLOCK]], bytes: &mut [u8]) {
    let (mut fits, mut finite) = ([Fits::default(); GROUP], [true; LANES]);
    for (fits, columns) in fits.iter_mut().zip(columns) {
        *fits = Fits::of(columns);
        let these = are_finite(columns);
        finite = lanes(|l| finite[l] && these[l]);
    }
    let mut factors = [[0.0; LANES]; 2];
    for (l, row) in rows.clone().enumerate() {
        for (i, factors) in factors.iter_mut().enumerate() {
            let most = fits.iter().map(|fits| if i == 0 { fits.scales[l] } else { fits.offsets[l] });
            let most = most.fold(0f32, f32::max) / 63.0;
            let factor = if finite[l] { f16::from_f32(most) } else { f16::NAN };
            let at = plan.factors(group) + 2 * (i * plan.rows + row);
            bytes[at..at + 2].copy_from_slice(&factor.to_le_bytes());
            factors[l] = factor.to_f32();
        }
    }
    let multiple = |value: f32, factor: f32| {
        let nearest = (value / factor).round_ties_even();
        // 63 for NaN.
        let multiple = if nearest < 63.0 { nearest } else { 63.0 };
        if factor == 0.0 { 0.0 } else { multiple }
    };
    for (i, (columns, fits)) in columns.iter().zip(&fits).enumerate() {
        let multiples = [
            lanes(|l| multiple(fits.scales[l], factors[0][l])),
            lanes(|l| multiple(fits.offsets[l], factors[1][l])),
        ];
        let scales = lanes(|l| multiples[0][l] * factors[0][l]);
        let offsets = lanes(|l| multiples[1][l] * factors[1][l]);
        let inverses = lanes(|l| if scales[l] > 0.0 { 1.0 / scales[l] } else { 0.0 });
        for (half, multiples) in multiples.iter().enumerate() {
            let at = plan.scales(group * GROUP + i) + half * plan.rows + rows.start;
            bytes[at..][..rows.len()].iter_mut().zip(multiples).for_each(|(out, x)| *out = *x as u8);
        }
        let rounded = |x: f32, l: usize| clamp((x + offsets[l]) * inverses[l]);
        write(plan, group * GROUP + i, rows.clone(), &whole(columns, rounded), bytes);
    }
}

/// The value, or the nearest that four bits have. 0 for NaN.
#[inline(always)]
fn clamp(x: f32) -> f32 {
    let x = if x > 0.0 { x } else { 0.0 };
    if x < 15.0 { x } else { 15.0 }
}

/// The best `scale · q - offset` for a block of each row, with q from 0 to 15. Of several candidates, it is the one with the least sum of
/// squared errors. Each error is weighted by the size of the value, because larger values matter more in a product.
#[derive(Clone, Copy, Default)]
struct Fits {
    scales: Column,
    offsets: Column,
}

impl Fits {
    #[inline(always)]
    fn of(columns: &[Column; BLOCK]) -> Self {
        /// Each candidate divides the range into `15 + shift` steps.
        const SHIFTS: [f32; 5] = [-1.0, -0.5, 0.0, 0.5, 1.0];
        let zeros = [0.0; LANES];
        let (mut least, mut most, mut squares) = (zeros, columns[0], zeros);
        for x in columns {
            least = lanes(|l| if x[l] < least[l] { x[l] } else { least[l] });
            most = lanes(|l| if x[l] > most[l] { x[l] } else { most[l] });
            squares = lanes(|l| squares[l] + x[l] * x[l]);
        }
        let sizes = lanes(|l| (squares[l] / BLOCK as f32).sqrt());
        let (mut weights, mut weighted) = ([zeros; BLOCK], [zeros; BLOCK]);
        // Σw, Σwx, Σwx².
        let (mut w, mut x, mut xx) = (zeros, zeros, zeros);
        for (i, column) in columns.iter().enumerate() {
            weights[i] = lanes(|l| sizes[l] + column[l].abs());
            weighted[i] = lanes(|l| weights[i][l] * column[l]);
            w = lanes(|l| w[l] + weights[i][l]);
            x = lanes(|l| x[l] + weighted[i][l]);
            xx = lanes(|l| xx[l] + weighted[i][l] * column[l]);
        }
        let mut error = [f32::INFINITY; LANES];
        let mut best = Fits { scales: lanes(|l| (most[l] - least[l]) / 15.0), offsets: lanes(|l| -least[l]) };
        for shift in SHIFTS {
            let inverses = lanes(|l| (15.0 + shift) / (most[l] - least[l]));
            // Σwq, Σwq², Σwxq.
            let (mut q, mut qq, mut xq) = (zeros, zeros, zeros);
            for (i, column) in columns.iter().enumerate() {
                let integers = lanes(|l| clamp(((column[l] - least[l]) * inverses[l]).round_ties_even()));
                let scaled = lanes(|l| weights[i][l] * integers[l]);
                q = lanes(|l| q[l] + scaled[l]);
                qq = lanes(|l| qq[l] + scaled[l] * integers[l]);
                xq = lanes(|l| xq[l] + weighted[i][l] * integers[l]);
            }
            let determinant = lanes(|l| w[l] * qq[l] - q[l] * q[l]);
            let scales = lanes(|l| (w[l] * xq[l] - x[l] * q[l]) / determinant[l]);
            let offsets = lanes(|l| (q[l] * xq[l] - qq[l] * x[l]) / determinant[l]);
            // Offsets cannot be negative.
            let s = lanes(|l| if offsets[l] < 0.0 { xq[l] / qq[l] } else { scales[l] });
            let b = lanes(|l| if offsets[l] < 0.0 { 0.0 } else { -offsets[l] });
            let squares = lanes(|l| {
                let mixed = s[l] * b[l] * q[l] - s[l] * xq[l] - b[l] * x[l];
                xx[l] + s[l] * s[l] * qq[l] + b[l] * b[l] * w[l] + 2.0 * mixed
            });
            // Both conditions are false for the NaN that a determinant of 0 yields.
            let better = lanes(|l| squares[l] < error[l] && s[l] > 0.0);
            error = lanes(|l| if better[l] { squares[l] } else { error[l] });
            best.scales = lanes(|l| if better[l] { s[l] } else { best.scales[l] });
            best.offsets = lanes(|l| if better[l] { -b[l] } else { best.offsets[l] });
        }
        let flat = lanes(|l| most[l] <= least[l]);
        Fits {
            scales: lanes(|l| if flat[l] { 0.0 } else { best.scales[l] }),
            offsets: lanes(|l| if flat[l] { -least[l] } else { best.offsets[l] }),
        }
    }
}

/// The inverse of a scale. If it overflows, the values are so small that they count as zeros, as they would in f16.
#[inline(always)]
fn inverse_of(scale: f32) -> f32 {
    if (1.0 / scale).is_finite() { 1.0 / scale } else { 0.0 }
}

/// The scale of a block in 8 bits, its integers, and their sum.
#[inline(always)]
pub(in crate::kernels) fn eight(values: &[f32; BLOCK]) -> (f32, [u8; BLOCK], f32) {
    let largest = reduce(each(values, f32::abs), |a, b| if b > a { b } else { a });
    let scale = if is_finite(values) { largest / 127.0 } else { f32::NAN };
    let inverse = inverse_of(scale);
    let integers = each(values, |x| (x * inverse).round_ties_even());
    (scale, bytes_of(&integers), reduce(integers, add))
}

#[inline(always)]
fn add(a: f32, b: f32) -> f32 {
    a + b
}

/// Reduces all values to one. It combines halves, so that registers of any width give the same result.
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

/// Whether all values are finite. A block cannot represent a single infinity or NaN, so all its values become NaN, which then shows
/// in the results.
#[inline(always)]
fn is_finite(values: &[f32; BLOCK]) -> bool {
    reduce(each(values, |x| x * 0.0), add) == 0.0
}

// Loops over indices, because methods of arrays and iterators are not inlined into code for wider registers.

/// The lowest byte of each whole number.
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
