//! Loops that the compiler does not vectorise by itself on x86-64.
#![allow(unsafe_code)]

mod low_rank;

pub(super) use low_rank::{add_product, merge_halves};

use super::convert::{Block, Half, narrow_plainly, widen_plainly};
use std::arch::x86_64::*;

/// AVX2, FMA and F16C: every x86 processor for desktops since 2013.
fn has_avx2() -> bool {
    // The standard library caches the answers.
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// [`super::widen`], false where the processor lacks the instructions.
pub(super) fn widen(half: Half, from: &[[u8; 2]], to: &mut [f32], block: Block) -> bool {
    if !has_avx2() {
        return false;
    }
    // SAFETY: the processor has the instructions.
    unsafe {
        match half {
            Half::F16 => widen_f16(from, to, block),
            Half::BF16 => widen_bf16(from, to, block),
        }
    }
    true
}

/// [`super::narrow`], `None` where the processor lacks the instructions.
pub(super) fn narrow(half: Half, from: &[f32], to: &mut [[u8; 2]], block: Block) -> Option<bool> {
    // SAFETY: the processor has the instructions.
    has_avx2().then(|| unsafe {
        match half {
            Half::F16 => narrow_f16(from, to, block),
            Half::BF16 => narrow_bf16(from, to, block),
        }
    })
}

#[target_feature(enable = "avx2,f16c")]
fn widen_f16(from: &[[u8; 2]], to: &mut [f32], block: Block) {
    for row in 0..block.rows {
        let (from, from_rest) = from[row * block.from_stride..][..block.columns].as_chunks::<8>();
        let (to, to_rest) = to[row * block.to_stride..][..block.columns].as_chunks_mut::<8>();
        for (from, to) in from.iter().zip(to) {
            // SAFETY: both arrays are as long as the vectors.
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())))
            };
        }
        if !from_rest.is_empty() {
            widen_plainly(Half::F16, from_rest, to_rest, Block::line(from_rest.len()));
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
fn narrow_f16(from: &[f32], to: &mut [[u8; 2]], block: Block) -> bool {
    let magnitude = _mm256_set1_epi16(i16::MAX);
    let mut largest = _mm256_setzero_si256();
    let mut finite = true;
    for row in 0..block.rows {
        let (from, from_rest) = from[row * block.from_stride..][..block.columns].as_chunks::<16>();
        let (to, to_rest) = to[row * block.to_stride..][..block.columns].as_chunks_mut::<16>();
        for (from, to) in from.iter().zip(to) {
            // SAFETY: both arrays are as long as the vectors, or as two of them.
            unsafe {
                let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.as_ptr()));
                let high =
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.as_ptr().add(8)));
                let halves = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
                largest = _mm256_max_epu16(largest, _mm256_and_si256(halves, magnitude));
                _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
            }
        }
        if !from_rest.is_empty() {
            finite &= narrow_plainly(Half::F16, from_rest, to_rest, Block::line(from_rest.len()));
        }
    }
    // Infinity and NaNs are above all numbers.
    let above = _mm256_cmpgt_epi16(largest, _mm256_set1_epi16(0x7bff));
    finite & (_mm256_movemask_epi8(above) == 0)
}

// Integer arithmetic only, which the compiler vectorises.

#[target_feature(enable = "avx2")]
fn widen_bf16(from: &[[u8; 2]], to: &mut [f32], block: Block) {
    widen_plainly(Half::BF16, from, to, block);
}

#[target_feature(enable = "avx2")]
fn narrow_bf16(from: &[f32], to: &mut [[u8; 2]], block: Block) -> bool {
    narrow_plainly(Half::BF16, from, to, block)
}

/// Transposes the whole squares of 16 elements in a block and returns how many rows and columns these are. The caller has
/// checked that the block lies in both slices.
pub(super) fn transpose(from: &[[u8; 2]], to: &mut [[u8; 2]], block: Block) -> [usize; 2] {
    if !has_avx2() {
        return [0, 0];
    }
    let done = [block.rows, block.columns].map(|n| n - n % 16);
    for column in (0..done[1]).step_by(16) {
        for row in (0..done[0]).step_by(16) {
            let source = from[row * block.from_stride + column..].as_ptr();
            let target = to[column * block.to_stride + row..].as_mut_ptr();
            // SAFETY: the processor has AVX2; 16 rows of 16 elements lie in both slices, because the block does.
            unsafe { square(source.cast(), 2 * block.from_stride, target.cast(), 2 * block.to_stride) };
        }
    }
    done
}

/// Transposes a square of 16 elements.
///
/// # Safety
/// 16 rows of 32 bytes can be read at `from` and written at `to`.
#[target_feature(enable = "avx2")]
unsafe fn square(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
    for half in 0..2 {
        // Elements 8·half to 8·half + 8 of row r, and of row r + 8 behind them.
        let row = |r: usize| {
            // SAFETY: within the 16 rows.
            unsafe {
                let at = from.add(r * from_stride + 16 * half);
                let low = _mm_loadu_si128(at.cast());
                let high = _mm_loadu_si128(at.add(8 * from_stride).cast());
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
            }
        };
        let r = [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)];
        let pairs = |a, b| (_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
        let ((a0, a1), (a2, a3)) = (pairs(r[0], r[1]), pairs(r[2], r[3]));
        let ((a4, a5), (a6, a7)) = (pairs(r[4], r[5]), pairs(r[6], r[7]));
        let fours = |a, b| (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let ((b0, b1), (b2, b3)) = (fours(a0, a2), fours(a1, a3));
        let ((b4, b5), (b6, b7)) = (fours(a4, a6), fours(a5, a7));
        let eights = |a, b| [_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)];
        let out = [eights(b0, b4), eights(b1, b5), eights(b2, b6), eights(b3, b7)];
        for (column, vector) in out.as_flattened().iter().enumerate() {
            // SAFETY: within the 16 rows.
            unsafe { _mm256_storeu_si256(to.add((8 * half + column) * to_stride).cast(), *vector) };
        }
    }
}
