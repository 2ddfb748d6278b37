//! `C += scale · up · down` for an inner dimension that is small: the product of a LoRA's factors on a tile of a weight.
//!
//! A general matrix product packs both factors for each call and walks C once for each few hundred steps of the inner
//! dimension. Here one factor is packed once for the whole weight, the other is read in place, and C is touched once.

use super::{Block, Half};

/// Columns of a panel, and of the tiles it is multiplied into.
pub(crate) const PANEL: usize = 64;

/// The right factor, `down [rank, columns]`, cut into panels of [`PANEL`] columns, the last one padded with zeros.
#[derive(Clone, Debug)]
pub(crate) struct Panels {
    rank: usize,
    columns: usize,
    /// `[panels, rank, PANEL]`.
    values: Vec<f32>,
}

impl Panels {
    /// All elements, with zeros.
    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

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
    /// Each value is `tile + scale · Σ`, summed from the first to the last element of the inner dimension.
    pub(crate) fn add(&self, panel: usize, up: &[f32], scale: f32, tile: &mut [f32], stride: usize) {
        let factors = self.factors(panel, up, scale);
        let rows = up.len() / self.rank;
        assert!(
            rows == 0 || (rows - 1) * stride + PANEL <= tile.len(),
            "the tile has fewer rows than the factor"
        );
        #[cfg(target_arch = "x86_64")]
        if super::x86::add_product(factors, tile, stride) {
            return;
        }
        add_plainly(factors, tile, stride);
    }

    /// The change of one panel of columns, for some rows: `scale · up · panel`; `up [rows, rank]`.
    pub(crate) fn factors<'a>(&'a self, panel: usize, up: &'a [f32], scale: f32) -> Factors<'a> {
        let panel = &self.values[panel * self.rank * PANEL..][..self.rank * PANEL];
        Factors { panel, up, rank: self.rank, scale }
    }
}

/// The change of a tile: `scale · up · panel`.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a> {
    /// `[rank, PANEL]`.
    pub(super) panel: &'a [f32],
    /// `[rows, rank]`.
    pub(super) up: &'a [f32],
    pub(super) rank: usize,
    pub(super) scale: f32,
}

impl Factors<'_> {
    /// As [`Panels::add`], from halves to halves without a tile in f32 between them, each value rounded once to nearest.
    /// Returns false where the processor has no such loops or a result is not finite; `to` then holds any values.
    pub(crate) fn merge_halves(self, half: Half, from: &[u8], to: &mut [u8], block: Block) -> bool {
        #[cfg(target_arch = "x86_64")]
        if block.columns == PANEL && block.rows * self.rank == self.up.len() {
            let (from, to) = (from.as_chunks().0, to.as_chunks_mut().0);
            block.check(from.len(), to.len());
            return super::x86::merge_halves(half, self, from, to, block);
        }
        let _ = (half, from, to, block);
        false
    }
}

/// The product for any processor.
fn add_plainly(Factors { panel, up, rank, scale }: Factors<'_>, tile: &mut [f32], stride: usize) {
    /// Columns at a time: their sums stay in registers.
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
    use super::{
        super::{narrow, widen},
        *,
    };

    #[test]
    fn products_are_those_of_f64_with_and_without_vectors() {
        let (rank, rows, columns) = (5, 7, 100);
        let down: Vec<f32> = (0..rank * columns).map(|i| (i as f32 * 0.37).sin()).collect();
        let up: Vec<f32> = (0..rows * rank).map(|i| (i as f32 * 0.73).cos()).collect();
        let panels = Panels::new(&down, rank, columns);
        for panel in 0..2 {
            let (mut best, mut plain) = (vec![1f32; rows * PANEL], vec![1f32; rows * PANEL]);
            panels.add(panel, &up, 0.7, &mut best, PANEL);
            add_plainly(panels.factors(panel, &up, 0.7), &mut plain, PANEL);
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

    #[test]
    fn halves_are_merged_as_by_way_of_f32() {
        let (rank, rows, columns) = (5, 7, 2 * PANEL);
        let down: Vec<f32> = (0..rank * columns).map(|i| (i as f32 * 0.37).sin()).collect();
        let up: Vec<f32> = (0..rows * rank).map(|i| (i as f32 * 0.73).cos()).collect();
        let panels = Panels::new(&down, rank, columns);
        let block = Block { rows, columns: PANEL, from_stride: columns, to_stride: PANEL + 3 };
        for half in [Half::F16, Half::BF16] {
            let values: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.11).sin()).collect();
            let mut base = vec![0u8; 2 * values.len()];
            narrow(half, &values, &mut base, Block::line(values.len()));
            let from = &base[2 * PANEL..];
            let room = 2 * rows * block.to_stride;
            let (mut direct, mut expected) = (vec![0xaau8; room], vec![0xaau8; room]);
            let mut tile = vec![0f32; rows * PANEL];
            widen(half, from, &mut tile, Block { to_stride: PANEL, ..block });
            panels.add(1, &up, 0.7, &mut tile, PANEL);
            assert!(narrow(half, &tile, &mut expected, Block { from_stride: PANEL, ..block }));
            if panels.factors(1, &up, 0.7).merge_halves(half, from, &mut direct, block) {
                assert_eq!(direct, expected, "{half:?}");
            } else {
                #[cfg(target_arch = "x86_64")]
                assert!(!is_x86_feature_detected!("avx2"));
            }
            // Values too large, infinities and NaNs are reported at every place.
            for (place, strange) in [(0, f32::INFINITY), (PANEL - 1, f32::NAN), (9, -f32::NAN)] {
                let mut strange_base = base.clone();
                let at = 2 * (3 * columns + PANEL + place);
                narrow(half, &[strange], &mut strange_base[at..], Block::line(1));
                let from = &strange_base[2 * PANEL..];
                assert!(!panels.factors(1, &up, 0.7).merge_halves(half, from, &mut direct, block));
            }
            let large: Vec<f32> = up.iter().map(|v| 1e38 * v).collect();
            assert!(!panels.factors(1, &large, 1e3).merge_halves(half, from, &mut direct, block), "{half:?}");
        }
    }
}
