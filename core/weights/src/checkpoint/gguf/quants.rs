//! Element types of GGUF and the decoders of quantised blocks.
//!
//! The layouts follow the block structures in `ggml-common.h` (github.com/ggml-org/ggml). In the older types a
//! block has 32 elements, a scale `d` and sometimes an offset `m`, both f16: `x = d·q` or `x = d·q + m`. In the `K`
//! types a block has 256 elements in sub-blocks of 16 or 32 with a small scale `s` each, and sometimes a small offset
//! `o`: `x = d·s·q − dmin·o`. In `iq4_nl` and `iq4_xs`, `q` is one of [`UNEVEN`]. All steps but the last are exact in f32.

use half::f16;
use sdrun_abi::DType;

/// Elements of the largest block.
pub(super) const MAX_ELEMENTS: usize = 256;

/// Decodes one block. Both slices have the sizes of its kind.
pub(super) type Decode = fn(&[u8], &mut [f32]);

/// An element type.
#[derive(Debug)]
pub(super) struct Kind {
    /// Number in the format (`ggml_type`).
    pub(super) code: u32,
    pub(super) name: &'static str,
    /// Elements of a block.
    pub(super) elements: usize,
    /// Bytes of a block.
    pub(super) bytes: usize,
    /// `None` for plain types.
    pub(super) decode: Option<Decode>,
    plain: DType,
}

impl Kind {
    /// The type that is delivered.
    pub(super) fn dtype(&self) -> DType {
        self.plain
    }
}

const fn plain(code: u32, name: &'static str, dtype: DType, bytes: usize) -> Kind {
    Kind { code, name, elements: 1, bytes, decode: None, plain: dtype }
}
const fn blocks(code: u32, name: &'static str, elements: usize, bytes: usize, decode: Decode) -> Kind {
    Kind { code, name, elements, bytes, decode: Some(decode), plain: DType::F32 }
}

static KINDS: [Kind; 20] = [
    plain(0, "f32", DType::F32, 4),
    plain(1, "f16", DType::F16, 2),
    plain(24, "i8", DType::I8, 1),
    plain(25, "i16", DType::I16, 2),
    plain(26, "i32", DType::I32, 4),
    plain(27, "i64", DType::I64, 8),
    plain(28, "f64", DType::F64, 8),
    plain(30, "bf16", DType::BF16, 2),
    blocks(2, "q4_0", 32, 18, q4_0),
    blocks(3, "q4_1", 32, 20, q4_1),
    blocks(6, "q5_0", 32, 22, q5_0),
    blocks(7, "q5_1", 32, 24, q5_1),
    blocks(8, "q8_0", 32, 34, q8_0),
    blocks(10, "q2_k", 256, 84, q2_k),
    blocks(11, "q3_k", 256, 110, q3_k),
    blocks(12, "q4_k", 256, 144, q4_k),
    blocks(13, "q5_k", 256, 176, q5_k),
    blocks(14, "q6_k", 256, 210, q6_k),
    blocks(20, "iq4_nl", 32, 18, iq4_nl),
    blocks(23, "iq4_xs", 256, 136, iq4_xs),
];

/// The type of this number, if it is supported.
pub(super) fn kind(code: u32) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.code == code)
}

/// The name of a type, supported or not.
pub(super) fn name(code: u32) -> String {
    const OTHERS: [(u32, &str); 12] = [
        (9, "q8_1"),
        (15, "q8_k"),
        (16, "iq2_xxs"),
        (17, "iq2_xs"),
        (18, "iq3_xxs"),
        (19, "iq1_s"),
        (21, "iq3_s"),
        (22, "iq2_s"),
        (29, "iq1_m"),
        (34, "tq1_0"),
        (35, "tq2_0"),
        (39, "mxfp4"),
    ];
    let other = || OTHERS.iter().find(|(other, _)| *other == code).map(|(_, name)| *name);
    match kind(code).map(|kind| kind.name).or_else(other) {
        Some(name) => name.to_string(),
        None => format!("number {code}"),
    }
}

/// The f16 at this byte.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// `d`, 16 bytes of nibbles: the low ones are elements 0 to 15, the high ones 16 to 31; `q − 8`.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let (d, (low, high)) = (half(block, 0), out.split_at_mut(16));
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = d * (f32::from(byte & 15) - 8.0);
        *high = d * (f32::from(byte >> 4) - 8.0);
    }
}

/// `d`, `m`, nibbles.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m, (low, high)) = (half(block, 0), half(block, 2), out.split_at_mut(16));
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = d * f32::from(byte & 15) + m;
        *high = d * f32::from(byte >> 4) + m;
    }
}

/// Elements of five bits: a fifth bit for each in a word, nibbles after it.
fn five_bits(bits: &[u8], nibbles: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    let (low, high) = out.split_at_mut(16);
    for (i, ((low, high), byte)) in low.iter_mut().zip(high).zip(nibbles).enumerate() {
        let fifth = |element: usize| ((bits >> element & 1) as u8) << 4;
        *low = value(byte & 15 | fifth(i));
        *high = value(byte >> 4 | fifth(i + 16));
    }
}

/// `d`, fifth bits, nibbles; `q − 16`.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    five_bits(&block[2..6], &block[6..], out, |q| d * (f32::from(q) - 16.0));
}

/// `d`, `m`, fifth bits, nibbles.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    five_bits(&block[4..8], &block[8..], out, |q| d * f32::from(q) + m);
}

/// `d`, 32 signed bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (value, byte) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(byte.cast_signed());
    }
}

/// 16 bytes of scale (low nibble) and offset (high) for 16 elements each; 64 bytes of four elements; `d`, `dmin`.
/// Each half of the block is in 32 bytes, whose lowest two bits are its first 32 elements and so on.
fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, rest) = block.split_at(16);
    let (bits, d, dmin) = (&rest[..64], half(rest, 64), half(rest, 66));
    for (part, values) in out.chunks_exact_mut(16).enumerate() {
        let (d, offset) = (d * f32::from(scales[part] & 15), dmin * f32::from(scales[part] >> 4));
        let (shift, start) = (part / 2 % 4 * 2, part / 8 * 32 + part % 2 * 16);
        for (value, byte) in values.iter_mut().zip(&bits[start..]) {
            *value = d * f32::from(byte >> shift & 3) - offset;
        }
    }
}

/// 32 bytes of third bits, 64 of the lower two bits (as in `q2_k`), 12 of 16 scales of six bits, `d`. Bit `b` of the
/// third bits' byte `i` belongs to element `32·b + i`; where it is 0, 4 is subtracted. `s − 32`.
fn q3_k(block: &[u8], out: &mut [f32]) {
    let (thirds, bits, packed, d) = (&block[..32], &block[32..96], &block[96..108], half(block, 108));
    for (part, values) in out.chunks_exact_mut(16).enumerate() {
        // Low four bits in the nibbles of the first eight bytes, high two in the last four bytes.
        let low = if part < 8 { packed[part] & 15 } else { packed[part - 8] >> 4 };
        let high = packed[8 + part % 4] >> (part / 4 * 2) & 3;
        let d = d * (f32::from(low | high << 4) - 32.0);
        let (shift, column) = (part / 2 % 4 * 2, part % 2 * 16);
        let start = part / 8 * 32 + column;
        for ((value, byte), third) in values.iter_mut().zip(&bits[start..]).zip(&thirds[column..]) {
            let off = if third >> (part / 2) & 1 == 0 { 4.0 } else { 0.0 };
            *value = d * (f32::from(byte >> shift & 3) - off);
        }
    }
}

/// Scale and offset of six bits each for sub-block `part` of eight, out of 12 bytes: the first four sub-blocks have
/// the low six bits of bytes 0 to 3 and 4 to 7; the others the nibbles of bytes 8 to 11 and, as their upper bits,
/// what is left of the first eight.
fn scale_and_offset(packed: &[u8], part: usize) -> (f32, f32) {
    let (scale, offset) = if part < 4 {
        (packed[part] & 63, packed[part + 4] & 63)
    } else {
        (packed[part + 4] & 15 | packed[part - 4] >> 6 << 4, packed[part + 4] >> 4 | packed[part] >> 6 << 4)
    };
    (f32::from(scale), f32::from(offset))
}

/// `d`, `dmin`, 12 bytes of scales and offsets for 32 elements each, 128 bytes of nibbles: of each 32 bytes the low
/// ones are one sub-block, the high ones the next.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin, nibbles) = (half(block, 0), half(block, 2), &block[16..]);
    for (part, values) in out.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = scale_and_offset(&block[4..16], part);
        let (d, offset) = (d * scale, dmin * offset);
        for (value, byte) in values.iter_mut().zip(&nibbles[part / 2 * 32..]) {
            *value = d * f32::from(byte >> (part % 2 * 4) & 15) - offset;
        }
    }
}

/// As `q4_k`, with 32 bytes of fifth bits before the nibbles: bit `p` of byte `i` is that of element `i` of
/// sub-block `p`.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin, fifths, nibbles) = (half(block, 0), half(block, 2), &block[16..48], &block[48..]);
    for (part, values) in out.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = scale_and_offset(&block[4..16], part);
        let (d, offset) = (d * scale, dmin * offset);
        for ((value, byte), fifth) in values.iter_mut().zip(&nibbles[part / 2 * 32..]).zip(fifths) {
            let q = byte >> (part % 2 * 4) & 15 | (fifth >> part & 1) << 4;
            *value = d * f32::from(q) - offset;
        }
    }
}

/// 128 bytes of nibbles, 64 of the upper two bits, 16 signed scales for 16 elements each, `d`; `q − 32`. A half of
/// the block is in 64 bytes of nibbles: the low ones are its first 64 elements, the high ones the others; its upper
/// bits are in 32 bytes, the lowest two being those of the first 32 elements.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (nibbles, uppers, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (part, values) in out.chunks_exact_mut(16).enumerate() {
        let d = d * f32::from(scales[part].cast_signed());
        let (side, quarter, column) = (part / 8, part % 8 / 2, part % 2 * 16);
        let low = &nibbles[side * 64 + quarter % 2 * 32 + column..];
        let upper = &uppers[side * 32 + column..];
        for ((value, low), upper) in values.iter_mut().zip(low).zip(upper) {
            let q = low >> (quarter / 2 * 4) & 15 | (upper >> (quarter * 2) & 3) << 4;
            *value = d * (f32::from(q) - 32.0);
        }
    }
}

/// The values of the four bits of `iq4_nl` and `iq4_xs`: 16 steps, closer together around 0.
const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// 32 elements in 16 bytes, as in `q4_0`.
fn uneven(nibbles: &[u8], d: f32, out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
        *low = d * f32::from(UNEVEN[usize::from(byte & 15)]);
        *high = d * f32::from(UNEVEN[usize::from(byte >> 4)]);
    }
}

/// `d`, nibbles.
fn iq4_nl(block: &[u8], out: &mut [f32]) {
    uneven(&block[2..], half(block, 0), out);
}

/// `d`, and for eight sub-blocks of 32: in 2 bytes the upper two bits of their scales, in 4 the lower four, and nibbles. `s − 32`.
fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, upper) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (part, (values, nibbles)) in out.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)).enumerate() {
        let low = block[4 + part / 2] >> (part % 2 * 4) & 15;
        let high = (upper >> (part * 2) & 3) as u8;
        uneven(nibbles, d * (f32::from(low | high << 4) - 32.0), values);
    }
}
