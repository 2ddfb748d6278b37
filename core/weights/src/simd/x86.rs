//! What the compiler does not make by itself of plain loops on x86-64.
#![allow(unsafe_code)]

use super::{
    convert::{Block, Half, narrow_plainly, widen_plainly},
    low_rank::{Factors, PANEL},
};
use std::arch::x86_64::*;

/// AVX2, FMA and F16C: every x86 made for desktops since 2013.
fn has_avx2() -> bool {
    // The standard library asks once and keeps the answers.
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// [`super::widen`], or false where the processor cannot.
pub(super) fn widen(half: Half, from: &[[u8; 2]], to: &mut [f32], block: Block) -> bool {
    if !has_avx2() {
        return false;
    }
    // SAFETY: the processor has what the functions need.
    unsafe {
        match half {
            Half::F16 => widen_f16(from, to, block),
            Half::BF16 => widen_bf16(from, to, block),
        }
    }
    true
}

/// [`super::narrow`], or `None` where the processor cannot.
pub(super) fn narrow(half: Half, from: &[f32], to: &mut [[u8; 2]], block: Block) -> Option<bool> {
    // SAFETY: the processor has what the functions need.
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

// Integer arithmetic only: the compiler makes 8 at once.

#[target_feature(enable = "avx2")]
fn widen_bf16(from: &[[u8; 2]], to: &mut [f32], block: Block) {
    widen_plainly(Half::BF16, from, to, block);
}

#[target_feature(enable = "avx2")]
fn narrow_bf16(from: &[f32], to: &mut [[u8; 2]], block: Block) -> bool {
    narrow_plainly(Half::BF16, from, to, block)
}

/// Transposes the whole squares of 16 elements in a block; gives the rows and columns that these are. The caller has
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
/// From both pointers on, 16 rows of 32 bytes can be read or written.
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

/// A tile of a matrix with elements of one type: [`PANEL`] columns of rows that begin `stride` elements apart.
#[derive(Clone, Copy)]
struct Tile<T> {
    start: *mut T,
    stride: usize,
}

impl<T> Tile<T> {
    fn below(self, rows: usize) -> Self {
        Tile { start: self.start.wrapping_add(rows * self.stride), ..self }
    }
}

/// `tile + scale · up · panel` on one panel; or false where the processor cannot. The caller has checked that all rows of
/// `up` have one in the tile.
pub(super) fn add_product(factors: Factors<'_>, tile: &mut [f32], stride: usize) -> bool {
    let wide = is_x86_feature_detected!("avx512f");
    if !wide && !has_avx2() {
        return false;
    }
    let tile = Tile { start: tile.as_mut_ptr(), stride };
    // SAFETY: the processor has the instructions, and the caller answers for the tile.
    unsafe {
        match wide {
            true => each_row(factors, tile, tile, f32_512::<ROWS>, f32_512::<1>),
            false => each_row(factors, tile, tile, f32_256::<ROWS>, f32_256::<1>),
        }
    };
    true
}

/// [`add_product`] from halves to halves, in f32 and rounded once; whether all results are finite, or false where the
/// processor cannot. The caller has checked that the block has [`PANEL`] columns, as many rows as `up`, and lies in both
/// slices.
pub(super) fn merge_halves(
    half: Half,
    factors: Factors<'_>,
    from: &[[u8; 2]],
    to: &mut [[u8; 2]],
    block: Block,
) -> bool {
    let wide = is_x86_feature_detected!("avx512f");
    if !has_avx2() {
        return false;
    }
    // Never written.
    let from = Tile { start: from.as_ptr().cast_mut(), stride: block.from_stride };
    let to = Tile { start: to.as_mut_ptr(), stride: block.to_stride };
    // SAFETY: the processor has the instructions, and the caller answers for the block.
    let largest = unsafe {
        match (half, wide) {
            (Half::F16, true) => each_row(factors, from, to, f16_512::<ROWS>, f16_512::<1>),
            (Half::F16, false) => each_row(factors, from, to, f16_256::<ROWS>, f16_256::<1>),
            (Half::BF16, true) => each_row(factors, from, to, bf16_512::<ROWS>, bf16_512::<1>),
            (Half::BF16, false) => each_row(factors, from, to, bf16_256::<ROWS>, bf16_256::<1>),
        }
    };
    // NaNs are above infinity.
    largest < half.infinity()
}

/// Rows at a time: their sums are kept in registers, and what is loaded of the panel serves all of them.
const ROWS: usize = 4;

/// Some rows of a product: of factors, from one tile to another. Gives the largest magnitude of halves that was written,
/// as bits.
type Rows<T> = unsafe fn(Factors<'_>, Tile<T>, Tile<T>) -> u16;

/// Several rows at a time, then those that are left.
///
/// # Safety
/// The processor has what `several` and `one` need; both tiles have as many rows as `up`.
unsafe fn each_row<T: Copy>(
    factors: Factors<'_>,
    from: Tile<T>,
    to: Tile<T>,
    several: Rows<T>,
    one: Rows<T>,
) -> u16 {
    let Factors { panel, up, rank, .. } = factors;
    assert!(panel.len() == rank * PANEL && up.len().is_multiple_of(rank));
    let count = up.len() / rank;
    let (mut row, mut largest) = (0, 0);
    while row < count {
        let (rows, work) = if count - row >= ROWS { (ROWS, several) } else { (1, one) };
        let factors = Factors { up: &up[row * rank..][..rows * rank], ..factors };
        // SAFETY: the panel has `rank` rows, and the rows counted are there in `up` and in the tiles.
        largest = largest.max(unsafe { work(factors, from.below(row), to.below(row)) });
        row += rows;
    }
    largest
}

macro_rules! rows_of_product {
    ($name:ident, $element:ty, $features:literal, $lanes:literal, $vectors:literal, $zero:ident, $splat:ident, $load:ident, $multiply_add:ident, $nothing:ident, $larger:ident, $read:ident, $write:ident) => {
        /// # Safety
        /// `panel` has `rank` rows of [`PANEL`] values, `up` has R rows of `rank`, the tiles have R rows.
        #[target_feature(enable = $features)]
        #[allow(clippy::needless_range_loop)]
        unsafe fn $name<const R: usize>(
            factors: Factors<'_>,
            from: Tile<$element>,
            to: Tile<$element>,
        ) -> u16 {
            // Loops over numbers only: the compiler does not inline an iterator over vectors here, as its functions are made
            // for any processor.
            let (panel, up) = (factors.panel.as_ptr(), factors.up.as_ptr());
            let scale = $splat(factors.scale);
            let mut largest = $nothing();
            for first in (0..PANEL).step_by($lanes * $vectors) {
                let mut sums = [[$zero(); $vectors]; R];
                for k in 0..factors.rank {
                    let mut values = [$zero(); $vectors];
                    // SAFETY: row k of the panel.
                    unsafe {
                        let at = panel.add(k * PANEL + first);
                        for v in 0..$vectors {
                            values[v] = $load(at.add(v * $lanes));
                        }
                    }
                    for r in 0..R {
                        // SAFETY: value k of row r.
                        let factor = $splat(unsafe { *up.add(r * factors.rank + k) });
                        for v in 0..$vectors {
                            sums[r][v] = $multiply_add(factor, values[v], sums[r][v]);
                        }
                    }
                }
                for r in 0..R {
                    for v in 0..$vectors {
                        let column = first + v * $lanes;
                        // SAFETY: within row r of both tiles.
                        unsafe {
                            let before = $read(from.start.add(r * from.stride + column));
                            let after = $multiply_add(scale, sums[r][v], before);
                            let written = $write(to.start.add(r * to.stride + column), after);
                            largest = $larger(largest, written);
                        }
                    }
                }
            }
            // SAFETY: any bits are numbers.
            let largest: [u16; $lanes] = unsafe { std::mem::transmute(largest) };
            largest.into_iter().fold(0, u16::max)
        }
    };
}

macro_rules! rows_512 {
    ($name:ident, $element:ty, $read:ident, $write:ident) => {
        rows_of_product!(
            $name,
            $element,
            "avx512f",
            16,
            4,
            _mm512_setzero_ps,
            _mm512_set1_ps,
            _mm512_loadu_ps,
            _mm512_fmadd_ps,
            _mm256_setzero_si256,
            _mm256_max_epu16,
            $read,
            $write
        );
    };
}

macro_rules! rows_256 {
    ($name:ident, $element:ty, $read:ident, $write:ident) => {
        rows_of_product!(
            $name,
            $element,
            "avx2,fma,f16c",
            8,
            2,
            _mm256_setzero_ps,
            _mm256_set1_ps,
            _mm256_loadu_ps,
            _mm256_fmadd_ps,
            _mm_setzero_si128,
            _mm_max_epu16,
            $read,
            $write
        );
    };
}

rows_512!(f32_512, f32, _mm512_loadu_ps, write_f32_512);
rows_256!(f32_256, f32, _mm256_loadu_ps, write_f32_256);
rows_512!(f16_512, [u8; 2], read_f16_512, write_f16_512);
rows_256!(f16_256, [u8; 2], read_f16_256, write_f16_256);
rows_512!(bf16_512, [u8; 2], read_bf16_512, write_bf16_512);
rows_256!(bf16_256, [u8; 2], read_bf16_256, write_bf16_256);

// Vectors of a tile's elements. Halves are rounded to nearest, ties to even; their magnitudes are given back.
//
// # Safety, of all of them
// There are as many elements as the vector has.

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write_f32_512(at: *mut f32, value: __m512) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm512_storeu_ps(at, value) };
    _mm256_setzero_si256()
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn write_f32_256(at: *mut f32, value: __m256) -> __m128i {
    // SAFETY: the caller's.
    unsafe { _mm256_storeu_ps(at, value) };
    _mm_setzero_si128()
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn read_f16_512(at: *const [u8; 2]) -> __m512 {
    // SAFETY: the caller's.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn read_f16_256(at: *const [u8; 2]) -> __m256 {
    // SAFETY: the caller's.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write_f16_512(at: *mut [u8; 2], value: __m512) -> __m256i {
    // SAFETY: the caller's.
    unsafe { write_halves_256(at, _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value)) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn write_f16_256(at: *mut [u8; 2], value: __m256) -> __m128i {
    // SAFETY: the caller's.
    unsafe { write_halves_128(at, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value)) }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn read_bf16_512(at: *const [u8; 2]) -> __m512 {
    // SAFETY: the caller's.
    let halves = unsafe { _mm256_loadu_si256(at.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn read_bf16_256(at: *const [u8; 2]) -> __m256 {
    // SAFETY: the caller's.
    let halves = unsafe { _mm_loadu_si128(at.cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write_bf16_512(at: *mut [u8; 2], value: __m512) -> __m256i {
    let bits = _mm512_castps_si512(value);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    // A NaN stays one, whatever rounding makes of it.
    let nans = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
    let rounded = _mm512_mask_mov_epi32(rounded, nans, _mm512_set1_epi32(0x7fc0_0000));
    let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
    // SAFETY: the caller's.
    unsafe { write_halves_256(at, halves) }
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn write_bf16_256(at: *mut [u8; 2], value: __m256) -> __m128i {
    let bits = _mm256_castps_si256(value);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let nans = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
    let rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0_0000), nans);
    let words = _mm256_srli_epi32::<16>(rounded);
    let halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
    // SAFETY: the caller's.
    unsafe { write_halves_128(at, halves) }
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn write_halves_256(at: *mut [u8; 2], halves: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_storeu_si256(at.cast(), halves) };
    _mm256_and_si256(halves, _mm256_set1_epi16(i16::MAX))
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn write_halves_128(at: *mut [u8; 2], halves: __m128i) -> __m128i {
    // SAFETY: the caller's.
    unsafe { _mm_storeu_si128(at.cast(), halves) };
    _mm_and_si128(halves, _mm_set1_epi16(i16::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_either_width_give_the_same_bits() {
        if !is_x86_feature_detected!("avx512f") || !has_avx2() {
            return;
        }
        let (rank, rows) = (5, 7);
        let panel: Vec<f32> = (0..rank * PANEL).map(|i| (i as f32 * 0.37).sin()).collect();
        let up: Vec<f32> = (0..rows * rank).map(|i| (i as f32 * 0.73).cos()).collect();
        let factors = Factors { panel: &panel, up: &up, rank, scale: 0.7 };
        fn same<T: Copy + PartialEq + std::fmt::Debug>(
            factors: Factors<'_>,
            values: &[T],
            [wide, narrow]: [[Rows<T>; 2]; 2],
        ) {
            let [wide, narrow] = [wide, narrow].map(|[several, one]| {
                let mut values = values.to_vec();
                let tile = Tile { start: values.as_mut_ptr(), stride: PANEL };
                // SAFETY: the processor was asked; the tile has as many rows as the factor.
                unsafe { each_row(factors, tile, tile, several, one) };
                values
            });
            assert_eq!(wide, narrow);
        }
        let values: Vec<f32> = (0..rows * PANEL).map(|i| i as f32 * 1e-3).collect();
        same(factors, &values, [[f32_512::<ROWS>, f32_512::<1>], [f32_256::<ROWS>, f32_256::<1>]]);
        // Any bits, also of what is no number.
        let halves: Vec<[u8; 2]> =
            (0..rows * PANEL).map(|i| (i as u16).wrapping_mul(4099).to_le_bytes()).collect();
        same(factors, &halves, [[f16_512::<ROWS>, f16_512::<1>], [f16_256::<ROWS>, f16_256::<1>]]);
        same(factors, &halves, [[bf16_512::<ROWS>, bf16_512::<1>], [bf16_256::<ROWS>, bf16_256::<1>]]);
    }
}
