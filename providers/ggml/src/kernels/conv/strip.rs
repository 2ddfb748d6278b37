use super::{Conv, line::Line};
use crate::{
    ffi::{Inputs, Tile, product::Words, simd::vectorize},
    kernels::Window,
};
use std::ops::Range;

/// The part of the output that is computed at a time, and the padded input that it needs.
pub(super) struct Strip {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Rows and columns of the input: so many for each phase of the strides, in which neighbouring outputs see neighbouring
    /// elements.
    pub(super) plane: [usize; 2],
    /// Elements of a channel, of all phases.
    pub(super) area: usize,
    /// Whether its rows are computed as one, the columns between them included.
    pub(super) flat: bool,
}

/// A rectangle of the output.
pub(super) struct Rectangle {
    pub(super) plane: usize,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
}

impl Strip {
    /// At most so many columns, in as many rows as there are with `pixels` outputs; `block` outputs are computed at once.
    pub(super) fn new(window: &Window, cols: usize, pixels: usize, block: usize) -> Self {
        let cols = window.output[1].min(cols);
        let rows = (pixels / cols).clamp(1, window.output[0]);
        let plane = [rows + window.reach(0), cols + window.reach(1)];
        let area = window.stride.iter().chain(&plane).product();
        let flat_len = (rows - 1) * plane[1] + cols;
        let flat = cols == window.output[1] && flat_len.div_ceil(block) < rows * cols.div_ceil(block);
        Strip { rows, cols, plane, area, flat }
    }

    /// How many outputs of a filter are shared out at a time: whole rows, if there is more than one.
    pub(super) fn outputs(&self, window: &Window) -> usize {
        if window.output[0] == 1 { self.cols } else { self.rows * window.output[1] }
    }

    /// The parts of a tile.
    pub(super) fn parts(&self, conv: &Conv, tile: &Tile<'_>) -> impl Iterator<Item = Rectangle> + use<> {
        let (width, plane, step) = (conv.window.output[1], tile.plane, self.cols);
        let rows = tile.cols.start / width..tile.cols.end.div_ceil(width);
        let from = tile.cols.start - rows.start * width;
        let to = tile.cols.end - (rows.end - 1) * width;
        (from..to).step_by(step).map(move |col| Rectangle {
            plane,
            rows: rows.clone(),
            cols: col..to.min(col + step),
        })
    }

    /// How many rows a rectangle is computed in, and how long they are.
    pub(super) fn lines(&self, of: &Rectangle) -> (usize, usize) {
        let (rows, cols) = (of.rows.len(), of.cols.len());
        if self.flat { (1, (rows - 1) * self.plane[1] + cols) } else { (rows, cols) }
    }

    /// Copies row `y` of a phase of the strides of what a rectangle sees of a channel, or of two: as many columns as `out` has,
    /// zeros outside the image.
    pub(super) fn copy(
        &self,
        (conv, inputs): (&Conv, &Inputs<'_>),
        of: &Rectangle,
        (low, high): (usize, Option<usize>),
        [y, phase]: [usize; 2],
        out: &mut [u32],
    ) {
        let Window { input, stride: [sy, sx], pad, .. } = conv.window;
        let (source, image) = conv.image(inputs, of.plane);
        let iy = ((of.rows.start + y) * sy + phase / sx).checked_sub(pad[0]).filter(|iy| *iy < input[0]);
        let Some(iy) = iy else {
            out.fill(0);
            return;
        };
        let row =
            |channel: usize| &image[(channel * source[0] + iy / conv.repeat) * source[1]..][..source[1]];
        vectorize(Line {
            low: row(low),
            high: high.map(row),
            words: conv.panels.words,
            first: (of.cols.start * sx + phase % sx) as isize - pad[1] as isize,
            stride: sx,
            repeat: conv.repeat,
            out,
        });
    }

    /// The phases of the strides that some tap sees.
    pub(super) fn phases(&self, window: &Window) -> impl Iterator<Item = usize> {
        let [sy, sx] = window.stride;
        (0..sy * sx).filter(move |phase| window.sees(0, phase / sx) && window.sees(1, phase % sx))
    }
}

/// The channels of a word: the second one of pairs, where there is one.
pub(super) fn channels_of(words: Words, word: usize, channels: usize) -> (usize, Option<usize>) {
    match words {
        Words::F32 => (word, None),
        Words::Bf16 => (2 * word, (2 * word + 1 < channels).then_some(2 * word + 1)),
    }
}
