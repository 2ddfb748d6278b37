//! The semantics of If, Loop and Scan around their bodies.

use crate::topology::explain;
use sdrun_abi::{DType, Error, Result};
use sdrun_graph::{Node, Tensor, proto::GraphProto};

/// The value of a condition.
pub(super) fn truth(tensor: Option<Tensor>) -> Result<Option<bool>> {
    let Some(tensor) = tensor else { return Ok(None) };
    match tensor.to_i64s().as_deref() {
        Some([value]) => Ok(Some(*value != 0)),
        _ => {
            Err(Error::invalid(format!("its condition has the shape {:?}, not one element", tensor.shape())))
        }
    }
}

/// Runs the body of a Loop until its condition is false or its trip count is reached.
pub(super) fn repeat(
    inputs: &[Option<Tensor>],
    body: &GraphProto,
    mut run: impl FnMut(Vec<Tensor>) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    let input = |i: usize| inputs.get(i).cloned().flatten();
    let most = input(0).map(|t| t.to_i64s().and_then(|v| v.first().copied()).unwrap_or_default());
    let mut condition = truth(input(1))?.unwrap_or(true);
    let mut carried: Vec<Tensor> = inputs.iter().skip(2).flatten().cloned().collect();
    let (count, scans) = (carried.len(), body.output.len().saturating_sub(1 + carried.len()));
    let mut rows: Vec<Vec<Tensor>> = vec![Vec::new(); scans];
    // Exporters declare scalars or vectors of one element.
    let as_input = |i: usize, tensor: Tensor| -> Result<Tensor> {
        let shape = body.input.get(i).and_then(|v| v.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref());
        let rank = shape.map_or(0, |shape| shape.dim.len());
        Tensor::new(tensor.dtype(), vec![1; rank], tensor.data().clone()).map_err(explain)
    };
    let mut step = 0i64;
    while condition && most.is_none_or(|most| step < most) {
        let mut given = vec![as_input(0, Tensor::scalar(step))?, as_input(1, Tensor::scalar(condition))?];
        given.append(&mut carried);
        let mut results = run(given)?.into_iter();
        condition = truth(results.next())?.unwrap_or_default();
        carried = results.by_ref().take(count).collect();
        rows.iter_mut().zip(results).for_each(|(rows, row)| rows.push(row));
        step += 1;
    }
    for (i, rows) in rows.iter().enumerate() {
        carried.push(if rows.is_empty() { empty(body, 1 + count + i)? } else { stack(rows, 0)? });
    }
    Ok(carried)
}

/// The output of a Loop that never ran.
fn empty(body: &GraphProto, i: usize) -> Result<Tensor> {
    let unknown = || Error::unsupported(format!("it never ran, and output {i} of its body has no type"));
    let declared =
        body.output.get(i).and_then(|v| v.r#type.as_ref()?.tensor_type.as_ref()).ok_or_else(unknown)?;
    let dtype = declared.elem_type.and_then(DType::from_onnx).ok_or_else(unknown)?;
    let dims = declared.shape.iter().flat_map(|shape| &shape.dim);
    let dims = dims.map(|dim| dim.dim_value.and_then(|n| usize::try_from(n).ok()).unwrap_or(0));
    Tensor::new(dtype, [0].into_iter().chain(dims).collect(), Vec::new()).map_err(explain)
}

/// Stacks tensors of one shape along a new dimension at `axis`.
fn stack(rows: &[Tensor], axis: i64) -> Result<Tensor> {
    let Some(first) = rows.first() else { return Err(Error::invalid("nothing to stack")) };
    let rank = first.shape().len() as i64 + 1;
    let axis = if axis < 0 { axis + rank } else { axis };
    let axis = usize::try_from(axis)
        .ok()
        .filter(|a| (*a as i64) < rank)
        .ok_or_else(|| Error::invalid(format!("axis {axis} of rank {rank}")))?;
    if rows.iter().any(|row| row.dtype() != first.dtype() || row.shape() != first.shape()) {
        return Err(Error::invalid("the body gave outputs of different shapes, which cannot be stacked"));
    }
    let outer: usize = first.shape()[..axis].iter().product();
    let chunk = first.data().len() / outer.max(1);
    let mut data = Vec::with_capacity(first.data().len() * rows.len());
    for i in 0..outer {
        rows.iter().for_each(|row| data.extend_from_slice(&row.data()[i * chunk..(i + 1) * chunk]));
    }
    let mut shape = first.shape().to_vec();
    shape.insert(axis, rows.len());
    Tensor::new(first.dtype(), shape, data).map_err(explain)
}

/// The slice of a tensor at index `at` of `axis`, without that dimension.
fn slice(tensor: &Tensor, axis: usize, at: usize) -> Result<Tensor> {
    let mut shape = tensor.shape().to_vec();
    let outer: usize = shape[..axis].iter().product();
    let inner = shape[axis + 1..].iter().product::<usize>() * tensor.dtype().size();
    let count = shape.remove(axis);
    let data = (0..outer)
        .flat_map(|i| &tensor.data()[(i * count + at) * inner..][..inner])
        .copied()
        .collect::<Vec<u8>>();
    Tensor::new(tensor.dtype(), shape, data).map_err(explain)
}

/// Runs the body of a Scan for each slice of its inputs.
pub(super) fn scan(
    node: &Node,
    inputs: Vec<Option<Tensor>>,
    mut run: impl FnMut(Vec<Tensor>) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    let inputs: Vec<Tensor> = inputs.into_iter().flatten().collect();
    let scanned = node
        .int("num_scan_inputs")
        .and_then(|n| usize::try_from(n).ok())
        .filter(|n| (1..=inputs.len()).contains(n));
    let scanned = scanned.ok_or_else(|| Error::invalid("num_scan_inputs does not fit its inputs"))?;
    let (states, sequences) = inputs.split_at(inputs.len() - scanned);
    let list = |name: &str, i: usize| node.ints(name).and_then(|list| list.get(i).copied()).unwrap_or(0);
    let axis = |i: usize| {
        let rank = sequences[i].shape().len();
        crate::shape::axis(list("scan_input_axes", i), rank)
            .ok_or_else(|| Error::invalid("an axis is out of range"))
    };
    let axes: Vec<usize> = (0..scanned).map(axis).collect::<Result<_>>()?;
    let steps = sequences[0].shape()[axes[0]];
    if sequences.iter().zip(&axes).any(|(sequence, axis)| sequence.shape()[*axis] != steps) {
        return Err(Error::invalid("its sequences have different lengths"));
    }
    let mut carried = states.to_vec();
    let mut rows: Vec<Vec<Tensor>> = vec![Vec::new(); node.outputs.len().saturating_sub(carried.len())];
    for step in 0..steps {
        let mut given = carried;
        for (i, (sequence, axis)) in sequences.iter().zip(&axes).enumerate() {
            let at = if list("scan_input_directions", i) == 1 { steps - 1 - step } else { step };
            given.push(slice(sequence, *axis, at)?);
        }
        let mut results = run(given)?.into_iter();
        carried = results.by_ref().take(states.len()).collect();
        rows.iter_mut().zip(results).for_each(|(rows, row)| rows.push(row));
    }
    for (i, mut rows) in rows.into_iter().enumerate() {
        if list("scan_output_directions", i) == 1 {
            rows.reverse();
        }
        carried.push(stack(&rows, list("scan_output_axes", i))?);
    }
    Ok(carried)
}
