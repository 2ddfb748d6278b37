//! Operators that move elements without computing.

use super::call::{Call, Fault, Outputs};
use super::cast::convert;
use super::strided::{View, around, broadcast};
use crate::Tensor;
use crate::infer::{layout as rule, slice as ranges};

pub(super) fn reshape(c: &Call) -> Outputs {
    Ok(vec![c.input(0)?.reshaped(c.out_shape(0)?)?])
}

pub(super) fn expand(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let view = View { strides: broadcast(x.shape(), &shape), shape: shape.clone(), start: 0 };
    Ok(vec![view.tensor(x, shape)?])
}

pub(super) fn tile(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let own = View::of(x.shape());
    // Each axis becomes two: the repetitions, with stride zero, and the axis itself.
    let pairs = |i: usize| [shape[i].checked_div(own.shape[i]).unwrap_or(0), own.shape[i]];
    let view = View {
        shape: (0..shape.len()).flat_map(pairs).collect(),
        strides: own.strides.iter().flat_map(|s| [0, *s]).collect(),
        start: 0,
    };
    Ok(vec![view.tensor(x, shape)?])
}

pub(super) fn transpose(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let perm = rule::permutation(&c.ctx, x.shape().len())?;
    Ok(vec![View::of(x.shape()).permuted(&perm).tensor(x, c.out_shape(0)?)?])
}

pub(super) fn concat(c: &Call) -> Outputs {
    let shape = c.out_shape(0)?;
    let axis = c.axis("axis", 0, shape.len())?;
    let dtype = c.input(0)?.dtype();
    let outer = around(&shape, axis).0;
    let mut data = Vec::with_capacity(dtype.bytes_of(&shape).unwrap_or(0));
    let mut parts = Vec::with_capacity(c.inputs.len());
    for i in 0..c.inputs.len() {
        let part = c.input(i)?;
        parts.push((part, part.data().len() / outer.max(1)));
    }
    for i in 0..outer {
        for (part, n) in &parts {
            data.extend_from_slice(&part.data()[i * n..(i + 1) * n]);
        }
    }
    Ok(vec![Tensor::new(dtype, shape, data)?])
}

pub(super) fn split(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let axis = c.axis("axis", 0, x.shape().len())?;
    let own = View::of(x.shape());
    let mut start = 0;
    let mut parts = Vec::with_capacity(c.outputs.len());
    for i in 0..c.outputs.len() {
        let shape = c.out_shape(i)?;
        let view = View { shape: shape.clone(), strides: own.strides.clone(), start };
        start += shape[axis] * own.strides[axis] as usize;
        parts.push(view.tensor(x, shape)?);
    }
    Ok(parts)
}

pub(super) fn slice(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let ranges = ranges::ranges(&c.ctx, shape.len())?.ok_or("the ranges must hold integers")?;
    let mut view = View { shape: shape.clone(), ..View::of(x.shape()) };
    for (axis, range) in ranges.into_iter().enumerate() {
        if let Some(range) = range {
            let (start, step) = range.resolve(x.shape()[axis]);
            view.start += start as usize * view.strides[axis] as usize;
            view.strides[axis] = view.strides[axis].saturating_mul(step as isize);
        }
    }
    Ok(vec![view.tensor(x, shape)?])
}

/// Copies elements `indices` of axis `axis`, in this order. An index of `None` takes `fill` (the bytes of one
/// element).
pub(super) fn take(
    x: &Tensor,
    axis: usize,
    indices: impl ExactSizeIterator<Item = Option<usize>> + Clone,
    fill: &[u8],
) -> Result<Tensor, Fault> {
    let (outer, n, inner) = around(x.shape(), axis);
    let inner = inner * x.dtype().size();
    let mut data = Vec::with_capacity(outer * indices.len() * inner);
    for i in 0..outer {
        for index in indices.clone() {
            match index {
                Some(k) => data.extend_from_slice(&x.data()[(i * n + k) * inner..][..inner]),
                None => (0..inner / fill.len()).for_each(|_| data.extend_from_slice(fill)),
            }
        }
    }
    let mut shape = x.shape().to_vec();
    shape[axis] = indices.len();
    Ok(Tensor::new(x.dtype(), shape, data)?)
}

/// The element at position `i` of a padded axis of `n` elements; `None` means the fill value.
type Continuation = fn(i: i64, n: i64) -> Option<i64>;

/// How a mode of `Pad` extends an axis of `n` elements.
fn continuation(mode: &str, n: i64) -> Result<Continuation, String> {
    match mode {
        "constant" => Ok(|i, n| (0..n).contains(&i).then_some(i)),
        _ if n == 0 => Err(format!("an empty axis cannot be padded in mode {mode:?}")),
        "edge" => Ok(|i, n| Some(i.clamp(0, n - 1))),
        "wrap" => Ok(|i, n| Some(i.rem_euclid(n))),
        // Forwards and backwards, without repeating the ends.
        "reflect" => Ok(|i, n| {
            let i = i.rem_euclid((2 * n - 2).max(1));
            Some(if i < n { i } else { 2 * n - 2 - i })
        }),
        other => Err(format!("mode {other:?} is not defined")),
    }
}

pub(super) fn pad(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let pads = rule::pads(&c.ctx, x.shape().len())?.ok_or("pads must hold integers")?;
    let fill = match (c.opset(), c.opt(2)) {
        (..11, _) => {
            let value = Tensor::scalar(c.node().float("value").unwrap_or(0.0));
            convert(&value, x.dtype(), true)?.data().to_vec()
        }
        (_, Some(v)) if v.len() == 1 && v.dtype() == x.dtype() => v.data().to_vec(),
        (_, Some(_)) => return Err("the fill value must be a scalar of the data's type".into()),
        (_, None) => vec![0; x.dtype().size()],
    };
    let mut y = x.clone();
    for (axis, (before, _)) in pads.into_iter().enumerate().filter(|(_, p)| *p != (0, 0)) {
        let n = x.shape()[axis] as i64;
        let source = continuation(c.mode("mode", "constant"), n)?;
        let indices = (0..c.out_shape(0)?[axis]).map(|i| source(i as i64 - before, n).map(|i| i as usize));
        y = take(&y, axis, indices, &fill)?;
    }
    Ok(vec![y])
}

pub(super) fn center_crop_pad(c: &Call) -> Outputs {
    let (mut y, shape) = (c.input(0)?.clone(), c.out_shape(0)?);
    let zero = vec![0; y.dtype().size()];
    for (axis, &target) in shape.iter().enumerate() {
        let n = y.shape()[axis];
        // Both crop and pad put the smaller half first.
        let shift = (n as i64 - target as i64) / 2;
        let indices = (0..target).map(|i| usize::try_from(i as i64 + shift).ok().filter(|i| *i < n));
        y = take(&y, axis, indices, &zero)?;
    }
    Ok(vec![y])
}

pub(super) fn depth_to_space(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let block = c.node().int_or("blocksize", 1) as usize;
    let [n, _, h, w] = [0, 1, 2, 3].map(|i| x.shape()[i]);
    let depth = shape[1];
    let (split, perm) = match c.mode("mode", "DCR") {
        "DCR" => ([n, block, block, depth, h, w], [0, 3, 4, 1, 5, 2]),
        "CRD" => ([n, depth, block, block, h, w], [0, 1, 4, 2, 5, 3]),
        other => return Err(format!("mode {other:?} is not defined").into()),
    };
    Ok(vec![View::of(&split).permuted(&perm).tensor(x, shape)?])
}

pub(super) fn space_to_depth(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let block = c.node().int_or("blocksize", 1) as usize;
    let split = [shape[0], x.shape()[1], shape[2], block, shape[3], block];
    let perm = match c.mode("mode", "DCR") {
        "DCR" => [0, 3, 5, 1, 2, 4],
        "CRD" => [0, 1, 3, 5, 2, 4],
        other => return Err(format!("mode {other:?} is not defined").into()),
    };
    Ok(vec![View::of(&split).permuted(&perm).tensor(x, shape)?])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, f32s, i64s};

    #[test]
    fn reshape_copies_zeros_and_fills_minus_one() {
        let x = i64s(&[2, 3, 2], &(0..12).collect::<Vec<_>>());
        let y = Op::new("Reshape").run(&[&x, &i64s(&[2], &[0, -1])]);
        assert_eq!(y.shape(), [2, 6]);
        assert!(Op::new("Reshape").try_run(&[&x, &i64s(&[2], &[5, -1])]).is_err());
        assert!(Op::new("Reshape").try_run(&[&x, &i64s(&[1], &[11])]).is_err());
    }

    #[test]
    fn slices_go_backwards_and_clamp() {
        let x = i64s(&[2, 4], &[0, 1, 2, 3, 4, 5, 6, 7]);
        let l = |v: &[i64]| i64s(&[v.len()], v);
        let y = Op::new("Slice").run(&[&x, &l(&[-1]), &l(&[-100]), &l(&[1]), &l(&[-2])]);
        assert_eq!(y, i64s(&[2, 2], &[3, 1, 7, 5]));
        let y = Op::new("Slice").run(&[&x, &l(&[1, 1]), &l(&[100, 3])]);
        assert_eq!(y, i64s(&[1, 2], &[5, 6]));
        let old =
            Op::new("Slice").opset(9).ints("starts", &[2]).ints("ends", &[9]).ints("axes", &[1]).run(&[&x]);
        assert_eq!(old, i64s(&[2, 2], &[2, 3, 6, 7]));
    }

    #[test]
    fn transpose_tile_expand_concat_split() {
        let x = i64s(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        assert_eq!(Op::new("Transpose").run(&[&x]), i64s(&[3, 2], &[1, 4, 2, 5, 3, 6]));
        let row = i64s(&[1, 2], &[1, 2]);
        assert_eq!(
            Op::new("Tile").run(&[&row, &i64s(&[2], &[2, 2])]),
            i64s(&[2, 4], &[1, 2, 1, 2, 1, 2, 1, 2])
        );
        assert_eq!(Op::new("Expand").run(&[&row, &i64s(&[2], &[2, 1])]), i64s(&[2, 2], &[1, 2, 1, 2]));
        let both = Op::new("Concat").int("axis", -1).run(&[&x, &i64s(&[2, 1], &[8, 9])]);
        assert_eq!(both, i64s(&[2, 4], &[1, 2, 3, 8, 4, 5, 6, 9]));
        let parts = Op::new("Split").int("axis", 1).int("num_outputs", 2).outputs(2).try_run(&[&x]).unwrap();
        assert_eq!(parts, [i64s(&[2, 2], &[1, 2, 4, 5]), i64s(&[2, 1], &[3, 6])]);
    }

    #[test]
    fn every_padding_mode() {
        let x = i64s(&[3], &[1, 2, 3]);
        let pad = |mode: &str| Op::new("Pad").str("mode", mode).run(&[&x, &i64s(&[2], &[2, 3])]);
        assert_eq!(pad("constant"), i64s(&[8], &[0, 0, 1, 2, 3, 0, 0, 0]));
        assert_eq!(pad("edge"), i64s(&[8], &[1, 1, 1, 2, 3, 3, 3, 3]));
        assert_eq!(pad("reflect"), i64s(&[8], &[3, 2, 1, 2, 3, 2, 1, 2]));
        assert_eq!(pad("wrap"), i64s(&[8], &[2, 3, 1, 2, 3, 1, 2, 3]));
        let cropped = Op::new("Pad").run(&[&x, &i64s(&[2], &[-1, 1])]);
        assert_eq!(cropped, i64s(&[3], &[2, 3, 0]));
    }

    #[test]
    fn blocks_move_to_depth_and_back() {
        let x = f32s(&[1, 8, 1, 1], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let y = Op::new("DepthToSpace").int("blocksize", 2).run(&[&x]);
        assert_eq!(y, f32s(&[1, 2, 2, 2], &[0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]));
        assert_eq!(Op::new("SpaceToDepth").int("blocksize", 2).run(&[&y]), x);
        let y = Op::new("DepthToSpace").int("blocksize", 2).str("mode", "CRD").run(&[&x]);
        assert_eq!(y, f32s(&[1, 2, 2, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]));
    }
}
