//! LSTM, GRU and RNN, and ONNX Runtime's additions to ai.onnx for quantised models.

use super::{Ctx, Fact, Facts, dims, matrix, one};
use crate::{Dim, recurrent::Recurrence};
use sdrun_abi::DType;

/// The outputs Y, Y_h and, for an LSTM, Y_c.
pub(super) fn recurrent(c: &Ctx) -> Facts {
    let read = Recurrence::of(c.node)?.ok_or("it is not recurrent")?;
    c.need(0)?;
    let (weights, state) = (c.need(1)?, c.need(2)?);
    let quantized = c.node.op_type == "DynamicQuantizeLSTM";
    let float: &[usize] = if quantized { &[0, 3, 5, 6, 7] } else { &[0, 1, 2, 3, 5, 6, 7] };
    let dtype = c.common_dtype(float.iter().copied())?;
    let (directions, gates) = (read.reversed.len(), read.kind.gates());
    let x = c.ranked(0, 3)?;
    // [directions, gates * hidden, size]; the quantised operator swaps the last two.
    let matrix = |i: usize, shape: &Option<Vec<Dim>>| -> Result<Option<[Dim; 2]>, String> {
        let Some(shape) = shape else { return Ok(None) };
        let [first, rows, depth] = &shape[..] else {
            return Err(format!("input {i} must have rank 3, but its shape is {}", dims::text(shape)));
        };
        dims::same(first, &Dim::Known(directions)).map_err(|e| format!("directions of input {i}: {e}"))?;
        let (rows, depth) = if quantized { (depth, rows) } else { (rows, depth) };
        Ok(Some([rows.clone(), depth.clone()]))
    };
    let (weights, state) = (matrix(1, &weights.shape)?, matrix(2, &state.shape)?);
    let mut hidden = read.hidden.map_or(Dim::Unknown, Dim::Known);
    if let Some([rows, depth]) = &state {
        hidden = dims::same(&hidden, depth).map_err(|e| format!("units of input 2: {e}"))?;
        let wanted = hidden.known().map_or(Dim::Unknown, |n| Dim::Known(n * gates));
        dims::same(&wanted, rows).map_err(|e| format!("gates of input 2: {e}"))?;
        if let Some([other, _]) = &weights {
            dims::same(other, rows).map_err(|e| format!("gates of input 1: {e}"))?;
        }
    }
    if let (Some([_, depth]), Some(x)) = (&weights, x) {
        dims::same(depth, &x[2]).map_err(|e| format!("elements of a step: {e}"))?;
    }
    let [mut steps, mut batch] = [Dim::Unknown, Dim::Unknown];
    if let Some(x) = x {
        (steps, batch) = (x[0].clone(), x[1].clone());
        if read.batch_first {
            std::mem::swap(&mut steps, &mut batch);
        }
    }
    let directions = Dim::Known(directions);
    let (y, last) = match read.batch_first {
        true => (vec![batch.clone(), steps, directions.clone(), hidden.clone()], [batch, directions, hidden]),
        false => {
            (vec![steps, directions.clone(), batch.clone(), hidden.clone()], [directions, batch, hidden])
        }
    };
    for i in [5, 6] {
        if let Some(given) = c.ranked(i, 3)? {
            for (given, wanted) in given.iter().zip(&last) {
                dims::same(given, wanted).map_err(|e| format!("input {i}: {e}"))?;
            }
        }
    }
    let last = Fact::new(dtype, Some(last.to_vec()));
    Ok(vec![Fact::new(dtype, Some(y)), last.clone(), last])
}

/// A product of quantised matrices, converted to f32.
pub(super) fn product_to_float(c: &Ctx) -> Facts {
    one(Some(DType::F32), matrix::matmul_shape(c)?)
}
