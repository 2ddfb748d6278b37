//! The inner loop of every product of 8-bit integers: a block of rows and columns that fits the registers.
//!
//! A word of an operand holds four neighbours along the depth, the first in the lowest byte. Bytes are signed on the left and
//! unsigned on the right. Sums are exact in 32 bits and wrap beyond.

use super::level::{Vectorized, vectorize};
#[cfg(target_arch = "x86_64")]
use crate::cpu;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Most rows of a block.
pub(crate) const ROWS: usize = 12;
/// Columns of a block.
pub(crate) const COLS: usize = 32;

/// Sums of a block.
pub(crate) type Sums = [[i32; COLS]; ROWS];

/// An instruction set that multiplies bytes. Only detection makes one, as with [`Level`](super::Level).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// Every processor of the target has it.
    Baseline,
    /// AVX2: products of pairs of 16 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 VNNI: products of four bytes.
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Bytes {
    /// The best set of this processor.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if cpu::avx512_vnni() {
                return Bytes(Set::Vnni);
            }
            if cpu::avx2() {
                return Bytes(Set::Avx2);
            }
        }
        Bytes(Set::Baseline)
    }

    /// All sets of this processor.
    #[cfg(test)]
    pub(crate) fn usable() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut all = vec![Bytes(Set::Baseline)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(cpu::avx2().then_some(Bytes(Set::Avx2)));
            all.extend(cpu::avx512_vnni().then_some(Bytes(Set::Vnni)));
        }
        all
    }

    /// Multiplies `rows` rows, `stride` words apart in `left`, by the columns of a panel. `right` has [`COLS`] words for each of
    /// `depth` steps. The other rows of `sums` stay unchanged.
    pub(crate) fn multiply(
        self,
        (left, stride): (&[u32], usize),
        right: &[u32],
        depth: usize,
        rows: usize,
        sums: &mut Sums,
    ) {
        assert!(rows <= ROWS && depth * COLS <= right.len(), "a panel of fewer steps");
        assert!(rows == 0 || (rows - 1) * stride + depth <= left.len(), "rows of fewer steps");
        match self.0 {
            Set::Baseline => vectorize(Baseline { left, stride, right, depth, rows, sums }),
            // SAFETY: the processor has the features, for only `detect` and `usable` make this value; the lengths were checked.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { avx2(left.as_ptr(), stride, right.as_ptr(), depth, &mut sums[..rows]) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Vnni => unsafe { vnni(left.as_ptr(), stride, right.as_ptr(), depth, &mut sums[..rows]) },
        }
    }
}

struct Baseline<'a> {
    left: &'a [u32],
    stride: usize,
    right: &'a [u32],
    depth: usize,
    rows: usize,
    sums: &'a mut Sums,
}

impl Vectorized for Baseline<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (row, sums) in self.sums.iter_mut().enumerate().take(self.rows) {
            sums.fill(0);
            let left = &self.left[row * self.stride..][..self.depth];
            for (word, right) in left.iter().zip(self.right.as_chunks::<COLS>().0) {
                let [a, b, c, d] = word.to_le_bytes().map(|byte| i32::from(byte as i8));
                for (sum, word) in sums.iter_mut().zip(right) {
                    let [e, f, g, h] = word.to_le_bytes().map(i32::from);
                    *sum = sum.wrapping_add(a * e + b * f + c * g + d * h);
                }
            }
        }
    }
}

/// # Safety
/// The processor has AVX2. `left` has as many rows as `sums`, and both operands have `depth` steps.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(left: *const u32, stride: usize, right: *const u32, depth: usize, sums: &mut [[i32; COLS]]) {
    // Two rows and half of the columns at a time. A register holds two partial sums for each of four columns.
    for (pair, sums) in sums.chunks_mut(2).enumerate() {
        let first = left.wrapping_add(2 * pair * stride);
        let second = first.wrapping_add(if sums.len() == 2 { stride } else { 0 });
        for half in 0..2 {
            let mut total = [[_mm256_setzero_si256(); 4]; 2];
            for step in 0..depth {
                // SAFETY: by this function's contract.
                let (rows, right) = unsafe {
                    let rows = [*first.add(step), *second.add(step)];
                    (rows, right.add(step * COLS + half * 16).cast::<__m128i>())
                };
                let rows = rows
                    .map(|word| _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(word as i32))));
                for i in 0..4 {
                    // SAFETY: sixteen columns of the step.
                    let columns = _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(right.add(i)) });
                    for (total, row) in total.iter_mut().zip(rows) {
                        total[i] = _mm256_add_epi32(total[i], _mm256_madd_epi16(columns, row));
                    }
                }
            }
            for (total, sums) in total.iter().zip(sums.iter_mut()) {
                for (i, total) in total.iter().enumerate() {
                    let mut halves = [0; 8];
                    // SAFETY: eight numbers of 32 bits.
                    unsafe { _mm256_storeu_si256(halves.as_mut_ptr().cast(), *total) };
                    for (j, [low, high]) in halves.as_chunks().0.iter().enumerate() {
                        sums[half * 16 + i * 4 + j] = i32::wrapping_add(*low, *high);
                    }
                }
            }
        }
    }
}

/// # Safety
/// The processor has AVX-512 F and VNNI. `left` has as many rows as `sums`, and both operands have `depth` steps.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn vnni(left: *const u32, stride: usize, right: *const u32, depth: usize, sums: &mut [[i32; COLS]]) {
    macro_rules! of_rows {
        ($($rows:literal)*) => {
            match sums.len() {
                // SAFETY: by this function's contract.
                $($rows => unsafe { vnni_rows::<$rows>(left, stride, right, depth, sums) },)*
                _ => {}
            }
        };
    }
    of_rows!(1 2 3 4 5 6 7 8 9 10 11 12);
}

/// # Safety
/// As [`vnni`], of `N` rows.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn vnni_rows<const N: usize>(
    left: *const u32,
    stride: usize,
    right: *const u32,
    depth: usize,
    sums: &mut [[i32; COLS]],
) {
    let mut total = [[_mm512_setzero_si512(); 2]; N];
    for step in 0..depth {
        // SAFETY: by this function's contract.
        unsafe {
            let columns = right.add(step * COLS).cast::<__m512i>();
            let columns = [_mm512_loadu_si512(columns), _mm512_loadu_si512(columns.add(1))];
            for (row, total) in total.iter_mut().enumerate() {
                let word = _mm512_set1_epi32(*left.add(row * stride + step) as i32);
                total[0] = _mm512_dpbusd_epi32(total[0], columns[0], word);
                total[1] = _mm512_dpbusd_epi32(total[1], columns[1], word);
            }
        }
    }
    for (total, sums) in total.iter().zip(sums) {
        // SAFETY: a row of sums is two registers.
        unsafe {
            _mm512_storeu_si512(sums.as_mut_ptr().cast(), total[0]);
            _mm512_storeu_si512(sums.as_mut_ptr().add(16).cast(), total[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_is_exact() {
        let byte = |i: usize| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8;
        for (depth, rows) in (1..=ROWS).map(|rows| (3 * rows - 2, rows)).chain([(300, 5)]) {
            // Include the extremes, four products of which overflow 16 bits.
            let left: Vec<[u8; 4]> = (0..rows * depth)
                .map(|i| [0, 1, 2, 3].map(|j| if i % 3 == 0 { 0x80 } else { byte(4 * i + j) }))
                .collect();
            let right: Vec<[u8; 4]> = (0..depth * COLS)
                .map(|i| [0, 1, 2, 3].map(|j| if i % 5 == 0 { 0xff } else { byte(7 * i + j) }))
                .collect();
            let words = |bytes: &[[u8; 4]]| bytes.iter().map(|b| u32::from_le_bytes(*b)).collect::<Vec<_>>();
            let mut expected = [[-7; COLS]; ROWS];
            for (row, sums) in expected.iter_mut().enumerate().take(rows) {
                for (col, sum) in sums.iter_mut().enumerate() {
                    let product = |step: usize| -> i32 {
                        let (l, r) = (left[row * depth + step], right[step * COLS + col]);
                        l.iter().zip(r).map(|(l, r)| i32::from(*l as i8) * i32::from(r)).sum()
                    };
                    *sum = (0..depth).map(product).sum();
                }
            }
            for set in Bytes::usable() {
                let mut sums = [[-7; COLS]; ROWS];
                set.multiply((&words(&left), depth), &words(&right), depth, rows, &mut sums);
                assert_eq!(sums, expected, "{set:?}, {rows} rows of depth {depth}");
            }
        }
    }
}
