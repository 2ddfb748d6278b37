use super::{
    Window,
    quads::{Quads, TURN, entry},
};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::int8::{Bytes, COLS, ROWS, Sums},
};
use std::cell::RefCell;

/// The zero points of a signed or unsigned operand: an input, or zero.
#[derive(Clone, Copy)]
pub(crate) struct Zeros {
    pub(crate) input: Option<usize>,
    pub(crate) signed: bool,
}

/// How exact sums become outputs.
pub(crate) enum Finish {
    /// The output is the sums, as i32.
    Sums,
    /// `sum * (left * right) + bias`, as f32. The scales and the bias are inputs. The bias has one element for each column.
    Scale { left: usize, right: usize, bias: Option<usize> },
    /// `(sum + bias) * (left * right / out)`, rounded to even, plus a zero point, clamped to bytes. The bias has one i32 for each row
    /// of each matrix.
    Requantize { left: usize, right: usize, out: usize, zero: Zeros, bias: Option<usize> },
}

/// The form of the right operand.
pub(crate) enum Right {
    /// Matrices in [`Quads::Panels`].
    Panels,
    /// Patches of [`Quads::Image`], one column for each output of a convolution, with this many words for the channels of a pixel.
    Patches { window: Window, channels: usize },
}

/// Products of byte matrices minus their zero points, summed exactly in i32 (wrapping, as in ONNX Runtime). Input 0 is in
/// [`Quads::Rows`], and input 1 in the form of [`Right`].
pub(crate) struct IntegerProduct {
    pub(crate) bytes: Bytes,
    /// The left and right matrix of each product.
    pub(crate) matrices: Vec<(usize, usize)>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Bytes in each of the `taps` runs of a row, without padding.
    pub(crate) channels: usize,
    pub(crate) taps: usize,
    pub(crate) right: Right,
    /// Zero points of the rows and of the columns: one for all, or one for each.
    pub(crate) left_zeros: Zeros,
    pub(crate) right_zeros: Zeros,
    pub(crate) finish: Finish,
}

#[derive(Default)]
struct Scratch {
    panel: Vec<u32>,
    ones: Vec<u32>,
    row_sums: Vec<i32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Rows of a tile if the right operand is stored in panels.
const TILE_ROWS: usize = 8 * ROWS;

impl IntegerProduct {
    /// Words in a row.
    fn depth(&self) -> usize {
        self.channels.div_ceil(4) * self.taps
    }

    /// The form of a left operand of `count` matrices.
    pub(crate) fn left_quads(&self, count: usize) -> Quads {
        Quads::Rows { rows: count * self.rows, channels: self.channels, taps: self.taps }
    }

    /// The panel of the columns from `first` on. Elements outside the image are `pad`.
    fn panel<'a>(
        &self,
        words: &'a [u32],
        matrix: usize,
        first: usize,
        pad: u8,
        panel: &'a mut Vec<u32>,
    ) -> &'a [u32] {
        let len = self.depth() * COLS;
        let Right::Patches { window, channels } = &self.right else {
            let index = matrix * self.cols.div_ceil(COLS) + first / COLS;
            return &words[index * len..][..len];
        };
        let pad = u32::from_le_bytes([pad; 4]);
        panel.clear();
        panel.resize(len, pad);
        let [height, width] = window.input;
        let pixels = height * width;
        let image = &words[matrix * channels * pixels..][..channels * pixels];
        let cols = COLS.min(self.cols - first);
        let [_, across] = window.output;
        for tap in 0..self.taps {
            let [ky, kx] = [tap / window.kernel[1], tap % window.kernel[1]];
            let mut col = 0;
            while col < cols {
                // Each run of outputs is in one row.
                let [y, x] = [(first + col) / across, (first + col) % across];
                let run = (across - x).min(cols - col);
                let at = col;
                col += run;
                let Some(from) = window.source(0, y, ky) else { continue };
                // Whether the tap of an output is inside the row.
                let inside = |i: &usize| window.source(1, x + i, kx).is_some();
                let Some(start) = (0..run).find(inside) else { continue };
                let Some(source) = window.source(1, x + start, kx) else { continue };
                let count = (run - start).min((width - source).div_ceil(window.stride[1]));
                for channel in 0..*channels {
                    let line = &image[channel * pixels + from * width + source..];
                    let out = &mut panel[(tap * channels + channel) * COLS + at + start..][..count];
                    if window.stride[1] == 1 {
                        out.copy_from_slice(&line[..count]);
                    } else {
                        out.iter_mut()
                            .zip(line.iter().step_by(window.stride[1]))
                            .for_each(|(out, word)| *out = *word);
                    }
                }
            }
        }
        panel
    }

    /// Words with a one for each byte of a row, and zeros for padding.
    fn ones(&self, ones: &mut Vec<u32>) {
        let per_tap = self.channels.div_ceil(4);
        ones.clear();
        ones.extend((0..self.depth()).map(|word| {
            let left = self.channels - word % per_tap * 4;
            0x0101_0101 & if left >= 4 { u32::MAX } else { (1 << (8 * left)) - 1 }
        }));
    }
}

impl Zeros {
    /// The zero point as stored.
    fn byte(self, inputs: &Inputs<'_>, index: impl Fn(usize) -> usize) -> u8 {
        self.input.map_or(0, |input| {
            let bytes = inputs.bytes(input);
            bytes[index(bytes.len())]
        })
    }
    /// The zero point of a left operand, which is stored signed.
    fn left(self, inputs: &Inputs<'_>, index: impl Fn(usize) -> usize) -> i32 {
        let byte = self.byte(inputs, index);
        i32::from(if self.signed { byte } else { byte ^ TURN } as i8)
    }
    /// The zero point of a right operand, which is stored unsigned.
    fn right(self, inputs: &Inputs<'_>, index: impl Fn(usize) -> usize) -> i32 {
        let byte = self.byte(inputs, index);
        i32::from(if self.signed { byte ^ TURN } else { byte })
    }
}

impl Kernel for IntegerProduct {
    fn grid(&self, workers: usize) -> Grid {
        let (rows, cols) = (self.rows, self.cols);
        let tile_rows = match self.right {
            Right::Panels => rows.min(TILE_ROWS),
            // Gather each panel of the right operand only once.
            Right::Patches { .. } => rows,
        };
        let down = self.matrices.len() * rows.div_ceil(tile_rows);
        let across = (4 * workers).div_ceil(down).max(cols.div_ceil(16 * COLS)).min(cols.div_ceil(COLS));
        let tile_cols = cols.div_ceil(COLS).div_ceil(across) * COLS;
        Grid { together: 1, planes: self.matrices.len(), rows, cols, tile_rows, tile_cols }
    }

    fn multiplications(&self) -> usize {
        // One instruction multiplies four bytes.
        self.matrices.len() * self.rows * self.cols * self.depth()
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        SCRATCH.with_borrow_mut(|scratch| self.compute(inputs, &mut tile, scratch));
        Ok(())
    }
}

impl IntegerProduct {
    fn compute(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, scratch: &mut Scratch) {
        let Scratch { panel, ones, row_sums } = scratch;
        let (left, right) = self.matrices[tile.plane];
        let (rows, cols, depth) = (tile.rows.clone(), tile.cols.clone(), self.depth());
        let left_words = &inputs.words(0)[left * self.rows * depth..][..self.rows * depth];
        let left_zero = |row| self.left_zeros.left(inputs, |len| entry(len, left, row, self.rows));
        let right_zero = |col| self.right_zeros.right(inputs, |len| entry(len, right, col, self.cols));
        let left_shifted = rows.clone().any(|row| left_zero(row) != 0);
        let right_shifted = cols.clone().any(|col| right_zero(col) != 0);
        // The sum of each row, which the zero points of the right operand multiply.
        row_sums.clear();
        if right_shifted {
            let sum = |row: usize| -> i32 {
                let bytes = left_words[row * depth..][..depth].iter().flat_map(|word| word.to_le_bytes());
                bytes.map(|byte| i32::from(byte as i8)).sum()
            };
            row_sums.extend(rows.clone().map(sum));
        }
        if left_shifted {
            self.ones(ones);
        }
        let count = (self.channels * self.taps) as i32;
        let mut sums: Sums = [[0; COLS]; ROWS];
        let mut col_sums = [0; COLS];
        for first in cols.clone().step_by(COLS) {
            let width = COLS.min(cols.end - first);
            let pad = right_zero(0) as u8;
            let words = self.panel(inputs.words(1), right, first, pad, panel);
            if left_shifted {
                self.bytes.multiply((ones, depth), words, depth, 1, &mut sums);
                col_sums = sums[0];
            }
            let mut zeros = [0; COLS];
            if right_shifted {
                zeros.iter_mut().enumerate().take(width).for_each(|(i, zero)| *zero = right_zero(first + i));
            }
            for row in rows.clone().step_by(ROWS) {
                let high = ROWS.min(rows.end - row);
                self.bytes.multiply((&left_words[row * depth..], depth), words, depth, high, &mut sums);
                for (row, sums) in (row..row + high).zip(&mut sums) {
                    let zero = if left_shifted { left_zero(row) } else { 0 };
                    if right_shifted {
                        let row_sum = row_sums[row - rows.start].wrapping_sub(zero.wrapping_mul(count));
                        for (sum, zero) in sums.iter_mut().zip(&zeros) {
                            *sum = sum.wrapping_sub(row_sum.wrapping_mul(*zero));
                        }
                    }
                    if left_shifted {
                        for (sum, col_sum) in sums.iter_mut().zip(&col_sums) {
                            *sum = sum.wrapping_sub(zero.wrapping_mul(*col_sum));
                        }
                    }
                    let skip = first - cols.start;
                    let size = self.finish.size();
                    let out = &mut tile.row_bytes(row)[skip * size..][..width * size];
                    self.write(inputs, (left, row), (right, first), &sums[..width], out);
                }
            }
        }
    }

    /// Writes the outputs of row `row` and the columns from `first` on.
    fn write(
        &self,
        inputs: &Inputs<'_>,
        (left, row): (usize, usize),
        (right, first): (usize, usize),
        sums: &[i32],
        out: &mut [u8],
    ) {
        let row_entry = |input: usize| {
            let list = inputs.f32(input);
            list[entry(list.len(), left, row, self.rows)]
        };
        let col_entry = |list: &[f32], i: usize| list[entry(list.len(), right, first + i, self.cols)];
        match &self.finish {
            Finish::Sums => {
                for (out, sum) in out.as_chunks_mut().0.iter_mut().zip(sums) {
                    *out = sum.to_le_bytes();
                }
            }
            Finish::Scale { left, right, bias } => {
                let (row_scale, scales) = (row_entry(*left), inputs.f32(*right));
                let bias = bias.map(|input| inputs.f32(input));
                for (i, (out, sum)) in out.as_chunks_mut().0.iter_mut().zip(sums).enumerate() {
                    let value = *sum as f32 * (row_scale * col_entry(scales, i));
                    let value = value + bias.map_or(0.0, |bias| col_entry(bias, i));
                    *out = value.to_le_bytes();
                }
            }
            Finish::Requantize { left: left_scale, right: right_scale, out: out_scale, zero, bias } => {
                let (row_scale, scales) = (row_entry(*left_scale), inputs.f32(*right_scale));
                let out_scale = inputs.f32(*out_scale)[0];
                let bias = bias.map_or(0, |input| {
                    let list = inputs.bytes(input).as_chunks::<4>().0;
                    i32::from_le_bytes(list[entry(list.len(), left, row, self.rows)])
                });
                let byte = zero.byte(inputs, |_| 0);
                let (shift, least, most) = if zero.signed {
                    (f32::from(byte as i8), -128.0, 127.0)
                } else {
                    (f32::from(byte), 0.0, 255.0)
                };
                for (i, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                    let scale = row_scale * col_entry(scales, i) / out_scale;
                    let value = (sum.wrapping_add(bias) as f32 * scale).clamp(least - shift, most - shift);
                    let value = value.round_ties_even() + shift;
                    *out = if zero.signed { value as i8 as u8 } else { value as u8 };
                }
            }
        }
    }
}

impl Finish {
    /// Bytes of an element of the output.
    fn size(&self) -> usize {
        if matches!(self, Finish::Requantize { .. }) { 1 } else { 4 }
    }
}
