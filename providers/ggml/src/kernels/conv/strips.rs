use super::{
    Conv,
    strip::{Rectangle, Strip, channels_of},
};
use crate::{
    ffi::{Inputs, Tile},
    kernels::{Panels, Window, panel_bytes, panel_words, shares},
    simd::{
        Level,
        lines::Lines,
        product::{Block, Product, Scales, Start, Taps},
    },
};
use std::{cell::RefCell, ops::Range};

/// A convolution as a product of the filters and a padded strip of the input in the cache. Each tap of the window reads the strip at
/// another offset, so no patches are gathered.
pub(super) struct Strips {
    pub(super) strip: Strip,
    /// Words of channels that are copied together.
    channels: usize,
    taps: Taps,
    /// Words of a strip, including those that its last blocks read past its end and ignore.
    len: usize,
}

/// Steps of the depth in one product. A panel of filters and its columns then stay in the L1 cache.
const DEPTH: usize = 288;
/// Outputs of a strip.
const PIXELS: usize = 256;

#[derive(Default)]
struct Scratch {
    planes: Lines<u32>,
    panel: Vec<f32>,
    sums: Lines<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Strips {
    pub(super) fn new(level: Level, panels: &Panels, window: &Window) -> Self {
        let (_, width) = level.block(panels.words);
        let strip = Strip::new(window, PIXELS, PIXELS, width);
        let channels = (DEPTH / panels.taps).clamp(1, (panels.steps() / panels.taps).max(1));
        let taps = Taps::new((0..channels * panels.taps).map(|at| {
            let (channel, tap) = panels.pair_of(at);
            channel * strip.area + window.tap(tap, strip.plane)
        }));
        let len = channels * strip.area + strip.rows * strip.plane[1] + width;
        Strips { strip, channels, taps, len }
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
        let Rectangle { plane, rows, cols } = of;
        let Panels { groups, taps, words, .. } = conv.panels;
        let (height, width) = conv.level.block(words);
        let (pitch, out_width, flat) = (self.strip.plane[1], conv.window.output[1], self.strip.flat);
        let filters = tile.rows.clone();
        let first_panel = plane % groups * conv.panels.per_group();
        let Scratch { planes: buffer, panel, sums } = scratch;
        buffer.resize(self.len);
        let (lines, len) = self.strip.lines(of);
        if flat {
            sums.resize(filters.len() * len);
        }
        let runs = conv.panels.steps() / taps;
        for channel in (0..runs).step_by(self.channels) {
            let count = self.channels.min(runs - channel);
            self.fill(conv, inputs, of, channel..channel + count, buffer);
            for filter in filters.clone().step_by(height) {
                let steps = channel * taps..(channel + count) * taps;
                let kept = (&conv.panels, conv.blocks);
                let a = panel_words(inputs, 1, kept, first_panel + filter / height, steps.clone(), panel);
                let high = height.min(filters.end - filter);
                let more = filter + height < filters.end;
                let ahead: &[u8] = if more {
                    panel_bytes(inputs, 1, kept, first_panel + filter / height + 1, steps)
                } else {
                    &[]
                };
                let mut ahead = shares(ahead, lines * len.div_ceil(width));
                let product = |at: usize| Product {
                    level: conv.level,
                    words,
                    left: conv.panels.as_left(),
                    depth: count * taps,
                    a,
                    b: &buffer[at..],
                    taps: &self.taps,
                    scales: Scales::default(),
                    start: if channel > 0 { Start::Output } else { Start::Zero },
                    ahead: &[],
                    clip: None,
                };
                for i in 0..lines {
                    for col in (0..len).step_by(width) {
                        let wide = width.min(len - col);
                        let out = if flat {
                            Block::new(&mut sums[(filter - filters.start) * len + col..], len, high, wide)
                        } else {
                            tile.block(filter, (rows.start + i) * out_width + cols.start + col, high, wide)
                        };
                        let ahead = ahead.next().unwrap_or_default();
                        Product { ahead, ..product(i * pitch + col) }.into(out);
                    }
                }
            }
        }
        if conv.is_bare() && !flat {
            return;
        }
        for filter in filters.clone() {
            let added = conv.added(inputs, *plane, filter);
            for (i, row) in rows.clone().enumerate() {
                let span = row * out_width + cols.start..row * out_width + cols.end;
                let from = flat.then(|| &sums[(filter - filters.start) * len + i * pitch..][..cols.len()]);
                conv.finish(&added, tile, filter, span, from);
            }
        }
    }

    /// Copies the input of a rectangle of the output, with its padding, for some channels or channel pairs.
    fn fill(
        &self,
        conv: &Conv,
        inputs: &Inputs<'_>,
        of: &Rectangle,
        channels: Range<usize>,
        buffer: &mut [u32],
    ) {
        let Strip { area, plane: [height, pitch], .. } = self.strip;
        let (image, all) = (conv.image(inputs, of.plane), conv.channels());
        for (i, word) in channels.enumerate() {
            let some = channels_of(conv.panels.words, word, all);
            for phase in self.strip.phases(&conv.window) {
                for y in 0..of.rows.len() + conv.window.reach(0) {
                    let start = i * area + (phase * height + y) * pitch;
                    let out = &mut buffer[start..start + of.cols.len() + conv.window.reach(1)];
                    self.strip.copy((conv, image), of, some, [phase, y], out);
                }
            }
        }
    }
}
