//! What the tests of extensions share.
#![allow(dead_code, unreachable_pub)]

use super::testing::*;
use sdrun_abi::{BuildSpec, DType, Device, InitConfig, NoHost, Precision, Provider, Result};
use sdrun_provider_onnxruntime::OnnxRuntime;

/// Loads ONNX Runtime with one extension, whose folder is in this environment variable. Returns the devices that it adds. A process
/// can do this once.
pub fn devices(extension: &str, variable: &str) -> Vec<Device> {
    let (folder, runtime) = (runtime_dir(variable), runtime_dir("SDRUN_ONNXRUNTIME_DIR"));
    let config = InitConfig {
        extensions: [(extension.into(), folder)].into(),
        ..config(Some(&runtime), &std::env::temp_dir())
    };
    OnnxRuntime.init(&config, &NoHost).unwrap();
    let devices = OnnxRuntime.devices().unwrap();
    assert_eq!(devices[0].id, "cpu");
    devices[1..].to_vec()
}

/// Runs a small network with one set of weights, refits it with another, and again with the first, which gives the same bits.
/// The largest error is relative to the largest value.
pub fn refits(spec: &BuildSpec, tolerance: f64) {
    let x = noise(9, 3 * 64);
    let (a, b) = (perceptron_weights(1), perceptron_weights(20));
    let mut session = session(&OnnxRuntime, &perceptron(), spec, &a).unwrap();
    let first = run(&mut *session, &[3, 64], &x).unwrap();
    let error = error_of(&first, &perceptron_reference(&a, &x));
    assert!(error < tolerance, "{error}");
    session.refit(&["w1"], &b, &NoHost).unwrap();
    let error = error_of(&run(&mut *session, &[3, 64], &x).unwrap(), &perceptron_reference(&b, &x));
    assert!(error < tolerance, "after a refit: {error}");
    session.refit(&["w1"], &a, &NoHost).unwrap();
    assert_eq!(first, run(&mut *session, &[3, 64], &x).unwrap());
}

/// How far a device in this precision is from the CPU in f32, on the small network.
pub fn distance(device: &str, precision: Precision) -> Result<f64> {
    let x = noise(9, 3 * 64);
    let weights = perceptron_weights(1);
    let on = BuildSpec::new(device, precision);
    let engine = OnnxRuntime.build(&perceptron(), &on, &weights, &NoHost)?;
    // As a host does, in the types that the engine wants.
    let mut wanted = weights.clone();
    for spec in engine.info().weights.iter().filter(|spec| spec.dtype == DType::F16) {
        let stored = wanted.0.get_mut(&spec.name).unwrap();
        let narrow = floats(&stored.data).into_iter().flat_map(|v| half::f16::from_f32(v).to_le_bytes());
        (stored.data, stored.dtype) = (narrow.collect(), DType::F16);
    }
    let mut session = engine.session(&wanted, &NoHost)?;
    Ok(error_of(&run(&mut *session, &[3, 64], &x)?, &perceptron_reference(&weights, &x)))
}
