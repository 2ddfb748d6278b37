use super::Window;
use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    simd::{Vectorized, vectorize},
};

/// Adds up what a transposed convolution spreads: input 0 is `[planes, kernel, window.output]`, a value for each place of the window
/// and each of its elements; the output is `[planes, window.input]`, each element the sum of what falls on it. Input 1, where there
/// is one, is an addend for each channel. The window moves over the output.
pub(crate) struct OverlapAdd {
    pub(crate) planes: usize,
    pub(crate) channels: usize,
    pub(crate) window: Window,
    pub(crate) bias: bool,
}

impl Kernel for OverlapAdd {
    fn grid(&self, workers: usize) -> Grid {
        let plane: usize = self.window.input.iter().product();
        Grid::rows(self.planes, plane, self.planes.div_ceil(workers * 4).max(4096 / plane))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let window = &self.window;
        let [height, width] = window.output;
        let taps = window.kernel[0] * window.kernel[1];
        for plane in tile.rows.clone() {
            let out = tile.row(plane);
            out.fill(if self.bias { inputs.f32(1)[plane % self.channels] } else { 0.0 });
            for tap in 0..taps {
                let from = &inputs.f32(0)[(plane * taps + tap) * height * width..][..height * width];
                let (ky, kx) = (tap / window.kernel[1], tap % window.kernel[1]);
                // Places of the window along the row whose element lies inside of the output.
                let inside = |x: &usize| window.source(1, *x, kx).is_some();
                let Some(first) = (0..width).find(inside) else { continue };
                let end = (first..width).rev().find(inside).map_or(first, |last| last + 1);
                let Some(to) = window.source(1, first, kx) else { continue };
                for (y, from) in from.chunks_exact(width).enumerate() {
                    let Some(row) = window.source(0, y, ky) else { continue };
                    let out = &mut out[row * window.input[1]..][..window.input[1]];
                    vectorize(Spread {
                        from: &from[first..end],
                        out: &mut out[to..],
                        step: window.stride[1],
                    });
                }
            }
        }
        Ok(())
    }
}

/// Adds elements to every `step`th one.
struct Spread<'a> {
    from: &'a [f32],
    out: &'a mut [f32],
    step: usize,
}

impl Vectorized for Spread<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        match self.step {
            1 => self.out.iter_mut().zip(self.from).for_each(|(out, x)| *out += x),
            step => self.out.iter_mut().step_by(step).zip(self.from).for_each(|(out, x)| *out += x),
        }
    }
}
