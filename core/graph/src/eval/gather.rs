//! Selects elements by index.

use super::call::{Call, Fault, Outputs};
use super::layout::take;
use super::number::with_size;
use super::strided::{contiguous, rows};
use crate::Tensor;

/// Converts an index to a non-negative one; negative indices count from the back.
pub(super) fn position(index: i64, n: usize) -> Result<usize, Fault> {
    let i = if index < 0 { index.saturating_add(n as i64) } else { index };
    let valid = usize::try_from(i).ok().filter(|i| *i < n);
    valid.ok_or_else(|| format!("index {index} is out of range for {n} elements").into())
}

pub(super) fn gather(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let axis = c.axis("axis", 0, x.shape().len())?;
    let n = x.shape()[axis];
    let indices: Result<Vec<usize>, Fault> = c.ints(1)?.into_iter().map(|i| position(i, n)).collect();
    let picked = take(x, axis, indices?.iter().map(|i| Some(*i)), &[])?;
    Ok(vec![picked.reshaped(shape)?])
}

/// For each element of `shape` in order: the offset, in a tensor of shape `data`, of the element with the same index
/// except along `axis`, where the index is `indices[i]`.
pub(super) fn along_axis(
    shape: &[usize],
    data: &[usize],
    axis: usize,
    indices: &[i64],
) -> Result<Vec<usize>, Fault> {
    if let Some(i) = (0..shape.len()).find(|i| *i != axis && shape[*i] > data[*i]) {
        return Err(format!("indices of shape {shape:?} exceed axis {i} of {data:?}").into());
    }
    let mut strides = contiguous(data);
    let step_along = std::mem::take(&mut strides[axis]) as usize;
    let mut places = Vec::with_capacity(indices.len());
    let mut bad = None;
    rows(shape, [&strides], [0], &mut |[at], n, [step]| {
        for k in 0..n {
            match position(indices[places.len()], data[axis]) {
                Ok(p) => places.push(at + k * step as usize + p * step_along),
                Err(e) => {
                    bad.get_or_insert(e);
                    places.push(0);
                }
            }
        }
    });
    bad.map_or(Ok(places), Err)
}

pub(super) fn gather_elements(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let axis = c.axis("axis", 0, shape.len())?;
    let places = along_axis(&shape, x.shape(), axis, &c.ints(1)?)?;
    let data = with_size!(x.dtype(), N => {
        let source = x.data().as_chunks::<N>().0;
        places.iter().map(|p| source[*p]).collect::<Vec<_>>().into_flattened()
    });
    Ok(vec![Tensor::new(x.dtype(), shape, data)?])
}

/// For each row of `indices` (`depth` entries): the number of the slice it points at, over the dimensions `indexed`.
/// Row `i` refers to part `part(i)` of the data.
pub(super) fn slices(
    indices: &[i64],
    depth: usize,
    indexed: &[usize],
    count: usize,
    part: impl Fn(usize) -> usize,
) -> Result<Vec<usize>, Fault> {
    let size: usize = indexed.iter().product();
    (0..count)
        .map(|i| {
            let row = &indices[i * depth..(i + 1) * depth];
            let inside = row
                .iter()
                .zip(indexed)
                .try_fold(0, |at, (i, n)| Ok::<_, Fault>(at * n + position(*i, *n)?))?;
            Ok(part(i) * size + inside)
        })
        .collect()
}

pub(super) fn gather_nd(c: &Call) -> Outputs {
    let (x, indices, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let batch = if c.opset() < 12 { 0 } else { c.node().int_or("batch_dims", 0) as usize };
    let (lead, depth) = match indices.shape().split_last() {
        Some((depth, lead)) => (lead, *depth),
        None => return Err("indices must have at least one dimension".into()),
    };
    let count: usize = lead.iter().product();
    let batches: usize = lead[..batch].iter().product();
    let per_batch = (count / batches.max(1)).max(1);
    let indexed = &x.shape()[batch..batch + depth];
    let places = slices(&c.ints(1)?, depth, indexed, count, |i| i / per_batch)?;
    let bytes = x.shape()[batch + depth..].iter().product::<usize>() * x.dtype().size();
    let mut data = Vec::with_capacity(count * bytes);
    places.iter().for_each(|p| data.extend_from_slice(&x.data()[p * bytes..(p + 1) * bytes]));
    Ok(vec![Tensor::new(x.dtype(), shape, data)?])
}

pub(super) fn compress(c: &Call) -> Outputs {
    let (x, flags) = (c.input(0)?, c.input(1)?.elements::<bool>().ok_or("the condition must be bool")?);
    let (x, axis) = match c.node().int("axis") {
        Some(_) => (x.clone(), c.axis("axis", 0, x.shape().len())?),
        None => (x.reshaped(vec![x.len()])?, 0),
    };
    let kept: Vec<usize> = (0..flags.len()).filter(|i| flags[*i]).collect();
    if let Some(i) = kept.last().filter(|i| **i >= x.shape()[axis]) {
        return Err(format!(
            "the condition selects element {i} of an axis with {} elements",
            x.shape()[axis]
        )
        .into());
    }
    Ok(vec![take(&x, axis, kept.iter().map(|i| Some(*i)), &[])?])
}

pub(super) fn reverse_sequence(c: &Call) -> Outputs {
    let (x, lengths) = (c.input(0)?, c.ints(1)?);
    let (time, batch) = (c.node().int_or("time_axis", 0), c.node().int_or("batch_axis", 1));
    let [first, second] = match x.shape() {
        [a, b, ..] => [*a, *b],
        _ => return Err("the input must have at least two dimensions".into()),
    };
    let time_first = match (time, batch) {
        (0, 1) => true,
        (1, 0) => false,
        _ => return Err("time_axis and batch_axis must be 0 and 1 or 1 and 0".into()),
    };
    let (times, batches) = if time_first { (first, second) } else { (second, first) };
    if lengths.len() != batches || lengths.iter().any(|l| *l < 0 || *l as usize > times) {
        return Err(format!("lengths {lengths:?} do not fit {batches} sequences of {times} steps").into());
    }
    let bytes = x.shape()[2..].iter().product::<usize>() * x.dtype().size();
    let mut data = Vec::with_capacity(x.data().len());
    for i in 0..first {
        for j in 0..second {
            let (t, b) = if time_first { (i, j) } else { (j, i) };
            let length = lengths[b] as usize;
            let t = if t < length { length - 1 - t } else { t };
            let place = if time_first { t * second + j } else { i * second + t };
            data.extend_from_slice(&x.data()[place * bytes..(place + 1) * bytes]);
        }
    }
    Ok(vec![Tensor::new(x.dtype(), x.shape().to_vec(), data)?])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, i64s};

    #[test]
    fn gather_counts_from_the_back_and_checks_range() {
        let x = i64s(&[2, 3], &[0, 1, 2, 3, 4, 5]);
        let y = Op::new("Gather").int("axis", 1).run(&[&x, &i64s(&[1, 2], &[-1, 0])]);
        assert_eq!(y, i64s(&[2, 1, 2], &[2, 0, 5, 3]));
        assert!(Op::new("Gather").try_run(&[&x, &i64s(&[], &[2])]).is_err());
    }

    #[test]
    fn gather_elements_and_nd() {
        let x = i64s(&[2, 2], &[1, 2, 3, 4]);
        let y = Op::new("GatherElements").int("axis", 1).run(&[&x, &i64s(&[2, 2], &[0, 0, -1, 0])]);
        assert_eq!(y, i64s(&[2, 2], &[1, 1, 4, 3]));
        assert_eq!(Op::new("GatherND").run(&[&x, &i64s(&[2, 2], &[0, 0, 1, 1])]), i64s(&[2], &[1, 4]));
        assert_eq!(Op::new("GatherND").run(&[&x, &i64s(&[1, 1], &[1])]), i64s(&[1, 2], &[3, 4]));
        let x = i64s(&[2, 2, 2], &[0, 1, 2, 3, 4, 5, 6, 7]);
        let y = Op::new("GatherND").int("batch_dims", 1).run(&[&x, &i64s(&[2, 1], &[1, 0])]);
        assert_eq!(y, i64s(&[2, 2], &[2, 3, 4, 5]));
    }

    #[test]
    fn sequences_are_reversed_up_to_their_lengths() {
        let x = i64s(&[2, 3], &[0, 1, 2, 3, 4, 5]);
        let y = Op::new("ReverseSequence")
            .int("time_axis", 1)
            .int("batch_axis", 0)
            .run(&[&x, &i64s(&[2], &[3, 2])]);
        assert_eq!(y, i64s(&[2, 3], &[2, 1, 0, 4, 3, 5]));
    }
}
