use super::group_norm::Moments;
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, vectorize},
};

/// Layer normalization: `(x - mean) / sqrt(variance + epsilon) * scale + bias` of each row, or without centring
/// `x / sqrt(mean of x² + epsilon) * scale`. Inputs: `x`, and optionally `scale` and `bias` with the length of a row.
pub(crate) struct LayerNorm {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) epsilon: f32,
    pub(crate) centred: bool,
    pub(crate) scale: bool,
    pub(crate) bias: bool,
}

impl Kernel for LayerNorm {
    fn grid(&self, workers: usize) -> Grid {
        Grid::rows(self.rows, self.cols, self.rows.div_ceil(workers * 4).max(4096 / self.cols.max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let scale = self.scale.then(|| inputs.f32(1));
        let bias = self.bias.then(|| inputs.f32(1 + usize::from(self.scale)));
        for row in tile.rows.clone() {
            let x = &inputs.f32(0)[row * self.cols..][..self.cols];
            let out = tile.row(row);
            vectorize(Row { x, epsilon: self.epsilon, centred: self.centred, scale, bias, out });
        }
        Ok(())
    }
}

struct Row<'a> {
    x: &'a [f32],
    epsilon: f32,
    centred: bool,
    scale: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    out: &'a mut [f32],
}

impl Vectorized for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Row { x, epsilon, centred, scale, bias, out } = self;
        let (mean, variance) = Moments(x).run::<FMA>();
        let (centre, square) = if centred { (mean, variance) } else { (0.0, variance + mean * mean) };
        let factor = (1.0 / (square + f64::from(epsilon)).sqrt()) as f32;
        let centre = centre as f32;
        out.iter_mut().zip(x).for_each(|(out, x)| *out = (x - centre) * factor);
        if let Some(scale) = scale {
            out.iter_mut().zip(scale).for_each(|(out, scale)| *out *= scale);
        }
        if let Some(bias) = bias {
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        }
    }
}
