use super::{Activation, Blocks, Panels, Window, activation::Activate};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Level, Vectorized, Words, product::Block, vectorize},
};
use std::ops::Range;

mod line;
mod pixels;
mod strip;
mod strips;
mod winograd;

use pixels::Pixels;
use strips::Strips;
use winograd::Winograd;

/// Two-dimensional convolution `act(conv(x) + bias + shift + addend)`.
///
/// Inputs: `[batch, groups * channels, h, w]`; filters in [`Panels::filters`]; optionally `bias` `[groups * filters]`, `shift`
/// `[batch, groups * filters]` and `addend` of the output's shape.
///
/// ggml's own `conv_2d` rounds activations to f16, which loses precision and turns values above 65504 into infinity. Its `im2col`
/// writes all patches to memory.
pub(crate) struct Conv {
    level: Level,
    batch: usize,
    panels: Panels,
    window: Window,
    /// The factor of a nearest-neighbour upscaling of the input before the convolution.
    repeat: usize,
    /// The block format of the filters, if any.
    pub(crate) blocks: Option<Blocks>,
    pub(crate) bias: bool,
    pub(crate) shift: bool,
    pub(crate) addend: bool,
    pub(crate) activation: Option<Activation>,
    method: Method,
}

/// The algorithm.
enum Method {
    Strips(Strips),
    Pixels(Pixels),
    Winograd(Winograd),
}

impl Conv {
    /// A convolution without bias and activation. The input size in `window` is that after upscaling by `repeat`.
    pub(crate) fn new(level: Level, batch: usize, panels: Panels, mut window: Window, repeat: usize) -> Self {
        let pointwise = Window {
            kernel: [1, 1],
            stride: [1, 1],
            pad: [0, 0],
            dilation: [1, 1],
            input: window.output,
            output: window.output,
        };
        if repeat == 1 && window == (Window { dilation: window.dilation, ..pointwise.clone() }) {
            // Without a window, rows do not matter: treat the image as one row.
            let pixels = [1, window.output.iter().product()];
            window = Window { input: pixels, output: pixels, ..pointwise };
        }
        let winograd =
            Winograd::new(level, batch, &panels, &window).filter(|w| w.is_faster(&panels, &window));
        let method = match winograd {
            Some(winograd) => Method::Winograd(winograd),
            None if level.has_tiles(panels.words) => Method::Pixels(Pixels::new(level, &panels, &window)),
            None => Method::Strips(Strips::new(level, &panels, &window)),
        };
        let (blocks, bias, shift, addend, activation) = (None, false, false, false, None);
        Conv { level, batch, panels, window, repeat, blocks, bias, shift, addend, activation, method }
    }

    /// The same by Winograd's algorithm, if it applies, even if it is slower.
    #[cfg(test)]
    pub(super) fn by_winograd(mut self) -> Option<Self> {
        self.method = Method::Winograd(Winograd::new(self.level, self.batch, &self.panels, &self.window)?);
        Some(self)
    }

    /// The channels of a group.
    fn channels(&self) -> usize {
        self.panels.depth / self.panels.taps
    }

    /// The rows and columns of the input, and the elements of its channels.
    fn image<'a>(&self, inputs: &Inputs<'a>, plane: usize) -> Image<'a> {
        let source = self.window.input.map(|n| n / self.repeat);
        let len = self.channels() * source[0] * source[1];
        (source, &inputs.f32(0)[plane * len..][..len])
    }

    /// The addends of the sums of a filter.
    fn added<'a>(&self, inputs: &Inputs<'a>, plane: usize, filter: usize) -> Added<'a> {
        let filters = self.panels.rows;
        let pixels: usize = self.window.output.iter().product();
        let mut next = 2;
        let mut input = |present: bool| {
            present.then(|| {
                next += 1;
                inputs.f32(next - 1)
            })
        };
        let bias = input(self.bias).map_or(0.0, |bias| bias[plane % self.panels.groups * filters + filter])
            + input(self.shift).map_or(0.0, |shift| shift[plane * filters + filter]);
        let addend = input(self.addend).map(|all| &all[(plane * filters + filter) * pixels..][..pixels]);
        Added { bias, addend }
    }

    /// Completes a span of a filter's outputs: adds the addends to the sums, which lie in the tile or in `from`, and applies the
    /// activation.
    fn finish(
        &self,
        added: &Added<'_>,
        tile: &mut Tile<'_>,
        filter: usize,
        span: Range<usize>,
        from: Option<&[f32]>,
    ) {
        let addend = added.addend.map(|addend| &addend[span.clone()]);
        let first = tile.cols.start;
        let out = &mut tile.row(filter)[span.start - first..span.end - first];
        vectorize(Finish { from, bias: added.bias, addend, activation: self.activation, out });
    }

    /// Completes a span of the outputs of several filters. Their sums are rows of `from`, at the given distance.
    fn finish_rows(
        &self,
        added: &[Added<'_>],
        tile: &mut Tile<'_>,
        filter: usize,
        span: Range<usize>,
        (from, step): (&[f32], usize),
    ) {
        let out = tile.block(filter, span.start, added.len(), span.len());
        vectorize(FinishRows { from, step, added, span, activation: self.activation, out });
    }

    /// Whether the sums are the outputs: there are no addends and no activation.
    fn is_bare(&self) -> bool {
        !self.bias && !self.shift && !self.addend && self.activation.is_none()
    }
}

impl Kernel for Conv {
    fn grid(&self, workers: usize) -> Grid {
        let block_rows = self.panels.block;
        let (planes, rows) = (self.batch * self.panels.groups, self.panels.rows);
        let cols: usize = self.window.output.iter().product();
        let tile_cols = match &self.method {
            Method::Strips(Strips { strip, .. }) | Method::Pixels(Pixels { strip, .. }) => {
                strip.outputs(&self.window)
            }
            Method::Winograd(winograd) => winograd.outputs(self),
        };
        let together = match &self.method {
            Method::Strips(_) | Method::Pixels(_) => 1,
            Method::Winograd(winograd) => winograd.together,
        };
        let across = planes / together * cols.div_ceil(tile_cols);
        // Divide the filters too if strips alone would leave some workers without work.
        let down = if across >= 8 * workers || across.is_multiple_of(workers) { 1 } else { workers };
        let tile_rows = rows.div_ceil(block_rows).div_ceil(down) * block_rows;
        Grid { together, planes, rows, cols, tile_rows, tile_cols }
    }

    fn multiplications(&self) -> usize {
        let outputs: usize = self.window.output.iter().product();
        let of_channel = match &self.method {
            Method::Strips(_) | Method::Pixels(_) => self.panels.taps * outputs,
            Method::Winograd(winograd) => winograd.multiplications(),
        };
        self.batch * self.panels.groups * self.panels.rows * self.channels() * of_channel
    }

    #[cfg(test)]
    fn repeated(&self, tile @ [_, cols]: [usize; 2]) -> usize {
        match &self.method {
            // Packing an element of the input takes as long as 8 multiplications.
            Method::Strips(_) | Method::Pixels(_) => {
                let [height, width] = self.window.stride;
                8 * self.channels() * cols * height * width
            }
            Method::Winograd(winograd) => winograd.repeated(self, tile),
        }
    }

    fn words(&self) -> Words {
        match self.method {
            Method::Strips(_) | Method::Pixels(_) => self.panels.words,
            Method::Winograd(_) => Words::F32,
        }
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        match &self.method {
            Method::Strips(strips) => strips.tile(self, inputs, &mut tile),
            Method::Pixels(pixels) => pixels.tile(self, inputs, &mut tile),
            Method::Winograd(winograd) => winograd.tile(self, inputs, &mut tile),
        }
        Ok(())
    }
}

/// The rows and columns of an image, and the elements of all its channels.
type Image<'a> = ([usize; 2], &'a [f32]);

/// The addends of the sums of a filter.
struct Added<'a> {
    bias: f32,
    /// One element for each output.
    addend: Option<&'a [f32]>,
}

/// As [`Finish`], for several filters.
struct FinishRows<'a> {
    from: &'a [f32],
    step: usize,
    added: &'a [Added<'a>],
    span: Range<usize>,
    activation: Option<Activation>,
    out: Block<'a>,
}

impl Vectorized for FinishRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(mut self) {
        let FinishRows { from, step, added, span, activation, .. } = self;
        for (i, added) in added.iter().enumerate() {
            let addend = added.addend.map(|addend| &addend[span.clone()]);
            let (from, out) = (Some(&from[i * step..][..span.len()]), self.out.row(i));
            Finish { from, bias: added.bias, addend, activation, out }.run::<FMA>();
        }
    }
}

struct Finish<'a> {
    /// The sums. `None` if they are in `out`.
    from: Option<&'a [f32]>,
    bias: f32,
    addend: Option<&'a [f32]>,
    activation: Option<Activation>,
    out: &'a mut [f32],
}

impl Vectorized for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Finish { from, bias, addend, activation, out } = self;
        match (from, addend) {
            (None, None) => out.iter_mut().for_each(|out| *out += bias),
            (None, Some(add)) => out.iter_mut().zip(add).for_each(|(out, add)| *out = *out + bias + add),
            (Some(from), None) => out.iter_mut().zip(from).for_each(|(out, x)| *out = x + bias),
            (Some(from), Some(add)) => {
                out.iter_mut().zip(from.iter().zip(add)).for_each(|(out, (x, add))| *out = x + bias + add);
            }
        }
        if let Some(activation) = activation {
            Activate(activation, out).run::<FMA>();
        }
    }
}
