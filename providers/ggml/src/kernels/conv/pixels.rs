use super::{
    Added, Conv,
    strip::{Rectangle, Strip, channels_of},
};
use crate::{
    ffi::{Inputs, Tile},
    kernels::{Panels, Window, panel_words},
    simd::{
        Level, as_words, as_words_mut,
        lines::Lines,
        product::{Block, Left, Product, Scales, Start, TILE, Taps},
        transpose::{Squares, transpose},
    },
};
use std::{cell::RefCell, ops::Range};

/// A convolution for levels with tiles, as a product of pixels and filters. Each pixel of an input strip is a row of channels, with a
/// cache line for every 16 pairs. So each tap of the window reads whole, consecutive lines, whatever its offset. The sums have
/// filters last and are transposed while they are in the L1 cache.
pub(super) struct Pixels {
    pub(super) strip: Strip,
    /// Runs of [`TILE`] channel pairs.
    runs: usize,
    taps: Taps,
    /// Pixels of a strip, including those that its last blocks read past its end and ignore.
    pixels: usize,
}

/// Columns of a strip of several rows. With wider strips of fewer rows, the rows around them would be copied too often.
const COLS: usize = 128;
/// Outputs of a strip if its input fits the L2 cache, else half as many. All filters are read once per strip.
const OUTPUTS: usize = 512;
/// Words of an input that fits the L2 cache.
const STRIP: usize = 1 << 18;
/// Runs that are multiplied together. A panel of filters of this depth stays in the L2 cache.
const RUNS: usize = 40;

/// How many rows of channel pairs ahead are prefetched. More would evict each other, because channels of images whose size is a power
/// of two share a few cache sets.
const AHEAD: usize = 3;

#[derive(Default)]
struct Scratch {
    strip: Lines<u32>,
    /// One row of sixteen words.
    rows: Lines<u32>,
    panel: Vec<f32>,
    /// Sums of blocks of pixels and filters, one row for each pixel.
    sums: Lines<f32>,
    /// The sums of one block, one row for each filter.
    turned: Lines<f32>,
}

/// Neighbouring outputs in a line of a rectangle.
struct Columns<'a> {
    of: &'a Rectangle,
    line: usize,
    pixels: Range<usize>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Pixels {
    pub(super) fn new(level: Level, panels: &Panels, window: &Window) -> Self {
        let runs = panels.steps() / panels.taps / TILE;
        let (block, _) = level.block(panels.words);
        let strip = |pixels: usize| {
            let cols = if window.output[0] > 1 { COLS } else { pixels };
            Strip::new(window, cols, pixels, block)
        };
        let large = strip(OUTPUTS);
        let strip = if large.area * runs * TILE <= STRIP { large } else { strip(OUTPUTS / 2) };
        let taps = Taps::new((0..runs.min(RUNS) * panels.taps * TILE).map(|at| {
            let (pair, tap) = panels.pair_of(at);
            (pair / TILE * strip.area + window.tap(tap, strip.plane)) * TILE + pair % TILE
        }));
        let pixels = runs * strip.area + strip.rows * strip.plane[1] + block;
        Pixels { strip, runs, taps, pixels }
    }

    pub(super) fn tile(&self, conv: &Conv, inputs: &Inputs<'_>, tile: &mut Tile<'_>) {
        SCRATCH.with_borrow_mut(|scratch| {
            for part in self.strip.parts(conv, tile) {
                self.fill((conv, inputs), &part, scratch);
                self.part((conv, inputs), tile, &part, scratch);
            }
        });
    }

    /// Computes the tile's filters for a rectangle of the output, whose input is in the strip.
    fn part(
        &self,
        (conv, inputs): (&Conv, &Inputs<'_>),
        tile: &mut Tile<'_>,
        of: &Rectangle,
        scratch: &mut Scratch,
    ) {
        let Panels { groups, taps, words, block, .. } = conv.panels;
        let (height, _) = conv.level.block(words);
        let first_panel = of.plane % groups * conv.panels.per_group();
        let (lines, len) = self.strip.lines(of);
        let blocks = lines * len.div_ceil(height);
        // If all runs fit in one pass, each block is completed at once, and one block of sums suffices.
        let step = if self.runs > RUNS { height * block } else { 0 };
        let Scratch { strip, panel, sums, turned, .. } = scratch;
        sums.resize((blocks - 1) * step + height * block);
        turned.resize(height * block);
        for filter in tile.rows.clone().step_by(block) {
            let filters = filter..tile.rows.end.min(filter + block);
            // Whole tiles. The surplus columns are not read.
            let wide = filters.len().next_multiple_of(TILE);
            let added =
                filters.clone().map(|filter| conv.added(inputs, of.plane, filter)).collect::<Vec<_>>();
            for run in (0..self.runs).step_by(RUNS) {
                let count = RUNS.min(self.runs - run);
                let steps = run * taps * TILE..(run + count) * taps * TILE;
                let kept = (&conv.panels, conv.blocks);
                let b = panel_words(inputs, 1, kept, first_panel + filter / block, steps, panel);
                for at in 0..blocks {
                    let (line, col) = (at / (blocks / lines), at % (blocks / lines) * height);
                    let pixel = run * self.strip.area + line * self.strip.plane[1] + col;
                    let pixels = col..len.min(col + height);
                    let sums = &mut sums[at * step..][..height * block];
                    Product {
                        level: conv.level,
                        words,
                        left: Left::Taps,
                        depth: count * taps * TILE,
                        a: &strip[pixel * TILE..],
                        b,
                        taps: &self.taps,
                        scales: Scales::default(),
                        start: if run > 0 { Start::Output } else { Start::Zero },
                        ahead: &[],
                        clip: None,
                    }
                    .into(Block::new(
                        sums,
                        block,
                        pixels.len().next_multiple_of(TILE),
                        wide,
                    ));
                    if run + count == self.runs {
                        let columns = Columns { of, line, pixels };
                        self.finish(conv, tile, columns, (filters.start, &added), (sums, turned));
                    }
                }
            }
        }
    }

    /// Writes outputs from complete sums.
    fn finish(
        &self,
        conv: &Conv,
        tile: &mut Tile<'_>,
        Columns { of, line, pixels }: Columns<'_>,
        (filter, added): (usize, &[Added<'_>]),
        (sums, turned): (&[f32], &mut [f32]),
    ) {
        let (height, block) = conv.level.block(conv.panels.words);
        let [from, to] = [(TILE * block, block), (TILE, height)].map(|(step, row)| Squares { step, row });
        for first in (0..added.len()).step_by(TILE) {
            let turned = &mut as_words_mut(turned)[first * height..];
            transpose(pixels.len().div_ceil(TILE), (&as_words(sums)[first..], from), (turned, to));
        }
        for (span, first) in self.strip.spans(of, conv.window.output[1], line, pixels) {
            conv.finish_rows(added, tile, filter, span, (&turned[first..], height));
        }
    }

    /// Copies the input of a rectangle of the output, with its padding.
    fn fill(&self, (conv, inputs): (&Conv, &Inputs<'_>), of: &Rectangle, scratch: &mut Scratch) {
        let Strip { area, plane: [height, pitch], .. } = self.strip;
        let Scratch { strip, rows, .. } = scratch;
        let cols = of.cols.len() + conv.window.reach(1);
        // A row is written in whole squares, and the next row comes after them.
        let row = cols.next_multiple_of(TILE) + TILE;
        rows.resize(TILE * row);
        strip.resize((self.pixels + TILE) * TILE);
        let last = of.rows.len() + conv.window.reach(0) - 1;
        let (image, all) = (conv.image(inputs, of.plane), conv.channels());
        let channels = |word: usize| {
            let some = channels_of(conv.panels.words, word, all);
            (some.0 < all).then_some(some)
        };
        for run in 0..self.runs {
            for phase in self.strip.phases(&conv.window) {
                for y in 0..=last {
                    for (i, out) in rows.chunks_exact_mut(row).enumerate() {
                        let (ahead, below) = ((i + AHEAD) % TILE, (i + AHEAD) / TILE);
                        if let Some(some) = channels(run * TILE + ahead)
                            && y + below <= last
                        {
                            self.strip.fetch((conv, image), of, some, [phase, y + below]);
                        }
                        match channels(run * TILE + i) {
                            Some(some) => {
                                self.strip.copy((conv, image), of, some, [phase, y], &mut out[..cols])
                            }
                            None => out.fill(0),
                        }
                    }
                    let pixel = run * area + (phase * height + y) * pitch;
                    let [from, to] =
                        [(TILE, row), (TILE * TILE, TILE)].map(|(step, row)| Squares { step, row });
                    transpose(cols.div_ceil(TILE), (rows, from), (&mut strip[pixel * TILE..], to));
                }
            }
        }
    }
}
