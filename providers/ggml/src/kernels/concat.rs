use crate::ffi::{Grid, Inputs, Kernel, Tile};

/// Concatenates inputs along one axis. Each input is `outer` rows, which contain the axis and all dimensions inside it.
pub(crate) struct Concat {
    outer: usize,
    /// Elements in a row of each input.
    parts: Vec<usize>,
    /// Bytes of an element.
    size: usize,
}

impl Concat {
    /// A row of input `i` has `parts[i]` elements of `size` bytes.
    pub(crate) fn new(outer: usize, parts: Vec<usize>, size: usize) -> Self {
        Concat { outer, parts, size }
    }
}

impl Kernel for Concat {
    fn grid(&self, workers: usize) -> Grid {
        let cols: usize = self.parts.iter().sum();
        let tile_cols = if self.outer < workers { cols.div_ceil(workers * 2).max(4096) } else { cols };
        let tile_rows = self.outer.div_ceil(workers * 4);
        Grid { together: 1, planes: 1, rows: self.outer, cols, tile_rows, tile_cols: tile_cols.max(1) }
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let cols = tile.cols.clone();
        for row in tile.rows.clone() {
            let out = tile.row_bytes(row);
            let mut start = 0;
            for (i, part) in self.parts.iter().enumerate() {
                let (low, high) = (cols.start.max(start), cols.end.min(start + part));
                if low < high {
                    let from = row * part + low - start;
                    let source = &inputs.bytes(i)[from * self.size..(from + high - low) * self.size];
                    out[(low - cols.start) * self.size..(high - cols.start) * self.size]
                        .copy_from_slice(source);
                }
                start += part;
            }
        }
        Ok(())
    }
}
