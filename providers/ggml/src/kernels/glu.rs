use super::{Activation, activation::apply};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, vectorize},
};

/// A gated linear unit: rows of `2 * cols` elements in two halves. Multiplies the activation of one half by the other half.
pub(crate) struct Glu {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The index of the half that is activated.
    pub(crate) gate: usize,
    pub(crate) activation: Activation,
}

impl Kernel for Glu {
    fn grid(&self, workers: usize) -> Grid {
        Grid::rows(self.rows, self.cols, self.rows.div_ceil(workers * 4).max(4096 / self.cols.max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        for row in tile.rows.clone() {
            let (first, second) = inputs.f32(0)[2 * row * self.cols..][..2 * self.cols].split_at(self.cols);
            let (gate, x) = if self.gate == 0 { (first, second) } else { (second, first) };
            vectorize(Row { activation: self.activation, gate, x, out: tile.row(row) });
        }
        Ok(())
    }
}

struct Row<'a> {
    activation: Activation,
    gate: &'a [f32],
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Vectorized for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        self.out.copy_from_slice(self.gate);
        apply::<FMA>(self.activation, self.out);
        self.out.iter_mut().zip(self.x).for_each(|(out, x)| *out *= x);
    }
}
