//! Weights in unusual places of exported models: inside If and Loop, as bytes, in batch normalizations. Every provider must
//! compute with them and replace them. This file computes the expected values itself.

#![allow(clippy::unwrap_used)]

use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Model, Shapes, Tensors,
    abi::{DType, NoHost},
    graph::proto::{GraphProto, NodeProto, TensorProto},
};
use sdrun_tests::{
    lab::{ALL, Lab, device_of},
    onnx::{body, floats, ints, node, noise, stored, typed, write},
};

/// Two models that differ only in the values of their weights, with their inputs and expected outputs.
struct Pair {
    models: [Model; 2],
    weights: Vec<&'static str>,
    runs: Vec<(Tensors, [Vec<f32>; 2])>,
    tolerance: f32,
}

/// Runs every provider with the weights of the first model, refits it to those of the second, and back.
fn every_provider_computes_and_refits(pair: &Pair) {
    let Pair { models: [a, b], weights, runs, tolerance } = pair;
    let mut names: Vec<&str> = a.graph().weights().map(|(name, _)| name).collect();
    names.sort_unstable();
    assert_eq!(&names, weights);
    assert_eq!(a.graph().topology_hash(), b.graph().topology_hash(), "weights count in the topology");
    let lab = Lab::default();
    let mut problems = Vec::new();
    for id in ALL.iter().copied() {
        let provider = lab.open(id).unwrap();
        let mut options = BuildOptions::new(device_of(&provider).unwrap());
        options.cache = CachePolicy::Off;
        options.shapes = Shapes::new();
        let engine = provider.build(a, &options, &NoHost).unwrap_or_else(|e| panic!("{id}: {e}"));
        let mut session = engine.session(&a.weights(), &NoHost).unwrap_or_else(|e| panic!("{id}: {e}"));
        for (round, which) in [("built", 0), ("refitted", 1), ("refitted back", 0)] {
            if round != "built" {
                session.refit(&[a, b][which].weights(), &NoHost).unwrap_or_else(|e| panic!("{id}: {e}"));
            }
            for (number, (given, expected)) in runs.iter().enumerate() {
                let outputs = session.run(given, &NoHost).unwrap_or_else(|e| panic!("{id}: {e}"));
                let found: Vec<f32> =
                    outputs["y"].bytes().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                let expected = &expected[which];
                let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
                let worst = found.iter().zip(expected).fold(0f32, |m, (f, e)| m.max((f - e).abs()));
                if found.len() != expected.len() || worst.is_nan() || worst > tolerance * largest {
                    problems.push(format!("{id}, {round}, input {number}: off by {worst} of {largest}"));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

fn f32s(values: &[f32], shape: &[usize]) -> HostTensor {
    HostTensor::from_f32(shape.to_vec(), values).unwrap()
}

fn flag(value: bool) -> HostTensor {
    HostTensor::from_bytes(DType::Bool, vec![], &[u8::from(value)]).unwrap()
}

/// `x · w`, for x of `[rows, inner]`.
fn product(x: &[f32], w: &[f32], inner: usize, columns: usize) -> Vec<f32> {
    let sum = |row: &[f32], j: usize| row.iter().enumerate().map(|(k, v)| v * w[k * columns + j]).sum();
    x.chunks(inner).flat_map(|row| (0..columns).map(move |j| sum(row, j)).collect::<Vec<f32>>()).collect()
}

#[test]
fn weights_inside_branches() {
    let folder = tempfile::tempdir().unwrap();
    let x = noise(3 * 64, 1);
    let values = |seed: u64| (noise(64 * 64, seed), noise(64 * 64, seed + 1), noise(64, seed + 2));
    let model = |name: &str, seed: u64| {
        let (then, otherwise, bias) = values(seed);
        let branch = |output: &str, initializer: Vec<TensorProto>, node: Vec<NodeProto>| GraphProto {
            node,
            initializer,
            output: vec![typed(output, DType::F32, &[3, 64])],
            ..Default::default()
        };
        // Both have a weight of the same name.
        let then = branch(
            "a",
            vec![floats("w", &[64, 64], &then), floats("bias", &[64], &bias)],
            vec![node("MatMul", &["x", "w"], "p", vec![]), node("Add", &["p", "bias"], "a", vec![])],
        );
        let otherwise = branch(
            "b",
            vec![floats("w", &[64, 64], &otherwise)],
            vec![node("MatMul", &["x", "w"], "b", vec![])],
        );
        let bodies = vec![body("then_branch", then), body("else_branch", otherwise)];
        write(
            &folder.path().join(name),
            GraphProto {
                node: vec![node("If", &["c"], "z", bodies), node("Neg", &["z"], "y", vec![])],
                input: vec![typed("c", DType::Bool, &[]), typed("x", DType::F32, &[3, 64])],
                output: vec![typed("y", DType::F32, &[3, 64])],
                ..Default::default()
            },
        )
    };
    let expected = |seed: u64, condition: bool| -> Vec<f32> {
        let (then, otherwise, bias) = values(seed);
        let z = product(&x, if condition { &then } else { &otherwise }, 64, 64);
        z.iter().enumerate().map(|(i, z)| -(z + if condition { bias[i % 64] } else { 0.0 })).collect()
    };
    let run = |condition: bool| {
        let given = [("c", flag(condition)), ("x", f32s(&x, &[3, 64]))];
        let given = given.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
        (given, [expected(10, condition), expected(20, condition)])
    };
    every_provider_computes_and_refits(&Pair {
        models: [model("a.onnx", 10), model("b.onnx", 20)],
        weights: vec!["bias", "w_1", "w_2"],
        runs: vec![run(true), run(false)],
        tolerance: 1e-5,
    });
}

#[test]
fn weights_inside_loops() {
    let folder = tempfile::tempdir().unwrap();
    let start = noise(2 * 32, 1);
    let model = |name: &str, seed: u64| {
        // state = state · w + start, where the start is a weight that the loop reads itself.
        let step = GraphProto {
            node: vec![
                node("MatMul", &["state", "w"], "p", vec![]),
                node("Add", &["p", "x"], "next", vec![]),
                node("Identity", &["go"], "still", vec![]),
            ],
            initializer: vec![floats("w", &[32, 32], &noise(32 * 32, seed))],
            input: vec![
                typed("i", DType::I64, &[]),
                typed("go", DType::Bool, &[]),
                typed("state", DType::F32, &[2, 32]),
            ],
            output: vec![typed("still", DType::Bool, &[]), typed("next", DType::F32, &[2, 32])],
            ..Default::default()
        };
        write(
            &folder.path().join(name),
            GraphProto {
                node: vec![node("Loop", &["count", "", "start"], "y", vec![body("body", step)])],
                initializer: vec![floats("start", &[2, 32], &noise(2 * 32, seed + 1))],
                input: vec![typed("count", DType::I64, &[]), typed("x", DType::F32, &[2, 32])],
                output: vec![typed("y", DType::F32, &[2, 32])],
                ..Default::default()
            },
        )
    };
    let expected = |seed: u64, count: i64| {
        let (w, mut state) = (noise(32 * 32, seed), noise(2 * 32, seed + 1));
        for _ in 0..count {
            state = product(&state, &w, 32, 32).iter().zip(&start).map(|(p, x)| p + x).collect();
        }
        state
    };
    let run = |count: i64| {
        let count_of = HostTensor::from_bytes(DType::I64, vec![], &count.to_le_bytes()).unwrap();
        let given = [("count", count_of), ("x", f32s(&start, &[2, 32]))];
        let given = given.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
        (given, [expected(10, count), expected(20, count)])
    };
    every_provider_computes_and_refits(&Pair {
        models: [model("a.onnx", 10), model("b.onnx", 20)],
        weights: vec!["start", "w"],
        runs: vec![run(3), run(1)],
        tolerance: 1e-5,
    });
}

#[test]
fn bytes_are_weights() {
    let folder = tempfile::tempdir().unwrap();
    let x = noise(5 * 64, 1);
    let scales: Vec<f32> = noise(48, 2).iter().map(|v| v.abs() / 100.0 + 0.01).collect();
    let signed = |seed: u64| -> Vec<i8> { noise(64 * 48, seed).iter().map(|v| (v * 127.0) as i8).collect() };
    let unsigned =
        |seed: u64| -> Vec<u8> { noise(48 * 64, seed).iter().map(|v| (v * 127.0 + 128.0) as u8).collect() };
    let model = |name: &str, seed: u64| {
        let first = signed(seed).iter().map(|v| v.to_le_bytes()[0]).collect();
        write(
            &folder.path().join(name),
            GraphProto {
                node: vec![
                    node("DequantizeLinear", &["w", "scales", "zeros"], "f", vec![]),
                    node("MatMul", &["x", "f"], "h", vec![]),
                    node("DequantizeLinear", &["v", "scale", "middle"], "g", vec![]),
                    node("MatMul", &["h", "g"], "y", vec![]),
                ],
                initializer: vec![
                    stored("w", DType::I8, &[64, 48], first),
                    floats("scales", &[48], &scales),
                    stored("zeros", DType::I8, &[48], vec![0; 48]),
                    stored("v", DType::U8, &[48, 64], unsigned(seed + 1)),
                    floats("scale", &[], &[0.02]),
                    stored("middle", DType::U8, &[], vec![128]),
                ],
                input: vec![typed("x", DType::F32, &[5, 64])],
                output: vec![typed("y", DType::F32, &[5, 64])],
                ..Default::default()
            },
        )
    };
    let expected = |seed: u64| {
        let w: Vec<f32> =
            signed(seed).iter().enumerate().map(|(i, v)| f32::from(*v) * scales[i % 48]).collect();
        let v: Vec<f32> = unsigned(seed + 1).iter().map(|v| (f32::from(*v) - 128.0) * 0.02).collect();
        product(&product(&x, &w, 64, 48), &v, 48, 64)
    };
    let given = [("x".to_string(), f32s(&x, &[5, 64]))].into();
    every_provider_computes_and_refits(&Pair {
        models: [model("a.onnx", 10), model("b.onnx", 20)],
        weights: vec!["scales", "v", "w"],
        runs: vec![(given, [expected(10), expected(20)])],
        tolerance: 1e-5,
    });
}

#[test]
fn batch_normalizations_after_convolutions() {
    let folder = tempfile::tempdir().unwrap();
    let (x, pixels) = (noise(2 * 8 * 36, 1), 36);
    let parameter = |seed: u64, which: u64| -> Vec<f32> {
        let values = noise(16, seed + which);
        // The variance is positive, and nearly 0 in some channels.
        if which == 4 { values.iter().map(|v| (v * v * v).abs()).collect() } else { values }
    };
    let filters = |seed: u64| noise(16 * 8, seed);
    const NAMES: [&str; 5] = ["bias", "gamma", "beta", "mean", "variance"];
    let model = |name: &str, seed: u64| {
        let mut initializer = vec![floats("w", &[16, 8, 1, 1], &filters(seed))];
        for (which, name) in NAMES.iter().enumerate() {
            initializer.push(floats(name, &[16], &parameter(seed, which as u64)));
        }
        let norm = ["c", "gamma", "beta", "mean", "variance"];
        write(
            &folder.path().join(name),
            GraphProto {
                node: vec![
                    node("Conv", &["x", "w", "bias"], "c", vec![ints("kernel_shape", &[1, 1])]),
                    node("BatchNormalization", &norm, "n", vec![]),
                    node("Relu", &["n"], "y", vec![]),
                ],
                initializer,
                input: vec![typed("x", DType::F32, &[2, 8, 6, 6])],
                output: vec![typed("y", DType::F32, &[2, 16, 6, 6])],
                ..Default::default()
            },
        )
    };
    let expected = |seed: u64| -> Vec<f32> {
        let w = filters(seed);
        let [bias, gamma, beta, mean, variance] = [0, 1, 2, 3, 4].map(|which| parameter(seed, which));
        let value = |at: usize| {
            let (image, channel, pixel) = (at / (16 * pixels), at / pixels % 16, at % pixels);
            let sum: f64 = (0..8)
                .map(|k| f64::from(w[channel * 8 + k]) * f64::from(x[(image * 8 + k) * pixels + pixel]))
                .sum();
            let of = |values: &[f32]| f64::from(values[channel]);
            let normed =
                (sum + of(&bias) - of(&mean)) / (of(&variance) + 1e-5).sqrt() * of(&gamma) + of(&beta);
            normed.max(0.0) as f32
        };
        (0..2 * 16 * pixels).map(value).collect()
    };
    let given = [("x".to_string(), f32s(&x, &[2, 8, 6, 6]))].into();
    every_provider_computes_and_refits(&Pair {
        models: [model("a.onnx", 10), model("b.onnx", 20)],
        weights: vec!["beta", "bias", "gamma", "mean", "variance", "w"],
        runs: vec![(given, [expected(10), expected(20)])],
        tolerance: 1e-5,
    });
}
