//! Reductions and running sums.

use super::call::{Call, Fault, Outputs};
use super::number::{Num, load, saturate, store, with_any, with_number};
use super::strided::{View, around};
use crate::Tensor;
use crate::infer::dims;
use crate::infer::reduce::{Reduced, reduced_axes};
use rayon::prelude::*;
use sdrun_abi::DType;

/// The elements of a tensor with `axes` moved to the end, and the number of elements per reduction.
pub(super) fn gathered<T: Num>(x: &Tensor, axes: &[usize]) -> Result<(Vec<T>, usize), Fault> {
    let rank = x.shape().len();
    let mut perm: Vec<usize> = (0..rank).filter(|a| !axes.contains(a)).collect();
    perm.extend((0..rank).filter(|a| axes.contains(a)));
    let values = View::of(x.shape()).permuted(&perm).copy(&load::<T>(x)?);
    Ok((values, axes.iter().map(|a| x.shape()[*a]).product()))
}

pub(super) fn reduce(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let op = c.node().op_type.as_str();
    let axes = match reduced_axes(&c.ctx, x.shape().len())? {
        Reduced::Axes(axes) => axes,
        // Each element is reduced on its own.
        Reduced::Nothing if op == "ReduceSum" => return Ok(vec![x.clone()]),
        Reduced::Nothing => vec![],
        Reduced::Unknown => return Err("the axes must hold integers".into()),
    };
    if x.dtype() == DType::Bool && !matches!(op, "ReduceMax" | "ReduceMin") {
        return Err(super::call::bad_dtype(DType::Bool));
    }
    with_any!(x.dtype(), T => {
        let (values, n) = gathered::<T>(x, &axes)?;
        let f = reducer::<T>(op)?;
        let reduced: Vec<T> = match n {
            0 if matches!(op, "ReduceMax" | "ReduceMin") => {
                return Ok(vec![extreme_of_none(x.dtype(), shape, op == "ReduceMax")?]);
            }
            0 => vec![f(&[]); shape.iter().product()],
            n => values.par_chunks_exact(n).map(f).collect(),
        };
        Ok(vec![store(x.dtype(), shape, &reduced)?])
    })
}

/// The extreme of an empty set: the identity of min or max.
fn extreme_of_none(dtype: DType, shape: Vec<usize>, lowest: bool) -> Result<Tensor, Fault> {
    let values = vec![if lowest { f64::NEG_INFINITY } else { f64::INFINITY }; shape.iter().product()];
    if dtype.is_float() { store(dtype, shape, &values) } else { saturate(dtype, shape, values.into_iter()) }
}

/// The function that reduces a run of elements. Floats are summed in f64; integers wrap.
fn reducer<T: Num>(op: &str) -> Result<fn(&[T]) -> T, Fault> {
    fn sum<T: Num>(v: &[T], f: impl Fn(f64) -> f64) -> f64 {
        v.iter().fold(0.0, |sum, x| sum + f(x.to_f64()))
    }
    fn fold<T: Num>(v: &[T], f: impl Fn(T) -> T) -> T {
        v.iter().fold(T::default(), |a, x| a.add(f(*x)))
    }
    Ok(match op {
        "ReduceSum" if T::IS_FLOAT => |v| T::from_f64(sum(v, |x| x)),
        "ReduceSum" => |v| fold(v, |x| x),
        "ReduceL1" if T::IS_FLOAT => |v| T::from_f64(sum(v, f64::abs)),
        "ReduceL1" => |v| fold(v, T::abs),
        "ReduceSumSquare" if T::IS_FLOAT => |v| T::from_f64(sum(v, |x| x * x)),
        "ReduceSumSquare" => |v| fold(v, |x| x.mul(x)),
        "ReduceL2" => |v| T::from_f64(sum(v, |x| x * x).sqrt()),
        "ReduceMean" => |v| T::from_f64(sum(v, |x| x) / v.len() as f64),
        "ReduceLogSum" => |v| T::from_f64(sum(v, |x| x).ln()),
        "ReduceLogSumExp" => |v| {
            let max = v.iter().fold(f64::NEG_INFINITY, |m, x| m.max(x.to_f64()));
            let shift = if max.is_finite() { max } else { 0.0 };
            T::from_f64(sum(v, |x| (x - shift).exp()).ln() + shift)
        },
        "ReduceProd" => |v| v.iter().fold(T::ONE, |a, x| a.mul(*x)),
        "ReduceMax" => |v| v.iter().copied().reduce(T::larger).unwrap_or_default(),
        "ReduceMin" => |v| v.iter().copied().reduce(T::smaller).unwrap_or_default(),
        op => return Err(Fault::Unsupported(format!("{op} is not a reduction"))),
    })
}

pub(super) fn cumulative(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let axis = dims::axis(c.int(1)?, x.shape().len())?;
    let (outer, n, inner) = around(x.shape(), axis);
    let exclusive = c.node().int_or("exclusive", 0) != 0;
    let reverse = c.node().int_or("reverse", 0) != 0;
    with_number!(x.dtype(), T => {
        let (unit, f): (T, fn(T, T) -> T) =
            if c.node().op_type == "CumSum" { (T::default(), T::add) } else { (T::ONE, T::mul) };
        let mut values = load::<T>(x)?;
        for run in 0..outer * inner {
            let start = run / inner * n * inner + run % inner;
            let mut total = unit;
            for k in 0..n {
                let k = if reverse { n - 1 - k } else { k };
                let v = &mut values[start + k * inner];
                let before = total;
                total = f(total, *v);
                *v = if exclusive { before } else { total };
            }
        }
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &values)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s, i64s};

    #[test]
    fn reductions_by_hand() {
        let x = f32s(&[2, 2], &[1.0, 2.0, 3.0, -4.0]);
        let run = |op: &str| Op::new(op).run(&[&x, &i64s(&[1], &[0])]);
        let expected: &[(&str, [f32; 2])] = &[
            ("ReduceSum", [4.0, -2.0]),
            ("ReduceMean", [2.0, -1.0]),
            ("ReduceMax", [3.0, 2.0]),
            ("ReduceMin", [1.0, -4.0]),
            ("ReduceProd", [3.0, -8.0]),
            ("ReduceL1", [4.0, 6.0]),
            ("ReduceL2", [3.162_277_7, 4.472_136]),
            ("ReduceSumSquare", [10.0, 20.0]),
            ("ReduceLogSumExp", [3.126_928, 2.002_475_6]),
        ];
        for (op, y) in expected {
            assert_close(&run(op), &f32s(&[1, 2], y));
        }
        let old = Op::new("ReduceMean").opset(17).ints("axes", &[-1]).int("keepdims", 0).run(&[&x]);
        assert_eq!(old, f32s(&[2], &[1.5, -0.5]));
    }

    #[test]
    fn empty_reductions() {
        let empty = f32s(&[2, 0], &[]);
        let axes = i64s(&[1], &[1]);
        assert_eq!(Op::new("ReduceSum").run(&[&empty, &axes]), f32s(&[2, 1], &[0.0, 0.0]));
        assert_eq!(Op::new("ReduceMax").run(&[&empty, &axes]), f32s(&[2, 1], &[f32::NEG_INFINITY; 2]));
        let x = f32s(&[2], &[1.0, 2.0]);
        assert_eq!(Op::new("ReduceSum").int("noop_with_empty_axes", 1).run(&[&x]), x);
    }

    #[test]
    fn running_sums_in_every_direction() {
        let (x, axis) = (i64s(&[3], &[1, 2, 3]), i64s(&[], &[0]));
        let op = || Op::new("CumSum");
        assert_eq!(op().run(&[&x, &axis]), i64s(&[3], &[1, 3, 6]));
        assert_eq!(op().int("exclusive", 1).run(&[&x, &axis]), i64s(&[3], &[0, 1, 3]));
        assert_eq!(op().int("reverse", 1).run(&[&x, &axis]), i64s(&[3], &[6, 5, 3]));
    }
}
