//! Transposes of 16-bit elements.

use super::Block;
use std::ops::Range;

/// Writes the transpose of a block: `rows` rows, `from_stride` elements apart, of `columns` elements become `columns` rows,
/// `to_stride` elements apart, of `rows` elements.
pub(crate) fn transpose_halves(from: &[[u8; 2]], to: &mut [[u8; 2]], block: Block) {
    let Block { rows, columns, from_stride, to_stride } = block;
    if rows == 0 || columns == 0 {
        return;
    }
    let ends = [(rows - 1) * from_stride + columns, (columns - 1) * to_stride + rows];
    assert!(
        ends[0] <= from.len() && ends[1] <= to.len(),
        "{block:?} in {} and {} elements",
        from.len(),
        to.len()
    );
    #[cfg(target_arch = "x86_64")]
    let done = super::x86::transpose(from, to, block);
    #[cfg(not(target_arch = "x86_64"))]
    let done = [0, 0];
    // The rest: below the whole squares, and right of them.
    plainly(from, to, block, [done[0]..rows, 0..done[1]]);
    plainly(from, to, block, [0..rows, done[1]..columns]);
}

fn plainly(from: &[[u8; 2]], to: &mut [[u8; 2]], block: Block, [rows, columns]: [Range<usize>; 2]) {
    for column in columns {
        let target = &mut to[column * block.to_stride..];
        for row in rows.clone() {
            target[row] = from[row * block.from_stride + column];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_any_size_are_transposed_and_nothing_beside_them_is_written() {
        for (rows, columns) in [(1, 1), (16, 16), (15, 40), (33, 16), (48, 50), (64, 64), (70, 3)] {
            let block = Block { rows, columns, from_stride: columns + 5, to_stride: rows + 3 };
            let from: Vec<[u8; 2]> =
                (0..rows * (columns + 5)).map(|i| (i as u16 + 1).to_le_bytes()).collect();
            let mut to = vec![[0; 2]; columns * (rows + 3)];
            transpose_halves(&from, &mut to, block);
            for (i, element) in to.iter().enumerate() {
                let (row, column) = (i % (rows + 3), i / (rows + 3));
                let expected = if row < rows { from[row * (columns + 5) + column] } else { [0; 2] };
                assert_eq!(*element, expected, "{rows}x{columns}: {row} {column}");
            }
        }
    }
}
