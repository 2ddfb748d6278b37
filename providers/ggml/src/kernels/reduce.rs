use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
};

/// Sums, or means, over some axes of an input that is read with strides, where the last axis that is kept is contiguous: its
/// elements are added side by side. In f64, so that the order makes no difference that f32 shows.
pub(crate) struct Reduce {
    /// The axes that are kept, but for the last.
    pub(crate) outer: (Vec<usize>, Vec<isize>),
    /// Elements of the last.
    pub(crate) run: usize,
    /// The axes that go.
    pub(crate) gone: (Vec<usize>, Vec<isize>),
    pub(crate) mean: bool,
}

/// Fewest elements of the last axis that a thread takes.
const LEAST: usize = 64;

impl Kernel for Reduce {
    fn grid(&self, workers: usize) -> Grid {
        let rows = shape::len(&self.outer.0);
        let tile_cols = self.run.div_ceil((2 * workers).div_ceil(rows)).max(LEAST);
        Grid { planes: 1, rows, cols: self.run, tile_rows: 1, tile_cols }
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (row, cols) = (tile.rows.start, tile.cols.clone());
        let start = shape::offset(row, &self.outer.0, &self.outer.1).unsigned_abs();
        let count = shape::len(&self.gone.0);
        let mut sums = vec![0f64; cols.len()];
        for i in 0..count {
            let from = start + shape::offset(i, &self.gone.0, &self.gone.1).unsigned_abs();
            let seen = &inputs.f32(0)[from + cols.start..from + cols.end];
            sums.iter_mut().zip(seen).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        let by = if self.mean { count as f64 } else { 1.0 };
        tile.row(row).iter_mut().zip(sums).for_each(|(out, sum)| *out = (sum / by) as f32);
        Ok(())
    }
}
