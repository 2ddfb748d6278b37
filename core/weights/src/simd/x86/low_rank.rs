//! Products of small rank in vectors.

use super::{
    super::{
        convert::{Block, Half},
        low_rank::{Factors, PANEL},
    },
    has_avx2,
};
use std::arch::x86_64::*;

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

/// The loops of one instruction set: for several rows, and for one.
struct Loops {
    f32: [Rows<f32>; 2],
    f16: [Rows<[u8; 2]>; 2],
    bf16: [Rows<[u8; 2]>; 2],
}

/// An instruction set: its name, whether the processor has it, its loops.
type Level = (&'static str, fn() -> bool, Loops);

/// The widest first.
const LEVELS: [Level; 2] = [
    (
        "avx512f",
        || is_x86_feature_detected!("avx512f") && has_avx2(),
        Loops {
            f32: [f32_512::<ROWS>, f32_512::<1>],
            f16: [f16_512::<ROWS>, f16_512::<1>],
            bf16: [bf16_512::<ROWS>, bf16_512::<1>],
        },
    ),
    (
        "avx2",
        has_avx2,
        Loops {
            f32: [f32_256::<ROWS>, f32_256::<1>],
            f16: [f16_256::<ROWS>, f16_256::<1>],
            bf16: [bf16_256::<ROWS>, bf16_256::<1>],
        },
    ),
];

/// The loops of the instruction sets this processor has, the best first.
fn available() -> impl Iterator<Item = &'static Level> {
    LEVELS.iter().filter(|(_, available, _)| available())
}

/// Computes `tile + scale · up · panel` on one panel; false where the processor has no loops. The caller has checked that the
/// tile has a row for each row of `up`.
pub(in crate::simd) fn add_product(factors: Factors<'_>, tile: &mut [f32], stride: usize) -> bool {
    let Some((_, _, loops)) = available().next() else { return false };
    let tile = Tile { start: tile.as_mut_ptr(), stride };
    // SAFETY: the processor has the instructions, and the caller answers for the tile.
    unsafe { each_row(factors, tile, tile, loops.f32) };
    true
}

/// [`add_product`] from halves to halves, in f32 and rounded once. Returns whether all results are finite; false where the
/// processor has no loops. The caller has checked that the block has [`PANEL`] columns, as many rows as `up`, and lies in
/// both slices.
pub(in crate::simd) fn merge_halves(
    half: Half,
    factors: Factors<'_>,
    from: &[[u8; 2]],
    to: &mut [[u8; 2]],
    block: Block,
) -> bool {
    let Some((_, _, loops)) = available().next() else { return false };
    // `from` is never written.
    let from = Tile { start: from.as_ptr().cast_mut(), stride: block.from_stride };
    let to = Tile { start: to.as_mut_ptr(), stride: block.to_stride };
    let rows = if half == Half::F16 { loops.f16 } else { loops.bf16 };
    // SAFETY: the processor has the instructions, and the caller answers for the block.
    let largest = unsafe { each_row(factors, from, to, rows) };
    // NaNs are above infinity.
    largest < half.infinity()
}

/// Rows at a time. Their sums stay in registers, and each value of the panel is loaded once for all of them.
const ROWS: usize = 4;

/// Computes some rows of a product from one tile into another. Returns the largest magnitude of halves written, as bits.
type Rows<T> = unsafe fn(Factors<'_>, Tile<T>, Tile<T>) -> u16;

/// Several rows at a time, then those that are left.
///
/// # Safety
/// The processor has the instructions of `several` and `one`; both tiles have as many rows as `up`.
unsafe fn each_row<T: Copy>(
    factors: Factors<'_>,
    from: Tile<T>,
    to: Tile<T>,
    [several, one]: [Rows<T>; 2],
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
            // Index loops: the compiler does not inline iterators over vectors here, since their functions are compiled without
            // these instructions.
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

// Load and store a vector of a tile's elements. Stores round halves to nearest, ties to even, and return their magnitudes.
//
// # Safety, of all of them
// `at` has as many elements as the vector.

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
    // Rounding may turn a NaN into another number, so NaNs are put back.
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
    use super::{
        super::super::convert::{narrow_plainly, widen_plainly},
        *,
    };

    /// `a * b + c`, rounded once. Without FMA at compile time, `mul_add` calls the C library, and MinGW's `fmaf` rounds twice.
    fn fused(a: f32, b: f32, c: f32) -> f32 {
        // The product of two f32 is exact in f64. Rounding the sum to odd there makes a second rounding harmless.
        let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
        let sum = product + c;
        let part = sum - product;
        let lost = (product - (sum - part)) + (c - part);
        let odd = sum.to_bits() & 1 == 1;
        let sum = match lost {
            _ if odd || lost == 0.0 || !sum.is_finite() => sum,
            _ if (lost > 0.0) == (sum > 0.0) => f64::from_bits(sum.to_bits() + 1),
            _ => f64::from_bits(sum.to_bits() - 1),
        };
        sum as f32
    }

    /// The product in scalar steps, each fused as in the loops.
    fn scalar(factors: Factors<'_>, tile: &mut [f32]) {
        let Factors { panel, up, rank, scale } = factors;
        for (row, values) in tile.chunks_exact_mut(PANEL).enumerate() {
            for (column, value) in values.iter_mut().enumerate() {
                let term = |sum: f32, k: usize| fused(up[row * rank + k], panel[k * PANEL + column], sum);
                *value = fused(scale, (0..rank).fold(0.0, term), *value);
            }
        }
    }

    fn product<T: Copy>(factors: Factors<'_>, values: &[T], rows: [Rows<T>; 2]) -> (Vec<T>, u16) {
        let mut values = values.to_vec();
        let tile = Tile { start: values.as_mut_ptr(), stride: PANEL };
        // SAFETY: the caller passes loops that the processor has; the tile has as many rows as the factor.
        let largest = unsafe { each_row(factors, tile, tile, rows) };
        (values, largest)
    }

    /// Every level the processor has gives the bits of the scalar steps. The scalar steps themselves are checked against f64
    /// on every processor.
    #[test]
    fn every_level_gives_the_bits_of_scalar_steps() {
        let (rank, rows) = (5, 7);
        let panel: Vec<f32> = (0..rank * PANEL).map(|i| (i as f32 * 0.37).sin()).collect();
        let up: Vec<f32> = (0..rows * rank).map(|i| (i as f32 * 0.73).cos()).collect();
        let factors = Factors { panel: &panel, up: &up, rank, scale: 0.7 };
        let values: Vec<f32> = (0..rows * PANEL).map(|i| i as f32 * 1e-3).collect();
        let mut expected = values.clone();
        scalar(factors, &mut expected);
        for (i, (found, before)) in expected.iter().zip(&values).enumerate() {
            let (row, column) = (i / PANEL, i % PANEL);
            let terms =
                (0..rank).map(|k| f64::from(up[row * rank + k]) * f64::from(panel[k * PANEL + column]));
            let exact = f64::from(*before) + f64::from(0.7f32) * terms.sum::<f64>();
            assert!((f64::from(*found) - exact).abs() < 2e-6, "{found} {exact}");
        }
        // Any bits, also those of no number.
        let halves: Vec<[u8; 2]> =
            (0..rows * PANEL).map(|i| (i as u16).wrapping_mul(4099).to_le_bytes()).collect();
        let line = Block::line(halves.len());
        let merged = [Half::F16, Half::BF16].map(|half| {
            let (mut wide, mut out) = (vec![0.0; halves.len()], vec![[0; 2]; halves.len()]);
            widen_plainly(half, &halves, &mut wide, line);
            scalar(factors, &mut wide);
            narrow_plainly(half, &wide, &mut out, line);
            out
        });
        let is_nan = |half: Half, bytes: &[u8; 2]| u16::from_le_bytes(*bytes) & 0x7fff > half.infinity();
        for (name, _, loops) in available() {
            assert_eq!(product(factors, &values, loops.f32).0, expected, "{name} f32");
            for (half, rows, expected) in
                [(Half::F16, loops.f16, &merged[0]), (Half::BF16, loops.bf16, &merged[1])]
            {
                let (found, largest) = product(factors, &halves, rows);
                // The payload of a NaN is free.
                let same = |(a, b): (&[u8; 2], &[u8; 2])| a == b || is_nan(half, a) && is_nan(half, b);
                assert!(found.iter().zip(expected).all(same), "{name} {half:?}");
                let magnitudes = found.iter().map(|bytes| u16::from_le_bytes(*bytes) & 0x7fff);
                assert_eq!(Some(largest), magnitudes.max(), "{name} {half:?}");
            }
        }
        let names: Vec<&str> = available().map(|(name, ..)| *name).collect();
        assert_eq!(names.contains(&"avx2"), has_avx2());
        assert_eq!(names.contains(&"avx512f"), is_x86_feature_detected!("avx512f"));
    }
}
