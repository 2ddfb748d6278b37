//! NaN, infinities, signed zeros and extreme numbers through every element-wise operator: through the whole provider, and through the
//! kernels at every instruction set. The expected values follow ONNX Runtime 1.32 on x86-64, as formulas in f64.

use super::{Model, outputs, spec};
use crate::{
    kernels::{Activation, Function, Map},
    simd::{Level, vectorize_at},
};
use half::{bf16, f16};
use sdrun_abi::Precision;
use sdrun_graph::{
    Attribute, Tensor,
    fused::{DOMAIN, VERSION},
};

/// The special values, and ordinary ones between them.
const VALUES: [f32; 19] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    f32::MIN_POSITIVE,
    3.4e38,
    -3.4e38,
    0.5,
    -0.5,
    -1.5,
    2.5,
    4.0,
    100.0,
    -100.0,
    88.6,
    -88.6,
];

/// Repeats the special values up to `len` values, so that each occurs in whole registers and in remainders.
fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| VALUES[i % VALUES.len()]).collect()
}

fn erf(x: f64) -> f64 {
    // Abramowitz and Stegun 7.1.6, and its limit.
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / (2.0 * f64::from(n) + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

/// The larger of two. A NaN stays a NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

fn smaller(a: f64, b: f64) -> f64 {
    -larger(-a, -b)
}

fn softplus(x: f64) -> f64 {
    larger(x, 0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

type Exact = fn(f64) -> f64;

/// Operators of one tensor with the attributes of `attributes`.
fn unary() -> Vec<(&'static str, Exact)> {
    vec![
        ("Abs", f64::abs),
        ("Ceil", f64::ceil),
        ("Celu", |x| larger(x, 0.0) + smaller(0.75 * (x / 0.75).exp_m1(), 0.0)),
        ("Cos", f64::cos),
        ("Elu", |x| if x >= 0.0 { x } else { 0.75 * x.exp_m1() }),
        ("Erf", erf),
        ("Exp", f64::exp),
        ("Floor", f64::floor),
        ("Gelu", |x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()))),
        ("HardSigmoid", |x| larger(0.0, smaller(1.0, 0.75 * x + 0.5))),
        ("HardSwish", |x| x * larger(0.0, smaller(1.0, x / 6.0 + 0.5))),
        ("LeakyRelu", |x| if x >= 0.0 { x } else { 0.75 * x }),
        ("Log", f64::ln),
        ("Mish", |x| x * softplus(x).tanh()),
        ("Neg", |x| -x),
        ("Reciprocal", f64::recip),
        ("Relu", |x| larger(x, 0.0)),
        ("Round", f64::round_ties_even),
        ("Selu", |x| 1.5 * (larger(x, 0.0) + smaller(0.75 * x.exp_m1(), 0.0))),
        ("Shrink", |x| if x.abs() > 0.5 { x } else { 0.0 }),
        ("Sigmoid", sigmoid),
        ("Sign", |x| {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                x
            }
        }),
        ("Sin", f64::sin),
        ("Softplus", softplus),
        ("Softsign", |x| x / (1.0 + x.abs())),
        ("Sqrt", f64::sqrt),
        ("Swish", |x| x * sigmoid(0.75 * x)),
        ("Tanh", f64::tanh),
        ("ThresholdedRelu", |x| if x > 0.75 { x } else { 0.0 }),
    ]
}

fn attributes(op: &str) -> Vec<(&'static str, Attribute)> {
    let alpha = ("alpha", Attribute::Float(0.75));
    match op {
        "Celu" | "Elu" | "HardSigmoid" | "LeakyRelu" | "Swish" | "ThresholdedRelu" => vec![alpha],
        "Selu" => vec![alpha, ("gamma", Attribute::Float(1.5))],
        _ => vec![],
    }
}

type ExactTwo = fn(f64, f64) -> f64;

fn binary() -> Vec<(&'static str, ExactTwo)> {
    vec![
        ("Add", |a, b| a + b),
        ("Sub", |a, b| a - b),
        ("Mul", |a, b| a * b),
        ("Div", |a, b| a / b),
        ("Max", larger),
        ("Min", smaller),
        ("Pow", f64::powf),
        ("PRelu", |a, b| if a >= 0.0 { a } else { a * b }),
        ("Mod", |a, b| a % b),
    ]
}

/// Checks for a NaN, the same infinity, or a number within `tolerance` relative to the expected one (or to 1 if that is larger). Numbers
/// beyond the range of f32 are infinities; at its edge, both are right.
fn assert_same(what: &str, found: f32, expected: f64, tolerance: f64) {
    let edge = f64::from(f32::MAX) * 0.6;
    let same = if expected.is_nan() || found.is_nan() {
        expected.is_nan() && found.is_nan()
    } else if expected.abs() > edge {
        f64::from(found).abs() > edge * 0.99
            && (found > 0.0) == (expected > 0.0)
            && (expected.is_finite() || found.is_infinite())
    } else {
        (f64::from(found) - expected).abs() <= tolerance * expected.abs().max(1.0)
    };
    assert!(same, "{what}: {found:e}, not {expected:e}");
}

/// Runs one operator on these tensors.
fn run(op: &str, inputs: &[Tensor]) -> Vec<f32> {
    let mut model = Model::new(22);
    let ids: Vec<_> = inputs.iter().map(|x| model.input(x.clone())).collect();
    let mut attributes = attributes(op);
    if op == "Mod" {
        attributes.push(("fmod", Attribute::Int(1)));
    }
    let y = model.node(op, &attributes, &ids);
    if op == "Swish" {
        model.graph.nodes[0].domain = DOMAIN.into();
        model.graph.opsets.insert(DOMAIN.into(), VERSION);
    }
    model.output(y);
    outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap()
}

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_elements(vec![values.len()], values).unwrap()
}

#[test]
fn functions_of_one_number() {
    // ggml and the standard library differ in the sine and cosine of huge numbers.
    let large = |op: &str, x: f32| matches!(op, "Sin" | "Cos") && x.is_finite() && x.abs() > 1e6;
    for len in [1, 19, 38, 77] {
        let x = values(len);
        for (op, exact) in unary() {
            for (x, y) in x.iter().zip(run(op, &[tensor(&x)])).filter(|(x, _)| !large(op, **x)) {
                assert_same(&format!("{op}({x:e}) of {len}"), y, exact(f64::from(*x)), 1e-6);
            }
        }
    }
}

#[test]
fn functions_of_one_number_in_half_precision() {
    let x = values(38);
    for (op, exact) in unary().into_iter().filter(|(op, _)| !matches!(*op, "Sin" | "Cos")) {
        let halves: Vec<f16> = x.iter().map(|x| f16::from_f32(*x)).collect();
        let found = run(op, &[Tensor::from_elements(vec![38], &halves).unwrap()]);
        for (x, y) in halves.iter().zip(found) {
            let expected = f16::from_f64(exact(f64::from(*x))).to_f64();
            assert_same(&format!("{op}({x:e}) in f16"), y, expected, 1e-3);
        }
        let halves: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        let found = run(op, &[Tensor::from_elements(vec![38], &halves).unwrap()]);
        for (x, y) in halves.iter().zip(found) {
            let expected = bf16::from_f64(exact(f64::from(*x))).to_f64();
            assert_same(&format!("{op}({x:e}) in bf16"), y, expected, 8e-3);
        }
    }
}

#[test]
fn functions_of_two_numbers() {
    let n = VALUES.len();
    // Every pair element by element, and with one value repeated along rows or columns.
    let rows: Vec<f32> = (0..n * n).map(|i| VALUES[i / n]).collect();
    let cols: Vec<f32> = (0..n * n).map(|i| VALUES[i % n]).collect();
    let shaped = |values: &[f32], shape: &[usize]| Tensor::from_elements(shape.to_vec(), values).unwrap();
    let all = |values: &[f32]| shaped(values, &[n, n]);
    let ways = [
        ("whole", all(&rows), all(&cols)),
        ("a row", all(&rows), shaped(&VALUES, &[n])),
        ("columns", shaped(&VALUES, &[n, 1]), all(&cols)),
        ("both", shaped(&VALUES, &[n, 1]), shaped(&VALUES, &[1, n])),
    ];
    for (op, exact) in binary() {
        for (way, a, b) in &ways {
            // The slope of PRelu broadcasts one way.
            if op == "PRelu" && matches!(*way, "columns" | "both") {
                continue;
            }
            for (i, y) in run(op, &[a.clone(), b.clone()]).into_iter().enumerate() {
                let (a, b) = (rows[i], cols[i]);
                let expected = exact(f64::from(a), f64::from(b));
                // A number between the largest f32 and infinity, or below the smallest.
                let out = expected.abs() > f64::from(f32::MAX) && expected.is_finite();
                if op == "Pow" && out {
                    continue;
                }
                assert_same(&format!("{op}({a:e}, {b:e}), {way}"), y, expected, 1e-5);
            }
        }
    }
}

/// Arithmetic with a constant scalar, which is one pass over the other operand.
#[test]
fn functions_with_a_constant() {
    for (op, exact) in binary().into_iter().filter(|(op, _)| *op != "Mod") {
        for constant in [2.0f32, 0.5, -3.0, 1.0, 0.0, 1e-39, f32::INFINITY, f32::NAN] {
            for second in [true, false] {
                if op == "PRelu" && !second {
                    continue;
                }
                let x = values(57);
                let mut model = Model::new(22);
                let id = model.input(tensor(&x));
                let c = model.constant(Tensor::scalar(constant));
                let y = model.node(op, &[], &if second { [id, c] } else { [c, id] });
                model.output(y);
                let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
                for (x, y) in x.iter().zip(found) {
                    let (x, c) = (f64::from(*x), f64::from(constant));
                    let expected = if second { exact(x, c) } else { exact(c, x) };
                    if op == "Pow" && expected.is_finite() && expected.abs() > f64::from(f32::MAX) {
                        continue;
                    }
                    let tolerance = 1e-5;
                    assert_same(&format!("{op} of {x:e} and {c:e}, {second}"), y, expected, tolerance);
                }
            }
        }
    }
}

#[test]
fn clips_keep_nan() {
    let x = values(57);
    for (low, high) in [(-1.0f32, 2.0f32), (0.0, f32::INFINITY), (f32::NEG_INFINITY, 6.0)] {
        for fed in [false, true] {
            let mut model = Model::new(22);
            let id = model.input(tensor(&x));
            let mut bound = |v: f32| {
                let tensor = Tensor::scalar(v);
                if fed { model.input(tensor) } else { model.constant(tensor) }
            };
            let (low_id, high_id) = (bound(low), bound(high));
            let y = model.node("Clip", &[], &[id, low_id, high_id]);
            model.output(y);
            let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
            for (x, y) in x.iter().zip(found) {
                let expected = smaller(larger(f64::from(*x), f64::from(low)), f64::from(high));
                assert_same(&format!("Clip({x:e}, {low}, {high})"), y, expected, 0.0);
            }
        }
    }
}

#[test]
fn selections_and_tests_see_nan() {
    let x = values(57);
    let bools = |op: &str, two: bool| -> Vec<bool> {
        let mut model = Model::new(22);
        let mut ids = vec![model.input(tensor(&x))];
        if two {
            let y: Vec<f32> = x.iter().rev().copied().collect();
            ids.push(model.input(tensor(&y)));
        }
        let y = model.node(op, &[], &ids);
        model.output(y);
        outputs(&model, &spec(Precision::Fp32))[0].elements::<bool>().unwrap()
    };
    let one = |f: fn(f32) -> bool| -> Vec<bool> { x.iter().map(|x| f(*x)).collect() };
    assert_eq!(bools("IsNaN", false), one(f32::is_nan));
    assert_eq!(bools("IsInf", false), one(f32::is_infinite));
    let two = |f: fn(f32, f32) -> bool| -> Vec<bool> {
        x.iter().zip(x.iter().rev()).map(|(a, b)| f(*a, *b)).collect()
    };
    assert_eq!(bools("Less", true), two(|a, b| a < b));
    assert_eq!(bools("LessOrEqual", true), two(|a, b| a <= b));
    assert_eq!(bools("Greater", true), two(|a, b| a > b));
    assert_eq!(bools("GreaterOrEqual", true), two(|a, b| a >= b));
    assert_eq!(bools("Equal", true), two(|a, b| a == b));
    let mut model = Model::new(22);
    let flags: Vec<bool> = (0..x.len()).map(|i| i % 3 == 0).collect();
    let condition = model.input(Tensor::from_elements(vec![x.len()], &flags).unwrap());
    let (a, b) = (model.input(tensor(&x)), model.input(tensor(&[7.0])));
    let y = model.node("Where", &[], &[condition, a, b]);
    model.output(y);
    let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
    for (i, y) in found.iter().enumerate() {
        let expected = if flags[i] { x[i] } else { 7.0 };
        assert!(y.to_bits() == expected.to_bits(), "Where, element {i}: {y}");
    }
}

/// In Softmax, LogSoftmax, MaxPool and linear Resize, a NaN reaches every result that depends on it.
#[test]
fn windows_and_rows_keep_nan() {
    for special in [f32::NAN, f32::INFINITY] {
        let row = |len: usize, at: usize| -> Vec<f32> {
            (0..len).map(|i| if i == at { special } else { i as f32 / 10.0 }).collect()
        };
        for (len, at) in [(4, 1), (17, 16), (33, 5), (64, 40)] {
            let mut model = Model::new(22);
            let x = model.input(tensor(&row(len, at)));
            let y = model.node("Softmax", &[], &[x]);
            model.output(y);
            let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
            assert!(
                found
                    .iter()
                    .enumerate()
                    .all(|(i, y)| y.is_nan() || special.is_infinite() && i != at && *y == 0.0),
                "{found:?}"
            );
            assert!(found[at].is_nan());
        }
        let mut model = Model::new(22);
        let x = model.input(Tensor::from_elements(vec![1, 1, 1, 9], &row(9, 4)).unwrap());
        let y = model.node("MaxPool", &[("kernel_shape", Attribute::Ints(vec![1, 3]))], &[x]);
        model.output(y);
        let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
        for (i, y) in found.iter().enumerate() {
            assert_eq!(!y.is_finite(), (2..=4).contains(&i), "MaxPool: {found:?}");
        }
    }
}

/// Reductions with a NaN or an infinity somewhere, along contiguous elements and side by side.
#[test]
fn reductions_keep_nan() {
    let exact = |op: &str, x: &[f64]| -> f64 {
        let sum = |f: fn(f64) -> f64| x.iter().map(|x| f(*x)).sum::<f64>();
        match op {
            "ReduceSum" => sum(|x| x),
            "ReduceMean" => sum(|x| x) / x.len() as f64,
            "ReduceMax" => x.iter().copied().fold(f64::NEG_INFINITY, larger),
            "ReduceMin" => x.iter().copied().fold(f64::INFINITY, smaller),
            "ReduceProd" => x.iter().product(),
            "ReduceL1" => sum(f64::abs),
            "ReduceL2" => sum(|x| x * x).sqrt(),
            "ReduceSumSquare" => sum(|x| x * x),
            "ReduceLogSum" => sum(|x| x).ln(),
            _ => sum(f64::exp).ln(),
        }
    };
    let operators = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"];
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (len, at) in [(1, 0), (5, 0), (33, 32), (70, 17), (70, 69)] {
            let row: Vec<f32> =
                (0..len).map(|i| if i == at { special } else { 1.5 - i as f32 / 100.0 }).collect();
            let wide: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
            for name in operators {
                let op = format!("Reduce{name}");
                let expected = exact(&op, &wide);
                // As columns of 3 equal ones, and as rows.
                let columns: Vec<f32> = row.iter().flat_map(|x| [*x; 3]).collect();
                let rows: Vec<f32> = (0..3).flat_map(|_| row.clone()).collect();
                for (x, shape, axis) in [(columns, [len, 3], 0i64), (rows, [3, len], 1)] {
                    let mut model = Model::new(18);
                    let x = model.input(Tensor::from_elements(shape.to_vec(), &x).unwrap());
                    let axes = model.constant(Tensor::from_i64s(&[axis]));
                    let y = model.node(&op, &[], &[x, axes]);
                    model.output(y);
                    let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
                    for y in found {
                        assert_same(
                            &format!("{op} with {special} at {at} of {len}, axis {axis}"),
                            y,
                            expected,
                            1e-5,
                        );
                    }
                }
            }
        }
    }
}

/// Every function of the kernels at every instruction set, in runs of every length up to two registers and a remainder.
#[test]
fn functions_at_every_level() {
    use Function::*;
    let cases: Vec<(Function, Exact)> = vec![
        (Activation(self::Activation::Relu), |x| larger(x, 0.0)),
        (Activation(self::Activation::Clip(-1.0, 2.0)), |x| smaller(larger(x, -1.0), 2.0)),
        (Activation(self::Activation::Swish(0.75)), |x| x * sigmoid(0.75 * x)),
        (Activation(self::Activation::Gelu), |x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()))),
        (Activation(self::Activation::GeluTanh), |x| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }),
        (Ceil, f64::ceil),
        (Celu(2.0), |x| larger(x, 0.0) + smaller(2.0 * (x / 2.0).exp_m1(), 0.0)),
        (Elu(2.0), |x| if x >= 0.0 { x } else { 2.0 * x.exp_m1() }),
        (Erf, erf),
        (Floor, f64::floor),
        (HardSigmoid { alpha: 0.25, beta: 0.5 }, |x| larger(0.0, smaller(1.0, 0.25 * x + 0.5))),
        (LeakyRelu(0.25), |x| if x >= 0.0 { x } else { 0.25 * x }),
        (Mish, |x| x * softplus(x).tanh()),
        (Round, f64::round_ties_even),
        (Selu { alpha: 2.0, gamma: 1.5 }, |x| 1.5 * (larger(x, 0.0) + smaller(2.0 * x.exp_m1(), 0.0))),
        (Shrink { bias: 0.5, lambda: 1.0 }, |x| {
            if x < -1.0 {
                x + 0.5
            } else if x > 1.0 {
                x - 0.5
            } else {
                0.0
            }
        }),
        (Sign, |x| {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                x
            }
        }),
        (Softplus, softplus),
        (Softsign, |x| x / (1.0 + x.abs())),
        (SquareRootPower, |x| x.powf(0.5)),
        (ThresholdedRelu(1.0), |x| if x > 1.0 { x } else { 0.0 }),
    ];
    for level in Level::usable() {
        for (function, exact) in &cases {
            for len in 1..=45 {
                let x: Vec<f32> = values(len + 7)[7..].to_vec();
                let mut found = x.clone();
                vectorize_at(level, Map(*function, &mut found));
                for (x, y) in x.iter().zip(found) {
                    let what = format!("{function:?}({x:e}) at {level:?}, {len} elements");
                    assert_same(&what, y, exact(f64::from(*x)), 2e-6);
                }
            }
        }
    }
}

/// The activation in the epilogue of a convolution and of a matrix product.
#[test]
fn fused_activations_keep_nan() {
    for (activation, low) in [("Relu", 0.0f32), ("Clip", -1.0)] {
        for op in ["FusedConv", "FusedMatMul"] {
            let x: Vec<f32> = (0..70).map(|i| if i % 23 == 5 { f32::NAN } else { i as f32 - 30.0 }).collect();
            let mut model = Model::new(22);
            let mut attributes = vec![("activation", Attribute::String(activation.into()))];
            if activation == "Clip" {
                attributes.push(("activation_params", Attribute::Floats(vec![-1.0, 6.0])));
            }
            let (shape, filters) = match op {
                "FusedConv" => (vec![1, 1, 7, 10], vec![3, 1, 1, 1]),
                _ => (vec![70, 1], vec![1, 3]),
            };
            let x_id = model.input(Tensor::from_elements(shape, &x).unwrap());
            let w = model.weight(Tensor::from_elements(filters, &[1f32, 1.0, 1.0]).unwrap());
            let y = model.node(op, &attributes, &[x_id, w]);
            model.graph.nodes[0].domain = DOMAIN.into();
            model.graph.opsets.insert(DOMAIN.into(), VERSION);
            model.output(y);
            let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
            for (i, y) in found.iter().enumerate() {
                let x = if op == "FusedConv" { x[i % 70] } else { x[i / 3] };
                let high = if activation == "Clip" { 6.0 } else { f64::INFINITY };
                let expected = smaller(larger(f64::from(x), f64::from(low)), high);
                assert_same(&format!("{activation} after {op}, element {i}"), *y, expected, 1e-6);
            }
        }
    }
}
