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
