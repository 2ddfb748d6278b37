//! Loading: every failure is an ordinary error. This is a single test because a process loads only one OpenVINO.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{ErrorCode, NoHost, Precision, Provider, RuntimeInfo};
use sdrun_provider_openvino::OpenVino;
use std::{fs, path::Path};
use testing::*;

fn init(dir: Option<&Path>) -> sdrun_abi::Result<RuntimeInfo> {
    OpenVino.init(&config(dir, &std::env::temp_dir()), &NoHost)
}

#[test]
fn a_bad_runtime_is_an_error_and_a_good_one_still_loads() {
    let real = runtime_dir("SDRUN_OPENVINO_DIR");
    let spec = sdrun_provider_common::runtime_spec(sdrun_provider_openvino::MANIFEST).unwrap();
    let library = sdrun_provider_common::locate(&spec, Some(&real)).unwrap();
    let name = library.file_name().unwrap();

    // Before anything is loaded.
    assert_eq!(failure(OpenVino.devices()).code, ErrorCode::FailedPrecondition);
    assert_eq!(failure(OpenVino.capabilities("cpu")).code, ErrorCode::FailedPrecondition);
    let build = OpenVino.build(&perceptron(), &testing::spec(Precision::Fp32), &Source::default(), &NoHost);
    assert_eq!(failure(build).code, ErrorCode::FailedPrecondition);

    let error = failure(init(None));
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    assert!(error.hint.unwrap().to_string().contains("install the openvino runtime"));

    let dir = tempfile::tempdir().unwrap();
    assert!(failure(init(Some(dir.path()))).hint.unwrap().to_string().contains("SDRUN_OPENVINO_DIR"));

    let file = dir.path().join(name);
    let whole = fs::read(&library).unwrap();
    for (bytes, part) in [
        (b"no library".to_vec(), "no shared library"),
        (vec![0x5a; 100_000], "is no "),
        #[cfg(target_os = "linux")]
        (whole[..whole.len() / 2].to_vec(), "truncated"),
    ] {
        fs::write(&file, bytes).unwrap();
        let error = failure(init(Some(dir.path())));
        assert_eq!(error.code, ErrorCode::DataLoss);
        assert!(error.message.contains(part), "{error}");
        assert_eq!(error.file.as_deref(), Some(dunce::canonicalize(&file).unwrap().to_str().unwrap()));
    }

    // The library without its dependencies: the loader's message names what is missing.
    #[cfg(target_os = "linux")]
    {
        fs::write(&file, &whole).unwrap();
        let error = failure(init(Some(dir.path())));
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        assert!(error.message.contains("libopenvino.so"), "{error}");
        // A truncated library that OpenVINO would load too.
        let neighbour = fs::read_dir(&real)
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.file_name().unwrap().to_str().unwrap().starts_with("libopenvino.so"))
            .unwrap();
        let part = fs::read(&neighbour).unwrap();
        fs::write(dir.path().join(neighbour.file_name().unwrap()), &part[..part.len() / 3]).unwrap();
        let error = failure(init(Some(dir.path())));
        assert!(error.message.contains("truncated"), "{error}");
    }

    let options = [("speed".to_string(), "11".to_string())].into();
    let config = sdrun_abi::InitConfig { options, ..config(Some(&real), &std::env::temp_dir()) };
    assert!(failure(OpenVino.init(&config, &NoHost)).message.contains("speed"));

    let info = init(Some(&real)).unwrap();
    assert_eq!((info.name.as_str(), info.library.as_deref()), ("openvino", Some(&*library)));
    assert!(info.version.starts_with("20"), "{}", info.version);
    assert_eq!(init(Some(&real)).unwrap(), info);
    let error = failure(init(Some(dir.path())));
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    assert!(error.message.contains("as well"), "{error}");
    assert!(!OpenVino.devices().unwrap().is_empty());
}
