//! LSTM, GRU and RNN in f64, step by step.

use super::call::{Call, Fault, Outputs};
use super::number::{load_as_f64, store};
use super::quantize::to_u8;
use crate::Tensor;
use crate::recurrent::{Function, Kind, Recurrence};

/// The weights of one direction, stored as a matrix.
enum Weights {
    /// `[rows, depth]`
    Float(Vec<f64>),
    /// `[depth, rows]` with the zero point subtracted, and one scale or one per row.
    Quantized(Vec<f64>, Vec<f32>),
}

impl Weights {
    /// Reads direction `d` of `directions` from input `i`.
    fn new(c: &Call, i: usize, d: usize, directions: usize) -> Result<Self, Fault> {
        let part = |values: Vec<f64>| {
            let len = values.len() / directions;
            values[d * len..(d + 1) * len].to_vec()
        };
        let mut values = part(load_as_f64(c.input(i)?)?);
        if c.node().op_type != "DynamicQuantizeLSTM" {
            return Ok(Weights::Float(values));
        }
        // W_scale, W_zero_point, R_scale, R_zero_point
        let first = if i == 1 { 8 } else { 10 };
        let scales: Vec<f32> = part(load_as_f64(c.input(first)?)?).into_iter().map(|v| v as f32).collect();
        if let Some(zeros) = c.opt(first + 1) {
            let zeros = part(load_as_f64(zeros)?);
            if zeros.is_empty() {
                return Err(Fault::Invalid("a zero point is empty".into()));
            }
            values.iter_mut().enumerate().for_each(|(i, v)| *v -= zeros[i % zeros.len()]);
        }
        Ok(Weights::Quantized(values, scales))
    }

    /// The product of `x` (`[m, depth]`) and the weights: `[m, rows]`. With quantised weights, all of `x` is
    /// quantised first.
    fn multiply(&self, x: &[f64], depth: usize, rows: usize) -> Vec<f64> {
        let m = x.len().checked_div(depth).unwrap_or(0);
        let mut out = vec![0.0; m * rows];
        match self {
            Weights::Float(w) => {
                for (i, out) in out.iter_mut().enumerate() {
                    let (x, w) = (&x[i / rows * depth..][..depth], &w[i % rows * depth..][..depth]);
                    *out = x.iter().zip(w).map(|(x, w)| x * w).sum();
                }
            }
            Weights::Quantized(w, scales) => {
                let values: Vec<f32> = x.iter().map(|v| *v as f32).collect();
                let (values, scale, zero) = to_u8(&values);
                for (i, out) in out.iter_mut().enumerate() {
                    let x = &values[i / rows * depth..][..depth];
                    let column = w[i % rows..].iter().step_by(rows);
                    let sum: f64 =
                        x.iter().zip(column).map(|(x, w)| (f64::from(*x) - f64::from(zero)) * w).sum();
                    *out = sum * f64::from(scale * scales[if scales.len() == 1 { 0 } else { i % rows }]);
                }
            }
        }
        out
    }
}

/// The part of an optional input for direction `d`; `None` if the input is absent.
fn part(c: &Call, i: usize, d: usize, len: usize) -> Result<Option<Vec<f64>>, Fault> {
    let Some(tensor) = c.opt(i) else { return Ok(None) };
    let values = load_as_f64(tensor)?;
    match values.get(d * len..(d + 1) * len) {
        Some(part) => Ok(Some(part.to_vec())),
        None => Err(format!("input {i} of shape {:?} is too small", tensor.shape()).into()),
    }
}

pub(super) fn recurrent(c: &Call) -> Outputs {
    let read = Recurrence::of(c.node())?.ok_or("it is not recurrent")?;
    let x = c.input(0)?;
    let hidden = c.out_shape(1)?[2];
    let (directions, gates) = (read.reversed.len(), read.kind.gates());
    let &[mut steps, mut batch, size] = x.shape() else { return Err("its input must have rank 3".into()) };
    if read.batch_first {
        std::mem::swap(&mut steps, &mut batch);
    }
    let (steps, batch) = (steps, batch);
    let x_row = |t: usize, b: usize| if read.batch_first { b * steps + t } else { t * batch + b };
    let state_row = |d: usize, b: usize| if read.batch_first { b * directions + d } else { d * batch + b };
    let lengths = match c.opt(4) {
        None => vec![steps; batch],
        Some(_) => c.ints(4)?.into_iter().map(|n| usize::try_from(n).unwrap_or(usize::MAX)).collect(),
    };
    if lengths.len() != batch || lengths.iter().any(|n| *n > steps) {
        return Err(
            format!("sequence lengths {lengths:?} do not fit {batch} sequences of {steps} steps").into()
        );
    }
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let values = load_as_f64(x)?;
    let rows = (0..longest * batch).flat_map(|i| &values[x_row(i / batch, i % batch) * size..][..size]);
    let input: Vec<f64> = rows.copied().collect();

    let mut y = vec![0.0; steps * directions * batch * hidden];
    let mut last = [vec![0.0; directions * batch * hidden], vec![0.0; directions * batch * hidden]];
    for (d, reversed) in read.reversed.iter().enumerate() {
        let (w, r) = (Weights::new(c, 1, d, directions)?, Weights::new(c, 2, d, directions)?);
        let cell = Cell {
            read: &read,
            functions: &read.functions[d],
            hidden,
            bias: part(c, 3, d, 2 * gates * hidden)?.unwrap_or(vec![0.0; 2 * gates * hidden]),
            peepholes: part(c, 7, d, 3 * hidden)?.filter(|_| read.kind == Kind::Lstm),
        };
        let mut states = [vec![0.0; batch * hidden], vec![0.0; batch * hidden]];
        for (state, i) in states.iter_mut().zip([5, 6]) {
            if let Some(given) = c.opt(i) {
                let given = load_as_f64(given)?;
                for (b, row) in state.chunks_exact_mut(hidden.max(1)).enumerate() {
                    row.copy_from_slice(&given[state_row(d, b) * hidden..][..hidden]);
                }
            }
        }
        let projected = w.multiply(&input, size, gates * hidden);
        for step in 0..longest {
            let products = r.multiply(&states[0], hidden, gates * hidden);
            let before = states[0].clone();
            for b in (0..batch).filter(|b| step < lengths[*b]) {
                let t = if *reversed { lengths[b] - 1 - step } else { step };
                let range = b * hidden..(b + 1) * hidden;
                let of =
                    |values: &[f64], row: usize| values[row * gates * hidden..][..gates * hidden].to_vec();
                let [h, c] = &mut states;
                let state = [&mut h[range.clone()], &mut c[range.clone()]];
                let reset = |r_gate: &[f64]| {
                    let h: Vec<f64> = before[range.clone()].iter().zip(r_gate).map(|(h, r)| h * r).collect();
                    r.multiply(&h, hidden, gates * hidden)
                };
                cell.step(of(&projected, t * batch + b), of(&products, b), state, reset);
                let row = match read.batch_first {
                    true => (b * steps + t) * directions + d,
                    false => (t * directions + d) * batch + b,
                };
                y[row * hidden..][..hidden].copy_from_slice(&states[0][range]);
            }
        }
        for (last, state) in last.iter_mut().zip(&states) {
            for b in (0..batch).filter(|b| lengths[*b] > 0) {
                last[state_row(d, b) * hidden..][..hidden].copy_from_slice(&state[b * hidden..][..hidden]);
            }
        }
    }
    let dtype = x.dtype();
    let tensor = |i: usize, values: &[f64]| -> Result<Tensor, Fault> {
        if dtype == sdrun_abi::DType::F64 {
            return store(dtype, c.out_shape(i)?, values);
        }
        let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
        store(dtype, c.out_shape(i)?, &values)
    };
    Ok(vec![tensor(0, &y)?, tensor(1, &last[0])?, tensor(2, &last[1])?])
}

/// The state update of one direction.
struct Cell<'a> {
    read: &'a Recurrence,
    functions: &'a [Function],
    hidden: usize,
    /// Input biases of all gates, then state biases.
    bias: Vec<f64>,
    /// Peephole weights of the gates input, output, forget.
    peepholes: Option<Vec<f64>>,
}

impl Cell<'_> {
    /// Updates the hidden and cell state of one sequence. `x` and `h` are the gates' products with input and state.
    /// `reset` computes the product with a state that a gate has scaled.
    fn step(&self, x: Vec<f64>, h: Vec<f64>, state: [&mut [f64]; 2], reset: impl Fn(&[f64]) -> Vec<f64>) {
        let (n, [hidden, cell]) = (self.hidden, state);
        let gates = self.read.kind.gates();
        let act = |f: usize, v: f64| {
            let v = self.read.clip.map_or(v, |clip| v.clamp(-f64::from(clip), f64::from(clip)));
            self.functions[f].at(v)
        };
        // A gate's input bias and state bias.
        let bias = |gate: usize, j: usize| (self.bias[gate * n + j], self.bias[(gates + gate) * n + j]);
        let sum = |gate: usize, j: usize| {
            let (w, r) = bias(gate, j);
            x[gate * n + j] + h[gate * n + j] + w + r
        };
        match self.read.kind {
            Kind::Rnn => (0..n).for_each(|j| hidden[j] = act(0, sum(0, j))),
            Kind::Lstm => {
                let peep = |gate: usize, j: usize, c: f64| {
                    self.peepholes.as_ref().map_or(0.0, |p| p[gate * n + j] * c)
                };
                for j in 0..n {
                    let i = act(0, sum(0, j) + peep(0, j, cell[j]));
                    let f = act(0, sum(2, j) + peep(2, j, cell[j]));
                    let f = if self.read.input_forget { 1.0 - i } else { f };
                    cell[j] = f * cell[j] + i * act(1, sum(3, j));
                    let o = act(0, sum(1, j) + peep(1, j, cell[j]));
                    hidden[j] = o * self.functions[2].at(cell[j]);
                }
            }
            Kind::Gru => {
                let r: Vec<f64> = (0..n).map(|j| act(0, sum(1, j))).collect();
                let again = if self.read.linear_before_reset { Vec::new() } else { reset(&r) };
                for j in 0..n {
                    let (w_bias, r_bias) = bias(2, j);
                    let at = 2 * n + j;
                    let state = match self.read.linear_before_reset {
                        true => r[j] * (h[at] + r_bias),
                        false => again[at] + r_bias,
                    };
                    let (z, new) = (act(0, sum(0, j)), act(1, x[at] + w_bias + state));
                    hidden[j] = (1.0 - z) * new + z * hidden[j];
                }
            }
        }
    }
}
