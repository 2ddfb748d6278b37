//! The extension for OpenVINO, on its CPU device. It also lists GPUs and NPUs of Intel's, if a machine has them.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{BuildSpec, Compatibility, DType, DeviceKind, ErrorCode, NoHost, Precision, Provider};
use sdrun_provider_onnxruntime::OnnxRuntime;
use std::sync::Once;
use testing::*;

const CPU: &str = "openvino:cpu";

fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let found = support::devices("onnxruntime-openvino", "SDRUN_ONNXRUNTIME_OPENVINO_DIR");
        let cpu = found.iter().find(|device| device.id == CPU).expect("OpenVINO lists no CPU");
        assert_eq!(cpu.kind, DeviceKind::Cpu);
        // Nor devices that stand for others.
        assert!(found.iter().all(|device| !device.id.contains("auto")), "{found:?}");
    });
}

#[test]
#[ignore = "needs OpenVINO's extension; run by `cargo xtask test`"]
fn openvino_computes_and_a_refit_replaces_every_weight() {
    start();
    support::refits(&BuildSpec::new(CPU, Precision::Fp32), 1e-6);
    let threads = BuildSpec { threads: Some(1), ..BuildSpec::new(CPU, Precision::Fp32) };
    support::refits(&threads, 1e-6);
}

/// OpenVINO would compute in bf16 by itself where the processor has instructions for it.
#[test]
#[ignore = "needs OpenVINO's extension; run by `cargo xtask test`"]
fn the_precision_is_the_one_asked_for() {
    start();
    assert!(support::distance(CPU, Precision::Fp32).unwrap() < 1e-6);
    let offered = OnnxRuntime.capabilities(CPU).unwrap().precisions;
    let spec = BuildSpec::new(CPU, Precision::Bf16);
    if offered.contains(&Precision::Bf16) {
        let error = support::distance(CPU, Precision::Bf16).unwrap();
        assert!(error > 1e-4 && error < 2e-2, "{error}");
    } else {
        let error = failure(session(&OnnxRuntime, &perceptron(), &spec, &perceptron_weights(1)));
        assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    }
    let error = failure(session(
        &OnnxRuntime,
        &perceptron(),
        &BuildSpec::new(CPU, Precision::Fp16),
        &perceptron_weights(1),
    ));
    assert!(error.message.contains(CPU), "{error}");
}

/// An engine with its weights holds what OpenVINO has compiled.
#[test]
#[ignore = "needs OpenVINO's extension; run by `cargo xtask test`"]
fn baked_engines_are_loaded_without_weights() {
    start();
    assert!(OnnxRuntime.capabilities(CPU).unwrap().bake);
    let spec = BuildSpec { bake: true, ..BuildSpec::new(CPU, Precision::Fp32) };
    let weights = perceptron_weights(1);
    let engine = OnnxRuntime.build(&perceptron(), &spec, &weights, &NoHost).unwrap();
    assert!(engine.info().weights.is_empty());
    let needs = engine.info().compatibility.clone();
    assert!(needs.contains("OpenVINOExecutionProvider"), "{needs}");
    assert_eq!(OnnxRuntime.check(&needs, CPU).unwrap(), Compatibility::Optimal);
    assert!(matches!(OnnxRuntime.check(&needs, "cpu").unwrap(), Compatibility::Unsupported(_)));

    let payload = engine.serialize().unwrap();
    drop(engine);
    let loaded = OnnxRuntime.load(&payload, &spec, &NoHost).unwrap();
    let mut session = loaded.session(&Source::default(), &NoHost).unwrap();
    let x = noise(9, 3 * 64);
    let found = run(&mut *session, &[3, 64], &x).unwrap();
    let error = error_of(&found, &perceptron_reference(&weights, &x));
    assert!(error < 1e-6, "{error}");
    let error = failure(session.refit(&["w1"], &weights, &NoHost));
    assert_eq!(error.code, ErrorCode::FailedPrecondition, "{error}");

    let other = BuildSpec { precision: Precision::Bf16, ..spec.clone() };
    if OnnxRuntime.capabilities(CPU).unwrap().precisions.contains(&Precision::Bf16) {
        assert_eq!(failure(OnnxRuntime.load(&payload, &other, &NoHost)).code, ErrorCode::InvalidArgument);
    }
    let error = failure(OnnxRuntime.load(&payload[..20], &spec, &NoHost));
    assert_eq!(error.code, ErrorCode::DataLoss, "{error}");
    let foreign = needs.replace("Intel AVX", "Another");
    assert!(foreign == needs || OnnxRuntime.check(&foreign, CPU).unwrap() != Compatibility::Optimal);

    // The CPU of ONNX Runtime itself has no such engines.
    let on_cpu = BuildSpec { bake: true, ..BuildSpec::new("cpu", Precision::Fp32) };
    let error = failure(OnnxRuntime.build(&perceptron(), &on_cpu, &weights, &NoHost));
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
}

/// OpenVINO has no Det.
#[test]
#[ignore = "needs OpenVINO's extension; run by `cargo xtask test`"]
fn what_openvino_lacks_is_an_error_unless_allowed() {
    start();
    let determinants = |of: i64, options: &[(&str, &str)]| {
        let model = Model::default()
            .input("x", DType::F32, &[of, 1, 1])
            .output("y", DType::F32, &[of])
            .node("Det", &["x"], &["y"])
            .bytes();
        let mut spec = BuildSpec::new(CPU, Precision::Fp32);
        spec.options = options.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        session(&OnnxRuntime, &model, &spec, &Source::default())
    };
    let error = failure(determinants(1 << 20, &[]));
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("Det"), "{error}");
    assert!(determinants(1 << 20, &[("allow_fallback", "true")]).is_ok());
    // Small tensors may be computed anywhere.
    let x = noise(3, 4);
    assert_eq!(run(&mut *determinants(4, &[]).unwrap(), &[4, 1, 1], &x).unwrap(), x);
}

/// OpenVINO itself would return bytes of other data.
#[test]
#[ignore = "needs OpenVINO's extension; run by `cargo xtask test`"]
fn indices_out_of_range_are_refused() {
    start();
    let model = Model::default()
        .input("x", DType::F32, &[3])
        .output("y", DType::F32, &[3])
        .weight("table", DType::F32, &[10])
        .node_with("Cast", &["x"], &["i"], &[("to", DType::I64 as i64)])
        .node("Gather", &["table", "i"], &["y"])
        .bytes();
    let weights = Source::default().with("table", &[10], &noise(1, 10));
    let spec = BuildSpec::new(CPU, Precision::Fp32);
    let mut session = session(&OnnxRuntime, &model, &spec, &weights).unwrap();
    let found = run(&mut *session, &[3], &[0.0, 9.0, -10.0]).unwrap();
    let table = noise(1, 10);
    assert_eq!(found, [table[0], table[9], table[0]]);
    let error = failure(run(&mut *session, &[3], &[0.0, 10.0, -11.0]));
    assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
    assert!(error.message.contains("2 indices for Gather"), "{error}");
}

/// One of the faults of OpenVINO that the plugins avoid: it drops the absolute value of what it computes from weights.
#[test]
#[ignore = "needs OpenVINO's extension; run by `cargo xtask test`"]
fn known_faults_are_avoided() {
    start();
    let model = Model::default()
        .input("x", DType::F32, &[4])
        .output("y", DType::F32, &[4])
        .weight("w", DType::F32, &[4])
        .node("Neg", &["w"], &["n"])
        .node("Abs", &["n"], &["a"])
        .node("Mul", &["x", "a"], &["y"])
        .bytes();
    let weights = Source::default().with("w", &[4], &[1.0, -2.0, 3.0, -4.0]);
    let spec = BuildSpec::new(CPU, Precision::Fp32);
    let mut session = session(&OnnxRuntime, &model, &spec, &weights).unwrap();
    assert_eq!(run(&mut *session, &[4], &[1.0; 4]).unwrap(), [1.0, 2.0, 3.0, 4.0]);
}
