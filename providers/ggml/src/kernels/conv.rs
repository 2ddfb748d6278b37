use super::{
    Activation, Blocks, Panels, Window,
    activation::Activate,
    panel_words,
    panels::{interleave, pair},
};
use crate::ffi::{
    Grid, Inputs, Kernel, Tile, as_words,
    lines::Lines,
    product::{Block, Product, Start, Taps, Words},
    simd::{Level, Vectorized, vectorize},
};
use std::{cell::RefCell, ops::Range};

/// Two-dimensional convolution `act(conv(x) + bias + shift + addend)` as a product of the filters with the input, of which
/// a strip of rows is copied, padded, into the cache; each tap of the window then reads the strip at another offset, so
/// that no patches are gathered.
///
/// Inputs: `[batch, groups * channels, h, w]`, filters in [`Panels`] of the level's rows, then, where they are there,
/// `bias` `[groups * filters]`, `shift` `[batch, groups * filters]`, `addend` of the output's shape.
///
/// ggml's `conv_2d` rounds activations to f16, which loses precision and turns values above 65504 into infinity, and
/// its `im2col` writes all patches to memory.
pub(crate) struct Conv {
    level: Level,
    batch: usize,
    panels: Panels,
    window: Window,
    /// How often the input's rows and columns are repeated before the window sees them.
    repeat: usize,
    /// How the filters are kept.
    pub(crate) blocks: Option<Blocks>,
    pub(crate) bias: bool,
    pub(crate) shift: bool,
    pub(crate) addend: bool,
    pub(crate) activation: Option<Activation>,
    strip: Strip,
    taps: Taps,
}

/// The part of the output that is computed at a time, and the padded input it needs: for each channel (or pair of
/// channels) and each phase of the strides a plane, in which neighbouring outputs see neighbouring elements.
struct Strip {
    rows: usize,
    cols: usize,
    /// Rows and columns of a plane.
    plane: [usize; 2],
    /// Channels, in words, that are copied at a time.
    channels: usize,
    /// Whether the rows of the strip are computed as one, the columns between them included.
    flat: bool,
    /// Whether products are summed beside the output, whose rows are far apart for tiles.
    apart: bool,
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

impl Conv {
    /// A convolution without bias and activation. The window's input is counted after `repeat`.
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
            // Rows do not matter, so there is but one.
            let pixels = [1, window.output.iter().product()];
            window = Window { input: pixels, output: pixels, ..pointwise };
        }
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
        let strip = Strip { rows, cols, plane, channels, flat, apart };
        let area: usize = window.stride.iter().chain(&plane).product();
        let taps = (0..channels * panels.taps).map(|at| {
            let (channel, tap) = panels.pair_of(at);
            channel * area + window.tap(tap, plane)
        });
        let taps = Taps::new(taps);
        let (blocks, bias, shift, addend, activation) = (None, false, false, false, None);
        Conv { level, batch, panels, window, repeat, blocks, bias, shift, addend, activation, strip, taps }
    }
}

impl Conv {
    /// Words of a strip, with what blocks at its end read past it (and leave what comes of that).
    fn strip_len(&self) -> usize {
        let [height, pitch] = self.strip.plane;
        let planes = self.window.stride[0] * self.window.stride[1] * self.strip.channels;
        planes * height * pitch + self.strip.rows * pitch + self.level.block(self.panels.words).1
    }
}

/// Columns of rows of `cols` elements, `pitch` apart, seen as one row.
fn flat_cols(rows: usize, cols: usize, pitch: usize) -> usize {
    (rows - 1) * pitch + cols
}

impl Kernel for Conv {
    fn grid(&self, workers: usize) -> Grid {
        let block_rows = self.level.block(self.panels.words).0;
        let (planes, rows) = (self.batch * self.panels.groups, self.panels.rows);
        let cols: usize = self.window.output.iter().product();
        let tile_cols = self.strip.rows * self.strip.cols;
        let across = planes * cols.div_ceil(tile_cols);
        // Filters are shared out where strips alone would keep some workers waiting.
        let down = if across >= 8 * workers || across.is_multiple_of(workers) { 1 } else { workers };
        let tile_rows = rows.div_ceil(block_rows).div_ceil(down) * block_rows;
        Grid { planes, rows, cols, tile_rows, tile_cols }
    }

    fn multiplications(&self) -> usize {
        let outputs: usize = self.window.output.iter().product();
        self.batch * self.panels.groups * self.panels.rows * self.panels.depth * outputs
    }

    fn words(&self) -> Words {
        self.panels.words
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (width, cols) = (self.window.output[1], tile.cols.clone());
        SCRATCH.with_borrow_mut(|scratch| {
            if self.strip.cols == width {
                let rows = cols.start / width..cols.end.div_ceil(width);
                self.strip(inputs, &mut tile, rows, 0..width, scratch);
                return;
            }
            // Parts of rows; a tile may end in another row than it begins in.
            let mut col = cols.start;
            while col < cols.end {
                let (row, from) = (col / width, col % width);
                let to = width.min(from + cols.end - col);
                self.strip(inputs, &mut tile, row..row + 1, from..to, scratch);
                col += to - from;
            }
        });
        Ok(())
    }
}

impl Conv {
    /// Computes the tile's filters for a rectangle of the output.
    fn strip(
        &self,
        inputs: &Inputs<'_>,
        tile: &mut Tile<'_>,
        rows: Range<usize>,
        cols: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let Panels { groups, taps, words, .. } = self.panels;
        let (height, width) = self.level.block(words);
        let (pitch, out_width) = (self.strip.plane[1], self.window.output[1]);
        let filters = tile.rows.clone();
        let first_panel = tile.plane % groups * self.panels.per_group();
        let Scratch { planes: buffer, panel, sums } = scratch;
        buffer.resize(self.strip_len());
        // What is computed, and the sums of a filter, whose rows are as far apart as those of the strip, or not at all.
        let (lines, len, sums_pitch) = match self.strip.flat {
            true => (1, flat_cols(rows.len(), cols.len(), pitch), pitch),
            false => (rows.len(), cols.len(), cols.len()),
        };
        let line = lines * len;
        if self.strip.apart {
            sums.resize(filters.len() * line);
        }
        let runs = self.panels.steps() / taps;
        for channel in (0..runs).step_by(self.strip.channels) {
            let count = self.strip.channels.min(runs - channel);
            self.fill(inputs, tile.plane, channel..channel + count, rows.clone(), cols.clone(), buffer);
            for filter in filters.clone().step_by(height) {
                let steps = channel * taps..(channel + count) * taps;
                let kept = (&self.panels, self.blocks);
                let a = panel_words(inputs, 1, kept, first_panel + filter / height, steps, panel);
                let high = height.min(filters.end - filter);
                let product = |at: usize| Product {
                    level: self.level,
                    words,
                    left: self.panels.as_left(),
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
                        let out = if self.strip.apart {
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
        let sums = self.strip.apart.then_some((&sums[..], line, sums_pitch));
        self.finish(inputs, tile, rows, cols, sums);
    }

    /// Adds what is added to the sums, which lie in the tile or in lines of their own, one for each filter, with a pitch between
    /// rows, and applies the activation.
    fn finish(
        &self,
        inputs: &Inputs<'_>,
        tile: &mut Tile<'_>,
        rows: Range<usize>,
        cols: Range<usize>,
        sums: Option<(&[f32], usize, usize)>,
    ) {
        if !self.bias && !self.shift && !self.addend && self.activation.is_none() && sums.is_none() {
            return;
        }
        let (plane, first) = (tile.plane, tile.cols.start);
        let filters = self.panels.rows;
        let out_width = self.window.output[1];
        let pixels: usize = self.window.output.iter().product();
        for filter in tile.rows.clone() {
            let channel = plane % self.panels.groups * filters + filter;
            let mut next = 2;
            let mut input = |present: bool| {
                present.then(|| {
                    next += 1;
                    inputs.f32(next - 1)
                })
            };
            let bias = input(self.bias).map_or(0.0, |bias| bias[channel])
                + input(self.shift).map_or(0.0, |shift| shift[plane * filters + filter]);
            let addend = input(self.addend).map(|all| &all[(plane * filters + filter) * pixels..][..pixels]);
            let start = filter - tile.rows.start;
            for (i, row) in rows.clone().enumerate() {
                let span = row * out_width + cols.start..row * out_width + cols.end;
                let from = sums.map(|(sums, line, pitch)| &sums[start * line + i * pitch..][..cols.len()]);
                let addend = addend.map(|addend| &addend[span.clone()]);
                let out = &mut tile.row(filter)[span.start - first..span.end - first];
                vectorize(Finish { from, bias, addend, activation: self.activation, out });
            }
        }
    }

    /// Copies the input that a rectangle of the output needs, padded, for some channels or pairs of channels.
    fn fill(
        &self,
        inputs: &Inputs<'_>,
        plane: usize,
        channels: Range<usize>,
        rows: Range<usize>,
        cols: Range<usize>,
        buffer: &mut [u32],
    ) {
        let Window { input, stride: [sy, sx], pad, .. } = self.window;
        let [height, pitch] = self.strip.plane;
        let source = input.map(|n| n / self.repeat);
        let pixels: usize = source.iter().product();
        let all = self.panels.depth / self.panels.taps;
        let image = &inputs.f32(0)[plane * all * pixels..][..all * pixels];
        let reach = [self.window.reach(0), self.window.reach(1)];
        for (i, channel) in channels.enumerate() {
            let (low, high) = match self.panels.words {
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
                if !self.window.sees(0, py) || !self.window.sees(1, px) {
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
                        let start = channel * pixels + iy / self.repeat * source[1];
                        &image[start..start + source[1]]
                    };
                    vectorize(Line {
                        low: row(low),
                        high: high.map(row),
                        words: self.panels.words,
                        first: (cols.start * sx + px) as isize - pad[1] as isize,
                        stride: sx,
                        repeat: self.repeat,
                        out,
                    });
                }
            }
        }
    }
}

struct Finish<'a> {
    /// `None`: what `out` holds.
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

/// A row of a plane: columns `first`, `first + stride`, … of an input row each of whose elements counts `repeat` times,
/// zeros outside it.
struct Line<'a> {
    low: &'a [f32],
    /// The other half of pairs.
    high: Option<&'a [f32]>,
    words: Words,
    first: isize,
    stride: usize,
    repeat: usize,
    out: &'a mut [u32],
}

impl Vectorized for Line<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Line { low, high, words, first, stride, repeat, out } = self;
        let width = low.len() * repeat;
        // Outputs `from..to` lie inside the row.
        let from = first.min(0).unsigned_abs().div_ceil(stride).min(out.len());
        let to = (width as isize - first).max(0).cast_unsigned().div_ceil(stride).clamp(from, out.len());
        out[..from].fill(0);
        out[to..].fill(0);
        if from == to {
            return;
        }
        let start = first.wrapping_add((from * stride) as isize).cast_unsigned();
        let out = &mut out[from..to];
        if stride == 1 && repeat == 1 {
            let low = &low[start..start + out.len()];
            match (words, high) {
                (Words::F32, _) => out.copy_from_slice(as_words(low)),
                (Words::Bf16, Some(high)) => interleave(low, &high[start..start + out.len()], out),
                (Words::Bf16, None) => out.iter_mut().zip(low).for_each(|(out, x)| *out = pair(*x, 0.0)),
            }
            return;
        }
        let word = |at: usize| match words {
            Words::F32 => low[at].to_bits(),
            Words::Bf16 => pair(low[at], high.map_or(0.0, |high| high[at])),
        };
        if stride == 1 {
            let head = ((repeat - start % repeat) % repeat).min(out.len());
            let (first, rest) = out.split_at_mut(head);
            first.fill(word(start / repeat));
            let next = (start + head) / repeat;
            rest.chunks_mut(repeat).enumerate().for_each(|(i, run)| run.fill(word(next + i)));
        } else if repeat == 1 {
            out.iter_mut().enumerate().for_each(|(i, out)| *out = word(start + i * stride));
        } else {
            out.iter_mut().enumerate().for_each(|(i, out)| *out = word((start + i * stride) / repeat));
        }
    }
}
