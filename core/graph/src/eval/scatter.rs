//! Writes elements by index.

use super::call::{Call, Fault, Outputs};
use super::gather::{along_axis, slices};
use super::number::{Num, load, store, with_number, with_size};
use crate::Tensor;

/// `data` with slice `i` of `updates` (`len` elements) written to slice `places[i]`, in order.
fn scatter(c: &Call, data: &Tensor, updates: &Tensor, places: &[usize], len: usize) -> Outputs {
    fn put<T: Copy>(data: &mut [T], updates: &[T], places: &[usize], len: usize, f: impl Fn(T, T) -> T) {
        for (i, p) in places.iter().enumerate() {
            let (to, from) = (&mut data[p * len..(p + 1) * len], &updates[i * len..(i + 1) * len]);
            to.iter_mut().zip(from).for_each(|(t, f_)| *t = f(*t, *f_));
        }
    }
    let (dtype, shape) = (data.dtype(), data.shape().to_vec());
    let reduction = c.mode("reduction", "none");
    if reduction == "none" {
        let bytes = with_size!(dtype, N => {
            let mut out = data.data().as_chunks::<N>().0.to_vec();
            put(&mut out, updates.data().as_chunks::<N>().0, places, len, |_, new| new);
            out.into_flattened()
        });
        return Ok(vec![Tensor::new(dtype, shape, bytes)?]);
    }
    with_number!(dtype, T => {
        let f: fn(T, T) -> T = match reduction {
            "add" => T::add,
            "mul" => T::mul,
            "max" => T::larger,
            "min" => T::smaller,
            other => return Err(format!("reduction {other:?} is not defined").into()),
        };
        let mut out = load::<T>(data)?;
        put(&mut out, &load::<T>(updates)?, places, len, f);
        Ok(vec![store(dtype, shape, &out)?])
    })
}

pub(super) fn scatter_elements(c: &Call) -> Outputs {
    let (data, indices, updates) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let axis = c.axis("axis", 0, data.shape().len())?;
    let places = along_axis(indices.shape(), data.shape(), axis, &c.ints(1)?)?;
    scatter(c, data, updates, &places, 1)
}

pub(super) fn scatter_nd(c: &Call) -> Outputs {
    let (data, indices, updates) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let (lead, depth) = match indices.shape().split_last() {
        Some((depth, lead)) => (lead, *depth),
        None => return Err("indices must have at least one dimension".into()),
    };
    let places = slices(&c.ints(1)?, depth, &data.shape()[..depth], lead.iter().product(), |_| 0)?;
    scatter(c, data, updates, &places, data.shape()[depth..].iter().product())
}

/// Writes the rows of `update` along an axis, starting at a position per batch.
pub(super) fn tensor_scatter(c: &Call) -> Outputs {
    let (data, update) = (c.input(0)?, c.input(1)?);
    let shape = data.shape();
    let axis = c.axis("axis", -2, shape.len())?;
    let others_match = update.shape().len() == shape.len()
        && (0..shape.len())
            .all(|i| if i == axis { update.shape()[i] <= shape[i] } else { update.shape()[i] == shape[i] });
    if axis == 0 || !others_match {
        return Err(format!(
            "an update of shape {:?} does not fit {shape:?} along axis {axis}",
            update.shape()
        )
        .into());
    }
    let starts = if c.opt(2).is_some() { c.ints(2)? } else { vec![0; shape[0]] };
    if starts.len() != shape[0] {
        return Err(format!("there must be {} write indices", shape[0]).into());
    }
    let (length, fresh) = (shape[axis], update.shape()[axis]);
    let prefixes: usize = shape[..axis].iter().product();
    let per_batch = (prefixes / shape[0].max(1)).max(1);
    let mut places = Vec::with_capacity(prefixes * fresh);
    for prefix in 0..prefixes {
        for k in 0..fresh as i64 {
            let at = starts[prefix / per_batch].saturating_add(k);
            let at = match c.mode("mode", "linear") {
                "circular" => at.rem_euclid(length as i64),
                "linear" => at,
                other => return Err(format!("mode {other:?} is not defined").into()),
            };
            let at = usize::try_from(at).ok().filter(|at| *at < length);
            let at = at.ok_or_else(|| {
                Fault::from(format!("the update extends beyond the {length} elements of the axis"))
            })?;
            places.push(prefix * length + at);
        }
    }
    scatter(c, data, update, &places, shape[axis + 1..].iter().product())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, f32s, i64s};
    use crate::Tensor;

    /// Found by fuzzing: TensorScatter allocated a table for the other dimensions.
    #[test]
    fn empty_tensors_take_no_work_however_large_their_other_dimensions() {
        let data = Tensor::from_elements::<f32>(vec![1, 1 << 53, 0], &[]).unwrap();
        let update = Tensor::from_elements::<f32>(vec![1, 1 << 39, 0], &[]).unwrap();
        assert_eq!(Op::new("TensorScatter").run(&[&data, &update]), data);
    }

    #[test]
    fn elements_are_written_or_combined() {
        let (x, i, u) = (i64s(&[1, 3], &[1, 2, 3]), i64s(&[1, 2], &[1, 1]), i64s(&[1, 2], &[5, 6]));
        let op = || Op::new("ScatterElements").int("axis", 1);
        assert_eq!(op().run(&[&x, &i, &u]), i64s(&[1, 3], &[1, 6, 3]));
        assert_eq!(op().str("reduction", "add").run(&[&x, &i, &u]), i64s(&[1, 3], &[1, 13, 3]));
        assert_eq!(op().str("reduction", "max").run(&[&x, &i, &u]), i64s(&[1, 3], &[1, 6, 3]));
        assert!(op().try_run(&[&x, &i64s(&[1, 2], &[1, 3]), &u]).is_err());
    }

    #[test]
    fn slices_are_written() {
        let (x, i, u) = (i64s(&[3, 2], &[0; 6]), i64s(&[2, 1], &[2, 0]), i64s(&[2, 2], &[1, 2, 3, 4]));
        assert_eq!(Op::new("ScatterND").run(&[&x, &i, &u]), i64s(&[3, 2], &[3, 4, 0, 0, 1, 2]));
    }

    #[test]
    fn caches_wrap_around() {
        let (cache, update) = (f32s(&[1, 3, 1], &[1.0, 2.0, 3.0]), f32s(&[1, 2, 1], &[8.0, 9.0]));
        let op = Op::new("TensorScatter").opset(24).str("mode", "circular");
        assert_eq!(op.run(&[&cache, &update, &i64s(&[1], &[2])]), f32s(&[1, 3, 1], &[9.0, 2.0, 8.0]));
    }
}
