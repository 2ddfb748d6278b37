//! Quantizes values to blocks.

use super::{BLOCK, Blocks, GROUP, Plan};
use crate::simd::Vectorized;
use half::f16;

/// Quantizes one row of a panel.
pub(super) struct Quantize<'a> {
    pub(super) plan: Plan,
    pub(super) row: usize,
    pub(super) line: &'a [f32],
    /// The bytes of the panel. Those of the row are 0.
    pub(super) bytes: &'a mut [u8],
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

/// The scale of a block in 8 bits, its integers, and their sum.
#[inline(always)]
pub(in crate::kernels) fn eight(values: &[f32; BLOCK]) -> (f32, [u8; BLOCK], f32) {
    let largest = reduce(each(values, f32::abs), |a, b| if b > a { b } else { a });
    let scale = if is_finite(values) { largest / 127.0 } else { f32::NAN };
    // If the inverse overflows, the values are so small that they count as zeros, as they would in f16.
    let inverse = if (1.0 / scale).is_finite() { 1.0 / scale } else { 0.0 };
    let integers = each(values, |x| (x * inverse).round_ties_even());
    (scale, bytes_of(&integers), reduce(integers, add))
}

#[inline(always)]
fn q8_0(plan: Plan, row: usize, line: &[f32], bytes: &mut [u8]) {
    for (block, values) in line.chunks(BLOCK).enumerate() {
        let (scale, integers, _) = eight(&padded(values));
        let at = plan.scales(block) + 2 * row;
        bytes[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
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

/// The best `scale · q - offset` for a block, with q from 0 to 15. Of several candidates, it is the one with the least sum of squared
/// errors. Each error is weighted by the size of the value, because larger values matter more in a product.
#[derive(Clone, Copy, Default)]
struct Fit {
    scale: f32,
    offset: f32,
}

impl Fit {
    #[inline(always)]
    fn of(block: &[f32; BLOCK]) -> Self {
        /// Each candidate divides the range into `15 + shift` steps.
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
                // Offsets cannot be negative.
                fit = (xq / qq, 0.0);
            }
            let (s, b) = (fit.0, -fit.1);
            let error = xx + s * s * qq + b * b * w + 2.0 * (s * b * q - s * xq - b * x);
            // Both conditions are false for the NaN that a determinant of 0 yields.
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

#[inline(always)]
fn dot(a: &[f32; BLOCK], b: &[f32; BLOCK]) -> f32 {
    reduce(products(a, b), add)
}

/// Whether all values are finite. A block cannot represent a single infinity or NaN, so all its values become NaN, which then shows
/// in the results.
#[inline(always)]
fn is_finite(values: &[f32; BLOCK]) -> bool {
    reduce(each(values, |x| x * 0.0), add) == 0.0
}

/// The values, padded with zeros to a block.
#[inline(always)]
fn padded(values: &[f32]) -> [f32; BLOCK] {
    let mut block = [0.0; BLOCK];
    block[..values.len()].copy_from_slice(values);
    block
}

// Loops over indices, because methods of arrays and iterators are not inlined into code for wider registers.

#[inline(always)]
fn products(a: &[f32; BLOCK], b: &[f32; BLOCK]) -> [f32; BLOCK] {
    let mut products = [0.0; BLOCK];
    for i in 0..BLOCK {
        products[i] = a[i] * b[i];
    }
    products
}

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
