mod activation;

use super::{
    Panels,
    dynamic_quantize::Range,
    panel_words,
    quads::{TURN, entry},
};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{
        Level, Words, as_words,
        int8::{Bytes, COLS, ROWS},
        product::{Block, Product, Scales, Start, Taps},
        vectorize,
    },
};
use activation::Apply;
use sdrun_graph::recurrent::{Kind, Recurrence};
use std::cell::RefCell;

/// The steps of an LSTM, GRU or RNN. Input 0 has the products of the steps' inputs with `W`, without biases; input 1 is `R`.
/// The output has for each direction and sequence the hidden state after every step, the last hidden state, and the last cell
/// state.
pub(crate) struct Recurrent {
    pub(crate) read: Recurrence,
    pub(crate) steps: usize,
    pub(crate) batch: usize,
    pub(crate) hidden: usize,
    pub(crate) state: State,
    /// From a row of input 0 to the next, and from a direction to the next.
    pub(crate) strides: [usize; 2],
    /// Which inputs the optional operands are: `B`, the lengths (i32), the initial states, `P`.
    pub(crate) bias: Option<usize>,
    pub(crate) lengths: Option<usize>,
    pub(crate) initial: [Option<usize>; 2],
    pub(crate) peepholes: Option<usize>,
}

/// How the hidden state is multiplied with `R`.
pub(crate) enum State {
    /// Every gate of every direction is a matrix in these panels; [`Taps::dense`] over its depth.
    Panels { level: Level, panels: Panels, taps: Taps },
    /// Every direction is a matrix in [`Quads::Panels`](super::Quads::Panels), with these inputs as scales and zero points; the
    /// state is quantised before every step.
    Quantized { bytes: Bytes, scale: usize, zero: Option<usize>, signed: bool },
}

/// Room for the sequences of a tile.
#[derive(Default)]
struct Scratch {
    /// Of each sequence.
    hidden: Vec<f32>,
    cell: Vec<f32>,
    /// The hidden state (or that times the reset gate) as the left operand, and room to change it.
    columns: Vec<f32>,
    reset: Vec<f32>,
    panel: Vec<f32>,
    quantized: Vec<u8>,
    words: Vec<u32>,
    /// Of each sequence, the gates one after the other, each padded to whole panels.
    gates: Vec<f32>,
    biases: Vec<f32>,
    /// Of each column of a quantised matrix: scale, zero point, sum.
    matrix: Vec<(f32, i32, i32)>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The tile's direction and sequences.
#[derive(Clone, Copy)]
struct Part {
    direction: usize,
    first: usize,
    count: usize,
}

impl Recurrent {
    fn gates(&self) -> usize {
        self.read.kind.gates()
    }
    /// Elements of the output for a direction and sequence.
    pub(crate) fn row_len(&self) -> usize {
        (self.steps + 2) * self.hidden
    }
    /// Elements from one gate to the next in the scratch.
    fn gate_len(&self) -> usize {
        self.hidden.next_multiple_of(COLS)
    }
    /// Sequences that are computed together, at most.
    fn most(&self) -> usize {
        match &self.state {
            State::Panels { level, .. } => level.block(Words::F32).0,
            // They are quantised over one range.
            State::Quantized { .. } => self.batch,
        }
    }
    fn length(&self, inputs: &Inputs<'_>, sequence: usize) -> Result<usize, String> {
        let Some(input) = self.lengths else { return Ok(self.steps) };
        let lengths = inputs.bytes(input).as_chunks::<4>().0;
        let length = i32::from_le_bytes(lengths[sequence]);
        usize::try_from(length)
            .ok()
            .filter(|n| *n <= self.steps)
            .ok_or_else(|| format!("sequence {sequence} has {length} steps, of at most {}", self.steps))
    }
}

impl Kernel for Recurrent {
    fn grid(&self, workers: usize) -> Grid {
        let directions = self.read.reversed.len();
        let shared = (directions * self.batch).div_ceil(workers.max(1)).clamp(1, self.most());
        let tile_rows = if matches!(self.state, State::Quantized { .. }) { self.batch } else { shared };
        Grid {
            together: 1,
            planes: directions,
            rows: self.batch,
            cols: self.row_len(),
            tile_rows,
            tile_cols: self.row_len(),
        }
    }

    fn multiplications(&self) -> usize {
        self.read.reversed.len() * self.batch * self.steps * self.gates() * self.hidden * self.hidden
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        SCRATCH.with_borrow_mut(|scratch| self.run(inputs, &mut tile, scratch))
    }
}

impl Recurrent {
    fn run(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, scratch: &mut Scratch) -> Result<(), String> {
        let n = self.hidden;
        let part = Part { direction: tile.plane, first: tile.rows.start, count: tile.rows.len() };
        let directions = self.read.reversed.len();
        let lengths: Vec<usize> =
            tile.rows.clone().map(|b| self.length(inputs, b)).collect::<Result<_, _>>()?;
        for (state, input) in [&mut scratch.hidden, &mut scratch.cell].into_iter().zip(self.initial) {
            state.clear();
            state.resize(part.count * n, 0.0);
            let Some(input) = input else { continue };
            for (b, state) in tile.rows.clone().zip(state.chunks_exact_mut(n)) {
                let row = match self.read.batch_first {
                    true => b * directions + part.direction,
                    false => part.direction * self.batch + b,
                };
                state.copy_from_slice(&inputs.f32(input)[row * n..][..n]);
            }
        }
        self.add_biases(inputs, part.direction, &mut scratch.biases);
        self.describe(inputs, part.direction, &mut scratch.matrix);
        let row_len = self.gates() * self.gate_len();
        scratch.gates.clear();
        scratch.gates.resize(part.count * row_len, 0.0);
        for row in tile.rows.clone() {
            tile.row(row).fill(0.0);
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        for step in 0..longest {
            let at = |length: usize| {
                if self.read.reversed[part.direction] { length.saturating_sub(1 + step) } else { step }
            };
            for (i, length) in lengths.iter().enumerate() {
                self.start(inputs, part, (i, at(*length)), scratch);
            }
            self.multiply(inputs, part, 0..self.linear_gates(), false, scratch);
            if self.read.kind == Kind::Gru && !self.read.linear_before_reset {
                self.reset(part, scratch);
                self.multiply(inputs, part, 2..3, true, scratch);
            }
            for (i, length) in lengths.iter().enumerate().filter(|(_, length)| step < **length) {
                let (hidden, cell) = (&mut scratch.hidden[i * n..][..n], &mut scratch.cell[i * n..][..n]);
                let gates = &mut scratch.gates[i * row_len..][..row_len];
                self.finish(
                    inputs,
                    part,
                    gates,
                    (&scratch.biases, hidden, cell),
                    step_input(self, part, i, at(*length)),
                );
                tile.row(part.first + i)[at(*length) * n..][..n].copy_from_slice(hidden);
            }
        }
        for (i, length) in lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            debug_assert!(*length <= self.steps);
            let last = &mut tile.row(part.first + i)[self.steps * n..];
            last[..n].copy_from_slice(&scratch.hidden[i * n..][..n]);
            last[n..].copy_from_slice(&scratch.cell[i * n..][..n]);
        }
        Ok(())
    }

    /// Gates that are products with the unmodified hidden state.
    fn linear_gates(&self) -> usize {
        if self.read.kind == Kind::Gru && !self.read.linear_before_reset { 2 } else { self.gates() }
    }

    /// Collects the biases to add to each gate's products: the sum of both. If the reset gate of a GRU multiplies the product, its
    /// last gate gets only the state's bias, and the input's bias follows after all gates.
    fn add_biases(&self, inputs: &Inputs<'_>, direction: usize, biases: &mut Vec<f32>) {
        let (n, gates) = (self.hidden, self.gates());
        biases.clear();
        biases.resize((gates + 1) * n, 0.0);
        let Some(input) = self.bias else { return };
        let given = &inputs.f32(input)[direction * 2 * gates * n..][..2 * gates * n];
        let (of_input, of_state) = given.split_at(gates * n);
        for (i, bias) in biases[..gates * n].iter_mut().enumerate() {
            *bias = if i / n == 2 && self.is_split() { of_state[i] } else { of_input[i] + of_state[i] };
        }
        if self.is_split() {
            biases[gates * n..].copy_from_slice(&of_input[2 * n..]);
        }
    }
    /// Whether the last gate's products with input and state are not simply added.
    fn is_split(&self) -> bool {
        self.read.kind == Kind::Gru && self.read.linear_before_reset
    }

    /// The values of a sequence's gates before the products with its state.
    fn start(&self, inputs: &Inputs<'_>, part: Part, (i, step): (usize, usize), scratch: &mut Scratch) {
        let (n, len) = (self.hidden, self.gate_len());
        let from = &inputs.f32(0)[step_input(self, part, i, step)..];
        for gate in 0..self.gates() {
            let out = &mut scratch.gates[(i * self.gates() + gate) * len..][..n];
            let bias = &scratch.biases[gate * n..][..n];
            if gate == 2 && self.is_split() {
                out.copy_from_slice(bias);
            } else {
                let from = &from[gate * n..][..n];
                out.iter_mut().zip(from.iter().zip(bias)).for_each(|(out, (a, b))| *out = a + b);
            }
        }
    }

    /// Adds the products of the hidden state, or of the state after the reset gate, to some gates of all sequences.
    fn multiply(
        &self,
        inputs: &Inputs<'_>,
        part: Part,
        gates: std::ops::Range<usize>,
        reset: bool,
        scratch: &mut Scratch,
    ) {
        let (n, len, all) = (self.hidden, self.gate_len(), self.gates());
        let Scratch {
            hidden, reset: left_over, columns, panel, quantized, words, matrix, gates: sums, ..
        } = scratch;
        let state: &[f32] = if reset { left_over } else { hidden };
        match &self.state {
            State::Panels { level, panels, taps } => {
                let step = self.most();
                columns.resize(n * step, 0.0);
                for (i, row) in state.chunks_exact(n).enumerate() {
                    columns[i..].iter_mut().step_by(step).zip(row).for_each(|(out, x)| *out = *x);
                }
                for gate in gates {
                    for index in 0..panels.per_group() {
                        let number = (part.direction * all + gate) * panels.per_group() + index;
                        let b = panel_words(inputs, 1, (panels, None), number, 0..n, panel);
                        let col = index * panels.block;
                        let cols = panels.block.min(n - col);
                        let product = Product {
                            level: *level,
                            words: Words::F32,
                            left: crate::simd::product::Left::Columns(step),
                            depth: n,
                            a: as_words(columns),
                            b,
                            taps,
                            scales: Scales::default(),
                            start: Start::Output,
                            ahead: &[],
                            clip: None,
                        };
                        product.into(Block::new(&mut sums[gate * len + col..], all * len, part.count, cols));
                    }
                }
            }
            State::Quantized { bytes, .. } => {
                let range = Range::of(state);
                let depth = n.div_ceil(4);
                quantized.clear();
                // The bytes after the last are zero in both operands.
                quantized.resize(part.count * depth * 4, 0);
                for (row, out) in state.chunks_exact(n).zip(quantized.chunks_exact_mut(depth * 4)) {
                    range.quantize(row, &mut out[..n]);
                }
                words.clear();
                words.extend(quantized.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)));
                let zero = i32::from((range.zero ^ TURN) as i8);
                let mut block = [[0; COLS]; ROWS];
                for (index, matrix) in matrix.chunks(COLS).enumerate() {
                    let number = part.direction * (all * n).div_ceil(COLS) + index;
                    let b = &inputs.words(1)[number * depth * COLS..][..depth * COLS];
                    for first in (0..part.count).step_by(ROWS) {
                        let count = ROWS.min(part.count - first);
                        bytes.multiply((&words[first * depth..], depth), b, depth, count, &mut block);
                        for (i, block) in (first..).zip(&block[..count]) {
                            let row = &quantized[i * depth * 4..][..n];
                            let row: i32 = row.iter().map(|byte| i32::from(*byte as i8) - zero).sum();
                            for (j, (sum, (scale, right, col))) in block.iter().zip(matrix).enumerate() {
                                let sum = sum - row * right - zero * col;
                                let (gate, unit) = ((index * COLS + j) / n, (index * COLS + j) % n);
                                sums[(i * all + gate) * len + unit] += sum as f32 * (range.scale * scale);
                            }
                        }
                    }
                }
            }
        }
    }

    /// The columns of a direction's matrix, if it is quantised.
    fn describe(&self, inputs: &Inputs<'_>, direction: usize, matrix: &mut Vec<(f32, i32, i32)>) {
        matrix.clear();
        let State::Quantized { scale, zero, signed, .. } = self.state else { return };
        let (depth, rows) = (self.hidden.div_ceil(4), self.gates() * self.hidden);
        let (scales, zeros) = (inputs.f32(scale), zero.map(|zero| inputs.bytes(zero)));
        let panels = rows.div_ceil(COLS);
        matrix.extend((0..rows).map(|col| {
            let at = |len: usize| entry(len, direction, col, rows);
            let byte = zeros.map_or(0, |zeros| zeros[at(zeros.len())]);
            let zero = i32::from(if signed { byte ^ TURN } else { byte });
            (scales[at(scales.len())], zero, 0)
        }));
        for (index, columns) in matrix.chunks_mut(COLS).enumerate() {
            let words = &inputs.words(1)[(direction * panels + index) * depth * COLS..][..depth * COLS];
            for (k, step) in words.as_chunks::<COLS>().0.iter().enumerate() {
                for ((_, _, sum), word) in columns.iter_mut().zip(step) {
                    let bytes = word.to_le_bytes();
                    // What pads the depth is zero, and is not shifted by the zero point.
                    *sum +=
                        bytes[..4.min(self.hidden - 4 * k)].iter().map(|byte| i32::from(*byte)).sum::<i32>();
                }
            }
        }
    }

    /// What the reset gate leaves of the hidden states; the gate is computed here.
    fn reset(&self, part: Part, scratch: &mut Scratch) {
        let (n, len) = (self.hidden, self.gate_len());
        scratch.reset.clear();
        scratch.reset.resize(part.count * n, 0.0);
        for i in 0..part.count {
            let gate = &mut scratch.gates[(i * 3 + 1) * len..][..n];
            self.activate(part, 0, gate);
            let states = scratch.hidden[i * n..][..n].iter().zip(&*gate);
            scratch.reset[i * n..][..n].iter_mut().zip(states).for_each(|(out, (h, r))| *out = h * r);
        }
    }

    /// Activation number `function` of the direction.
    fn activate(&self, part: Part, function: usize, values: &mut [f32]) {
        vectorize(Apply(self.read.functions[part.direction][function], self.read.clip, values));
    }

    /// The states of a sequence after a step, computed from its gates.
    #[allow(clippy::needless_range_loop)]
    fn finish(
        &self,
        inputs: &Inputs<'_>,
        part: Part,
        gates: &mut [f32],
        (biases, hidden, cell): (&[f32], &mut [f32], &mut [f32]),
        input: usize,
    ) {
        let n = self.hidden;
        let mut each = gates.chunks_exact_mut(self.gate_len()).map(|gate| &mut gate[..n]);
        let mut next = || each.next().unwrap_or_default();
        match self.read.kind {
            Kind::Rnn => {
                let gate = next();
                self.activate(part, 0, gate);
                hidden.copy_from_slice(gate);
            }
            Kind::Gru => {
                let (update, reset, new) = (next(), next(), next());
                self.activate(part, 0, update);
                if self.is_split() {
                    self.activate(part, 0, reset);
                    let of_input = &inputs.f32(0)[input + 2 * n..][..n];
                    let bias = &biases[3 * n..][..n];
                    for j in 0..n {
                        new[j] = of_input[j] + bias[j] + reset[j] * new[j];
                    }
                }
                self.activate(part, 1, new);
                for j in 0..n {
                    hidden[j] = (1.0 - update[j]) * new[j] + update[j] * hidden[j];
                }
            }
            Kind::Lstm => {
                let (i, o, f, c) = (next(), next(), next(), next());
                let peepholes =
                    self.peepholes.map(|input| &inputs.f32(input)[part.direction * 3 * n..][..3 * n]);
                let look = |gate: &mut [f32], number: usize, cell: &[f32]| {
                    if let Some(peepholes) = peepholes {
                        let seen = peepholes[number * n..][..n].iter().zip(cell);
                        gate.iter_mut().zip(seen).for_each(|(gate, (p, c))| *gate += p * c);
                    }
                };
                look(i, 0, cell);
                look(f, 2, cell);
                self.activate(part, 0, i);
                if self.read.input_forget {
                    f.iter_mut().zip(&*i).for_each(|(f, i)| *f = 1.0 - i);
                } else {
                    self.activate(part, 0, f);
                }
                self.activate(part, 1, c);
                for j in 0..n {
                    cell[j] = f[j] * cell[j] + i[j] * c[j];
                }
                look(o, 1, cell);
                self.activate(part, 0, o);
                hidden.copy_from_slice(cell);
                vectorize(Apply(self.read.functions[part.direction][2], None, hidden));
                hidden.iter_mut().zip(&*o).for_each(|(h, o)| *h *= o);
            }
        }
    }
}

/// Where the products with the input of a step begin.
fn step_input(kernel: &Recurrent, part: Part, i: usize, step: usize) -> usize {
    let sequence = part.first + i;
    let row = match kernel.read.batch_first {
        true => sequence * kernel.steps + step,
        false => step * kernel.batch + sequence,
    };
    row * kernel.strides[0] + part.direction * kernel.strides[1]
}
