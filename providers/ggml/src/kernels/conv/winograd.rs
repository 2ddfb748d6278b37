use super::{Conv, line::Line};
use crate::{
    ffi::{Inputs, Tile},
    kernels::{Panels, Window, panel_bytes, panel_words, panels::Order, shares},
    simd::{
        Level, Vectorized, Words, as_floats, as_words, as_words_mut,
        lines::Lines,
        product::{Block, Left, Product, Scales, Start, Taps},
        vectorize,
        winograd::{INPUTS, OUTPUTS, PRODUCTS, Planes, SLACK, Transform, spread},
    },
};
use std::{cell::RefCell, ops::Range};

/// A convolution by Winograd's algorithm (see [`simd::winograd`](crate::simd::winograd)): a quarter of the multiplications, but linear
/// transforms of input, filters and output. It computes in f32, whatever the type of the filters.
pub(super) struct Winograd {
    /// Images whose tiles are multiplied together. Small ones share the transformed filters.
    pub(super) together: usize,
    /// Rows and columns of tiles of an image.
    tiles: [usize; 2],
    /// Rows of tiles in a unit of work.
    rows: usize,
    /// Channels that are multiplied together.
    channels: usize,
    /// Rows and columns of a product's block.
    block: (usize, usize),
    taps: Taps,
    steps: Steps,
}

/// The distances between planes of inputs and outputs of tiles, of transformed inputs, of transformed filters, and of products.
struct Steps {
    tiles: usize,
    input: usize,
    filters: usize,
    sums: usize,
}

/// Approximate tiles per part. Each part re-transforms the filters.
const PART: usize = 64;
/// Channels that are multiplied together. Their transformed input stays in the L2 cache, with the sums.
const CHANNELS: usize = 64;
/// Panels of filters whose sums stay in the L2 cache.
const PANELS: usize = 4;
/// The fewest channels and filters for which the transforms pay off.
const LEAST: usize = 16;
/// The same if strips are multiplied as bf16 pairs, at twice the rate.
const LEAST_OF_PAIRS: usize = 64;
/// Elements of an image row that the tiles of a part read, including the slack.
const LINE: usize = (PART + SLACK + 1) * OUTPUTS;
/// A cache line between planes, so that they do not share cache sets.
const APART: usize = 16;

#[derive(Default)]
struct Scratch {
    /// Rows of the image.
    lines: Lines<f32>,
    /// A plane for each input, or output, of a tile.
    tiles: Lines<f32>,
    /// The transformed input of all channels.
    input: Lines<f32>,
    /// Widened filters.
    panel: Vec<f32>,
    filters: Lines<f32>,
    transformed: Lines<f32>,
    sums: Lines<f32>,
    /// Rows of outputs.
    joined: Lines<f32>,
}

/// Words of a column of filters, padded so that columns that fill cache lines also begin at one.
fn column(height: usize) -> usize {
    height.next_power_of_two()
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Winograd {
    /// Returns `None` if the algorithm does not apply.
    pub(super) fn new(level: Level, batch: usize, panels: &Panels, window: &Window) -> Option<Self> {
        let fits = (window.kernel, window.stride, window.dilation) == ([3, 3], [1, 1], [1, 1]);
        if !fits || panels.order != Order::Columns {
            return None;
        }
        let block @ (height, width) = level.block(Words::F32);
        assert_eq!(panels.block, height, "panels of another level");
        let tiles = window.output.map(|n| n.div_ceil(OUTPUTS));
        let rows = (PART / tiles[1]).clamp(1, tiles[0]);
        let fits = |images: &usize| {
            batch.is_multiple_of(*images) && images * tiles[0] * tiles[1] <= PART && panels.groups == 1
        };
        let together = (2..=batch).rev().find(fits).unwrap_or(1);
        let blocks = PART.min(together * rows * tiles[1]).div_ceil(width);
        let channels = CHANNELS.min((panels.depth / panels.taps).next_multiple_of(2));
        let steps = Steps {
            tiles: blocks * width + APART,
            input: blocks * channels * width + APART,
            filters: channels * column(height) + APART,
            sums: blocks * height * width + APART,
        };
        Some(Winograd { together, tiles, rows, channels, block, taps: Taps::dense(channels, width), steps })
    }

    /// Whether it is faster than strips.
    pub(super) fn is_faster(&self, panels: &Panels, window: &Window) -> bool {
        let outputs = self.together * window.output.iter().product::<usize>();
        let tiles = self.together * self.tiles[0] * self.tiles[1];
        let least = panels.rows.min(panels.depth / panels.taps);
        match panels.words {
            Words::Bf16 => outputs > 10 * tiles + 80 && least >= LEAST_OF_PAIRS,
            // A tile takes as long as 7 outputs of a strip, and transforming the filters as long as 40.
            _ => outputs > 7 * tiles + 40 && least >= LEAST,
        }
    }

    /// Outputs of a filter in a unit of work.
    pub(super) fn outputs(&self, conv: &Conv) -> usize {
        self.rows * OUTPUTS * conv.window.output[1]
    }

    /// Multiplications of a filter for each channel.
    pub(super) fn multiplications(&self) -> usize {
        PRODUCTS * self.tiles[0] * self.tiles[1]
    }

    /// The cost of the transforms for some filters and outputs, in multiplications. Transforming a filter takes as long as 40 outputs of a
    /// strip.
    #[cfg(test)]
    pub(super) fn repeated(&self, conv: &Conv, [filters, outputs]: [usize; 2]) -> usize {
        let tiles = self.together * outputs.div_ceil(OUTPUTS * OUTPUTS);
        let filters = filters * tiles.div_ceil(PART) * 40 * conv.panels.taps;
        conv.channels() * (filters + tiles * PRODUCTS * 8)
    }

    pub(super) fn tile(&self, conv: &Conv, inputs: &Inputs<'_>, tile: &mut Tile<'_>) {
        let row = OUTPUTS * conv.window.output[1];
        let rows = tile.cols.start / row..tile.cols.end.div_ceil(row) + (self.together - 1) * self.tiles[0];
        let tiles = rows.start * self.tiles[1]..rows.end * self.tiles[1];
        SCRATCH.with_borrow_mut(|scratch| {
            for first in tiles.clone().step_by(PART) {
                self.part(conv, inputs, tile, first..tiles.end.min(first + PART), scratch);
            }
        });
    }

    /// Computes some tiles of the images, which are numbered consecutively, for the filters of `tile`.
    fn part(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        tile: &mut Tile<'_>,
        tiles: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let (height, channels, steps) = (self.block.0, conv.channels(), &self.steps);
        scratch.lines.resize(INPUTS * LINE);
        scratch.tiles.resize(PRODUCTS * steps.tiles);
        let chunk_len = PRODUCTS * steps.input + APART;
        scratch.input.resize(channels.div_ceil(self.channels) * chunk_len);
        scratch.filters.resize(self.channels * conv.panels.taps * height + SLACK);
        scratch.transformed.resize(PRODUCTS * steps.filters + SLACK);
        scratch.sums.resize(PANELS * PRODUCTS * steps.sums + SLACK);
        scratch.joined.resize(OUTPUTS * OUTPUTS * steps.tiles);
        let first_panel = tile.plane % conv.panels.groups * conv.panels.per_group();
        for group in tile.rows.clone().step_by(PANELS * height) {
            let group = group..tile.rows.end.min(group + PANELS * height);
            for (chunk, channel) in (0..channels).step_by(self.channels).enumerate() {
                let (input, some) = (chunk * chunk_len, channel..channels.min(channel + self.channels));
                if group.start == tile.rows.start {
                    for (i, channel) in some.clone().enumerate() {
                        let at = input + i * self.block.1;
                        self.transform_input(conv, inputs, (tile.plane, channel), tiles.clone(), scratch, at);
                    }
                }
                for (i, filter) in group.clone().step_by(height).enumerate() {
                    let panel = first_panel + filter / height;
                    self.transform_filters(conv, inputs, panel, some.clone(), scratch);
                    let next = if filter + height < group.end {
                        Some((panel + 1, some.clone()))
                    } else if some.end < channels {
                        let end = channels.min(some.end + self.channels);
                        Some((first_panel + group.start / height, some.end..end))
                    } else if group.end < tile.rows.end {
                        Some((panel + 1, 0..channels.min(self.channels)))
                    } else {
                        None
                    };
                    let ahead = next.map_or(&[][..], |(panel, channels)| {
                        panel_bytes(inputs, 1, (&conv.panels, conv.blocks), panel, steps_of(conv, &channels))
                    });
                    let rows = height.min(group.end - filter);
                    self.multiply(
                        (conv.level, ahead),
                        some.clone(),
                        [rows, tiles.len()],
                        scratch,
                        [input, i],
                    );
                }
            }
            for filter in group.clone() {
                let i = filter - group.start;
                let at = i / height * PRODUCTS * steps.sums + i % height * self.block.1;
                self.transform_output(conv, inputs, tile, (filter, tiles.clone()), scratch, at);
            }
        }
    }

    /// Transforms the inputs of tiles in one channel, to `at` in the transformed input.
    fn transform_input(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        channel: (usize, usize),
        tiles: Range<usize>,
        scratch: &mut Scratch,
        at: usize,
    ) {
        let width = self.block.1;
        self.gather(conv, inputs, channel, tiles.clone(), &mut scratch.lines, &mut scratch.tiles);
        Transform::Input.apply(
            conv.level,
            [tiles.len().div_ceil(width), width],
            (&scratch.tiles, Planes { step: self.steps.tiles, next: width }),
            (&mut scratch.input[at..], Planes { step: self.steps.input, next: self.channels * width }),
        );
    }

    /// Transforms some channels of a panel of filters.
    fn transform_filters(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        panel: usize,
        channels: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let (height, count) = (self.block.0, channels.len());
        let Scratch { panel: buffer, filters, transformed, .. } = scratch;
        let [all, last] = self.filters(conv, inputs, (panel, channels), buffer, filters);
        let source = Planes { step: height, next: conv.panels.taps * height };
        let target = Planes { step: self.steps.filters, next: column(height) };
        Transform::Filter.apply(conv.level, [count - 1, height], (all, source), (transformed, target));
        let at = (count - 1) * column(height);
        Transform::Filter.apply(conv.level, [1, height], (last, source), (&mut transformed[at..], target));
    }

    /// Multiplies transformed filters by the transformed input that begins at `input`, and adds the product to the sums of a panel. The
    /// first channels overwrite the sums instead.
    fn multiply(
        &self,
        (level, ahead): (Level, &[u8]),
        channels: Range<usize>,
        [rows, cols]: [usize; 2],
        scratch: &mut Scratch,
        [input, panel]: [usize; 2],
    ) {
        let Steps { input: input_step, filters, sums, .. } = self.steps;
        let (height, width) = self.block;
        let mut ahead = shares(ahead, PRODUCTS * cols.div_ceil(width));
        for product in 0..PRODUCTS {
            let a = as_words(&scratch.transformed[product * filters..]);
            for (block, col) in (0..cols).step_by(width).enumerate() {
                let at = input + product * input_step + block * self.channels * width;
                let out = (panel * PRODUCTS + product) * sums + block * height * width;
                Product {
                    level,
                    words: Words::F32,
                    left: Left::Columns(column(height)),
                    depth: channels.len(),
                    a,
                    b: as_words(&scratch.input[at..]),
                    taps: &self.taps,
                    scales: Scales::default(),
                    start: if channels.start > 0 { Start::Output } else { Start::Zero },
                    ahead: ahead.next().unwrap_or_default(),
                    clip: None,
                }
                .into(Block::new(
                    &mut scratch.sums[out..],
                    width,
                    rows,
                    width.min(cols - col),
                ));
            }
        }
    }

    /// Writes some tiles of a filter whose sums begin at `at`.
    fn transform_output(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        tile: &mut Tile<'_>,
        (filter, tiles): (usize, Range<usize>),
        scratch: &mut Scratch,
        at: usize,
    ) {
        let (height, width) = self.block;
        let (step, blocks) = (self.steps.tiles, tiles.len().div_ceil(width));
        Transform::Output.apply(
            conv.level,
            [blocks, width],
            (&scratch.sums[at..], Planes { step: self.steps.sums, next: height * width }),
            (&mut scratch.tiles, Planes { step, next: width }),
        );
        let joined = &mut scratch.joined;
        vectorize(Join { planes: &scratch.tiles, step, len: blocks * width, rows: joined });
        let [image_height, image_width] = conv.window.output;
        for run in self.runs(tiles.clone()) {
            let [image, row, col] = self.place(run.start);
            let plane = tile.plane + image;
            let added = conv.added(inputs, plane, filter);
            let (row, from) = (row * OUTPUTS, col * OUTPUTS);
            let count = (run.len() * OUTPUTS).min(image_width - from);
            for y in 0..OUTPUTS.min(image_height - row) {
                let start = (row + y) * image_width + from;
                let found = &joined[(y * step + run.start - tiles.start) * OUTPUTS..][..count];
                conv.finish(&added, &mut tile.of_plane(plane), filter, start..start + count, Some(found));
            }
        }
    }

    /// The image, row and column of a tile.
    fn place(&self, tile: usize) -> [usize; 3] {
        let [height, width] = self.tiles;
        [tile / width / height, tile / width % height, tile % width]
    }

    /// Divides tiles into parts. Each part is inside one row of tiles.
    fn runs(&self, tiles: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let width = self.tiles[1];
        (tiles.start / width..tiles.end.div_ceil(width))
            .map(move |row| tiles.start.max(row * width)..tiles.end.min((row + 1) * width))
    }

    /// Reads the inputs of tiles in one channel, one plane for each input of a tile.
    fn gather(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        (plane, channel): (usize, usize),
        tiles: Range<usize>,
        lines: &mut [f32],
        elements: &mut [f32],
    ) {
        let step = self.steps.tiles;
        let [pad, left] = conv.window.pad;
        for run in self.runs(tiles.clone()) {
            let [image, row, col] = self.place(run.start);
            let ([height, width], image) = conv.image(inputs, plane + image);
            let image = &image[channel * height * width..][..height * width];
            let inside =
                |y: usize| (row * OUTPUTS + y).checked_sub(pad).filter(|y| *y < conv.window.input[0]);
            // Write all rows before reading the first one, so that no load waits for a store.
            for (y, line) in lines.chunks_exact_mut(LINE).enumerate() {
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
            for (y, line) in lines.chunks_exact(LINE).enumerate() {
                let planes = &mut elements[y * INPUTS * step + run.start - tiles.start..];
                match inside(y) {
                    Some(_) => spread(conv.level, line, run.len(), planes, step),
                    None => (0..INPUTS).for_each(|x| planes[x * step..][..run.len()].fill(0.0)),
                }
            }
        }
    }

    /// Some channels of a panel of filters as f32: first all, then the last one again with slack after it.
    fn filters<'a>(
        &self,
        conv: &Conv,
        inputs: &Inputs<'a>,
        (panel, channels): (usize, Range<usize>),
        buffer: &'a mut Vec<f32>,
        filters: &'a mut [f32],
    ) -> [&'a [f32]; 2] {
        let Panels { words, taps, block, .. } = conv.panels;
        let (run, count, steps) = (taps * block, channels.len(), steps_of(conv, &channels));
        let found = panel_words(inputs, 1, (&conv.panels, conv.blocks), panel, steps, buffer);
        if words == Words::Bf16 {
            vectorize(Unpair { words: found, run, out: as_words_mut(filters) });
            return [filters, &filters[(count - 1) * run..]];
        }
        let found = as_floats(found);
        filters[..run].copy_from_slice(&found[(count - 1) * run..]);
        [found, filters]
    }
}

/// The steps of some channels in a panel of filters.
fn steps_of(conv: &Conv, channels: &Range<usize>) -> Range<usize> {
    let per_word = conv.panels.words.elements();
    channels.start / per_word * conv.panels.taps..channels.end.div_ceil(per_word) * conv.panels.taps
}

/// Joins the output planes of tiles into rows of outputs.
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

/// Splits bf16 pairs of two runs into the two runs.
struct Unpair<'a> {
    words: &'a [u32],
    run: usize,
    out: &'a mut [u32],
}

impl Vectorized for Unpair<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Unpair { words, run, out } = self;
        for (words, out) in words.chunks_exact(run).zip(out.chunks_exact_mut(2 * run)) {
            let (low, high) = out.split_at_mut(run);
            for i in 0..run {
                low[i] = words[i] << 16;
                high[i] = words[i] & 0xffff_0000;
            }
        }
    }
}
