//! OpenVINO's cache of compiled models. This is a separate file because a process initialises OpenVINO only once.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{InitConfig, NoHost, Precision, Provider};
use sdrun_provider_openvino::OpenVino;
use std::fs;
use testing::*;

#[test]
fn models_of_the_cpu_are_not_kept() {
    let (temp, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dir = runtime_dir("SDRUN_OPENVINO_DIR");
    let config = InitConfig { cache_dir: Some(cache.path().into()), ..config(Some(&dir), temp.path()) };
    OpenVino.init(&config, &NoHost).unwrap();
    for options in [vec![], vec![("weights".to_string(), "inputs".to_string())]] {
        let spec = sdrun_abi::BuildSpec { options: options.into_iter().collect(), ..spec(Precision::Fp32) };
        session(&OpenVino, &perceptron(), &spec, &perceptron_weights(1)).unwrap();
    }
    let folders: Vec<_> = fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(folders.len(), 1, "one folder for this plugin and OpenVINO: {folders:?}");
    assert_eq!(fs::read_dir(&folders[0]).unwrap().count(), 0, "an entry, a lock or a mark");
}
