//! ggml's backends for other devices, from a folder.
//!
//! `SDRUN_GGML_BACKENDS` names the folder. `cargo xtask test` fetches one whose Vulkan backend runs on Mesa's software driver.

use super::{
    Model, compare, kept, libraries, noise,
    operators::{Case, native},
    run, spec,
};
use crate::{GgmlProvider, ffi::Ggml};
use sdrun_abi::{BuildSpec, DeviceKind, ErrorCode, Host, InitConfig, LogLevel, NoHost, Precision, Provider};
use sdrun_graph::{Attribute, Tensor};
use std::{collections::BTreeMap, path::Path, sync::Mutex};

/// A residual block and an attention block, which run on a device, and a gather, which runs on the CPU.
fn model(seed: u64) -> Model {
    let mut model = Model::new(17);
    let x = model.input(noise(&[2, 8, 12, 10], 1));
    let ints = |values: &[i64]| Attribute::Ints(values.to_vec());
    let weight = |shape: &[usize], model: &mut Model| {
        let count = model.weights.len() as u64;
        model.weight(noise(shape, seed + count))
    };
    let (w, b) = (weight(&[16, 8, 3, 3], &mut model), weight(&[16], &mut model));
    let y = model.node("Conv", &[("pads", ints(&[1; 4])), ("strides", ints(&[2, 1]))], &[x, w, b]);
    let (scale, bias) = (weight(&[4], &mut model), weight(&[4], &mut model));
    let grouped = model.constant(Tensor::from_i64s(&[2, 4, -1]));
    let g = model.node("Reshape", &[], &[y, grouped]);
    let g = model.node("InstanceNormalization", &[], &[g, scale, bias]);
    let back = model.constant(Tensor::from_i64s(&[2, 16, 6, 10]));
    let g = model.node("Reshape", &[], &[g, back]);
    let (channel, shift) = (weight(&[16, 1, 1], &mut model), weight(&[16, 1, 1], &mut model));
    let g = model.node("Mul", &[], &[g, channel]);
    let g = model.node("Add", &[], &[g, shift]);
    let gate = model.node("Sigmoid", &[], &[g]);
    let g = model.node("Mul", &[], &[g, gate]);
    let y = model.node("Add", &[], &[y, g]);
    let w = weight(&[16, 16, 2, 2], &mut model);
    let y = model.node("Conv", &[("pads", ints(&[0, 0, 1, 1]))], &[y, w]);
    let rows = model.constant(Tensor::from_i64s(&[2, 16, 60]));
    let y = model.node("Reshape", &[], &[y, rows]);
    let q = model.node("Transpose", &[("perm", ints(&[0, 2, 1]))], &[y]);
    let matrix = weight(&[16, 16], &mut model);
    let k = model.node("MatMul", &[], &[q, matrix]);
    let k = model.node("Transpose", &[("perm", ints(&[0, 2, 1]))], &[k]);
    let s = model.node("MatMul", &[], &[q, k]);
    let s = model.node("Softmax", &[("axis", Attribute::Int(-1))], &[s]);
    let y = model.node("MatMul", &[], &[s, q]);
    let index = model.constant(Tensor::from_i64s(&[5, 0, 59]));
    let y = model.node("Gather", &[("axis", Attribute::Int(1))], &[y, index]);
    let y = model.node("Concat", &[("axis", Attribute::Int(1))], &[y, q]);
    model.output(y);
    model
}

/// A provider with the folder of backends, and its first device that is not the CPU.
fn device() -> (GgmlProvider, String) {
    let folder = std::env::var("SDRUN_GGML_BACKENDS").expect("SDRUN_GGML_BACKENDS names no folder");
    let provider = GgmlProvider::default();
    let options = [("backends".to_string(), folder)].into();
    let config = InitConfig { plugin_dir: libraries(), options, ..InitConfig::default() };
    provider.init(&config, &NoHost).unwrap();
    let devices = provider.devices().unwrap();
    let gpu = devices.iter().find(|device| device.kind == DeviceKind::Gpu);
    (provider, gpu.expect("the folder offers no device").id.clone())
}

/// A host that collects the log.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Host for Log {
    fn log(&self, _: LogLevel, _: &str, message: &str) {
        self.0.lock().unwrap().push(message.into());
    }
    fn progress(&self, _: &str, _: u64, _: u64) -> sdrun_abi::Flow {
        sdrun_abi::Flow::Continue
    }
    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
#[ignore = "needs a folder of ggml backends in SDRUN_GGML_BACKENDS"]
fn a_device_computes_what_the_reference_does() {
    let (provider, device) = device();
    let a = model(10);
    for (precision, tolerance) in [(Precision::Fp32, 1e-3), (Precision::Fp16, 1e-2)] {
        let spec = BuildSpec { device: device.clone(), ..spec(precision) };
        let engine = provider.build(&a.onnx(), &spec, &a, &NoHost).unwrap();
        let log = Log::default();
        let mut session = engine.session(&a, &log).unwrap();
        let first = run(&mut *session, &a.feeds).unwrap();
        compare(&format!("{device} {precision}"), &first[0], &a.reference()[0], tolerance);
        let log = log.0.into_inner().unwrap().join("\n");
        // Operators without a counterpart run on the CPU, and the log says so.
        assert!(log.contains(" in 3 pieces ") && log.ends_with("on the CPU: Gather x1"), "{log}");
        assert_eq!(run(&mut *session, &a.feeds).unwrap(), first, "the same again");

        let b = model(50);
        let names: Vec<&str> = b.weights.keys().map(String::as_str).collect();
        session.refit(&names, &b, &NoHost).unwrap();
        let other = run(&mut *session, &a.feeds).unwrap();
        compare(&format!("{device} {precision}, refitted"), &other[0], &b.reference()[0], tolerance);
        session.refit(&names, &a, &NoHost).unwrap();
        assert_eq!(run(&mut *session, &a.feeds).unwrap(), first, "back again");
        assert!(session.memory().unwrap().activations.unwrap() > 0);
    }
}

/// Operators, with the number of test cases that run on the CPU: types other than f32, convolution with groups, products of vectors or
/// with a transposed first matrix, broadcasts of more than four dimensions, pooling, and operators that ggml lacks.
const ON_THE_CPU: &[(&str, usize)] = &[
    ("Add", 1),
    ("Attention", 2),
    ("AveragePool", 8),
    ("Concat", 1),
    ("Constant", 1),
    ("Conv", 14),
    ("ConvInteger", 3),
    ("Div", 1),
    ("DynamicQuantizeLSTM", 1),
    ("DynamicQuantizeMatMul", 1),
    ("Elu", 1),
    ("Expand", 1),
    ("GRU", 2),
    ("Gather", 3),
    ("Gemm", 10),
    ("LSTM", 2),
    ("MatMul", 18),
    ("MatMulInteger", 2),
    ("MatMulIntegerToFloat", 1),
    ("Max", 10),
    ("MaxPool", 4),
    ("Min", 10),
    ("Mul", 1),
    ("NhwcConv", 4),
    ("Pad", 11),
    ("Pow", 10),
    ("QLinearConv", 1),
    ("QLinearMatMul", 1),
    ("RNN", 1),
    ("Reciprocal", 1),
    ("Slice", 1),
    ("Split", 1),
    ("Sub", 1),
    ("Sum", 1),
    ("Tile", 1),
    ("Transpose", 3),
];

/// Operators that our kernels compute on the CPU. Of Resize and Upsample, only the cases that ggml lacks.
const OURS: &[&str] = &[
    "ArgMax",
    "ArgMin",
    "BatchNormalization",
    "Ceil",
    "Celu",
    "ConvTranspose",
    "CumSum",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "Erf",
    "Floor",
    "GatherElements",
    "GatherND",
    "GlobalMaxPool",
    "Mish",
    "PRelu",
    "QuantizeLinear",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceSumSquare",
    "Resize",
    "RotatePairs",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Selu",
    "Shrink",
    "Sign",
    "Softplus",
    "Softsign",
    "ThresholdedRelu",
    "Upsample",
];

#[test]
#[ignore = "needs a folder of ggml backends in SDRUN_GGML_BACKENDS"]
fn every_operator_is_right_on_a_device() {
    let (provider, device) = device();
    let spec = BuildSpec { device, ..spec(Precision::Fp32) };
    let mut left = BTreeMap::new();
    for Case { op, model, .. } in native() {
        let what = format!("{op} {:?}", model.graph.nodes[0].attributes);
        let engine = provider.build(&model.onnx(), &spec, &model, &NoHost).unwrap();
        let log = Log::default();
        let mut session = engine.session(&model, &log).unwrap();
        let found = run(&mut *session, &model.feeds).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (found, expected) in found.iter().zip(&model.reference()) {
            compare(&what, found, expected, 1e-4);
        }
        let log = log.0.into_inner().unwrap().join("\n");
        if !log.is_empty() && !log.contains("on the CPU: nothing") && !OURS.contains(&op) {
            println!("{what}: {log}");
            *left.entry(op).or_default() += 1;
        }
    }
    assert_eq!(left, ON_THE_CPU.iter().copied().collect(), "operators left to the CPU");
}

/// Large matrices are stored in ggml's blocks, small ones in f16.
#[test]
#[ignore = "needs a folder of ggml backends in SDRUN_GGML_BACKENDS"]
fn a_device_multiplies_with_matrices_in_blocks() {
    let (provider, device) = device();
    // 320 is no multiple of the 256 elements of a large block.
    let layers = |seed: u64| {
        let mut model = Model::new(17);
        let mut x = model.input(noise(&[48, 320], 1));
        for (layer, pair) in [320, 512, 256, 40].windows(2).enumerate() {
            let w = model.weight(noise(&[pair[0], pair[1]], seed + layer as u64));
            x = model.node("MatMul", &[], &[x, w]);
        }
        model.output(x);
        model
    };
    let (a, b) = (layers(10), layers(50));
    let names: Vec<&str> = b.weights.keys().map(String::as_str).collect();
    let elements = [320 * 512, 512 * 256];
    for (precision, least, bytes) in [
        (Precision::Q8_0, 0.998, elements.map(|n| n / 32 * 34)),
        (Precision::Q4K, 0.95, [elements[0] / 32 * 34, elements[1] / 256 * 144]),
    ] {
        let spec = BuildSpec { device: device.clone(), ..spec(precision) };
        let engine = provider.build(&a.onnx(), &spec, &a, &NoHost).unwrap();
        let log = Log::default();
        let mut session = engine.session(&a, &log).unwrap();
        let first = run(&mut *session, &a.feeds).unwrap();
        let log = log.0.into_inner().unwrap().join("\n");
        assert!(log.contains("on the CPU: nothing"), "{log}");
        let close = |found: &Tensor, expected: &Tensor| {
            let [f, e] = [found, expected].map(|tensor| tensor.to_f32s().unwrap());
            let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum() };
            let cosine = dot(&f, &e) / (dot(&f, &f) * dot(&e, &e)).sqrt();
            assert!(cosine >= least, "{precision}: {cosine}");
        };
        close(&first[0], &a.reference()[0]);
        session.refit(&names, &b, &NoHost).unwrap();
        close(&run(&mut *session, &a.feeds).unwrap()[0], &b.reference()[0]);
        session.refit(&names, &a, &NoHost).unwrap();
        assert_eq!(run(&mut *session, &a.feeds).unwrap(), first, "back again");
        let least = (bytes[0] + bytes[1] + 2 * 256 * 40) as u64;
        let weights = session.memory().unwrap().weights.unwrap();
        assert!((least..least + 4096).contains(&weights), "{precision}: {weights} bytes, {least} expected");
    }
}

/// Products whose weights exceed the budget still run on the device, where the weights take turns.
#[test]
#[ignore = "needs a folder of ggml backends in SDRUN_GGML_BACKENDS"]
fn weights_beyond_a_budget_take_turns() {
    const LAYERS: u64 = 8;
    const BYTES: u64 = 96 * 96 * 4;
    let (provider, device) = device();
    let layers = |seed: u64| {
        let mut model = Model::new(17);
        let mut x = model.input(noise(&[64, 96], 1));
        for layer in 0..LAYERS {
            let w = model.weight(noise(&[96, 96], seed + layer));
            x = model.node("MatMul", &[], &[x, w]);
        }
        model.output(x);
        model
    };
    let (a, b) = (layers(10), layers(50));
    let build = |budget: Option<u64>| {
        let spec = BuildSpec { device: device.clone(), vram_budget: budget, ..spec(Precision::Fp32) };
        provider.build(&a.onnx(), &spec, &a, &NoHost).unwrap()
    };
    let mut whole = None;
    // Two slots are for weights that take turns.
    for (budget, stay) in
        [(None, LAYERS), (Some(LAYERS * BYTES), LAYERS), (Some(4 * BYTES), 2), (Some(2 * BYTES), 0)]
    {
        let log = Log::default();
        let mut session = build(budget).session(&a, &log).unwrap();
        let first = run(&mut *session, &a.feeds).unwrap();
        compare(&format!("{device} {budget:?}"), &first[0], &a.reference()[0], 1e-3);
        assert_eq!(run(&mut *session, &a.feeds).unwrap(), first, "the same again");
        let log = log.0.into_inner().unwrap().join("\n");
        assert!(log.contains("on the CPU: nothing"), "{log}");
        let copies = log.split(" bytes) are copied").next().and_then(|l| l.rsplit('(').next()).unwrap();
        let (copies, memory) = (copies.parse::<u64>().unwrap(), session.memory().unwrap().device.unwrap());
        let (least, most) = *whole.get_or_insert((copies, memory));
        assert_eq!(copies - least, (LAYERS - stay) * BYTES, "{budget:?}: {log}");
        assert_eq!(most - memory, budget.map_or(0, |budget| LAYERS * BYTES - budget), "{budget:?}");

        let names: Vec<&str> = b.weights.keys().map(String::as_str).collect();
        session.refit(&names, &b, &NoHost).unwrap();
        let other = run(&mut *session, &a.feeds).unwrap();
        compare(&format!("{device} {budget:?}, refitted"), &other[0], &b.reference()[0], 1e-3);
    }
    let error = build(Some(BYTES)).session(&a, &NoHost).err().unwrap();
    assert_eq!(error.code, ErrorCode::ResourceExhausted, "{error}");
    assert!(error.hint.as_ref().unwrap().to_string().contains(&(2 * BYTES).to_string()), "{error:?}");
}

#[test]
#[ignore = "needs a folder of ggml backends in SDRUN_GGML_BACKENDS"]
fn outputs_stay_on_a_device_and_are_inputs_there() {
    let (provider, device) = device();
    kept::stay_and_return(&provider, &device);
    kept::refused_from_the_cpu(&provider, &device);
}

#[test]
fn folders_that_are_no_bundle_are_refused() {
    let empty = tempfile::tempdir().unwrap();
    for (folder, code, words) in [
        (Path::new("backends"), ErrorCode::InvalidArgument, "not absolute"),
        (&empty.path().join("no-such-folder"), ErrorCode::NotFound, "no-such-folder"),
        (empty.path(), ErrorCode::NotFound, "ggml-base"),
    ] {
        let error = Ggml::load_bundle(folder).err().unwrap();
        assert_eq!(error.code, code, "{error}");
        assert!(error.message.contains(words), "{error}");
    }
    let name = format!("{}ggml-base{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::fs::write(empty.path().join(name), "no library").unwrap();
    let error = Ggml::load_bundle(empty.path()).err().unwrap();
    assert_eq!(error.code, ErrorCode::DataLoss, "{error}");
    let error = super::provider().capabilities("vulkan:7").unwrap_err();
    assert!(error.message.contains("vulkan:7") && error.hint.is_some(), "{error}");
}
