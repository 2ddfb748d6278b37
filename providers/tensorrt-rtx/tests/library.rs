//! Tests with the real library on a machine without a GPU: builds and error messages.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{
    BuildSpec, Compatibility, DType, Device, Engine, ErrorCode, LogLevel, NoHost, Precision, Provider,
    Result, Weight, WeightSource,
};
use sdrun_graph::{ExternalBase, Graph, OpenDims, simplify};
use sdrun_provider_tensorrt_rtx::TensorRtRtx;
use sdrun_weights::builtin;
use std::{collections::BTreeMap, sync::OnceLock};
use testing::{
    Log, Model, Source, Stop, config, failure, noise, perceptron, perceptron_weights, runtime_dir,
};

fn provider() -> &'static TensorRtRtx {
    static PROVIDER: OnceLock<TensorRtRtx> = OnceLock::new();
    PROVIDER.get_or_init(|| {
        let dir = runtime_dir("SDRUN_TENSORRT_RTX_DIR");
        let info = TensorRtRtx.init(&config(Some(&dir), &std::env::temp_dir()), &NoHost).unwrap();
        assert!(info.version.starts_with("1.7."), "{info:?}");
        TensorRtRtx
    })
}

fn spec(device: &str, precision: Precision) -> BuildSpec {
    BuildSpec { device: device.into(), ..testing::spec(precision) }
}

/// A source that must not be read.
struct Untouched;

impl WeightSource for Untouched {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        panic!("weight {name} was read");
    }
}

fn build(model: &[u8], spec: &BuildSpec) -> Result<Box<dyn Engine>> {
    provider().build(model, spec, &Untouched, &NoHost)
}

fn has_gpu() -> bool {
    provider().devices().unwrap()[0].absent.is_none()
}

/// A built-in model as the host passes it.
fn model_of(name: &str) -> Vec<u8> {
    let model = builtin::find(name).unwrap();
    let bytes = model.graph_bytes().unwrap();
    let mut graph = Graph::from_bytes(bytes.into(), name, ExternalBase::Stripped).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> =
        model.inputs.iter().map(|i| (i.name.to_string(), i.shape.to_vec())).collect();
    simplify(&mut graph, &shapes, OpenDims::Refuse).unwrap();
    graph.to_onnx_stripped().unwrap()
}

#[test]
fn targets_are_devices() {
    let devices: Vec<Device> = provider().devices().unwrap();
    for id in ["portable", "sm75", "sm80", "sm86", "sm89", "sm120", "sm121"] {
        let device = devices.iter().find(|d| d.id == id).unwrap();
        assert!(device.absent.is_some() && device.class == id);
        let capabilities = provider().capabilities(id).unwrap();
        assert!(capabilities.device_free_build && capabilities.precisions.contains(&Precision::Fp16));
    }
    assert_eq!(failure(provider().capabilities("sm13")).code, ErrorCode::NotFound);
}

#[test]
fn mobilenet_is_built_without_weights() {
    let model = model_of("mobilenet-v2");
    for device in ["portable", "sm89"] {
        let engine = build(&model, &spec(device, Precision::Fp32)).unwrap();
        let weights: u64 =
            engine.info().weights.iter().map(|w| w.dtype.bytes_of(&w.shape).unwrap() as u64).sum();
        let payload = engine.serialize().unwrap();
        assert!((payload.len() as u64) < weights / 2, "{} of {weights} bytes", payload.len());
        let again = provider().load(&payload, &spec(device, Precision::Fp32), &NoHost).unwrap();
        assert_eq!(again.info(), engine.info());
        assert_eq!(again.serialize().unwrap(), payload);
        let verdict = provider().check(&engine.info().compatibility, device).unwrap();
        assert_eq!(verdict, Compatibility::Optimal);
        let other = provider().check(&engine.info().compatibility, "sm120").unwrap();
        assert!(
            matches!(other, Compatibility::Unsupported(why) if why.contains("built for") && why.contains("sm120"))
        );
    }
}

/// With a GPU the same calls succeed.
#[test]
fn without_a_gpu_running_is_refused_at_once() {
    let engine = build(&perceptron(), &spec("portable", Precision::Fp32)).unwrap();
    let session = engine.session(&perceptron_weights(1), &NoHost).map(drop);
    let baked = engine.bake(&perceptron_weights(1), &NoHost).map(drop);
    for result in [session, baked] {
        if has_gpu() {
            result.unwrap();
            continue;
        }
        let error = failure(result);
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        assert_eq!(error.message, "needs an NVIDIA GPU: no CUDA driver found");
    }
}

#[test]
fn an_engine_with_its_weights_inside_takes_no_others() {
    let mut spec = spec("sm89", Precision::Fp32);
    spec.bake = true;
    let engine = provider().build(&perceptron(), &spec, &perceptron_weights(1), &NoHost).unwrap();
    assert!(engine.info().weights.is_empty());
    let w1 = &perceptron_weights(1).0["w1"].data;
    let payload = engine.serialize().unwrap();
    // The plan holds all numbers of the largest weight, in any order.
    let held = w1.chunks_exact(4).filter(|value| payload.windows(4).any(|bytes| bytes == *value)).count();
    assert_eq!(held, w1.len() / 4);
    let missing = Source::default();
    assert_eq!(failure(provider().build(&perceptron(), &spec, &missing, &NoHost)).code, ErrorCode::NotFound);
}

#[test]
fn every_precision_is_built() {
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
        let engine = build(&perceptron(), &spec("sm89", precision)).unwrap();
        let expected = precision.float_type().unwrap();
        assert!(engine.info().weights.iter().all(|w| w.dtype == expected), "{precision}");
        assert_eq!((engine.info().inputs[0].dtype, engine.info().outputs[0].dtype), (DType::F32, DType::F32));
    }
    let error = failure(build(&perceptron(), &spec("sm75", Precision::Fp32)));
    assert!(error.message.contains("for sm75 does not compute in fp32"), "{error}");
    build(&perceptron(), &spec("sm75", Precision::Fp16)).unwrap();
}

#[test]
fn a_cancelled_build_is_cancelled() {
    let started = std::time::Instant::now();
    let error = failure(provider().build(
        &model_of("mobilenet-v2"),
        &spec("sm89", Precision::Fp32),
        &Untouched,
        &Always,
    ));
    assert_eq!(error.code, ErrorCode::Cancelled, "{error}");
    let error =
        failure(provider().build(&perceptron(), &spec("sm89", Precision::Fp32), &Untouched, &Stop("read")));
    assert_eq!(error.code, ErrorCode::Cancelled);
    // After a cancelled build, the next one works.
    build(&perceptron(), &spec("sm89", Precision::Fp32)).unwrap();
    println!("{:?}", started.elapsed());
}

/// Stops as soon as the vendor's builder reports progress.
struct Always;

impl sdrun_abi::Host for Always {
    fn log(&self, _: sdrun_abi::LogLevel, _: &str, _: &str) {}
    fn progress(&self, phase: &str, _: u64, _: u64) -> sdrun_abi::Flow {
        if phase == "read" { sdrun_abi::Flow::Continue } else { sdrun_abi::Flow::Cancel }
    }
    fn cancelled(&self) -> bool {
        true
    }
}

#[test]
fn what_cannot_be_built_is_named() {
    let unknown = Model::default()
        .input("x", DType::F32, &[4, 4])
        .output("y", DType::F32, &[])
        .weight("w", DType::F32, &[4, 4])
        .node("MatMul", &["x", "w"], &["h"])
        .node("Det", &["h"], &["y"])
        .bytes();
    let error = failure(build(&unknown, &spec("sm89", Precision::Fp32)));
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("operator Det"), "{error}");

    let open = Model::default()
        .input("x", DType::F32, &[-1, 4])
        .output("y", DType::F32, &[-1, 4])
        .weight("w", DType::F32, &[4, 4])
        .node("MatMul", &["x", "w"], &["y"])
        .bytes();
    let error = failure(build(&open, &spec("sm89", Precision::Fp32)));
    assert!(error.message.contains("`x` [?, 4] has open dimensions"), "{error}");
    let hint = error.hint.unwrap();
    assert!(format!("{hint:?}").contains("GiveShape"), "{hint:?}");
    let for_shapes = |shapes: [[usize; 2]; 3]| {
        let list = shapes.map(|shape| shape.to_vec()).to_vec();
        BuildSpec { open_shapes: [("x".to_string(), list)].into(), ..spec("sm89", Precision::Fp32) }
    };
    let engine = build(&open, &for_shapes([[1, 4], [2, 4], [8, 4]])).unwrap();
    assert_eq!(engine.info().inputs[0].shape, [None, Some(4)]);
    let error = failure(build(&open, &for_shapes([[1, 5], [2, 5], [8, 5]])));
    assert!(error.message.contains("does not fit the model"), "{error}");

    // The export fixed one size, which contradicts the range.
    let baked = Model::default()
        .input("x", DType::F32, &[-1, 4])
        .output("y", DType::F32, &[-1, 4])
        .weight("w", DType::F32, &[3, 4])
        .node("Add", &["x", "w"], &["y"])
        .bytes();
    let error = failure(build(&baked, &for_shapes([[2, 4]; 3])));
    println!("{error}");
    assert!(error.message.contains("TensorRT-RTX cannot"), "{error}");

    let garbage = noise(3, 100).iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    assert_eq!(failure(build(&garbage, &spec("sm89", Precision::Fp32))).code, ErrorCode::InvalidArgument);
    assert!(failure(build(&[], &spec("sm89", Precision::Fp32))).code != ErrorCode::Internal);
}

#[test]
fn a_damaged_engine_is_refused() {
    let spec = spec("sm89", Precision::Fp32);
    let engine = build(&perceptron(), &spec).unwrap();
    let payload = engine.serialize().unwrap();
    for end in [0, 7, 11, 100, payload.len() / 2, payload.len() - 1] {
        assert_eq!(
            failure(provider().load(&payload[..end], &spec, &NoHost)).code,
            ErrorCode::DataLoss,
            "{end}"
        );
    }
    let mut elsewhere = spec.clone();
    elsewhere.device = "sm86".into();
    let error = failure(provider().load(&payload, &elsewhere, &NoHost));
    assert!(error.message.contains("built for sm89, this device is sm86"), "{error}");
    let old = engine.info().compatibility.replace("1.7.", "1.6.");
    assert!(
        matches!(provider().check(&old, "sm89").unwrap(), Compatibility::Unsupported(why) if why.contains("1.6."))
    );
}

#[test]
fn batch_normalization_is_refittable() {
    let norm = |model: Model, x: &str| {
        model
            .weight("scale", DType::F32, &[4])
            .weight("bias", DType::F32, &[4])
            .weight("mean", DType::F32, &[4])
            .weight("variance", DType::F32, &[4])
            .node("BatchNormalization", &[x, "scale", "bias", "mean", "variance"], &["y"])
            .bytes()
    };
    let model = Model::default()
        .input("x", DType::F32, &[1, 4, 8, 8])
        .output("y", DType::F32, &[1, 4, 8, 8])
        .weight("kernel", DType::F32, &[4, 4, 1, 1])
        .node("Conv", &["x", "kernel"], &["h"]);
    let engine = build(&norm(model, "h"), &spec("sm89", Precision::Fp32)).unwrap();
    let names: Vec<&str> = engine.info().weights.iter().map(|w| w.name.as_str()).collect();
    assert_eq!(names, ["kernel", "scale", "bias", "mean", "variance"]);
}

/// Without a GPU the library omits weights only if the graph has a convolution or a matrix product; with one, always.
#[test]
fn a_graph_without_products_says_why_it_is_not_built() {
    let model = Model::default()
        .input("x", DType::F32, &[1, 4])
        .output("y", DType::F32, &[1, 4])
        .weight("w", DType::F32, &[4])
        .node("Mul", &["x", "w"], &["y"])
        .bytes();
    let built = build(&model, &spec("sm89", Precision::Fp32));
    if has_gpu() {
        assert_eq!(built.unwrap().info().weights.len(), 1);
    } else {
        let error = failure(built);
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert!(error.message.contains("needs a CUDA driver to leave the weights"), "{error}");
        assert!(error.hint.unwrap().to_string().contains("store the weights in the engine"));
    }
    let mut baked = spec("sm89", Precision::Fp32);
    baked.bake = true;
    provider()
        .build(&model, &baked, &Source::default().with("w", &[4], &[1.0, 2.0, 3.0, 4.0]), &NoHost)
        .unwrap();
}

#[test]
fn all_nodes_that_are_not_supported_are_named_at_once() {
    let log = Log::default();
    let mut model = Model::default()
        .input("x", DType::F32, &[1, 4])
        .output("p0", DType::I32, &[1, 2])
        .output("p1", DType::I32, &[1, 2])
        .constant("w", DType::U8, &[4, 2], vec![1; 8]);
    for i in 0..2 {
        let n = |name: &str| format!("{name}{i}");
        model = model.node("DynamicQuantizeLinear", &["x"], &[&n("q"), &n("scale"), &n("zero")]).node(
            "MatMulInteger",
            &[&n("q"), "w", &n("zero")],
            &[&n("p")],
        );
    }
    let built = provider().build(&model.bytes(), &spec("sm89", Precision::Fp32), &Untouched, &log);
    let error = failure(built);
    assert_eq!(error.code, ErrorCode::Unimplemented);
    for op in ["DynamicQuantizeLinear", "MatMulInteger"] {
        assert!(error.message.contains(&format!("operator {op} is not supported (")), "{error}");
    }
    assert_eq!(error.message.lines().count(), 1);
    let records = log.0.into_inner().unwrap();
    let shown: Vec<_> = records.iter().filter(|(level, _)| *level >= LogLevel::Warn).collect();
    assert!(shown.is_empty(), "the error says it: {shown:?}");
}

/// What the parser finds when it reads a node has words of its own.
#[test]
fn a_node_that_is_not_supported_in_this_form_is_named() {
    let model = Model::default()
        .input("x", DType::F32, &[2])
        .output("y", DType::F32, &[2])
        .constant("bias", DType::I32, &[2], vec![1; 8])
        .constant("scale", DType::F32, &[], 0.5f32.to_le_bytes().to_vec())
        .node("DequantizeLinear", &["bias", "scale"], &["b"])
        .node("Add", &["x", "b"], &["y"]);
    let error = failure(build(&model.bytes(), &spec("sm89", Precision::Fp32)));
    assert_eq!(error.code, ErrorCode::Unimplemented);
    assert!(error.message.contains("operator DequantizeLinear: "), "{error}");
    assert!(error.message.contains("has type Int32 but must have type"), "{error}");
}
