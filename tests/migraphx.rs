//! The real MIGraphX on its target `ref`, in a worker with the C library that it was built for: outputs against the reference
//! provider, weights as parameters, incompatible engines, and crashes.
//!
//! `ref` is an interpreter on one thread, about a thousand times slower than a compiled CPU kernel, so everything here is tiny.
//! `cargo xtask test` runs these tests if it could install the runtime.

#![allow(clippy::unwrap_used)]

use sdrun::{
    BuildOptions, CachePolicy, Engine, EngineFile, HostTensor, Model, Provider, Shapes, Tensors,
    abi::{DType, ErrorCode, NoHost, Precision, Provider as _, Weight, WeightSource, WeightUpdate},
    graph::proto::{GraphProto, NodeProto},
    inputs, verify,
};
use sdrun_tests::{lab::Lab, onnx};
use std::path::Path;

/// Largest error, relative to the largest value of the reference.
const TOLERANCE: f64 = 1e-5;

fn options(provider: &Provider, shapes: &Shapes) -> BuildOptions {
    options_for("ref", provider, shapes)
}

fn options_for(device: &str, provider: &Provider, shapes: &Shapes) -> BuildOptions {
    let mut options = BuildOptions::new(provider.device(Some(device)).unwrap()).precision(Precision::Fp32);
    options.cache = CachePolicy::Off;
    options.shapes = shapes.clone();
    options
}

fn shapes(list: &[(&str, &[usize])]) -> Shapes {
    list.iter().map(|(input, shape)| (input.to_string(), shape.to_vec())).collect()
}

fn run(engine: &Engine, weights: &dyn WeightSource, given: &Tensors) -> Tensors {
    engine.session(weights, &NoHost).unwrap().run(given, &NoHost).unwrap()
}

/// Outputs of the reference provider.
fn expected(
    lab: &Lab,
    model: &Model,
    shapes: &Shapes,
    weights: &dyn WeightSource,
    given: &Tensors,
) -> Tensors {
    let provider = lab.open(lab.reference()).unwrap();
    let mut options = BuildOptions::new(provider.device(None).unwrap());
    options.cache = CachePolicy::Off;
    options.shapes = shapes.clone();
    run(&provider.build(model, &options, &NoHost).unwrap(), weights, given)
}

fn close(got: &Tensors, expected: &Tensors, precision: Precision, what: &str) {
    let comparisons = verify::compare(got, expected).unwrap();
    assert!(!comparisons.is_empty());
    for c in comparisons {
        println!("{what}: {c:?}");
        match precision {
            Precision::Fp32 => assert!(c.relative_error <= TOLERANCE, "{what}: {c:?}"),
            _ => assert!(verify::Tolerance::of(precision).accepts(&c), "{what}: {c:?}"),
        }
    }
}

/// Weights of a model with every float slightly changed, so that any leftover old value shows.
struct Changed<'w>(&'w dyn WeightSource);

impl WeightSource for Changed<'_> {
    fn get(&self, name: &str) -> sdrun::abi::Result<Weight<'_>> {
        let weight = self.0.get(name)?;
        assert_eq!(weight.dtype, DType::F32, "{name}");
        let changed: Vec<u8> = weight
            .data()
            .chunks_exact(4)
            .enumerate()
            .flat_map(|(i, b)| {
                let value = f32::from_le_bytes(b.try_into().unwrap());
                (value * (1.0 + (i % 7) as f32 / 16.0)).to_le_bytes()
            })
            .collect();
        Weight::new(weight.dtype, weight.shape.clone(), changed)
    }
}

/// Checks a model at a tiny size. Its outputs match the reference, with changed weights too. Refits A → B → A give the same bits.
/// The stored and loaded engine gives the same outputs. If the graph is not rewritten for GPUs, the build with weights inside
/// computes the same bits as the one with weights as parameters.
fn holds(device: &str, name: &str, model: &Model, sizes: &[(&str, &[usize])], precision: Precision) {
    let lab = Lab::default();
    let shapes = shapes(sizes);
    let given = inputs::seeded(model, &model.bound(&shapes).unwrap(), 0).unwrap();
    let own = model.weights();
    let other = Changed(&own);
    let provider = lab.open("migraphx").unwrap();
    let options = options_for(device, &provider, &shapes).precision(precision);
    let engine = provider.build(model, &options, &NoHost).unwrap();
    let halves = engine.info().weights.iter().filter(|weight| weight.dtype == DType::F16).count();
    assert_eq!(halves > 0, precision == Precision::Fp16, "{name}: {halves} weights in f16");
    let mut session = engine.session(&own, &NoHost).unwrap();
    let a = session.run(&given, &NoHost).unwrap();
    close(&a, &expected(&lab, model, &shapes, &own, &given), precision, name);
    let report = session.refit(&other, &NoHost).unwrap();
    assert_eq!(report.method, WeightUpdate::AsInputs);
    assert_eq!(report.tensors, engine.info().weights.len());
    let b = session.run(&given, &NoHost).unwrap();
    let wanted = expected(&lab, model, &shapes, &other, &given);
    close(&b, &wanted, precision, &format!("{name}, changed weights"));
    assert_ne!(a, b);
    session.refit(&own, &NoHost).unwrap();
    assert_eq!(session.run(&given, &NoHost).unwrap(), a, "{name}: A, B, A");
    drop(session);

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engine.sdengine");
    let bytes = engine.save(&file).unwrap();
    let weights: u64 = engine.info().weights.iter().map(|w| w.dtype.bytes_of(&w.shape).unwrap() as u64).sum();
    println!("{name}: an engine of {bytes} bytes for {weights} bytes of weights");
    assert!(bytes < 1_500_000, "{name}: {bytes} bytes without weights");
    drop(engine);
    let loaded = provider.load(&file, &options.device, None, &NoHost).unwrap();
    assert_eq!(run(&loaded, &own, &given), a, "{name}: loaded");
    let baked = loaded.bake(&own, &NoHost).unwrap();
    assert!(baked.info().weights.is_empty());
    let inside = run(&baked, &own, &given);
    match device {
        "ref" => assert_eq!(inside, a, "{name}: with its weights inside"),
        _ => close(&inside, &a, precision, &format!("{name}: with its weights inside")),
    }
}

#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn taef2_decoder() {
    let model = Lab::default().model("taef2/decoder");
    holds("ref", "taef2/decoder", &model, &[("latent", &[1, 32, 2, 2])], Precision::Fp32);
}

/// At full size (nothing is run), an engine has no table or constant that grows with the image.
#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn full_size_engines_are_small() {
    let lab = Lab::default();
    let folder = tempfile::tempdir().unwrap();
    for name in ["sd15/vae-decoder", "sd15/unet"] {
        let model = lab.model(name);
        let provider = lab.open("migraphx").unwrap();
        let options = options(&provider, &model.shapes(&Shapes::new()));
        let engine = provider.build(&model, &options, &NoHost).unwrap();
        let bytes = engine.save(folder.path().join("engine.sdengine")).unwrap();
        assert!(bytes <= 3_000_000, "{name}: {bytes} bytes");
    }
}

#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn mobilenet_v2() {
    // Its size is fixed, and one run takes 15 seconds.
    let lab = Lab::default();
    let model = lab.model("mobilenet-v2");
    let shapes = shapes(&[("input", &[1, 3, 224, 224])]);
    let given = inputs::seeded(&model, &model.bound(&shapes).unwrap(), 0).unwrap();
    let provider = lab.open("migraphx").unwrap();
    let engine = provider.build(&model, &options(&provider, &shapes), &NoHost).unwrap();
    let got = run(&engine, &model.weights(), &given);
    let wanted = expected(&lab, &model, &shapes, &model.weights(), &given);
    close(&got, &wanted, Precision::Fp32, "mobilenet-v2");
}

/// An input and its shape.
type Shape<'a> = (&'a str, &'a [usize]);

/// Text encoder, VAE and UNet as exported by Optimum, at the size of a tiny pipeline.
fn tiny_pipeline(device: &str, precisions: &[Precision]) {
    let parts: [(&str, &[Shape<'_>]); 4] = [
        ("text_encoder", &[("input_ids", &[1, 16])]),
        ("vae_decoder", &[("latent_sample", &[1, 4, 4, 4])]),
        ("vae_encoder", &[("sample", &[1, 3, 16, 16])]),
        ("unet", &[("sample", &[1, 4, 8, 8]), ("timestep", &[]), ("encoder_hidden_states", &[1, 8, 32])]),
    ];
    for (part, sizes) in parts {
        let file = sdrun_tiny::folder().join(format!("sd/onnx/{part}/model.onnx"));
        for precision in precisions.iter().copied() {
            holds(device, part, &Model::open(&file).unwrap(), sizes, precision);
        }
    }
}

#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn tiny_stable_diffusion() {
    tiny_pipeline("ref", &[Precision::Fp32, Precision::Fp16]);
}

/// Graphs rewritten for GPUs compute the same.
#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn tiny_stable_diffusion_as_for_a_gpu() {
    tiny_pipeline("ref-gpu", &[Precision::Fp32]);
}

/// One engine for several sets of shapes: each gives correct outputs, programs share equal weights, and a refit changes all
/// programs.
fn serves(device: &str, part: &str, sets: &[&[Shape<'_>]], shared: bool) {
    let lab = Lab::default();
    let model = Model::open(sdrun_tiny::folder().join(format!("sd/onnx/{part}/model.onnx"))).unwrap();
    let own = model.weights();
    let other = Changed(&own);
    let provider = lab.open("migraphx").unwrap();
    let cases: Vec<(Shapes, Tensors)> = (sets.iter())
        .map(|set| {
            let shapes = shapes(set);
            let given = inputs::seeded(&model, &model.bound(&shapes).unwrap(), 0).unwrap();
            (shapes, given)
        })
        .collect();
    let mut options = options_for(device, &provider, &Shapes::new());
    let listed = |sets: &[(Shapes, Tensors)]| {
        let list = |input: &str| sets.iter().map(|(shapes, _)| shapes[input].clone()).collect();
        sets[0].0.keys().map(|input| (input.clone(), list(input))).collect()
    };
    options.open_shapes = listed(&cases);
    let engine = provider.build(&model, &options, &NoHost).unwrap();
    let mut session = engine.session(&own, &NoHost).unwrap();
    let right = |session: &mut sdrun::Session, weights: &dyn WeightSource| -> Vec<Tensors> {
        let run = |(shapes, given): &(Shapes, Tensors)| {
            let got = session.run(given, &NoHost).unwrap();
            let wanted = expected(&lab, &model, shapes, weights, given);
            close(&got, &wanted, Precision::Fp32, &format!("{part} for {shapes:?}"));
            got
        };
        cases.iter().map(run).collect()
    };
    let a = right(&mut session, &own);
    session.refit(&other, &NoHost).unwrap();
    assert_ne!(right(&mut session, &other), a);
    session.refit(&own, &NoHost).unwrap();
    let again: Vec<Tensors> = cases.iter().map(|(_, given)| session.run(given, &NoHost).unwrap()).collect();
    assert_eq!(again, a, "{part}: A, B, A");

    let mut single = options.clone();
    single.open_shapes = listed(&cases[..1]);
    let single = provider.build(&model, &single, &NoHost).unwrap().session(&own, &NoHost).unwrap();
    let bytes = |session: &sdrun::Session| session.memory().unwrap().weights.unwrap();
    println!("{part}: {} bytes of weights, {} for one shape", bytes(&session), bytes(&single));
    match shared {
        true => assert_eq!(bytes(&session), bytes(&single)),
        false => assert!(bytes(&session) < sets.len() as u64 * bytes(&single)),
    }

    let mut unknown = cases[0].0.clone();
    unknown.values_mut().filter_map(|shape| shape.first_mut()).for_each(|batch| *batch = 3);
    let given = inputs::seeded(&model, &model.bound(&unknown).unwrap(), 0).unwrap();
    let error = session.run(&given, &NoHost).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    let (text, (input, shape)) = (error.to_string(), sets[1][0]);
    assert!(text.contains(&format!("{input} {shape:?}")), "{text}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engine.sdengine");
    engine.save(&file).unwrap();
    let loaded = provider.load(&file, &options.device, None, &NoHost).unwrap();
    let baked = loaded.bake(&own, &NoHost).unwrap();
    let (mut loaded, mut baked) = (
        loaded.session(&own, &NoHost).unwrap(),
        baked.session(&sdrun::weights::InMemoryWeights::default(), &NoHost).unwrap(),
    );
    for ((_, given), a) in cases.iter().zip(&a) {
        assert_eq!(loaded.run(given, &NoHost).unwrap(), *a, "{part}: loaded");
        close(&baked.run(given, &NoHost).unwrap(), a, Precision::Fp32, "with its weights inside");
    }
}

#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn tiny_engine_serves_several_shapes() {
    let decoder: [&[Shape<'_>]; 2] =
        [&[("latent_sample", &[1, 4, 4, 4])], &[("latent_sample", &[2, 4, 2, 3])]];
    serves("ref", "vae_decoder", &decoder, true);
    let [short, long, two]: [&[Shape<'_>]; 3] =
        [&[("input_ids", &[1, 8])], &[("input_ids", &[1, 16])], &[("input_ids", &[2, 16])]];
    serves("ref", "text_encoder", &[long, two], true);
    // Each length has its own positions and expanded biases.
    serves("ref-gpu", "text_encoder", &[long, two, short], false);
    let unet: [&[Shape<'_>]; 2] = [
        &[("sample", &[1, 4, 8, 8]), ("timestep", &[]), ("encoder_hidden_states", &[1, 8, 32])],
        &[("sample", &[2, 4, 8, 4]), ("timestep", &[]), ("encoder_hidden_states", &[2, 8, 32])],
    ];
    serves("ref", "unet", &unet, true);
}

/// From x `[3]` f32 and i `[1]` i64 to y.
fn small(folder: &Path, nodes: Vec<NodeProto>) -> Model {
    let graph = GraphProto {
        node: nodes,
        input: vec![onnx::typed("x", DType::F32, &[3]), onnx::typed("i", DType::I64, &[1])],
        output: vec![onnx::typed("y", DType::F32, &[1])],
        ..Default::default()
    };
    onnx::write(&folder.join("small.onnx"), graph)
}

fn given(index: i64) -> Tensors {
    let x = HostTensor::from_f32(vec![3], &[1.0, 2.0, 3.0]).unwrap();
    let i = HostTensor::from_i64(vec![1], &[index]).unwrap();
    [("x".to_string(), x), ("i".to_string(), i)].into()
}

/// The library asserts that they are in range, or reads beyond the tensor on a GPU.
#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn indices_out_of_range_are_refused() {
    let (lab, folder) = (Lab::default(), tempfile::tempdir().unwrap());
    let model = small(folder.path(), vec![onnx::node("Gather", &["x", "i"], "y", vec![])]);
    let provider = lab.open("migraphx").unwrap();
    let built = provider.build(&model, &options(&provider, &Shapes::new()), &NoHost).unwrap();
    let path = folder.path().join("e.sdengine");
    built.save(&path).unwrap();
    let device = provider.device(None).unwrap();
    let loaded = provider.load(&path, &device, None, &NoHost).unwrap();
    for engine in [built, loaded] {
        let mut session = engine.session(&model.weights(), &NoHost).unwrap();
        assert_eq!(session.run(&given(-1), &NoHost).unwrap()["y"].to_f64().unwrap(), [3.0]);
        let error = session.run(&given(3), &NoHost).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
        assert!(error.to_string().contains("`i` has 3 at position 0"), "{error}");
        session.run(&given(0), &NoHost).unwrap();
    }
}

/// When the library aborts, the error quotes its last words, and the next worker works.
#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn crashes_become_errors() {
    let (lab, folder) = (Lab::default(), tempfile::tempdir().unwrap());
    // An index that the graph computes. The library asserts that it is in range.
    let nodes = vec![onnx::node("Neg", &["i"], "j", vec![]), onnx::node("Gather", &["x", "j"], "y", vec![])];
    let model = small(folder.path(), nodes);
    let provider = lab.open("migraphx").unwrap();
    let engine = provider.build(&model, &options(&provider, &Shapes::new()), &NoHost).unwrap();
    let mut session = engine.session(&model.weights(), &NoHost).unwrap();
    let y = session.run(&given(1), &NoHost).unwrap();
    assert_eq!(y["y"].to_f64().unwrap(), [3.0]);
    let error = session.run(&given(99), &NoHost).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("SIGABRT") && text.contains("last words") && text.contains("Assertion"), "{text}");
    assert_eq!(session.run(&given(0), &NoHost).unwrap_err().code(), ErrorCode::FailedPrecondition);
    let again = lab.open("migraphx").unwrap();
    assert_eq!(again.devices().unwrap().len(), 2);
}

/// If the library cannot read a model, the error quotes the library's message, and the worker survives.
#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn refusals_quote_the_library() {
    let (lab, folder) = (Lab::default(), tempfile::tempdir().unwrap());
    let provider = lab.open("migraphx").unwrap();
    let model = small(folder.path(), vec![onnx::node("CumProd", &["x", "i"], "y", vec![])]);
    let error = provider.build(&model, &options(&provider, &Shapes::new()), &NoHost).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Unimplemented);
    assert!(error.to_string().contains("Unknown operator: CumProd"), "{error}");
    let model = small(folder.path(), vec![onnx::node("Gather", &["x", "i"], "y", vec![])]);
    provider.build(&model, &options(&provider, &Shapes::new()), &NoHost).unwrap();
}

/// Replaces a text in the payload by another of the same length and updates the checksum.
fn resealed(payload: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut changed = payload.to_vec();
    let places: Vec<usize> =
        (20..changed.len() - from.len()).filter(|at| changed[*at..].starts_with(from.as_bytes())).collect();
    assert!(!places.is_empty(), "{from} is not in the payload");
    for at in places {
        changed[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    let sum = xxhash_rust::xxh3::xxh3_64(&changed[16..]);
    changed[8..16].copy_from_slice(&sum.to_le_bytes());
    changed
}

/// Engines of another version, for another device, with other options, damaged ones, and one that only the library can reject.
#[test]
#[ignore = "needs MIGraphX; run by `cargo xtask test`"]
fn incompatible_engines_are_refused() {
    let (lab, folder) = (Lab::default(), tempfile::tempdir().unwrap());
    let model = small(folder.path(), vec![onnx::node("Gather", &["x", "i"], "y", vec![])]);
    let provider = lab.open("migraphx").unwrap();
    let engine = provider.build(&model, &options(&provider, &Shapes::new()), &NoHost).unwrap();
    let file = folder.path().join("e.sdengine");
    engine.save(&file).unwrap();
    let compatibility = engine.info().compatibility.clone();
    let version = provider.runtime().version.clone();
    assert!(compatibility.contains(&version) && compatibility.contains("\"ref\""), "{compatibility}");

    let driver = provider.worker().unwrap();
    for (text, words) in [
        (compatibility.replace(&version, "1.0.0"), "built with MIGraphX 1.0.0"),
        (compatibility.replace("ref", "gfx1100"), "built for gfx1100, this device is ref"),
        (compatibility.replace("\"ref\"", "\"ref-gpu\""), "built for ref-gpu, this device is ref"),
        (compatibility.replace("null", "60443484"), "built with HIP 60443484, found none"),
    ] {
        match driver.check(&text, "ref").unwrap() {
            sdrun::abi::Compatibility::Unsupported(why) => assert!(why.contains(words), "{why}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    assert_eq!(driver.check(&compatibility, "ref").unwrap(), sdrun::abi::Compatibility::Optimal);

    let file = EngineFile::open(&file).unwrap();
    let (payload, spec) = (file.payload(), file.manifest.spec.clone());
    let load = |payload: &[u8]| driver.load(payload, &spec, &NoHost);
    assert!(load(payload).is_ok());
    let foreign = resealed(payload, &version, &version.replace('2', "9"));
    let error = load(&foreign).err().unwrap();
    assert!(error.message.contains("built with MIGraphX"), "{error}");
    assert!(error.hint.unwrap().to_string().contains("build it again"));
    for broken in [&payload[..payload.len() / 2], &payload[..20], &[]] {
        assert_eq!(load(broken).err().unwrap().code, ErrorCode::DataLoss);
    }
    // The checksum is right, but the library cannot use the program: it reports an unknown operator and aborts on a missing input.
    let error = load(&resealed(payload, "gather", "gozher")).err().unwrap();
    assert!(error.hint.unwrap().to_string().contains("gozher"));
    assert!(load(payload).is_ok());
}
