//! The provider on this machine's CPU, with a real OpenVINO.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{
    BuildSpec, Compatibility, DType, DeviceKind, EngineInfo, ErrorCode, Flow, Host, LogLevel, NoHost,
    Precision, Provider, TensorView, VecSink, WeightUpdate,
};
use sdrun_graph::{ExternalBase, Graph, infer::infer_shapes};
use sdrun_provider_openvino::OpenVino;
use serde_json::json;
use std::sync::OnceLock;
use testing::*;

fn provider() -> &'static OpenVino {
    static PROVIDER: OnceLock<(OpenVino, tempfile::TempDir)> = OnceLock::new();
    let (provider, _) = PROVIDER.get_or_init(|| {
        let temp = tempfile::tempdir().unwrap();
        let dir = runtime_dir("SDRUN_OPENVINO_DIR");
        OpenVino.init(&config(Some(&dir), temp.path()), &NoHost).unwrap();
        (OpenVino, temp)
    });
    provider
}

fn fp32() -> BuildSpec {
    spec(Precision::Fp32)
}

/// A model of this operator set as the host passes it on: with the types and shapes that it infers.
fn from_host(model: Model, opset: i64) -> Vec<u8> {
    let mut graph = Graph::from_bytes(model.bytes().into(), "test", ExternalBase::Stripped).unwrap();
    graph.opsets.insert(String::new(), opset);
    infer_shapes(&mut graph).unwrap();
    graph.to_onnx_stripped().unwrap()
}

#[test]
fn the_cpu_is_described() {
    let devices = provider().devices().unwrap();
    let cpu = devices.iter().find(|d| d.id == "cpu").unwrap();
    assert_eq!(cpu.kind, DeviceKind::Cpu);
    assert!(!cpu.name.is_empty() && !cpu.class.is_empty(), "{cpu:?}");
    assert!(devices.iter().enumerate().all(|(i, d)| d.index == i));
    let capabilities = provider().capabilities("cpu").unwrap();
    assert_eq!(capabilities.precisions[0], Precision::Fp32);
    assert_eq!(capabilities.weight_update, WeightUpdate::Rebuild);
    assert!(capabilities.bake && capabilities.dynamic_shapes);
    let error = failure(provider().capabilities("gpu.99"));
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.hint.unwrap().to_string().contains("cpu"));
}

#[test]
fn fp32_is_fp32() {
    let weights = perceptron_weights(1);
    let x = noise(9, 3 * 64);
    let mut session = session(provider(), &perceptron(), &fp32(), &weights).unwrap();
    let y = run(&mut *session, &[3, 64], &x).unwrap();
    // In bf16 the error would be above 1e-3.
    assert!(error_of(&y, &perceptron_reference(&weights, &x)) < 2e-6);
    assert_eq!(y, run(&mut *session, &[3, 64], &x).unwrap());
    let other = noise(10, 3 * 64);
    let y = run(&mut *session, &[3, 64], &other).unwrap();
    assert!(error_of(&y, &perceptron_reference(&weights, &other)) < 2e-6);
}

#[test]
fn low_precisions_are_used_or_refused() {
    let weights = perceptron_weights(1);
    let x = noise(9, 3 * 64);
    let offered = provider().capabilities("cpu").unwrap().precisions;
    for precision in [Precision::Bf16, Precision::Fp16] {
        let built = session(provider(), &perceptron(), &spec(precision), &weights);
        if offered.contains(&precision) {
            let error = error_of(
                &run(&mut *built.unwrap(), &[3, 64], &x).unwrap(),
                &perceptron_reference(&weights, &x),
            );
            assert!((1e-5..3e-2).contains(&error), "{precision}: {error}");
        } else {
            let error = failure(built);
            assert_eq!(error.code, ErrorCode::Unimplemented);
            assert!(
                error.message.contains(precision.name()) && error.hint.unwrap().to_string().contains("fp32")
            );
        }
    }
}

#[test]
fn every_offered_element_type_passes_through() {
    for dtype in provider().capabilities("cpu").unwrap().io_dtypes {
        // From [2, 3] to [3, 2], so that data really moves.
        let model = Model::default()
            .input("x", dtype, &[2, 3])
            .output("y", dtype, &[3, 2])
            .node("Transpose", &["x"], &["y"])
            .bytes();
        let size = dtype.size();
        // The numbers 0 to 5 (0 and 1 for bool) in this type.
        let element = |i: u8| -> Vec<u8> {
            match dtype {
                DType::F32 => f32::from(i).to_le_bytes().to_vec(),
                DType::F64 => f64::from(i).to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f32(f32::from(i)).to_le_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f32(f32::from(i)).to_le_bytes().to_vec(),
                DType::Bool => vec![i & 1],
                _ => u64::from(i).to_le_bytes()[..size].to_vec(),
            }
        };
        let data: Vec<u8> = (0..6).flat_map(element).collect();
        let expected: Vec<u8> = [0, 3, 1, 4, 2, 5].into_iter().flat_map(element).collect();
        let mut session = session(provider(), &model, &fp32(), &Source::default())
            .unwrap_or_else(|e| panic!("{dtype}: {e}"));
        let mut sink = VecSink::default();
        session.run(&[TensorView { dtype, shape: &[2, 3], data: &data }], &mut sink, &NoHost).unwrap();
        let y = sink.get(0).unwrap();
        assert_eq!((y.dtype, y.shape), (dtype, &[3, 2][..]));
        assert_eq!(y.data, expected, "{dtype}");
    }
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
    let second = run(&mut *session, &[3, 64], &x).unwrap();
    assert!(error_of(&second, &perceptron_reference(&b, &x)) < 2e-6);

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
    assert_eq!(
        failure(session.refit(&["w1"], &perceptron_weights(2), &Stop("compile"))).code,
        ErrorCode::Cancelled
    );
    assert_eq!(run(&mut *session, &[3, 64], &x).unwrap(), before);
    // Cancels at the last moment, when the old compiled model is already gone.
    let error = failure(session.refit(&["w1"], &perceptron_weights(2), &StopAfterCompiling));
    assert_eq!(error.code, ErrorCode::Cancelled);
    assert_eq!(run(&mut *session, &[3, 64], &x).unwrap(), before);
    session.refit(&["w1"], &perceptron_weights(2), &NoHost).unwrap();
    assert_ne!(run(&mut *session, &[3, 64], &x).unwrap(), before);
}

/// Cancels as soon as a model is compiled.
struct StopAfterCompiling;

impl Host for StopAfterCompiling {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        if phase == "compile" && step == total { Flow::Cancel } else { Flow::Continue }
    }
    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let good = perceptron_weights(1);
    let engine = engine(provider(), &perceptron(), &fp32(), &Source::default()).unwrap();
    assert_eq!(engine.info().weights.len(), 4);

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
    // The engine still works.
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
        assert!(error.message.len() > 20, "{error}");
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
    let engine = engine(provider(), &model, &fp32(), &weights).unwrap();
    assert_eq!(engine.info().inputs[0].shape, [None, Some(4)]);
    let mut session = engine.session(&weights, &NoHost).unwrap();
    for rows in [1, 5, 2, 5] {
        let x = noise(rows as u32, rows * 4);
        let y = run(&mut *session, &[rows, 4], &x).unwrap();
        assert!(error_of(&y, &affine(&widen(&x), &w, &[0.0, 0.0], 4)) < 1e-6);
    }
}

/// T5's attention bias: OpenVINO merges the lowest number of f32 with it unless it is kept from it.
#[test]
fn a_bias_survives_beside_a_mask() {
    let scores = noise(4, 6);
    let model = Model::default()
        .input("mask", DType::F32, &[3])
        .output("y", DType::F32, &[2, 3])
        .constant("one", DType::F32, &[], bytes(&[1.0]))
        .constant("lowest", DType::F32, &[], bytes(&[f32::MIN]))
        .constant("bias", DType::F32, &[2, 3], bytes(&scores))
        .node("Sub", &["one", "mask"], &["hidden"])
        .node("Mul", &["hidden", "lowest"], &["masked"])
        .node("Add", &["bias", "masked"], &["y"])
        .bytes();
    let mut session = session(provider(), &model, &fp32(), &Source::default()).unwrap();
    let y = run(&mut *session, &[3], &[1.0, 0.0, 1.0]).unwrap();
    let expected: Vec<f32> =
        scores.iter().enumerate().map(|(at, bias)| if at % 3 == 1 { f32::MIN } else { *bias }).collect();
    assert_eq!(y, expected);
}

/// OpenVINO drops absolute values of what it computes from weights, unless it is kept from that.
#[test]
fn absolute_values_of_computed_weights_are_computed() {
    let model = Model::default()
        .input("x", DType::F32, &[3])
        .output("y", DType::F32, &[3])
        .weight("w", DType::F32, &[3])
        .node("Neg", &["w"], &["negative"])
        .node("Abs", &["negative"], &["absolute"])
        .node("Sqrt", &["absolute"], &["root"])
        .node("Add", &["x", "root"], &["y"])
        .bytes();
    let weights = Source::default().with("w", &[3], &[-4.0, 0.0, 9.0]);
    let mut first = session(provider(), &model, &fp32(), &weights).unwrap();
    assert_eq!(run(&mut *first, &[3], &[1.0, 1.0, 1.0]).unwrap(), [3.0, 1.0, 4.0]);
    let inputs = BuildSpec { options: [("weights".into(), "inputs".into())].into(), ..fp32() };
    let mut second = session(provider(), &model, &inputs, &weights).unwrap();
    assert_eq!(run(&mut *second, &[3], &[1.0, 1.0, 1.0]).unwrap(), [3.0, 1.0, 4.0]);
}

/// OpenVINO itself reads beyond the table.
#[test]
fn indices_out_of_range_are_refused() {
    let model = Model::default()
        .input("i", DType::I64, &[2])
        .output("y", DType::F32, &[2])
        .weight("table", DType::F32, &[3])
        .node("Gather", &["table", "i"], &["y"])
        .bytes();
    let weights = Source::default().with("table", &[3], &[1.0, 2.0, 3.0]);
    for option in [&[][..], &[("weights".to_string(), "inputs".to_string())]] {
        let spec = BuildSpec { options: option.iter().cloned().collect(), ..fp32() };
        let mut session = session(provider(), &model, &spec, &weights).unwrap();
        let mut gather = |indices: [i64; 2]| {
            let data: Vec<u8> = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
            let view = TensorView { dtype: DType::I64, shape: &[2], data: &data };
            let mut sink = VecSink::default();
            session.run(&[view], &mut sink, &NoHost)
        };
        gather([2, -3]).unwrap();
        for wrong in [[0, 3], [-4, 0], [i64::MIN, i64::MAX]] {
            let error = gather(wrong).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert!(error.message.contains("`i`") && error.message.contains("3 elements"), "{error}");
        }
    }
}

/// The same for indices that the graph computes, in an engine with baked weights, too.
#[test]
fn computed_indices_out_of_range_are_refused() {
    let spec = |bake| BuildSpec { bake, ..fp32() };
    // Each takes one index, computed from `i`, into 3 elements.
    let rows = |model: Model| {
        model.input("i", DType::I64, &[1]).constant("one", DType::I64, &[1], 1i64.to_le_bytes().to_vec())
    };
    let gather = rows(Model::default())
        .output("y", DType::F32, &[1])
        .weight("table", DType::F32, &[3])
        .node("Add", &["i", "one"], &["j"])
        .node("Gather", &["table", "j"], &["y"]);
    let gather_nd = rows(Model::default())
        .output("y", DType::F32, &[])
        .weight("table", DType::F32, &[3])
        .node("Add", &["i", "one"], &["j"])
        .node("GatherND", &["table", "j"], &["y"]);
    let scatter = rows(Model::default())
        .output("y", DType::F32, &[3])
        .weight("table", DType::F32, &[3])
        .constant("value", DType::F32, &[1], bytes(&[7.0]))
        .node("Add", &["i", "one"], &["j"])
        .node("ScatterElements", &["table", "j", "value"], &["y"]);
    for (op, model) in [("Gather", gather), ("GatherND", gather_nd), ("ScatterElements", scatter)] {
        let model = from_host(model, 21);
        for bake in [false, true] {
            let weights = Source::default().with("table", &[3], &[1.0, 2.0, 3.0]);
            let mut session = session(provider(), &model, &spec(bake), &weights).unwrap();
            let mut run = |index: i64| {
                let view = TensorView { dtype: DType::I64, shape: &[1], data: &index.to_le_bytes() };
                let mut sink = VecSink::default();
                session.run(&[view], &mut sink, &NoHost).map(|()| sink)
            };
            for right in [-4, -1, 1] {
                run(right).unwrap();
            }
            // OpenVINO narrows larger numbers to 32 bits.
            for wrong in [2, -5, 1 << 30, i64::from(i32::MIN)] {
                let Err(error) = run(wrong) else { panic!("{op} takes {wrong}") };
                assert_eq!(error.code, ErrorCode::InvalidArgument, "{op}");
                assert!(error.message.contains(op) && error.message.contains("3 elements"), "{error}");
            }
            run(0).unwrap();
        }
    }
}

/// OpenVINO itself takes the nearest integer of 32 bits.
#[test]
fn integers_of_more_than_32_bits_are_refused() {
    let model = Model::default()
        .input("i", DType::I64, &[2])
        .output("y", DType::I64, &[2])
        .node("Add", &["i", "i"], &["y"])
        .bytes();
    let mut session = session(provider(), &model, &fp32(), &Source::default()).unwrap();
    let mut run = |values: [i64; 2]| {
        let data = values.map(i64::to_le_bytes).concat();
        let mut sink = VecSink::default();
        session.run(&[TensorView { dtype: DType::I64, shape: &[2], data: &data }], &mut sink, &NoHost)
    };
    run([-5, i64::from(i32::MAX) / 2]).unwrap();
    for wide in [i64::from(i32::MAX) + 1, i64::MIN] {
        let error = run([0, wide]).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(
            error.message.contains(&format!("`i` has {wide}")) && error.message.contains("32 bits"),
            "{error}"
        );
    }
}

/// OpenVINO itself returns 0.
#[test]
fn nan_that_would_become_a_number_is_refused() {
    let model = |op: &str| {
        let model = Model::default().input("x", DType::F32, &[2]).output("y", DType::F32, &[2]);
        model.node(op, &["x"], &["y"]).bytes()
    };
    let on = |op: &str| session(provider(), &model(op), &fp32(), &Source::default()).unwrap();
    let mut relu = on("Relu");
    assert_eq!(run(&mut *relu, &[2], &[-1.0, f32::INFINITY]).unwrap(), [0.0, f32::INFINITY]);
    let error = run(&mut *relu, &[2], &[1.0, f32::NAN]).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("`x` has NaN"), "{error}");
    assert!(run(&mut *on("Neg"), &[2], &[1.0, f32::NAN]).unwrap()[1].is_nan());
}

/// A constant is known before anything runs.
#[test]
fn constant_indices_out_of_range_are_refused() {
    let model = Model::default()
        .input("x", DType::F32, &[3])
        .output("y", DType::F32, &[1])
        .constant("i", DType::I64, &[1], 3i64.to_le_bytes().to_vec())
        .node("Gather", &["x", "i"], &["y"]);
    let error = provider().build(&model.bytes(), &fp32(), &Source::default(), &NoHost).err().unwrap();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("constant `i` has 3 at position 0"), "{error}");
}

/// The number of elements is known only when the model runs.
#[test]
fn indices_into_open_dimensions_are_checked() {
    let open = || {
        let three = |dtype: DType| {
            let bytes =
                if dtype == DType::I32 { 3i32.to_le_bytes().to_vec() } else { 3i64.to_le_bytes().to_vec() };
            (dtype, bytes)
        };
        let (wide, narrow) = (three(DType::I64), three(DType::I32));
        Model::default()
            .input("x", DType::F32, &[-1])
            .input("i", DType::I64, &[-2])
            .constant("three", wide.0, &[1], wide.1)
            .constant("narrow three", narrow.0, &[1], narrow.1)
            .constant("column", DType::I64, &[2], [-1i64, 1].map(i64::to_le_bytes).concat())
            .node_with("Cast", &["i"], &["narrow"], &[("to", DType::I32 as i64)])
            .node("Sub", &["i", "three"], &["j"])
            .node("Sub", &["narrow", "narrow three"], &["k"])
            .output("y", DType::F32, &[-3])
    };
    for (op, model) in [
        ("Gather", open().node("Gather", &["x", "i"], &["y"])),
        ("Gather", open().node("Gather", &["x", "j"], &["y"])),
        ("Gather", open().node_with("Gather", &["x", "k"], &["y"], &[("axis", -1)])),
        ("Gather", open().node("Gather", &["x", "three"], &["y"])),
        ("GatherElements", open().node("GatherElements", &["x", "j"], &["y"])),
        ("GatherND", open().node("Reshape", &["j", "column"], &["n"]).node("GatherND", &["x", "n"], &["y"])),
        ("ScatterElements", open().node("ScatterElements", &["x", "j", "x"], &["y"])),
    ] {
        let model = from_host(model, 21);
        let mut session = session(provider(), &model, &fp32(), &Source::default()).unwrap();
        let mut run = |x: &[f32], index: i64| {
            let (x, shape, index) = (bytes(x), [x.len()], vec![index.to_le_bytes(); x.len()].concat());
            let inputs = [
                TensorView { dtype: DType::F32, shape: &shape, data: &x },
                TensorView { dtype: DType::I64, shape: &shape, data: &index },
            ];
            let mut sink = VecSink::default();
            session.run(&inputs, &mut sink, &NoHost).map(|()| floats(sink.get(0).unwrap().data))
        };
        let four = [1.0, 2.0, 4.0, 8.0];
        assert!(
            run(&four, 3).unwrap_or_else(|why| panic!("{op}: {why:?}")).iter().all(|y| four.contains(y)),
            "{op}"
        );
        let error =
            run(&four[..2], 3 + 2).err().unwrap_or_else(|| panic!("{op} takes an index out of range"));
        assert_eq!(error.code, ErrorCode::InvalidArgument, "{op}");
        assert!(error.message.contains(op) && error.message.contains("not in the range"), "{error}");
        run(&four, 3).unwrap();
    }
}

/// In a branch, indices may be constants or inputs of the model; others cannot be checked.
#[test]
fn indices_in_branches_are_checked_or_refused() {
    let taken = |index: &str| {
        let output = |name: &str| Model::default().output(name, DType::F32, &[1]);
        let then = output("a").node("Add", &["i", "one"], &["j"]).node("Gather", &["table", index], &["a"]);
        Model::default()
            .input("c", DType::Bool, &[])
            .input("i", DType::I64, &[1])
            .constant("one", DType::I64, &[1], 1i64.to_le_bytes().to_vec())
            .constant("three", DType::I64, &[1], 3i64.to_le_bytes().to_vec())
            .weight("table", DType::F32, &[3])
            .output("y", DType::F32, &[1])
            .node("If", &["c"], &["y"])
            .body("then_branch", then)
            .body("else_branch", output("b").node("Gather", &["table", "one"], &["b"]))
            .bytes()
    };
    let weights = Source::default().with("table", &[3], &[1.0, 2.0, 4.0]);
    let mut session = session(provider(), &taken("i"), &fp32(), &weights).unwrap();
    let mut run = |choice: u8, index: i64| {
        let [choice, index] = [vec![choice], index.to_le_bytes().to_vec()];
        let inputs = [(DType::Bool, &[][..], &choice), (DType::I64, &[1][..], &index)];
        let inputs = inputs.map(|(dtype, shape, data)| TensorView { dtype, shape, data });
        let mut sink = VecSink::default();
        session.run(&inputs, &mut sink, &NoHost).map(|()| floats(sink.get(0).unwrap().data))
    };
    assert_eq!(run(1, -1).unwrap(), [4.0]);
    assert_eq!(run(0, -1).unwrap(), [2.0]);
    let error = run(1, 3).unwrap_err();
    assert!(error.message.contains("input `i` has 3") && error.message.contains("3 elements"), "{error}");
    let refused = |index| provider().build(&taken(index), &fp32(), &weights, &NoHost).err().unwrap();
    assert!(refused("three").message.contains("constant `three` has 3"), "{}", refused("three"));
    let error = refused("j");
    assert!(
        error.code == ErrorCode::Unimplemented && error.message.contains("in a loop or branch"),
        "{error}"
    );
}

/// Nodes that OpenVINO computes wrongly and that we cannot rewrite fail when the engine is built.
#[test]
fn nodes_with_other_results_are_refused() {
    let tile = Model::default()
        .input("x", DType::F32, &[2])
        .input("repeats", DType::I64, &[1])
        .output("y", DType::F32, &[4])
        .node("Tile", &["x", "repeats"], &["y"]);
    let resize = Model::default()
        .input("x", DType::F32, &[1, 1, 4, 4])
        .output("y", DType::F32, &[1, 1, 2, 2])
        .constant("scales", DType::F32, &[4], bytes(&[1.0, 1.0, 0.5, 0.5]))
        .node_with("Resize", &["x", "", "scales"], &["y"], &[("antialias", 1)]);
    let branch = |output: &str| {
        Model::default().output(output, DType::F32, &[4]).node("Tile", &["x", "repeats"], &[output])
    };
    let in_a_branch = Model::default()
        .input("c", DType::Bool, &[])
        .input("x", DType::F32, &[2])
        .input("repeats", DType::I64, &[1])
        .output("y", DType::F32, &[4])
        .node("If", &["c"], &["y"])
        .body("then_branch", branch("a"))
        .body("else_branch", branch("b"));
    let wide = Model::default().input("x", DType::F64, &[2]).output("y", DType::F32, &[2]).node_with(
        "Cast",
        &["x"],
        &["y"],
        &[("to", DType::F32 as i64)],
    );
    for (model, words) in [
        (tile, "zeros if the repeats"),
        (resize, "antialiasing"),
        (in_a_branch, "zeros if the repeats are computed (and 1 more)"),
        (wide, "`x` is f64"),
    ] {
        let weights = Source::default();
        let error = provider().build(&model.bytes(), &fp32(), &weights, &NoHost).err().unwrap();
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert!(error.message.contains(words), "{error}");
    }
}

/// OpenVINO itself applies a list of slopes along the second dimension.
#[test]
fn slopes_belong_to_the_last_dimension() {
    let model = Model::default()
        .input("x", DType::F32, &[1, 2, 2])
        .output("y", DType::F32, &[1, 2, 2])
        .weight("slopes", DType::F32, &[2])
        .node("PRelu", &["x", "slopes"], &["y"]);
    let weights = Source::default().with("slopes", &[2], &[0.5, 0.25]);
    let mut session = session(provider(), &model.bytes(), &fp32(), &weights).unwrap();
    let y = run(&mut *session, &[1, 2, 2], &[-4.0, -4.0, 8.0, -8.0]).unwrap();
    assert_eq!(y, [-2.0, -1.0, 8.0, -2.0]);
}

/// OpenVINO itself fuses this, and the imported node reads cosines and sines behind the rows. The ONNX node tests with
/// baked engines cover the operator RotaryEmbedding.
#[test]
fn rotary_embeddings_survive_an_import() {
    let (tokens, half) = (3, 8);
    let model = Model::default()
        .input("x", DType::F32, &[1, 2, tokens, 2 * half])
        .input("cos", DType::F32, &[1, 1, tokens, half])
        .input("sin", DType::F32, &[1, 1, tokens, half])
        .output("y", DType::F32, &[1, 2, tokens, 2 * half])
        .constant("halves", DType::I64, &[2], [half, half].map(i64::to_le_bytes).concat())
        .node_with("Split", &["x", "halves"], &["a", "b"], &[("axis", -1)])
        .node("Mul", &["a", "cos"], &["a_cos"])
        .node("Mul", &["b", "sin"], &["b_sin"])
        .node("Mul", &["b", "cos"], &["b_cos"])
        .node("Mul", &["a", "sin"], &["a_sin"])
        .node("Sub", &["a_cos", "b_sin"], &["first"])
        .node("Add", &["b_cos", "a_sin"], &["second"])
        .node_with("Concat", &["first", "second"], &["y"], &[("axis", -1)]);
    let model = from_host(model, 21);
    let (tokens, half) = (tokens as usize, half as usize);
    let x = noise(1, 2 * tokens * 2 * half);
    let (cos, sin) = (noise(2, tokens * half), noise(3, tokens * half));
    let baked = BuildSpec { bake: true, ..fp32() };
    let payload = engine(provider(), &model, &baked, &Source::default()).unwrap().serialize().unwrap();
    let loaded = provider().load(&payload, &baked, &NoHost).unwrap();
    let mut session = loaded.session(&Source::default(), &NoHost).unwrap();
    let (shapes, data) =
        ([[1, 2, tokens, 2 * half], [1, 1, tokens, half]], [&x, &cos, &sin].map(|x| bytes(x)));
    let inputs: Vec<TensorView<'_>> = data
        .iter()
        .zip([&shapes[0], &shapes[1], &shapes[1]])
        .map(|(data, shape)| TensorView { dtype: DType::F32, shape, data })
        .collect();
    let mut sink = VecSink::default();
    session.run(&inputs, &mut sink, &NoHost).unwrap();
    let y = floats(sink.get(0).unwrap().data);
    let expected = |i: usize| {
        let (row, at) = (i / (2 * half), i % (2 * half));
        let angle = row % tokens * half + at % half;
        let (a, b) = (row * 2 * half + at % half, row * 2 * half + at % half + half);
        let [a, b, cos, sin] = [x[a], x[b], cos[angle], sin[angle]].map(f64::from);
        if at < half { a * cos - b * sin } else { b * cos + a * sin }
    };
    assert!(error_of(&y, &(0..x.len()).map(expected).collect::<Vec<f64>>()) < 2e-6);
}

#[test]
fn positions_of_rotary_embeddings_out_of_range_are_refused() {
    let model = Model::default()
        .input("x", DType::F32, &[1, 1, 1, 4])
        .input("position", DType::I64, &[1, 1])
        .output("y", DType::F32, &[1, 1, 1, 4])
        .weight("cos", DType::F32, &[3, 2])
        .weight("sin", DType::F32, &[3, 2])
        .node("RotaryEmbedding", &["x", "cos", "sin", "position"], &["y"]);
    let model = from_host(model, 23);
    let weights = Source::default().with("cos", &[3, 2], &[1.0; 6]).with("sin", &[3, 2], &[0.0; 6]);
    let mut session = session(provider(), &model, &fp32(), &weights).unwrap();
    let x = bytes(&[1.0, 2.0, 3.0, 4.0]);
    let mut rotate = |position: i64| {
        let position = position.to_le_bytes();
        let inputs = [
            TensorView { dtype: DType::F32, shape: &[1, 1, 1, 4], data: &x },
            TensorView { dtype: DType::I64, shape: &[1, 1], data: &position },
        ];
        let mut sink = VecSink::default();
        session.run(&inputs, &mut sink, &NoHost).map(|()| floats(sink.get(0).unwrap().data))
    };
    assert_eq!(rotate(2).unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(rotate(3).unwrap_err().code, ErrorCode::InvalidArgument);
}

/// OpenVINO itself applies the strides of a convolution with a kernel of one element before its padding.
#[test]
fn strides_come_after_padding() {
    let x: Vec<f32> = (0..16).map(|i| i as f32 + 1.0).collect();
    let sparse = [0.0, 0.0, 0.0, 0.0, 6.0, 8.0, 0.0, 14.0, 16.0];
    let inner = Model::default()
        .input("x", DType::F32, &[1, 1, 4, 4])
        .output("y", DType::F32, &[1, 1, 3, 3])
        .weight("w", DType::F32, &[1, 1, 1, 1])
        .node("Relu", &["x"], &["positive"]);
    let conv = |model: Model, x: &str| model.node("Conv", &[x, "w"], &["y"]).ints("strides", &[2, 2]);
    let own = conv(inner.clone(), "positive").ints("pads", &[1, 1, 0, 0]);
    let amounts = [0i64, 0, 1, 1, 0, 0, 0, 0].iter().flat_map(|pad| pad.to_le_bytes()).collect();
    let before = inner.constant("amounts", DType::I64, &[8], amounts).node(
        "Pad",
        &["positive", "amounts"],
        &["padded"],
    );
    let before = conv(before, "padded");
    let weights = Source::default().with("w", &[1, 1, 1, 1], &[1.0]);
    for model in [own, before] {
        let mut session = session(provider(), &model.bytes(), &fp32(), &weights).unwrap();
        assert_eq!(run(&mut *session, &[1, 1, 4, 4], &x).unwrap(), sparse);
    }
}

#[test]
fn several_outputs_keep_their_order_and_meaning() {
    // One value under two names, an input that is also an output, an unused input, a constant, a scalar, and an
    // output in the middle of the graph.
    let model = Model::default()
        .input("unused", DType::I64, &[1])
        .input("b", DType::F32, &[2])
        .input("a", DType::F32, &[2])
        .output("twice", DType::F32, &[2])
        .output("again", DType::F32, &[2])
        .output("echo", DType::F32, &[2])
        .output("sum", DType::F32, &[])
        .output("fixed", DType::F32, &[3])
        .output("difference", DType::F32, &[2])
        .constant("three", DType::F32, &[3], bytes(&[1.0, 2.0, 3.0]))
        .node("Sub", &["a", "b"], &["difference"])
        .node("Add", &["difference", "difference"], &["twice"])
        .node("Identity", &["twice"], &["again"])
        .node("Identity", &["b"], &["echo"])
        .node("Identity", &["three"], &["fixed"])
        .node_with("ReduceSum", &["twice"], &["sum"], &[("keepdims", 0)])
        .bytes();
    let mut session = session(provider(), &model, &fp32(), &Source::default()).unwrap();
    let (a, b, unused) = (bytes(&[5.0, 7.0]), bytes(&[1.0, 2.0]), 1i64.to_le_bytes());
    let inputs = [
        TensorView { dtype: DType::I64, shape: &[1], data: &unused },
        TensorView { dtype: DType::F32, shape: &[2], data: &b },
        TensorView { dtype: DType::F32, shape: &[2], data: &a },
    ];
    let mut sink = VecSink::default();
    for _ in 0..2 {
        session.run(&inputs, &mut sink, &NoHost).unwrap();
        let outputs: Vec<Vec<f32>> = (0..6).map(|i| floats(sink.get(i).unwrap().data)).collect();
        let expected: [&[f32]; 6] =
            [&[8.0, 10.0], &[8.0, 10.0], &[1.0, 2.0], &[18.0], &[1.0, 2.0, 3.0], &[4.0, 5.0]];
        assert_eq!(outputs, expected);
        assert!(sink.get(3).unwrap().shape.is_empty());
    }
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
    assert!(provider().check("{}", "cpu").is_err());
    assert!(provider().load(b"not an engine", &fp32(), &NoHost).is_err());
}

#[test]
fn baked_weights_and_precision_survive() {
    let weights = perceptron_weights(5);
    let x = noise(9, 3 * 64);
    let offered = provider().capabilities("cpu").unwrap().precisions;
    for precision in offered {
        let plain = BuildSpec { threads: Some(1), ..spec(precision) };
        let baked = BuildSpec { bake: true, ..plain.clone() };
        let built = engine(provider(), &perceptron(), &baked, &weights).unwrap();
        assert!(built.info().weights.is_empty());
        let mut payload = built.serialize().unwrap();
        let loaded = provider().load(&payload, &baked, &NoHost).unwrap();
        assert_eq!(loaded.info(), built.info());
        drop(built);
        // OpenVINO keeps using the memory that it imports from, so this must not be the caller's memory.
        let copy = payload.clone();
        payload.fill(0x42);
        let y = run(&mut *loaded.session(&Source::default(), &NoHost).unwrap(), &[3, 64], &x).unwrap();
        // The library's default precision on import differs, so exactly equal results prove that the precision was
        // set.
        let expected = run(&mut *session(provider(), &perceptron(), &plain, &weights).unwrap(), &[3, 64], &x);
        assert_eq!(y, expected.unwrap(), "{precision}");

        let mut session = loaded.session(&Source::default(), &NoHost).unwrap();
        let error = failure(session.refit(&[], &weights, &NoHost));
        assert_eq!(error.code, ErrorCode::FailedPrecondition);

        if precision != Precision::Fp32 {
            let error = failure(provider().load(&copy, &BuildSpec { bake: true, ..fp32() }, &NoHost));
            assert!(error.message.contains("fp32"), "{error}");
        }
    }
}

#[test]
fn a_blob_of_another_version_or_machine_is_refused_with_a_reason() {
    let baked = BuildSpec { bake: true, ..fp32() };
    let built = engine(provider(), &perceptron(), &baked, &perceptron_weights(5)).unwrap();
    let compatibility = &built.info().compatibility;
    assert_eq!(provider().check(compatibility, "cpu").unwrap(), Compatibility::Optimal);
    let parsed: serde_json::Value = serde_json::from_str(compatibility).unwrap();
    for (key, part) in [("openvino", "built with OpenVINO other"), ("class", "built for `other`")] {
        let mut changed = parsed.clone();
        changed[key] = "other".into();
        match provider().check(&changed.to_string(), "cpu").unwrap() {
            Compatibility::Unsupported(why) => assert!(why.contains(part), "{why}"),
            verdict => panic!("{verdict:?}"),
        }
        // The same check in the engine itself.
        let info = EngineInfo { compatibility: changed.to_string(), ..built.info().clone() };
        let described = json!({ "info": info, "checks": { "inputs": [], "computed": [] } }).to_string();
        let mut payload = b"SDROVIN1".to_vec();
        payload.extend_from_slice(&(described.len() as u32).to_le_bytes());
        payload.extend_from_slice(described.as_bytes());
        payload.extend_from_slice(b"blob");
        let error = failure(provider().load(&payload, &baked, &NoHost));
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        assert!(error.message.contains(part), "{error}");
    }
}

#[test]
fn a_damaged_blob_is_an_error() {
    let baked = BuildSpec { bake: true, ..fp32() };
    let built = engine(provider(), &perceptron(), &baked, &perceptron_weights(5)).unwrap();
    let payload = built.serialize().unwrap();
    let header = 12 + u32::from_le_bytes(payload[8..12].try_into().unwrap()) as usize;
    for end in [0, 5, 20, header, header + 1, header + 100, payload.len() / 2] {
        assert!(
            provider().load(&payload[..end], &baked, &NoHost).is_err(),
            "{end} of {} bytes",
            payload.len()
        );
    }
    let mut zeros = payload;
    zeros[header..].fill(0);
    assert!(provider().load(&zeros, &baked, &NoHost).is_err());
}

#[test]
fn an_unknown_operator_is_found_when_building() {
    let model = Model::default()
        .input("x", DType::F32, &[2])
        .output("y", DType::F32, &[2])
        .node("NoSuchOperator", &["x"], &["y"])
        .bytes();
    let error = failure(engine(provider(), &model, &fp32(), &Source::default()));
    assert_eq!(error.code, ErrorCode::Unimplemented);
    assert!(error.message.contains("NoSuchOperator"), "{error}");
    assert!(error.native_code.is_some());
}

/// Valid models that OpenVINO does not support. Some fail at build, others when a session compiles.
#[test]
fn a_form_of_an_operator_that_openvino_lacks_is_unsupported() {
    let grid_sample = Model::default()
        .input("x", DType::F32, &[1, 1, 2, 2, 2])
        .input("grid", DType::F32, &[1, 2, 2, 2, 3])
        .output("y", DType::F32, &[1, 1, 2, 2, 2])
        .node("GridSample", &["x", "grid"], &["y"])
        .bytes();
    let built = engine(provider(), &grid_sample, &fp32(), &Source::default()).map(drop);
    let unsqueeze = Model::default()
        .input("x", DType::F32, &[2, 3])
        .input("axes", DType::I64, &[1])
        .output("y", DType::F32, &[1, 2, 3])
        .node("Unsqueeze", &["x", "axes"], &["y"])
        .bytes();
    let compiled = session(provider(), &unsqueeze, &fp32(), &Source::default()).map(drop);
    for (result, words) in [(built, "GridSample"), (compiled, "Unsqueeze")] {
        let error = failure(result);
        assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
        assert!(error.message.contains(words) && error.hint.is_some(), "{error}");
    }
}

#[test]
fn bad_specifications_are_refused() {
    let weights = Source::default();
    for (spec, part) in [
        (BuildSpec { threads: Some(0), ..fp32() }, "threads"),
        (BuildSpec { options: [("speed".to_string(), "11".to_string())].into(), ..fp32() }, "speed"),
        (BuildSpec { device: "gpu.99".into(), ..fp32() }, "gpu.99"),
    ] {
        let error = failure(engine(provider(), &perceptron(), &spec, &weights));
        assert!(error.message.contains(part), "{error}");
    }
    assert!(engine(provider(), b"no model", &fp32(), &weights).is_err());
}

#[test]
fn a_build_stops_between_phases() {
    let weights = perceptron_weights(1);
    let error = failure(provider().build(&perceptron(), &fp32(), &weights, &Stop("read")));
    assert_eq!(error.code, ErrorCode::Cancelled);
    let engine = engine(provider(), &perceptron(), &fp32(), &weights).unwrap();
    for phase in ["stage weights", "read", "compile"] {
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
                    assert!(error_of(&y, &perceptron_reference(&weights, &x)) < 2e-6);
                }
            });
        }
    });
}
