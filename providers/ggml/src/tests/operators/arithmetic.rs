//! Element-wise operators, products, convolutions and norms.

use super::*;

pub(super) fn elementwise() -> Vec<Case> {
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

pub(super) fn products() -> Vec<Case> {
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

pub(super) fn convolutions() -> Vec<Case> {
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

pub(super) fn normalisations() -> Vec<Case> {
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

pub(super) fn transposed_convolutions() -> Vec<Case> {
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
