use super::Window;
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, vectorize},
};

/// The sum of a transposed convolution. Input 0 is `[planes, kernel, window.output]`: the products for each element of the window at each
/// of its places. The output is `[planes, window.input]`, over which the window moves. Each element is the sum of the products that
/// fall on it. The optional input 1 is an addend for each channel.
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
                // Whether the element of the window at a place along the row is inside the output.
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

/// Adds elements to every `step`th element.
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
