use super::Window;
use crate::ffi::{Grid, Inputs, Kernel, Tile};

/// The reduction of the elements under the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolKind {
    /// The largest. Padding does not count.
    Max,
    /// The mean of the elements inside the input.
    Average,
    /// The mean with padding counted as zeros.
    AverageWithPadding,
}

/// Pooling of `[planes, height, width]`.
pub(crate) struct Pool {
    pub(crate) kind: PoolKind,
    pub(crate) planes: usize,
    pub(crate) window: Window,
    /// The padding at the bottom and the right that counts for [`PoolKind::AverageWithPadding`].
    pub(crate) end_pad: [usize; 2],
}

impl Kernel for Pool {
    fn grid(&self, workers: usize) -> Grid {
        Grid::rows(self.planes, self.window.output.iter().product(), self.planes.div_ceil(workers * 4))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let window = &self.window;
        let [height, width] = window.input;
        for plane in tile.rows.clone() {
            let x = &inputs.f32(0)[plane * height * width..(plane + 1) * height * width];
            for (i, out) in tile.row(plane).iter_mut().enumerate() {
                let at = [i / window.output[1], i % window.output[1]];
                *out = self.pool(x, at);
            }
        }
        Ok(())
    }
}

impl Pool {
    fn pool(&self, x: &[f32], at: [usize; 2]) -> f32 {
        let window = &self.window;
        let (mut max, mut sum, mut inside) = (f32::NEG_INFINITY, 0.0, 0usize);
        for ky in 0..window.kernel[0] {
            let Some(iy) = window.source(0, at[0], ky) else { continue };
            for kx in 0..window.kernel[1] {
                let Some(ix) = window.source(1, at[1], kx) else { continue };
                let value = x[iy * window.input[1] + ix];
                max = if value > max || value.is_nan() { value } else { max };
                sum += value;
                inside += 1;
            }
        }
        match self.kind {
            PoolKind::Max => max,
            PoolKind::Average => sum / inside as f32,
            // With `ceil_mode`, a window may reach past the padding. Elements there do not count.
            PoolKind::AverageWithPadding => {
                let counted = |axis: usize| {
                    let padded = window.pad[axis] + window.input[axis] + self.end_pad[axis];
                    let start = at[axis] * window.stride[axis];
                    (0..window.kernel[axis]).filter(|k| start + k * window.dilation[axis] < padded).count()
                };
                sum / (counted(0) * counted(1)) as f32
            }
        }
    }
}
