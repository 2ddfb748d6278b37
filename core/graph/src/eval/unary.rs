//! Elementwise functions of one tensor.

use super::call::{Call, Fault, Outputs, bad_dtype};
use super::number::{Num, load, store, with_any, with_float};
use crate::Tensor;
use rayon::prelude::*;
use std::f64::consts::PI;

/// A function of one number.
pub(super) type Function = Box<dyn Fn(f64) -> f64 + Send + Sync>;

/// Number of elements per parallel task.
const CHUNK: usize = 1 << 14;

/// Applies `f` to every element of a floating-point tensor.
pub(super) fn map(tensor: &Tensor, f: impl Fn(f64) -> f64 + Send + Sync) -> Result<Tensor, Fault> {
    with_float!(tensor.dtype(), T => {
        let mut values = load::<T>(tensor)?;
        values.par_chunks_mut(CHUNK).for_each(|c| c.iter_mut().for_each(|v| *v = T::from_f64(f(v.to_f64()))));
        store(tensor.dtype(), tensor.shape().to_vec(), &values)
    })
}

pub(super) fn math(c: &Call) -> Outputs {
    let x = c.input(0)?;
    if !x.dtype().is_float() {
        return Ok(vec![integer(c, x)?]);
    }
    let f: fn(f64) -> f64 = match c.node().op_type.as_str() {
        "Abs" => f64::abs,
        "Acos" => f64::acos,
        "Acosh" => f64::acosh,
        "Asin" => f64::asin,
        "Asinh" => f64::asinh,
        "Atan" => f64::atan,
        "Atanh" => f64::atanh,
        "Ceil" => f64::ceil,
        "Cos" => f64::cos,
        "Cosh" => f64::cosh,
        "Erf" => erf,
        "Exp" => f64::exp,
        "Floor" => f64::floor,
        "Log" => f64::ln,
        "Neg" => |v| -v,
        "Reciprocal" => f64::recip,
        "Round" => f64::round_ties_even,
        "Sign" => |v| if v == 0.0 || v.is_nan() { v } else { v.signum() },
        "Sin" => f64::sin,
        "Sinh" => f64::sinh,
        "Sqrt" => f64::sqrt,
        "Tan" => f64::tan,
        "Tanh" => f64::tanh,
        op => return Err(Fault::Unsupported(format!("{op} is not a function of one number"))),
    };
    Ok(vec![map(x, f)?])
}

/// The functions that are also defined for integers.
fn integer(c: &Call, x: &Tensor) -> Result<Tensor, Fault> {
    fn apply<T: Num>(op: &str, values: &mut [T]) -> bool {
        let zero = T::default();
        let f: fn(T) -> T = match op {
            "Abs" => T::abs,
            "Neg" => |v| T::default().sub(v),
            "Sign" => |v| if v > T::default() { T::ONE } else { T::default().sub(T::ONE) },
            _ => return false,
        };
        values.iter_mut().filter(|v| **v != zero).for_each(|v| *v = f(*v));
        true
    }
    with_any!(x.dtype(), T => {
        let mut values = load::<T>(x)?;
        if !apply(&c.node().op_type, &mut values) {
            return Err(bad_dtype(x.dtype()));
        }
        store(x.dtype(), x.shape().to_vec(), &values)
    })
}

/// Error function, accurate to about 1e-15. Uses Kummer's series near zero (Abramowitz & Stegun 7.1.6), and the
/// continued fraction of the complement (7.1.14) further out.
pub(super) fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term > sum * 1e-17 {
            n += 1.0;
            term *= 2.0 * a * a / (2.0 * n + 1.0);
            sum += term;
        }
        return (2.0 / PI.sqrt() * (-a * a).exp() * sum).copysign(x);
    }
    if a.is_nan() {
        return x;
    }
    let fraction = (1..60).rev().fold(a, |tail, k| a + f64::from(k) / 2.0 / tail);
    (1.0 - (-a * a).exp() / PI.sqrt() / fraction).copysign(x)
}

pub(super) fn not(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let data: Vec<u8> = match c.node().op_type.as_str() {
        "Not" => x.data().iter().map(|b| u8::from(*b == 0)).collect(),
        _ if x.dtype().is_float() => return Err(bad_dtype(x.dtype())),
        _ => x.data().iter().map(|b| !b).collect(),
    };
    Ok(vec![Tensor::new(x.dtype(), x.shape().to_vec(), data)?])
}

/// Tests each element with `test`.
fn test(x: &Tensor, test: impl Fn(f64) -> bool) -> Outputs {
    with_float!(x.dtype(), T => {
        let flags: Vec<bool> = load::<T>(x)?.into_iter().map(|v| test(v.to_f64())).collect();
        Ok(vec![Tensor::from_elements(x.shape().to_vec(), &flags)?])
    })
}

pub(super) fn is_nan(c: &Call) -> Outputs {
    test(c.input(0)?, f64::is_nan)
}

pub(super) fn is_inf(c: &Call) -> Outputs {
    let positive = c.node().int_or("detect_positive", 1) != 0;
    let negative = c.node().int_or("detect_negative", 1) != 0;
    test(c.input(0)?, |v| v.is_infinite() && if v > 0.0 { positive } else { negative })
}

/// Identity, and Dropout outside training.
pub(super) fn pass(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let training = c.opset() >= 12 && c.opt(2).and_then(Tensor::to_i64s).is_some_and(|v| v.contains(&1));
    let ratio_zero = c.opt(1).and_then(Tensor::to_f32s).is_some_and(|v| v == [0.0]);
    if c.node().op_type == "Dropout" && training && !ratio_zero {
        return Err(Fault::Unsupported("training needs random numbers".into()));
    }
    if !c.wants(1) {
        return Ok(vec![x.clone()]);
    }
    let ones = vec![1u8; x.len()];
    let mask = with_any!(c.out_dtype(1)?, T => {
        let ones: Vec<T> = ones.iter().map(|_| T::ONE).collect();
        store(c.out_dtype(1)?, x.shape().to_vec(), &ones)
    })?;
    Ok(vec![x.clone(), mask])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, f32s};
    use super::*;

    #[test]
    fn erf_agrees_with_tables() {
        // Abramowitz & Stegun, table 7.1, and symmetry.
        for (x, y) in
            [(0.0, 0.0), (0.5, 0.5204998778), (1.0, 0.8427007929), (2.0, 0.9953222650), (3.0, 0.9999779095)]
        {
            assert!((erf(x) - y).abs() < 1e-10, "{x}: {}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
        // The two branches agree where they meet.
        assert!((erf(2.5 - 1e-12) - erf(2.5)).abs() < 1e-12);
        assert_eq!(erf(30.0), 1.0);
        assert!(erf(f64::NAN).is_nan());
    }

    #[test]
    fn round_is_half_to_even_and_sign_keeps_nan() {
        let x = f32s(&[4], &[0.5, 1.5, -2.5, 2.6]);
        assert_eq!(Op::new("Round").run(&[&x]), f32s(&[4], &[0.0, 2.0, -2.0, 3.0]));
        let y = Op::new("Sign").run(&[&f32s(&[3], &[f32::NAN, -0.2, 0.0])]).to_f32s().unwrap();
        assert!(y[0].is_nan() && y[1..] == [-1.0, 0.0]);
    }

    #[test]
    fn integers_wrap_and_functions_refuse_them() {
        let x = Tensor::from_elements(vec![2], &[i8::MIN, -3]).unwrap();
        assert_eq!(Op::new("Abs").run(&[&x]).elements::<i8>().unwrap(), [i8::MIN, 3]);
        assert!(Op::new("Sin").try_run(&[&x]).is_err());
    }

    #[test]
    fn infinities_are_distinguished_by_sign() {
        let x = f32s(&[3], &[f32::INFINITY, f32::NEG_INFINITY, 1.0]);
        let y = Op::new("IsInf").int("detect_negative", 0).run(&[&x]);
        assert_eq!(y.elements::<bool>().unwrap(), [true, false, false]);
    }
}
