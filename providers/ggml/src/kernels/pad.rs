use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
};
use std::ops::Range;

/// The source of each position along an axis of the output. `None` is the fill value.
type Sources = Vec<Option<usize>>;

/// ONNX Pad: adds elements around a tensor, either a fill value or elements of the tensor itself.
pub(crate) struct Pad {
    input: Vec<usize>,
    /// The sources along each axis but the last.
    outer: Vec<Sources>,
    /// Runs of the last axis: columns of the output, and the column of the input where the source begins.
    runs: Vec<(Range<usize>, Option<usize>)>,
    cols: usize,
    /// The fill value as stored.
    fill: Vec<u8>,
}

impl Pad {
    /// For an input of this shape, with at least one dimension. `sources` has one entry for each axis.
    pub(crate) fn new(input: &[usize], mut sources: Vec<Sources>, fill: Vec<u8>) -> Option<Self> {
        let last = sources.pop()?;
        let mut runs: Vec<(Range<usize>, Option<usize>)> = Vec::new();
        for (col, source) in last.iter().enumerate() {
            let goes_on = runs.last_mut().filter(|(cols, from)| match (from, source) {
                (Some(from), Some(source)) => *from + cols.len() == *source,
                (None, None) => true,
                _ => false,
            });
            match goes_on {
                Some((cols, _)) => cols.end += 1,
                None => runs.push((col..col + 1, *source)),
            }
        }
        Some(Pad { input: input.to_vec(), outer: sources, runs, cols: last.len(), fill })
    }

    /// The index of the input element where the source of a row begins.
    fn row(&self, mut row: usize) -> Option<usize> {
        let strides = shape::strides(&self.input);
        let mut start = 0;
        for (sources, stride) in self.outer.iter().zip(&strides).rev() {
            start += sources[row % sources.len()]? * stride;
            row /= sources.len();
        }
        Some(start)
    }
}

impl Kernel for Pad {
    fn grid(&self, workers: usize) -> Grid {
        let rows = self.outer.iter().map(Vec::len).product::<usize>();
        Grid::rows(rows, self.cols, rows.div_ceil(workers * 4))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (bytes, size) = (inputs.bytes(0), self.fill.len());
        for row in tile.rows.clone() {
            let start = self.row(row);
            let out = tile.row_bytes(row);
            for (cols, source) in &self.runs {
                let out = &mut out[cols.start * size..cols.end * size];
                match (start, source) {
                    (Some(start), Some(source)) => {
                        let from = (start + source) * size;
                        out.copy_from_slice(&bytes[from..from + out.len()]);
                    }
                    _ => out.chunks_exact_mut(size).for_each(|element| element.copy_from_slice(&self.fill)),
                }
            }
        }
        Ok(())
    }
}
