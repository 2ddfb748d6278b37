//! One step of a running softmax over columns, with AVX-512.

#[cfg(target_arch = "x86_64")]
use super::bf16::interleaved;
use super::level::Level;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Columns of a step.
pub(crate) const LANES: usize = 32;
type Row = [f32; LANES];

/// Turns a new block of scores into weights `e^(score - maximum)`, and scales the earlier sums to the new maximum.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Step<'a> {
    /// A row for each key.
    pub(crate) scores: &'a mut [Row],
    /// The largest score of each column so far.
    pub(crate) maxima: &'a mut Row,
    /// The sum of the weights of each column so far.
    pub(crate) totals: &'a mut Row,
    /// Sums that are scaled with the totals.
    pub(crate) sums: &'a mut [Row],
    /// Receives the weights as bf16 pairs of neighbouring rows. If empty, the weights replace the scores.
    pub(crate) pairs: &'a mut [[u32; LANES]],
}

impl Step<'_> {
    /// Takes the step, or returns `false` if the processor lacks the instructions.
    pub(crate) fn take(&mut self, level: Level) -> bool {
        #[cfg(target_arch = "x86_64")]
        if level.has_512_bits() && (self.pairs.is_empty() || level.multiplies_bf16()) {
            assert!(
                self.pairs.is_empty() || self.pairs.len() == self.scores.len().div_ceil(2),
                "pairs of all rows"
            );
            let factors = if self.pairs.is_empty() {
                // SAFETY: the processor has the features, for only detection makes a `Level`.
                unsafe { self.weigh() }
            } else {
                // SAFETY: as above; the level multiplies bf16, and there is a pair for every two rows.
                unsafe { self.weigh_pairs() }
            };
            for row in &mut *self.sums {
                row.iter_mut().zip(&factors).for_each(|(x, factor)| *x *= factor);
            }
            return true;
        }
        let _ = level;
        false
    }

    /// Replaces the scores by weights. Returns the factor of each column's earlier sums.
    ///
    /// # Safety
    /// The processor has AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn weigh(&mut self) -> Row {
        let mut factors = [0f32; LANES];
        for half in [0, 16] {
            // SAFETY: the processor has the features. A row has 32 elements; this touches the 16 that start at `half`.
            unsafe {
                let maxima = self.raise(half);
                let mut sums = [_mm512_setzero_ps(); 2];
                for (i, row) in self.scores.iter_mut().enumerate() {
                    let at = row.as_mut_ptr().add(half);
                    let weight = exp2::<6>(power(_mm512_loadu_ps(at), maxima[1]));
                    sums[i % 2] = _mm512_add_ps(sums[i % 2], weight);
                    _mm512_storeu_ps(at, weight);
                }
                self.finish(half, maxima, sums, &mut factors);
            }
        }
        factors
    }

    /// As `weigh`, but rounds the weights to bf16 and writes them as pairs. The scores stay.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW and BF16; there is a pair for every two rows of scores.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn weigh_pairs(&mut self) -> Row {
        let mut factors = [0f32; LANES];
        for half in [0, 16] {
            // SAFETY: the processor has the features. A row has 32 elements; this touches the 16 that start at `half`.
            unsafe {
                let maxima = self.raise(half);
                // bf16 has 8 bits, so a shorter polynomial serves.
                let weight = |row: &Row| exp2::<4>(power(_mm512_loadu_ps(row.as_ptr().add(half)), maxima[1]));
                let mut sums = [_mm512_setzero_ps(); 2];
                for (pair, rows) in self.pairs.iter_mut().zip(self.scores.chunks(2)) {
                    let low = weight(&rows[0]);
                    let high = rows.get(1).map_or(_mm512_setzero_ps(), weight);
                    sums = [_mm512_add_ps(sums[0], low), _mm512_add_ps(sums[1], high)];
                    _mm512_storeu_si512(pair.as_mut_ptr().add(half).cast(), interleaved(low, high));
                }
                self.finish(half, maxima, sums, &mut factors);
            }
        }
        factors
    }

    /// Raises the maxima of 16 columns to those of their scores. Returns the old and the new ones.
    ///
    /// # Safety
    /// The processor has AVX-512 F; `half` is at most 16.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn raise(&mut self, half: usize) -> [__m512; 2] {
        // SAFETY: a row has 32 elements; this touches the 16 that start at `half`.
        unsafe {
            let old = _mm512_loadu_ps(self.maxima.as_ptr().add(half));
            let mut largest = [old; 4];
            let fours = self.scores.len() / 4;
            for four in 0..fours {
                for (i, largest) in largest.iter_mut().enumerate() {
                    let x = _mm512_loadu_ps(self.scores.get_unchecked(4 * four + i).as_ptr().add(half));
                    *largest = _mm512_max_ps(x, *largest);
                }
            }
            for row in &self.scores[4 * fours..] {
                largest[0] = _mm512_max_ps(_mm512_loadu_ps(row.as_ptr().add(half)), largest[0]);
            }
            let maximum =
                _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3]));
            _mm512_storeu_ps(self.maxima.as_mut_ptr().add(half), maximum);
            [old, maximum]
        }
    }

    /// Adds the sums of 16 columns' weights to the totals, which are scaled to the new maxima by factors.
    ///
    /// # Safety
    /// As `raise`.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn finish(
        &mut self,
        half: usize,
        [old, maximum]: [__m512; 2],
        sums: [__m512; 2],
        factors: &mut Row,
    ) {
        let factor = exp2::<6>(power(old, maximum));
        // SAFETY: a row has 32 elements; this touches the 16 that start at `half`.
        unsafe {
            _mm512_storeu_ps(factors.as_mut_ptr().add(half), factor);
            let total = self.totals.as_mut_ptr().add(half);
            let sum = _mm512_add_ps(sums[0], sums[1]);
            _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), factor, sum));
        }
    }
}

/// The power of two that is `e^(x - maximum)`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn power(x: __m512, maximum: __m512) -> __m512 {
    // The difference comes first: a fused product would round large scores.
    _mm512_mul_ps(_mm512_sub_ps(x, maximum), _mm512_set1_ps(std::f32::consts::LOG2_E))
}

/// 2^x, and 0 below 2^-149. The nearest integer goes into the exponent. The rest, at most ½, goes through a polynomial: of degree 6 with a
/// relative error of about 1e-7 (Taylor's), of degree 4 with one of at most 2.6e-6 (least squares, reweighted until the extremes of the
/// relative error are equal).
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn exp2<const DEGREE: usize>(x: __m512) -> __m512 {
    const { assert!(DEGREE == 6 || DEGREE == 4) };
    // The highest power first. Taylor's factors are ln(2)^k / k!.
    const TAYLOR: [f32; 7] =
        [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0];
    const SHORT: [f32; 5] = [9.570_102e-3, 5.591_786e-2, 2.402_474_4e-1, 6.931_218e-1, 9.999_993e-1];
    let factors: &[f32] = if DEGREE == 6 { &TAYLOR } else { &SHORT };
    // If one operand is a NaN, the result is the second operand.
    let x = _mm512_max_ps(_mm512_set1_ps(-200.0), x);
    let n = _mm512_roundscale_ps::<0>(x);
    let r = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(factors[0]);
    for factor in &factors[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*factor));
    }
    _mm512_scalef_ps(p, n)
}
