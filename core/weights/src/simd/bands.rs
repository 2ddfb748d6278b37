//! A matrix that several threads write, each in its own columns.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// Some columns of a matrix over all rows.
pub(crate) struct Band<'a> {
    /// Address of the first column in the first row.
    start: *mut u8,
    /// Bytes of a row of the matrix.
    stride: usize,
    /// Bytes of a row of the band.
    width: usize,
    rows: usize,
    matrix: PhantomData<&'a mut [u8]>,
}

// SAFETY: bands are parts of a slice that nothing else can reach while they live, and do not overlap.
unsafe impl Send for Band<'_> {}

impl Band<'_> {
    /// One row of the band.
    #[inline]
    pub(crate) fn row(&mut self, row: usize) -> &mut [u8] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: `bands` checked that the matrix has `rows` rows; the columns belong to this band alone, which is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.width) }
    }

    /// Prefetches a row that will be written.
    #[inline]
    pub(crate) fn fetch(&mut self, row: usize) {
        #[cfg(target_arch = "x86_64")]
        for line in self.row(row).chunks(64) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: every x86-64 has the instruction, which changes nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = row;
    }
}

/// Cuts a matrix of rows of `stride` bytes into bands of `width` bytes; the last may be narrower.
pub(crate) fn bands(matrix: &mut [u8], stride: usize, width: usize) -> Vec<Band<'_>> {
    assert!(stride > 0 && width > 0 && matrix.len().is_multiple_of(stride), "no rows of {stride} bytes");
    let (start, rows) = (matrix.as_mut_ptr(), matrix.len() / stride);
    let cut = |left: usize| Band {
        // SAFETY: within the first row, or at the end of an empty matrix.
        start: if rows > 0 { unsafe { start.add(left) } } else { start },
        stride,
        width: width.min(stride - left),
        rows,
        matrix: PhantomData,
    };
    (0..stride).step_by(width).map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_are_all_of_a_matrix_and_apart() {
        let mut matrix = vec![0u8; 3 * 7];
        let mut all = bands(&mut matrix, 7, 3);
        assert_eq!(all.len(), 3);
        for (index, band) in all.iter_mut().enumerate() {
            for row in 0..3 {
                band.row(row).iter_mut().for_each(|byte| *byte += 1 + index as u8);
            }
        }
        assert_eq!(matrix.chunks(7).collect::<Vec<_>>(), [[1, 1, 1, 2, 2, 2, 3]; 3]);
        assert_eq!(bands(&mut [], 4, 4).len(), 1);
    }
}
