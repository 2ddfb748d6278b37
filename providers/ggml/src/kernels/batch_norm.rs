use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, vectorize},
};

/// BatchNormalization with known statistics. Input 0 is `[batch, channels, inner]`. Inputs 1 to 4 are scale, bias, mean and variance
/// for each channel.
pub(crate) struct BatchNorm {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) inner: usize,
    pub(crate) epsilon: f32,
}

impl Kernel for BatchNorm {
    fn grid(&self, workers: usize) -> Grid {
        let rows = self.batch * self.channels;
        Grid::rows(rows, self.inner, rows.div_ceil(workers * 4).max(4096 / self.inner))
    }

    fn can_be_over(&self) -> bool {
        true
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let [scale, bias, mean, variance] = [1, 2, 3, 4].map(|i| inputs.f32(i));
        for row in tile.rows.clone() {
            let channel = row % self.channels;
            let of = |values: &[f32]| f64::from(values[channel]);
            let factor = of(scale) / (of(variance) + f64::from(self.epsilon)).sqrt();
            let out = tile.row(row);
            if !inputs.is_over() {
                out.copy_from_slice(&inputs.f32(0)[row * self.inner..(row + 1) * self.inner]);
            }
            vectorize(Line { values: out, mean: mean[channel], factor: factor as f32, bias: bias[channel] });
        }
        Ok(())
    }
}

struct Line<'a> {
    values: &'a mut [f32],
    mean: f32,
    factor: f32,
    bias: f32,
}

impl Vectorized for Line<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        // Subtracting the mean first keeps the precision of large values near the mean.
        self.values.iter_mut().for_each(|x| *x = (*x - self.mean) * self.factor + self.bias);
    }
}
