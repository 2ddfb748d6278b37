use super::{Conv, line::Line};
use crate::{
    ffi::{
        Inputs, Tile, as_floats, as_words, as_words_mut,
        lines::Lines,
        product::{Block, Left, Product, Start, Taps, Words},
        simd::{Level, Vectorized, vectorize},
        winograd::{INPUTS, OUTPUTS, PRODUCTS, Planes, SLACK, Transform, spread},
    },
    kernels::{Panels, Window, panel_words, panels::Order},
};
use std::{cell::RefCell, ops::Range};

/// A convolution by Winograd's algorithm, see [`ffi::winograd`](crate::ffi::winograd): a quarter of the multiplications, and
/// linear transforms of its input, filters and output. All of it is computed in f32, whatever the filters are kept in.
pub(super) struct Winograd {
    /// Rows and columns of tiles.
    tiles: [usize; 2],
    /// Rows of them that are shared out at a time.
    rows: usize,
    /// Channels that are multiplied at a time.
    channels: usize,
    taps: Taps,
    /// Blocks of columns that a part has at most.
    blocks: usize,
}

/// Tiles of a part, which transform the filters once more, about.
const PART: usize = 64;
/// Channels at a time: their transformed input stays in the second level cache with the sums.
const CHANNELS: usize = 64;
/// Panels of filters whose sums stay there.
const PANELS: usize = 4;
/// Least channels and filters; with fewer, transforms take longer than what they save.
const LEAST: usize = 16;
/// The same where strips are multiplied as pairs of bf16, at twice the rate.
const LEAST_OF_PAIRS: usize = 256;
/// A cache line, so that planes do not fall on the same cache sets.
const APART: usize = 16;

#[derive(Default)]
struct Scratch {
    lines: Lines<f32>,
    /// Planes of elements of tiles.
    tiles: Lines<f32>,
    input: Lines<f32>,
    panel: Vec<f32>,
    filters: Lines<f32>,
    transformed: Lines<f32>,
    sums: Lines<f32>,
    joined: Lines<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Winograd {
    /// Where the algorithm computes that.
    pub(super) fn new(level: Level, panels: &Panels, window: &Window) -> Option<Self> {
        let fits = (window.kernel, window.stride, window.dilation) == ([3, 3], [1, 1], [1, 1]);
        if !fits || panels.order != Order::Columns {
            return None;
        }
        let (height, width) = level.block(Words::F32);
        assert_eq!(panels.block, height, "panels of another level");
        let tiles = window.output.map(|n| n.div_ceil(OUTPUTS));
        let rows = (PART / tiles[1]).clamp(1, tiles[0]);
        let blocks = PART.min(rows * tiles[1]).div_ceil(width);
        let channels = CHANNELS.min((panels.depth / panels.taps).next_multiple_of(2));
        Some(Winograd { tiles, rows, channels, taps: Taps::dense(channels, width), blocks })
    }

    /// Whether it is faster than strips.
    pub(super) fn is_faster(&self, panels: &Panels, window: &Window) -> bool {
        let outputs: usize = window.output.iter().product();
        let tiles = self.tiles[0] * self.tiles[1];
        let least = panels.rows.min(panels.depth / panels.taps);
        match panels.words {
            // A tile takes as long as 7 outputs of a strip, transforming the filters as long as 40.
            Words::F32 => outputs > 7 * tiles + 40 && least >= LEAST,
            Words::Bf16 => outputs > 14 * tiles && tiles >= PART && least >= LEAST_OF_PAIRS,
        }
    }

    /// How many outputs of a filter are computed at a time.
    pub(super) fn outputs(&self, conv: &Conv) -> usize {
        self.rows * OUTPUTS * conv.window.output[1]
    }

    /// How many multiplications a filter takes for each channel.
    pub(super) fn multiplications(&self) -> usize {
        PRODUCTS * self.tiles[0] * self.tiles[1]
    }

    pub(super) fn tile(&self, conv: &Conv, inputs: &Inputs<'_>, tile: &mut Tile<'_>) {
        let row = OUTPUTS * conv.window.output[1];
        let tiles = tile.cols.start / row * self.tiles[1]..tile.cols.end.div_ceil(row) * self.tiles[1];
        SCRATCH.with_borrow_mut(|scratch| {
            for first in tiles.clone().step_by(PART) {
                self.part(conv, inputs, tile, first..tiles.end.min(first + PART), scratch);
            }
        });
    }

    /// Computes some tiles of the image, of the filters of `tile`.
    fn part(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        tile: &mut Tile<'_>,
        tiles: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let (height, width) = conv.level.block(Words::F32);
        let blocks = tiles.len().div_ceil(width);
        let channels = conv.channels();
        let first_panel = tile.plane % conv.panels.groups * conv.panels.per_group();
        let input_step = self.blocks * self.channels * width + APART;
        // Columns of filters begin where lines do, if they fill them.
        let column = height.next_power_of_two();
        let filter_step = self.channels * column + APART;
        let sums_step = self.blocks * height * width + APART;
        let Scratch { lines, tiles: elements, input, panel: buffer, filters, transformed, sums, joined } =
            scratch;
        let columns = self.blocks * width + APART;
        elements.resize(PRODUCTS * columns);
        joined.resize(OUTPUTS * OUTPUTS * columns);
        let chunk_len = PRODUCTS * input_step + APART;
        input.resize(channels.div_ceil(self.channels) * chunk_len);
        filters.resize(self.channels * 9 * height + SLACK);
        transformed.resize(PRODUCTS * filter_step + SLACK);
        sums.resize(PANELS * PRODUCTS * sums_step + SLACK);
        for group in tile.rows.clone().step_by(PANELS * height) {
            let group = group..tile.rows.end.min(group + PANELS * height);
            for (chunk, channel) in (0..channels).step_by(self.channels).enumerate() {
                let input = &mut input[chunk * chunk_len..][..chunk_len];
                let count = self.channels.min(channels - channel);
                if group.start == tile.rows.start {
                    for i in 0..count {
                        self.gather(
                            conv,
                            inputs,
                            (tile.plane, channel + i),
                            tiles.clone(),
                            lines,
                            (elements, columns),
                        );
                        let source = Planes { step: columns, next: width };
                        let target = Planes { step: input_step, next: self.channels * width };
                        Transform::Input.apply(
                            conv.level,
                            [blocks, width],
                            (elements, source),
                            (&mut input[i * width..], target),
                        );
                    }
                }
                for (sums, filter) in sums.chunks_mut(PRODUCTS * sums_step).zip(group.clone().step_by(height))
                {
                    let panel = first_panel + filter / height;
                    let filters =
                        self.filters(conv, inputs, (panel, channel..channel + count), buffer, filters);
                    let source = Planes { step: height, next: 9 * height };
                    let target = Planes { step: filter_step, next: column };
                    for (run, filters) in filters.into_iter().enumerate() {
                        let transformed = &mut transformed[run * (count - 1) * column..];
                        let runs = if run == 0 { count - 1 } else { 1 };
                        Transform::Filter.apply(
                            conv.level,
                            [runs, height],
                            (filters, source),
                            (transformed, target),
                        );
                    }
                    let high = height.min(group.end - filter);
                    for product in 0..PRODUCTS {
                        let a = as_words(&transformed[product * filter_step..]);
                        for block in 0..blocks {
                            let b = as_words(&input[product * input_step + block * self.channels * width..]);
                            let out = &mut sums[product * sums_step + block * height * width..];
                            Product {
                                level: conv.level,
                                words: Words::F32,
                                left: Left::Columns(column),
                                depth: count,
                                a,
                                b,
                                taps: &self.taps,
                                start: if channel > 0 { Start::Output } else { Start::Zero },
                                clip: None,
                            }
                            .into(Block::new(
                                out,
                                width,
                                high,
                                width.min(tiles.len() - block * width),
                            ));
                        }
                    }
                }
            }
            for filter in group.clone() {
                let i = filter - group.start;
                let source = Planes { step: sums_step, next: height * width };
                let target = Planes { step: columns, next: width };
                Transform::Output.apply(
                    conv.level,
                    [blocks, width],
                    (&sums[i / height * PRODUCTS * sums_step + i % height * width..], source),
                    (elements, target),
                );
                let len = blocks * width;
                vectorize(Join { planes: elements, step: columns, len, rows: joined });
                let added = conv.added(inputs, tile.plane, filter);
                for run in self.runs(tiles.clone()) {
                    let [height, width] = conv.window.output;
                    let (row, from) =
                        (run.start / self.tiles[1] * OUTPUTS, run.start % self.tiles[1] * OUTPUTS);
                    let count = (run.len() * OUTPUTS).min(width - from);
                    for y in 0..OUTPUTS.min(height - row) {
                        let start = (row + y) * width + from;
                        let at = (y * columns + run.start - tiles.start) * OUTPUTS;
                        conv.finish(
                            &added,
                            tile,
                            filter,
                            start..start + count,
                            Some(&joined[at..at + count]),
                        );
                    }
                }
            }
        }
    }

    /// Parts of tiles, each of one row.
    fn runs(&self, tiles: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let width = self.tiles[1];
        (tiles.start / width..tiles.end.div_ceil(width))
            .map(move |row| tiles.start.max(row * width)..tiles.end.min((row + 1) * width))
    }

    /// Reads what tiles see of a channel: a plane for each of its elements.
    fn gather(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        (plane, channel): (usize, usize),
        tiles: Range<usize>,
        lines: &mut Lines<f32>,
        (elements, step): (&mut [f32], usize),
    ) {
        let ([height, width], image) = conv.image(inputs, plane);
        let image = &image[channel * height * width..][..height * width];
        let pitch = (PART + SLACK + 1) * OUTPUTS;
        lines.resize(INPUTS * pitch);
        let [pad, left] = conv.window.pad;
        for run in self.runs(tiles.clone()) {
            let (row, col) = (run.start / self.tiles[1], run.start % self.tiles[1]);
            let inside =
                |y: usize| (row * OUTPUTS + y).checked_sub(pad).filter(|y| *y < conv.window.input[0]);
            // All rows are written before the first is read again, which must not wait for that.
            for (y, line) in lines.chunks_exact_mut(pitch).enumerate() {
                let Some(iy) = inside(y) else { continue };
                vectorize(Line {
                    low: &image[iy / conv.repeat * width..][..width],
                    high: None,
                    words: Words::F32,
                    first: (col * OUTPUTS) as isize - left as isize,
                    stride: 1,
                    repeat: conv.repeat,
                    out: &mut as_words_mut(line)[..run.len() * OUTPUTS + INPUTS - OUTPUTS],
                });
            }
            for (y, line) in lines.chunks_exact(pitch).enumerate() {
                let planes = &mut elements[y * INPUTS * step + run.start - tiles.start..];
                match inside(y) {
                    Some(_) => spread(conv.level, line, run.len(), planes, step),
                    None => (0..INPUTS).for_each(|x| planes[x * step..][..run.len()].fill(0.0)),
                }
            }
        }
    }

    /// Some channels of a panel of filters as f32: all of them, then the last one with slack after it.
    fn filters<'a>(
        &self,
        conv: &Conv,
        inputs: &Inputs<'a>,
        (panel, channels): (usize, Range<usize>),
        buffer: &'a mut Vec<f32>,
        filters: &'a mut [f32],
    ) -> [&'a [f32]; 2] {
        let Panels { words, taps, block, .. } = conv.panels;
        let (run, count) = (taps * block, channels.len());
        let per_word = if words == Words::Bf16 { 2 } else { 1 };
        let steps = channels.start / per_word * taps..channels.end.div_ceil(per_word) * taps;
        let found = panel_words(inputs, 1, (&conv.panels, conv.blocks), panel, steps, buffer);
        if words == Words::Bf16 {
            vectorize(Widen { words: found, run, out: as_words_mut(filters) });
            return [filters, &filters[(count - 1) * run..]];
        }
        let found = as_floats(found);
        filters[..run].copy_from_slice(&found[(count - 1) * run..]);
        [found, filters]
    }
}

/// Rows of outputs from a plane for each output of a tile.
struct Join<'a> {
    planes: &'a [f32],
    step: usize,
    len: usize,
    rows: &'a mut [f32],
}

impl Vectorized for Join<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Join { planes, step, len, rows } = self;
        for y in 0..OUTPUTS {
            let plane = |x: usize| &planes[(y * OUTPUTS + x) * step..][..len];
            let [a, b, c, d] = [plane(0), plane(1), plane(2), plane(3)];
            let out = &mut rows[y * OUTPUTS * step..][..OUTPUTS * len];
            for i in 0..len {
                out[4 * i] = a[i];
                out[4 * i + 1] = b[i];
                out[4 * i + 2] = c[i];
                out[4 * i + 3] = d[i];
            }
        }
    }
}

/// Pairs of bf16 of two runs as the one run and the other.
struct Widen<'a> {
    words: &'a [u32],
    run: usize,
    out: &'a mut [u32],
}

impl Vectorized for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Widen { words, run, out } = self;
        for (words, out) in words.chunks_exact(run).zip(out.chunks_exact_mut(2 * run)) {
            let (low, high) = out.split_at_mut(run);
            for i in 0..run {
                low[i] = words[i] << 16;
                high[i] = words[i] & 0xffff_0000;
            }
        }
    }
}
