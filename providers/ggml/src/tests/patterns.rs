use super::{Model, build, check, from, noise, run, spec};
use crate::optimize::optimize;
use half::f16;
use sdrun_abi::{DType, NoHost, Precision};
use sdrun_graph::{Attribute, Graph, Tensor, ValueId, infer::infer_shapes};

/// The operators of the optimized graph.
fn operators(model: &Model) -> Vec<String> {
    let mut graph: Graph = model.graph.clone();
    infer_shapes(&mut graph).unwrap();
    optimize(&mut graph, false).unwrap();
    graph.nodes.into_iter().map(|node| node.op_type).collect()
}

fn silu(model: &mut Model, x: ValueId) -> ValueId {
    let gate = model.node("Sigmoid", &[], &[x]);
    model.node("Mul", &[], &[x, gate])
}

/// GroupNorm as exporters write it: `groups` groups by reshaping, then factors for each channel.
fn group_norm(model: &mut Model, x: ValueId, shape: &[usize], groups: usize) -> ValueId {
    let grouped = model.constant(Tensor::from_i64s(&[0, groups as i64, -1]));
    let back = model.constant(Tensor::from_i64s(&shape.iter().map(|d| *d as i64).collect::<Vec<_>>()));
    let (scale, bias) = (model.weight(noise(&[groups], 11)), model.weight(noise(&[groups], 12)));
    let (weight, shift) =
        (model.weight(noise(&[shape[1], 1, 1], 13)), model.weight(noise(&[1, shape[1], 1, 1], 14)));
    let y = model.node("Reshape", &[], &[x, grouped]);
    let y = model.node("InstanceNormalization", &[("epsilon", Attribute::Float(1e-4))], &[y, scale, bias]);
    let y = model.node("Reshape", &[], &[y, back]);
    let y = model.node("Mul", &[], &[y, weight]);
    model.node("Add", &[], &[shift, y])
}

fn gelu(model: &mut Model, x: ValueId, order: usize) -> ValueId {
    let constant = |model: &mut Model, v: f32| model.constant(Tensor::scalar(v));
    let (root, one, half) = (constant(model, 2f32.sqrt()), constant(model, 1.0), constant(model, 0.5));
    let scaled = match order {
        0 => model.node("Div", &[], &[x, root]),
        _ => {
            let inverse = constant(model, 0.5f32.sqrt());
            model.node("Mul", &[], &[inverse, x])
        }
    };
    let erf = model.node("Erf", &[], &[scaled]);
    let sum = model.node("Add", &[], &[erf, one]);
    match order {
        0 => {
            let y = model.node("Mul", &[], &[x, sum]);
            model.node("Mul", &[], &[y, half])
        }
        1 => {
            let y = model.node("Mul", &[], &[half, x]);
            model.node("Mul", &[], &[y, sum])
        }
        _ => {
            let y = model.node("Mul", &[], &[sum, half]);
            model.node("Mul", &[], &[x, y])
        }
    }
}

#[test]
fn silu_is_one_operation() {
    let mut model = Model::new(17);
    let x = model.input(noise(&[2, 33], 1));
    let y = silu(&mut model, x);
    model.output(y);
    assert_eq!(operators(&model), ["Swish"]);
    check("silu", &model, 2e-6);
}

#[test]
fn group_norm_with_factors_and_activation_is_one_operation() {
    let shape = [2, 6, 5, 7];
    for activated in [false, true] {
        let mut model = Model::new(17);
        let x = model.input(noise(&shape, 1));
        let mut y = group_norm(&mut model, x, &shape, 3);
        if activated {
            y = silu(&mut model, y);
        }
        model.output(y);
        assert_eq!(operators(&model), ["Reshape", "Reshape", "GroupNormalization"]);
        check("group norm", &model, 5e-6);
    }
}

#[test]
fn gelu_is_one_operation_in_any_order() {
    for order in 0..3 {
        let mut model = Model::new(17);
        let x = model.input(noise(&[4, 9], 1));
        let y = gelu(&mut model, x, order);
        model.output(y);
        assert_eq!(operators(&model), ["Gelu"], "order {order}");
        check("gelu", &model, 2e-6);
    }
}

#[test]
fn values_that_others_use_are_still_computed() {
    // The sigmoid, the normalized value and the erf are themselves outputs of the graph.
    let mut model = Model::new(17);
    let shape = [1, 4, 3, 3];
    let x = model.input(noise(&shape, 1));
    let gate = model.node("Sigmoid", &[], &[x]);
    let y = model.node("Mul", &[], &[x, gate]);
    let normalised = group_norm(&mut model, y, &shape, 2);
    let activated = silu(&mut model, normalised);
    for id in [gate, normalised, activated] {
        model.output(id);
    }
    check("shared values", &model, 5e-6);
}

#[test]
fn look_alikes_are_left_alone() {
    // A factor along the width is no factor for each channel, even with the same length.
    let mut model = Model::new(17);
    let shape = [1, 4, 4, 4];
    let x = model.input(noise(&shape, 1));
    let (scale, bias) = (model.weight(noise(&[4], 2)), model.weight(noise(&[4], 3)));
    let y = model.node("InstanceNormalization", &[], &[x, scale, bias]);
    let factor = model.weight(noise(&[4], 4));
    let y = model.node("Mul", &[], &[y, factor]);
    model.output(y);
    assert_eq!(operators(&model), ["InstanceNormalization", "Mul"]);
    check("factor along the width", &model, 5e-6);

    // 0.4 is not a half.
    let mut model = Model::new(17);
    let x = model.input(noise(&[3, 3], 1));
    let constants = [2f32.sqrt(), 1.0, 0.4].map(|v| model.constant(from(&[1], |_| v)));
    let scaled = model.node("Mul", &[], &[x, constants[0]]);
    let erf = model.node("Erf", &[], &[scaled]);
    let sum = model.node("Add", &[], &[erf, constants[1]]);
    let y = model.node("Mul", &[], &[x, sum]);
    let y = model.node("Mul", &[], &[y, constants[2]]);
    model.output(y);
    assert_eq!(operators(&model), ["Mul", "Erf", "Add", "Mul", "Mul"]);
    check("not a gelu", &model, 2e-6);
}

fn perm(p: [i64; 4]) -> [(&'static str, Attribute); 1] {
    [("perm", Attribute::Ints(p.to_vec()))]
}

/// Attention as exporters write it. With `joined`, heads are split from and joined to `[batch, length, heads * size]`.
fn attention(joined: bool, mask: bool) -> Model {
    let mut model = Model::new(17);
    let tensors = [noise(&[2, 9, 3, 5], 1), noise(&[2, 7, 3, 5], 2), noise(&[2, 7, 3, 5], 3)];
    let [q, k, v] = tensors.map(|t| match joined {
        true => {
            let split = model.constant(Tensor::from_i64s(&[0, -1, 3, 5]));
            let x = model.input(t.reshaped(vec![2, t.shape()[1], 15]).unwrap());
            model.node("Reshape", &[], &[x, split])
        }
        false => model.input(t),
    });
    let q = model.node("Transpose", &perm([0, 2, 1, 3]), &[q]);
    let k = model.node("Transpose", &perm([0, 2, 3, 1]), &[k]);
    let v = model.node("Transpose", &perm([0, 2, 1, 3]), &[v]);
    let scale = model.constant(Tensor::scalar(0.7f32));
    let q = model.node("Mul", &[], &[q, scale]);
    let mut scores = model.node("MatMul", &[], &[q, k]);
    if mask {
        let mask = model.input(noise(&[2, 1, 9, 7], 4));
        scores = model.node("Add", &[], &[scores, mask]);
    }
    let weights = model.node("Softmax", &[("axis", Attribute::Int(-1))], &[scores]);
    let y = model.node("MatMul", &[], &[weights, v]);
    let y = model.node("Transpose", &perm([0, 2, 1, 3]), &[y]);
    let all = model.constant(Tensor::from_i64s(&[0, 0, -1]));
    let y = model.node("Reshape", &[], &[y, all]);
    model.output(y);
    model
}

#[test]
fn attention_is_one_operation() {
    for (joined, mask) in [(false, false), (false, true), (true, false), (true, true)] {
        let model = attention(joined, mask);
        let operators = operators(&model);
        assert_eq!(operators.iter().filter(|op| *op != "Reshape").collect::<Vec<_>>(), ["Attention"]);
        assert_eq!(operators.len(), if joined { 1 } else { 4 });
        check("attention", &model, 2e-6);
    }
}

#[test]
fn what_follows_a_product_or_a_convolution_is_part_of_it() {
    let mut model = Model::new(17);
    let (x, z) = (model.input(noise(&[2, 7, 12], 1)), model.input(noise(&[2, 7, 8], 2)));
    let (w, b) = (model.weight(noise(&[12, 8], 3)), model.weight(noise(&[8], 4)));
    let y = model.node("MatMul", &[], &[x, w]);
    let y = model.node("Add", &[], &[b, y]);
    let y = model.node("Add", &[], &[y, z]);
    let y = model.node("Relu", &[], &[y]);
    model.output(y);
    assert_eq!(operators(&model), ["FusedMatMul"]);
    check("product", &model, 2e-6);

    let mut model = Model::new(17);
    let (x, z) = (model.input(noise(&[2, 5, 6, 6], 1)), model.input(noise(&[2, 4, 1, 1], 2)));
    let (w, b) = (model.weight(noise(&[4, 5, 3, 3], 3)), model.weight(noise(&[4], 4)));
    let y = model.node("Conv", &[("pads", Attribute::Ints(vec![1; 4]))], &[x, w, b]);
    let y = model.node("Add", &[], &[z, y]);
    let y = silu(&mut model, y);
    model.output(y);
    assert_eq!(operators(&model), ["FusedConv"]);
    check("convolution", &model, 2e-6);

    let mut model = Model::new(17);
    let x = model.input(noise(&[3, 16], 1));
    let (w, b) = (model.weight(noise(&[8, 16], 2)), model.weight(noise(&[8], 3)));
    let y = model.node("Gemm", &[("transB", Attribute::Int(1))], &[x, w, b]);
    let y = silu(&mut model, y);
    let halves = model.node_n("Split", &[("axis", Attribute::Int(-1))], &[Some(y)], 2);
    let gate = gelu(&mut model, halves[1], 0);
    let y = model.node("Mul", &[], &[halves[0], gate]);
    model.output(y);
    assert_eq!(operators(&model), ["FusedMatMul", "GLU"]);
    check("gated", &model, 2e-6);
}

#[test]
fn inverted_residuals_have_their_channels_last() {
    let clip = |model: &mut Model, x| {
        let [low, high] = [0.0f32, 0.5].map(|bound| model.constant(Tensor::scalar(bound)));
        model.node("Clip", &[], &[x, low, high])
    };
    // A depth of whole lanes and another one. Computed weights are packed in every run.
    for (channels, stored) in [(48, true), (20, true), (20, false)] {
        let mut model = Model::new(17);
        let image = model.input(noise(&[2, 3, 17, 21], 1));
        let filters = |model: &mut Model, shape: &[usize], seed| match stored {
            true => model.weight(noise(shape, seed)),
            false => model.input(noise(shape, seed)),
        };
        let stem = filters(&mut model, &[8, 3, 3, 3], 6);
        let expand = filters(&mut model, &[channels, 8, 1, 1], 2);
        let filter = filters(&mut model, &[channels, 1, 3, 3], 3);
        let project = filters(&mut model, &[8, channels, 1, 1], 4);
        let bias = model.weight(noise(&[channels], 5));
        let halved = [("pads", Attribute::Ints(vec![1; 4])), ("strides", Attribute::Ints(vec![2; 2]))];
        let x = model.node("Conv", &halved, &[image, stem]);
        let y = model.node("Conv", &[], &[x, expand, bias]);
        let y = clip(&mut model, y);
        let depthwise = [("pads", Attribute::Ints(vec![1; 4])), ("group", Attribute::Int(channels as i64))];
        let y = model.node("Conv", &depthwise, &[y, filter, bias]);
        let y = clip(&mut model, y);
        let y = model.node("Conv", &[], &[y, project]);
        let y = model.node("Add", &[], &[y, x]);
        model.output(y);
        let expected = ["Transpose", "NhwcConv", "NhwcConv", "NhwcConv", "NhwcConv", "Transpose"];
        assert_eq!(operators(&model), expected);
        assert_eq!(model.host_operators().len(), 0);
        check("inverted residual", &model, 2e-6);
    }
}

#[test]
fn means_of_images_with_channels_last_are_not_transposed() {
    for (channels, side) in [(40, 7), (150, 3), (1, 4)] {
        let mut model = Model::new(17);
        let x = model.input(noise(&[2, side, side + 1, channels], 1));
        let x = model.node("Transpose", &[("perm", Attribute::Ints(vec![0, 3, 1, 2]))], &[x]);
        let y = model.node("GlobalAveragePool", &[], &[x]);
        model.output(y);
        assert_eq!(model.host_operators().len(), 0);
        check("mean", &model, 1e-6);
    }
}

#[test]
fn rms_norm_is_one_operation() {
    let mut model = Model::new(17);
    let x = model.input(noise(&[3, 5, 40], 1));
    let [two, epsilon] = [2.0, 1e-6].map(|v: f32| model.constant(Tensor::scalar(v)));
    let w = model.weight(noise(&[40], 2));
    let square = model.node("Pow", &[], &[x, two]);
    let mean = model.node("ReduceMean", &[("axes", Attribute::Ints(vec![-1]))], &[square]);
    let sum = model.node("Add", &[], &[mean, epsilon]);
    let root = model.node("Sqrt", &[], &[sum]);
    let y = model.node("Div", &[], &[x, root]);
    let y = model.node("Mul", &[], &[w, y]);
    model.output(y);
    assert_eq!(operators(&model), ["RMSNormalization"]);
    check("rms norm", &model, 2e-6);
}

#[test]
fn half_precision_is_not_searched_for_infinities() {
    let mut model = Model::new(17);
    let values = [1.0, -70.5, 65504.0, -65504.0, 0.25, 3.0].map(f16::from_f32);
    let x = model.input(Tensor::from_elements(vec![2, 3], &values).unwrap());
    let to = |dtype: DType| [("to", Attribute::Int(dtype as i64))];
    let wide = model.node("Cast", &to(DType::F64), &[x]);
    let infinite = model.node("IsInf", &[], &[wide]);
    let numbers = model.node("Cast", &to(DType::I64), &[infinite]);
    let count = model.node("ReduceSum", &[("keepdims", Attribute::Int(0))], &[numbers]);
    let zero = model.constant(Tensor::scalar(0i64));
    let any = model.node("Greater", &[], &[count, zero]);
    let [less, limit] = [64504.0, 65504.0].map(|v: f32| model.constant(Tensor::scalar(v)));
    let bound = model.node("Where", &[], &[any, less, limit]);
    let low = model.node("Neg", &[], &[bound]);
    let (low, high) =
        (model.node("Cast", &to(DType::F16), &[low]), model.node("Cast", &to(DType::F16), &[bound]));
    let y = model.node("Clip", &[], &[x, low, high]);
    model.output(y);
    assert_eq!(operators(&model), ["Clip"]);
    check("clamp", &model, 0.0);
}

/// A residual block of a VAE's decoder, which halves the channels.
fn shrinking_block(channels: usize, side: usize) -> Model {
    let kernel = |size: i64| {
        [("kernel_shape", Attribute::Ints(vec![size; 2])), ("pads", Attribute::Ints(vec![size / 2; 4]))]
    };
    let mut model = Model::new(17);
    let picture = model.input(noise(&[1, 4, side, side], 1));
    let w = model.weight(noise(&[channels, 4, 3, 3], 2));
    let x = model.node("Conv", &kernel(3), &[picture, w]);
    let normed = group_norm(&mut model, x, &[1, channels, side, side], 4);
    let active = silu(&mut model, normed);
    let w = model.weight(noise(&[channels / 2, channels, 3, 3], 3));
    let y = model.node("Conv", &kernel(3), &[active, w]);
    let normed = group_norm(&mut model, y, &[1, channels / 2, side, side], 4);
    let active = silu(&mut model, normed);
    let w = model.weight(noise(&[channels / 2, channels / 2, 3, 3], 4));
    let y = model.node("Conv", &kernel(3), &[active, w]);
    let w = model.weight(noise(&[channels / 2, channels, 1, 1], 5));
    let shortcut = model.node("Conv", &kernel(1), &[x, w]);
    let y = model.node("Add", &[], &[shortcut, y]);
    model.output(y);
    model
}

#[test]
fn norms_are_written_over_what_nobody_needs_any_more() {
    let (channels, side) = (16, 24);
    let (model, widest) = (shrinking_block(channels, side), 4 * channels * side * side);
    check("a residual block", &model, 1e-5);
    let engine = build(&model, &spec(Precision::Fp32)).unwrap();
    let mut session = engine.session(&model, &NoHost).unwrap();
    run(&mut *session, &model.feeds).unwrap();
    // The widest tensor, and two of half its size for the shortcut and the convolution. The norm runs in place.
    let activations = session.memory().unwrap().activations.unwrap() as usize;
    let picture = widest / 4;
    assert!(activations <= 2 * widest + picture + 4096, "{activations} bytes, the widest tensor is {widest}");
}
