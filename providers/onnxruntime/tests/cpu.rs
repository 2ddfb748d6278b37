//! The provider with a real ONNX Runtime.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{
    BuildSpec, Compatibility, DType, DeviceKind, ErrorCode, NoHost, Precision, Provider, TensorView, VecSink,
    WeightUpdate,
};
use sdrun_provider_onnxruntime::OnnxRuntime;
use std::sync::OnceLock;
use testing::*;

fn provider() -> &'static OnnxRuntime {
    static PROVIDER: OnceLock<OnnxRuntime> = OnceLock::new();
    PROVIDER.get_or_init(|| {
        let dir = runtime_dir("SDRUN_ONNXRUNTIME_DIR");
        OnnxRuntime.init(&config(Some(&dir), &std::env::temp_dir()), &NoHost).unwrap();
        OnnxRuntime
    })
}

fn fp32() -> BuildSpec {
    spec(Precision::Fp32)
}

#[test]
fn the_cpu_is_described() {
    let devices = provider().devices().unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!((devices[0].id.as_str(), devices[0].kind), ("cpu", DeviceKind::Cpu));
    assert!(!devices[0].name.is_empty() && !devices[0].class.is_empty());
    let capabilities = provider().capabilities("cpu").unwrap();
    assert_eq!(capabilities.precisions, [Precision::Fp32]);
    assert!(!capabilities.bake && capabilities.dynamic_shapes);
    assert_eq!(failure(provider().capabilities("gpu")).code, ErrorCode::NotFound);
}

#[test]
fn fp32_is_fp32() {
    let weights = perceptron_weights(1);
    let x = noise(9, 3 * 64);
    let mut session = session(provider(), &perceptron(), &fp32(), &weights).unwrap();
    let y = run(&mut *session, &[3, 64], &x).unwrap();
    assert!(error_of(&y, &perceptron_reference(&weights, &x)) < 1e-6);
    assert_eq!(y, run(&mut *session, &[3, 64], &x).unwrap());
}

#[test]
fn weights_are_not_needed_after_the_session_is_made() {
    // Ways of use that ONNX Runtime treats differently: packed (MatMul), kept unchanged (Gather, Add), folded with
    // other weights (e + d), and small.
    let model = Model::default()
        .input("i", DType::I64, &[3])
        .input("x", DType::F32, &[1, 64])
        .output("rows", DType::F32, &[3, 500])
        .output("sums", DType::F32, &[3, 500])
        .output("product", DType::F32, &[1, 64])
        .weight("e", DType::F32, &[100, 500])
        .weight("d", DType::F32, &[100, 500])
        .weight("w", DType::F32, &[64, 64])
        .weight("small", DType::F32, &[3, 1])
        .node("Gather", &["e", "i"], &["gathered"])
        .node("Add", &["gathered", "small"], &["rows"])
        .node("Add", &["e", "d"], &["ed"])
        .node("Gather", &["ed", "i"], &["sums"])
        .node("MatMul", &["x", "w"], &["product"])
        .bytes();
    let (e, d, w) = (noise(1, 50_000), noise(2, 50_000), noise(3, 64 * 64));
    let mut weights = Source::default()
        .with("e", &[100, 500], &e)
        .with("d", &[100, 500], &d)
        .with("w", &[64, 64], &w)
        .with("small", &[3, 1], &[10.0, 20.0, 30.0]);
    let mut session = session(provider(), &model, &fp32(), &weights).unwrap();
    // Overwrite the memory that was lent.
    for stored in weights.0.values_mut() {
        stored.data.fill(0x42);
    }
    let indices: Vec<u8> = [5i64, 0, 99].iter().flat_map(|i| i.to_le_bytes()).collect();
    let x = noise(4, 64);
    let (x_bytes, mut sink) = (bytes(&x), VecSink::default());
    let inputs = [
        TensorView { dtype: DType::I64, shape: &[3], data: &indices },
        TensorView { dtype: DType::F32, shape: &[1, 64], data: &x_bytes },
    ];
    session.run(&inputs, &mut sink, &NoHost).unwrap();
    let row = |table: &[f32], i: usize| table[i * 500..(i + 1) * 500].to_vec();
    let rows: Vec<f32> = [(5, 10.0), (0, 20.0), (99, 30.0)]
        .iter()
        .flat_map(|(i, s)| row(&e, *i).into_iter().map(move |v| v + s))
        .collect();
    let sums: Vec<f32> = [5, 0, 99]
        .iter()
        .flat_map(|i| row(&e, *i).into_iter().zip(row(&d, *i)).map(|(a, b)| a + b))
        .collect();
    assert_eq!(floats(sink.get(0).unwrap().data), rows);
    assert_eq!(floats(sink.get(1).unwrap().data), sums);
    let product = affine(&widen(&x), &w, &[0.0; 64], 64);
    assert!(error_of(&floats(sink.get(2).unwrap().data), &product) < 1e-6);
}

#[test]
fn every_offered_element_type_passes_through() {
    for dtype in provider().capabilities("cpu").unwrap().io_dtypes {
        let model = Model::default().input("x", dtype, &[2, 3]).output("y", dtype, &[3, 2]).node(
            "Reshape",
            &["x", "s"],
            &["y"],
        );
        let shape: Vec<u8> = [3i64, 2].iter().flat_map(|d| d.to_le_bytes()).collect();
        let model = model.constant("s", DType::I64, &[2], shape).bytes();
        let data: Vec<u8> =
            (0..6 * dtype.size()).map(|i| if dtype == DType::Bool { i as u8 & 1 } else { i as u8 }).collect();
        let mut session = session(provider(), &model, &fp32(), &Source::default())
            .unwrap_or_else(|e| panic!("{dtype}: {e}"));
        let mut sink = VecSink::default();
        session.run(&[TensorView { dtype, shape: &[2, 3], data: &data }], &mut sink, &NoHost).unwrap();
        let y = sink.get(0).unwrap();
        assert_eq!((y.dtype, y.shape), (dtype, &[3, 2][..]));
        assert_eq!(y.data, data, "{dtype}");
    }
}

#[test]
fn an_fp16_graph_runs_in_its_own_types() {
    let model = Model::default()
        .input("x", DType::F16, &[2, 8])
        .output("y", DType::F16, &[2, 4])
        .weight("w", DType::F16, &[8, 4])
        .node("MatMul", &["x", "w"], &["y"])
        .bytes();
    let halves =
        |values: &[f32]| -> Vec<half::f16> { values.iter().map(|v| half::f16::from_f32(*v)).collect() };
    let raw = |values: &[half::f16]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
    let (x, w) = (halves(&noise(1, 16)), halves(&noise(2, 32)));
    let stored = Stored { dtype: DType::F16, shape: vec![8, 4], data: raw(&w), file: None };
    let weights = Source([("w".to_string(), stored)].into());
    let mut session = session(provider(), &model, &fp32(), &weights).unwrap();
    let data = raw(&x);
    let mut sink = VecSink::default();
    session
        .run(&[TensorView { dtype: DType::F16, shape: &[2, 8], data: &data }], &mut sink, &NoHost)
        .unwrap();
    let y: Vec<f32> = sink
        .get(0)
        .unwrap()
        .data
        .chunks_exact(2)
        .map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f32())
        .collect();
    let widened: Vec<f32> = w.iter().map(|v| v.to_f32()).collect();
    let x: Vec<f64> = x.iter().map(|v| v.to_f64()).collect();
    assert!(error_of(&y, &affine(&x, &widened, &[0.0; 4], 8)) < 2e-3);
}

#[test]
fn refit_there_and_back_is_exact() {
    let (a, b) = (perceptron_weights(1), perceptron_weights(100));
    let x = noise(9, 3 * 64);
    let mut session = session(provider(), &perceptron(), &fp32(), &a).unwrap();
    let first = run(&mut *session, &[3, 64], &x).unwrap();
    let report = session.refit(&["w1", "b1", "w2", "b2"], &b, &NoHost).unwrap();
    assert_eq!((report.method, report.tensors), (WeightUpdate::Rebuild, 4));
    assert_eq!(report.bytes, 4 * (64 * 96 + 96 + 96 * 8 + 8));
    assert!(error_of(&run(&mut *session, &[3, 64], &x).unwrap(), &perceptron_reference(&b, &x)) < 1e-6);
    session.refit(&["w1"], &a, &NoHost).unwrap();
    assert_eq!(run(&mut *session, &[3, 64], &x).unwrap(), first);
}

#[test]
fn a_failing_refit_keeps_the_former_weights() {
    let weights = perceptron_weights(1);
    let x = noise(9, 3 * 64);
    let mut session = session(provider(), &perceptron(), &fp32(), &weights).unwrap();
    let before = run(&mut *session, &[3, 64], &x).unwrap();
    let mut incomplete = perceptron_weights(2);
    incomplete.0.remove("b2");
    assert_eq!(failure(session.refit(&["w1", "b2"], &incomplete, &NoHost)).code, ErrorCode::NotFound);
    let stopped = session.refit(&["w1"], &perceptron_weights(2), &Stop("create session"));
    assert_eq!(failure(stopped).code, ErrorCode::Cancelled);
    assert_eq!(run(&mut *session, &[3, 64], &x).unwrap(), before);
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let good = perceptron_weights(1);
    let engine = engine(provider(), &perceptron(), &fp32(), &Source::default()).unwrap();
    let mut missing = good.clone();
    missing.0.remove("w2");
    let error = failure(engine.session(&missing, &NoHost));
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.message.contains("w2"));
    let mut wrong = good.clone();
    let w2 = wrong.0.get_mut("w2").unwrap();
    (w2.dtype, w2.shape) = (DType::F16, vec![192, 8]);
    let error = failure(engine.session(&wrong, &NoHost));
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("`w2`") && error.message.contains("f16"), "{error}");
    engine.session(&good, &NoHost).unwrap();
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let weights = perceptron_weights(1);
    let mut session = session(provider(), &perceptron(), &fp32(), &weights).unwrap();
    let data = bytes(&noise(9, 3 * 64));
    let mut sink = VecSink::default();
    let view = |dtype, shape: &'static [usize]| TensorView { dtype, shape, data: &data };
    for inputs in [
        vec![],
        vec![view(DType::F32, &[3, 64]), view(DType::F32, &[3, 64])],
        vec![view(DType::I32, &[3, 64])],
        vec![view(DType::F32, &[3, 63])],
        vec![view(DType::F32, &[64, 3])],
    ] {
        let error = failure(session.run(&inputs, &mut sink, &NoHost));
        assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
    }
    let inputs = [view(DType::F32, &[3, 64])];
    assert_eq!(failure(session.run(&inputs, &mut FullSink, &NoHost)).code, ErrorCode::ResourceExhausted);
    session.run(&inputs, &mut sink, &NoHost).unwrap();
}

#[test]
fn open_dimensions_take_any_size() {
    let model = Model::default()
        .input("x", DType::F32, &[-1, 4])
        .output("y", DType::F32, &[-1, 2])
        .weight("w", DType::F32, &[4, 2])
        .node("MatMul", &["x", "w"], &["y"])
        .bytes();
    let w = noise(3, 8);
    let weights = Source::default().with("w", &[4, 2], &w);
    let mut session = session(provider(), &model, &fp32(), &weights).unwrap();
    for rows in [1, 5, 2, 5] {
        let x = noise(rows as u32, rows * 4);
        let y = run(&mut *session, &[rows, 4], &x).unwrap();
        assert!(error_of(&y, &affine(&widen(&x), &w, &[0.0, 0.0], 4)) < 1e-6);
    }
}

#[test]
fn a_wrongly_stated_output_shape_is_an_error() {
    // The output size, the number of ones in x, is known only at run time.
    let model = Model::default()
        .input("x", DType::F32, &[4])
        .output("y", DType::I64, &[1, 3])
        .node("NonZero", &["x"], &["y"])
        .bytes();
    let mut session = session(provider(), &model, &fp32(), &Source::default()).unwrap();
    let mut sink = VecSink::default();
    let input = |values: &[f32]| bytes(values);
    let (two, three) = (input(&[1.0, 0.0, 1.0, 0.0]), input(&[1.0, 0.0, 1.0, 1.0]));
    let view = |data| [TensorView { dtype: DType::F32, shape: &[4], data }];
    assert!(failure(session.run(&view(&two), &mut sink, &NoHost)).message.len() > 20);
    session.run(&view(&three), &mut sink, &NoHost).unwrap();
    let expected: Vec<u8> = [0i64, 2, 3].iter().flat_map(|i| i.to_le_bytes()).collect();
    assert_eq!(sink.get(0).unwrap().data, expected);
}

#[test]
fn an_engine_is_its_graph() {
    let weights = perceptron_weights(5);
    let x = noise(9, 3 * 64);
    let built = engine(provider(), &perceptron(), &fp32(), &Source::default()).unwrap();
    let expected = run(&mut *built.session(&weights, &NoHost).unwrap(), &[3, 64], &x).unwrap();
    let loaded = provider().load(&built.serialize().unwrap(), &fp32(), &NoHost).unwrap();
    assert_eq!(loaded.info(), built.info());
    assert_eq!(run(&mut *loaded.session(&weights, &NoHost).unwrap(), &[3, 64], &x).unwrap(), expected);
    assert_eq!(provider().check(&built.info().compatibility, "cpu").unwrap(), Compatibility::Optimal);
    assert!(provider().check("other", "cpu").is_err());
    assert!(provider().load(b"not an engine", &fp32(), &NoHost).is_err());
}

#[test]
fn an_unknown_operator_is_found_when_building() {
    let model = Model::default()
        .input("x", DType::F32, &[2])
        .output("y", DType::F32, &[2])
        .node("NoSuchOperator", &["x"], &["y"])
        .bytes();
    let error = failure(engine(provider(), &model, &fp32(), &Source::default()));
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("NoSuchOperator"), "{error}");
}

#[test]
fn an_attribute_of_a_newer_operator_is_unsupported() {
    let model = Model::default()
        .input("x", DType::F32, &[2])
        .output("y", DType::F32, &[2])
        .node_with("Relu", &["x"], &["y"], &[("no_such_attribute", 1)])
        .bytes();
    let error = failure(engine(provider(), &model, &fp32(), &Source::default()));
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("no_such_attribute"), "{error}");
}

#[test]
fn bad_specifications_are_refused() {
    let weights = Source::default();
    for (spec, part) in [
        (BuildSpec { threads: Some(0), ..fp32() }, "threads"),
        (BuildSpec { options: [("speed".to_string(), "11".to_string())].into(), ..fp32() }, "speed"),
        (BuildSpec { device: "gpu".into(), ..fp32() }, "gpu"),
        (BuildSpec { bake: true, ..fp32() }, "weights"),
        (spec(Precision::Bf16), "bf16"),
        (spec(Precision::Fp16), "fp16"),
    ] {
        let error = failure(engine(provider(), &perceptron(), &spec, &weights));
        assert!(error.message.contains(part), "{error}");
    }
    assert!(engine(provider(), b"no model", &fp32(), &weights).is_err());
}

#[test]
fn a_build_stops_between_phases() {
    let weights = perceptron_weights(1);
    let error = failure(provider().build(&perceptron(), &fp32(), &weights, &Stop("validate")));
    assert_eq!(error.code, ErrorCode::Cancelled);
    let engine = engine(provider(), &perceptron(), &fp32(), &weights).unwrap();
    for phase in ["take weights", "create session"] {
        let error = failure(engine.session(&weights, &Stop(phase)));
        assert_eq!(error.code, ErrorCode::Cancelled);
        assert!(error.message.contains(phase));
    }
}

#[test]
fn a_long_run_is_cancelled_and_the_session_lives_on() {
    // 60 products of 1024² matrices: several seconds of work on any machine.
    let n = 1024;
    let mut model = Model::default().input("x", DType::F32, &[n, n]).output("h60", DType::F32, &[n, n]);
    model = model.node("Softmax", &["x"], &["h0"]);
    for i in 0..60 {
        let (from, to) = (format!("h{i}"), format!("h{}", i + 1));
        model = model.node("MatMul", &[&from, &format!("t{i}")], &[&to]).node(
            "Softmax",
            &[&from],
            &[&format!("t{i}")],
        );
    }
    let mut session = session(provider(), &model.bytes(), &fp32(), &Source::default()).unwrap();
    let x = bytes(&noise(1, (n * n) as usize));
    let shape = [n as usize, n as usize];
    let input = [TensorView { dtype: DType::F32, shape: &shape, data: &x }];
    let mut sink = VecSink::default();
    let error = failure(session.run(&input, &mut sink, &Stop("")));
    assert_eq!(error.code, ErrorCode::Cancelled, "{error}");
    session.run(&input, &mut sink, &NoHost).unwrap();
    // Rows of products of row-stochastic matrices sum to one.
    let row: f32 = floats(&sink.get(0).unwrap().data[..4 * n as usize]).iter().sum();
    assert!((row - 1.0).abs() < 1e-3, "{row}");
}

#[test]
fn sessions_of_several_threads_do_not_disturb_each_other() {
    let engine = engine(provider(), &perceptron(), &fp32(), &Source::default()).unwrap();
    std::thread::scope(|scope| {
        for seed in [10, 20, 30] {
            let engine = &engine;
            scope.spawn(move || {
                let weights = perceptron_weights(seed);
                let mut session = engine.session(&weights, &NoHost).unwrap();
                for i in 0..20 {
                    let x = noise(seed + i, 3 * 64);
                    let y = run(&mut *session, &[3, 64], &x).unwrap();
                    assert!(error_of(&y, &perceptron_reference(&weights, &x)) < 1e-6);
                }
            });
        }
    });
}
