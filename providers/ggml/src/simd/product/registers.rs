//! Blocks of f32 or bf16 sums in vector registers, for each instruction set without tiles.

use super::operands::{Block, Left, Product, ROW_STRIDE, Start};
#[cfg(target_arch = "x86_64")]
use crate::simd::level::AVX2_BLOCK;
use crate::simd::level::BASELINE_BLOCK;
#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(not(target_arch = "aarch64"))]
pub(super) fn plain(product: &Product<'_>, out: &mut Block<'_>) {
    const ROWS: usize = BASELINE_BLOCK.0;
    const COLS: usize = BASELINE_BLOCK.1;
    let (row_step, depth_step) = match product.left {
        Left::Rows => (ROW_STRIDE, 1),
        Left::Columns(step) => (1, step),
        Left::Tiles | Left::Taps => unreachable!("tiles of another level"),
    };
    let mut sums = [[0f32; COLS]; ROWS];
    let height = out.rows;
    for (step, tap) in product.taps.offsets[..product.depth].iter().enumerate() {
        let b: &[u32; COLS] = product.b[*tap as usize..].first_chunk().unwrap_or(&[0; COLS]);
        let b = b.map(f32::from_bits);
        for (i, sums) in sums.iter_mut().enumerate() {
            // Missing rows repeat the first.
            let row = if i < height { i } else { 0 };
            let a = f32::from_bits(product.a[row * row_step + step * depth_step]);
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
    for (i, sums) in sums.iter().enumerate().take(out.rows) {
        finish(product, out.row(i), sums);
    }
}

/// Writes the sums of a row, or adds them to it.
#[inline(always)]
pub(super) fn finish(product: &Product<'_>, row: &mut [f32], sums: &[f32]) {
    let row = row.iter_mut().zip(sums);
    if product.start == Start::Output {
        row.for_each(|(x, sum)| *x += sum)
    } else {
        row.for_each(|(x, sum)| *x = *sum)
    }
}

/// Calls the function compiled for the output's number of rows.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! of_rows {
    ($product:ident, $out:ident, $row_step:expr, $depth_step:expr, $vectors:literal; $($rows:literal)*) => {
        match $out.rows {
            // SAFETY: by the contract of the calling function.
            $($rows => unsafe { rows::<$rows, { $row_step }, $vectors>($product, $out, $depth_step) },)*
            _ => {}
        }
    };
}

/// A block of f32 for instruction sets without masked stores.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! block_without_masks {
    (
        $name:ident, $features:literal, $block:expr, $lanes:literal x $vectors:literal; $($rows:literal)*;
        $zero:expr, $load:expr, $store:expr, $multiply:expr, $prefetch:expr
    ) => {
        pub(super) mod $name {
            use super::*;

            /// # Safety
            /// The processor has the features; [`Product::into`] has checked the lengths.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn block(product: &Product<'_>, out: &mut Block<'_>) {
                match product.left {
                    Left::Columns(step) => of_rows!(product, out, 1, step, $vectors; $($rows)*),
                    Left::Rows => of_rows!(product, out, ROW_STRIDE, 1, $vectors; $($rows)*),
                    Left::Tiles | Left::Taps => unreachable!("tiles of another level"),
                }
            }

            /// # Safety
            /// As [`block`]; the output has `ROWS` rows.
            #[target_feature(enable = $features)]
            unsafe fn rows<
                const ROWS: usize,
                const ROW_STEP: usize,
                const VECTORS: usize,
            >(
                product: &Product<'_>,
                out: &mut Block<'_>,
                depth_step: usize,
            ) {
                let mut sums = [[$zero; VECTORS]; ROWS];
                // SAFETY: the taps and the columns of a block after them lie inside `b`, the steps inside `a`.
                unsafe {
                    let mut a = product.a.as_ptr().cast::<f32>();
                    let (mut ahead, pace) = product.ahead();
                    for tap in &product.taps.offsets[..product.depth] {
                        $prefetch(ahead);
                        ahead = ahead.wrapping_add(pace);
                        let b = product.b.as_ptr().add(*tap as usize).cast::<f32>();
                        let b: [_; VECTORS] = std::array::from_fn(|i| $load(b.add($lanes * i)));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = *a.add(i * ROW_STEP);
                            for i in 0..VECTORS {
                                sum[i] = $multiply(sum[i], b[i], x);
                            }
                        }
                        a = a.wrapping_add(depth_step);
                    }
                }
                for (i, sum) in sums.iter().enumerate() {
                    let mut row = [0f32; $block.1];
                    for (i, sum) in sum.iter().enumerate() {
                        // SAFETY: a row of the block is `VECTORS` vectors.
                        unsafe { $store(row.as_mut_ptr().add($lanes * i), *sum) };
                    }
                    finish(product, out.row(i), &row);
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
block_without_masks!(
    f32x256, "avx2,fma", AVX2_BLOCK, 8 x 2; 1 2 3 4 5 6;
    _mm256_setzero_ps(), _mm256_loadu_ps, _mm256_storeu_ps, |sum, b, x| _mm256_fmadd_ps(_mm256_set1_ps(x), b, sum),
    |ahead| _mm_prefetch::<_MM_HINT_T1>(ahead)
);
#[cfg(target_arch = "aarch64")]
block_without_masks!(
    f32x128, "neon", BASELINE_BLOCK, 4 x 3; 1 2 3 4 5 6 7 8;
    vdupq_n_f32(0.0), vld1q_f32, vst1q_f32, vfmaq_n_f32, |_: *const i8| {}
);

/// The 14 x 32 block, once for each kind of words.
#[cfg(target_arch = "x86_64")]
macro_rules! block_of_512_bits {
    ($name:ident, $features:literal, $multiply:expr) => {
        pub(super) mod $name {
            use super::*;

            /// # Safety
            /// The processor has the features; [`Product::into`] has checked the lengths.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn block(product: &Product<'_>, out: &mut Block<'_>) {
                match (product.left, out.cols > 16) {
                    (Left::Columns(step), true) => {
                        of_rows!(product, out, 1, step, 2; 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
                    }
                    (Left::Columns(step), false) => {
                        of_rows!(product, out, 1, step, 1; 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
                    }
                    (Left::Rows, true) => of_rows!(product, out, ROW_STRIDE, 1, 2; 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
                    (Left::Rows, false) => of_rows!(product, out, ROW_STRIDE, 1, 1; 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
                    (Left::Tiles | Left::Taps, _) => unreachable!("tiles of another level"),
                }
            }

            /// # Safety
            /// As [`block`]; the output has `ROWS` rows of at most `VECTORS` vectors.
            #[target_feature(enable = $features)]
            unsafe fn rows<
                const ROWS: usize,
                const ROW_STEP: usize,
                const VECTORS: usize,
            >(
                product: &Product<'_>,
                out: &mut Block<'_>,
                depth_step: usize,
            ) {
                let masks: [__mmask16; VECTORS] = std::array::from_fn(|i| lanes(out.cols.saturating_sub(16 * i)));
                let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
                // SAFETY: the taps and the 32 columns after them lie inside `b`, the steps inside `a`; masks keep the
                // accesses to the output and to what it starts from inside its columns.
                unsafe {
                    match product.start {
                        Start::Zero => {}
                        Start::Row(row) => {
                            for i in 0..VECTORS {
                                let some = _mm512_maskz_loadu_ps(masks[i], row.as_ptr().wrapping_add(16 * i));
                                sums.iter_mut().for_each(|sum| sum[i] = some);
                            }
                        }
                        Start::Output => {
                            for (i, sum) in sums.iter_mut().enumerate() {
                                let row = out.data.add(i * out.stride);
                                for i in 0..VECTORS {
                                    sum[i] = _mm512_maskz_loadu_ps(masks[i], row.wrapping_add(16 * i));
                                }
                            }
                        }
                    }
                    let mut a = product.a.as_ptr();
                    let mut tap = product.taps.offsets.as_ptr();
                    let (mut ahead, pace) = product.ahead();
                    for _ in 0..product.depth {
                        _mm_prefetch::<_MM_HINT_T1>(ahead);
                        ahead = ahead.wrapping_add(pace);
                        let b = product.b.as_ptr().add(*tap as usize).cast::<f32>();
                        let b: [__m512; VECTORS] = std::array::from_fn(|i| _mm512_loadu_ps(b.add(16 * i)));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = _mm512_set1_ps(f32::from_bits(*a.add(i * ROW_STEP)));
                            for i in 0..VECTORS {
                                sum[i] = $multiply(sum[i], x, b[i]);
                            }
                        }
                        a = a.wrapping_add(depth_step);
                        tap = tap.add(1);
                    }
                    if let Some([least, most]) = product.clip {
                        // If one operand is a NaN, these instructions return the second one.
                        let (least, most) = (_mm512_set1_ps(least), _mm512_set1_ps(most));
                        for sum in sums.as_flattened_mut() {
                            *sum = _mm512_min_ps(most, _mm512_max_ps(least, *sum));
                        }
                    }
                    for (i, sum) in sums.iter().enumerate() {
                        let row = out.data.add(i * out.stride);
                        for i in 0..VECTORS {
                            _mm512_mask_storeu_ps(row.wrapping_add(16 * i), masks[i], sum[i]);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
block_of_512_bits!(f32x512, "avx512f,avx512vl,avx512bw,avx512dq", |sum, x, y| _mm512_fmadd_ps(x, y, sum));
#[cfg(target_arch = "x86_64")]
block_of_512_bits!(bf16x512, "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16", |sum, x: __m512, y: __m512| {
    _mm512_dpbf16_ps(
        sum,
        std::mem::transmute::<__m512, __m512bh>(x),
        std::mem::transmute::<__m512, __m512bh>(y),
    )
});

/// The mask of the first `n` of 16 lanes.
#[cfg(target_arch = "x86_64")]
fn lanes(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}
