use super::{
    Activation, Blocks, Panels, Window,
    activation::{Activate, bounds},
    blocks::{BLOCK, eight},
    panel_bytes, panel_scales, panel_words,
    panels::{Layout, narrow, pair},
    shares,
};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
    simd::{
        Level, Vectorized, Words, as_floats, as_words,
        lines::Lines,
        product::{DEPTH, Left, Product, ROW_STRIDE, SCALES, STEPS, Scales, Start, Taps},
        vectorize,
    },
};
use std::{cell::RefCell, ops::Range};

/// Matrix products `act(A * B + bias + addend)` of a stack of matrices. Inputs: A (f32, read with strides); B in [`Panels`] with the
/// columns of a [`Level::block`] (rows of the panels are columns of B); optionally `bias` (one element for each column) and `addend`
/// (of the output's shape).
pub(crate) struct Gemm {
    pub(crate) level: Level,
    /// The number of matrices. B has as many, or one for all.
    pub(crate) batch: usize,
    pub(crate) rows: usize,
    /// Dimensions of the stack, and their strides in A.
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<isize>,
    /// The layout of a matrix of A.
    pub(crate) layout: Layout,
    /// If present, the rows of A are the patches of an image that a convolution reads.
    pub(crate) patches: Option<Patches>,
    pub(crate) panels: Panels,
    pub(crate) blocks: Option<Blocks>,
    pub(crate) bias: bool,
    pub(crate) addend: bool,
    pub(crate) activation: Option<Activation>,
    /// [`Taps::dense`] for [`DEPTH`] and the columns of the level's block.
    pub(crate) taps: Taps,
}

/// The approximate number of rows of A that are packed together. The exact number is a multiple of the level's rows.
const MAX_ROWS: usize = 8 * 14;

/// Elements of an output that does not stay in the L2 cache.
const LARGE: usize = 1 << 17;

#[derive(Default)]
struct Scratch {
    rows: Lines<u32>,
    panel: Vec<f32>,
    /// The scales of rows and of columns, if words are bytes.
    row_scales: Vec<[f32; 2]>,
    col_scales: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Kernel for Gemm {
    fn grid(&self, workers: usize) -> Grid {
        let (height, width) = self.level.block(self.panels.words);
        let (rows, cols) = (self.rows, self.panels.rows);
        let panels = cols.div_ceil(width);
        let tile = |down: usize, across: usize| (rows.div_ceil(down), panels.div_ceil(across) * width);
        // How long the thread with the most tiles takes. A quarter of a tile more favours small tiles, because some threads may be slow.
        let cost = |(tile_rows, tile_cols): (usize, usize)| {
            let tiles = self.batch * rows.div_ceil(tile_rows) * cols.div_ceil(tile_cols);
            let multiplied = tile_rows.next_multiple_of(height) * tile_cols;
            (4 * tiles.div_ceil(workers) + 1) * (multiplied + self.loading([tile_rows, tile_cols]))
        };
        let least = rows.div_ceil(self.most_rows());
        let divisions = (least..least + 8).flat_map(|down| {
            // Give each thread this many tiles, or a few more.
            let across = [1, 2, 3, 4, 6, 8].map(|turns| turns * workers / (self.batch * down));
            across.into_iter().flat_map(|across| [across, across + 1]).map(move |across| (down, across))
        });
        let tiles = divisions.map(|(down, across)| tile(down, across.clamp(1, panels)));
        let (tile_rows, tile_cols) = tiles.min_by_key(|tile| cost(*tile)).unwrap_or((rows, cols));
        Grid { together: 1, planes: self.batch, rows, cols, tile_rows, tile_cols }
    }

    fn multiplications(&self) -> usize {
        self.batch * self.rows * self.panels.rows * self.panels.depth
    }

    #[cfg(test)]
    fn repeated(&self, tile: [usize; 2]) -> usize {
        self.panels.depth * self.loading(tile)
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
    /// Products of contiguous stacks of `batch` matrices `rows` x depth and of the matrices in `panels`, with nothing added.
    pub(crate) fn dense(level: Level, batch: usize, rows: usize, panels: Panels) -> Self {
        let depth = panels.depth;
        Gemm {
            level,
            batch,
            rows,
            dims: vec![batch],
            strides: vec![(rows * depth) as isize],
            layout: Layout { start: 0, row_step: depth, depth_step: 1 },
            patches: None,
            panels,
            blocks: None,
            bias: false,
            addend: false,
            activation: None,
            taps: Taps::dense(DEPTH, panels.block),
        }
    }

    /// What loading the operands of a tile costs, in multiplications for each step of the depth. Packing a row of A takes as long as
    /// multiplying it by about 16 columns (128 if it is a patch, 96 if it becomes bytes), and loading a column of B as long as multiplying
    /// it by about 8 rows.
    fn loading(&self, [rows, cols]: [usize; 2]) -> usize {
        let columns = match self.panels.words {
            _ if self.patches.is_some() => 128,
            Words::Bytes => 96,
            _ => 16,
        };
        rows * columns + 8 * cols
    }

    /// The most rows that are computed together.
    fn most_rows(&self) -> usize {
        MAX_ROWS.next_multiple_of(self.level.block(self.panels.words).0)
    }

    /// Matrix `plane` of input 0.
    fn matrix<'a>(&self, inputs: &Inputs<'a>, plane: usize) -> &'a [f32] {
        let offset = shape::offset(plane, &self.dims, &self.strides);
        &inputs.f32(0)[self.layout.start.wrapping_add_signed(offset)..]
    }

    /// The activation as bounds, if products can apply it.
    fn clip(&self) -> Option<[f32; 2]> {
        bounds(self.activation?)
    }

    fn multiply(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, scratch: &mut Scratch) {
        let left = self.matrix(inputs, tile.plane);
        let Panels { words, depth, .. } = self.panels;
        let (height, width) = self.level.block(words);
        let (rows, cols) = (tile.rows.clone(), tile.cols.clone());
        if self.addend {
            self.prefill(inputs, tile);
        }
        let bias = (self.bias && !self.addend).then(|| inputs.f32(2));
        let first_panel = if self.panels.groups > 1 { tile.plane * self.panels.per_group() } else { 0 };
        let per_word = words.elements();
        scratch.rows.resize(self.most_rows() * ROW_STRIDE);
        if words == Words::Bytes {
            scratch.row_scales.resize(self.most_rows() * SCALES, [0.0; 2]);
        }
        // Each step reads such an output from the L3 cache.
        let large = rows.len() * cols.len() > LARGE;
        for step in (0..self.panels.steps()).step_by(DEPTH) {
            let run = DEPTH.min(self.panels.steps() - step);
            let elements = step * per_word..((step + run) * per_word).min(depth);
            vectorize(PackRows {
                gemm: self,
                left,
                rows: rows.clone(),
                elements,
                run,
                out: &mut scratch.rows,
                scales: &mut scratch.row_scales,
            });
            let last = step + run == self.panels.steps();
            for col in cols.clone().step_by(width) {
                let (kept, panel) = ((&self.panels, self.blocks), first_panel + col / width);
                let b = panel_words(inputs, 1, kept, panel, step..step + run, &mut scratch.panel);
                let of_cols = panel_scales(inputs, 1, kept, panel, step..step + run, &mut scratch.col_scales);
                let ahead = match (col + width < cols.end, last) {
                    (true, _) => panel_bytes(inputs, 1, kept, panel + 1, step..step + run),
                    (false, true) => &[],
                    (false, false) => {
                        let (first, steps) = (step + run, self.panels.steps());
                        let panel = first_panel + cols.start / width;
                        panel_bytes(inputs, 1, kept, panel, first..steps.min(first + DEPTH))
                    }
                };
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
                    scales: Scales { rows: &[], cols: of_cols },
                    start,
                    ahead: &[],
                    clip: self.clip().filter(|_| last),
                };
                let ahead = shares(ahead, rows.len().div_ceil(height));
                for (row, ahead) in rows.clone().step_by(height).zip(ahead) {
                    let at = row - rows.start;
                    let a = &scratch.rows[at * ROW_STRIDE..];
                    let of_rows = scratch.row_scales.get(at * SCALES..).unwrap_or_default();
                    let scales = Scales { rows: of_rows, ..product.scales };
                    let high = height.min(rows.end - row);
                    let below = rows.end.min(row + 2 * height).saturating_sub(row + height);
                    if large && below > 0 {
                        tile.block(row + height, col, below, wide).prefetch();
                    }
                    Product { a, ahead, scales, ..product }.into(tile.block(row, col, high, wide));
                }
            }
        }
    }

    /// Writes the addends to the output before the product is added. There must be an addend.
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
                Some(bias) => {
                    out.iter_mut().zip(bias.iter().zip(addend)).for_each(|(out, (a, b))| *out = a + b)
                }
            }
        }
    }
}

/// The patches of an image that a convolution reads: one row for each output, with the elements in the order of the filter.
pub(crate) struct Patches {
    window: Window,
    /// The strides of rows and columns of the image.
    steps: [usize; 2],
    elements: Vec<Element>,
    /// The distance of each element from the first one of the window.
    distances: Vec<usize>,
}

/// An element of a patch.
struct Element {
    /// The row and column in the window.
    tap: [usize; 2],
    /// The offset of the channel.
    channel: usize,
}

impl Patches {
    /// Patches of an image with these strides of channels, rows and columns.
    pub(crate) fn new(
        window: Window,
        channels: usize,
        [channel_step, row_step, col_step]: [usize; 3],
    ) -> Self {
        let [height, width] = window.kernel;
        let element = |i: usize| {
            let (channel, tap) = (i / (height * width) * channel_step, [i / width % height, i % width]);
            Element { tap, channel }
        };
        let elements: Vec<Element> = (0..channels * height * width).map(element).collect();
        let [down, across] = window.dilation;
        let distance = |e: &Element| e.channel + e.tap[0] * down * row_step + e.tap[1] * across * col_step;
        let distances = elements.iter().map(distance).collect();
        Patches { elements, distances, steps: [row_step, col_step], window }
    }

    /// The offset in the image of the element that a tap of an output reads.
    #[inline(always)]
    fn place(&self, output: [usize; 2], tap: [usize; 2]) -> Option<usize> {
        let (y, x) = (self.window.source(0, output[0], tap[0])?, self.window.source(1, output[1], tap[1])?);
        Some(y * self.steps[0] + x * self.steps[1])
    }

    /// Copies some elements of an output's row. Elements outside the image are zero.
    #[inline(always)]
    fn pack(
        &self,
        image: &[f32],
        output: [usize; 2],
        range: Range<usize>,
        (words, out): (Words, &mut [u32]),
        line: &mut [f32],
    ) {
        let last = self.window.kernel.map(|taps| taps - 1);
        match (self.place(output, [0, 0]), self.place(output, last)) {
            (Some(first), Some(_)) => {
                let (image, distances) = (&image[first..], &self.distances[range]);
                write(distances.len(), |i| image[distances[i]], words, out, line);
            }
            _ => {
                let elements = &self.elements[range];
                let at = |i: usize| {
                    let Element { tap, channel } = elements[i];
                    self.place(output, tap).map_or(0.0, |place| image[channel + place])
                };
                write(elements.len(), at, words, out, line);
            }
        }
    }
}

/// Writes elements as words, followed by zeros. `line` is scratch space.
// Loops over indices, because iterators are not inlined into code for wider registers.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
fn write(len: usize, at: impl Fn(usize) -> f32, words: Words, out: &mut [u32], line: &mut [f32]) {
    if words == Words::F32 {
        for i in 0..len {
            out[i] = at(i).to_bits();
        }
        return;
    }
    let line = &mut line[..len];
    for i in 0..len {
        line[i] = at(i);
    }
    write_pairs(line, out);
}

/// Writes elements as bf16 pairs, followed by zeros.
#[inline(always)]
fn write_pairs(from: &[f32], out: &mut [u32]) {
    let (pairs, odd) = from.as_chunks::<2>();
    let (some, rest) = out.split_at_mut(pairs.len());
    narrow(pairs, some);
    rest.fill(0);
    if let (Some(last), [low]) = (rest.first_mut(), odd) {
        *last = pair(*low, 0.0);
    }
}

/// Writes elements as bytes with scales.
#[inline(always)]
fn write_bytes(line: &[f32], out: &mut [u32], scales: &mut [[f32; 2]]) {
    let blocks = line.as_chunks::<BLOCK>().0.iter().zip(out.as_chunks_mut::<STEPS>().0);
    for ((values, words), scales) in blocks.zip(scales) {
        let (scale, integers, sum) = eight(values);
        *scales = [scale, scale * sum];
        for (word, bytes) in words.iter_mut().zip(integers.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
    }
}

/// Packs runs of the rows of A into words, [`ROW_STRIDE`] apart.
struct PackRows<'a> {
    gemm: &'a Gemm,
    /// The matrix, or the image if its rows are patches.
    left: &'a [f32],
    rows: Range<usize>,
    elements: Range<usize>,
    /// Words in a run.
    run: usize,
    out: &'a mut [u32],
    /// The scales of words that are bytes, [`SCALES`] apart.
    scales: &'a mut [[f32; 2]],
}

impl Vectorized for PackRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let PackRows { gemm, left, rows, elements, run, out, scales } = self;
        let (len, Layout { row_step, depth_step, .. }) = (elements.len(), gemm.layout);
        let bytes = gemm.panels.words == Words::Bytes;
        let words = if bytes { Words::F32 } else { gemm.panels.words };
        let line = &mut [0.0; 2 * DEPTH];
        // A row in f32, before it becomes bytes.
        let wide = &mut [0; 4 * DEPTH];
        let mut scales = scales.chunks_mut(SCALES);
        for (row, out) in rows.zip(out.chunks_mut(ROW_STRIDE)) {
            let out = &mut out[..run];
            let to = if bytes { &mut wide[..len] } else { &mut *out };
            if let Some(patches) = &gemm.patches {
                let width = patches.window.output[1];
                patches.pack(left, [row / width, row % width], elements.clone(), (words, to), line);
            } else {
                let from = &left[row * row_step + elements.start * depth_step..];
                match (words, depth_step) {
                    (Words::F32, 1) => to.copy_from_slice(as_words(&from[..len])),
                    (Words::Bf16, 1) => write_pairs(&from[..len], to),
                    _ => write(len, |i| from[i * depth_step], words, to, line),
                }
            }
            if bytes && let Some(scales) = scales.next() {
                write_bytes(as_floats(&wide[..4 * run]), out, scales);
            }
        }
    }
}
