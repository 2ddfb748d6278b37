//! LSTM, GRU, RNN, and ONNX Runtime's LSTM with quantized weights.

use super::{
    Operator,
    matmul::product,
    quantized::{self, Factors},
};
use crate::{
    ffi::{Tensor, Type},
    kernels::{Layout, Panels, Quads, Recurrent, State},
    shape,
    simd::{Level, Words, int8::Bytes, product::Taps},
    storage::is_f32,
    translate::{Outcome, Translator, refuse},
};
use sdrun_abi::DType;
use sdrun_graph::{Node, ValueId, recurrent::Recurrence};

const TAKES: &str = "float";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "LSTM", takes: TAKES, translate: recurrent },
    Operator { name: "GRU", takes: TAKES, translate: recurrent },
    Operator { name: "RNN", takes: TAKES, translate: recurrent },
    Operator { name: "DynamicQuantizeLSTM", takes: "float input, matrices of bytes", translate: recurrent },
];

fn recurrent(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let read = match Recurrence::of(node) {
        Ok(Some(read)) => read,
        Ok(None) => return refuse("it is not recurrent"),
        Err(why) => return refuse(why),
    };
    let x = t.float(node, 0)?;
    let (w, r) = (t.input_id(node, 1)?, t.input_id(node, 2)?);
    let (directions, gates) = (read.reversed.len(), read.kind.gates());
    let quantized = node.op_type == "DynamicQuantizeLSTM";
    let r_shape = t.shape(r)?;
    let hidden = r_shape[if quantized { 1 } else { 2 }];
    let &[first, second, size] = &x.shape[..] else { return refuse("its input has another rank") };
    let (steps, batch) = if read.batch_first { (second, first) } else { (first, second) };
    let rows = gates * hidden;
    let (mut inputs, strides, state) = match quantized {
        true => {
            let factors = [(1, w, [size, rows]), (2, r, [hidden, rows])];
            let [w, r] = factors.map(|(i, id, matrix)| quantized_matrix(t, node, i, id, directions, matrix));
            let (w, r) = (w?, r?);
            let left = (x.tensor, [steps * batch, size]);
            let projected = quantized::dynamic_product(t, node, left, (w, directions), None)?;
            let state = State::Quantized {
                bytes: Bytes::detect(),
                scale: 2,
                zero: r.zero.map(|_| 3),
                signed: r.signed,
            };
            let inputs = [projected, r.tensor, r.scale].into_iter().chain(r.zero).collect();
            (inputs, [rows, steps * batch * rows], state)
        }
        false => {
            for id in [w, r] {
                if !is_f32(t.dtype(id)?) {
                    return refuse("its weights are not float");
                }
            }
            let shape = vec![steps * batch, size];
            let left = t.view_as(t.input_id(node, 0)?, &shape)?;
            let right = (t.stored_source(w), vec![directions * rows, size], true);
            let out = [steps * batch, directions * rows];
            let projected = product(t, node, (left, None), right, &out, [None, None], None)?;
            let level = Level::detect();
            let panels = Panels::right(level, Words::F32, [directions * gates, hidden, hidden]);
            let stored = t.stored_source(r);
            let r = if t.is_stored(stored) {
                let form = crate::form::Form::Panels { panels, transposed: false, blocks: None };
                t.weight(stored, form, t.matrix_type())?
            } else {
                let r = t.operand(r)?;
                let layout = Layout { start: 0, row_step: hidden, depth_step: 1 };
                let matrices = [directions * gates];
                t.panels(node, r.tensor, panels, layout, &matrices, &[(hidden * hidden) as isize])?
            };
            let taps = Taps::dense(hidden, panels.block);
            (vec![projected, r], [directions * rows, rows], State::Panels { level, panels, taps })
        }
    };
    let mut place = |tensor: Option<Tensor>| {
        inputs.extend(tensor);
        tensor.map(|_| inputs.len() - 1)
    };
    let bias = place(t.optional_float(node, 3)?.map(|b| b.tensor));
    let lengths = match node.input(4) {
        Some(id) if t.dtype(id)? != DType::I32 => return refuse("its sequence lengths are not i32"),
        Some(id) => place(Some(t.operand(id)?.tensor)),
        None => None,
    };
    let hidden_state = place(t.optional_float(node, 5)?.map(|h| h.tensor));
    let is_lstm = gates == 4;
    let [mut cell_state, mut peepholes] = [None, None];
    if is_lstm {
        cell_state = place(t.optional_float(node, 6)?.map(|c| c.tensor));
        peepholes = place(t.optional_float(node, 7)?.map(|p| p.tensor));
    }
    let batch_first = read.batch_first;
    let kernel = Recurrent {
        read,
        steps,
        batch,
        hidden,
        state,
        strides,
        bias,
        lengths,
        initial: [hidden_state, cell_state],
        peepholes,
    };
    let row = kernel.row_len();
    let all = t.custom(node, kernel, &inputs, Type::F32, [row, batch, directions, 1])?;
    // Dimensions and strides of steps, directions, sequences and units.
    let (s, d, b) = ((steps, hidden as isize), (directions, (batch * row) as isize), (batch, row as isize));
    let orders = match batch_first {
        true => [vec![b, s, d, (hidden, 1)], vec![b, d, (hidden, 1)]],
        false => [vec![s, d, b, (hidden, 1)], vec![d, b, (hidden, 1)]],
    };
    for i in 0..3 {
        if node.output(i).is_none() {
            continue;
        }
        let (dims, strides): (Vec<usize>, Vec<isize>) = orders[i.min(1)].iter().copied().unzip();
        let start = if i == 0 { 0 } else { (steps + i - 1) * hidden };
        let y = t.strided(node, all, &dims, &strides, start)?;
        let y = t.builder.reshape(y, shape::extent(&dims))?;
        t.define(node, i, y)?;
    }
    Ok(())
}

/// Input `i` (`W` or `R`) with its scale and zero point.
fn quantized_matrix(
    t: &mut Translator<'_>,
    node: &Node,
    i: usize,
    id: ValueId,
    matrices: usize,
    [depth, cols]: [usize; 2],
) -> Outcome<Factors> {
    let dtype = t.dtype(id)?;
    if !matches!(dtype, DType::I8 | DType::U8) {
        return refuse("its weights are no bytes");
    }
    let tensor = quantized::quads(t, node, id, Quads::Panels { matrices, depth, cols })?;
    let scale = t.float(node, 6 + 2 * i)?.tensor;
    let zero = quantized::zero_point(t, node.input(7 + 2 * i), dtype)?;
    Ok(Factors { tensor, scale, zero, signed: dtype == DType::I8, cols, depth })
}
