//! Transposes, and shapes that differ in trailing ones.

use crate::simd::{Block, transpose_halves};
use rayon::prelude::*;

/// Rows and columns of a block: in f32 and in its own type it fits the first-level cache.
pub(crate) const TILE: usize = crate::simd::PANEL;

/// Transposes a matrix of `shape` (rows, columns) with elements of `size` bytes into `out`, of the same length.
pub(crate) fn transpose(data: &[u8], size: usize, shape: &[usize], out: &mut [u8]) {
    let (rows, columns) = match shape {
        [rows, columns] => (*rows, *columns),
        _ => (1, data.len() / size.max(1)),
    };
    if data.is_empty() {
        return;
    }
    out.par_chunks_mut(TILE * rows * size).enumerate().for_each(|(task, out)| {
        let left = task * TILE;
        let wide = TILE.min(columns - left);
        for top in (0..rows).step_by(TILE) {
            let block = &data[(top * columns + left) * size..];
            let high = TILE.min(rows - top);
            transpose_block(size, block, columns, [high, wide], &mut out[top * size..], rows);
        }
    });
}

/// Writes the transpose of a block of a matrix: `rows` rows, which begin `from_stride` elements apart, of `columns`
/// elements of `size` bytes become `columns` rows, `to_stride` elements apart, of `rows` elements.
pub(crate) fn transpose_block(
    size: usize,
    from: &[u8],
    from_stride: usize,
    [rows, columns]: [usize; 2],
    to: &mut [u8],
    to_stride: usize,
) {
    match size {
        2 => {
            let block = Block { rows, columns, from_stride, to_stride };
            transpose_halves(from.as_chunks().0, to.as_chunks_mut().0, block);
        }
        1 => elements::<1>(from, from_stride, [rows, columns], to, to_stride),
        4 => elements::<4>(from, from_stride, [rows, columns], to, to_stride),
        _ => elements::<8>(from, from_stride, [rows, columns], to, to_stride),
    }
}

fn elements<const SIZE: usize>(
    from: &[u8],
    from_stride: usize,
    [rows, columns]: [usize; 2],
    to: &mut [u8],
    to_stride: usize,
) {
    /// Two squares of this side fit the first-level cache at any stride.
    const SIDE: usize = 16;
    let (from, to) = (from.as_chunks::<SIZE>().0, to.as_chunks_mut::<SIZE>().0);
    for top in (0..rows).step_by(SIDE) {
        let high = SIDE.min(rows - top);
        for column in 0..columns {
            let target = &mut to[column * to_stride + top..][..high];
            for (row, element) in target.iter_mut().enumerate() {
                *element = from[(top + row) * from_stride + column];
            }
        }
    }
}

/// Whether two shapes are the same except for trailing ones: a linear weight and a 1x1 convolution.
pub(crate) fn same_but_for_ones(a: &[usize], b: &[usize]) -> bool {
    fn bare(shape: &[usize]) -> &[usize] {
        match shape {
            [rest @ .., 1] if rest.len() > 1 => bare(rest),
            _ => shape,
        }
    }
    bare(a) == bare(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_size_is_transposed() {
        for size in [1, 2, 4, 8] {
            for (rows, columns) in [(1, 5), (70, 45), (32, 64), (33, 1)] {
                let data: Vec<u8> = (0..rows * columns * size).map(|i| (i * 7 + i / 256) as u8).collect();
                let mut out = vec![0; data.len()];
                transpose(&data, size, &[rows, columns], &mut out);
                for row in 0..rows {
                    for column in 0..columns {
                        let (from, to) = ((row * columns + column) * size, (column * rows + row) * size);
                        assert_eq!(data[from..from + size], out[to..to + size], "{size} {rows}x{columns}");
                    }
                }
            }
        }
    }

    #[test]
    fn shapes_may_differ_in_trailing_ones() {
        assert!(same_but_for_ones(&[320, 320, 1, 1], &[320, 320]));
        assert!(same_but_for_ones(&[320, 320], &[320, 320, 1, 1]));
        assert!(!same_but_for_ones(&[320, 320, 3, 3], &[320, 320]));
        assert!(!same_but_for_ones(&[320, 1, 1], &[320, 320]));
        assert!(same_but_for_ones(&[1, 1], &[1, 1, 1, 1]));
    }
}
