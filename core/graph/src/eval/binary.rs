//! Elementwise operators of several tensors, with NumPy-style broadcasting.

use super::call::{Call, Fault, Outputs, bad_dtype};
use super::number::{Num, load, load_as_f64, store, with_any, with_number, with_size};
use super::strided::{broadcast, rows, zip2};
use crate::Tensor;

/// Applies `f` to inputs 0 and 1; an undefined result is the error `undefined`.
fn apply<T: Num>(c: &Call, undefined: &str, f: impl Fn(T, T) -> Option<T>) -> Outputs {
    let (a, b, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let mut defined = true;
    let values = zip2(&shape, (&load::<T>(a)?, a.shape()), (&load::<T>(b)?, b.shape()), |x, y| {
        let value = f(x, y);
        defined &= value.is_some();
        value.unwrap_or_default()
    });
    if !defined {
        return Err(undefined.into());
    }
    Ok(vec![store(a.dtype(), shape, &values)?])
}

pub(super) fn arithmetic(c: &Call) -> Outputs {
    let undefined = "integer division by zero";
    with_number!(c.input(0)?.dtype(), T => match c.node().op_type.as_str() {
        "Add" => apply::<T>(c, undefined, |x, y| Some(x.add(y))),
        "Sub" => apply::<T>(c, undefined, |x, y| Some(x.sub(y))),
        "Mul" => apply::<T>(c, undefined, |x, y| Some(x.mul(y))),
        "Div" => apply::<T>(c, undefined, |x, y| x.div(y)),
        _ if c.node().int_or("fmod", 0) != 0 => apply::<T>(c, undefined, |x, y| x.rem(y)),
        _ if T::IS_FLOAT && c.opset() < 28 => Err("fmod must be 1 for floating-point operands".into()),
        _ => apply::<T>(c, undefined, floor_mod),
    })
}

/// Remainder with the sign of the divisor.
fn floor_mod<T: Num>(x: T, y: T) -> Option<T> {
    let zero = T::default();
    let r = x.rem(y)?;
    Some(if r == zero {
        if T::IS_FLOAT { T::from_f64(0f64.copysign(y.to_f64())) } else { zero }
    } else if (r < zero) != (y < zero) && !y.is_nan() {
        r.add(y)
    } else {
        r
    })
}

/// The result has the type of the base; the exponent may have another type.
pub(super) fn power(c: &Call) -> Outputs {
    let (base, exponent, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let dtype = base.dtype();
    if let (false, Some(exponents)) = (dtype.is_float(), exponent.to_i64s())
        && exponents.iter().all(|e| *e >= 0)
    {
        return with_number!(dtype, T => {
            let y = zip2(&shape, (&load::<T>(base)?, base.shape()), (&exponents, exponent.shape()), integer_power);
            Ok(vec![store(dtype, shape, &y)?])
        });
    }
    let exponents = load_as_f64(exponent)?;
    with_number!(dtype, T => {
        let f = |x: T, y: f64| T::from_f64(x.to_f64().powf(y));
        let y = zip2(&shape, (&load::<T>(base)?, base.shape()), (&exponents, exponent.shape()), f);
        Ok(vec![store(dtype, shape, &y)?])
    })
}

fn integer_power<T: Num>(mut base: T, mut exponent: i64) -> T {
    let mut result = T::ONE;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = result.mul(base);
        }
        base = base.mul(base);
        exponent >>= 1;
    }
    result
}

pub(super) fn bitwise(c: &Call) -> Outputs {
    let dtype = c.input(0)?.dtype();
    if c.node().op_type == "BitShift" {
        let left = match c.mode("direction", "") {
            "LEFT" => true,
            "RIGHT" => false,
            other => return Err(format!("direction {other:?} is not defined").into()),
        };
        let width = 8 * dtype.size() as i128;
        return apply::<i128>(c, "", |x, y| Some(shift(x, y, width, left)));
    }
    let f: fn(i128, i128) -> i128 = match c.node().op_type.as_str() {
        "BitwiseAnd" => |x, y| x & y,
        "BitwiseOr" => |x, y| x | y,
        _ => |x, y| x ^ y,
    };
    apply::<i128>(c, "", |x, y| Some(f(x, y)))
}

/// Shifts by at least the width, and shifts by negative counts, leave only the sign.
fn shift(x: i128, bits: i128, width: i128, left: bool) -> i128 {
    match (left, (0..width).contains(&bits)) {
        (true, true) => x << bits,
        (true, false) => 0,
        (false, true) => x >> bits,
        (false, false) => x >> 127,
    }
}

pub(super) fn compare(c: &Call) -> Outputs {
    let (a, b, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    with_any!(a.dtype(), T => {
        let f: fn(T, T) -> bool = match c.node().op_type.as_str() {
            "Equal" => |x, y| x == y,
            "Greater" => |x, y| x > y,
            "GreaterOrEqual" => |x, y| x >= y,
            "Less" => |x, y| x < y,
            _ => |x, y| x <= y,
        };
        let y = zip2(&shape, (&load::<T>(a)?, a.shape()), (&load::<T>(b)?, b.shape()), f);
        Ok(vec![Tensor::from_elements(shape, &y)?])
    })
}

fn bools(t: &Tensor) -> Result<Vec<bool>, Fault> {
    t.elements::<bool>().ok_or_else(|| bad_dtype(t.dtype()))
}

pub(super) fn logical(c: &Call) -> Outputs {
    let (a, b, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let f: fn(bool, bool) -> bool = match c.node().op_type.as_str() {
        "And" => |x, y| x && y,
        "Or" => |x, y| x || y,
        _ => |x, y| x != y,
    };
    let y = zip2(&shape, (&bools(a)?, a.shape()), (&bools(b)?, b.shape()), f);
    Ok(vec![Tensor::from_elements(shape, &y)?])
}

pub(super) fn variadic(c: &Call) -> Outputs {
    let (first, shape) = (c.input(0)?, c.out_shape(0)?);
    let op = c.node().op_type.as_str();
    with_number!(first.dtype(), T => {
        let f: fn(T, T) -> T = match op {
            "Max" => T::larger,
            "Min" => T::smaller,
            _ => T::add,
        };
        let (mut sum, mut sum_shape) = (load::<T>(first)?, first.shape().to_vec());
        for i in 1..c.inputs.len() {
            let next = c.input(i)?;
            sum = zip2(&shape, (&sum, &sum_shape), (&load::<T>(next)?, next.shape()), f);
            sum_shape.clone_from(&shape);
        }
        if op == "Mean" {
            let n = c.inputs.len() as f64;
            sum.iter_mut().for_each(|v| *v = T::from_f64(v.to_f64() / n));
        }
        Ok(vec![store(first.dtype(), shape, &sum)?])
    })
}

pub(super) fn where_(c: &Call) -> Outputs {
    let (condition, yes, no, shape) = (c.input(0)?, c.input(1)?, c.input(2)?, c.out_shape(0)?);
    let flags = bools(condition)?;
    let strides = [condition, yes, no].map(|t| broadcast(t.shape(), &shape));
    let data = with_size!(yes.dtype(), N => {
        let (yes, no) = (yes.data().as_chunks::<N>().0, no.data().as_chunks::<N>().0);
        let mut out = Vec::with_capacity(shape.iter().product());
        rows(&shape, [&strides[0], &strides[1], &strides[2]], [0; 3], &mut |at, n, step| {
            let [i, j, k] = [0, 1, 2].map(|o| (at[o], step[o] as usize));
            let pick = |e| if flags[i.0 + e * i.1] { yes[j.0 + e * j.1] } else { no[k.0 + e * k.1] };
            out.extend((0..n).map(pick));
        });
        out.into_flattened()
    });
    Ok(vec![Tensor::new(yes.dtype(), shape, data)?])
}

pub(super) fn clip(c: &Call) -> Outputs {
    let x = c.input(0)?;
    with_number!(x.dtype(), T => {
        let bound = |i: usize, attribute: &str| -> Result<Option<T>, Fault> {
            if c.opset() < 11 {
                return Ok(c.node().float(attribute).map(|v| T::from_f64(f64::from(v))));
            }
            match c.opt(i).map(load::<T>).transpose()?.as_deref() {
                None => Ok(None),
                Some([v]) => Ok(Some(*v)),
                Some(_) => Err(format!("input {i} must be a scalar").into()),
            }
        };
        let (low, high) = (bound(1, "min")?, bound(2, "max")?);
        let mut y = load::<T>(x)?;
        for v in &mut y {
            *v = low.map_or(*v, |low| low.larger(*v));
            *v = high.map_or(*v, |high| high.smaller(*v));
        }
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, f32s, i64s};
    use super::*;
    use half::f16;

    #[test]
    fn division_truncates_and_refuses_zero() {
        let (a, b) = (i64s(&[3], &[7, -7, 7]), i64s(&[3], &[2, 2, -2]));
        assert_eq!(Op::new("Div").run(&[&a, &b]), i64s(&[3], &[3, -3, -3]));
        let error = Op::new("Div").try_run(&[&a, &i64s(&[], &[0])]).unwrap_err().to_string();
        assert!(error.contains("node \"test\" (Div)") && error.contains("division by zero"), "{error}");
    }

    #[test]
    fn mod_has_the_sign_that_its_attribute_selects() {
        let (a, b) = (i64s(&[4], &[-4, 7, 5, -4]), i64s(&[4], &[2, -3, 8, 3]));
        assert_eq!(Op::new("Mod").run(&[&a, &b]), i64s(&[4], &[0, -2, 5, 2]));
        assert_eq!(Op::new("Mod").int("fmod", 1).run(&[&a, &b]), i64s(&[4], &[0, 1, 5, -1]));
    }

    #[test]
    fn half_precision_rounds_once() {
        // Rounded step by step, 2048 + 1 + 1 is 2048; rounded once, it is 2050.
        let t = |v: f32| Tensor::scalar(f16::from_f32(v));
        let sum = Op::new("Sum").run(&[&t(2048.0), &t(1.0), &t(1.0)]);
        assert_eq!(sum, t(2050.0));
    }

    #[test]
    fn broadcasting_power_and_comparison() {
        let (a, b) = (f32s(&[2, 1], &[2.0, 3.0]), i64s(&[2], &[0, 3]));
        assert_eq!(Op::new("Pow").run(&[&a, &b]), f32s(&[2, 2], &[1.0, 8.0, 1.0, 27.0]));
        let y = Op::new("Less").run(&[&i64s(&[2, 1], &[1, 5]), &i64s(&[2], &[3, 5])]);
        assert_eq!(y, Tensor::from_elements(vec![2, 2], &[true, true, false, false]).unwrap());
    }

    #[test]
    fn shifts_beyond_the_width_leave_the_sign() {
        let op = |direction| Op::new("BitShift").opset(28).str("direction", direction);
        let (x, n) = (
            Tensor::from_elements(vec![3], &[-8i8, -8, 1]).unwrap(),
            Tensor::from_elements(vec![3], &[1i8, 8, 7]).unwrap(),
        );
        assert_eq!(op("RIGHT").run(&[&x, &n]).elements::<i8>().unwrap(), [-4, -1, 0]);
        assert_eq!(op("LEFT").run(&[&x, &n]).elements::<i8>().unwrap(), [-16, 0, -128]);
    }

    #[test]
    fn where_and_clip() {
        let flags = Tensor::from_elements(vec![2, 1], &[true, false]).unwrap();
        let y = Op::new("Where").run(&[&flags, &i64s(&[2], &[1, 2]), &i64s(&[], &[9])]);
        assert_eq!(y, i64s(&[2, 2], &[1, 2, 9, 9]));
        let x = f32s(&[3], &[-2.0, f32::NAN, 2.0]);
        let y = Op::new("Clip").run(&[&x, &f32s(&[], &[-1.0]), &f32s(&[], &[1.0])]).to_f32s().unwrap();
        assert!(y[0] == -1.0 && y[1].is_nan() && y[2] == 1.0);
        let old = Op::new("Clip").opset(10).float("max", 0.5).run(&[&f32s(&[1], &[3.0])]);
        assert_eq!(old, f32s(&[1], &[0.5]));
    }
}
