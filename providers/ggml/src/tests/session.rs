use super::{Model, build, compare, noise, provider, run, spec};
use sdrun_abi::{
    BuildSpec, DType, Error, Flow, Host, LogLevel, NoHost, Precision, Provider, Result, TakeRows, Weight,
    WeightSource, WeightUpdate,
};
use sdrun_graph::{Attribute, Dim, Tensor};
use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A graph that uses every form of weights, and one weight in two forms.
fn model(seed: u64) -> Model {
    let mut model = Model::new(17);
    let x = model.input(noise(&[1, 4, 6, 6], 1));
    let (filters, bias) = (model.weight(noise(&[20, 4, 3, 3], seed)), model.weight(noise(&[20], seed + 1)));
    let y = model.node("Conv", &[("pads", Attribute::Ints(vec![1; 4]))], &[x, filters, bias]);
    let matrix = model.weight(noise(&[6, 6], seed + 2));
    let y = model.node("MatMul", &[], &[y, matrix]);
    let y = model.node("Add", &[], &[y, matrix]);
    let scale = model.weight(noise(&[6], seed + 3));
    let y = model.node("LayerNormalization", &[], &[y, scale]);
    model.output(y);
    model
}

fn names(model: &Model) -> Vec<&str> {
    model.weights.keys().map(String::as_str).collect()
}

/// What a session will take is known before there are weights.
#[test]
fn memory_is_known_in_advance() {
    let mut wide = model(10);
    let mut x = wide.input(noise(&[48, 320], 2));
    for (seed, pair) in (20..).zip([320, 512, 256, 40].windows(2)) {
        let matrix = wide.weight(noise(&[pair[0], pair[1]], seed));
        x = wide.node("MatMul", &[], &[x, matrix]);
    }
    wide.output(x);
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16, Precision::Q8_0, Precision::Q4K] {
        let spec = BuildSpec { threads: Some(3), ..spec(precision) };
        let told = provider().assess(&wide.onnx(), &spec).unwrap().memory;
        let found = build(&wide, &spec).unwrap().session(&wide, &NoHost).unwrap().memory().unwrap();
        let (told_weights, weights) = (told.host_weights.unwrap(), found.weights.unwrap());
        // A cache line for each weight, and alignment.
        assert!(told_weights.abs_diff(weights) < 1024, "{precision}: {told_weights}, not {weights}");
        // With as much again for the scratch of each thread, because the network is so small.
        assert_eq!(told.host_activations.unwrap(), 4 * found.activations.unwrap(), "{precision}");
    }
    let mut open = model(10);
    let rows = open.graph.inputs[0];
    open.graph.values[rows.0 as usize].shape.as_mut().unwrap()[0] = Dim::Symbol("rows".into());
    let told = provider().assess(&open.onnx(), &spec(Precision::Fp32)).unwrap().memory;
    assert_eq!((told.host_weights, told.host_activations), (None, None));
}

/// A source that fails at one weight.
struct Broken<'a>(&'a Model, &'a str);

impl WeightSource for Broken<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        if name == self.1 { Err(Error::not_found(format!("no {name:?}"))) } else { self.0.get(name) }
    }
}

#[test]
fn refit_there_and_back_is_bit_identical() {
    let (a, b) = (model(10), model(20));
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
        let engine = build(&a, &spec(precision)).unwrap();
        let mut session = engine.session(&a, &NoHost).unwrap();
        let first = run(&mut *session, &a.feeds).unwrap();
        assert_eq!(run(&mut *session, &a.feeds).unwrap(), first, "the same session twice");
        let report = session.refit(&names(&b), &b, &NoHost).unwrap();
        assert_eq!((report.method, report.tensors), (WeightUpdate::InPlace, 4));
        let other = run(&mut *session, &a.feeds).unwrap();
        let fresh = run(&mut *engine.session(&b, &NoHost).unwrap(), &a.feeds).unwrap();
        assert_eq!(other, fresh, "refitted and fresh sessions agree");
        assert_ne!(other, first);
        session.refit(&names(&a), &a, &NoHost).unwrap();
        assert_eq!(run(&mut *session, &a.feeds).unwrap(), first, "{precision}: back again");
    }
    compare("B", &super::outputs(&b, &spec(Precision::Fp32))[0], &b.reference()[0], 1e-5);
}

#[test]
fn refit_of_one_weight_leaves_the_others() {
    let (a, b) = (model(10), model(20));
    let mut session = build(&a, &spec(Precision::Fp32)).unwrap().session(&a, &NoHost).unwrap();
    let name = names(&a)[2];
    session.refit(&[name], &b, &NoHost).unwrap();
    let mut mixed = a.clone();
    mixed.weights.insert(name.into(), b.weights[name].clone());
    compare("one weight", &run(&mut *session, &a.feeds).unwrap()[0], &mixed.reference()[0], 1e-5);
}

#[test]
fn a_failed_refit_changes_nothing() {
    let (a, b) = (model(10), model(20));
    let mut session = build(&a, &spec(Precision::Fp32)).unwrap().session(&a, &NoHost).unwrap();
    let before = run(&mut *session, &a.feeds).unwrap();
    let last = *names(&b).last().unwrap();
    let error = session.refit(&names(&b), &Broken(&b, last), &NoHost).unwrap_err();
    assert_eq!(error.code, sdrun_abi::ErrorCode::NotFound);
    assert_eq!(run(&mut *session, &a.feeds).unwrap(), before);
    let error = session.refit(&[names(&b)[0], "nobody"], &b, &NoHost).unwrap_err();
    assert!(error.message.contains("nobody"), "{error}");
    assert_eq!(run(&mut *session, &a.feeds).unwrap(), before);
}

/// A source that records how it is asked.
struct Asked<'a>(&'a Model, Mutex<Vec<&'static str>>);

impl WeightSource for Asked<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.1.lock().unwrap().push("get");
        self.0.get(name)
    }
    fn check(&self, _: &str) -> Result<()> {
        self.1.lock().unwrap().push("check");
        Ok(())
    }
}

#[test]
fn all_weights_are_checked_before_each_is_fetched_once() {
    let (a, b) = (model(10), model(20));
    let mut session = build(&a, &spec(Precision::Fp32)).unwrap().session(&a, &NoHost).unwrap();
    let source = Asked(&b, Mutex::default());
    let report = session.refit(&names(&b), &source, &NoHost).unwrap();
    assert_eq!(report.bytes, b.weights.values().map(|weight| weight.data().len() as u64).sum::<u64>());
    assert_eq!(source.1.into_inner().unwrap(), [["check"; 4], ["get"; 4]].concat());
    compare("B", &run(&mut *session, &a.feeds).unwrap()[0], &b.reference()[0], 1e-5);
}

/// A source that delivers the first `.1` of a weight's rows from row `.2` on, and counts such weights.
struct ByRows<'a>(&'a Model, usize, usize, AtomicUsize);

impl WeightSource for ByRows<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.0.get(name)
    }
    fn rows(&self, name: &str, transposed: bool, step: usize, take: TakeRows<'_>) -> Result<bool> {
        self.3.fetch_add(1, Ordering::Relaxed);
        let (shape, mut values) =
            (self.0.weights[name].shape().to_vec(), self.0.weights[name].to_f32s().unwrap());
        let rows = if transposed { shape[1] } else { shape[0] };
        let depth = values.len() / rows;
        if transposed {
            values = (0..rows * depth).map(|i| values[i % depth * rows + i / depth]).collect();
        }
        for (part, first) in
            values.chunks(step * depth).zip((self.2..).step_by(step)).take(self.1.div_ceil(step))
        {
            let bytes: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
            take(first, Weight::new(DType::F32, vec![part.len() / depth, depth], bytes)?)?;
        }
        Ok(true)
    }
}

#[test]
fn rows_are_packed_as_the_source_makes_them() {
    let mut model = Model::new(17);
    let x = model.input(noise(&[1, 4, 6, 10], 1));
    let filters = model.weight(noise(&[50, 4, 3, 3], 2));
    let y = model.node("Conv", &[("pads", Attribute::Ints(vec![1; 4]))], &[x, filters]);
    let matrix = model.weight(noise(&[10, 300], 3));
    let y = model.node("MatMul", &[], &[y, matrix]);
    let other = model.weight(noise(&[70, 300], 4));
    let shape = model.constant(Tensor::from_i64s(&[300, 300]));
    let y = model.node("Reshape", &[], &[y, shape]);
    let y = model.node("Gemm", &[("transB", Attribute::Int(1))], &[y, other]);
    model.output(y);
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16, Precision::Q8_0, Precision::Q4K] {
        let engine = build(&model, &spec(precision)).unwrap();
        let expected = run(&mut *engine.session(&model, &NoHost).unwrap(), &model.feeds).unwrap();
        let source = |rows, first| ByRows(&model, rows, first, AtomicUsize::new(0));
        let all = source(usize::MAX, 0);
        let mut session = engine.session(&all, &NoHost).unwrap();
        assert_eq!(run(&mut *session, &model.feeds).unwrap(), expected, "{precision}");
        assert!(all.3.into_inner() >= 2, "{precision}");
        for (source, message) in [
            (source(1, 0), "the source delivers"),
            (source(usize::MAX, 1), "the source skips from row 0 to row 1"),
        ] {
            let error = engine.session(&source, &NoHost).err().unwrap();
            assert!(error.message.contains(message), "{error}");
        }
    }
}

/// A source that delivers each weight once.
struct Once<'a>(&'a Model, Mutex<BTreeSet<String>>);

impl WeightSource for Once<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        match self.1.lock().unwrap().insert(name.to_string()) {
            true => self.0.get(name),
            false => Err(Error::not_found(format!("{name:?} is gone"))),
        }
    }
}

#[test]
fn weights_of_two_sets_are_never_run() {
    let (a, b) = (model(10), model(20));
    let mut session = build(&a, &spec(Precision::Fp32)).unwrap().session(&a, &NoHost).unwrap();
    let before = run(&mut *session, &a.feeds).unwrap();
    let error = session.refit(&names(&b), &Once(&b, Mutex::default()), &NoHost).unwrap_err();
    assert!(error.message.contains("is gone"), "{error}");
    let error = run(&mut *session, &a.feeds).unwrap_err();
    assert_eq!(error.code, sdrun_abi::ErrorCode::FailedPrecondition);
    assert!(error.message.contains("may be old or new"), "{error}");
    session.refit(&names(&a), &a, &NoHost).unwrap();
    assert_eq!(run(&mut *session, &a.feeds).unwrap(), before);
}

#[test]
fn weights_must_be_there_and_fit() {
    let mut a = model(10);
    // No node reads it.
    a.weight(noise(&[3], 4));
    let engine = build(&a, &spec(Precision::Fp32)).unwrap();
    for name in names(&a) {
        let error = engine.session(&Broken(&a, name), &NoHost).err().unwrap();
        assert_eq!(error.code, sdrun_abi::ErrorCode::NotFound, "{name}");
    }
    let mut wrong = a.clone();
    wrong.weights.insert(names(&a)[1].into(), noise(&[21], 1));
    let error = engine.session(&wrong, &NoHost).err().unwrap();
    assert!(error.message.contains("[21]") && error.message.contains("[20]"), "{error}");
}

#[test]
fn an_engine_survives_its_file() {
    let a = model(10);
    let engine = build(&a, &spec(Precision::Fp32)).unwrap();
    let payload = engine.serialize().unwrap();
    let loaded = provider().load(&payload, &spec(Precision::Fp32), &NoHost).unwrap();
    assert_eq!(loaded.info(), engine.info());
    let runs = [&engine, &loaded].map(|e| run(&mut *e.session(&a, &NoHost).unwrap(), &a.feeds).unwrap());
    assert_eq!(runs[0], runs[1]);
    assert_eq!(
        provider().check(&engine.info().compatibility, "cpu").unwrap(),
        sdrun_abi::Compatibility::Optimal
    );
}

#[test]
fn memory_is_what_the_weights_take() {
    // Large enough that the padding of AMX tiles does not matter.
    let mut a = Model::new(17);
    let x = a.input(noise(&[1, 96, 6, 6], 1));
    let (filters, matrix) = (a.weight(noise(&[64, 96, 3, 3], 2)), a.weight(noise(&[6, 64], 3)));
    let y = a.node("Conv", &[("pads", Attribute::Ints(vec![1; 4]))], &[x, filters]);
    let y = a.node("MatMul", &[], &[y, matrix]);
    a.output(y);
    let bytes = |precision| {
        let session = build(&a, &spec(precision)).unwrap().session(&a, &NoHost).unwrap();
        session.memory().unwrap().weights.unwrap()
    };
    let elements: u64 = a.weights.values().map(|t| t.len() as u64).sum();
    let (wide, narrow) = (bytes(Precision::Fp32), bytes(Precision::Bf16));
    // Panels are padded and every tensor is aligned.
    assert!((elements * 4..elements * 4 * 3).contains(&wide), "{wide} for {elements} elements");
    assert!(narrow < wide * 3 / 4, "{narrow} {wide}");
}

/// A host that cancels after some calls.
struct Impatient;

impl Host for Impatient {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Cancel
    }
    fn cancelled(&self) -> bool {
        true
    }
}

#[test]
fn everything_long_can_be_cancelled() {
    let a = model(10);
    let engine = build(&a, &spec(Precision::Fp32)).unwrap();
    assert_eq!(engine.session(&a, &Impatient).err().unwrap().code, sdrun_abi::ErrorCode::Cancelled);
    let mut session = engine.session(&a, &NoHost).unwrap();
    let before = run(&mut *session, &a.feeds).unwrap();
    let tensor = &a.feeds[0];
    let views = [sdrun_abi::TensorView { dtype: tensor.dtype(), shape: tensor.shape(), data: tensor.data() }];
    let error = session.run(&views, &mut sdrun_abi::VecSink::default(), &Impatient).unwrap_err();
    assert_eq!(error.code, sdrun_abi::ErrorCode::Cancelled);
    let error = session.refit(&names(&a), &model(20), &Impatient).unwrap_err();
    assert_eq!(error.code, sdrun_abi::ErrorCode::Cancelled);
    assert_eq!(run(&mut *session, &a.feeds).unwrap(), before, "usable after being cancelled");
}

#[test]
fn an_input_or_a_weight_can_be_an_output() {
    let mut model = Model::new(17);
    let x = model.input(noise(&[2, 3], 1));
    let w = model.weight(noise(&[3], 2));
    let shape = model.constant(Tensor::from_i64s(&[3, 2]));
    let view = model.node("Reshape", &[], &[x, shape]);
    // The result could reuse the memory of the input.
    let y = model.node("Exp", &[], &[x]);
    for id in [x, w, view, y] {
        model.output(id);
    }
    super::check("pass-through", &model, 1e-6);
}
