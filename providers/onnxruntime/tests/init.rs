//! Loading: every failure is an ordinary error, and none hangs. This is a single test because a process loads only
//! one ONNX Runtime.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{ErrorCode, NoHost, Precision, Provider, RuntimeInfo};
use sdrun_provider_onnxruntime::OnnxRuntime;
use std::{fs, path::Path};
use testing::*;

fn init(dir: Option<&Path>) -> sdrun_abi::Result<RuntimeInfo> {
    OnnxRuntime.init(&config(dir, &std::env::temp_dir()), &NoHost)
}

#[test]
fn a_bad_runtime_is_an_error_and_a_good_one_still_loads() {
    let real = runtime_dir("SDRUN_ONNXRUNTIME_DIR");
    let spec = sdrun_provider_common::runtime_spec(sdrun_provider_onnxruntime::MANIFEST).unwrap();
    let library = sdrun_provider_common::locate(&spec, Some(&real)).unwrap();
    let name = library.file_name().unwrap();

    // Before anything is loaded.
    assert_eq!(failure(OnnxRuntime.devices()).code, ErrorCode::FailedPrecondition);
    assert_eq!(failure(OnnxRuntime.capabilities("cpu")).code, ErrorCode::FailedPrecondition);
    let build =
        OnnxRuntime.build(&perceptron(), &testing::spec(Precision::Fp32), &Source::default(), &NoHost);
    assert_eq!(failure(build).code, ErrorCode::FailedPrecondition);

    let error = failure(init(None));
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    assert!(error.hint.unwrap().to_string().contains("install the onnxruntime runtime"));

    let dir = tempfile::tempdir().unwrap();
    assert!(failure(init(Some(dir.path()))).hint.unwrap().to_string().contains("SDRUN_ONNXRUNTIME_DIR"));

    let file = dir.path().join(name);
    for (bytes, part) in [
        (b"no library".to_vec(), "no shared library"),
        (vec![0x5a; 100_000], "is no "),
        #[cfg(target_os = "linux")]
        (fs::read(&library).map(|whole| whole[..whole.len() / 2].to_vec()).unwrap(), "truncated"),
    ] {
        fs::write(&file, bytes).unwrap();
        let error = failure(init(Some(dir.path())));
        assert_eq!(error.code, ErrorCode::DataLoss);
        assert!(error.message.contains(part), "{error}");
        assert_eq!(error.file.as_deref(), Some(dunce::canonicalize(&file).unwrap().to_str().unwrap()));
    }

    let info = init(Some(&real)).unwrap();
    assert_eq!((info.name.as_str(), info.library.as_deref()), ("onnxruntime", Some(&*library)));
    assert!(info.version.starts_with("1."), "{}", info.version);
    assert_eq!(init(Some(&real)).unwrap(), info);
    let error = failure(init(Some(dir.path())));
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    assert!(error.message.contains("as well"), "{error}");
    assert_eq!(OnnxRuntime.devices().unwrap().len(), 1);
}
