//! Extensions that are none: a warning says why, and the CPU works.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{ErrorCode, InitConfig, LogLevel, Precision, Provider};
use sdrun_provider_onnxruntime::OnnxRuntime;
use std::{fs, path::Path};
use testing::*;

const LIBRARY: &str = "libonnxruntime_providers_webgpu.so";

/// A process has one ONNX Runtime, so all cases go into one `init` under names that the manifest does not know, except one.
#[cfg(target_os = "linux")]
#[test]
fn what_is_no_extension_is_told_and_does_no_harm() {
    let runtime = runtime_dir("SDRUN_ONNXRUNTIME_DIR");
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        let dir = folder.path().join(name);
        fs::create_dir(&dir).unwrap();
        dir
    };
    // An intact library that is no execution provider.
    let other = at("other");
    fs::copy(runtime.join("libonnxruntime_providers_shared.so"), other.join(LIBRARY)).unwrap();
    // The same, where only ONNX Runtime can load the right one; and half a library there.
    let [cuda, half] = [at("cuda"), at("half")];
    fs::copy(other.join(LIBRARY), cuda.join("libonnxruntime_providers_cuda.so")).unwrap();
    let bytes = fs::read(other.join(LIBRARY)).unwrap();
    fs::write(half.join("libonnxruntime_providers_openvino_plugin.so"), &bytes[..bytes.len() / 2]).unwrap();
    let extensions = [
        ("onnxruntime-webgpu".into(), other),
        ("onnxruntime-cuda".into(), cuda),
        ("onnxruntime-openvino".into(), half),
        ("unheard-of".into(), at("empty")),
    ];
    let config = InitConfig { extensions: extensions.into(), ..config(Some(&runtime), Path::new("/tmp")) };
    let log = Log::default();
    OnnxRuntime.init(&config, &log).unwrap();
    let warnings = log.0.into_inner().unwrap();
    let warned = |words: &[&str]| {
        let mut matching = warnings
            .iter()
            .filter(|(level, text)| *level == LogLevel::Warn && words.iter().all(|w| text.contains(w)));
        assert!(matching.next().is_some(), "no warning with {words:?} in {warnings:?}");
    };
    warned(&["cannot use the extension onnxruntime-webgpu"]);
    warned(&["cannot use the extension onnxruntime-cuda"]);
    warned(&["libonnxruntime_providers_openvino_plugin.so", "is truncated"]);
    warned(&["this plugin has no extension `unheard-of`"]);
    assert_eq!(OnnxRuntime.devices().unwrap().len(), 1);

    let weights = perceptron_weights(1);
    let x = noise(9, 3 * 64);
    let mut session = session(&OnnxRuntime, &perceptron(), &spec(Precision::Fp32), &weights).unwrap();
    let y = run(&mut *session, &[3, 64], &x).unwrap();
    assert!(error_of(&y, &perceptron_reference(&weights, &x)) < 1e-6);
    let error = failure(OnnxRuntime.capabilities("webgpu:0"));
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.hint.unwrap().to_string().contains("onnxruntime-webgpu"));
}
