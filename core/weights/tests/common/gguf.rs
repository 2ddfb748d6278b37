//! Writes GGUF files, and decodes their quantised blocks one element at a time in f64, following the description of
//! the format.

use super::make::Made;

/// Metadata of the types that the tests need.
pub(crate) enum Meta {
    Text(&'static str),
    Number(u32),
    Shape(Vec<i32>),
    Words(Vec<&'static str>),
    Floats(Vec<f32>),
    Bool(bool),
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The code of a type and its block size: elements and bytes.
pub(crate) fn type_of(name: &str) -> (u32, usize, usize) {
    match name {
        "F32" => (0, 1, 4),
        "F16" => (1, 1, 2),
        "BF16" => (30, 1, 2),
        "q4_0" => (2, 32, 18),
        "q4_1" => (3, 32, 20),
        "q5_0" => (6, 32, 22),
        "q5_1" => (7, 32, 24),
        "q8_0" => (8, 32, 34),
        "q2_k" => (10, 256, 84),
        "q3_k" => (11, 256, 110),
        "q4_k" => (12, 256, 144),
        "q5_k" => (13, 256, 176),
        "q6_k" => (14, 256, 210),
        "iq4_nl" => (20, 32, 18),
        "iq4_xs" => (23, 256, 136),
        "iq2_s" => (22, 256, 82),
        other => panic!("{other}"),
    }
}

/// The bytes of a GGUF file of this version.
pub(crate) fn bytes(version: u32, metadata: &[(&str, Meta)], tensors: &[Made]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    let mut alignment = 32;
    for (key, value) in metadata {
        string(&mut out, key);
        match value {
            Meta::Text(text) => {
                out.extend(8u32.to_le_bytes());
                string(&mut out, text);
            }
            Meta::Number(number) => {
                if *key == "general.alignment" {
                    alignment = *number as usize;
                }
                out.extend(4u32.to_le_bytes());
                out.extend(number.to_le_bytes());
            }
            Meta::Shape(dims) => {
                out.extend([9u32, 5].map(u32::to_le_bytes).concat());
                out.extend((dims.len() as u64).to_le_bytes());
                out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            }
            Meta::Floats(values) => {
                out.extend([9u32, 6].map(u32::to_le_bytes).concat());
                out.extend((values.len() as u64).to_le_bytes());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Meta::Bool(is) => {
                out.extend(7u32.to_le_bytes());
                out.push(u8::from(*is));
            }
            Meta::Words(words) => {
                out.extend([9u32, 8].map(u32::to_le_bytes).concat());
                out.extend((words.len() as u64).to_le_bytes());
                words.iter().for_each(|word| string(&mut out, word));
            }
        }
    }
    let mut offset = 0;
    for tensor in tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|dim| out.extend((*dim as u64).to_le_bytes()));
        out.extend(type_of(&tensor.dtype).0.to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.data.len().next_multiple_of(alignment);
    }
    out.resize(out.len().next_multiple_of(alignment), 0);
    for tensor in tensors {
        out.extend(&tensor.data);
        out.resize(out.len().next_multiple_of(alignment), 0);
    }
    out
}

/// A quantised tensor of random bits, except that its f16 scales are finite.
pub(crate) fn random(name: &str, kind: &str, shape: &[usize], seed: u64) -> Made {
    let (_, elements, size) = type_of(kind);
    let count = shape.iter().product::<usize>() / elements;
    let mut state = seed;
    let mut data: Vec<u8> = (0..count * size)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        })
        .collect();
    for block in data.chunks_exact_mut(size) {
        for at in scales_of(kind) {
            // Clears the exponent's top bit: values below 2, of either sign, some of them subnormal.
            block[at + 1] &= 0xbf;
        }
    }
    Made::new(name, kind, shape, data)
}

/// Offsets of the f16 scales in a block.
fn scales_of(kind: &str) -> Vec<usize> {
    match kind {
        "q4_1" | "q5_1" | "q4_k" | "q5_k" => vec![0, 2],
        "q2_k" => vec![80, 82],
        "q3_k" => vec![108],
        "q6_k" => vec![208],
        _ => vec![0],
    }
}

/// All elements in row-major order.
pub(crate) fn elements(made: &Made) -> Vec<f32> {
    let (_, elements, size) = type_of(&made.dtype);
    let blocks = made.data.chunks_exact(size);
    blocks.flat_map(|block| (0..elements).map(|e| element(&made.dtype, block, e) as f32)).collect()
}

/// The sixteen values of `iq4_nl` (`kvalues_iq4nl` in ggml).
const UNEVEN: [f64; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

/// The exact value of element `e` of a block.
fn element(kind: &str, b: &[u8], e: usize) -> f64 {
    let half = |at: usize| half::f16::from_le_bytes([b[at], b[at + 1]]).to_f64();
    let bit = |byte: u8, place: usize| f64::from(byte >> place & 1);
    // Nibbles of the types with 32 elements: element e < 16 is the low nibble of byte e; the others are high nibbles.
    let nibble = |start: usize| f64::from(b[start + e % 16] >> (4 * (e / 16)) & 15);
    let fifth = |start: usize| 16.0 * bit(b[start + e / 8], e % 8);
    // Six-bit scale (first four rows) and minimum of sub-block j, from twelve bytes at offset 4.
    let six = |minimum: bool| {
        let (j, s) = (e / 32, &b[4..16]);
        let m = usize::from(minimum);
        f64::from(match j {
            0..4 => s[j + 4 * m] % 64,
            _ => (s[j + 4] >> (4 * m)) % 16 + (s[j - 4 + 4 * m] / 64) * 16,
        })
    };
    match kind {
        "q4_0" => half(0) * (nibble(2) - 8.0),
        "q4_1" => half(0) * nibble(4) + half(2),
        "q5_0" => half(0) * (nibble(6) + fifth(2) - 16.0),
        "q5_1" => half(0) * (nibble(8) + fifth(4)) + half(2),
        "q8_0" => half(0) * f64::from(b[2 + e] as i8),
        "q2_k" => {
            let (n, l) = (e / 128, e % 128);
            let q = f64::from(b[16 + 32 * n + l % 32] >> (2 * (l / 32)) & 3);
            half(80) * f64::from(b[e / 16] % 16) * q - half(82) * f64::from(b[e / 16] / 16)
        }
        "q3_k" => {
            let (n, l) = (e / 128, e % 128);
            let low = f64::from(b[32 + 32 * n + l % 32] >> (2 * (l / 32)) & 3);
            let q = low + 4.0 * bit(b[e % 32], e / 32) - 4.0;
            // Sixteen scales: nibbles in bytes 96 to 103, upper bits in bytes 104 to 107.
            let k = e / 16;
            let lower = b[96 + k % 8] >> (4 * (k / 8)) & 15;
            let upper = b[104 + k % 4] >> (2 * (k / 4)) & 3;
            half(108) * (f64::from(lower + 16 * upper) - 32.0) * q
        }
        "q4_k" => {
            let q = f64::from(b[16 + 32 * (e / 64) + e % 32] >> (4 * (e / 32 % 2)) & 15);
            half(0) * six(false) * q - half(2) * six(true)
        }
        "q5_k" => {
            let low = f64::from(b[48 + 32 * (e / 64) + e % 32] >> (4 * (e / 32 % 2)) & 15);
            let q = low + 16.0 * bit(b[16 + e % 32], e / 32);
            half(0) * six(false) * q - half(2) * six(true)
        }
        "q6_k" => {
            let (n, l) = (e / 128, e % 128);
            let low = b[64 * n + l % 64] >> (4 * (l / 64)) & 15;
            let upper = b[128 + 32 * n + l % 32] >> (2 * (l / 32)) & 3;
            half(208) * f64::from(b[192 + e / 16] as i8) * (f64::from(low + 16 * upper) - 32.0)
        }
        "iq4_nl" => half(0) * UNEVEN[nibble(2) as usize],
        "iq4_xs" => {
            let j = e / 32;
            let lower = b[4 + j / 2] >> (4 * (j % 2)) & 15;
            let upper = b[2 + j / 4] >> (2 * (j % 4)) & 3;
            let q = b[8 + 16 * j + e % 16] >> (4 * (e % 32 / 16)) & 15;
            half(0) * (f64::from(lower + 16 * upper) - 32.0) * UNEVEN[usize::from(q)]
        }
        other => panic!("{other}"),
    }
}
