//! Activation functions.

use super::call::{Call, Fault, Outputs};
use super::number::{Num, load, store, with_any, with_float, with_number};
use super::strided::zip2;
use super::unary::{Function, erf, map};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// The function that a node applies, with its attributes.
fn function(c: &Call) -> Result<Function, Fault> {
    let attribute = |name: &str, default: f32| f64::from(c.node().float(name).unwrap_or(default));
    Ok(match c.node().op_type.as_str() {
        "Celu" => {
            let a = attribute("alpha", 1.0);
            // `f64::max` and `f64::min` would drop a NaN.
            Box::new(move |x| x.larger(0.0) + (a * (x / a).exp_m1()).smaller(0.0))
        }
        "Elu" => {
            let a = attribute("alpha", 1.0);
            Box::new(move |x| if x < 0.0 { a * x.exp_m1() } else { x })
        }
        "Gelu" if c.mode("approximate", "none") == "tanh" => {
            Box::new(|x| 0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()))
        }
        "Gelu" => Box::new(|x| 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2))),
        "HardSigmoid" => {
            let (a, b) = (attribute("alpha", 0.2), attribute("beta", 0.5));
            Box::new(move |x| (a * x + b).clamp(0.0, 1.0))
        }
        "HardSwish" => Box::new(|x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0)),
        "LeakyRelu" => {
            let a = attribute("alpha", 0.01);
            Box::new(move |x| if x < 0.0 { a * x } else { x })
        }
        "Mish" => Box::new(|x| x * softplus(x).tanh()),
        "Selu" => {
            let (a, g) = (attribute("alpha", 1.673_263_2), attribute("gamma", 1.050_701));
            Box::new(move |x| g * if x > 0.0 { x } else { a * x.exp_m1() })
        }
        "Shrink" => {
            let (bias, lambda) = (attribute("bias", 0.0), attribute("lambd", 0.5));
            Box::new(move |x| {
                if x < -lambda {
                    x + bias
                } else if x > lambda {
                    x - bias
                } else {
                    0.0
                }
            })
        }
        "Sigmoid" => Box::new(sigmoid),
        "Softplus" => Box::new(softplus),
        "Softsign" => Box::new(|x| x / (1.0 + x.abs())),
        "Swish" => {
            let a = attribute("alpha", 1.0);
            Box::new(move |x| x * sigmoid(a * x))
        }
        "ThresholdedRelu" => {
            let a = attribute("alpha", 1.0);
            Box::new(move |x| if x > a { x } else { 0.0 })
        }
        op => return Err(Fault::Unsupported(format!("{op} is not an activation"))),
    })
}

pub(super) fn activate(c: &Call) -> Outputs {
    let x = c.input(0)?;
    if c.node().op_type == "Relu" {
        return with_number!(x.dtype(), T => {
            let y: Vec<T> = load::<T>(x)?.into_iter().map(|v| v.larger(T::default())).collect();
            Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
        });
    }
    let f = function(c)?;
    if c.node().op_type == "Shrink" && !x.dtype().is_float() {
        return with_any!(x.dtype(), T => {
            let y: Vec<T> = load::<T>(x)?.into_iter().map(|v| T::from_f64(f(v.to_f64()))).collect();
            Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
        });
    }
    Ok(vec![map(x, f)?])
}

pub(super) fn prelu(c: &Call) -> Outputs {
    let (x, slope) = (c.input(0)?, c.input(1)?);
    with_number!(x.dtype(), T => {
        let (a, b) = (load::<T>(x)?, load::<T>(slope)?);
        let f = |v: T, s: T| if v < T::default() { s.mul(v) } else { v };
        let y = zip2(x.shape(), (&a, x.shape()), (&b, slope.shape()), f);
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
    })
}

pub(super) fn swiglu(c: &Call) -> Outputs {
    let (gate, value) = (c.input(0)?, c.input(1)?);
    let alpha = f64::from(c.node().float("alpha").unwrap_or(1.0));
    with_float!(gate.dtype(), T => {
        let f = |(a, b): (&T, &T)| {
            let a = a.to_f64();
            T::from_f64(a * sigmoid(alpha * a) * b.to_f64())
        };
        let y: Vec<T> = load::<T>(gate)?.iter().zip(&load::<T>(value)?).map(f).collect();
        Ok(vec![store(gate.dtype(), gate.shape().to_vec(), &y)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s};

    /// y(-1), y(0), y(2), computed by hand from each definition.
    #[test]
    fn activations_follow_their_definitions() {
        let x = f32s(&[3], &[-1.0, 0.0, 2.0]);
        let expected: &[(&str, [f32; 3])] = &[
            ("Relu", [0.0, 0.0, 2.0]),
            ("LeakyRelu", [-0.01, 0.0, 2.0]),
            ("Elu", [-0.632_120_6, 0.0, 2.0]),
            ("Celu", [-0.632_120_6, 0.0, 2.0]),
            ("Selu", [-1.111_330_7, 0.0, 2.101_402]),
            ("Sigmoid", [0.268_941_43, 0.5, 0.880_797_1]),
            ("HardSigmoid", [0.3, 0.5, 0.9]),
            ("HardSwish", [-1.0 / 3.0, 0.0, 5.0 / 3.0]),
            ("Softplus", [0.313_261_7, std::f32::consts::LN_2, 2.126_928]),
            ("Softsign", [-0.5, 0.0, 2.0 / 3.0]),
            ("Swish", [-0.268_941_43, 0.0, 1.761_594_2]),
            ("Mish", [-0.303_401_46, 0.0, 1.943_959]),
            ("Gelu", [-0.158_655_26, 0.0, 1.954_499_7]),
            ("ThresholdedRelu", [0.0, 0.0, 2.0]),
            ("Shrink", [-1.0, 0.0, 2.0]),
        ];
        for (op, y) in expected {
            let opset = if *op == "Swish" { 24 } else { 22 };
            assert_close(&Op::new(op).opset(opset).run(&[&x]), &f32s(&[3], y));
        }
    }

    /// ONNX Runtime's results for NaN and infinities.
    #[test]
    fn nan_and_infinities_propagate() {
        let nan = f32::NAN;
        let x = f32s(&[3], &[nan, f32::INFINITY, f32::NEG_INFINITY]);
        let expected: &[(&str, [f32; 3])] = &[
            ("Relu", [nan, f32::INFINITY, 0.0]),
            ("LeakyRelu", [nan, f32::INFINITY, f32::NEG_INFINITY]),
            ("Elu", [nan, f32::INFINITY, -1.0]),
            ("Celu", [nan, f32::INFINITY, -1.0]),
            ("Selu", [nan, f32::INFINITY, -1.758_099_3]),
            ("Sigmoid", [nan, 1.0, 0.0]),
            ("HardSigmoid", [nan, 1.0, 0.0]),
            ("HardSwish", [nan, f32::INFINITY, nan]),
            ("Softplus", [nan, f32::INFINITY, 0.0]),
            ("Softsign", [nan, nan, nan]),
            ("Mish", [nan, f32::INFINITY, nan]),
            ("Gelu", [nan, f32::INFINITY, nan]),
            ("ThresholdedRelu", [0.0, f32::INFINITY, 0.0]),
            ("Shrink", [0.0, f32::INFINITY, f32::NEG_INFINITY]),
        ];
        for (op, expected) in expected {
            let found = Op::new(op).run(&[&x]).to_f32s().unwrap();
            let same = |(f, e): (&f32, &f32)| f == e || f.is_nan() && e.is_nan() || (f - e).abs() < 1e-6;
            assert!(found.iter().zip(expected).all(same), "{op}: {found:?} instead of {expected:?}");
        }
    }

    #[test]
    fn prelu_broadcasts_its_slope() {
        let (x, slope) = (f32s(&[2, 2], &[-1.0, -2.0, 3.0, -4.0]), f32s(&[2], &[0.5, 0.1]));
        assert_close(&Op::new("PRelu").run(&[&x, &slope]), &f32s(&[2, 2], &[-0.5, -0.2, 3.0, -0.4]));
    }
}
