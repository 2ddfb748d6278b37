//! Blocks of GGUF: our decoder against ggml's, and sessions whose weights come in blocks.

use super::{Model, noise, provider, random_blocks, run, spec};
use crate::{ffi::dequantize_row, kernels::Blocks, simd::Level};
use sdrun_abi::{
    DType, EncodedWeight, Error, ErrorCode, NoHost, Precision, Provider, Result, Session, TRANSPOSED, Weight,
    WeightSource,
};
use sdrun_graph::{Attribute, Tensor};
use sdrun_weights::checkpoint::dequantize;
use std::collections::BTreeMap;

/// The number of a type in the format, the name of ggml's decoder, and the bytes and elements of a block.
const TYPES: [(u32, &str, usize, usize); 12] = [
    (2, "q4_0", 18, 32),
    (3, "q4_1", 20, 32),
    (6, "q5_0", 22, 32),
    (7, "q5_1", 24, 32),
    (8, "q8_0", 34, 32),
    (10, "q2_K", 84, 256),
    (11, "q3_K", 110, 256),
    (12, "q4_K", 144, 256),
    (13, "q5_K", 176, 256),
    (14, "q6_K", 210, 256),
    (20, "iq4_nl", 18, 32),
    (23, "iq4_xs", 136, 256),
];
/// Blocks of each type. With so many, every value of a byte occurs at every place.
const BLOCKS: usize = 4096;

/// Random bytes cover scales of every size, also subnormal, negative, infinite and NaN.
#[test]
fn gguf_blocks_mean_what_ggml_reads() {
    for (code, name, bytes, elements) in TYPES {
        let mut state = 0x9E37_79B9_7F4A_7C15u64 ^ u64::from(code);
        let blocks: Vec<u8> = (0..BLOCKS * bytes)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 32) as u8
            })
            .collect();
        let expected = dequantize_row(name, &blocks, bytes, elements);
        let found = dequantize(code, &blocks).unwrap();
        assert_eq!(found.len(), expected.len(), "{name}");
        assert!(expected.iter().any(|v| v.is_nan()) && expected.iter().any(|v| v.abs() > 1000.0), "{name}");
        for (block, (found, expected)) in found.chunks(elements).zip(expected.chunks(elements)).enumerate() {
            let largest = expected.iter().fold(0f32, |most, v| most.max(v.abs()));
            for (found, expected) in found.iter().zip(expected) {
                assert!(
                    same(*found, *expected, largest),
                    "{name} block {block}: {found:e} instead of {expected:e}"
                );
            }
        }
        assert!(dequantize(code, &blocks[1..]).is_err(), "{name}");
    }
    assert!(dequantize(0, &[]).is_err() && dequantize(16, &[]).is_err());
}

/// The same bits on x86-64, where ggml's base is compiled without fused multiply-add; elsewhere they may differ by a rounding.
fn same(found: f32, expected: f32, largest: f32) -> bool {
    let off = (found - expected).abs();
    found.to_bits() == expected.to_bits()
        || (found.is_nan() && expected.is_nan())
        || (!cfg!(target_arch = "x86_64") && off <= largest * 2f32.powi(-22))
}

/// A model whose weights a source holds in blocks.
struct InBlocks {
    /// With the values that ggml reads in the blocks.
    model: Model,
    /// Encoding and blocks by name.
    blocks: BTreeMap<String, (String, Vec<u8>)>,
}

impl InBlocks {
    const ENCODINGS: [(&str, &str, usize, usize); 4] = [
        ("q8_0", "q8_0", 34, 32),
        ("q5_0", "q5_0", 22, 32),
        ("q4_0", "q4_0", 18, 32),
        ("q4_k", "q4_K", 144, 256),
    ];

    /// A product with a transposed matrix, as exporters write linear layers, and one with an untransposed matrix.
    fn new(encoding: &str, seed: u64) -> Self {
        let (_, name, bytes, elements) = *Self::ENCODINGS.iter().find(|row| row.0 == encoding).unwrap();
        let (mut model, mut blocks) = (Model::new(17), BTreeMap::new());
        let x = model.input(noise(&[5, 512], 1));
        let mut weight = |model: &mut Model, rows: usize, transposed: bool, seed: u64| {
            let encoded = random_blocks(encoding, rows * 512 / elements, seed);
            let values = dequantize_row(name, &encoded, bytes, elements);
            let (shape, values) = match transposed {
                true => ([512, rows], (0..512 * rows).map(|i| values[i % rows * 512 + i / rows]).collect()),
                false => ([rows, 512], values),
            };
            let id = model.weight(Tensor::from_elements(shape.to_vec(), &values).unwrap());
            let suffix = if transposed { TRANSPOSED } else { "" };
            blocks.insert(model.graph.value(id).name.clone(), (format!("{encoding}{suffix}"), encoded));
            id
        };
        let first = weight(&mut model, 512, true, seed);
        let second = weight(&mut model, 300, false, seed + 1);
        let y = model.node("MatMul", &[], &[x, first]);
        let y = model.node("Gemm", &[("transB", Attribute::Int(1))], &[y, second]);
        model.output(y);
        InBlocks { model, blocks }
    }

    fn session(&self, precision: Precision, source: &dyn WeightSource) -> Result<Box<dyn Session>> {
        provider().build(&self.model.onnx(), &spec(precision), source, &NoHost)?.session(source, &NoHost)
    }

    fn run(&self, session: &mut dyn Session) -> Vec<f32> {
        run(session, &self.model.feeds).unwrap()[0].to_f32s().unwrap()
    }
}

impl WeightSource for InBlocks {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.model.get(name)
    }

    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        let Some((encoding, blocks)) = self.blocks.get(name) else { return Ok(None) };
        let shape = self.model.weights[name].shape().to_vec();
        let asked = encodings.contains(&encoding.as_str());
        Ok(asked.then(|| EncodedWeight::new(encoding.clone(), shape, &blocks[..])))
    }
}

/// Plain values in the type and order of a file. Weights that it has are not made on request.
struct AsStored<'a>(&'a InBlocks);

impl WeightSource for AsStored<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        match self.0.blocks.contains_key(name) {
            true => Err(Error::not_found(format!("{name:?} is only stored"))),
            false => self.0.get(name),
        }
    }

    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        self.0.encoded(name, encodings)
    }
}

#[test]
fn plain_values_are_taken_as_files_store_them() {
    // All types hold these.
    let value = |i: usize| (i * i % 127) as f32 / 64.0 - 1.0;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut model = Model::new(17);
        let x = model.input(noise(&[7, 300], 1));
        let plain: Vec<f32> = (0..300 * 90).map(value).collect();
        let turned: Vec<f32> = (0..300 * 90).map(|i| plain[i % 300 * 90 + i / 300]).collect();
        let matrix = model.weight(Tensor::from_elements(vec![300, 90], &plain).unwrap());
        let y = model.node("MatMul", &[], &[x, matrix]);
        let other: Vec<f32> = (0..50 * 90).map(value).collect();
        let second = model.weight(Tensor::from_elements(vec![50, 90], &other).unwrap());
        let y = model.node("Gemm", &[("transB", Attribute::Int(1))], &[y, second]);
        model.output(y);
        let bytes = |values: &[f32]| -> Vec<u8> {
            let tensor = Tensor::from_elements(vec![values.len()], values).unwrap();
            tensor.to_float_type(dtype).unwrap().data().to_vec()
        };
        let name = |id| model.graph.value(id).name.clone();
        let mut blocks = BTreeMap::from([(name(matrix), (format!("{dtype}{TRANSPOSED}"), bytes(&turned)))]);
        if dtype != DType::F32 {
            blocks.insert(name(second), (dtype.to_string(), bytes(&other)));
        }
        let stored = InBlocks { model, blocks };
        let names: Vec<&str> = stored.model.weights.keys().map(String::as_str).collect();
        for precision in [Precision::Fp32, Precision::Bf16, Precision::Q8_0, Precision::Q4K] {
            let expected = stored.run(&mut *stored.session(precision, &stored.model).unwrap());
            let mut session = stored.session(precision, &AsStored(&stored)).unwrap();
            assert_eq!(stored.run(&mut *session), expected, "{dtype} in {precision}");
            session.refit(&names, &stored, &NoHost).unwrap();
            assert_eq!(stored.run(&mut *session), expected, "{dtype} in {precision}");
            let mut short = stored.blocks.clone();
            short.values_mut().for_each(|(_, bytes)| bytes.truncate(bytes.len() - 1));
            let short = InBlocks { model: stored.model.clone(), blocks: short };
            let error = stored.session(precision, &AsStored(&short)).err().unwrap();
            assert!(error.message.contains("bytes of"), "{error}");
        }
    }
}

/// In `q8_0` and `q4_k` the numbers multiplied are those that ggml reads in the blocks, to the bit; decoding and quantising
/// again would give others. Where the processor multiplies bytes, the other operand is rounded to 8 bits.
#[test]
fn blocks_are_multiplied_as_they_are() {
    // Products of blocks multiply bf16 if the processor has bf16 products.
    let exact = if Level::detect().multiplies_bf16() { Precision::Bf16 } else { Precision::Fp32 };
    let same = |found: &[f32], expected: &[f32], what: &str, blocks: Blocks| {
        if !Level::detect().multiplies_bytes(blocks.largest()) {
            return assert_eq!(found, expected, "{what}");
        }
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
        let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        let error = error / norm(&mut expected.iter().copied());
        assert!(error < 0.012, "{what}: {error}");
    };
    for (encoding, precision, blocks) in [
        ("q8_0", Precision::Q8_0, Blocks::Q8_0),
        ("q5_0", Precision::Q8_0, Blocks::Q8_0),
        ("q4_0", Precision::Q8_0, Blocks::Q8_0),
        ("q4_k", Precision::Q4K, Blocks::Q4K),
    ] {
        let (a, b) = (InBlocks::new(encoding, 10), InBlocks::new(encoding, 20));
        let names: Vec<&str> = a.blocks.keys().map(String::as_str).collect();
        let mut session = a.session(precision, &a).unwrap();
        let found = a.run(&mut *session);
        same(&found, &a.run(&mut *a.session(exact, &a.model).unwrap()), encoding, blocks);
        assert_ne!(found, a.run(&mut *a.session(precision, &a.model).unwrap()), "{encoding} quantised again");

        if encoding == precision.name() {
            let file: usize = a.blocks.values().map(|(_, blocks)| blocks.len()).sum();
            let weights = session.memory().unwrap().weights.unwrap();
            // The last panel of a matrix is filled up, and for AMX there are three percent more.
            assert!(weights as f64 <= 1.06 * file as f64, "{encoding}: {weights} bytes, {file} in the file");
        }

        // Refits take blocks too, and plain weights over blocks and back.
        let report = session.refit(&names, &b, &NoHost).unwrap();
        assert_eq!(report.bytes as usize, b.blocks.values().map(|(_, blocks)| blocks.len()).sum::<usize>());
        same(&a.run(&mut *session), &b.run(&mut *b.session(exact, &b.model).unwrap()), encoding, blocks);
        session.refit(&names, &b.model, &NoHost).unwrap();
        assert_eq!(a.run(&mut *session), b.run(&mut *b.session(precision, &b.model).unwrap()), "{encoding}");
        session.refit(&names, &a, &NoHost).unwrap();
        assert_eq!(a.run(&mut *session), found, "{encoding}: back again");
    }
}

/// A precision takes no blocks that it cannot hold exactly, and none where weights are stored plainly.
#[test]
fn other_blocks_are_decoded() {
    for (encoding, precision) in [
        ("q4_k", Precision::Q8_0),
        ("q8_0", Precision::Q4K),
        ("q4_0", Precision::Q4K),
        ("q8_0", Precision::Fp32),
    ] {
        let given = InBlocks::new(encoding, 30);
        let [found, plain] = [&given as &dyn WeightSource, &given.model]
            .map(|source| given.run(&mut *given.session(precision, source).unwrap()));
        assert_eq!(found, plain, "{encoding} in {precision}");
    }
}

#[test]
fn wrong_blocks_are_refused_and_leave_the_weights() {
    let good = InBlocks::new("q8_0", 40);
    let names: Vec<&str> = good.blocks.keys().map(String::as_str).collect();
    let mut short = InBlocks::new("q8_0", 50);
    for (_, blocks) in short.blocks.values_mut() {
        blocks.pop();
    }
    let mut session = good.session(Precision::Q8_0, &good).unwrap();
    let before = good.run(&mut *session);
    let error = session.refit(&names, &short, &NoHost).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
    assert!(error.message.contains("bytes of q8_0 blocks"), "{error}");
    assert_eq!(good.run(&mut *session), before);
}
