//! Arithmetic on shapes and strides. Strides are in elements, the outermost dimension first.

use crate::ffi::Extent;

/// Strides of a contiguous tensor.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// As [`strides`], with the type of a view's strides.
pub(crate) fn dense(shape: &[usize]) -> Vec<isize> {
    strides(shape).into_iter().map(|stride| stride as isize).collect()
}

/// Whether the size in bytes of a tensor of this shape fits into the address space, whatever its type.
pub(crate) fn is_addressable(shape: &[usize]) -> bool {
    let bytes = shape.iter().try_fold(8_usize, |bytes, dim| bytes.checked_mul(*dim));
    bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok())
}

/// Number of elements.
pub(crate) fn len(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// A shape in ggml's form: four dimensions, the innermost first. Further dimensions are folded into the outermost.
pub(crate) fn extent(shape: &[usize]) -> Extent {
    let mut extent = [1; 4];
    for (i, d) in shape.iter().rev().enumerate() {
        extent[i.min(3)] *= d;
    }
    extent
}

/// The axis of a possibly negative attribute, if it is one of `rank` axes.
pub(crate) fn axis(axis: i64, rank: usize) -> Option<usize> {
    let resolved = if axis < 0 { axis.checked_add(rank as i64)? } else { axis };
    usize::try_from(resolved).ok().filter(|axis| *axis < rank)
}

/// The shape to which two shapes broadcast under ONNX's (NumPy's) rules.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (1, d) | (d, 1) => Some(d),
            (d, e) if d == e => Some(d),
            _ => None,
        })
        .collect()
}

/// The strides that broadcast a view of `shape` and `strides` to `target`. `None` if it does not broadcast.
pub(crate) fn broadcast_view(shape: &[usize], strides: &[isize], target: &[usize]) -> Option<Vec<isize>> {
    let lead = target.len().checked_sub(shape.len())?;
    let mut result = vec![0; target.len()];
    for ((result, target), (own, stride)) in
        result[lead..].iter_mut().zip(&target[lead..]).zip(shape.iter().zip(strides))
    {
        match own {
            1 => {}
            own if own == target => *result = *stride,
            _ => return None,
        }
    }
    Some(result)
}

/// As [`broadcast_view`], for a contiguous tensor.
pub(crate) fn broadcast_strides(shape: &[usize], target: &[usize]) -> Option<Vec<isize>> {
    broadcast_view(shape, &dense(shape), target)
}

/// `dims` without repetitions: 1 if the stride is 0.
pub(crate) fn once(dims: &[usize], strides: &[isize]) -> Vec<usize> {
    dims.iter().zip(strides).map(|(dim, stride)| if *stride == 0 { 1 } else { *dim }).collect()
}

/// The strides that view elements of `shape` at `strides` as `target`, which has as many elements. `None` if they would have to be
/// copied.
pub(crate) fn reshape_strides(shape: &[usize], strides: &[isize], target: &[usize]) -> Option<Vec<isize>> {
    let (dims, strides) = coalesce(shape, &[strides]);
    let (mut rest, mut result) = (target, Vec::with_capacity(target.len()));
    // Each merged dimension must be a product of dimensions of the target.
    for (dim, stride) in dims.iter().zip(&strides[0]) {
        let mut taken = 0;
        let mut product = 1;
        while product < *dim {
            product *= *rest.get(taken)?;
            taken += 1;
        }
        if product != *dim {
            return None;
        }
        while rest.get(taken) == Some(&1) {
            taken += 1;
        }
        let dense = self::strides(&rest[..taken]);
        result.extend(dense.iter().map(|step| *step as isize * stride));
        rest = &rest[taken..];
    }
    rest.is_empty().then_some(result)
}

/// Drops dimensions of one element, and merges neighbours that are contiguous in all of `strides`. At least one dimension remains.
pub(crate) fn coalesce(shape: &[usize], strides: &[&[isize]]) -> (Vec<usize>, Vec<Vec<isize>>) {
    let mut out_shape: Vec<usize> = Vec::new();
    let mut out: Vec<Vec<isize>> = vec![Vec::new(); strides.len()];
    for (i, d) in shape.iter().enumerate().filter(|(_, d)| **d != 1) {
        let merges = !out_shape.is_empty()
            && strides
                .iter()
                .zip(&out)
                .all(|(s, o)| o.last().is_some_and(|last| *last == s[i] * *d as isize));
        if let (true, Some(last)) = (merges, out_shape.last_mut()) {
            *last *= d;
            strides.iter().zip(&mut out).for_each(|(s, o)| *o.last_mut().unwrap_or(&mut 0) = s[i]);
        } else {
            out_shape.push(*d);
            strides.iter().zip(&mut out).for_each(|(s, o)| o.push(s[i]));
        }
    }
    if out_shape.is_empty() {
        out_shape.push(1);
        out.iter_mut().for_each(|o| o.push(1));
    }
    (out_shape, out)
}

/// The offset of the element with row-major index `index`.
pub(crate) fn offset(mut index: usize, shape: &[usize], strides: &[isize]) -> isize {
    let mut offset = 0;
    for (d, stride) in shape.iter().zip(strides).rev() {
        offset += (index % d) as isize * stride;
        index /= d;
    }
    offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_fold_the_outermost() {
        assert_eq!(extent(&[]), [1, 1, 1, 1]);
        assert_eq!(extent(&[2, 3]), [3, 2, 1, 1]);
        assert_eq!(extent(&[2, 3, 4, 5, 6]), [6, 5, 4, 6]);
    }

    #[test]
    fn axes_resolve_or_do_not() {
        assert_eq!(axis(-1, 3), Some(2));
        assert_eq!(axis(0, 3), Some(0));
        assert_eq!(axis(3, 3), None);
        assert_eq!(axis(-4, 3), None);
        assert_eq!(axis(i64::MIN, 3), None);
    }

    #[test]
    fn shapes_broadcast_or_do_not() {
        assert_eq!(broadcast(&[2, 1, 4], &[3, 1]), Some(vec![2, 3, 4]));
        assert_eq!(broadcast(&[2], &[3]), None);
        assert_eq!(broadcast_view(&[3, 1], &[7, 5], &[2, 3, 4]), Some(vec![0, 7, 0]));
        assert_eq!(broadcast_view(&[1, 3], &[7, 5], &[3]), None);
        assert_eq!(broadcast_strides(&[2, 3], &[2, 4]), None);
        assert_eq!(once(&[2, 3, 4], &[0, 7, 0]), [1, 3, 1]);
    }

    #[test]
    fn neighbours_merge_only_where_all_strides_agree() {
        assert_eq!(coalesce(&[2, 3, 4], &[&dense(&[2, 3, 4])]).0, [24]);
        let channel = broadcast_strides(&[3, 1], &[2, 3, 4]).unwrap();
        let (shape, both) = coalesce(&[2, 3, 4], &[&dense(&[2, 3, 4]), &channel]);
        assert_eq!(shape, [2, 3, 4]);
        assert_eq!(both, [vec![12, 4, 1], vec![0, 1, 0]]);
        assert_eq!(coalesce(&[1, 1], &[&[7, 7]]), (vec![1], vec![vec![1]]));
    }

    #[test]
    fn offsets_walk_the_shape() {
        let (shape, strides) = ([2, 3], [1, 2]);
        let walked: Vec<isize> = (0..6).map(|i| offset(i, &shape, &strides)).collect();
        assert_eq!(walked, [0, 2, 4, 1, 3, 5]);
    }
}
