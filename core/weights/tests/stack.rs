//! Checkpoints and adapters as the weights of a graph, compared with f64.

#![allow(clippy::unwrap_used)]

use half::f16;
use safetensors::{Dtype, serialize_to_file, tensor::TensorView};
use sdrun_abi::{DType, Error, ErrorCode, Result, Weight, WeightSource, WeightSpec};
use sdrun_graph::Tensor;
use sdrun_weights::{
    Adapter, AdapterUse, Binding, BoundTensor, Cast, Component, InMemoryWeights, StateDict, Transform,
    WeightStack, adapter::DoraRule, embedding::Embedding, synthetic,
};
use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Tensors by state-dict name.
#[derive(Clone)]
struct Dict(InMemoryWeights);

impl WeightSource for Dict {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.0.get(name)
    }
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        self.0.describe(name)
    }
}

impl StateDict for Dict {
    fn names(&self) -> Vec<&str> {
        self.0.0.keys().map(String::as_str).collect()
    }
}

const TO_Q: &str = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight";
const TO_K: &str = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k.weight";
const PROJ: &str = "down_blocks.0.attentions.0.proj_in.weight";
const NORM: &str = "down_blocks.0.attentions.0.norm.weight";

fn bound(name: &str, sources: &[&str], transform: Transform, from: &[usize], to: &[usize]) -> BoundTensor {
    BoundTensor {
        name: name.into(),
        sources: sources.iter().map(ToString::to_string).collect(),
        transform,
        source_shape: from.to_vec(),
        shape: to.to_vec(),
        dtype: DType::F32,
    }
}

/// One weight of each sort: transposed, reshaped, unchanged, and fused from two.
fn binding() -> Binding {
    Binding {
        component: Some(Component::Denoiser),
        tensors: vec![
            bound("onnx::MatMul_1", &[TO_Q], Transform::Transpose, &[6, 4], &[4, 6]),
            bound("onnx::Mul_2", &[NORM], Transform::Reshape, &[4], &[4, 1, 1]),
            bound(PROJ, &[PROJ], Transform::Identity, &[4, 4, 1, 1], &[4, 4, 1, 1]),
            bound("qk", &[TO_Q, TO_K], Transform::Identity, &[12, 4], &[12, 4]),
        ],
    }
}

fn values(tag: &str, name: &str, shape: &[usize]) -> Vec<f32> {
    let mut bytes = vec![0; shape.iter().product::<usize>() * 4];
    synthetic::fill(tag, name, shape, DType::F32, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// An f16 checkpoint and its values.
fn checkpoint() -> (Dict, BTreeMap<&'static str, Vec<f64>>) {
    let (mut dict, mut plain) = (BTreeMap::new(), BTreeMap::new());
    // The projection is a linear layer here, but a 1x1 convolution in the graph.
    for (name, shape) in [(TO_Q, &[6, 4][..]), (TO_K, &[6, 4]), (PROJ, &[4, 4]), (NORM, &[4])] {
        let halves: Vec<f16> = values("base", name, shape).into_iter().map(f16::from_f32).collect();
        plain.insert(name, halves.iter().map(|h| h.to_f64()).collect());
        let bytes: Vec<u8> = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
        dict.insert(name.to_string(), Tensor::new(DType::F16, shape.to_vec(), bytes).unwrap());
    }
    (Dict(InMemoryWeights(dict)), plain)
}

/// A rank-2 LoRA without alpha on the query projection: its file, and ΔW.
fn lora(folder: &Path, name: &str) -> (Adapter, Vec<f64>) {
    lora_on(folder, name, [6, 4])
}

/// The same for a projection of another shape.
fn lora_on(folder: &Path, name: &str, [rows, columns]: [usize; 2]) -> (Adapter, Vec<f64>) {
    let module = TO_Q.trim_end_matches(".weight").replace('.', "_");
    let (down, up) = (values(name, "down", &[2, columns]), values(name, "up", &[rows, 2]));
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let (down_bytes, up_bytes) = (bytes(&down), bytes(&up));
    let tensors = [
        (
            format!("lora_unet_{module}.lora_down.weight"),
            TensorView::new(Dtype::F32, vec![2, columns], &down_bytes).unwrap(),
        ),
        (
            format!("lora_unet_{module}.lora_up.weight"),
            TensorView::new(Dtype::F32, vec![rows, 2], &up_bytes).unwrap(),
        ),
    ];
    let file = folder.join(format!("{name}.safetensors"));
    serialize_to_file(tensors, None, &file).unwrap();
    let delta = |row: usize, column: usize| -> f64 {
        (0..2).map(|r| f64::from(up[row * 2 + r]) * f64::from(down[r * columns + column])).sum()
    };
    let deltas = (0..rows * columns).map(|i| delta(i / columns, i % columns)).collect();
    (Adapter::open(&file).unwrap(), deltas)
}

fn f32s(weight: &Weight<'_>) -> Vec<f64> {
    match weight.dtype {
        DType::F32 => weight.data().as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        DType::F16 => weight.data().as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
        other => panic!("{other}"),
    }
}

fn transposed(values: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|i| values[(i % rows) * columns + i / rows]).collect()
}

/// All terms of both sums are below 3 in magnitude, so f32 is off by a few of its steps at that size.
fn assert_close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 4.0 * 3.0 * f64::from(f32::EPSILON), "{got} {expected}");
    }
}

fn stack() -> (WeightStack, BTreeMap<&'static str, Vec<f64>>) {
    let (dict, plain) = checkpoint();
    (WeightStack::of_state_dict(binding(), Box::new(dict)), plain)
}

#[test]
fn weights_come_in_the_layout_of_the_graph() {
    let (stack, plain) = stack();
    let query = stack.get("onnx::MatMul_1").unwrap();
    assert_eq!((query.dtype, &*query.shape), (DType::F16, &[4, 6][..]));
    assert_eq!(f32s(&query), transposed(&plain[TO_Q], 6, 4));
    let norm = stack.get("onnx::Mul_2").unwrap();
    assert_eq!((&*norm.shape, f32s(&norm)), (&[4, 1, 1][..], plain[NORM].clone()));
    let projection = stack.get(PROJ).unwrap();
    assert_eq!((&*projection.shape, f32s(&projection)), (&[4, 4, 1, 1][..], plain[PROJ].clone()));
    let both = stack.get("qk").unwrap();
    assert_eq!((both.dtype, f32s(&both)), (DType::F32, [plain[TO_Q].clone(), plain[TO_K].clone()].concat()));
    for tensor in binding().tensors {
        let weight = stack.get(&tensor.name).unwrap();
        assert_eq!(
            stack.describe(&tensor.name).unwrap(),
            (weight.dtype, weight.shape.clone()),
            "{}",
            tensor.name
        );
    }
}

#[test]
fn adapters_reach_every_layout_and_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let (stack, plain) = stack();
    let ((a, da), (b, db)) = (lora(folder.path(), "a"), lora(folder.path(), "b"));
    let both = stack
        .clone()
        .with_adapter(&a, AdapterUse::at(0.7))
        .unwrap()
        .with_adapter(&b, AdapterUse::at(-0.5))
        .unwrap();
    let expected: Vec<f64> =
        (0..24).map(|i| plain[TO_Q][i] + f64::from(0.7f32) * da[i] + f64::from(-0.5f32) * db[i]).collect();
    assert_close(&f32s(&both.get("onnx::MatMul_1").unwrap()), &transposed(&expected, 6, 4));
    // Placed in its own rows of the fused weight.
    let fused = f32s(&both.get("qk").unwrap());
    assert_close(&fused[..24], &expected);
    assert_eq!(fused[24..], plain[TO_K]);
    assert_eq!(both.changed(), 2);
    assert_eq!(both.reports().map(|r| r.modules.applied.len()).sum::<usize>(), 2);
    assert_eq!(both.pristine().changed(), 0);
    for tensor in binding().tensors {
        let weight = both.get(&tensor.name).unwrap();
        assert_eq!(
            both.describe(&tensor.name).unwrap(),
            (weight.dtype, weight.shape.clone()),
            "{}",
            tensor.name
        );
    }
}

#[test]
fn a_graphs_own_weights_take_adapters_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let (a, delta) = lora(folder.path(), "a");
    let mut binding = binding();
    binding.tensors.truncate(3);
    let own = values("own", TO_Q, &[6, 4]);
    let bytes: Vec<u8> = (0..24).flat_map(|i| own[(i % 6) * 4 + i / 6].to_le_bytes()).collect();
    let mut graph = BTreeMap::new();
    graph.insert("onnx::MatMul_1".to_string(), Tensor::new(DType::F32, vec![4, 6], bytes.clone()).unwrap());
    graph.insert("other".to_string(), Tensor::from_elements(vec![1], &[1.0f32]).unwrap());
    let base = WeightStack::of_graph(binding, Box::new(InMemoryWeights(graph)));
    let with = base.clone().with_adapter(&a, AdapterUse::at(1.0)).unwrap();
    let expected: Vec<f64> = (0..24).map(|i| f64::from(own[i]) + delta[i]).collect();
    assert_close(&f32s(&with.get("onnx::MatMul_1").unwrap()), &transposed(&expected, 6, 4));
    assert_eq!(base.get("onnx::MatMul_1").unwrap().data(), bytes, "the base stays as it is");
    // A weight that no table lists belongs to the graph itself.
    assert_eq!(with.get("other").unwrap().data(), 1.0f32.to_le_bytes());
}

/// A stack delivers changed weights row by row, so that the caller can pack each row as soon as it is computed.
#[test]
fn changed_rows_come_as_they_are_computed() {
    let folder = tempfile::tempdir().unwrap();
    let shape @ [rows, columns] = [350, 320];
    let (adapter, delta) = lora_on(folder.path(), "one", shape);
    let base = values("base", TO_Q, &shape);
    let expected: Vec<f64> = base.iter().zip(&delta).map(|(base, delta)| f64::from(*base) + delta).collect();
    let tensor = Tensor::from_elements(shape.to_vec(), &base).unwrap();
    let dict = Dict([(TO_Q.to_string(), tensor)].into_iter().collect());
    for (transform, to) in [(Transform::Transpose, [columns, rows]), (Transform::Identity, shape)] {
        let binding = Binding {
            component: Some(Component::Denoiser),
            tensors: vec![bound("w", &[TO_Q], transform, &shape, &to)],
        };
        let stack = WeightStack::of_state_dict(binding, Box::new(dict.clone()));
        let transposed = transform == Transform::Transpose;
        let mut none = |_, _: Weight<'_>| panic!("no rows are due");
        assert_eq!(stack.rows("w", transposed, 16, &mut none), Ok(false), "nothing changes it");
        let stack = stack.with_adapter(&adapter, AdapterUse::at(1.0)).unwrap();
        assert_eq!(stack.rows("w", !transposed, 16, &mut none), Ok(false), "rows in the other order");
        let (mut found, mut calls) = (Vec::new(), 0);
        let mut take = |first: usize, part: Weight<'_>| {
            assert_eq!(first * columns, found.len(), "rows come in order");
            assert_eq!(part.shape[1..], [columns]);
            assert!(part.shape[0].is_multiple_of(16) || first + part.shape[0] == rows);
            found.extend(f32s(&part));
            calls += 1;
            Ok(())
        };
        assert_eq!(stack.rows("w", transposed, 16, &mut take), Ok(true));
        assert!(calls > 2, "{calls}");
        assert_close(&found, &expected);
        let mut refuses = |_, _: Weight<'_>| Err(Error::invalid("enough"));
        let message = stack.rows("w", transposed, 16, &mut refuses).unwrap_err().message;
        assert!(message.ends_with("enough"), "{message}");
        // Types that need a conversion are fetched whole.
        for (dtype, passes) in [(DType::F32, true), (DType::F16, false)] {
            let specs = [WeightSpec { name: "w".into(), dtype, shape: to.to_vec() }];
            let found = Cast::new(&stack, &specs).rows("w", transposed, 16, &mut |_, _| Ok(()));
            assert_eq!(found, Ok(passes), "{dtype}");
        }
    }
}

/// A caller that transposes and converts anyway can take the values as the file stores them.
#[test]
fn plain_values_come_as_the_file_stores_them() {
    let folder = tempfile::tempdir().unwrap();
    let (adapter, _) = lora(folder.path(), "one");
    let (stack, plain) = stack();
    let all = ["f16", "f32", "f16:transposed", "f32:transposed"];
    let values = |stack: &WeightStack, name: &str| {
        let weight = stack.encoded(name, &all).unwrap()?;
        let dtype = if weight.encoding.starts_with("f16") { DType::F16 } else { DType::F32 };
        let bare = Weight::new(dtype, vec![weight.data().len() / dtype.size()], weight.data().to_vec());
        Some((weight.encoding.clone(), weight.shape.clone(), f32s(&bare.unwrap())))
    };
    let found = values(&stack, "onnx::MatMul_1");
    assert_eq!(found, Some(("f16:transposed".into(), vec![4, 6], plain[TO_Q].clone())));
    assert_eq!(values(&stack, "qk"), None, "it is made of two");
    assert!(
        stack.encoded("onnx::MatMul_1", &["f16", "f32:transposed", "bf16:transposed"]).unwrap().is_none()
    );

    let stack = stack.with_adapter(&adapter, AdapterUse::at(0.5)).unwrap();
    assert_eq!(values(&stack, "onnx::MatMul_1"), None, "an adapter changes it");
}

/// A check finds what would fail, whether or not a bound on the values tells.
#[test]
fn a_check_fails_where_the_weight_would() {
    let folder = tempfile::tempdir().unwrap();
    let (adapter, _) = lora(folder.path(), "one");
    let (dict, _) = checkpoint();
    let halves = || {
        let mut binding = binding();
        binding.tensors.iter_mut().for_each(|tensor| tensor.dtype = DType::F16);
        binding
    };
    let names = ["onnx::MatMul_1", "onnx::Mul_2", PROJ, "qk"];
    let (mut passed, mut failed) = (0, 0);
    for strength in [0.8, 1e4, 3e4, 1e5, 1e9] {
        for binding in [binding(), halves()] {
            let stack = WeightStack::of_state_dict(binding, Box::new(dict.clone()));
            let stack = stack.with_adapter(&adapter, AdapterUse::at(strength)).unwrap();
            for name in names {
                let (found, expected) = (stack.check(name), stack.get(name).map(drop));
                assert_eq!(found, expected, "{name} at {strength}");
                if expected.is_ok() { passed += 1 } else { failed += 1 }
            }
        }
    }
    // Of the weights in f16, those that the adapter changes overflow from some strength on.
    assert!(passed > 28 && failed > 3, "{passed} passed, {failed} failed");

    let mut wrong = dict.clone();
    wrong.0.0.remove(TO_K);
    let stack = WeightStack::of_state_dict(binding(), Box::new(wrong));
    assert_eq!(stack.check("qk").unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(stack.check("qk"), stack.get("qk").map(drop));
    assert_eq!(stack.check("nothing"), stack.get("nothing").map(drop));
}

/// Tensors that count how often they are read.
struct Counted(Dict, Arc<AtomicUsize>);

impl WeightSource for Counted {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.get(name)
    }
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        self.0.describe(name)
    }
}

impl StateDict for Counted {
    fn names(&self) -> Vec<&str> {
        self.0.names()
    }
}

/// Another adapter on the same checkpoint is checked without reading the checkpoint.
#[test]
fn bounds_of_a_checkpoint_are_found_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut binding = binding();
    binding.tensors.iter_mut().for_each(|tensor| tensor.dtype = DType::F16);
    let reads = Arc::new(AtomicUsize::new(0));
    let base = WeightStack::of_state_dict(binding, Box::new(Counted(checkpoint().0, reads.clone())));
    let fits = |name: &str, strength| {
        let (adapter, _) = lora(folder.path(), name);
        let stack = base.clone().with_adapter(&adapter, AdapterUse::at(strength)).unwrap();
        let before = reads.load(Ordering::Relaxed);
        let fits = stack.check("onnx::MatMul_1").is_ok();
        (fits, reads.load(Ordering::Relaxed) - before)
    };
    assert_eq!(fits("a", 0.8), (true, 1));
    assert_eq!(fits("a", 0.7), (true, 0));
    assert_eq!(fits("b", 1.0), (true, 0));
    // The bound does not tell, so the weight is computed.
    assert_eq!(fits("b", 1e9), (false, 1));
}

#[test]
fn versions_tell_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let (base, _) = stack();
    let (a, _) = lora(folder.path(), "a");
    let at = |strength| base.clone().with_adapter(&a, AdapterUse::at(strength)).unwrap();
    let differs = |one: &WeightStack, other: &WeightStack| -> Vec<String> {
        let names = binding().tensors.into_iter().map(|tensor| tensor.name);
        names.filter(|name| one.version(name) != other.version(name)).collect()
    };
    assert_eq!(differs(&base, &at(0.7)), ["onnx::MatMul_1", "qk"]);
    assert_eq!(differs(&at(0.7), &at(0.7)), [""; 0]);
    assert_eq!(differs(&at(0.7), &at(0.8)).len(), 2);
    let rule = |dora| base.clone().with_adapter(&a, AdapterUse { dora, ..AdapterUse::at(0.7) }).unwrap();
    assert_eq!(differs(&rule(Some(DoraRule::Peft)), &rule(Some(DoraRule::ComfyUi))).len(), 2);
    assert_eq!(differs(&base, &at(0.0)), [""; 0], "strength 0 is the base");
    assert_eq!(base.get("qk").unwrap().data(), at(0.0).get("qk").unwrap().data());
    assert_eq!(differs(&base, &stack().0).len(), 4, "another base is another checkpoint");
}

#[test]
fn what_does_not_fit_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (a, _) = lora(folder.path(), "a");
    let (mut dict, _) = checkpoint();
    dict.0.0.remove(TO_K);
    dict.0.0.insert(NORM.into(), Tensor::from_elements(vec![5], &[0.0f32; 5]).unwrap());
    let stack = WeightStack::of_state_dict(binding(), Box::new(dict));
    let missing = stack.get("qk").err().unwrap();
    assert_eq!(missing.code, ErrorCode::NotFound);
    assert!(missing.message.contains(TO_K), "{missing}");
    let shape = stack.describe("onnx::Mul_2").unwrap_err();
    assert!(shape.message.contains("[5]") && shape.message.contains("[4]"), "{shape}");
    let unknown = stack.get("onnx::Add_9").err().unwrap();
    assert!(unknown.message.contains("onnx::Add_9") && unknown.hint.is_some(), "{unknown}");

    let no_pipeline = WeightStack::of_graph(Binding::default(), Box::new(InMemoryWeights::default()));
    let error = no_pipeline.with_adapter(&a, AdapterUse::at(1.0)).err().unwrap();
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    for strength in [f32::NAN, f32::INFINITY] {
        assert!(stack.clone().with_adapter(&a, AdapterUse::at(strength)).is_err());
    }
    // An adapter with no matching module.
    let mut other = binding();
    other.tensors.retain(|tensor| tensor.sources[0] == NORM);
    let nothing = WeightStack::of_graph(other, Box::new(InMemoryWeights::default()));
    let error = nothing.with_adapter(&a, AdapterUse { lenient: true, ..AdapterUse::at(1.0) }).err().unwrap();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
}

const TABLE: &str = "text_model.embeddings.token_embedding.weight";

/// A text encoder's embedding table of 9 tokens with 768 values. The checkpoint stores it in `dtype`, and the graph
/// takes it as `wanted`.
fn encoder(wanted: DType) -> (WeightStack, Vec<f32>) {
    let shape = [9, 768];
    let plain: Vec<f32> =
        values("base", TABLE, &shape).into_iter().map(|v| f16::from_f32(v).to_f32()).collect();
    let bytes: Vec<u8> = plain.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    let table = Tensor::new(DType::F16, shape.to_vec(), bytes).unwrap();
    let dict = Dict(InMemoryWeights(BTreeMap::from([(TABLE.to_string(), table)])));
    let bound =
        BoundTensor { dtype: wanted, ..bound("table", &[TABLE], Transform::Identity, &shape, &shape) };
    let binding = Binding { component: Some(Component::TextEncoder), tensors: vec![bound] };
    (WeightStack::of_state_dict(binding, Box::new(dict)), plain)
}

/// A word of two embedding vectors, in f32.
fn word(folder: &Path, vectors: &[f32]) -> Embedding {
    let bytes: Vec<u8> = vectors.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::F32, vec![vectors.len() / 768, 768], &bytes).unwrap();
    let file = folder.join("charm.safetensors");
    serialize_to_file([("emb_params", view)], None, &file).unwrap();
    Embedding::open(&file).unwrap()
}

#[test]
fn words_replace_rows_of_the_token_table() {
    let folder = tempfile::tempdir().unwrap();
    let vectors = values("word", "charm", &[2, 768]);
    let charm = word(folder.path(), &vectors);
    for dtype in [DType::F32, DType::F16] {
        let (base, plain) = encoder(dtype);
        let with = base.clone().with_embedding(&charm, 6).unwrap();
        let mut expected = plain.clone();
        expected[6 * 768..8 * 768].copy_from_slice(&vectors);
        let bytes: Vec<u8> = match dtype {
            DType::F16 => expected.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            _ => expected.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        assert_eq!(with.describe("table").unwrap(), (dtype, vec![9, 768]));
        assert_eq!(with.get("table").unwrap().data(), bytes, "{dtype}");
        assert_ne!(with.version("table"), base.version("table"));
        assert_eq!(with.pristine().version("table"), base.version("table"));
        assert!(with.pristine().is_pristine() && !with.is_pristine());
        assert_eq!(with.changed(), 1);
        let reports: Vec<_> = with.embeddings().map(|r| (r.name.as_str(), r.token, r.vectors)).collect();
        assert_eq!(reports, [("charm", 6, 2)]);
        // The later embedding wins, and rows outside it stay unchanged.
        let twice = with.clone().with_embedding(&charm, 7).unwrap();
        let row = |stack: &WeightStack, row: usize| {
            let width = 768 * dtype.size();
            stack.get("table").unwrap().data()[row * width..(row + 1) * width].to_vec()
        };
        assert_eq!((row(&twice, 6), row(&twice, 7)), (row(&with, 6), row(&with, 6)));
        assert_eq!((row(&twice, 8), row(&twice, 5)), (row(&with, 7), row(&with, 5)));
    }
}

#[test]
fn words_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let charm = word(folder.path(), &[1e6; 2 * 768]);
    let (base, _) = encoder(DType::F16);
    for token in [8, 9, usize::MAX] {
        let error = base.clone().with_embedding(&charm, token).err().unwrap();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.contains("the encoder has 9 tokens"), "{error}");
    }
    let error = base.clone().with_embedding(&charm, 7).unwrap().get("table").err().unwrap();
    assert!(error.message.contains("charm") && error.message.contains("f16"), "{error}");
    let error = stack().0.with_embedding(&charm, 1).err().unwrap();
    assert_eq!(error.code, ErrorCode::FailedPrecondition);
    assert!(error.message.contains("no table of tokens"), "{error}");
    let mut wide = charm.clone();
    (wide.encoders[0].width, wide.encoders[0].encoder) = (1280, Some(Component::TextEncoder2));
    let error = base.with_embedding(&wide, 1).err().unwrap();
    assert!(error.message.contains("no vectors for text_encoder"), "{error}");
}
