//! Deterministic synthetic weights and inputs, computed from names alone: the same bits on every machine.
//!
//! The rule (`models/README.md` states it for other languages). The key of a tensor is `tag/name`; its seed is
//! the 64-bit FNV-1a hash of the key; element `i`, row-major, is output number `i + 1` of SplitMix64 started
//! with that seed, whose top 24 bits `k` give `u = k · 2⁻²³ − 1` in [-1, 1). The value, in f32, is
//!
//! | tensor | value |
//! |---|---|
//! | two or more dimensions | `u · a`, `a = √(3 / fan_in)` taken in f64, `fan_in` the product of all dimensions but the first |
//! | one dimension, last part of the name `weight` or `running_var` | `u · 0.1 + 1` |
//! | one dimension, any other name | `u · 0.05` |
//! | no dimensions | `1` |
//!
//! times the tensor's gain, which is 1 unless the model's weight map states one. f16 and bf16 tensors are that
//! f32 rounded to nearest, ties to even.

use crate::convert::{self, BLOCK};
use rayon::prelude::*;
use sdrun_abi::{DType, Error, Result};

/// Fills `out` with the tensor `name` of checkpoint `tag` (for example `sd15-unet/A`), little-endian,
/// row-major. `InvalidArgument` where `dtype` is not f32, f16 or bf16, or `out` is not as long as the tensor.
pub fn fill(tag: &str, name: &str, shape: &[usize], dtype: DType, out: &mut [u8]) -> Result<()> {
    check_dtype(dtype)?;
    if dtype.bytes_of(shape) != Some(out.len()) {
        let message =
            format!("{} bytes cannot hold the {dtype} tensor {name:?} of shape {shape:?}", out.len());
        return Err(Error::invalid(message));
    }
    Generator::new(tag, name, shape).fill(dtype, 0, Order::RowMajor, out);
    Ok(())
}

/// Seeded activations of unit variance: the sum of the four uniforms of `name#0` … `name#3`, added in this
/// order in f32, times `√0.75`. `InvalidArgument` if the shape overflows.
pub fn inputs(tag: &str, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let elements = DType::F32
        .bytes_of(shape)
        .ok_or_else(|| Error::invalid(format!("an input of shape {shape:?} is too large")))?
        / DType::F32.size();
    let seeds = [0, 1, 2, 3].map(|part| fnv1a64(format!("{tag}/{name}#{part}").as_bytes()));
    let scale = 0.75f64.sqrt() as f32;
    let value = |i: usize| seeds.map(|seed| uniform(seed, i as u64)).into_iter().sum::<f32>() * scale;
    Ok((0..elements).into_par_iter().with_min_len(BLOCK).map(value).collect())
}

/// `count` integers in `0..below`, seeded like the tensors.
pub(crate) fn integers(tag: &str, name: &str, below: u32, count: usize) -> impl Iterator<Item = u32> {
    let seed = fnv1a64(format!("{tag}/{name}").as_bytes());
    (0..count as u64).map(move |i| ((u64::from(bits24(seed, i)) * u64::from(below)) >> 24) as u32)
}

/// `InvalidArgument` for a type the rule does not define.
pub(crate) fn check_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(Error::invalid(format!("synthetic weights are f32, f16 or bf16, not {dtype}"))),
    }
}

/// The order of a tensor's elements in memory.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    /// The rule's order.
    RowMajor,
    /// The transpose of the rule's matrix; the fields are the dimensions in memory.
    Transposed {
        /// Rows in memory.
        rows: u64,
        /// Columns in memory.
        columns: u64,
    },
}

/// The values of one tensor: element `i` is `(u · scale + offset) · gain`. Adding 0 and multiplying by 1 are
/// exact, so one expression serves every kind.
#[derive(Clone, Copy)]
pub(crate) struct Generator {
    seed: u64,
    scale: f32,
    offset: f32,
    gain: f32,
}

impl Generator {
    pub(crate) fn new(tag: &str, name: &str, shape: &[usize]) -> Self {
        let last = name.rsplit('.').next();
        let (scale, offset) = match shape {
            [] => (0.0, 1.0),
            [_] if matches!(last, Some("weight" | "running_var")) => (0.1, 1.0),
            [_] => (0.05, 0.0),
            [_, rest @ ..] => {
                let fan_in: f64 = rest.iter().map(|d| *d as f64).product();
                ((3.0 / fan_in).sqrt() as f32, 0.0)
            }
        };
        Generator { seed: fnv1a64(format!("{tag}/{name}").as_bytes()), scale, offset, gain: 1.0 }
    }

    pub(crate) fn with_gain(self, gain: f32) -> Self {
        Generator { gain, ..self }
    }

    fn value(&self, i: u64) -> f32 {
        (uniform(self.seed, i) * self.scale + self.offset) * self.gain
    }

    /// Fills `out` with the elements from number `start` (in memory order) on, in parallel.
    pub(crate) fn fill(&self, dtype: DType, start: u64, order: Order, out: &mut [u8]) {
        out.par_chunks_mut(BLOCK * dtype.size()).enumerate().for_each(|(block, bytes)| {
            let start = start + (block * BLOCK) as u64;
            let mut values = [0f32; BLOCK];
            let values = &mut values[..bytes.len() / dtype.size()];
            match order {
                Order::RowMajor => values.iter_mut().zip(start..).for_each(|(v, i)| *v = self.value(i)),
                Order::Transposed { rows, columns } => {
                    let (mut row, mut column) = (start / columns, start % columns);
                    for v in values.iter_mut() {
                        *v = self.value(column * rows + row);
                        column += 1;
                        if column == columns {
                            (row, column) = (row + 1, 0);
                        }
                    }
                }
            }
            convert::store(values, dtype, bytes);
        });
    }
}

/// FNV-1a, 64 bits (draft-eastlake-fnv).
fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// The top 24 bits of output number `i + 1` of SplitMix64 (Steele, Lea and Flood, 2014) started with `seed`.
fn bits24(seed: u64, i: u64) -> u32 {
    let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as u32
}

/// Value number `i` in [-1, 1); exact in f32.
fn uniform(seed: u64, i: u64) -> f32 {
    bits24(seed, i) as f32 * (1.0 / (1u32 << 23) as f32) - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use sha2::{Digest, Sha256};

    /// Computed by the numpy implementation of the rule.
    #[derive(Deserialize)]
    struct Vectors {
        weights: Vec<WeightVector>,
        inputs: Vec<InputVector>,
    }
    #[derive(Deserialize)]
    struct WeightVector {
        tag: String,
        name: String,
        shape: Vec<usize>,
        seed_fnv1a64: String,
        first4_f32_bits: Vec<String>,
        last2_f32_bits: Vec<String>,
        first4_f16_bits: Vec<String>,
        sha256_f32_le: String,
        sha256_f16_le: String,
    }
    #[derive(Deserialize)]
    struct InputVector {
        tag: String,
        name: String,
        shape: Vec<usize>,
        first4_f32_bits: Vec<String>,
        sha256_f32_le: String,
    }

    fn vectors() -> Vectors {
        serde_json::from_str(include_str!("../tests/data/synthetic_vectors.json")).unwrap()
    }
    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }
    fn words32(bytes: &[u8]) -> Vec<String> {
        bytes.as_chunks::<4>().0.iter().map(|b| format!("{:08x}", u32::from_le_bytes(*b))).collect()
    }
    fn generate(tag: &str, name: &str, shape: &[usize], dtype: DType) -> Vec<u8> {
        let mut out = vec![0; dtype.bytes_of(shape).unwrap()];
        fill(tag, name, shape, dtype, &mut out).unwrap();
        out
    }

    #[test]
    fn weights_equal_the_reference_bit_for_bit() {
        let vectors = vectors().weights;
        assert_eq!(vectors.len(), 12);
        for v in vectors {
            let key = format!("{}/{}", v.tag, v.name);
            assert_eq!(format!("{:016x}", fnv1a64(key.as_bytes())), v.seed_fnv1a64, "{key}");
            let f32s = generate(&v.tag, &v.name, &v.shape, DType::F32);
            assert_eq!(words32(&f32s[..16]), v.first4_f32_bits, "{key}");
            assert_eq!(words32(&f32s[f32s.len() - 8..]), v.last2_f32_bits, "{key}");
            assert_eq!(hex(&Sha256::digest(&f32s)), v.sha256_f32_le, "{key}");
            let f16s = generate(&v.tag, &v.name, &v.shape, DType::F16);
            let first: Vec<String> = f16s.as_chunks::<2>().0[..4]
                .iter()
                .map(|b| format!("{:04x}", u16::from_le_bytes(*b)))
                .collect();
            assert_eq!(first, v.first4_f16_bits, "{key}");
            assert_eq!(hex(&Sha256::digest(&f16s)), v.sha256_f16_le, "{key}");
        }
    }

    #[test]
    fn inputs_equal_the_reference_bit_for_bit() {
        let vectors = vectors().inputs;
        assert_eq!(vectors.len(), 2);
        for v in vectors {
            let bytes: Vec<u8> =
                inputs(&v.tag, &v.name, &v.shape).unwrap().into_iter().flat_map(f32::to_le_bytes).collect();
            assert_eq!(words32(&bytes[..16]), v.first4_f32_bits, "{}", v.name);
            assert_eq!(hex(&Sha256::digest(&bytes)), v.sha256_f32_le, "{}", v.name);
        }
    }

    #[test]
    fn bf16_is_the_rounded_f32() {
        let shape = [3, 1000];
        let f32s = generate("t", "w", &shape, DType::F32);
        let expected: Vec<u8> = f32s
            .as_chunks::<4>()
            .0
            .iter()
            .flat_map(|b| {
                let bits = u32::from_le_bytes(*b);
                (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
            })
            .collect();
        assert_eq!(generate("t", "w", &shape, DType::BF16), expected);
    }

    #[test]
    fn a_scalar_is_one_and_gain_multiplies() {
        assert_eq!(generate("t", "scale", &[], DType::F32), 1f32.to_le_bytes());
        let plain = generate("t", "w", &[2, 2], DType::F32);
        let mut louder = vec![0; 16];
        Generator::new("t", "w", &[2, 2]).with_gain(3.0).fill(DType::F32, 0, Order::RowMajor, &mut louder);
        for (a, b) in plain.as_chunks::<4>().0.iter().zip(louder.as_chunks::<4>().0) {
            assert_eq!(f32::from_le_bytes(*a) * 3.0, f32::from_le_bytes(*b));
        }
    }

    #[test]
    fn transposed_and_partial_fills_pick_the_same_elements() {
        let (rows, columns) = (70, 90); // in memory; the rule's matrix is 90 x 70
        let plain = generate("t", "w", &[columns, rows], DType::F32);
        let generator = Generator::new("t", "w", &[columns, rows]);
        let order = Order::Transposed { rows: rows as u64, columns: columns as u64 };
        let mut whole = vec![0; plain.len()];
        generator.fill(DType::F32, 0, order, &mut whole);
        for (i, element) in whole.as_chunks::<4>().0.iter().enumerate() {
            let (row, column) = (i / columns, i % columns);
            assert_eq!(element, &plain.as_chunks::<4>().0[column * rows + row]);
        }
        let mut part = vec![0; 4 * 3000];
        generator.fill(DType::F32, 1234, order, &mut part);
        assert_eq!(part, whole[4 * 1234..][..4 * 3000]);
    }

    #[test]
    fn integers_stay_below_their_bound() {
        let ids: Vec<u32> = integers("t", "ids", 49_406, 10_000).collect();
        assert!(ids.iter().all(|id| *id < 49_406));
        assert!(ids.iter().max().unwrap() - ids.iter().min().unwrap() > 49_000);
    }

    #[test]
    fn wrong_lengths_and_types_are_refused() {
        assert!(fill("t", "w", &[2, 2], DType::F32, &mut [0; 15]).is_err());
        assert!(fill("t", "w", &[usize::MAX, 2], DType::F32, &mut []).is_err());
        assert!(fill("t", "w", &[2], DType::I64, &mut [0; 16]).unwrap_err().message.contains("i64"));
        assert!(inputs("t", "x", &[usize::MAX, 3]).is_err());
    }
}
