//! Tensors that are computed from weights when a session receives them, instead of in every run.

use super::{Model, build, check, compare, from, noise, run, spec};
use sdrun_abi::{Error, NoHost, Precision, Result, Weight, WeightSource};
use sdrun_graph::{Attribute, Tensor};
use std::sync::Mutex;

/// The weights of a model. Counts how often each is requested. If `without` names a weight, it is missing.
struct Watched<'a> {
    model: &'a Model,
    asked: Mutex<Vec<String>>,
    without: Option<&'a str>,
}

impl<'a> Watched<'a> {
    fn new(model: &'a Model) -> Self {
        Watched { model, asked: Mutex::default(), without: None }
    }
    /// The requests since the last call, sorted.
    fn asked(&self) -> Vec<String> {
        let mut asked = std::mem::take(&mut *self.asked.lock().unwrap());
        asked.sort();
        asked
    }
}

impl WeightSource for Watched<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.asked.lock().unwrap().push(name.into());
        match self.without {
            Some(without) if without == name => Err(Error::not_found(format!("no weight {name:?}"))),
            _ => self.model.get(name),
        }
    }
}

/// Relu(BatchNormalization(Conv(x))) twice; the second convolution has no bias.
fn normalized(seed: u64) -> Model {
    let mut model = Model::new(17);
    let mut x = model.input(noise(&[2, 8, 9, 7], 1));
    let pads = ("pads", Attribute::Ints(vec![1; 4]));
    for layer in 0..2 {
        let seed = seed + 10 * layer;
        let mut inputs = vec![x, model.weight(noise(&[8, 8, 3, 3], seed))];
        if layer == 0 {
            inputs.push(model.weight(noise(&[8], seed + 1)));
        }
        let y = model.node("Conv", std::slice::from_ref(&pads), &inputs);
        let variance = from(&[8], |i| 0.01 + (i as f32 + seed as f32) / 9.0);
        let mut inputs = vec![y];
        inputs.extend([2, 3, 4].map(|which| model.weight(noise(&[8], seed + which))));
        inputs.push(model.weight(variance));
        let y = model.node("BatchNormalization", &[("epsilon", Attribute::Float(1e-3))], &inputs);
        x = model.node("Relu", &[], &[y]);
    }
    model.output(x);
    model
}

fn names(model: &Model) -> Vec<&str> {
    model.weights.keys().map(String::as_str).collect()
}

#[test]
fn norms_are_folded_into_convolutions_and_refitted() {
    let (a, b) = (normalized(10), normalized(50));
    check("folded", &a, 1e-5);
    let engine = build(&a, &spec(Precision::Fp32)).unwrap();
    let mut listed: Vec<&str> = engine.info().weights.iter().map(|w| w.name.as_str()).collect();
    listed.sort_unstable();
    assert_eq!(listed, names(&a), "the engine has the weights of the graph");
    let source = Watched::new(&a);
    let mut session = engine.session(&source, &NoHost).unwrap();
    let first = run(&mut *session, &a.feeds).unwrap();
    let asked = source.asked();
    let filter = &names(&a).into_iter().rfind(|name| a.weights[*name].shape().len() == 4).unwrap();
    assert_eq!(
        asked.iter().filter(|name| name == filter).count(),
        1,
        "large weights are read once: {asked:?}"
    );

    // One parameter of a norm changes the tensor computed from it and the others.
    let mean = names(&a)[4];
    let mut mixed = a.clone();
    mixed.weights.insert(mean.into(), b.weights[mean].clone());
    let report = session.refit(&[mean], &mixed, &NoHost).unwrap();
    assert_eq!((report.tensors, report.bytes), (1, 32));
    let found = run(&mut *session, &a.feeds).unwrap();
    assert_ne!(found, first);
    compare("one parameter", &found[0], &mixed.reference()[0], 1e-5);
    assert_eq!(run(&mut *engine.session(&mixed, &NoHost).unwrap(), &a.feeds).unwrap(), found);

    // A missing weight is detected before anything changes, even if that weight itself did not change.
    let scale = names(&a)[2];
    let broken = Watched { without: Some(scale), ..Watched::new(&b) };
    session.refit(&[mean], &broken, &NoHost).unwrap_err();
    assert_eq!(run(&mut *session, &a.feeds).unwrap(), found);
    session.refit(&names(&a), &a, &NoHost).unwrap();
    assert_eq!(run(&mut *session, &a.feeds).unwrap(), first);
}

#[test]
fn folding_keeps_half_precision() {
    let mut model = normalized(10);
    let half = |tensor: &Tensor| tensor.to_float_type(sdrun_abi::DType::F16).unwrap();
    model.weights.values_mut().for_each(|tensor| *tensor = half(tensor));
    model.feeds.iter_mut().for_each(|tensor| *tensor = half(tensor));
    for value in model.graph.values.iter_mut().filter(|value| value.dtype.is_some()) {
        value.dtype = Some(sdrun_abi::DType::F16);
    }
    for initializer in model.graph.initializers.values_mut() {
        if let sdrun_graph::Initializer::Weight(weight) = initializer {
            weight.dtype = sdrun_abi::DType::F16;
        }
    }
    check("f16", &model, 4e-3);
}

/// `x · dequantised w + dequantised v`, where v has a scale for each column.
fn quantized(seed: i64) -> Model {
    let mut model = Model::new(17);
    let x = model.input(noise(&[3, 64], 1));
    let bytes = |shape: &[usize], seed: i64| from(shape, move |i| ((i as i64 * 37 + seed) % 251 - 125) as i8);
    let w = model.weight(bytes(&[64, 32], seed));
    let (scale, zero) = (model.constant(Tensor::scalar(0.01f32)), model.constant(Tensor::scalar(3i8)));
    let w = model.node("DequantizeLinear", &[], &[w, scale, zero]);
    let product = model.node("MatMul", &[], &[x, w]);
    let (v, scales) = (model.weight(bytes(&[3, 32], seed + 1)), model.weight(noise(&[32], seed as u64)));
    let v = model.node("DequantizeLinear", &[("axis", Attribute::Int(1))], &[v, scales]);
    let y = model.node("Add", &[], &[product, v]);
    model.output(y);
    model
}

#[test]
fn bytes_are_dequantized_once_and_refitted() {
    let (a, b) = (quantized(10), quantized(50));
    check("dequantized", &a, 1e-5);
    let engine = build(&a, &spec(Precision::Fp32)).unwrap();
    let mut session = engine.session(&a, &NoHost).unwrap();
    let source = Watched::new(&b);
    session.refit(&names(&b), &source, &NoHost).unwrap();
    compare("refitted", &run(&mut *session, &a.feeds).unwrap()[0], &b.reference()[0], 1e-5);
    // Only the scales change. The weights they scale are read again, because only the product is kept.
    source.asked();
    session.refit(&[names(&b)[2]], &source, &NoHost).unwrap();
    assert_eq!(source.asked(), [names(&b)[1], names(&b)[1], names(&b)[2], names(&b)[2]]);
}
