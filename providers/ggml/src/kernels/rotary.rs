use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
    simd::{Vectorized, mul_add, vectorize},
};

/// Rotates neighbours: `(a, b)` in rows of `x` becomes `(a cos − b sin, b cos + a sin)`, with factors of their own for each element.
/// Inputs: x (contiguous), cos and sin (f32, read with strides; elements of a row are contiguous).
pub(crate) struct Rotary {
    /// The dimensions of x without the last one.
    pub(crate) dims: Vec<usize>,
    /// Elements of a row; even.
    pub(crate) cols: usize,
    /// The strides of cos and of sin for `dims`.
    pub(crate) strides: [Vec<isize>; 2],
}

impl Kernel for Rotary {
    fn grid(&self, workers: usize) -> Grid {
        let rows = shape::len(&self.dims);
        Grid::rows(rows, self.cols, rows.div_ceil(workers * 4).max(4096 / self.cols.max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let factors = |i: usize, row: usize| {
            let at = shape::offset(row, &self.dims, &self.strides[i]).unsigned_abs();
            &inputs.f32(i + 1)[at..][..self.cols]
        };
        for row in tile.rows.clone() {
            let x = &inputs.f32(0)[row * self.cols..][..self.cols];
            vectorize(Row { x, cos: factors(0, row), sin: factors(1, row), out: tile.row(row) });
        }
        Ok(())
    }
}

struct Row<'a> {
    x: &'a [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    out: &'a mut [f32],
}

impl Vectorized for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (x, cos, sin) =
            (self.x.as_chunks::<2>().0, self.cos.as_chunks::<2>().0, self.sin.as_chunks::<2>().0);
        for (((out, [a, b]), cos), sin) in self.out.as_chunks_mut::<2>().0.iter_mut().zip(x).zip(cos).zip(sin)
        {
            *out = [mul_add::<FMA>(-b, sin[0], a * cos[0]), mul_add::<FMA>(*a, sin[1], b * cos[1])];
        }
    }
}
