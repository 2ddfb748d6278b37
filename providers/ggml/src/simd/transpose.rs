//! Transposes 16 x 16 squares of words, with AVX-512 or AVX2 if the processor has them.

#[cfg(target_arch = "x86_64")]
use super::level::Level;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Rows and columns of a square, in words.
pub(crate) const SQUARE: usize = 16;

/// The layout of squares in memory, in words.
#[derive(Clone, Copy)]
pub(crate) struct Squares {
    /// From one square to the next.
    pub(crate) step: usize,
    /// From one row to the next.
    pub(crate) row: usize,
}

impl Squares {
    /// Words up to the end of square `last`.
    fn end(self, last: usize) -> usize {
        last * self.step + (SQUARE - 1) * self.row + SQUARE
    }
}

/// Transposes `count` squares.
///
/// # Panics
/// If a square lies outside its slice.
pub(crate) fn transpose(
    count: usize,
    (from, source): (&[u32], Squares),
    (to, target): (&mut [u32], Squares),
) {
    let Some(last) = count.checked_sub(1) else { return };
    assert!(source.end(last) <= from.len() && target.end(last) <= to.len(), "squares outside");
    #[cfg(target_arch = "x86_64")]
    let level = Level::detect();
    for i in 0..count {
        let (from, to) = (&from[i * source.step..], &mut to[i * target.step..]);
        #[cfg(target_arch = "x86_64")]
        {
            let (from, to) = (from.as_ptr().cast(), to.as_mut_ptr().cast());
            if level.has_512_bits() {
                // SAFETY: the processor has the features, by `detect`; the squares lie inside the slices.
                unsafe { square(from, source.row, to, target.row) };
                continue;
            }
            if level.has_256_bits() {
                // SAFETY: as above.
                unsafe { square_of_quarters(from, source.row, to, target.row) };
                continue;
            }
        }
        for row in 0..SQUARE {
            (0..SQUARE).for_each(|col| to[col * target.row + row] = from[row * source.row + col]);
        }
    }
}

/// Transposes one square, four columns at a time. Loads bring four rows together in a register, and shuffles transpose inside its
/// quarters.
///
/// # Safety
/// The processor has AVX-512 F. [`SQUARE`] rows of [`SQUARE`] elements, `from_row` and `to_row` elements apart, are valid for reads at
/// `from` and for writes at `to`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn square(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
    for col in (0..SQUARE).step_by(4) {
        // SAFETY: by this function's contract.
        unsafe {
            let four = |row: usize| _mm_loadu_ps(from.add(row * from_row + col));
            let rows = |row: usize| {
                let x = _mm512_castps128_ps512(four(row));
                let x = _mm512_insertf32x4::<1>(x, four(row + 4));
                let x = _mm512_insertf32x4::<2>(x, four(row + 8));
                _mm512_insertf32x4::<3>(x, four(row + 12))
            };
            let [a, b, c, d] = [rows(0), rows(1), rows(2), rows(3)];
            let low = [_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d)];
            let high = [_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d)];
            let columns = [
                _mm512_shuffle_ps::<0x44>(low[0], low[1]),
                _mm512_shuffle_ps::<0xee>(low[0], low[1]),
                _mm512_shuffle_ps::<0x44>(high[0], high[1]),
                _mm512_shuffle_ps::<0xee>(high[0], high[1]),
            ];
            for (i, column) in columns.into_iter().enumerate() {
                _mm512_storeu_ps(to.add((col + i) * to_row), column);
            }
        }
    }
}

/// As [`square`], eight rows at a time.
///
/// # Safety
/// The processor has AVX2; the rest is as for `square`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn square_of_quarters(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
    for (row, col) in (0..SQUARE).step_by(4).flat_map(|col| [(0, col), (8, col)]) {
        // SAFETY: by this function's contract.
        unsafe {
            let four = |i: usize| _mm_loadu_ps(from.add((row + i) * from_row + col));
            let rows = |i: usize| _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(four(i)), four(i + 4));
            let [a, b, c, d] = [rows(0), rows(1), rows(2), rows(3)];
            let low = [_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d)];
            let high = [_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d)];
            let columns = [
                _mm256_shuffle_ps::<0x44>(low[0], low[1]),
                _mm256_shuffle_ps::<0xee>(low[0], low[1]),
                _mm256_shuffle_ps::<0x44>(high[0], high[1]),
                _mm256_shuffle_ps::<0xee>(high[0], high[1]),
            ];
            for (i, column) in columns.into_iter().enumerate() {
                _mm256_storeu_ps(to.add((col + i) * to_row + row), column);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_transposed_and_nothing_else_is_written() {
        let (count, source, target) = (3, Squares { step: 16, row: 53 }, Squares { step: 340, row: 20 });
        let from: Vec<u32> = (0..source.end(count - 1) as u32).collect();
        let mut to = vec![u32::MAX; target.end(count - 1) + 7];
        transpose(count, (&from, source), (&mut to, target));
        for (at, word) in to.into_iter().enumerate() {
            let (square, row, col) = (at / 340, at % 340 / 20, at % 20);
            let inside = square < count && row < SQUARE && col < SQUARE;
            let expected = if inside { from[square * 16 + col * 53 + row] } else { u32::MAX };
            assert_eq!(word, expected, "word {at}");
        }
    }

    #[test]
    #[should_panic(expected = "squares outside")]
    fn squares_outside_are_refused() {
        transpose(
            1,
            (&[0; 255], Squares { step: 0, row: 16 }),
            (&mut [0; 256], Squares { step: 0, row: 16 }),
        );
    }
}
