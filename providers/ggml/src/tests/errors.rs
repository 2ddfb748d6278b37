use super::{Model, build, from, noise, provider, run, spec};
use crate::{
    GgmlProvider,
    ffi::{Ggml, library_file},
};
use proptest::prelude::*;
use sdrun_abi::{BuildSpec, ErrorCode, InitConfig, NoHost, Precision, Provider};
use sdrun_graph::{Attribute, Tensor};
use std::collections::BTreeMap;

fn small() -> Model {
    let mut model = Model::new(17);
    let x = model.input(noise(&[2, 3], 1));
    let w = model.weight(noise(&[3, 4], 2));
    let y = model.node("MatMul", &[], &[x, w]);
    model.output(y);
    model
}

#[test]
fn an_unknown_operator_is_named_before_any_work() {
    let mut model = small();
    let y = model.graph.outputs[0];
    let z = model.node("NoSuchOperator", &[], &[y]);
    model.graph.values[z.0 as usize].dtype = Some(sdrun_abi::DType::F32);
    model.graph.values[z.0 as usize].shape = model.graph.values[y.0 as usize].shape.clone();
    model.graph.outputs = vec![z];
    let error = build(&model, &spec(Precision::Fp32)).err().unwrap();
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("NoSuchOperator"), "{error}");
}

#[test]
fn all_unknown_operators_are_named_at_once() {
    let mut model = small();
    let y = model.graph.outputs[0];
    let known = model.graph.values[y.0 as usize].clone();
    let mut z = y;
    for op in ["NoSuchOperator", "Relu", "NorThis", "NoSuchOperator"] {
        z = model.node(op, &[], &[z]);
        let value = &mut model.graph.values[z.0 as usize];
        (value.dtype, value.shape) = (Some(sdrun_abi::DType::F32), Some(vec![sdrun_graph::Dim::Known(2); 2]));
    }
    model.graph.values[y.0 as usize] = known;
    model.graph.outputs = vec![z];
    let error = build(&model, &spec(Precision::Fp32)).err().unwrap();
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    let start = "the ggml provider cannot run 3 nodes: NoSuchOperator x2 (\"/NoSuchOperator_1\", \"/NoSuchOperator_4\"): ";
    assert!(error.message.starts_with(start), "{error}");
    assert!(error.message.contains("; NorThis x1 (\"/NorThis_3\"): "), "{error}");
}

#[test]
fn unknown_operators_behind_unknown_shapes_are_named_too() {
    let mut model = small();
    let mut z = model.graph.outputs[0];
    for op in ["NoSuchOperator", "Relu", "NoSuchOperator", "NoSuchOperator", "NorThis"] {
        z = model.node(op, &[], &[z]);
    }
    for _ in 0..6 {
        z = model.node("NorThis", &[], &[z]);
    }
    model.graph.outputs = vec![z];
    let error = build(&model, &spec(Precision::Fp32)).err().unwrap();
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("cannot run 10 nodes: NoSuchOperator x3 ("), "{error}");
    assert!(error.message.contains("; NorThis x7 (") && error.message.contains(", ...)"), "{error}");
}

#[test]
fn an_attribute_nobody_takes_is_named() {
    // An offset of half an element is no repetition, and the reference implementation refuses random operators.
    let mut model = Model::new(17);
    let x = model.input(noise(&[2, 3], 1));
    let y = model.node("RandomNormalLike", &[("mean", Attribute::Float(1.0))], &[x]);
    model.output(y);
    let error = build(&model, &spec(Precision::Fp32)).err().unwrap();
    assert_eq!(error.code, ErrorCode::Unimplemented, "{error}");
    assert!(error.message.contains("RandomNormalLike") && error.hint.is_some(), "{error}");
}

#[test]
fn the_rank_of_an_input_must_be_known() {
    let mut model = small();
    let input = model.graph.inputs[0];
    model.graph.values[input.0 as usize].shape = None;
    let error = build(&model, &spec(Precision::Fp32)).err().unwrap();
    assert!(error.message.contains("rank"), "{error}");
}

#[test]
fn an_index_out_of_range_ends_the_run_and_not_the_process() {
    let mut model = Model::new(17);
    let table = model.weight(noise(&[5, 3], 1));
    let index = model.input(Tensor::from_i64s(&[1, 2]));
    let y = model.node("Gather", &[], &[table, index]);
    model.output(y);
    let mut session = build(&model, &spec(Precision::Fp32)).unwrap().session(&model, &NoHost).unwrap();
    let good = run(&mut *session, &model.feeds).unwrap();
    for bad in [5, -6, i64::MAX, i64::MIN] {
        let error = run(&mut *session, &[Tensor::from_i64s(&[0, bad])]).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.contains("Gather") && error.message.contains(&bad.to_string()), "{error}");
    }
    assert_eq!(run(&mut *session, &model.feeds).unwrap(), good);
}

#[test]
fn what_the_reference_implementation_refuses_at_run_time_is_an_error() {
    // Integer division by zero.
    let mut model = Model::new(17);
    let a = model.input(Tensor::from_i64s(&[4, 5]));
    let b = model.input(Tensor::from_i64s(&[0, 1]));
    let y = model.node("Div", &[], &[a, b]);
    model.output(y);
    let mut session = build(&model, &spec(Precision::Fp32)).unwrap().session(&model, &NoHost).unwrap();
    let error = run(&mut *session, &model.feeds).unwrap_err();
    assert!(error.message.contains("Div"), "{error}");
    let fine = [Tensor::from_i64s(&[4, 5]), Tensor::from_i64s(&[2, 5])];
    assert_eq!(run(&mut *session, &fine).unwrap(), [Tensor::from_i64s(&[2, 1])]);
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let model = small();
    let good = spec(Precision::Fp32);
    let refused = |spec: BuildSpec| build(&model, &spec).err().unwrap();
    assert_eq!(refused(BuildSpec { device: "gpu".into(), ..good.clone() }).code, ErrorCode::NotFound);
    assert_eq!(refused(BuildSpec { bake: true, ..good.clone() }).code, ErrorCode::Unimplemented);
    assert_eq!(refused(BuildSpec { threads: Some(0), ..good.clone() }).code, ErrorCode::InvalidArgument);
    let options = BTreeMap::from([("fast".to_string(), "1".to_string())]);
    assert!(refused(BuildSpec { options: options.clone(), ..good.clone() }).message.contains("fast"));
    let config = InitConfig { options, ..InitConfig::default() };
    assert!(GgmlProvider::default().init(&config, &NoHost).unwrap_err().message.contains("fast"));
    assert_eq!(provider().check("nonsense", "cpu").unwrap_err().code, ErrorCode::InvalidArgument);
    let foreign = provider().check(r#"{"format":99,"ggml":"9.9.9"}"#, "cpu").unwrap();
    assert!(matches!(foreign, sdrun_abi::Compatibility::Unsupported(_)));
}

#[test]
fn before_init_everything_fails_politely() {
    let provider = GgmlProvider::default();
    let model = small();
    assert_eq!(provider.devices().unwrap_err().code, ErrorCode::FailedPrecondition);
    let built = provider.build(&model.onnx(), &spec(Precision::Fp32), &model, &NoHost);
    assert_eq!(built.err().unwrap().code, ErrorCode::FailedPrecondition);
}

#[test]
fn missing_and_broken_libraries_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let error = Ggml::load_from(folder.path()).err().unwrap();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.message.contains(&folder.path().display().to_string()) && error.hint.is_some(), "{error}");
    std::fs::write(folder.path().join(library_file("ggml-base")), b"not a library").unwrap();
    let error = Ggml::load_from(folder.path()).err().unwrap();
    assert_eq!(error.code, ErrorCode::DataLoss, "{error}");
}

#[test]
fn garbage_is_no_model() {
    for bytes in [&b""[..], b"ONNX", &[0xff; 64]] {
        let model = small();
        let error = provider().build(bytes, &spec(Precision::Fp32), &model, &NoHost).err().unwrap();
        assert!(!error.message.is_empty());
    }
}

#[test]
fn a_truncated_engine_is_corrupt() {
    let payload = build(&small(), &spec(Precision::Fp32)).unwrap().serialize().unwrap();
    for len in 0..payload.len() {
        let error = provider().load(&payload[..len], &spec(Precision::Fp32), &NoHost).err().unwrap();
        assert_eq!(error.code, ErrorCode::DataLoss, "{len} of {} bytes: {error}", payload.len());
    }
    let other = provider().load(&payload, &spec(Precision::Fp16), &NoHost).err().unwrap();
    assert_eq!(other.code, ErrorCode::InvalidArgument);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Damaged engines load or are refused, without a panic.
    #[test]
    fn a_damaged_engine_is_refused_or_loads(position in any::<prop::sample::Index>(), value in any::<u8>()) {
        let mut payload = build(&small(), &spec(Precision::Fp32)).unwrap().serialize().unwrap();
        let position = position.index(payload.len());
        payload[position] = value;
        let _ = provider().load(&payload, &spec(Precision::Fp32), &NoHost);
    }

    /// Any permutation of any small shape.
    #[test]
    fn transposes_of_any_shape(dims in prop::collection::vec(1usize..6, 1..7), seed in any::<u64>()) {
        let mut perm: Vec<i64> = (0..dims.len() as i64).collect();
        for i in (1..perm.len()).rev() {
            perm.swap(i, (seed >> (i * 5)) as usize % (i + 1));
        }
        let mut model = Model::new(17);
        let x = model.input(from(&dims, |i| i as i32));
        let y = model.node("Transpose", &[("perm", Attribute::Ints(perm))], &[x]);
        model.output(y);
        super::check("transpose", &model, 0.0);
    }

    /// Any pair of shapes that broadcast.
    #[test]
    fn broadcasts_of_any_shape(
        dims in prop::collection::vec((1usize..5, 0u8..3), 0..6),
        short in 0usize..3,
        op in prop::sample::select(vec!["Add", "Sub", "Mul", "Max"]),
    ) {
        let a: Vec<usize> = dims.iter().map(|(d, kind)| if *kind == 0 { 1 } else { *d }).collect();
        let b: Vec<usize> = dims.iter().map(|(d, kind)| if *kind == 1 { 1 } else { *d }).collect();
        let b = &b[short.min(b.len())..];
        let mut model = Model::new(17);
        let (a, b) = (model.input(noise(&a, 1)), model.input(noise(b, 2)));
        let y = model.node(op, &[], &[a, b]);
        model.output(y);
        super::check(op, &model, 1e-6);
    }
}
