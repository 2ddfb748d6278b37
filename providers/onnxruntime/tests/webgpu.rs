//! The extension for WebGPU, on any driver that `libvulkan` (Linux), D3D12 (Windows) or Metal (macOS) finds. `cargo xtask test` runs it
//! on SwiftShader, which computes on the CPU.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{
    BuildSpec, DType, Device, DeviceKind, DeviceTensor, ErrorCode, Input, LogLevel, NoHost, Precision,
    Provider, TensorView, VecSink,
};
use sdrun_provider_onnxruntime::OnnxRuntime;
use std::sync::OnceLock;
use testing::*;

/// WebGPU's device.
fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let found = support::devices("onnxruntime-webgpu", "SDRUN_ONNXRUNTIME_WEBGPU_DIR");
        found.into_iter().next().expect("WebGPU finds no device")
    })
}

fn on_device() -> BuildSpec {
    BuildSpec::new(&device().id, Precision::Fp32)
}

#[test]
#[ignore = "needs WebGPU; run by `cargo xtask test`"]
fn webgpu_computes_and_a_refit_replaces_every_weight() {
    // SwiftShader says truthfully that it is a CPU.
    assert_eq!(device().id, "webgpu:0");
    assert!(matches!(device().kind, DeviceKind::Gpu | DeviceKind::Cpu), "{:?}", device().kind);
    support::refits(&on_device(), 1e-6);
}

#[test]
#[ignore = "needs WebGPU; run by `cargo xtask test`"]
fn webgpu_computes_in_half_precision_or_says_that_the_gpu_cannot() {
    match support::distance(&device().id, Precision::Fp16) {
        Ok(error) => assert!(error > 1e-5 && error < 2e-3, "{error}"),
        // SwiftShader has no f16.
        Err(why) => {
            assert_eq!(why.code, ErrorCode::Unimplemented, "{why}");
            assert!(why.hint.is_some_and(|hint| hint.to_string().contains("fp32")));
        }
    }
}

/// Outputs stay on the device, serve other sessions as inputs, and outlive the session that made them.
#[test]
#[ignore = "needs WebGPU; run by `cargo xtask test`"]
fn outputs_stay_on_the_device() {
    assert!(OnnxRuntime.capabilities(&device().id).unwrap().device_tensors);
    let weights = perceptron_weights(1);
    let x = bytes(&noise(9, 3 * 64));
    let x = Input::Host(TensorView { dtype: DType::F32, shape: &[3, 64], data: &x });
    let doubled = Model::default()
        .input("y", DType::F32, &[3, 8])
        .output("z", DType::F32, &[3, 8])
        .output("same", DType::F32, &[3, 8])
        .node("Add", &["y", "y"], &["z"])
        .node("Identity", &["y"], &["same"])
        .bytes();
    let mut first = session(&OnnxRuntime, &perceptron(), &on_device(), &weights).unwrap();
    let mut second = session(&OnnxRuntime, &doubled, &on_device(), &Source::default()).unwrap();
    let want = run(&mut *first, &[3, 64], &noise(9, 3 * 64)).unwrap();

    let mut sink = VecSink::default();
    let kept = first.run_on_device(&[x], &[true], &mut sink, &NoHost).unwrap();
    assert!(sink.is_empty());
    let read = |tensor: &dyn DeviceTensor| {
        let mut bytes = vec![0xff; 3 * 8 * 4];
        tensor.read(&mut bytes).unwrap();
        floats(&bytes)
    };
    assert_eq!(read(&*kept[0]), want);
    drop(first);
    // One output stays, the other comes back.
    let more = second.run_on_device(&[Input::Device(&*kept[0])], &[true, false], &mut sink, &NoHost).unwrap();
    assert_eq!(floats(sink.get(0).unwrap().data), want);
    let twice: Vec<f32> = want.iter().map(|value| value + value).collect();
    assert_eq!(read(&*more[0]), twice);
    drop(second);
    assert_eq!((read(&*kept[0]), read(&*more[0])), (want, twice));

    // Not between ONNX Runtime's own CPU and the device.
    let mut on_cpu = session(&OnnxRuntime, &doubled, &spec(Precision::Fp32), &Source::default()).unwrap();
    let error = failure(on_cpu.run_on_device(&[Input::Device(&*kept[0])], &[false; 2], &mut sink, &NoHost));
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
}

/// 0.4.0 computes these convolutions wrongly in its own layout (`faults.rs`).
#[test]
#[ignore = "needs WebGPU; run by `cargo xtask test`"]
fn convolutions_of_any_number_of_channels_are_right() {
    for channels in [3, 4, 6, 9, 15, 18] {
        let shape = [1, channels, 8, 8];
        let model = Model::default()
            .input("x", DType::F32, &shape.map(|n| n as i64))
            .output("y", DType::F32, &[1, 8, 6, 6])
            .weight("w", DType::F32, &[8, channels, 3, 3])
            .node("Conv", &["x", "w"], &["y"])
            .bytes();
        let weights = Source::default().with("w", &[8, channels, 3, 3], &noise(1, 72 * channels));
        let x = noise(2, 64 * channels);
        let on = |spec: BuildSpec| {
            run(&mut *session(&OnnxRuntime, &model, &spec, &weights).unwrap(), &shape, &x).unwrap()
        };
        let found = on(on_device());
        let error = error_of(&found, &widen(&on(spec(Precision::Fp32))));
        assert!(error < 1e-5, "{channels} channels: {error}");
    }
}

/// WebGPU's execution provider has no RNN and no Selu.
#[test]
#[ignore = "needs WebGPU; run by `cargo xtask test`"]
fn what_the_device_cannot_compute_is_an_error_unless_allowed() {
    let model = Model::default()
        .input("x", DType::F32, &[2, 1, 4])
        .output("y", DType::F32, &[2, 1, 1, 3])
        .weight("w", DType::F32, &[1, 3, 4])
        .weight("r", DType::F32, &[1, 3, 3])
        .node_with("RNN", &["x", "w", "r"], &["y"], &[("hidden_size", 3)])
        .bytes();
    let weights = Source::default().with("w", &[1, 3, 4], &noise(1, 12)).with("r", &[1, 3, 3], &noise(2, 9));
    let error = failure(session(&OnnxRuntime, &model, &on_device(), &weights));
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("RNN"), "{error}");
    assert!(error.hint.unwrap().to_string().contains("allow_fallback=true"));

    let mut allowed = on_device();
    allowed.options.insert("allow_fallback".into(), "true".into());
    let log = Log::default();
    let engine = OnnxRuntime.build(&model, &allowed, &weights, &log).unwrap();
    let mut on_both = engine.session(&weights, &log).unwrap();
    let records = log.0.into_inner().unwrap();
    assert!(
        records.iter().any(|(level, text)| *level == LogLevel::Warn && text.contains("RNN")),
        "{records:?}"
    );
    let x = noise(3, 8);
    let mut on_cpu = session(&OnnxRuntime, &model, &spec(Precision::Fp32), &weights).unwrap();
    let expected = widen(&run(&mut *on_cpu, &[2, 1, 4], &x).unwrap());
    assert!(error_of(&run(&mut *on_both, &[2, 1, 4], &x).unwrap(), &expected) < 1e-6);

    // Small tensors may be computed anywhere.
    let of = |width: usize| {
        let shape = [1024, width as i64];
        let model = Model::default().input("x", DType::F32, &shape).output("y", DType::F32, &shape);
        let model = model.node("Selu", &["x"], &["y"]).bytes();
        session(&OnnxRuntime, &model, &on_device(), &Source::default())
    };
    assert!(of(2).is_ok());
    let error = failure(of(1024));
    assert!(error.message.contains("Selu"), "{error}");

    allowed.options.insert("allow_fallback".into(), "maybe".into());
    let error = failure(OnnxRuntime.build(&model, &allowed, &weights, &NoHost));
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    allowed.options = [("allow_fallbacks".into(), "true".into())].into();
    assert_eq!(
        failure(OnnxRuntime.build(&model, &allowed, &weights, &NoHost)).code,
        ErrorCode::InvalidArgument
    );
}

#[test]
#[ignore = "needs WebGPU; run by `cargo xtask test`"]
fn an_unknown_device_is_named_with_those_that_exist() {
    device();
    let error = failure(OnnxRuntime.capabilities("webgpu:7"));
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.message.contains("cpu, webgpu:0"), "{error}");
}
