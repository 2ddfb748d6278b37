//! Blocks of products of 8-bit integers, with a scale for every eight words: `Σ a · (scale · q - offset)`.
//!
//! The integers are signed on the left and unsigned on the right. The sum over eight words is exact. These sums are then scaled and added
//! up in f32, in the order of the depth.

use super::{
    operands::{Block, Product, ROW_STRIDE, SCALES, STEPS},
    registers::finish,
};
use crate::simd::level::{BYTES_BLOCK_256, BYTES_BLOCK_512};
use std::{arch::x86_64::*, hint::black_box};

/// The block for one width of registers.
macro_rules! block_of_bytes {
    (
        $name:ident, $features:literal, $lanes:literal x $cols:expr, $steps:expr; $($rows:literal)*;
        $zero:expr, $zeros:expr, $load:ident, $load_words:ident, $store:ident, $word:ident, $value:ident, $multiply:expr,
        $as_floats:expr, $times:ident, $plus_product:ident, $minus_product:ident
    ) => {
        pub(super) mod $name {
            use super::*;

            /// # Safety
            /// The processor has the features; [`Product::into`] has checked the lengths.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn block(product: &Product<'_>, out: &mut Block<'_>) {
                match out.rows {
                    // SAFETY: by the contract of this function.
                    $($rows => unsafe { rows::<$rows>(product, out) },)*
                    _ => {}
                }
            }

            /// # Safety
            /// As [`block`]; the output has `ROWS` rows.
            #[target_feature(enable = $features)]
            unsafe fn rows<const ROWS: usize>(product: &Product<'_>, out: &mut Block<'_>) {
                let mut totals = [[$zeros; 2]; ROWS];
                let (mut a, mut b) = (product.a.as_ptr(), product.b.as_ptr());
                let (mut of_rows, mut of_cols) = (product.scales.rows.as_ptr(), product.scales.cols.as_ptr());
                let (mut ahead, pace) = product.ahead();
                let steps = $steps;
                for _ in 0..product.depth / STEPS {
                    let mut sums = [[$zero; 2]; ROWS];
                    for step in 0..steps {
                        _mm_prefetch::<_MM_HINT_T1>(ahead);
                        ahead = ahead.wrapping_add(pace);
                        // SAFETY: the steps lie inside `a` and `b`, whose lengths were checked.
                        unsafe {
                            let words = b.add(step * $cols).cast();
                            let words = [$load_words(words), $load_words(words.add(1))];
                            for (row, sums) in sums.iter_mut().enumerate() {
                                let word = $word((*a.add(row * ROW_STRIDE + step)).cast_signed());
                                sums[0] = $multiply(sums[0], words[0], word);
                                sums[1] = $multiply(sums[1], words[1], word);
                            }
                        }
                    }
                    // SAFETY: each row and each column has scales for every block.
                    unsafe {
                        let scales = [$load(of_cols), $load(of_cols.add($lanes))];
                        let offsets = [$load(of_cols.add($cols)), $load(of_cols.add($cols + $lanes))];
                        for (row, (totals, sums)) in totals.iter_mut().zip(&sums).enumerate() {
                            let [scale, sum] = *of_rows.add(row * SCALES);
                            let (scale, sum) = ($value(scale), $value(sum));
                            for i in 0..2 {
                                let both = $times(scale, scales[i]);
                                totals[i] = $plus_product($as_floats(sums[i]), both, totals[i]);
                                totals[i] = $minus_product(sum, offsets[i], totals[i]);
                            }
                        }
                    }
                    a = a.wrapping_add(STEPS);
                    b = b.wrapping_add(STEPS * $cols);
                    of_rows = of_rows.wrapping_add(1);
                    of_cols = of_cols.wrapping_add(2 * $cols);
                }
                for (row, totals) in totals.iter().enumerate() {
                    let mut sums = [0f32; $cols];
                    // SAFETY: a row of the block is two vectors.
                    unsafe {
                        $store(sums.as_mut_ptr(), totals[0]);
                        $store(sums.as_mut_ptr().add($lanes), totals[1]);
                    }
                    finish(product, out.row(row), &sums);
                }
            }
        }
    };
}

block_of_bytes!(
    x512, "avx512f,avx512vl,avx512bw,avx512dq,avx512vnni", 16 x BYTES_BLOCK_512.1, STEPS; 1 2 3 4 5 6 7;
    _mm512_setzero_si512(), _mm512_setzero_ps(), _mm512_loadu_ps, _mm512_loadu_si512, _mm512_storeu_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_dpbusd_epi32, _mm512_cvtepi32_ps, _mm512_mul_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps
);
// The sums are 16 integers of 16 bits, two for each column, until they are scaled. If the compiler knew the number of steps, it would unroll
// the loop and spill registers, which takes 1.5 times as long.
block_of_bytes!(
    small_x256, "avx2,fma", 8 x BYTES_BLOCK_256.1, black_box(STEPS); 1 2 3;
    _mm256_setzero_si256(), _mm256_setzero_ps(), _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_set1_epi32,
    _mm256_set1_ps, |sums, words, word| _mm256_add_epi16(sums, _mm256_maddubs_epi16(words, word)),
    |sums| _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))), _mm256_mul_ps, _mm256_fmadd_ps, _mm256_fnmadd_ps
);
block_of_bytes!(
    x256, "avx2,fma,avxvnni", 8 x BYTES_BLOCK_256.1, STEPS; 1 2 3;
    _mm256_setzero_si256(), _mm256_setzero_ps(), _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_dpbusd_avx_epi32, _mm256_cvtepi32_ps, _mm256_mul_ps, _mm256_fmadd_ps, _mm256_fnmadd_ps
);
