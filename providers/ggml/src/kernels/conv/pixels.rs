use super::{
    Conv,
    strip::{Rectangle, Strip, channels_of},
};
use crate::{
    ffi::{
        Inputs, Tile, as_words, as_words_mut,
        lines::Lines,
        product::{Block, Left, Product, Start, TILE, Taps},
        simd::Level,
        transpose::{Squares, transpose},
    },
    kernels::{Panels, Window, panel_words},
};
use std::cell::RefCell;

/// A convolution in tiles, as a product of pixels with the filters: each pixel of a strip of the input is a row of channels, a
/// cache line for every 16 pairs of them, so that each tap of the window reads whole lines, one after the other, whatever its
/// offset. Sums come out with filters last, and are transposed.
pub(super) struct Pixels {
    strip: Strip,
    /// Runs of [`TILE`] pairs of channels.
    runs: usize,
    taps: Taps,
    /// Pixels of a strip, with those that blocks at its end read past it (and leave what comes of that).
    pixels: usize,
}

/// Columns of a strip of several rows: with few rows, those around them are copied too often.
const COLS: usize = 128;
/// Outputs of a strip, for which all filters are read once, if its input fits the second level cache; else half of them.
const OUTPUTS: usize = 512;
/// Words of such an input.
const STRIP: usize = 1 << 18;
/// Runs that are multiplied at a time: a panel of filters of so many stays in the second level cache.
const RUNS: usize = 40;

#[derive(Default)]
struct Scratch {
    strip: Lines<u32>,
    /// A row of sixteen words.
    rows: Lines<u32>,
    panel: Vec<f32>,
    /// Of a panel of filters, a row for each output.
    sums: Lines<f32>,
    /// The same, a row for each filter.
    turned: Lines<f32>,
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

    /// How many outputs of a filter are shared out at a time.
    pub(super) fn outputs(&self, window: &Window) -> usize {
        self.strip.outputs(window)
    }

    pub(super) fn tile(&self, conv: &Conv, inputs: &Inputs<'_>, tile: &mut Tile<'_>) {
        SCRATCH.with_borrow_mut(|scratch| {
            for part in self.strip.parts(conv, tile) {
                self.part(conv, inputs, tile, &part, scratch);
            }
        });
    }

    /// Computes the tile's filters for a rectangle of the output.
    fn part(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        tile: &mut Tile<'_>,
        of: &Rectangle,
        scratch: &mut Scratch,
    ) {
        let Panels { groups, taps, words, block, .. } = conv.panels;
        let (height, _) = conv.level.block(words);
        let first_panel = of.plane % groups * conv.panels.per_group();
        let pitch = self.strip.plane[1];
        self.fill(conv, inputs, of, scratch);
        let Scratch { strip, panel, sums, turned, .. } = scratch;
        let (lines, len) = self.strip.lines(of);
        // Whole tiles: what they have besides is left where nobody reads it.
        let line = len.next_multiple_of(TILE);
        sums.resize(lines * line * block);
        let from_turned = lines * line + TILE;
        turned.resize(block * from_turned);
        for filter in tile.rows.clone().step_by(block) {
            let filters = filter..tile.rows.end.min(filter + block);
            let wide = filters.len().next_multiple_of(TILE);
            for run in (0..self.runs).step_by(RUNS) {
                let count = RUNS.min(self.runs - run);
                let steps = run * taps * TILE..(run + count) * taps * TILE;
                let kept = (&conv.panels, conv.blocks);
                let b = panel_words(inputs, 1, kept, first_panel + filter / block, steps, panel);
                for i in 0..lines {
                    for col in (0..line).step_by(height) {
                        let out = &mut sums[(i * line + col) * block..];
                        Product {
                            level: conv.level,
                            words,
                            left: Left::Taps,
                            depth: count * taps * TILE,
                            a: &strip[(run * self.strip.area + i * pitch + col) * TILE..],
                            b,
                            taps: &self.taps,
                            start: if run > 0 { Start::Output } else { Start::Zero },
                            clip: None,
                        }
                        .into(Block::new(out, block, height.min(line - col), wide));
                    }
                }
            }
            for first in (0..wide).step_by(TILE) {
                let source = Squares { step: TILE * block, row: block };
                let target = Squares { step: TILE, row: from_turned };
                let turned = &mut as_words_mut(turned)[first * from_turned..];
                transpose(lines * line / TILE, (&as_words(sums)[first..], source), (turned, target));
            }
            let (width, from_row) = (conv.window.output[1], if self.strip.flat { pitch } else { line });
            for (filter, sums) in filters.zip(turned.chunks(from_turned)) {
                let added = conv.added(inputs, of.plane, filter);
                for (i, row) in of.rows.clone().enumerate() {
                    let span = row * width + of.cols.start..row * width + of.cols.end;
                    let sums = &sums[i * from_row..][..of.cols.len()];
                    conv.finish(&added, tile, filter, span, Some(sums));
                }
            }
        }
    }

    /// Copies the input that a rectangle of the output needs, padded.
    fn fill(&self, conv: &Conv, inputs: &Inputs<'_>, of: &Rectangle, scratch: &mut Scratch) {
        let Strip { area, plane: [height, pitch], .. } = self.strip;
        let Scratch { strip, rows, .. } = scratch;
        let cols = of.cols.len() + conv.window.reach(1);
        // A row is written up to a whole square; the next one comes after it.
        let row = cols.next_multiple_of(TILE) + TILE;
        rows.resize(TILE * row);
        strip.resize((self.pixels + TILE) * TILE);
        let words = conv.channels().div_ceil(2);
        for run in 0..self.runs {
            for phase in self.strip.phases(&conv.window) {
                for y in 0..of.rows.len() + conv.window.reach(0) {
                    for (word, out) in (run * TILE..).zip(rows.chunks_exact_mut(row)) {
                        if word < words {
                            let some = channels_of(conv.panels.words, word, conv.channels());
                            self.strip.copy((conv, inputs), of, some, [y, phase], &mut out[..cols]);
                        } else {
                            out.fill(0);
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
