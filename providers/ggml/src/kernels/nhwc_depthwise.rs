use super::{Activation, Panels, Window, activation::apply};
use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    simd::{Vectorized, mul_add, vectorize},
};

/// Channels that are computed at a time.
const LANES: usize = 16;
/// Neighbouring outputs of these channels: their sums hide each other's latency.
const OUTPUTS: usize = 4;

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
    fn grid(&self, workers: usize) -> Grid {
        let [height, width] = self.window.output;
        let rows = self.batch * height;
        Grid::rows(rows, width * self.channels, rows.div_ceil(workers * 4))
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
        let weights = inputs.f32(filters).as_chunks::<LANES>().0;
        let bias = self.bias.then(|| inputs.f32(filters + 1));
        for row in tile.rows.clone() {
            vectorize(Line { conv: self, x, weights, bias, row, out: tile.row(row) });
        }
    }
}

/// A row of the output.
struct Line<'a> {
    conv: &'a NhwcDepthwise,
    x: &'a [f32],
    /// Of [`LANES`] channels each tap, then of the next.
    weights: &'a [[f32; LANES]],
    bias: Option<&'a [f32]>,
    /// Of all images.
    row: usize,
    out: &'a mut [f32],
}

impl Vectorized for Line<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Window { input, output, kernel, stride, dilation, pad } = &self.conv.window;
        let channels = self.conv.channels;
        let (image, y) = (self.row / output[0], self.row % output[0]);
        let pixels = input[0] * input[1];
        let image = &self.x[image * pixels * channels..][..pixels * channels];
        let rows = inside(y * stride[0], pad[0], dilation[0], kernel[0], input[0]);
        let mut x = 0;
        while x < output[1] {
            let columns = inside(x * stride[1], pad[1], dilation[1], kernel[1], input[1]);
            let last = x + OUTPUTS - 1;
            let several = last < output[1]
                && columns == [0, kernel[1]]
                && inside(last * stride[1], pad[1], dilation[1], kernel[1], input[1]) == columns;
            // Before the image where the window begins there; not where a tap is inside.
            let row = (y * stride[0]).wrapping_sub(pad[0]).wrapping_mul(input[1]);
            let first = row.wrapping_add(x * stride[1]).wrapping_sub(pad[1]).wrapping_mul(channels);
            let mut window = Seen {
                image,
                first,
                tap_steps: [dilation[0] * input[1] * channels, dilation[1] * channels],
                output_step: stride[1] * channels,
                rows,
                columns,
                width: kernel[1],
            };
            let out = &mut self.out[x * channels..];
            let mut channel = 0;
            for weights in self.weights.chunks_exact(kernel[0] * kernel[1]) {
                let some = LANES.min(channels - channel);
                let bias = self.bias.map_or([0.0; LANES], |bias| lanes(&bias[channel..][..some]));
                if several && some == LANES {
                    let mut sums = window.sums::<FMA, OUTPUTS>(weights, bias, LANES);
                    if let Some(activation) = self.conv.activation {
                        apply::<FMA>(activation, sums.as_flattened_mut());
                    }
                    for i in 0..OUTPUTS {
                        out[i * channels + channel..][..LANES].copy_from_slice(&sums[i]);
                    }
                } else {
                    for i in 0..if several { OUTPUTS } else { 1 } {
                        let at = Seen { first: window.first.wrapping_add(i * window.output_step), ..window };
                        // With a number that is known the lanes stay in a register.
                        let mut sums = match some {
                            LANES => at.sums::<FMA, 1>(weights, bias, LANES),
                            _ => at.sums::<FMA, 1>(weights, bias, some),
                        };
                        if let Some(activation) = self.conv.activation {
                            apply::<FMA>(activation, sums.as_flattened_mut());
                        }
                        out[i * channels + channel..][..some].copy_from_slice(&sums[0][..some]);
                    }
                }
                channel += some;
                window.first = window.first.wrapping_add(some);
            }
            x += if several { OUTPUTS } else { 1 };
        }
    }
}

/// What neighbouring outputs see of [`LANES`] channels.
#[derive(Clone, Copy)]
struct Seen<'a> {
    image: &'a [f32],
    /// Where the first output's window begins.
    first: usize,
    /// From a row of the window to the next, and from a column to the next.
    tap_steps: [usize; 2],
    output_step: usize,
    /// Rows and columns of the window that are inside the image, each from and to.
    rows: [usize; 2],
    columns: [usize; 2],
    /// Columns of the window.
    width: usize,
}

// Loops over numbers, and sums that are values: neither iterators nor sums behind a reference stay in wide registers.
impl Seen<'_> {
    #[inline(always)]
    fn tap(&self, ky: usize, kx: usize) -> usize {
        self.first.wrapping_add(ky * self.tap_steps[0] + kx * self.tap_steps[1])
    }

    /// Of `N` outputs the first `some` channels.
    #[inline(always)]
    fn sums<const FMA: bool, const N: usize>(
        &self,
        weights: &[[f32; LANES]],
        bias: [f32; LANES],
        some: usize,
    ) -> [[f32; LANES]; N] {
        let mut sums = [bias; N];
        let mut ky = self.rows[0];
        while ky < self.rows[1] {
            let mut kx = self.columns[0];
            while kx < self.columns[1] {
                let from = self.tap(ky, kx);
                let seen = &self.image[from..from + (N - 1) * self.output_step + some];
                let weight = weights[ky * self.width + kx];
                for i in 0..N {
                    let seen = lanes(&seen[i * self.output_step..][..some]);
                    for lane in 0..LANES {
                        sums[i][lane] = mul_add::<FMA>(weight[lane], seen[lane], sums[i][lane]);
                    }
                }
                kx += 1;
            }
            ky += 1;
        }
        sums
    }
}

/// At most [`LANES`] elements, and zeros after them.
#[inline(always)]
fn lanes(some: &[f32]) -> [f32; LANES] {
    if let Ok(all) = <[f32; LANES]>::try_from(some) {
        return all;
    }
    let mut all = [0.0; LANES];
    all[..some.len()].copy_from_slice(some);
    all
}

/// From and to which tap of a window at `start` of the padded input it is inside the input.
#[inline(always)]
fn inside(start: usize, pad: usize, dilation: usize, kernel: usize, input: usize) -> [usize; 2] {
    let first = pad.saturating_sub(start).div_ceil(dilation).min(kernel);
    [first, (pad + input).saturating_sub(start).div_ceil(dilation).clamp(first, kernel)]
}
