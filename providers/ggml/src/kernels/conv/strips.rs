use super::{Conv, line::Line};
use crate::{
    ffi::{
        Inputs, Tile,
        lines::Lines,
        product::{Block, Product, Start, Taps, Words},
        simd::{Level, vectorize},
    },
    kernels::{Panels, Window, panel_words},
};
use std::{cell::RefCell, ops::Range};

/// A convolution as a product of the filters with the input, of which a strip of rows is copied, padded, into the cache; each
/// tap of the window then reads the strip at another offset, so that no patches are gathered.
pub(super) struct Strips {
    /// The part of the output that is computed at a time.
    rows: usize,
    cols: usize,
    /// The padded input it needs: for each channel (or pair of channels) and each phase of the strides a plane of so many rows and
    /// columns, in which neighbouring outputs see neighbouring elements.
    plane: [usize; 2],
    /// Channels, in words, that are copied at a time.
    channels: usize,
    /// Whether the rows of the strip are computed as one, the columns between them included.
    flat: bool,
    /// Whether products are summed beside the output, whose rows are far apart for tiles.
    apart: bool,
    taps: Taps,
    /// Words of a strip, with what blocks at its end read past it (and leave what comes of that).
    len: usize,
}

/// Steps of the depth at a time: a panel of filters and the columns it meets stay in the first level cache.
const DEPTH: usize = 288;
/// Outputs of a strip.
const PIXELS: usize = 256;
/// The same for tiles, which wait for filters that do not stay in the cache from one strip to the next.
const PIXELS_OF_TILES: usize = 512;

#[derive(Default)]
struct Scratch {
    planes: Lines<u32>,
    panel: Vec<f32>,
    sums: Lines<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A rectangle of the output.
struct Rectangle {
    plane: usize,
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Columns of rows of `cols` elements, `pitch` apart, seen as one row.
fn flat_cols(rows: usize, cols: usize, pitch: usize) -> usize {
    (rows - 1) * pitch + cols
}

impl Strips {
    pub(super) fn new(level: Level, panels: &Panels, window: &Window) -> Self {
        let pixels = if level.has_tiles(panels.words) { PIXELS_OF_TILES } else { PIXELS };
        let cols = window.output[1].min(pixels);
        let rows = (pixels / cols).clamp(1, window.output[0]);
        let plane = [rows + window.reach(0), cols + window.reach(1)];
        let (runs, unit) = ((panels.steps() / panels.taps).max(1), panels.unit());
        let channels = (DEPTH / panels.taps / unit * unit).clamp(unit, runs);
        let (_, width) = level.block(panels.words);
        let whole = cols == window.output[1];
        let flat = whole && flat_cols(rows, cols, plane[1]).div_ceil(width) < rows * cols.div_ceil(width);
        let apart = flat || level.has_tiles(panels.words);
        let area: usize = window.stride.iter().chain(&plane).product();
        let taps = (0..channels * panels.taps).map(|at| {
            let (channel, tap) = panels.pair_of(at);
            channel * area + window.tap(tap, plane)
        });
        let taps = Taps::new(taps);
        let len = channels * area + rows * plane[1] + width;
        Strips { rows, cols, plane, channels, flat, apart, taps, len }
    }

    /// How many outputs of a filter are computed at a time.
    pub(super) fn outputs(&self) -> usize {
        self.rows * self.cols
    }

    pub(super) fn tile(&self, conv: &Conv, inputs: &Inputs<'_>, tile: &mut Tile<'_>) {
        let (width, cols) = (conv.window.output[1], tile.cols.clone());
        SCRATCH.with_borrow_mut(|scratch| {
            let plane = tile.plane;
            if self.cols == width {
                let rows = cols.start / width..cols.end.div_ceil(width);
                let whole = Rectangle { plane, rows, cols: 0..width };
                self.strip(conv, inputs, tile, &whole, scratch);
                return;
            }
            // Parts of rows; a tile may end in another row than it begins in.
            let mut col = cols.start;
            while col < cols.end {
                let (row, from) = (col / width, col % width);
                let to = width.min(from + cols.end - col);
                let part = Rectangle { plane, rows: row..row + 1, cols: from..to };
                self.strip(conv, inputs, tile, &part, scratch);
                col += to - from;
            }
        });
    }

    /// Computes the tile's filters for a rectangle of the output.
    fn strip(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        tile: &mut Tile<'_>,
        of: &Rectangle,
        scratch: &mut Scratch,
    ) {
        let Rectangle { plane, rows, cols } = of;
        let Panels { groups, taps, words, .. } = conv.panels;
        let (height, width) = conv.level.block(words);
        let (pitch, out_width) = (self.plane[1], conv.window.output[1]);
        let filters = tile.rows.clone();
        let first_panel = plane % groups * conv.panels.per_group();
        let Scratch { planes: buffer, panel, sums } = scratch;
        buffer.resize(self.len);
        // What is computed, and the sums of a filter, whose rows are as far apart as those of the strip, or not at all.
        let (lines, len, sums_pitch) = match self.flat {
            true => (1, flat_cols(rows.len(), cols.len(), pitch), pitch),
            false => (rows.len(), cols.len(), cols.len()),
        };
        let line = lines * len;
        if self.apart {
            sums.resize(filters.len() * line);
        }
        let runs = conv.panels.steps() / taps;
        for channel in (0..runs).step_by(self.channels) {
            let count = self.channels.min(runs - channel);
            self.fill(conv, inputs, of, channel..channel + count, buffer);
            for filter in filters.clone().step_by(height) {
                let steps = channel * taps..(channel + count) * taps;
                let kept = (&conv.panels, conv.blocks);
                let a = panel_words(inputs, 1, kept, first_panel + filter / height, steps, panel);
                let high = height.min(filters.end - filter);
                let product = |at: usize| Product {
                    level: conv.level,
                    words,
                    left: conv.panels.as_left(),
                    depth: count * taps,
                    a,
                    b: &buffer[at..],
                    taps: &self.taps,
                    start: if channel > 0 { Start::Output } else { Start::Zero },
                    clip: None,
                };
                for i in 0..lines {
                    for col in (0..len).step_by(width) {
                        let wide = width.min(len - col);
                        let out = if self.apart {
                            let at = (filter - filters.start) * line + i * sums_pitch + col;
                            Block::new(&mut sums[at..], line, high, wide)
                        } else {
                            tile.block(filter, (rows.start + i) * out_width + cols.start + col, high, wide)
                        };
                        product(i * pitch + col).into(out);
                    }
                }
            }
        }
        if conv.is_bare() && !self.apart {
            return;
        }
        for filter in filters.clone() {
            let added = conv.added(inputs, *plane, filter);
            for (i, row) in rows.clone().enumerate() {
                let span = row * out_width + cols.start..row * out_width + cols.end;
                let from = (filter - filters.start) * line + i * sums_pitch;
                let from = self.apart.then(|| &sums[from..][..cols.len()]);
                conv.finish(&added, tile, filter, span, from);
            }
        }
    }

    /// Copies the input that a rectangle of the output needs, padded, for some channels or pairs of channels.
    fn fill(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        of: &Rectangle,
        channels: Range<usize>,
        buffer: &mut [u32],
    ) {
        let Rectangle { plane, rows, cols } = of;
        let Window { input, stride: [sy, sx], pad, .. } = conv.window;
        let [height, pitch] = self.plane;
        let all = conv.channels();
        let (source, image) = conv.image(inputs, *plane);
        let pixels: usize = source.iter().product();
        let reach = [conv.window.reach(0), conv.window.reach(1)];
        for (i, channel) in channels.enumerate() {
            let (low, high) = match conv.panels.words {
                Words::F32 => (channel, None),
                Words::Bf16 => (2 * channel, (2 * channel + 1 < all).then_some(2 * channel + 1)),
            };
            if low >= all {
                // Of sixteens that are not whole.
                let plane = sy * sx * height * pitch;
                buffer[i * plane..(i + 1) * plane].fill(0);
                continue;
            }
            for phase in 0..sy * sx {
                let (py, px) = (phase / sx, phase % sx);
                if !conv.window.sees(0, py) || !conv.window.sees(1, px) {
                    continue;
                }
                for y in 0..rows.len() + reach[0] {
                    let start = ((i * sy * sx + phase) * height + y) * pitch;
                    let out = &mut buffer[start..start + cols.len() + reach[1]];
                    let iy = ((rows.start + y) * sy + py).checked_sub(pad[0]).filter(|iy| *iy < input[0]);
                    let Some(iy) = iy else {
                        out.fill(0);
                        continue;
                    };
                    let row = |channel: usize| {
                        let start = channel * pixels + iy / conv.repeat * source[1];
                        &image[start..start + source[1]]
                    };
                    vectorize(Line {
                        low: row(low),
                        high: high.map(row),
                        words: conv.panels.words,
                        first: (cols.start * sx + px) as isize - pad[1] as isize,
                        stride: sx,
                        repeat: conv.repeat,
                        out,
                    });
                }
            }
        }
    }
}
