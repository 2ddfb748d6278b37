use super::{Activation, Window, activation::Activate, widen};
use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    simd::{Vectorized, vectorize},
};

/// Convolution with one input and one output channel in each group: inputs `[batch, channels, h, w]`, weights
/// `[channels, kh, kw]` (f32, f16 or bf16) and, with `bias`, `[channels]`.
pub(crate) struct DepthwiseConv {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) window: Window,
    pub(crate) bias: bool,
    pub(crate) activation: Option<Activation>,
}

impl Kernel for DepthwiseConv {
    fn grid(&self, workers: usize) -> Grid {
        let rows = self.batch * self.channels;
        Grid::rows(rows, self.window.output.iter().product(), rows.div_ceil(workers * 4))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let pixels: usize = self.window.input.iter().product();
        let taps: usize = self.window.kernel.iter().product();
        let mut buffer = Vec::new();
        for plane in tile.rows.clone() {
            let channel = plane % self.channels;
            let weights = widen(inputs, 1, channel * taps..(channel + 1) * taps, &mut buffer);
            let bias = if self.bias { inputs.f32(2)[channel] } else { 0.0 };
            let x = &inputs.f32(0)[plane * pixels..(plane + 1) * pixels];
            vectorize(Plane { window: &self.window, x, weights, bias, out: tile.row(plane) });
            if let Some(activation) = self.activation {
                vectorize(Activate(activation, tile.row(plane)));
            }
        }
        Ok(())
    }
}

struct Plane<'a> {
    window: &'a Window,
    x: &'a [f32],
    weights: &'a [f32],
    bias: f32,
    out: &'a mut [f32],
}

impl Vectorized for Plane<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Plane { window, x, weights, bias, out } = self;
        let [kh, kw] = window.kernel;
        let stride = window.stride[1];
        for (oy, out) in out.chunks_exact_mut(window.output[1]).enumerate() {
            out.fill(bias);
            for ky in 0..kh {
                let Some(iy) = window.source(0, oy, ky) else { continue };
                let row = &x[iy * window.input[1]..(iy + 1) * window.input[1]];
                for kx in 0..kw {
                    let cols = window.valid_cols(kx);
                    if cols.is_empty() {
                        continue;
                    }
                    let weight = weights[ky * kw + kx];
                    let source = &row[cols.start * stride + kx * window.dilation[1] - window.pad[1]..];
                    let out = &mut out[cols];
                    if stride == 1 {
                        out.iter_mut().zip(source).for_each(|(out, x)| *out += weight * x);
                    } else {
                        out.iter_mut()
                            .zip(source.iter().step_by(stride))
                            .for_each(|(out, x)| *out += weight * x);
                    }
                }
            }
        }
    }
}
