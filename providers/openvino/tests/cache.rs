//! OpenVINO's cache of compiled models. This is a separate file because a process initialises OpenVINO only once.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{DType, InitConfig, NoHost, Precision, Provider};
use sdrun_provider_openvino::OpenVino;
use std::{collections::BTreeMap, fs, path::Path};
use testing::*;

/// The cache entries with their modification times.
fn entries(cache: &Path) -> BTreeMap<String, std::time::SystemTime> {
    let folders: Vec<_> = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(folders.len(), 1, "one folder for this plugin and OpenVINO: {folders:?}");
    let files = fs::read_dir(&folders[0]).unwrap().map(|entry| entry.unwrap());
    let blobs = files.filter(|file| file.file_name().to_str().unwrap().ends_with(".blob"));
    blobs
        .map(|file| (file.file_name().into_string().unwrap(), file.metadata().unwrap().modified().unwrap()))
        .collect()
}

#[test]
fn compiled_models_are_kept_and_never_mixed_up() {
    let (temp, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dir = runtime_dir("SDRUN_OPENVINO_DIR");
    let config = InitConfig { cache_dir: Some(cache.path().into()), ..config(Some(&dir), temp.path()) };
    OpenVino.init(&config, &NoHost).unwrap();
    let x = noise(9, 3 * 64);
    let right = |seed: u32, options: &[(&str, &str)]| {
        let weights = perceptron_weights(seed);
        let options = options.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let spec = sdrun_abi::BuildSpec { options, ..spec(Precision::Fp32) };
        let mut session = session(&OpenVino, &perceptron(), &spec, &weights).unwrap();
        let y = run(&mut *session, &[3, 64], &x).unwrap();
        assert!(error_of(&y, &perceptron_reference(&weights, &x)) < 2e-6, "{seed}");
        (session, y)
    };

    let (_, first) = right(1, &[]);
    let one = entries(cache.path());
    assert_eq!(one.len(), 1);
    assert_eq!(right(1, &[]).1, first, "from the cache");
    assert_eq!(entries(cache.path()), one);

    // Other weights, a single changed weight value, and other properties each create a new entry.
    right(2, &[]);
    let mut weights = perceptron_weights(1);
    weights.0.get_mut("w1").unwrap().data[4 * 3000..][..4].copy_from_slice(&50f32.to_le_bytes());
    let mut changed = session(&OpenVino, &perceptron(), &spec(Precision::Fp32), &weights).unwrap();
    let y = run(&mut *changed, &[3, 64], &x).unwrap();
    assert!(error_of(&y, &perceptron_reference(&weights, &x)) < 2e-6);
    assert_ne!(y, first);
    assert_eq!(entries(cache.path()).len(), 3);

    // A refit bypasses the cache, because weights that are only tried out would fill it.
    let (mut session, _) = right(1, &[]);
    session.refit(&["w1", "b1", "w2", "b2"], &perceptron_weights(7), &NoHost).unwrap();
    assert_eq!(entries(cache.path()).len(), 3);

    // With weights as inputs, the entry does not depend on the weights.
    for seed in [3, 4] {
        right(seed, &[("weights", "inputs")]);
        assert_eq!(entries(cache.path()).len(), 4);
    }
}

/// Measures the time to create sessions of one model. The first one compiles, and the others find it in the cache.
#[test]
#[ignore = "measures; run alone"]
fn how_long_sessions_take() {
    let (temp, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dir = runtime_dir("SDRUN_OPENVINO_DIR");
    let config = InitConfig { cache_dir: Some(cache.path().into()), ..config(Some(&dir), temp.path()) };
    OpenVino.init(&config, &NoHost).unwrap();
    let (layers, n) = (2000, 64);
    let (mut model, mut weights) = (Model::default().input("h0", DType::F32, &[16, 64]), Source::default());
    for i in 0..layers {
        let [from, to, w, product] =
            [format!("h{i}"), format!("h{}", i + 1), format!("w{i}"), format!("p{i}")];
        model = model.weight(&w, DType::F32, &[n, n]).node("MatMul", &[&from, &w], &[&product]).node(
            "Sigmoid",
            &[&product],
            &[&to],
        );
        weights = weights.with(&w, &[n, n], &noise(i, n * n));
    }
    let model = model.output(&format!("h{layers}"), DType::F32, &[16, 64]).bytes();
    for round in 0..4 {
        let start = std::time::Instant::now();
        let mut session = session(&OpenVino, &model, &spec(Precision::Fp32), &weights).unwrap();
        println!("session {round}: {:.2} s", start.elapsed().as_secs_f64());
        // A refit compiles without the cache.
        let start = std::time::Instant::now();
        session.refit(&["w0"], &weights, &NoHost).unwrap();
        println!("without the cache: {:.2} s", start.elapsed().as_secs_f64());
    }
}
