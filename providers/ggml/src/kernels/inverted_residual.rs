use super::{DepthwiseNhwc, Gemm, Window, gemm::Rows};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Words, lines::Lines},
};
use std::{cell::RefCell, ops::Range};

/// A product that widens an image's channels, a depthwise convolution of them and a product that narrows them again, all with
/// their channels last, some rows of the image at a time: what lies between the three stays in the cache. Inputs are those of
/// the first, then the other two's without their input 0.
pub(crate) struct InvertedResidual {
    /// Its rows are the pixels of the depthwise convolution's input, without an addend.
    pub(crate) expansion: Gemm,
    pub(crate) depthwise: DepthwiseNhwc,
    /// Its rows are the pixels of the depthwise convolution's output.
    pub(crate) projection: Gemm,
}

/// Elements that the wide images of a band have, about: half a megabyte, for processors have a second level cache of a
/// megabyte or more for each core.
const BAND: usize = 1 << 17;

/// Fewest rows of the output that a thread takes, for it widens the rows beside them too.
const LEAST: usize = 4;

/// Parts of the wide images.
#[derive(Default)]
struct Scratch {
    expanded: Lines<f32>,
    filtered: Lines<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Kernel for InvertedResidual {
    fn grid(&self, workers: usize) -> Grid {
        let [height, width] = self.depthwise.window.output;
        let planes = self.depthwise.batch;
        let rows = height.div_ceil((2 * workers).div_ceil(planes)).max(LEAST);
        let cols = self.projection.panels.rows;
        Grid { planes, rows: height * width, cols, tile_rows: rows * width, tile_cols: cols }
    }

    fn multiplications(&self) -> usize {
        let kernels: [&dyn Kernel; 3] = [&self.expansion, &self.depthwise, &self.projection];
        kernels.map(Kernel::multiplications).iter().sum()
    }

    fn words(&self) -> Words {
        self.projection.panels.words
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        SCRATCH.with_borrow_mut(|scratch| self.compute(inputs, &mut tile, scratch));
        Ok(())
    }
}

impl InvertedResidual {
    /// Rows of the output that are computed at a time.
    fn band(&self) -> usize {
        let Window { input, output, .. } = &self.depthwise.window;
        let elements = |band: usize| {
            let pixels = self.seen(0..band, usize::MAX).len() * input[1] + band * output[1];
            pixels * self.depthwise.channels
        };
        (1..=output[0]).take_while(|band| elements(*band) <= BAND).last().unwrap_or(1)
    }

    /// Which of `height` rows these rows of the depthwise convolution see.
    fn seen(&self, outputs: Range<usize>, height: usize) -> Range<usize> {
        let Window { stride, kernel, dilation, pad, .. } = &self.depthwise.window;
        let start = (outputs.start * stride[0]).saturating_sub(pad[0]);
        let end = (outputs.end - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1;
        start..end.saturating_sub(pad[0]).min(height).max(start)
    }

    fn compute(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, scratch: &mut Scratch) {
        let InvertedResidual { expansion, depthwise, projection } = self;
        let Scratch { expanded, filtered } = scratch;
        let Window { input: [height, width], output: [_, out_width], stride, pad, .. } = depthwise.window;
        let (channels, bias) = (depthwise.channels, depthwise.bias);
        let image = Rows { from: expansion.matrix(inputs, tile.plane), first: 0 };
        let filters = 1 + expansion.operands();
        let narrowing = filters + 1 + usize::from(bias);
        let row = width * channels;
        let mut held = 0..0;
        for outputs in runs(tile.rows.start / out_width..tile.rows.end / out_width, self.band()) {
            let seen = self.seen(outputs.clone(), height);
            if expanded.len() < seen.len() * row {
                expanded.resize(seen.len() * row);
            }
            // Rows that the band before has seen too.
            let old = seen.start..held.end.max(seen.start);
            if !old.is_empty() {
                let from = (old.start - held.start) * row;
                expanded.copy_within(from..from + old.len() * row, 0);
            }
            for pixels in runs(old.end * width..seen.end * width, expansion.most_rows()) {
                let from = (pixels.start - seen.start * width) * channels;
                let out = &mut expanded[from..][..pixels.len() * channels];
                expansion.compute(image, (inputs, 1), &mut Tile::of_rows(out, pixels, channels));
            }
            let window = Window {
                input: [seen.len(), width],
                output: [outputs.len(), out_width],
                pad: [pad[0] + seen.start - outputs.start * stride[0], pad[1]],
                ..depthwise.window.clone()
            };
            let band = DepthwiseNhwc { batch: 1, window, ..*depthwise };
            let pixels = outputs.start * out_width..outputs.end * out_width;
            filtered.resize(pixels.len() * channels);
            let mut out = Tile::of_rows(filtered, 0..outputs.len(), out_width * channels);
            band.compute(expanded, (inputs, filters), &mut out);
            let left = Rows { from: filtered, first: pixels.start };
            for pixels in runs(pixels, projection.most_rows()) {
                projection.compute(left, (inputs, narrowing), &mut tile.part(pixels));
            }
            held = seen;
        }
    }
}

/// A range in parts of at most so many.
fn runs(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(most).map(move |start| start..(start + most).min(range.end))
}
