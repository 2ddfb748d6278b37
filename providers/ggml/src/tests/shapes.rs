//! Engines with open dimensions.

use super::{Model, build, compare, noise, run, spec};
use sdrun_abi::{NoHost, Precision};
use sdrun_graph::{Attribute, Dim, Tensor};

/// A convolution, a reshape by computed sizes and a product with a matrix: shape arithmetic as exporters write it.
fn model(batch: usize, height: usize, width: usize) -> Model {
    let mut model = Model::new(17);
    let x = model.input(noise(&[batch, 4, height, width], 7));
    let (filters, bias) = (model.weight(noise(&[8, 4, 3, 3], 1)), model.weight(noise(&[8], 2)));
    let y = model.node("Conv", &[("pads", Attribute::Ints(vec![1; 4]))], &[x, filters, bias]);
    let shape = model.node("Shape", &[], &[y]);
    let zero = model.constant(Tensor::from_i64s(&[0]));
    let two = model.constant(Tensor::from_i64s(&[2]));
    let outer = model.node("Slice", &[], &[shape, zero, two]);
    let rest = model.constant(Tensor::from_i64s(&[-1]));
    let target = model.node("Concat", &[("axis", Attribute::Int(0))], &[outer, rest]);
    let rows = model.node("Reshape", &[], &[y, target]);
    let rows = model.node("Transpose", &[("perm", Attribute::Ints(vec![0, 2, 1]))], &[rows]);
    let matrix = model.weight(noise(&[8, 8], 3));
    let y = model.node("MatMul", &[], &[rows, matrix]);
    let row = model.weight(noise(&[8], 4));
    let y = model.node("Add", &[], &[y, row]);
    model.output(y);
    model
}

/// The same with open dimensions in its input.
fn open(mut model: Model) -> Model {
    let id = model.graph.inputs[0];
    let symbol = |name: &str| Dim::Symbol(name.into());
    model.graph.values[id.0 as usize].shape =
        Some(vec![symbol("batch"), Dim::Known(4), symbol("height"), symbol("width")]);
    model
}

#[test]
fn one_session_runs_every_shape() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let engine = build(&open(model(1, 8, 8)), &spec(precision)).unwrap();
        assert_eq!(engine.info().inputs[0].shape, [None, Some(4), None, None]);
        assert_eq!(engine.info().outputs[0].shape.len(), 3);
        let mut session = engine.session(&model(1, 8, 8), &NoHost).unwrap();
        let weights = session.memory().unwrap().weights.unwrap();
        // More shapes than are kept, and the first one again.
        for (batch, height, width) in
            [(1, 8, 8), (1, 6, 10), (3, 8, 8), (2, 1, 5), (1, 16, 16), (1, 12, 4), (1, 8, 8), (3, 8, 8)]
        {
            let fixed = model(batch, height, width);
            let found = run(&mut *session, &fixed.feeds).unwrap();
            let alone = super::outputs(&fixed, &spec(precision));
            assert_eq!(found, alone, "as in an engine for this shape alone");
            let tolerance = if precision == Precision::Fp32 { 1e-5 } else { 2e-2 };
            compare(&format!("{batch} {height} {width}"), &found[0], &fixed.reference()[0], tolerance);
        }
        let after = session.memory().unwrap().weights.unwrap();
        assert!(after < weights + 4096, "weights are not kept once for each shape: {weights} {after}");
    }
}

#[test]
fn a_refit_reaches_every_shape() {
    let (small, large) = (model(1, 4, 4), model(2, 6, 6));
    let mut session =
        build(&open(model(1, 4, 4)), &spec(Precision::Fp32)).unwrap().session(&small, &NoHost).unwrap();
    for fixed in [&small, &large] {
        run(&mut *session, &fixed.feeds).unwrap();
    }
    let change = |mut model: Model| {
        for (i, tensor) in model.weights.values_mut().enumerate() {
            *tensor = noise(tensor.shape(), 40 + i as u64);
        }
        model
    };
    let (small, large) = (change(small), change(large));
    let names: Vec<&str> = small.weights.keys().map(String::as_str).collect();
    session.refit(&names, &small, &NoHost).unwrap();
    for fixed in [&small, &large] {
        let found = run(&mut *session, &fixed.feeds).unwrap();
        compare("refitted", &found[0], &fixed.reference()[0], 1e-5);
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let mut session = build(&open(model(1, 4, 4)), &spec(Precision::Fp32))
        .unwrap()
        .session(&model(1, 4, 4), &NoHost)
        .unwrap();
    let error = run(&mut *session, &[noise(&[1, 5, 4, 4], 1)]).unwrap_err();
    assert!(error.message.contains("[1, 5, 4, 4]"), "{error}");
    let error = run(&mut *session, &[noise(&[1, 4, 0, 4], 1)]).unwrap_err();
    assert!(error.message.contains("[1, 4, 0, 4]") && error.message.contains("Conv"), "{error}");
    let good = model(1, 4, 4);
    compare("afterwards", &run(&mut *session, &good.feeds).unwrap()[0], &good.reference()[0], 1e-5);
}
