use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
};

/// Copies an input read with arbitrary strides: transposition, slices with any step, repetition, nearest
/// upscaling by whole factors, and what can be composed of them.
pub(crate) struct StridedCopy {
    /// Shape of the output, neighbouring dimensions merged where possible.
    dims: Vec<usize>,
    /// Stride in the input for each of `dims`, in elements.
    strides: Vec<isize>,
    /// Element of the input that is the output's first.
    start: usize,
    /// Bytes of an element.
    size: usize,
    /// Number of inner dimensions that make a row: two where the innermost alone is short.
    inner: usize,
}

impl StridedCopy {
    /// A copy with the given output shape. `None` where an element outside `input_len` would be read.
    pub(crate) fn new(
        dims: &[usize],
        strides: &[isize],
        start: usize,
        size: usize,
        input_len: usize,
    ) -> Option<Self> {
        // The lowest and highest element that is read.
        let (mut low, mut high) = (start as i128, start as i128);
        for (d, stride) in dims.iter().zip(strides) {
            let reach = d.checked_sub(1)? as i128 * *stride as i128;
            low += reach.min(0);
            high += reach.max(0);
        }
        if low < 0 || high >= input_len as i128 {
            return None;
        }
        let (dims, mut strides) = shape::coalesce(dims, &[strides]);
        let inner = if dims.len() > 1 && dims[dims.len() - 1] < 16 { 2 } else { 1 };
        Some(StridedCopy { dims, strides: strides.remove(0), start, size, inner })
    }
    /// Whether the output is a contiguous run of the input; then the first element of that run.
    pub(crate) fn as_run(&self) -> Option<usize> {
        (self.dims.len() == 1 && (self.strides[0] == 1 || self.dims[0] == 1)).then_some(self.start)
    }
    fn row_len(&self) -> usize {
        self.dims[self.dims.len() - self.inner..].iter().product()
    }
}

/// Columns copied before the next row's turn, so that input lines are still in cache when the neighbouring row
/// of a transposition needs them.
const BLOCK: usize = 16;

impl Kernel for StridedCopy {
    fn grid(&self, workers: usize) -> Grid {
        let cols = self.row_len();
        let rows = shape::len(&self.dims) / cols;
        let tile_rows = rows.div_ceil(workers * 4).min((1 << 16) / cols.max(1)).max(1);
        Grid::rows(rows, cols, tile_rows.max(BLOCK.min(rows)))
    }

    fn tile(&self, inputs: &Inputs<'_>, tile: Tile<'_>) -> Result<(), String> {
        match self.size {
            1 => self.copy::<1>(inputs.bytes(0), tile),
            2 => self.copy::<2>(inputs.bytes(0), tile),
            4 => self.copy::<4>(inputs.bytes(0), tile),
            8 => self.copy::<8>(inputs.bytes(0), tile),
            size => return Err(format!("elements of {size} bytes")),
        }
        Ok(())
    }
}

impl StridedCopy {
    fn copy<const SIZE: usize>(&self, input: &[u8], mut tile: Tile<'_>) {
        let (input, _) = input.as_chunks::<SIZE>();
        let outer = self.dims.len() - self.inner;
        let base = |row: usize| {
            self.start.wrapping_add_signed(shape::offset(row, &self.dims[..outer], &self.strides[..outer]))
        };
        let last = self.dims.len() - 1;
        let (len, stride) = (self.dims[last], self.strides[last]);
        if self.inner == 2 {
            let step = self.strides[last - 1];
            for row in tile.rows.clone() {
                let start = base(row);
                let (out, _) = tile.row_bytes(row).as_chunks_mut::<SIZE>();
                for (i, out) in out.chunks_exact_mut(len).enumerate() {
                    let start = start.wrapping_add_signed(i as isize * step);
                    for (j, out) in out.iter_mut().enumerate() {
                        *out = input[start.wrapping_add_signed(j as isize * stride)];
                    }
                }
            }
        } else if stride == 1 {
            for row in tile.rows.clone() {
                let start = base(row);
                let (out, _) = tile.row_bytes(row).as_chunks_mut::<SIZE>();
                out.copy_from_slice(&input[start..start + len]);
            }
        } else {
            let starts: Vec<usize> = tile.rows.clone().map(base).collect();
            for block in (0..len).step_by(BLOCK) {
                let end = (block + BLOCK).min(len);
                for (row, start) in tile.rows.clone().zip(&starts) {
                    let (out, _) = tile.row_bytes(row).as_chunks_mut::<SIZE>();
                    for (j, out) in (block..end).zip(&mut out[block..end]) {
                        *out = input[start.wrapping_add_signed(j as isize * stride)];
                    }
                }
            }
        }
    }
}
