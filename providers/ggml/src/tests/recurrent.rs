//! Recurrent and quantized operators, against ONNX Runtime and against `sdrun_graph::eval`.

use super::{
    Model, build, check, compare, from, noise,
    operators::{Case, In, case, several},
    outputs, run, spec,
};
use In::{Absent, Constant, Fed, Weight};
use sdrun_abi::{NoHost, Precision};
use sdrun_graph::{Attribute, Tensor, ValueId, recurrent::MICROSOFT};
use std::collections::BTreeMap;

fn int(v: i64) -> Attribute {
    Attribute::Int(v)
}
fn text(v: &str) -> Attribute {
    Attribute::String(v.as_bytes().to_vec())
}
fn bytes(shape: &[usize], seed: u64) -> Tensor {
    from(shape, |i| (noise(&[i + 1], seed).elements::<f32>().unwrap()[i] * 128.0) as i64 as u8)
}
fn signed(shape: &[usize], seed: u64) -> Tensor {
    from(shape, |i| ((i as u64 * 37 + seed * 11) % 255) as u8 as i8)
}

/// Small weights, as at the start of training, so that rounding differences do not grow from step to step.
fn small(shape: &[usize], seed: u64) -> Tensor {
    let values: Vec<f32> = noise(shape, seed).elements().unwrap();
    from(shape, |i| values[i] / 8.0)
}

/// One case of every operator in the table, large enough to need several panels and tiles.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let both = ("direction", text("bidirectional"));
    let float = |op: &'static str, gates: usize, states: usize, attributes: &[(&str, Attribute)]| {
        let (steps, batch, size, hidden) = (3, 17, 9, 70);
        let mut inputs = vec![
            Fed(noise(&[steps, batch, size], 1)),
            Weight(small(&[2, gates * hidden, size], 2)),
            Weight(small(&[2, gates * hidden, hidden], 3)),
            Weight(noise(&[2, 2 * gates * hidden], 4)),
            Constant(from(&[batch], |i| (i % 4) as i32)),
        ];
        inputs.extend((0..states).map(|i| Fed(noise(&[2, batch, hidden], 5 + i as u64))));
        let hidden = ("hidden_size", int(hidden as i64));
        let attributes = [attributes, &[hidden, both.clone()]].concat();
        several(op, 14, &attributes, inputs, 1 + states)
    };
    cases.push(float("LSTM", 4, 2, &[]));
    cases.push(float("GRU", 3, 1, &[("linear_before_reset", int(1))]));
    cases.push(float("GRU", 3, 1, &[("linear_before_reset", int(0))]));
    cases.push(float("RNN", 1, 1, &[]));
    // The batch first, and computed weights.
    let inputs = vec![
        Fed(noise(&[2, 5, 4], 1)),
        Fed(noise(&[1, 12, 4], 2)),
        Fed(noise(&[1, 12, 3], 3)),
        Absent,
        Absent,
        Fed(noise(&[2, 1, 3], 4)),
    ];
    let attributes = [("hidden_size", int(3)), ("layout", int(1))];
    cases.push(several("LSTM", 14, &attributes, inputs, 3));

    let scales = |n: usize| Weight(from(&[2, n], |i| 0.001 + i as f32 / 1e5));
    let zeros = |n: usize| Constant(from(&[2, n], |_| 0i8));
    let quantized = vec![
        Fed(noise(&[3, 14, 9], 1)),
        Constant(signed(&[2, 9, 40], 2)),
        Constant(signed(&[2, 10, 40], 3)),
        Weight(noise(&[2, 80], 4)),
        Absent,
        Fed(noise(&[2, 14, 10], 5)),
        Fed(noise(&[2, 14, 10], 6)),
        Absent,
        scales(40),
        zeros(40),
        scales(40),
        zeros(40),
    ];
    let mut own = vec![several("DynamicQuantizeLSTM", 1, &[("hidden_size", int(10)), both], quantized, 3)];
    own.push(case(
        "DynamicQuantizeMatMul",
        1,
        &[],
        vec![
            Fed(noise(&[2, 3, 6], 1)),
            Constant(signed(&[6, 5], 2)),
            Weight(noise(&[5], 3)),
            Absent,
            Weight(noise(&[5], 4)),
        ],
    ));
    own.push(case(
        "MatMulIntegerToFloat",
        1,
        &[],
        vec![
            Fed(bytes(&[3, 6], 1)),
            Constant(signed(&[6, 5], 2)),
            Fed(noise(&[1], 3)),
            Weight(noise(&[5], 4)),
            Fed(bytes(&[1], 5)),
        ],
    ));
    for case in &mut own {
        case.model.graph.opsets = BTreeMap::from([(String::new(), 17), (MICROSOFT.to_owned(), 1)]);
        case.model.graph.nodes[0].domain = MICROSOFT.into();
    }
    cases.extend(own);

    let large = vec![
        Fed(bytes(&[130, 301], 1)),
        Constant(signed(&[301, 70], 2)),
        Fed(bytes(&[130], 3)),
        Constant(signed(&[70], 4)),
    ];
    cases.push(case("MatMulInteger", 10, &[], large));
    let batches = vec![
        Fed(bytes(&[2, 1, 4, 7], 1)),
        Fed(bytes(&[3, 7, 5], 2)),
        Fed(bytes(&[1], 3)),
        Fed(bytes(&[5], 4)),
    ];
    cases.push(case("MatMulInteger", 10, &[], batches));
    let filters = || Constant(signed(&[14, 3, 3, 3], 2));
    let image = || Fed(bytes(&[2, 6, 19, 21], 1));
    let window = [
        ("group", int(2)),
        ("pads", Attribute::Ints(vec![1, 2, 2, 1])),
        ("dilations", Attribute::Ints(vec![2, 1])),
    ];
    let strides = [&window[..], &[("strides", Attribute::Ints(vec![1, 2]))]].concat();
    for attributes in [&window[..], &strides] {
        let inputs = vec![image(), filters(), Fed(bytes(&[], 3)), Constant(signed(&[14], 4))];
        cases.push(case("ConvInteger", 10, attributes, inputs));
    }
    cases.push(case("ConvInteger", 10, &[], vec![Fed(signed(&[1, 5, 40], 1)), Fed(bytes(&[4, 5, 3], 2))]));
    let scale = |v: f32| Constant(Tensor::scalar(v));
    let inputs = vec![
        Fed(bytes(&[5, 9], 1)),
        scale(0.01),
        Fed(bytes(&[], 2)),
        Constant(signed(&[9, 40], 3)),
        scale(0.02),
        Constant(Tensor::scalar(3i8)),
        scale(0.9),
        Fed(bytes(&[], 4)),
    ];
    cases.push(case("QLinearMatMul", 10, &[], inputs));
    let inputs = vec![
        image(),
        scale(0.01),
        Fed(bytes(&[], 2)),
        filters(),
        Weight(from(&[14], |i| 0.01 + i as f32 / 500.0)),
        Constant(from(&[14], |_| 0i8)),
        scale(0.8),
        Fed(bytes(&[], 4)),
        Constant(from(&[14], |i| i as i32 * 100 - 600)),
    ];
    cases.push(case("QLinearConv", 10, &window, inputs));
    cases
}

/// Single nodes against the results of ONNX Runtime, which `tools/reference/operators.py` wrote.
#[test]
fn nodes_compute_what_the_reference_computes() {
    let cases: serde_json::Value =
        serde_json::from_str(include_str!("../../../../core/graph/testdata/reference.json")).unwrap();
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let mut model = Model::new(case["opset"].as_i64().unwrap());
        let domain = case["domain"].as_str().unwrap();
        model.graph.opsets.insert(domain.into(), if domain.is_empty() { model.graph.opset() } else { 1 });
        let list = |key: &str| case[key].as_array().unwrap().iter();
        let mut place = |value: &serde_json::Value| -> Option<ValueId> {
            (!value.is_null()).then(|| model.input(tensor(value)))
        };
        let inputs: Vec<Option<ValueId>> = list("inputs").map(&mut place).collect();
        let expected: Vec<Tensor> = list("outputs").map(tensor).collect();
        let attributes: Vec<(&str, Attribute)> = case["attributes"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| (&**name, attribute(value)))
            .collect();
        for id in model.node_n(case["op"].as_str().unwrap(), &attributes, &inputs, expected.len()) {
            model.output(id);
        }
        model.graph.nodes[0].domain = domain.into();
        assert!(model.host_operators().is_empty(), "{name} is left to the reference implementation");
        for threads in [1, 2] {
            let spec = sdrun_abi::BuildSpec { threads: Some(threads), ..spec(Precision::Fp32) };
            for (found, expected) in outputs(&model, &spec).iter().zip(&expected) {
                compare(name, found, expected, 2e-6);
            }
        }
    }
}

fn attribute(value: &serde_json::Value) -> Attribute {
    use serde_json::Value;
    let array = |list: &[Value]| match list {
        list if list.iter().all(Value::is_i64) => {
            Attribute::Ints(list.iter().map(|v| v.as_i64().unwrap()).collect())
        }
        list if list.iter().all(Value::is_string) => {
            Attribute::Strings(list.iter().map(|v| v.as_str().unwrap().as_bytes().to_vec()).collect())
        }
        list => Attribute::Floats(list.iter().map(|v| v.as_f64().unwrap() as f32).collect()),
    };
    match value {
        Value::Number(n) if n.is_i64() => int(n.as_i64().unwrap()),
        Value::Number(n) => Attribute::Float(n.as_f64().unwrap() as f32),
        Value::String(value) => text(value),
        Value::Array(list) => array(list),
        other => panic!("an attribute {other}"),
    }
}

fn tensor(value: &serde_json::Value) -> Tensor {
    let list = |key: &str| value[key].as_array().unwrap().iter();
    let shape: Vec<usize> = list("shape").map(|d| d.as_u64().unwrap() as usize).collect();
    let data: Vec<f64> = list("data").map(|v| v.as_f64().unwrap()).collect();
    match value["dtype"].as_str().unwrap() {
        "float32" => from(&shape, |i| data[i] as f32),
        "int32" => from(&shape, |i| data[i] as i32),
        "int8" => from(&shape, |i| data[i] as i8),
        "uint8" => from(&shape, |i| data[i] as u8),
        other => panic!("elements of type {other}"),
    }
}

#[test]
fn a_run_has_the_same_bits_on_any_number_of_threads() {
    for Case { op, model, .. } in cases() {
        let runs: Vec<Vec<Tensor>> = [1, 2, 5]
            .map(|threads| {
                outputs(&model, &sdrun_abi::BuildSpec { threads: Some(threads), ..spec(Precision::Fp32) })
            })
            .into();
        assert!(runs[0] == runs[1] && runs[0] == runs[2], "{op}");
    }
}

/// Weights behind reshapes, as exporters write them, are refitted in place.
#[test]
fn the_weights_of_a_recurrence_are_refitted() {
    let model = |seed: u64| {
        let mut model = Model::new(17);
        let x = model.input(noise(&[4, 2, 5], 1));
        let axes = model.constant(Tensor::from_i64s(&[0]));
        let weights: Vec<_> = [(&[24, 5][..], 2), (&[24, 6], 3), (&[48], 4)]
            .map(|(shape, at)| model.weight(noise(shape, seed + at)))
            .map(|w| model.node("Unsqueeze", &[], &[w, axes]))
            .into();
        let inputs: Vec<_> = [x].into_iter().chain(weights).map(Some).collect();
        for id in model.node_n("LSTM", &[("hidden_size", int(6))], &inputs, 3) {
            model.output(id);
        }
        model
    };
    let (a, b) = (model(10), model(20));
    check("LSTM with weights behind Unsqueeze", &a, 2e-6);
    let engine = build(&a, &spec(Precision::Fp32)).unwrap();
    let mut session = engine.session(&a, &NoHost).unwrap();
    let first = run(&mut *session, &a.feeds).unwrap();
    let names: Vec<&str> = a.weights.keys().map(|name| &**name).collect();
    session.refit(&names, &b, &NoHost).unwrap();
    for (found, expected) in run(&mut *session, &a.feeds).unwrap().iter().zip(b.reference()) {
        compare("after a refit", found, &expected, 2e-6);
    }
    session.refit(&names, &a, &NoHost).unwrap();
    assert_eq!(run(&mut *session, &a.feeds).unwrap(), first);
}

#[test]
fn low_precisions_store_weights_of_recurrences_narrowly() {
    for case in cases().into_iter().filter(|case| matches!(case.op, "LSTM" | "GRU" | "RNN")) {
        let exact = case.model.reference();
        for precision in [Precision::Fp16, Precision::Bf16] {
            let found = outputs(&case.model, &spec(precision));
            compare(case.op, &found[0], &exact[0], 3e-2);
        }
    }
}

#[test]
fn a_nan_stays_in_its_sequence() {
    let mut x: Vec<f32> = noise(&[3, 2, 4], 1).elements().unwrap();
    x[4 + 1] = f32::NAN;
    for (op, gates) in [("LSTM", 4), ("GRU", 3), ("RNN", 1)] {
        let inputs = vec![
            Fed(Tensor::from_elements(vec![3, 2, 4], &x).unwrap()),
            Weight(noise(&[1, gates * 5, 4], 2)),
            Weight(noise(&[1, gates * 5, 5], 3)),
        ];
        let Case { model, .. } = case(op, 17, &[("hidden_size", int(5))], inputs);
        let found = outputs(&model, &spec(Precision::Fp32))[0].to_f32s().unwrap();
        assert!(found.iter().enumerate().all(|(i, v)| v.is_nan() == (i / 5 % 2 == 1)), "{op}: {found:?}");
    }
}

#[test]
fn lengths_beyond_the_input_are_refused() {
    let inputs = vec![
        Fed(noise(&[3, 2, 4], 1)),
        Weight(noise(&[1, 5, 4], 2)),
        Weight(noise(&[1, 5, 5], 3)),
        Absent,
        Fed(from(&[2], |i| i as i32 * 4)),
    ];
    let Case { model, .. } = case("RNN", 17, &[("hidden_size", int(5))], inputs);
    let engine = build(&model, &spec(Precision::Fp32)).unwrap();
    let error = run(&mut *engine.session(&model, &NoHost).unwrap(), &model.feeds).unwrap_err();
    assert!(error.message.contains("sequence 1 has 4 steps, of at most 3"), "{error}");
}
