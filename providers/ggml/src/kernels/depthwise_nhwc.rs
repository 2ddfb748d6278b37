use super::{
    Activation, Panels, Window,
    activation::{self, Activate},
};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{
        Level,
        depthwise_row::{LANES, Row},
        vectorize,
    },
};

/// Depthwise convolution with channels last. Inputs: `[batch, h, w, channels]`, f32 weights in [`DepthwiseNhwc::panels`] and, with
/// `bias`, `[channels]`.
pub(crate) struct DepthwiseNhwc {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) window: Window,
    pub(crate) bias: bool,
    pub(crate) activation: Option<Activation>,
}

impl DepthwiseNhwc {
    /// The layout of filters of `taps` elements: for each [`LANES`] channels the first tap, then the second, and so on.
    pub(crate) fn panels(channels: usize, taps: usize) -> Panels {
        Panels::columns([1, channels, taps], LANES)
    }
}

impl Kernel for DepthwiseNhwc {
    fn grid(&self, _: usize) -> Grid {
        let [height, width] = self.window.output;
        let rows = self.batch * height;
        Grid::rows(rows, width * self.channels, 1)
    }

    fn multiplications(&self) -> usize {
        let taps: usize = self.window.kernel.iter().product();
        let outputs: usize = self.window.output.iter().product();
        self.batch * self.channels * outputs * taps
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let x = inputs.f32(0);
        let Window { input, output, kernel, stride, dilation, pad } = &self.window;
        let weights = inputs.f32(1).as_chunks::<LANES>().0;
        let bias = self.bias.then(|| inputs.f32(2));
        let bounds = self.activation.and_then(activation::bounds);
        for row in tile.rows.clone() {
            let (image, y) = (row / output[0], row % output[0]);
            let from = y * stride[0];
            let rows = inside(from, pad[0], dilation[0], kernel[0], input[0]);
            let row_len = input[1] * self.channels;
            // Empty if all rows are outside.
            let first = (from + rows[0] * dilation[0]).saturating_sub(pad[0]).min(input[0]);
            let out = tile.row(row);
            let row = Row {
                seen: &x[(image * input[0] + first) * row_len..(image + 1) * input[0] * row_len],
                rows: rows[1] - rows[0],
                row_step: dilation[0] * row_len,
                channels: self.channels,
                columns: input[1],
                pad: pad[1],
                width: kernel[1],
                dilation: dilation[1],
                stride: stride[1],
                weights: &weights[rows[0] * kernel[1]..],
                taps: kernel[0] * kernel[1],
                bias,
                clip: bounds.unwrap_or([f32::NEG_INFINITY, f32::INFINITY]),
            };
            row.compute(Level::detect(), out);
            if let Some(activation) = self.activation.filter(|_| bounds.is_none()) {
                vectorize(Activate(activation, out));
            }
        }
        Ok(())
    }
}

/// The first tap inside the input, and the first one after it, of a window that begins at `start` in the padded input.
fn inside(start: usize, pad: usize, dilation: usize, kernel: usize, input: usize) -> [usize; 2] {
    let first = pad.saturating_sub(start).div_ceil(dilation).min(kernel);
    [first, (pad + input).saturating_sub(start).div_ceil(dilation).clamp(first, kernel)]
}
