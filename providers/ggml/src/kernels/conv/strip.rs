use super::{Conv, Image, line::Line};
use crate::{
    ffi::Tile,
    kernels::Window,
    simd::{Words, lines::prefetch, vectorize},
};
use std::ops::Range;

/// The part of the output that is computed at once, and the padded input that it needs.
pub(super) struct Strip {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Rows and columns of a plane of the input. Each phase of the strides has a plane, in which neighbouring outputs see
    /// neighbouring elements.
    pub(super) plane: [usize; 2],
    /// Elements of a channel in all phases.
    pub(super) area: usize,
    /// Whether its rows are computed as one long row, including the columns between them.
    pub(super) flat: bool,
}

/// A rectangle of the output.
pub(super) struct Rectangle {
    pub(super) plane: usize,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
}

impl Strip {
    /// A strip of at most `cols` columns and about `pixels` outputs. A product computes `block` outputs at once.
    pub(super) fn new(window: &Window, cols: usize, pixels: usize, block: usize) -> Self {
        let cols = window.output[1].min(cols);
        let rows = (pixels / cols).clamp(1, window.output[0]);
        let plane = [rows + window.reach(0), cols + window.reach(1)];
        let area = window.stride.iter().chain(&plane).product();
        let flat_len = (rows - 1) * plane[1] + cols;
        let flat = cols == window.output[1] && flat_len.div_ceil(block) < rows * cols.div_ceil(block);
        Strip { rows, cols, plane, area, flat }
    }

    /// Outputs of a filter in a unit of work: whole rows, if there are several.
    pub(super) fn outputs(&self, window: &Window) -> usize {
        if window.output[0] == 1 { self.cols } else { self.rows * window.output[1] }
    }

    /// The rectangles of a tile.
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

    /// The number of lines in which a rectangle is computed, and their length.
    pub(super) fn lines(&self, of: &Rectangle) -> (usize, usize) {
        let (rows, cols) = (of.rows.len(), of.cols.len());
        if self.flat { (1, (rows - 1) * self.plane[1] + cols) } else { (rows, cols) }
    }

    /// The spans of the output, whose rows have `width` columns, that some columns of a line cover, each with its offset from the
    /// first column.
    pub(super) fn spans(
        &self,
        of: &Rectangle,
        width: usize,
        line: usize,
        cols: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (first, pitch) = if self.flat { (0, self.plane[1]) } else { (line, usize::MAX) };
        let start = (of.rows.start + first) * width + of.cols.start;
        let count = of.cols.len();
        (cols.start / pitch..cols.end.div_ceil(pitch)).filter_map(move |row| {
            let from = cols.start.max(row * pitch);
            let to = cols.end.min((row * pitch).saturating_add(count));
            let at = start + row * width + from - row * pitch;
            (from < to).then(|| (at..at + to - from, from - cols.start))
        })
    }

    /// Copies row `y` of a phase of the strides, as seen by a rectangle, from one channel or two. Fills `out`, with zeros outside the
    /// image.
    pub(super) fn copy(
        &self,
        (conv, image): (&Conv, Image<'_>),
        of: &Rectangle,
        (low, high): (usize, Option<usize>),
        [phase, y]: [usize; 2],
        out: &mut [u32],
    ) {
        let Window { stride: [_, stride], pad: [_, pad], .. } = conv.window;
        let row = |channel: usize| self.row((conv, image), of, channel, [phase, y]);
        let Some(row_low) = row(low) else {
            out.fill(0);
            return;
        };
        vectorize(Line {
            low: row_low,
            high: high.and_then(row),
            words: conv.panels.words,
            first: (of.cols.start * stride + phase % stride) as isize - pad as isize,
            stride,
            repeat: conv.repeat,
            out,
        });
    }

    /// Prefetches the elements that [`copy`](Self::copy) will read.
    pub(super) fn fetch(
        &self,
        (conv, image): (&Conv, Image<'_>),
        of: &Rectangle,
        (low, high): (usize, Option<usize>),
        at: [usize; 2],
    ) {
        let (stride, pad) = (conv.window.stride[1], conv.window.pad[1]);
        for channel in [Some(low), high].into_iter().flatten() {
            let Some(row) = self.row((conv, image), of, channel, at) else { return };
            let [from, to] = [of.cols.start, of.cols.end + conv.window.reach(1)]
                .map(|col| ((col * stride).saturating_sub(pad) / conv.repeat).min(row.len()));
            prefetch(&row[from..to]);
        }
    }

    /// The row of a channel behind row `y` of a phase of the strides, unless it is padding.
    fn row<'a>(
        &self,
        (conv, (source, image)): (&Conv, Image<'a>),
        of: &Rectangle,
        channel: usize,
        [phase, y]: [usize; 2],
    ) -> Option<&'a [f32]> {
        let Window { input, stride: [sy, sx], pad, .. } = conv.window;
        let iy = ((of.rows.start + y) * sy + phase / sx).checked_sub(pad[0]).filter(|iy| *iy < input[0])?;
        Some(&image[(channel * source[0] + iy / conv.repeat) * source[1]..][..source[1]])
    }

    /// The phases of the strides that at least one tap reads.
    pub(super) fn phases(&self, window: &Window) -> impl Iterator<Item = usize> {
        let [sy, sx] = window.stride;
        (0..sy * sx).filter(move |phase| window.sees(0, phase / sx) && window.sees(1, phase % sx))
    }
}

/// The channels of a word. The second is `None` if the word has one element or the channel does not exist.
pub(super) fn channels_of(words: Words, word: usize, channels: usize) -> (usize, Option<usize>) {
    match words {
        Words::Bf16 => (2 * word, (2 * word + 1 < channels).then_some(2 * word + 1)),
        _ => (word, None),
    }
}
