//! Finds elements: extremes, non-zeros, distinct values.

use super::call::{Call, Outputs};
use super::number::{Num, load, store, with_any};
use super::strided::around;
use crate::Tensor;
use std::cmp::Ordering;

/// A total order; NaN is greater than everything.
fn order<T: Num>(a: &T, b: &T) -> Ordering {
    a.partial_cmp(b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

pub(super) fn non_zero(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let found: Vec<usize> = with_any!(x.dtype(), T => {
        let flags = load::<T>(x)?;
        Ok::<_, super::call::Fault>((0..flags.len()).filter(|i| flags[*i] != T::default()).collect())
    })?;
    let mut positions = Vec::with_capacity(found.len() * x.shape().len());
    for axis in 0..x.shape().len() {
        let (_, n, inner) = around(x.shape(), axis);
        positions.extend(found.iter().map(|i| (i / inner % n) as i64));
    }
    Ok(vec![Tensor::from_elements(vec![x.shape().len(), found.len()], &positions)?])
}

/// Yields the start and step of each run of elements along `axis`.
fn runs(shape: &[usize], axis: usize) -> impl Iterator<Item = (usize, usize)> {
    let (outer, n, inner) = around(shape, axis);
    (0..outer).flat_map(move |o| (0..inner).map(move |i| (o * n * inner + i, inner)))
}

pub(super) fn arg(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let axis = c.axis("axis", 0, x.shape().len())?;
    let n = x.shape()[axis];
    if n == 0 && !c.out_shape(0)?.contains(&0) {
        return Err("an empty axis has no extreme".into());
    }
    let wanted = if c.node().op_type == "ArgMax" { Ordering::Greater } else { Ordering::Less };
    let take_last = c.node().int_or("select_last_index", 0) != 0;
    with_any!(x.dtype(), T => {
        let values = load::<T>(x)?;
        let best = |(start, step): (usize, usize)| {
            let at = |k: usize| &values[start + k * step];
            (1..n).fold(0, |best, k| match order(at(k), at(best)) {
                o if o == wanted => k,
                Ordering::Equal if take_last => k,
                _ => best,
            }) as i64
        };
        let found: Vec<i64> = if n == 0 { vec![] } else { runs(x.shape(), axis).map(best).collect() };
        Ok(vec![Tensor::from_elements(c.out_shape(0)?, &found)?])
    })
}

pub(super) fn top_k(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let axis = c.axis("axis", -1, x.shape().len())?;
    let largest = c.opset() < 11 || c.node().int_or("largest", 1) != 0;
    let (n, k) = (x.shape()[axis], shape[axis]);
    with_any!(x.dtype(), T => {
        let values = load::<T>(x)?;
        let mut top = vec![T::default(); shape.iter().product()];
        let mut places = vec![0i64; top.len()];
        for ((from, step), (to, _)) in runs(x.shape(), axis).zip(runs(&shape, axis)) {
            let mut order_of: Vec<usize> = (0..n).collect();
            // The sort is stable: among equal elements, the one with the lowest index comes first.
            order_of.sort_by(|a, b| {
                let o = order(&values[from + a * step], &values[from + b * step]);
                if largest { o.reverse() } else { o }
            });
            for (i, p) in order_of[..k].iter().enumerate() {
                top[to + i * step] = values[from + p * step];
                places[to + i * step] = *p as i64;
            }
        }
        Ok(vec![store(x.dtype(), shape.clone(), &top)?, Tensor::from_elements(shape, &places)?])
    })
}

pub(super) fn unique(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let (flat, axis) = match c.node().int("axis") {
        Some(_) => (x.clone(), c.axis("axis", 0, x.shape().len())?),
        None => (x.reshaped(vec![x.len()])?, 0),
    };
    let sorted = c.node().int_or("sorted", 1) != 0;
    let (outer, n, inner) = around(flat.shape(), axis);
    with_any!(x.dtype(), T => {
        let values = load::<T>(&flat)?;
        let slice = |i: usize| (0..outer).flat_map(move |o| (o * n + i) * inner..(o * n + i + 1) * inner);
        let compare = |a: usize, b: usize| {
            let mut pairs = slice(a).zip(slice(b)).map(|(i, j)| order(&values[i], &values[j]));
            pairs.find(|o| o.is_ne()).unwrap_or(Ordering::Equal)
        };
        // Equal slices become neighbours, in order of appearance.
        let mut by_value: Vec<usize> = (0..n).collect();
        by_value.sort_by(|a, b| compare(*a, *b));
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for i in by_value {
            match groups.last_mut() {
                Some(group) if compare(group[0], i).is_eq() => group.push(i),
                _ => groups.push(vec![i]),
            }
        }
        if !sorted {
            groups.sort_by_key(|g| g[0]);
        }
        let mut inverse = vec![0i64; n];
        for (g, group) in groups.iter().enumerate() {
            group.iter().for_each(|i| inverse[*i] = g as i64);
        }
        let mut distinct = Vec::with_capacity(outer * groups.len() * inner);
        for o in 0..outer {
            for group in &groups {
                distinct.extend_from_slice(&values[(o * n + group[0]) * inner..][..inner]);
            }
        }
        let mut shape = flat.shape().to_vec();
        shape[axis] = groups.len();
        let first: Vec<i64> = groups.iter().map(|g| g[0] as i64).collect();
        let counts: Vec<i64> = groups.iter().map(|g| g.len() as i64).collect();
        Ok(vec![
            store(x.dtype(), shape, &distinct)?,
            Tensor::from_i64s(&first),
            Tensor::from_i64s(&inverse),
            Tensor::from_i64s(&counts),
        ])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, f32s, i64s};
    use crate::Tensor;

    #[test]
    fn non_zeros_are_listed_by_axis() {
        let x = Tensor::from_elements(vec![2, 2], &[true, false, true, true]).unwrap();
        assert_eq!(Op::new("NonZero").run(&[&x]), i64s(&[2, 3], &[0, 1, 1, 0, 0, 1]));
    }

    #[test]
    fn extremes_take_the_first_or_the_last() {
        let x = f32s(&[2, 3], &[1.0, 3.0, 3.0, 0.0, -1.0, -1.0]);
        let op = |name: &str| Op::new(name).int("axis", 1).int("keepdims", 0);
        assert_eq!(op("ArgMax").run(&[&x]), i64s(&[2], &[1, 0]));
        assert_eq!(op("ArgMin").int("select_last_index", 1).run(&[&x]), i64s(&[2], &[0, 2]));
    }

    #[test]
    fn top_k_is_stable_and_survives_nan() {
        let x = f32s(&[4], &[1.0, f32::NAN, 2.0, 2.0]);
        let y = Op::new("TopK").outputs(2).try_run(&[&x, &i64s(&[1], &[3])]).unwrap();
        assert_eq!(y[1], i64s(&[3], &[1, 2, 3]));
        let y = Op::new("TopK").int("largest", 0).outputs(2).try_run(&[&x, &i64s(&[1], &[2])]).unwrap();
        assert_eq!(y, [f32s(&[2], &[1.0, 2.0]), i64s(&[2], &[0, 2])]);
    }

    #[test]
    fn unique_counts_and_returns_indices() {
        let x = f32s(&[6], &[2.0, 1.0, 1.0, 3.0, 4.0, 3.0]);
        let y = Op::new("Unique").int("sorted", 0).outputs(4).try_run(&[&x]).unwrap();
        assert_eq!(y[0], f32s(&[4], &[2.0, 1.0, 3.0, 4.0]));
        assert_eq!(y[1], i64s(&[4], &[0, 1, 3, 4]));
        assert_eq!(y[2], i64s(&[6], &[0, 1, 1, 2, 3, 2]));
        assert_eq!(y[3], i64s(&[4], &[1, 2, 2, 1]));
    }
}
