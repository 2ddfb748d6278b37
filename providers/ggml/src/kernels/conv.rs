use super::widen;
use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    simd::{Level, Vectorized, multiply_block, vectorize},
};
use std::{cell::RefCell, ops::Range};

/// How a two-dimensional window moves over an input: height, then width.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Window {
    pub(crate) input: [usize; 2],
    pub(crate) output: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) dilation: [usize; 2],
    /// Zeros before the input; those after it follow from the output.
    pub(crate) pad: [usize; 2],
}

impl Window {
    /// The input position under tap `k` of the window at output position `at`, unless it is padding.
    #[inline(always)]
    pub(crate) fn source(&self, axis: usize, at: usize, k: usize) -> Option<usize> {
        (at * self.stride[axis] + k * self.dilation[axis])
            .checked_sub(self.pad[axis])
            .filter(|i| *i < self.input[axis])
    }

    /// Output columns `from..to` for which tap `kx` lies inside the input.
    fn valid_cols(&self, kx: usize) -> Range<usize> {
        let (stride, tap) = (self.stride[1], kx * self.dilation[1]);
        let low = self.pad[1].saturating_sub(tap).div_ceil(stride);
        let high = (self.input[1] + self.pad[1]).saturating_sub(tap).div_ceil(stride);
        low.min(self.output[1])..high.min(self.output[1]).max(low.min(self.output[1]))
    }

    /// Copies what tap (`ky`, `kx`) sees of one channel for the output positions `cols`, row-major.
    fn gather(&self, channel: &[f32], ky: usize, kx: usize, cols: Range<usize>, line: &mut [f32]) {
        let (width, stride) = (self.output[1], self.stride[1]);
        let valid = self.valid_cols(kx);
        let mut col = cols.start;
        while col < cols.end {
            let (oy, ox) = (col / width, col % width);
            let n = (width - ox).min(cols.end - col);
            let out = &mut line[col - cols.start..col - cols.start + n];
            col += n;
            let Some(iy) = self.source(0, oy, ky) else {
                out.fill(0.0);
                continue;
            };
            let (low, high) = (valid.start.clamp(ox, ox + n), valid.end.clamp(ox, ox + n));
            out[..low - ox].fill(0.0);
            out[high.max(low) - ox..].fill(0.0);
            if low < high {
                let first = iy * self.input[1] + low * stride + kx * self.dilation[1] - self.pad[1];
                let (out, source) = (&mut out[low - ox..high - ox], &channel[first..]);
                if stride == 1 {
                    out.copy_from_slice(&source[..high - low]);
                } else {
                    out.iter_mut().zip(source.iter().step_by(stride)).for_each(|(out, x)| *out = *x);
                }
            }
        }
    }
}

/// Rows of A and columns of B are cut into panels; their depth is cut into runs of this length, so that a panel of
/// each stays in the first and second level cache.
const DEPTH: usize = 256;

/// Elements of the packed form of `groups` matrices of `rows` x `depth`.
pub(crate) fn panels_len(groups: usize, rows: usize, depth: usize) -> usize {
    let (block, _) = Level::detect().block();
    groups * rows.div_ceil(block) * block * depth
}

/// Packs `groups` row-major matrices for [`Conv`]: panels of as many rows as the processor's inner loop takes, each
/// as `depth` columns; missing rows are zero.
pub(crate) fn pack_panels(weights: &[f32], groups: usize, rows: usize, depth: usize) -> Vec<f32> {
    let (block, _) = Level::detect().block();
    let mut packed = vec![0.0; panels_len(groups, rows, depth)];
    let panels = rows.div_ceil(block);
    for (index, panel) in packed.chunks_exact_mut(block * depth).enumerate() {
        pack_panel(weights, index / panels * rows, index % panels * block, rows, depth, panel);
    }
    packed
}

/// Packs rows `start..` of the matrix that begins at row `base` of `weights`.
fn pack_panel(weights: &[f32], base: usize, start: usize, rows: usize, depth: usize, panel: &mut [f32]) {
    let block = panel.len() / depth;
    for i in 0..block.min(rows - start) {
        let row = &weights[(base + start + i) * depth..(base + start + i + 1) * depth];
        panel[i..].iter_mut().step_by(block).zip(row).for_each(|(out, x)| *out = *x);
    }
}

/// [`pack_panels`] for weights that are computed by the graph.
pub(crate) struct PackPanels {
    pub(crate) groups: usize,
    pub(crate) rows: usize,
    pub(crate) depth: usize,
}

impl Kernel for PackPanels {
    fn grid(&self, _: usize) -> Grid {
        let (block, _) = Level::detect().block();
        Grid::rows(self.groups * self.rows.div_ceil(block), block * self.depth, 1)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (block, _) = Level::detect().block();
        let (index, panels) = (tile.rows.start, self.rows.div_ceil(block));
        let panel = tile.row(index);
        panel.fill(0.0);
        let (base, start) = (index / panels * self.rows, index % panels * block);
        pack_panel(inputs.f32(0), base, start, self.rows, self.depth, panel);
        Ok(())
    }
}

/// Two-dimensional convolution in f32 as a matrix product of the weights with patches that are gathered on the fly:
/// inputs `[batch, groups * channels, h, w]`, weights packed by [`pack_panels`] (f32, f16 or bf16) and, with
/// `bias`, `[groups * filters]`.
///
/// ggml's `conv_2d` rounds activations to f16, which loses precision and turns values above 65504 into infinity, and
/// its `im2col` writes all patches to memory.
pub(crate) struct Conv {
    pub(crate) batch: usize,
    pub(crate) groups: usize,
    /// Input channels of a group.
    pub(crate) channels: usize,
    /// Output channels of a group.
    pub(crate) filters: usize,
    pub(crate) window: Window,
    pub(crate) bias: bool,
}

#[derive(Default)]
struct Scratch {
    line: Vec<f32>,
    patches: Vec<f32>,
    weights: Vec<f32>,
    block: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Kernel for Conv {
    fn grid(&self, workers: usize) -> Grid {
        let (block_rows, block_cols) = Level::detect().block();
        let (planes, rows) = (self.batch * self.groups, self.filters);
        let cols: usize = self.window.output.iter().product();
        // Wide tiles gather each patch once for all filters; several tiles for each worker even out the load.
        let tile_cols =
            cols.div_ceil(workers * 2).next_multiple_of(block_cols).clamp(block_cols, 8 * block_cols);
        let across = planes * cols.div_ceil(tile_cols);
        let down = (workers * 2).div_ceil(across).min(rows.div_ceil(block_rows));
        let tile_rows = rows.div_ceil(down).next_multiple_of(block_rows);
        Grid { planes, rows, cols, tile_rows, tile_cols }
    }

    fn multiplications(&self) -> usize {
        let taps: usize = self.window.kernel.iter().product();
        self.batch
            * self.groups
            * self.filters
            * self.channels
            * taps
            * self.window.output.iter().product::<usize>()
    }

    fn tile(&self, inputs: &Inputs<'_>, tile: Tile<'_>) -> Result<(), String> {
        SCRATCH.with_borrow_mut(|scratch| self.multiply(inputs, tile, scratch));
        Ok(())
    }
}

impl Conv {
    fn multiply(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>, scratch: &mut Scratch) {
        let level = Level::detect();
        let (block_rows, block_cols) = level.block();
        let pixels: usize = self.window.input.iter().product();
        let image = &inputs.f32(0)[tile.plane * self.channels * pixels..][..self.channels * pixels];
        let group = tile.plane % self.groups;
        let bias = self.bias.then(|| &inputs.f32(2)[group * self.filters..][..self.filters]);
        let depth = self.channels * self.window.kernel[0] * self.window.kernel[1];
        let first_panel = group * self.filters.div_ceil(block_rows);
        let (rows, cols) = (tile.rows.clone(), tile.cols.clone());
        let Scratch { line, patches, weights, block } = scratch;
        block.resize(block_rows * block_cols, 0.0);
        for start in (0..depth).step_by(DEPTH) {
            let run = start..(start + DEPTH).min(depth);
            self.pack_patches(image, run.clone(), cols.clone(), block_cols, line, patches);
            for row in rows.clone().step_by(block_rows) {
                let panel = (first_panel + row / block_rows) * depth * block_rows;
                let panel = panel + run.start * block_rows..panel + run.end * block_rows;
                let panel = widen(inputs, 1, panel, weights);
                let height = block_rows.min(rows.end - row);
                for (patch, col) in
                    patches.chunks_exact(run.len() * block_cols).zip(cols.clone().step_by(block_cols))
                {
                    let width = block_cols.min(cols.end - col);
                    let span = col - cols.start..col - cols.start + width;
                    for (i, block) in block.chunks_exact_mut(block_cols).enumerate().take(height) {
                        if start == 0 {
                            block.fill(bias.map_or(0.0, |bias| bias[row + i]));
                        } else {
                            block[..width].copy_from_slice(&tile.row(row + i)[span.clone()]);
                        }
                    }
                    multiply_block(level, panel, patch, block);
                    for (i, block) in block.chunks_exact(block_cols).enumerate().take(height) {
                        tile.row(row + i)[span.clone()].copy_from_slice(&block[..width]);
                    }
                }
            }
        }
    }

    /// Gathers the patches of output positions `cols` for taps `run` (channel, then window row, then column) as
    /// panels of `width` positions; positions beyond the last are left as they were, for nobody reads their results.
    fn pack_patches(
        &self,
        image: &[f32],
        run: Range<usize>,
        cols: Range<usize>,
        width: usize,
        line: &mut Vec<f32>,
        patches: &mut Vec<f32>,
    ) {
        let pixels: usize = self.window.input.iter().product();
        let [kh, kw] = self.window.kernel;
        line.resize(cols.len(), 0.0);
        patches.resize(cols.len().div_ceil(width) * run.len() * width, 0.0);
        for (i, tap) in run.clone().enumerate() {
            let (channel, ky, kx) = (tap / (kh * kw), tap / kw % kh, tap % kw);
            let channel = &image[channel * pixels..(channel + 1) * pixels];
            self.window.gather(channel, ky, kx, cols.clone(), line);
            for (j, part) in line.chunks(width).enumerate() {
                patches[(j * run.len() + i) * width..][..part.len()].copy_from_slice(part);
            }
        }
    }
}

/// Convolution with one input and one output channel in each group: inputs `[batch, channels, h, w]`, weights
/// `[channels, kh, kw]` (f32, f16 or bf16) and, with `bias`, `[channels]`.
pub(crate) struct DepthwiseConv {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) window: Window,
    pub(crate) bias: bool,
}

impl Kernel for DepthwiseConv {
    fn grid(&self, workers: usize) -> Grid {
        let rows = self.batch * self.channels;
        Grid::rows(rows, self.window.output.iter().product(), rows.div_ceil(workers * 4))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let pixels: usize = self.window.input.iter().product();
        let taps: usize = self.window.kernel.iter().product();
        let mut buffer = Vec::new();
        for plane in tile.rows.clone() {
            let channel = plane % self.channels;
            let weights = widen(inputs, 1, channel * taps..(channel + 1) * taps, &mut buffer);
            let bias = if self.bias { inputs.f32(2)[channel] } else { 0.0 };
            let x = &inputs.f32(0)[plane * pixels..(plane + 1) * pixels];
            vectorize(Plane { window: &self.window, x, weights, bias, out: tile.row(plane) });
        }
        Ok(())
    }
}

struct Plane<'a> {
    window: &'a Window,
    x: &'a [f32],
    weights: &'a [f32],
    bias: f32,
    out: &'a mut [f32],
}

impl Vectorized for Plane<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Plane { window, x, weights, bias, out } = self;
        let [kh, kw] = window.kernel;
        let stride = window.stride[1];
        for (oy, out) in out.chunks_exact_mut(window.output[1]).enumerate() {
            out.fill(bias);
            for ky in 0..kh {
                let Some(iy) = window.source(0, oy, ky) else { continue };
                let row = &x[iy * window.input[1]..(iy + 1) * window.input[1]];
                for kx in 0..kw {
                    let cols = window.valid_cols(kx);
                    if cols.is_empty() {
                        continue;
                    }
                    let weight = weights[ky * kw + kx];
                    let source = &row[cols.start * stride + kx * window.dilation[1] - window.pad[1]..];
                    let out = &mut out[cols];
                    if stride == 1 {
                        out.iter_mut().zip(source).for_each(|(out, x)| *out += weight * x);
                    } else {
                        out.iter_mut()
                            .zip(source.iter().step_by(stride))
                            .for_each(|(out, x)| *out += weight * x);
                    }
                }
            }
        }
    }
}
