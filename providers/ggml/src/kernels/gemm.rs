use super::{
    Activation, Blocks, Panels, Window,
    activation::Activate,
    panel_words,
    panels::{Layout, narrow, pair},
};
use crate::{
    ffi::{
        Grid, Inputs, Kernel, Tile, as_words,
        lines::Lines,
        product::{DEPTH, Left, Product, ROW_STRIDE, Start, Taps, Words},
        simd::{Level, Vectorized, vectorize},
    },
    shape,
};
use std::{cell::RefCell, ops::Range};

/// Matrix products `act(A * B + bias + addend)` of a stack of matrices: inputs A (f32, read with strides), B in panels of
/// [`Level::block`]'s columns ([`Panels`] whose rows are the columns of B), then, where they are there, `bias` (one
/// element for each column) and `addend` (of the output's shape).
pub(crate) struct Gemm {
    pub(crate) level: Level,
    /// Matrices; of those of B there are as many, or one for all.
    pub(crate) batch: usize,
    pub(crate) rows: usize,
    /// Dimensions of the stack, and where in A each of its matrices begins.
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<isize>,
    /// Of a matrix of A.
    pub(crate) layout: Layout,
    /// Where the rows of A are what the outputs of a convolution see of an image.
    pub(crate) patches: Option<Patches>,
    pub(crate) panels: Panels,
    pub(crate) blocks: Option<Blocks>,
    pub(crate) bias: bool,
    pub(crate) addend: bool,
    pub(crate) activation: Option<Activation>,
    /// [`Taps::dense`] over [`DEPTH`] and the columns of the level's block.
    pub(crate) taps: Taps,
}

/// Rows of A that are packed at a time, about: whole blocks of a level's rows.
const MAX_ROWS: usize = 8 * 14;

#[derive(Default)]
struct Scratch {
    rows: Lines<u32>,
    panel: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Kernel for Gemm {
    fn grid(&self, workers: usize) -> Grid {
        let (_, width) = self.level.block(self.panels.words);
        let (rows, cols) = (self.rows, self.panels.rows);
        // Each worker gets the same number of row tiles, if there are enough rows; else columns are shared out.
        let mut down = rows.div_ceil(self.most_rows());
        if self.batch * down >= workers && !self.batch.is_multiple_of(workers) {
            down = down.next_multiple_of(workers);
        }
        let mut tile_rows = rows.div_ceil(down);
        if self.batch == 1 && rows <= self.most_rows() && rows < cols {
            // B is larger than A: each part of it is read by one worker alone.
            (down, tile_rows) = (0, rows);
        }
        let across = (2 * workers).div_ceil((self.batch * down).max(1)).min(cols.div_ceil(width));
        let tile_cols = match self.batch * down >= workers {
            true => cols,
            false => cols.div_ceil(width).div_ceil(across) * width,
        };
        Grid { planes: self.batch, rows, cols, tile_rows, tile_cols }
    }

    fn multiplications(&self) -> usize {
        self.batch * self.rows * self.panels.rows * self.panels.depth
    }

    fn words(&self) -> Words {
        self.panels.words
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        SCRATCH.with_borrow_mut(|scratch| self.multiply(inputs, &mut tile, scratch));
        if let Some(activation) = self.activation.filter(|_| self.clip().is_none()) {
            for row in tile.rows.clone() {
                vectorize(Activate(activation, tile.row(row)));
            }
        }
        Ok(())
    }
}

impl Gemm {
    fn most_rows(&self) -> usize {
        MAX_ROWS.next_multiple_of(self.level.block(self.panels.words).0)
    }

    /// The activation, where products can do it.
    fn clip(&self) -> Option<[f32; 2]> {
        match self.activation? {
            Activation::Relu => Some([0.0, f32::INFINITY]),
            Activation::Clip(low, high) => Some([low, high]),
            _ => None,
        }
    }

    fn multiply(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, scratch: &mut Scratch) {
        let Panels { words, depth, .. } = self.panels;
        let (height, width) = self.level.block(words);
        let (rows, cols) = (tile.rows.clone(), tile.cols.clone());
        if self.addend {
            self.prefill(inputs, tile);
        }
        let bias = (self.bias && !self.addend).then(|| inputs.f32(2));
        let first_panel = if self.panels.groups > 1 { tile.plane * self.panels.per_group() } else { 0 };
        let matrix =
            self.layout.start.wrapping_add_signed(shape::offset(tile.plane, &self.dims, &self.strides));
        let per_word = if words == Words::Bf16 { 2 } else { 1 };
        scratch.rows.resize(self.most_rows() * ROW_STRIDE);
        for step in (0..self.panels.steps()).step_by(DEPTH) {
            let run = DEPTH.min(self.panels.steps() - step);
            let elements = step * per_word..((step + run) * per_word).min(depth);
            for (i, row) in rows.clone().enumerate() {
                let out = &mut scratch.rows[i * ROW_STRIDE..][..run];
                if let Some(patches) = &self.patches {
                    patches.pack(&inputs.f32(0)[matrix..], row, elements.clone(), words, out);
                    continue;
                }
                let start = matrix + row * self.layout.row_step + elements.start * self.layout.depth_step;
                let from = &inputs.f32(0)[start..];
                vectorize(PackRow { from, len: elements.len(), step: self.layout.depth_step, words, out });
            }
            let last = step + run == self.panels.steps();
            for col in cols.clone().step_by(width) {
                let (kept, panel) = ((&self.panels, self.blocks), first_panel + col / width);
                let b = panel_words(inputs, 1, kept, panel, step..step + run, &mut scratch.panel);
                let wide = width.min(cols.end - col);
                let start = match bias {
                    _ if self.addend || step > 0 => Start::Output,
                    Some(bias) => Start::Row(&bias[col..col + wide]),
                    None => Start::Zero,
                };
                let product = Product {
                    level: self.level,
                    words,
                    left: Left::Rows,
                    depth: run,
                    a: &[],
                    b,
                    taps: &self.taps,
                    start,
                    clip: self.clip().filter(|_| last),
                };
                for row in rows.clone().step_by(height) {
                    let a = &scratch.rows[(row - rows.start) * ROW_STRIDE..];
                    let high = height.min(rows.end - row);
                    Product { a, ..product }.into(tile.block(row, col, high, wide));
                }
            }
        }
    }

    /// Writes what is added to the product, of which there is an addend.
    fn prefill(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>) {
        let cols = tile.cols.clone();
        let bias = self.bias.then(|| &inputs.f32(2)[cols.clone()]);
        let addend = inputs.f32(2 + usize::from(self.bias));
        for row in tile.rows.clone() {
            let start = (tile.plane * self.rows + row) * self.panels.rows;
            let addend = &addend[start + cols.start..start + cols.end];
            let out = tile.row(row);
            match bias {
                None => out.copy_from_slice(addend),
                Some(bias) => out.iter_mut().zip(bias.iter().zip(addend)).for_each(|(out, (a, b))| *out = a + b),
            }
        }
    }
}

/// What the outputs of a convolution see of an image: a row for each output, of as many elements as a filter has and in their
/// order.
pub(crate) struct Patches {
    window: Window,
    /// From a row of the image to the next, and from a column to the next.
    steps: [usize; 2],
    elements: Vec<Element>,
}

/// An element of a patch.
struct Element {
    /// Its row and column in the window.
    tap: [usize; 2],
    /// Where its channel begins.
    channel: usize,
    /// Its distance from the first element of the window.
    distance: usize,
}

impl Patches {
    /// Of an image whose channels, rows and columns are this far apart.
    pub(crate) fn new(window: Window, channels: usize, [channel_step, row_step, col_step]: [usize; 3]) -> Self {
        let [height, width] = window.kernel;
        let [down, across] = window.dilation;
        let elements = (0..channels * height * width).map(|i| {
            let (channel, tap) = (i / (height * width) * channel_step, [i / width % height, i % width]);
            Element { tap, channel, distance: channel + tap[0] * down * row_step + tap[1] * across * col_step }
        });
        Patches { elements: elements.collect(), steps: [row_step, col_step], window }
    }

    /// Some elements of an output's row, zero where the window is outside the image.
    fn pack(&self, image: &[f32], output: usize, range: Range<usize>, words: Words, out: &mut [u32]) {
        let width = self.window.output[1];
        let at = [output / width, output % width];
        let place = |[ky, kx]: [usize; 2]| {
            let (y, x) = (self.window.source(0, at[0], ky)?, self.window.source(1, at[1], kx)?);
            Some(y * self.steps[0] + x * self.steps[1])
        };
        let elements = &self.elements[range];
        let last = self.window.kernel.map(|taps| taps - 1);
        match (place([0, 0]), place(last)) {
            (Some(first), Some(_)) => {
                let image = &image[first..];
                write(elements.len(), |i| image[elements[i].distance], words, out);
            }
            _ => {
                let at = |i: usize| {
                    let Element { tap, channel, .. } = elements[i];
                    place(tap).map_or(0.0, |place| image[channel + place])
                };
                write(elements.len(), at, words, out);
            }
        }
    }
}

/// Writes `len` elements in words, and zeros after them.
#[inline(always)]
fn write(len: usize, at: impl Fn(usize) -> f32, words: Words, out: &mut [u32]) {
    match words {
        Words::F32 => out.iter_mut().enumerate().for_each(|(i, word)| *word = at(i).to_bits()),
        Words::Bf16 => {
            let at = |i: usize| if i < len { at(i) } else { 0.0 };
            out.iter_mut().enumerate().for_each(|(i, word)| *word = pair(at(2 * i), at(2 * i + 1)));
        }
    }
}

/// A run of a row of A in words.
struct PackRow<'a> {
    from: &'a [f32],
    len: usize,
    step: usize,
    words: Words,
    out: &'a mut [u32],
}

impl Vectorized for PackRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let PackRow { from, len, step, words, out } = self;
        match (words, step) {
            (Words::F32, 1) => out.copy_from_slice(as_words(&from[..len])),
            (Words::Bf16, 1) => {
                let (pairs, rest) = from[..len].as_chunks::<2>();
                let (some, last) = out.split_at_mut(pairs.len());
                narrow(pairs, some);
                last.fill(0);
                if let (Some(last), [low]) = (last.first_mut(), rest) {
                    *last = pair(*low, 0.0);
                }
            }
            _ => write(len, |i| from[i * step], words, out),
        }
    }
}
