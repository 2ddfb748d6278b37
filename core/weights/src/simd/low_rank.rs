//! `C += scale · up · down` for an inner dimension that is small: the product of a LoRA's factors on a tile of a weight.
//!
//! A general matrix product packs both factors for each call and walks C once for each few hundred steps of the inner
//! dimension. Here one factor is packed once for the whole weight, the other is read as it lies, and C is touched once.

/// Columns of a panel, and of the tiles it is multiplied into.
pub(crate) const PANEL: usize = 64;

/// The right factor, `down [rank, columns]`, cut into panels of [`PANEL`] columns; the last one is filled up with zeros.
#[derive(Clone, Debug)]
pub(crate) struct Panels {
    rank: usize,
    columns: usize,
    /// `[panels, rank, PANEL]`.
    values: Vec<f32>,
}

impl Panels {
    /// Packs a matrix `[rank, columns]`, row-major. Both are at least 1.
    pub(crate) fn new(down: &[f32], rank: usize, columns: usize) -> Self {
        let mut values = vec![0f32; columns.div_ceil(PANEL) * rank * PANEL];
        for (panel, target) in values.chunks_exact_mut(rank * PANEL).enumerate() {
            let first = panel * PANEL;
            let width = PANEL.min(columns - first);
            for (row, target) in down.chunks_exact(columns).zip(target.chunks_exact_mut(PANEL)) {
                target[..width].copy_from_slice(&row[first..][..width]);
            }
        }
        Panels { rank, columns, values }
    }

    /// The inner dimension.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Columns of the factor.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Adds `scale · up · panel` to a tile of [`PANEL`] columns whose rows begin `stride` apart; `up [rows, rank]`.
    /// Each value is `tile + scale · Σ`, the sum taken from the first to the last of the inner dimension.
    pub(crate) fn add(&self, panel: usize, up: &[f32], scale: f32, tile: &mut [f32], stride: usize) {
        let panel = &self.values[panel * self.rank * PANEL..][..self.rank * PANEL];
        let rows = up.len() / self.rank;
        assert!(
            rows == 0 || (rows - 1) * stride + PANEL <= tile.len(),
            "the tile has fewer rows than the factor"
        );
        #[cfg(target_arch = "x86_64")]
        if super::x86::add_product(panel, self.rank, up, scale, tile, stride) {
            return;
        }
        add_plainly(panel, self.rank, up, scale, tile, stride);
    }
}

/// The product for any processor.
fn add_plainly(panel: &[f32], rank: usize, up: &[f32], scale: f32, tile: &mut [f32], stride: usize) {
    /// Columns at a time, so that their sums stay in registers.
    const WIDTH: usize = 16;
    for (up, row) in up.chunks_exact(rank).zip(tile.chunks_mut(stride)) {
        for first in (0..PANEL).step_by(WIDTH) {
            let mut sums = [0f32; WIDTH];
            for (factor, values) in up.iter().zip(panel.chunks_exact(PANEL)) {
                let values = &values[first..][..WIDTH];
                sums.iter_mut()
                    .zip(values)
                    .for_each(|(sum, value)| *sum = multiply_add(*factor, *value, *sum));
            }
            let target = &mut row[first..][..WIDTH];
            target.iter_mut().zip(sums).for_each(|(value, sum)| *value = multiply_add(scale, sum, *value));
        }
    }
}

/// Fused where that is an instruction, not a call.
#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_f64_with_and_without_vectors() {
        let (rank, rows, columns) = (5, 7, 100);
        let down: Vec<f32> = (0..rank * columns).map(|i| (i as f32 * 0.37).sin()).collect();
        let up: Vec<f32> = (0..rows * rank).map(|i| (i as f32 * 0.73).cos()).collect();
        let panels = Panels::new(&down, rank, columns);
        for panel in 0..2 {
            let (mut best, mut plain) = (vec![1f32; rows * PANEL], vec![1f32; rows * PANEL]);
            panels.add(panel, &up, 0.7, &mut best, PANEL);
            let values = &panels.values[panel * rank * PANEL..][..rank * PANEL];
            add_plainly(values, rank, &up, 0.7, &mut plain, PANEL);
            for place in 0..rows * PANEL {
                let (row, column) = (place / PANEL, panel * PANEL + place % PANEL);
                let value =
                    |k: usize| if column < columns { f64::from(down[k * columns + column]) } else { 0.0 };
                let sum: f64 = (0..rank).map(|k| f64::from(up[row * rank + k]) * value(k)).sum();
                let expected = 1.0 + f64::from(0.7f32) * sum;
                for got in [best[place], plain[place]] {
                    // Each of the steps rounds sums below 5.
                    assert!((f64::from(got) - expected).abs() < 1e-5 / 5.0, "{place}: {got} {expected}");
                }
            }
        }
    }
}
