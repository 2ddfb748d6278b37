//! Element order.

use rayon::prelude::*;

/// Rows and columns of the blocks a transposition works on; two of them fit the first-level cache.
const BLOCK: usize = 32;

/// Transposes a matrix of `shape` (rows, columns) with elements of `size` bytes into `out`, which is as long.
pub(crate) fn transpose(data: &[u8], size: usize, shape: &[usize], out: &mut [u8]) {
    let (rows, columns) = match shape {
        [rows, columns] => (*rows, *columns),
        _ => (1, data.len() / size.max(1)),
    };
    match size {
        1 => blocks::<1>(data, rows, columns, out),
        2 => blocks::<2>(data, rows, columns, out),
        4 => blocks::<4>(data, rows, columns, out),
        _ => blocks::<8>(data, rows, columns, out),
    }
}

fn blocks<const SIZE: usize>(data: &[u8], rows: usize, columns: usize, out: &mut [u8]) {
    let (from, to) = (data.as_chunks::<SIZE>().0, out.as_chunks_mut::<SIZE>().0);
    if from.is_empty() {
        return;
    }
    to.par_chunks_mut(rows * BLOCK).enumerate().for_each(|(block, to)| {
        let first = block * BLOCK;
        let wide = to.len() / rows;
        for top in (0..rows).step_by(BLOCK) {
            let high = BLOCK.min(rows - top);
            for column in 0..wide {
                let target = &mut to[column * rows + top..][..high];
                for (row, element) in target.iter_mut().enumerate() {
                    *element = from[(top + row) * columns + first + column];
                }
            }
        }
    });
}

/// Whether two shapes are the same but for trailing ones: a linear weight and a 1x1 convolution.
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
