use super::{
    Activation, Panels, Window,
    activation::{self, Activate},
};
use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    depthwise::{LANES, Row},
    simd::{Level, vectorize},
};

/// Convolution with one input and one output channel in each group, channels last: inputs `[batch, h, w, channels]`, weights in
/// [`NhwcDepthwise::panels`], f32, and, with `bias`, `[channels]`.
pub(crate) struct NhwcDepthwise {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) window: Window,
    pub(crate) bias: bool,
    pub(crate) activation: Option<Activation>,
}

impl NhwcDepthwise {
    /// How filters of `taps` elements are kept: of [`LANES`] channels the first tap, then the second.
    pub(crate) fn panels(channels: usize, taps: usize) -> Panels {
        Panels::columns([1, channels, taps], LANES)
    }
}

impl Kernel for NhwcDepthwise {
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
        self.compute(inputs.f32(0), (inputs, 1), &mut tile);
        Ok(())
    }
}

impl NhwcDepthwise {
    /// Rows of the outputs of these images and the inputs from one on.
    pub(super) fn compute(&self, x: &[f32], (inputs, filters): (&Inputs<'_>, usize), tile: &mut Tile<'_>) {
        let Window { input, output, kernel, stride, dilation, pad } = &self.window;
        let weights = inputs.f32(filters).as_chunks::<LANES>().0;
        let bias = self.bias.then(|| inputs.f32(filters + 1));
        let bounds = self.activation.and_then(activation::bounds);
        for row in tile.rows.clone() {
            let (image, y) = (row / output[0], row % output[0]);
            let from = y * stride[0];
            let rows = inside(from, pad[0], dilation[0], kernel[0], input[0]);
            let row_len = input[1] * self.channels;
            // Nothing where all rows are outside.
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
    }
}

/// From and to which tap of a window at `start` of the padded input it is inside the input.
fn inside(start: usize, pad: usize, dilation: usize, kernel: usize, input: usize) -> [usize; 2] {
    let first = pad.saturating_sub(start).div_ceil(dilation).min(kernel);
    [first, (pad + input).saturating_sub(start).div_ceil(dilation).clamp(first, kernel)]
}
