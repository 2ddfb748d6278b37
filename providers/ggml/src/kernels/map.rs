use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    simd::{Vectorized, vectorize},
};

/// A function of single f32 elements that ggml lacks or rounds too coarsely.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Function {
    /// x · sigmoid(alpha · x).
    Swish(f32),
    /// GELU by tanh.
    GeluTanh,
}

/// Applies a [`Function`] to each of `len` elements.
pub(crate) struct Map {
    pub(crate) function: Function,
    pub(crate) len: usize,
}

impl Kernel for Map {
    fn grid(&self, workers: usize) -> Grid {
        Grid::even(self.len, workers)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let x = &inputs.f32(0)[tile.cols.clone()];
        let out = tile.row(0);
        vectorize(Apply { function: self.function, x, out });
        Ok(())
    }
}

struct Apply<'a> {
    function: Function,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Vectorized for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Apply { function, x, out } = self;
        match function {
            Function::Swish(alpha) => each(x, out, |x| x / (1.0 + super::group_norm::exp(-alpha * x))),
            // ½ · (1 + tanh(u)) is sigmoid(2u).
            Function::GeluTanh => each(x, out, |x| {
                let u = 0.797_884_6 * (x + 0.044_715 * x * x * x);
                x / (1.0 + super::group_norm::exp(-2.0 * u))
            }),
        }
    }
}

#[inline(always)]
fn each(x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out = f(*x));
}

/// `x / sqrt(mean(x²) + epsilon) * scale` for `rows` rows of `len` elements; input 1 is the scale, one row.
pub(crate) struct RmsNorm {
    pub(crate) rows: usize,
    pub(crate) len: usize,
    pub(crate) epsilon: f32,
}

impl Kernel for RmsNorm {
    fn grid(&self, workers: usize) -> Grid {
        Grid::rows(self.rows, self.len, self.rows.div_ceil(workers * 4).max(4096 / self.len.max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (x, scale) = (inputs.f32(0), inputs.f32(1));
        for row in tile.rows.clone() {
            let x = &x[row * self.len..(row + 1) * self.len];
            vectorize(Row { x, scale, epsilon: self.epsilon, out: tile.row(row) });
        }
        Ok(())
    }
}

struct Row<'a> {
    x: &'a [f32],
    scale: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl Vectorized for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Row { x, scale, epsilon, out } = self;
        let mean = super::group_norm::sum(x, |x| x * x) / x.len() as f64;
        let factor = (1.0 / (mean + f64::from(epsilon)).sqrt()) as f32;
        out.iter_mut().zip(x.iter().zip(scale)).for_each(|(out, (x, scale))| *out = x * factor * scale);
    }
}
