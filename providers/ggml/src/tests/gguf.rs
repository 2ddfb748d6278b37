//! Our decoder of GGUF blocks against ggml's.

use crate::ffi::dequantize_row;
use sdrun_weights::checkpoint::dequantize;

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
