use super::{Model, check, compare, from, noise, outputs, spec};
use crate::ops;
use half::{bf16, f16};
use sdrun_abi::Precision;
use sdrun_graph::{
    Attribute, Tensor,
    fused::{DOMAIN, VERSION},
};
use std::collections::{BTreeMap, BTreeSet};

/// An input of a one-node graph.
pub(super) enum In {
    /// Given at run time.
    Fed(Tensor),
    /// A weight.
    Weight(Tensor),
    /// Known when the engine is built.
    Constant(Tensor),
    Absent,
}
use In::{Absent, Constant, Fed, Weight};

pub(super) struct Case {
    pub(super) op: &'static str,
    pub(super) model: Model,
    tolerance: f64,
}

pub(super) fn case(op: &'static str, opset: i64, attributes: &[(&str, Attribute)], inputs: Vec<In>) -> Case {
    several(op, opset, attributes, inputs, 1)
}

pub(super) fn several(
    op: &'static str,
    opset: i64,
    attributes: &[(&str, Attribute)],
    inputs: Vec<In>,
    outputs: usize,
) -> Case {
    let mut model = Model::new(opset);
    let ids: Vec<_> = inputs
        .into_iter()
        .map(|input| match input {
            Fed(tensor) => Some(model.input(tensor)),
            Weight(tensor) => Some(model.weight(tensor)),
            Constant(tensor) => Some(model.constant(tensor)),
            Absent => None,
        })
        .collect();
    for id in model.node_n(op, attributes, &ids, outputs) {
        model.output(id);
    }
    Case { op, model, tolerance: 2e-6 }
}

fn int(v: i64) -> Attribute {
    Attribute::Int(v)
}
fn ints(v: &[i64]) -> Attribute {
    Attribute::Ints(v.to_vec())
}
fn float(v: f32) -> Attribute {
    Attribute::Float(v)
}
fn text(v: &str) -> Attribute {
    Attribute::String(v.as_bytes().to_vec())
}
fn i64s(v: &[i64]) -> In {
    Constant(Tensor::from_i64s(v))
}
fn positive(shape: &[usize], seed: u64) -> Tensor {
    from(shape, |i| noise(shape, seed).elements::<f32>().unwrap()[i].abs() + 0.1)
}

fn elementwise() -> Vec<Case> {
    let x = || Fed(noise(&[2, 3, 17], 1));
    let mut cases: Vec<Case> = Vec::new();
    for op in [
        "Abs",
        "Cos",
        "Exp",
        "HardSwish",
        "Neg",
        "Relu",
        "Sigmoid",
        "Sin",
        "Tanh",
        "Elu",
        "Reciprocal",
        "Ceil",
        "Celu",
        "Erf",
        "Floor",
        "Mish",
        "Round",
        "Selu",
        "Shrink",
        "Sign",
        "Softplus",
        "Softsign",
        "ThresholdedRelu",
    ] {
        cases.push(case(op, 18, &[], vec![x()]));
    }
    for op in ["Celu", "Elu", "ThresholdedRelu"] {
        cases.push(case(op, 18, &[("alpha", float(0.3))], vec![x()]));
    }
    cases.push(case("Selu", 18, &[("alpha", float(0.3)), ("gamma", float(2.0))], vec![x()]));
    cases.push(case("Shrink", 18, &[("bias", float(0.1)), ("lambd", float(0.2))], vec![x()]));
    cases.push(case("PRelu", 18, &[], vec![x(), Weight(noise(&[3, 1], 2))]));
    for op in ["Log", "Sqrt"] {
        cases.push(case(op, 17, &[], vec![Fed(positive(&[2, 5], 2))]));
    }
    cases.push(case("Gelu", 20, &[], vec![x()]));
    cases.push(case("HardSigmoid", 17, &[("alpha", float(0.3)), ("beta", float(0.4))], vec![x()]));
    cases.push(case("LeakyRelu", 17, &[("alpha", float(0.2))], vec![x()]));
    let bound = |v: f32| Constant(Tensor::scalar(v));
    cases.push(case("Clip", 17, &[], vec![x(), bound(-0.5), bound(0.25)]));
    cases.push(case("Clip", 17, &[], vec![x(), Absent, bound(0.25)]));
    cases.push(case("Clip", 7, &[("min", float(-0.1))], vec![x()]));

    let shapes: [(&[usize], &[usize]); 9] = [
        (&[2, 3, 4], &[2, 3, 4]),
        (&[2, 3, 4, 5], &[5]),
        (&[5], &[2, 3, 4, 5]),
        (&[2, 3, 4, 5], &[3, 1, 1]),
        (&[2, 1, 4, 1], &[1, 3, 1, 5]),
        (&[2, 3, 2, 3, 2, 5], &[3, 1, 3, 1, 5]),
        (&[], &[3, 2]),
        (&[1], &[]),
        (&[64, 130], &[64, 1]),
    ];
    for (a, b) in shapes {
        for op in ["Add", "Sub", "Mul", "Div", "Min", "Max", "Pow"] {
            let two = |b: Tensor| if op == "Div" || op == "Pow" { positive(b.shape(), 4) } else { b };
            let base = if op == "Pow" { positive(a, 3) } else { noise(a, 3) };
            cases.push(case(op, 17, &[], vec![Fed(base), Fed(two(noise(b, 4)))]));
        }
    }
    for op in ["Add", "Sub", "Mul", "Div", "Pow"] {
        cases.push(case(op, 17, &[], vec![x(), Constant(Tensor::scalar(2f32))]));
        cases.push(case(op, 17, &[], vec![Constant(Tensor::scalar(2f32)), x()]));
        cases.push(case(op, 17, &[], vec![Fed(positive(&[3], 1)), Constant(from(&[1, 1], |_| 0.5f32))]));
    }
    for op in ["Sum", "Max", "Min"] {
        cases.push(case(op, 17, &[], vec![x(), Fed(noise(&[17], 5)), Fed(noise(&[4, 1, 1, 1], 6))]));
    }
    cases
}

fn products() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes: [(&[usize], &[usize]); 9] = [
        (&[5, 7], &[7, 3]),
        (&[2, 3, 5, 40], &[40, 33]),
        (&[2, 3, 5, 7], &[2, 3, 7, 4]),
        (&[2, 1, 5, 7], &[3, 7, 4]),
        (&[5, 7], &[4, 7, 3]),
        (&[7], &[7, 3]),
        (&[2, 5, 7], &[7]),
        (&[7], &[7]),
        (&[3, 7], &[2, 7, 1]),
    ];
    for (a, b) in shapes {
        cases.push(case("MatMul", 17, &[], vec![Fed(noise(a, 1)), Fed(noise(b, 2))]));
        cases.push(case("MatMul", 17, &[], vec![Fed(noise(a, 1)), Weight(noise(b, 2))]));
        cases.push(case("MatMul", 17, &[], vec![Weight(noise(a, 1)), Fed(noise(b, 2))]));
    }
    for (trans_a, trans_b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let a = noise(if trans_a == 1 { &[6, 4] } else { &[4, 6] }, 3);
        let b = noise(if trans_b == 1 { &[5, 6] } else { &[6, 5] }, 4);
        let attributes =
            [("transA", int(trans_a)), ("transB", int(trans_b)), ("alpha", float(0.5)), ("beta", float(2.0))];
        for c in [&[5][..], &[4, 1], &[], &[4, 5]] {
            cases.push(case(
                "Gemm",
                17,
                &attributes,
                vec![Fed(a.clone()), Weight(b.clone()), Weight(noise(c, 5))],
            ));
        }
        cases.push(case("Gemm", 17, &attributes[..2], vec![Fed(a), Fed(b)]));
    }
    cases
}

fn convolutions() -> Vec<Case> {
    let mut cases = Vec::new();
    // Input shape, filter shape, groups, attributes.
    type Convolution<'a> = (&'a [usize], &'a [usize], i64, Vec<(&'a str, Attribute)>);
    let list: Vec<Convolution<'_>> = vec![
        (&[2, 3, 9, 7], &[5, 3, 3, 3], 1, vec![("pads", ints(&[1, 1, 1, 1]))]),
        (&[1, 37, 20, 33], &[33, 37, 3, 3], 1, vec![("pads", ints(&[1, 1, 1, 1]))]),
        (&[1, 8, 12, 70], &[30, 8, 1, 1], 1, vec![]),
        (&[1, 4, 11, 12], &[6, 4, 3, 2], 1, vec![("strides", ints(&[2, 3])), ("pads", ints(&[0, 1, 2, 0]))]),
        (
            &[1, 2, 15, 15],
            &[3, 2, 3, 3],
            1,
            vec![("dilations", ints(&[2, 3])), ("pads", ints(&[2, 3, 2, 3]))],
        ),
        (&[2, 6, 8, 8], &[9, 2, 3, 3], 3, vec![("pads", ints(&[1, 1, 1, 1]))]),
        (&[2, 8, 10, 9], &[8, 1, 3, 3], 8, vec![("pads", ints(&[1, 1, 1, 1]))]),
        (&[1, 8, 10, 9], &[8, 1, 3, 3], 8, vec![("strides", ints(&[2, 2])), ("pads", ints(&[0, 0, 1, 1]))]),
        (&[1, 4, 9, 9], &[8, 1, 5, 5], 4, vec![("pads", ints(&[2, 2, 2, 2]))]),
        (&[2, 3, 19], &[4, 3, 5], 1, vec![("strides", ints(&[2])), ("pads", ints(&[2, 1]))]),
        (
            &[1, 3, 10, 11],
            &[4, 3, 3, 3],
            1,
            vec![("auto_pad", text("SAME_UPPER")), ("strides", ints(&[2, 2]))],
        ),
        (&[1, 3, 10, 11], &[4, 3, 4, 4], 1, vec![("auto_pad", text("SAME_LOWER"))]),
        (&[1, 3, 10, 11], &[4, 3, 3, 3], 1, vec![("auto_pad", text("VALID"))]),
        (&[1, 1, 2, 2], &[1, 1, 3, 3], 1, vec![("pads", ints(&[3, 3, 3, 3]))]),
    ];
    for (x, w, group, mut attributes) in list {
        attributes.push(("group", int(group)));
        let (x, w) = (noise(x, 1), noise(w, 2));
        let bias = noise(&[w.shape()[0]], 3);
        cases.push(case("Conv", 17, &attributes, vec![Fed(x.clone()), Weight(w.clone()), Weight(bias)]));
        cases.push(case("Conv", 17, &attributes, vec![Fed(x), Fed(w)]));
    }
    type Pool<'a> = (&'a [usize], Vec<(&'a str, Attribute)>);
    let pools: Vec<Pool<'_>> = vec![
        (&[2, 3, 9, 8], vec![("kernel_shape", ints(&[3, 2])), ("strides", ints(&[2, 2]))]),
        (&[1, 2, 9, 9], vec![("kernel_shape", ints(&[3, 3])), ("pads", ints(&[1, 0, 1, 2]))]),
        (&[1, 2, 10], vec![("kernel_shape", ints(&[4])), ("strides", ints(&[3])), ("ceil_mode", int(1))]),
        (
            &[1, 1, 8, 9],
            vec![
                ("kernel_shape", ints(&[3, 3])),
                ("auto_pad", text("SAME_UPPER")),
                ("strides", ints(&[2, 2])),
            ],
        ),
    ];
    for (x, attributes) in pools {
        cases.push(case("MaxPool", 17, &attributes, vec![Fed(noise(x, 1))]));
        cases.push(case("AveragePool", 17, &attributes, vec![Fed(noise(x, 1))]));
        let padded = [&attributes[..], &[("count_include_pad", int(1))]].concat();
        cases.push(case("AveragePool", 17, &padded, vec![Fed(noise(x, 1))]));
    }
    cases
}

fn normalisations() -> Vec<Case> {
    let mut cases = Vec::new();
    let epsilon = ("epsilon", float(1e-3));
    for (x, axis) in [(&[2, 3, 40][..], -1), (&[2, 3, 5], 1), (&[7], 0)] {
        let inner = x[if axis < 0 { x.len() - 1 } else { axis as usize }..].to_vec();
        let attributes = [("axis", int(axis)), epsilon.clone()];
        let (scale, bias) = (Weight(noise(&inner, 2)), Weight(noise(&inner, 3)));
        cases.push(case("LayerNormalization", 17, &attributes, vec![Fed(noise(x, 1)), scale, bias]));
        cases.push(case(
            "LayerNormalization",
            17,
            &attributes,
            vec![Fed(noise(x, 1)), Weight(noise(&inner, 2))],
        ));
    }
    for x in [&[2, 4, 5, 6][..], &[1, 3, 300]] {
        let channels = [x[1]];
        let inputs = vec![Fed(noise(x, 1)), Weight(noise(&channels, 2)), Weight(noise(&channels, 3))];
        cases.push(case("InstanceNormalization", 17, std::slice::from_ref(&epsilon), inputs));
    }
    for x in [&[2, 4, 5, 6][..], &[3, 5], &[1, 3, 300]] {
        let [scale, bias, mean] = [2, 3, 4].map(|seed| Weight(noise(&[x[1]], seed)));
        let inputs = vec![Fed(noise(x, 1)), scale, bias, mean, Weight(positive(&[x[1]], 5))];
        cases.push(case("BatchNormalization", 17, std::slice::from_ref(&epsilon), inputs));
    }
    let groups = [("num_groups", int(3)), epsilon.clone()];
    let x = || Fed(noise(&[2, 6, 4, 5], 1));
    cases.push(case(
        "GroupNormalization",
        21,
        &groups,
        vec![x(), Weight(noise(&[6], 2)), Weight(noise(&[6], 3))],
    ));
    for axis in [-1, 0, 1, 2] {
        cases.push(case("Softmax", 17, &[("axis", int(axis))], vec![Fed(noise(&[3, 4, 50], 1))]));
    }
    cases.push(case("Softmax", 11, &[("axis", int(1))], vec![Fed(noise(&[3, 4, 5], 1))]));
    cases.push(case("Softmax", 11, &[], vec![Fed(noise(&[3, 4, 5], 1))]));
    let reductions = [
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
    ];
    for op in reductions {
        // From opset 18 (ReduceSum: 13) the axes are an input.
        for axes in [&[-1][..], &[1], &[0, 2], &[1, 2, 3], &[]] {
            for keep in [0, 1] {
                let inputs = vec![Fed(noise(&[2, 3, 4, 5], 1)), i64s(axes)];
                cases.push(case(op, 18, &[("keepdims", int(keep))], inputs));
            }
        }
        let quiet = [("noop_with_empty_axes", int(1))];
        cases.push(case(op, 18, &quiet, vec![Fed(noise(&[2, 3], 1))]));
        cases.push(case(op, 18, &[], vec![Fed(noise(&[3, 1, 77], 1)), i64s(&[2])]));
        cases.push(case(op, 18, &[], vec![Fed(noise(&[3, 77, 300], 1)), i64s(&[0, 1])]));
    }
    for axes in [&[-1][..], &[1], &[0, 2]] {
        cases.push(case("ReduceLogSum", 18, &[], vec![Fed(positive(&[2, 3, 20], 1)), i64s(axes)]));
    }
    for axis in [-1, 0, 1] {
        for last in [0, 1] {
            let attributes = [("axis", int(axis)), ("select_last_index", int(last)), ("keepdims", int(last))];
            // Few different values, so that some are equal.
            let x = || Fed(from(&[3, 20, 7], |i| ((i * 37) % 11) as f32));
            cases.push(case("ArgMax", 17, &attributes, vec![x()]));
            cases.push(case("ArgMin", 17, &attributes, vec![x()]));
        }
        for (exclusive, reverse) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let attributes = [("exclusive", int(exclusive)), ("reverse", int(reverse))];
            let axis = Constant(Tensor::scalar(axis));
            cases.push(case("CumSum", 17, &attributes, vec![Fed(noise(&[3, 20, 7], 1)), axis]));
        }
    }
    cases.push(case("GlobalMaxPool", 17, &[], vec![Fed(noise(&[2, 3, 7, 7], 1))]));
    cases.push(case("ReduceMean", 13, &[("axes", ints(&[2, 3]))], vec![Fed(noise(&[2, 3, 4, 5], 1))]));
    cases.push(case("GlobalAveragePool", 17, &[], vec![Fed(noise(&[2, 3, 7, 7], 1))]));
    cases
}

fn transposed_convolutions() -> Vec<Case> {
    // Input shape, filter shape, attributes.
    type Convolution<'a> = (&'a [usize], &'a [usize], Vec<(&'a str, Attribute)>);
    let list: Vec<Convolution<'_>> = vec![
        (&[2, 3, 5, 7], &[3, 4, 3, 3], vec![]),
        (&[2, 3, 5, 7], &[3, 4, 4, 4], vec![("strides", ints(&[2, 2])), ("pads", ints(&[1, 1, 1, 1]))]),
        (
            &[1, 4, 5, 4],
            &[4, 3, 3, 2],
            vec![("strides", ints(&[3, 2])), ("output_padding", ints(&[1, 1])), ("group", int(2))],
        ),
        (&[1, 3, 6, 5], &[3, 2, 3, 3], vec![("dilations", ints(&[2, 3])), ("pads", ints(&[2, 0, 1, 3]))]),
        (&[1, 3, 5, 5], &[3, 2, 3, 3], vec![("auto_pad", text("SAME_UPPER")), ("strides", ints(&[2, 2]))]),
        (&[1, 3, 5, 5], &[3, 2, 3, 3], vec![("auto_pad", text("SAME_LOWER")), ("strides", ints(&[2, 2]))]),
        (&[1, 3, 5, 5], &[3, 2, 2, 2], vec![("output_shape", ints(&[10, 8])), ("strides", ints(&[3, 2]))]),
        (
            &[2, 3, 9],
            &[3, 4, 5],
            vec![("strides", ints(&[2])), ("pads", ints(&[2, 1])), ("output_padding", ints(&[1]))],
        ),
        (&[1, 6, 4, 4], &[6, 1, 3, 3], vec![("group", int(6)), ("strides", ints(&[2, 2]))]),
    ];
    let mut cases = Vec::new();
    for (x, w, attributes) in list {
        let group = attributes.iter().find(|(name, _)| *name == "group");
        let groups = if let Some((_, Attribute::Int(n))) = group { *n as usize } else { 1 };
        let (x, w) = (noise(x, 1), noise(w, 2));
        let bias = noise(&[w.shape()[1] * groups], 3);
        cases.push(case(
            "ConvTranspose",
            17,
            &attributes,
            vec![Fed(x.clone()), Weight(w.clone()), Weight(bias)],
        ));
        cases.push(case("ConvTranspose", 17, &attributes, vec![Fed(x), Fed(w)]));
    }
    cases
}

fn indexed() -> Vec<Case> {
    let x = || Fed(noise(&[4, 5, 6], 1));
    let bytes = || Fed(from(&[4, 5, 6], |i| i as u8));
    let along = |shape: &[usize], len: i64| from(shape, |i| (i as i64 * 7) % (2 * len) - len);
    let mut cases = Vec::new();
    for axis in [0, 1, -1] {
        let len = [4, 5, 6][if axis < 0 { 2 } else { axis as usize }];
        let attributes = [("axis", int(axis))];
        let index = || Fed(along(&[3, 4, 5], len));
        cases.push(case("GatherElements", 18, &attributes, vec![x(), index()]));
        cases.push(case("GatherElements", 18, &attributes, vec![bytes(), index()]));
        for reduction in ["none", "add", "mul", "max", "min"] {
            let attributes = [attributes[0].clone(), ("reduction", text(reduction))];
            cases.push(case(
                "ScatterElements",
                18,
                &attributes,
                vec![x(), index(), Fed(noise(&[3, 4, 5], 2))],
            ));
        }
        let updates = Fed(from(&[3, 4, 5], |i| i as u8 + 100));
        cases.push(case("ScatterElements", 18, &attributes, vec![bytes(), index(), updates]));
    }
    let pairs = || Fed(from(&[3, 2, 2], |i| (i as i64 * 3) % 8 - 4));
    cases.push(case("GatherND", 18, &[], vec![x(), pairs()]));
    cases.push(case("GatherND", 18, &[], vec![bytes(), Fed(from(&[2, 3], |i| (i as i64) % 4))]));
    cases.push(case(
        "GatherND",
        18,
        &[("batch_dims", int(1))],
        vec![x(), Fed(from(&[4, 3, 1], |i| i as i64 % 5))],
    ));
    for reduction in ["none", "add", "mul", "max", "min"] {
        let attributes = [("reduction", text(reduction))];
        cases.push(case("ScatterND", 18, &attributes, vec![x(), pairs(), Fed(noise(&[3, 2, 6], 2))]));
    }
    cases.push(case(
        "ScatterND",
        18,
        &[],
        vec![
            Fed(noise(&[90, 100], 1)),
            Fed(from(&[40, 1], |i| (i as i64 * 7) % 90)),
            Fed(noise(&[40, 100], 2)),
        ],
    ));
    cases
}

fn quantised() -> Vec<Case> {
    let mut cases = Vec::new();
    // Shape of the scales and zero points, and attributes.
    type Way<'a> = (&'a [usize], Vec<(&'a str, Attribute)>);
    let ways: Vec<Way<'_>> = vec![
        (&[], vec![]),
        (&[3], vec![("axis", int(1))]),
        (&[9], vec![("axis", int(-1))]),
        (&[2, 2, 9], vec![("axis", int(1)), ("block_size", int(2))]),
        (&[2, 3, 3], vec![("axis", int(2)), ("block_size", int(4))]),
    ];
    for (shape, attributes) in &ways {
        let scale = || positive(shape, 2);
        let x = || Fed(from(&[2, 3, 9], |i| ((i * 37) % 100) as f32 / 3.0 - 15.0));
        let u8s = |shape: &[usize]| from(shape, |i| (i * 37 % 256) as u8);
        let i8s = |shape: &[usize]| from(shape, |i| (i * 37 % 256) as u8 as i8);
        let i16s = |shape: &[usize]| from(shape, |i| (i * 1237) as u16 as i16);
        let whole = [2, 3, 9];
        let mut pairs = vec![
            (u8s(&whole), Some(u8s(shape))),
            (i8s(&whole), Some(i8s(shape))),
            (i16s(&whole), Some(i16s(shape))),
            (from(&whole, |i| i as u16 * 777), None),
            (from(&whole, |i| i as i32 * 7777 - 100_000), None),
        ];
        for (values, zero) in pairs.drain(..) {
            let zero = |fed: bool| match &zero {
                Some(zero) if fed => Fed(zero.clone()),
                Some(zero) => Constant(zero.clone()),
                None => Absent,
            };
            let dequantize = vec![Fed(values.clone()), Weight(scale()), zero(false)];
            cases.push(case("DequantizeLinear", 21, attributes, dequantize));
            let folded = vec![Constant(values.clone()), Constant(scale()), zero(false)];
            cases.push(case("DequantizeLinear", 21, attributes, folded));
            if !matches!(zero(true), Absent) {
                cases.push(case("QuantizeLinear", 21, attributes, vec![x(), Fed(scale()), zero(true)]));
            }
        }
        cases.push(case("QuantizeLinear", 21, attributes, vec![x(), Weight(scale()), Absent]));
    }
    for shift in [-15.0, 0.0, 100.0, -200.0] {
        let x = Fed(from(&[2, 3, 90], |i| ((i * 37) % 100) as f32 / 3.0 + shift));
        cases.push(several("DynamicQuantizeLinear", 17, &[], vec![x], 3));
    }
    cases.push(several("DynamicQuantizeLinear", 17, &[], vec![Fed(from(&[3], |_| 0f32))], 3));
    cases
}

fn crops(coordinates: &str) -> bool {
    coordinates == "tf_crop_and_resize"
}

fn moves() -> Vec<Case> {
    let x = || Fed(noise(&[2, 3, 4, 6], 1));
    let numbers = |shape: &[usize]| Fed(from(shape, |i| i as i64 * 3 - 7));
    let bytes = |shape: &[usize]| Fed(from(shape, |i| i as u8));
    let mut cases = vec![
        case("Identity", 17, &[], vec![x()]),
        case("Identity", 17, &[], vec![Fed(from(&[3], |i| i == 1))]),
        case("Flatten", 17, &[("axis", int(2))], vec![x()]),
        case("Reshape", 17, &[], vec![x(), i64s(&[0, -1, 2])]),
        case("Squeeze", 17, &[], vec![Fed(noise(&[1, 3, 1], 1)), i64s(&[0])]),
        case("Unsqueeze", 17, &[], vec![x(), i64s(&[0, 5])]),
        case("Dropout", 17, &[], vec![x()]),
        case("Cast", 17, &[("to", int(10))], vec![x()]),
        case("Cast", 17, &[("to", int(7))], vec![numbers(&[4])]),
        case("Transpose", 17, &[], vec![x()]),
        case("Transpose", 17, &[("perm", ints(&[0, 2, 1, 3]))], vec![x()]),
        case("Transpose", 17, &[("perm", ints(&[0, 2, 3, 1]))], vec![Fed(noise(&[1, 40, 33, 35], 2))]),
        case("Transpose", 17, &[("perm", ints(&[4, 0, 3, 5, 1, 2]))], vec![numbers(&[2, 3, 2, 5, 4, 3])]),
        case("Transpose", 17, &[("perm", ints(&[1, 0]))], vec![bytes(&[50, 3])]),
        case("Transpose", 17, &[("perm", ints(&[1, 0]))], vec![Fed(from(&[5, 3], |i| i as u16))]),
        case(
            "Concat",
            17,
            &[("axis", int(1))],
            vec![x(), Fed(noise(&[2, 1, 4, 6], 2)), Weight(noise(&[2, 2, 4, 6], 3))],
        ),
        case("Concat", 17, &[("axis", int(-1))], (0..21).map(|i| numbers(&[3, i % 4 + 1])).collect()),
        case("Concat", 17, &[("axis", int(0))], vec![x()]),
        several("Split", 17, &[("axis", int(1))], vec![Fed(noise(&[2, 6, 3], 1)), i64s(&[1, 3, 2])], 3),
        several("Split", 18, &[("axis", int(-1)), ("num_outputs", int(4))], vec![numbers(&[2, 7])], 4),
        several("Split", 17, &[], vec![x()], 2),
        case("Slice", 17, &[], vec![x(), i64s(&[1, -5]), i64s(&[3, i64::MAX]), i64s(&[1, 3]), i64s(&[1, 2])]),
        case(
            "Slice",
            17,
            &[],
            vec![numbers(&[3, 7]), i64s(&[-1, 100]), i64s(&[i64::MIN, -6]), i64s(&[0, 1]), i64s(&[-1, -2])],
        ),
        case("Slice", 17, &[], vec![x(), i64s(&[1]), i64s(&[2])]),
        case("Slice", 9, &[("starts", ints(&[1])), ("ends", ints(&[-1])), ("axes", ints(&[2]))], vec![x()]),
        case("Expand", 17, &[], vec![Fed(noise(&[3, 1], 1)), i64s(&[2, 1, 6])]),
        case("Expand", 17, &[], vec![Fed(from(&[1], |_| true)), i64s(&[40])]),
        case("Tile", 17, &[], vec![numbers(&[2, 3]), i64s(&[2, 3])]),
        case("Gather", 17, &[("axis", int(1))], vec![x(), Fed(from(&[2, 2], |i| [0i64, 2, -1, 1][i]))]),
        case("Gather", 17, &[], vec![Weight(noise(&[9, 5], 1)), Fed(from(&[4], |i| [8i32, 0, 3, 3][i]))]),
        case("Gather", 17, &[("axis", int(2))], vec![numbers(&[2, 3, 4]), Constant(Tensor::scalar(-2i64))]),
        case("DepthToSpace", 17, &[("blocksize", int(2))], vec![Fed(noise(&[2, 8, 3, 5], 1))]),
        case(
            "DepthToSpace",
            17,
            &[("blocksize", int(2)), ("mode", text("CRD"))],
            vec![Fed(noise(&[2, 8, 3, 5], 1))],
        ),
        case("SpaceToDepth", 17, &[("blocksize", int(3))], vec![Fed(noise(&[1, 2, 6, 9], 1))]),
        case(
            "SpaceToDepth",
            17,
            &[("blocksize", int(3)), ("mode", text("CRD"))],
            vec![Fed(noise(&[1, 2, 6, 9], 1))],
        ),
    ];
    let scales = |s: &[f32]| Constant(from(&[s.len()], |i| s[i]));
    for (coordinates, nearest) in
        [("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")]
    {
        let attributes =
            [("coordinate_transformation_mode", text(coordinates)), ("nearest_mode", text(nearest))];
        cases.push(case("Resize", 17, &attributes, vec![x(), Absent, scales(&[1.0, 1.0, 2.0, 3.0])]));
        cases.push(case("Resize", 17, &attributes, vec![x(), Absent, Absent, i64s(&[2, 3, 20, 6])]));
    }
    let attributes = [("coordinate_transformation_mode", text("asymmetric"))];
    cases.push(case("Resize", 17, &attributes, vec![x(), Absent, scales(&[1.0, 1.0, 2.0, 2.0])]));
    cases.push(case("Upsample", 9, &[], vec![x(), scales(&[1.0, 1.0, 2.0, 2.0])]));
    cases.push(case("Upsample", 9, &[("mode", text("linear"))], vec![x(), scales(&[1.0, 1.0, 2.5, 2.0])]));
    let transforms = [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_half_pixel_for_nn",
        "tf_crop_and_resize",
    ];
    for coordinates in transforms {
        for mode in ["nearest", "linear", "cubic"] {
            let mut attributes = vec![
                ("coordinate_transformation_mode", text(coordinates)),
                ("mode", text(mode)),
                ("extrapolation_value", float(-3.5)),
            ];
            let crops = crops(coordinates);
            let region = || if crops { scales(&[0.0, 0.0, 0.2, -0.3, 1.0, 1.0, 0.7, 1.2]) } else { Absent };
            let grow = || scales(&[1.0, 1.0, 1.6, 2.7]);
            cases.push(case("Resize", 19, &attributes, vec![x(), region(), grow()]));
            cases.push(case("Resize", 19, &attributes, vec![x(), region(), Absent, i64s(&[2, 3, 3, 13])]));
            if mode != "nearest" && !crops {
                attributes.push(("antialias", int(1)));
                attributes.push(("exclude_outside", int(1)));
                cases.push(case("Resize", 19, &attributes, vec![x(), Absent, scales(&[1.0, 0.7, 0.6, 0.4])]));
            }
            if !crops {
                let image = bytes(&[1, 2, 5, 9]);
                cases.push(case("Resize", 19, &attributes[..2], vec![image, Absent, grow()]));
                let image = Fed(from(&[1, 2, 5, 9], |i| i as i8 - 40));
                cases.push(case("Resize", 19, &attributes[..2], vec![image, Absent, grow()]));
            }
        }
        if !crops(coordinates) {
            let attributes =
                [("coordinate_transformation_mode", text(coordinates)), ("nearest_mode", text("ceil"))];
            cases.push(case(
                "Resize",
                19,
                &attributes,
                vec![numbers(&[1, 2, 5, 9]), Absent, scales(&[1.0, 1.0, 1.6, 0.7])],
            ));
        }
    }
    for tensor in [Tensor::from_i64s(&[1, 2, 3]), noise(&[2, 2], 1)] {
        let mut model = Model::new(17);
        let constant = model.node("Constant", &[("value", Attribute::Tensor(tensor.clone()))], &[]);
        let x = model.input(tensor);
        let y = model.node("Concat", &[("axis", int(0))], &[constant, x]);
        model.output(y);
        cases.push(Case { op: "Constant", model, tolerance: 0.0 });
    }
    cases
}

/// What a kernel does with what follows a product or surrounds attention.
fn merged() -> Vec<Case> {
    let x = |shape: &[usize]| Fed(noise(shape, 1));
    let weight = |shape: &[usize], seed| Weight(noise(shape, seed));
    let heads = [("q_num_heads", int(4)), ("kv_num_heads", int(4)), ("scale", float(0.3))];
    let shared = [("q_num_heads", int(4)), ("kv_num_heads", int(2))];
    let causal = [("is_causal", int(1))];
    let halves = [("activation", text("Gelu")), ("gate", int(1))];
    let six = [("activation", text("Clip")), ("activation_params", Attribute::Floats(vec![0.0, 6.0]))];
    let silu = [("activation", text("Swish")), ("activation_params", Attribute::Floats(vec![1.0]))];
    let pads = [("pads", ints(&[1, 1, 1, 1])), silu[0].clone(), silu[1].clone()];
    let turned = [("transB", int(1)), ("activation", text("FastGelu"))];
    let groups = [("num_groups", int(3)), ("epsilon", float(1e-3)), silu[0].clone(), silu[1].clone()];
    let image = || x(&[2, 6, 5, 7]);
    let filters = || weight(&[9, 6, 3, 3], 2);
    let mut cases = vec![
        case(
            "Attention",
            23,
            &heads,
            vec![x(&[2, 7, 20]), Fed(noise(&[2, 9, 20], 2)), Fed(noise(&[2, 9, 12], 3))],
        ),
        case(
            "Attention",
            23,
            &shared,
            vec![x(&[1, 7, 20]), Fed(noise(&[1, 9, 10], 2)), Fed(noise(&[1, 9, 6], 3))],
        ),
        case(
            "Attention",
            23,
            &[],
            vec![
                x(&[2, 3, 7, 5]),
                Fed(noise(&[2, 3, 9, 5], 2)),
                Fed(noise(&[2, 3, 9, 4], 3)),
                Fed(noise(&[1, 7, 9], 4)),
            ],
        ),
        case(
            "Attention",
            23,
            &causal,
            vec![x(&[1, 2, 70, 5]), Fed(noise(&[1, 2, 70, 5], 2)), Fed(noise(&[1, 2, 70, 4], 3))],
        ),
        case("RMSNormalization", 23, &[("axis", int(-1))], vec![x(&[3, 40]), weight(&[40], 2)]),
        case("Swish", 24, &[("alpha", float(1.702))], vec![x(&[3, 40])]),
        case("Gelu", 20, &[("approximate", text("tanh"))], vec![x(&[3, 40])]),
        case("GLU", 17, &halves, vec![x(&[3, 5, 44])]),
        case("FusedConv", 17, &pads, vec![image(), filters(), weight(&[9], 3), Fed(noise(&[2, 9, 5, 7], 4))]),
        case("FusedConv", 17, &pads, vec![image(), filters(), Absent, Fed(noise(&[2, 9, 1, 1], 4))]),
        case("FusedConv", 17, &pads, vec![image(), filters(), Absent, Fed(noise(&[5, 1], 4))]),
        case("FusedMatMul", 17, &six, vec![x(&[2, 3, 20]), weight(&[20, 9], 2), weight(&[9], 3)]),
        case(
            "FusedMatMul",
            17,
            &turned,
            vec![x(&[2, 3, 20]), weight(&[9, 20], 2), weight(&[9], 3), Fed(noise(&[2, 3, 9], 4))],
        ),
        case(
            "FusedMatMul",
            17,
            &[],
            vec![x(&[2, 3, 20]), weight(&[20, 9], 2), Absent, Fed(noise(&[3, 1], 4))],
        ),
        case(
            "GroupNormalization",
            17,
            &groups,
            vec![image(), weight(&[6], 2), weight(&[6], 3), weight(&[3], 4), weight(&[3], 5)],
        ),
    ];
    for case in &mut cases {
        let plain = matches!(case.op, "Attention" | "RMSNormalization" | "Swish" | "Gelu");
        if !plain {
            case.model.graph.nodes[0].domain = DOMAIN.into();
            case.model.graph.opsets.insert(DOMAIN.into(), VERSION);
        }
    }
    cases
}

fn pads() -> Vec<Case> {
    let x = || Fed(noise(&[2, 3, 4, 5], 1));
    let mut cases = Vec::new();
    for mode in ["constant", "edge", "reflect"] {
        let attributes = [("mode", text(mode))];
        cases.push(case("Pad", 18, &attributes, vec![x(), i64s(&[0, 1, 2, 3, 0, 0, 1, 2])]));
        cases.push(case("Pad", 18, &attributes, vec![x(), i64s(&[0, 0, 0, 0, 0, 0, 1, 1])]));
        cases.push(case("Pad", 18, &attributes, vec![x(), i64s(&[0, 0, -1, 2, 0, 0, 1, -2])]));
    }
    let value = || Constant(Tensor::scalar(2.5f32));
    cases.push(case("Pad", 18, &[], vec![x(), i64s(&[1, 2, 1, 0]), value(), i64s(&[0, -1])]));
    cases.push(case("Pad", 19, &[("mode", text("wrap"))], vec![x(), i64s(&[0, 0, 3, 1, 0, 0, 2, 4])]));
    cases.push(case(
        "Pad",
        9,
        &[("pads", ints(&[0, 1, 0, 1])), ("value", float(-1.0))],
        vec![Fed(noise(&[3, 4], 1))],
    ));
    cases.push(case("Pad", 18, &[], vec![Fed(from(&[3], |i| i as i64)), i64s(&[1, 1])]));
    cases
}

fn sums() -> Vec<Case> {
    let sum = |equation: &str, shapes: &[&[usize]]| {
        let inputs = shapes.iter().enumerate().map(|(i, shape)| Fed(noise(shape, i as u64))).collect();
        case("Einsum", 17, &[("equation", text(equation))], inputs)
    };
    vec![
        sum("nhwpqc->nchpwq", &[&[2, 3, 4, 2, 2, 5]]),
        sum("ij->j", &[&[3, 4]]),
        sum("m,d->md", &[&[7], &[9]]),
        sum("bhid,bhjd->bhij", &[&[2, 3, 4, 5], &[2, 3, 6, 5]]),
        sum("bij, bjk -> kbi", &[&[2, 3, 4], &[2, 4, 5]]),
        sum("ij,kj->k", &[&[2, 3], &[4, 3]]),
    ]
}

fn fused() -> Vec<Case> {
    let activation = |name: &str| ("activation", text(name));
    let swish = [activation("Swish"), ("activation_params", Attribute::Floats(vec![1.702]))];
    let fed = |shape: &[usize], seed| Fed(noise(shape, seed));
    let weight = |shape: &[usize], seed| Weight(noise(shape, seed));
    let mut cases = vec![
        case("Swish", 1, &[("alpha", float(1.702))], vec![fed(&[3, 40], 1)]),
        case("Gelu", 1, &[("approximate", text("tanh"))], vec![fed(&[3, 40], 1)]),
        case("RMSNormalization", 1, &[("epsilon", float(1e-3))], vec![fed(&[2, 3, 40], 1), weight(&[40], 2)]),
        case("GLU", 1, &[("gate", int(1)), activation("Gelu")], vec![fed(&[2, 3, 40], 1)]),
        case("GLU", 1, &[("gate", int(0)), activation("FastGelu")], vec![fed(&[2, 3, 40], 1)]),
        case(
            "FusedMatMul",
            1,
            &swish,
            vec![fed(&[2, 3, 12], 1), weight(&[12, 7], 2), weight(&[7], 3), fed(&[2, 3, 7], 4)],
        ),
        case("FusedMatMul", 1, &[("transB", int(1))], vec![fed(&[3, 12], 1), weight(&[7, 12], 2)]),
        case(
            "FusedMatMul",
            1,
            &[("transB", int(1))],
            vec![fed(&[3, 12], 1), fed(&[7, 12], 2), weight(&[7], 3)],
        ),
        case(
            "FusedConv",
            1,
            &[("pads", ints(&[1; 4])), activation("Relu")],
            vec![fed(&[2, 3, 5, 6], 1), weight(&[4, 3, 3, 3], 2), weight(&[4], 3), fed(&[2, 4, 1, 1], 4)],
        ),
        case(
            "FusedConv",
            1,
            &[activation("Clip"), ("activation_params", Attribute::Floats(vec![-0.1, 0.2]))],
            vec![fed(&[2, 3, 5, 6], 1), weight(&[4, 3, 1, 1], 2), Absent, fed(&[2, 4, 5, 6], 4)],
        ),
        case(
            "NhwcConv",
            1,
            &[("pads", ints(&[0, 2, 1, 1])), ("dilations", ints(&[1, 2])), ("strides", ints(&[2, 1]))],
            vec![fed(&[2, 9, 8, 3], 1), weight(&[5, 3, 3, 3], 2), weight(&[5], 3)],
        ),
        case(
            "NhwcConv",
            1,
            &[activation("Gelu")],
            vec![fed(&[2, 5, 6, 20], 1), weight(&[7, 20, 1, 1], 2), Absent, fed(&[2, 5, 6, 7], 4)],
        ),
        case("NhwcConv", 1, &[], vec![fed(&[1, 5, 6, 20], 1), fed(&[7, 20, 1, 1], 2), weight(&[7], 3)]),
        case(
            "NhwcConv",
            1,
            &[("group", int(20)), ("pads", ints(&[1; 4])), activation("Relu")],
            vec![fed(&[2, 5, 6, 20], 1), weight(&[20, 1, 3, 3], 2), weight(&[20], 3), fed(&[1, 20], 4)],
        ),
    ];
    let heads = [("q_num_heads", int(3)), ("kv_num_heads", int(3)), ("scale", float(0.3))];
    let joined = |keys: usize| vec![fed(&[2, 9, 12], 1), fed(&[2, keys, 12], 2), fed(&[2, keys, 12], 3)];
    cases.push(case("Attention", 1, &heads, joined(7)));
    let mut masked = joined(7);
    masked.push(fed(&[2, 1, 9, 7], 4));
    cases.push(case("Attention", 1, &heads, masked));
    // Each of the first queries sees every third key and its own, the others none.
    let sees = |queries: usize| {
        let sees = |i: usize| i / 7 % 9 < queries && (i.is_multiple_of(3) || i / 7 % 9 == i % 7);
        let seen: Vec<bool> = (0..2 * 9 * 7).map(sees).collect();
        Tensor::from_elements(vec![2, 1, 9, 7], &seen).unwrap()
    };
    for mask in [Fed(sees(8)), Constant(sees(8)), Constant(sees(9))] {
        cases.push(case("Attention", 1, &heads, joined(7).into_iter().chain([mask]).collect()));
    }
    let apart = vec![fed(&[2, 3, 9, 4], 1), fed(&[2, 3, 7, 4], 2), fed(&[2, 3, 7, 6], 3)];
    cases.push(case("Attention", 1, &[], apart));
    for case in &mut cases {
        case.model.graph.opsets = BTreeMap::from([(String::new(), 17), (DOMAIN.to_owned(), VERSION)]);
        case.model.graph.nodes[0].domain = DOMAIN.into();
    }
    cases
}

/// Of every operator in the table.
pub(super) fn native() -> Vec<Case> {
    let families = [elementwise(), products(), convolutions(), normalisations(), moves(), pads(), sums()];
    families
        .into_iter()
        .chain([
            fused(),
            merged(),
            quantised(),
            indexed(),
            transposed_convolutions(),
            super::recurrent::cases(),
        ])
        .flatten()
        .collect()
}

#[test]
fn every_operator_of_the_table_is_right_and_native() {
    let (mut covered, mut wrong) = (BTreeSet::new(), Vec::new());
    for case in native() {
        let Case { op, model, tolerance } = case;
        assert!(
            model.host_operators().is_empty(),
            "{op} is left to the reference implementation: {:?}",
            model.graph.nodes
        );
        let what = format!("{op} {:?}", model.graph.nodes[0].attributes);
        wrong.extend(std::panic::catch_unwind(|| check(&what, &model, tolerance)).err().map(|_| what));
        covered.insert(op);
    }
    assert!(wrong.is_empty(), "wrong (each with its own message above): {wrong:#?}");
    let table: BTreeSet<&str> = ops::all().map(|operator| operator.name).collect();
    assert_eq!(covered, table, "operators in the table and operators tested");
}

#[test]
fn half_precision_values_are_computed() {
    for (op, opset) in [("Exp", 17), ("Sigmoid", 17)] {
        let halves = [
            Fed(from(&[3, 5], |i| f16::from_f32(i as f32 / 4.0 - 2.0))),
            Fed(from(&[3, 5], |i| bf16::from_f32(i as f32 / 4.0 - 2.0))),
        ];
        for x in halves {
            let Case { model, .. } = case(op, opset, &[], vec![x]);
            assert!(model.host_operators().is_empty());
            // Half a unit in the last place of bf16.
            check(op, &model, 4e-3);
        }
    }
    let a = from(&[4, 6], |i| f16::from_f32(i as f32 / 8.0));
    let Case { model, .. } =
        case("MatMul", 17, &[], vec![Fed(a.clone()), Weight(from(&[6, 3], |i| f16::from_f32(i as f32)))]);
    check("MatMul in f16", &model, 1e-3);
}

#[test]
fn what_ggml_lacks_is_evaluated() {
    let x = || Fed(noise(&[2, 3, 5], 1));
    let numbers = || Fed(from(&[2, 5], |i| i as i64 * 3 - 7));
    let element_wise = [
        case("Floor", 17, &[], vec![Fed(from(&[4], |i| i as f64 * 0.7))]),
        case("PRelu", 17, &[], vec![numbers(), numbers()]),
        case("Max", 17, &[], vec![numbers(), Constant(Tensor::scalar(2i64))]),
        case("Mean", 17, &[], vec![x(), Fed(noise(&[5], 2)), Fed(noise(&[3, 1], 3))]),
        case("Add", 17, &[], vec![numbers(), Constant(Tensor::scalar(5i64))]),
        case("Mul", 17, &[], vec![Fed(from(&[3, 1], |i| i as i64)), Fed(from(&[1, 4000], |i| i as i64))]),
        case("Cast", 17, &[("to", int(1))], vec![numbers()]),
        case("Cast", 17, &[("to", int(7))], vec![Fed(from(&[4], |i| i as f32 * 1.5))]),
        case("Cast", 17, &[("to", int(9))], vec![Fed(from(&[20_000], |i| (i % 3) as f32))]),
        case("Less", 17, &[], vec![x(), Fed(noise(&[5], 2))]),
        case("Equal", 17, &[], vec![numbers(), numbers()]),
        case("Where", 17, &[], vec![Fed(from(&[2, 1, 5], |i| i % 2 == 0)), x(), Fed(noise(&[3, 1], 2))]),
        case("Exp", 17, &[], vec![Fed(from(&[4], |i| i as f64))]),
        case("Clip", 17, &[], vec![x(), Fed(Tensor::scalar(-0.25f32)), Fed(Tensor::scalar(0.5f32))]),
        case("Add", 17, &[], vec![Fed(Tensor::scalar(3i64)), Fed(Tensor::scalar(4i64))]),
        case("Round", 17, &[], vec![Fed(from(&[9], |i| f16::from_f32(i as f32 / 2.0)))]),
    ];
    for Case { op, model, .. } in element_wise {
        assert!(model.host_operators().is_empty(), "{op}");
        check(op, &model, 1e-6);
    }
    let cases = [
        several("TopK", 17, &[("axis", int(-1))], vec![x(), i64s(&[2])], 2),
        several("MaxPool", 17, &[("kernel_shape", ints(&[2]))], vec![x()], 2),
    ];
    for Case { op, model, .. } in cases {
        assert_eq!(model.host_operators().get(op), Some(&1), "{op}");
        check(op, &model, 1e-6);
    }
}

#[test]
fn low_precisions_store_matrices_narrowly_and_stay_close() {
    let mut model = Model::new(17);
    let x = model.input(noise(&[1, 16, 12, 12], 1));
    let filters = model.weight(noise(&[32, 16, 3, 3], 2));
    let y = model.node("Conv", &[("pads", ints(&[1, 1, 1, 1]))], &[x, filters]);
    let shape = model.constant(Tensor::from_i64s(&[32, 144]));
    let y = model.node("Reshape", &[], &[y, shape]);
    let matrix = model.weight(noise(&[144, 64], 3));
    let y = model.node("MatMul", &[], &[y, matrix]);
    model.output(y);
    let exact = &model.reference()[0];
    for (precision, low, high) in
        [(Precision::Fp32, 0.0, 1e-6), (Precision::Fp16, 1e-5, 1e-3), (Precision::Bf16, 1e-4, 1e-2)]
    {
        let found = &outputs(&model, &spec(precision))[0];
        let error = super::distance(&found.to_f32s().unwrap(), &exact.to_f32s().unwrap());
        assert!((low..=high).contains(&error), "{precision}: {error:e}");
    }
    compare("fp32", &outputs(&model, &spec(Precision::Fp32))[0], exact, 1e-6);
}
