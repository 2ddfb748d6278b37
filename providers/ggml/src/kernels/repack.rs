//! Blocks of GGUF files in the places where our panels, or ggml's tensors, have them. No number changes.

use super::{
    Blocks, Panels,
    blocks::{BLOCK, GROUP, Plan},
};

/// A block encoding of GGUF, as `ggml-common.h` defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// `d`, 32 signed bytes.
    Q8_0,
    /// `d`, 32 fifth bits, 32 nibbles; the integers minus 16.
    Q5_0,
    /// `d`, 32 nibbles; the integers minus 8.
    Q4_0,
    /// `d`, `dmin`, 8 scales and offsets of 6 bits, 256 nibbles.
    Q4K,
}

impl Encoding {
    /// Its name in ggml.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Encoding::Q8_0 => "q8_0",
            Encoding::Q5_0 => "q5_0",
            Encoding::Q4_0 => "q4_0",
            Encoding::Q4K => "q4_k",
        }
    }

    /// Bytes of a block.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Encoding::Q8_0 => 34,
            Encoding::Q5_0 => 22,
            Encoding::Q4_0 => 18,
            Encoding::Q4K => 144,
        }
    }

    /// Elements of a block.
    pub(crate) fn elements(self) -> usize {
        if self == Encoding::Q4K { GROUP * BLOCK } else { BLOCK }
    }

    /// The integers of a block with one scale. Nibble `i` of the lower halves is element `i`, of the upper ones `i + 16`.
    fn integers(self, block: &[u8]) -> [u8; BLOCK] {
        let mut integers = [0; BLOCK];
        let nibble = |nibbles: &[u8], i: usize| nibbles[i % 16] >> (i / 16 * 4) & 15;
        for (i, integer) in integers.iter_mut().enumerate() {
            *integer = match self {
                Encoding::Q8_0 => block[2 + i],
                Encoding::Q5_0 => {
                    let fifth = block[2 + i / 8] >> (i % 8) & 1;
                    (nibble(&block[6..], i) | fifth << 4).wrapping_sub(16)
                }
                Encoding::Q4_0 => nibble(&block[2..], i).wrapping_sub(8),
                Encoding::Q4K => 0,
            };
        }
        integers
    }
}

impl Blocks {
    /// The encodings whose numbers these blocks can represent exactly.
    pub(crate) fn holds(self) -> &'static [Encoding] {
        match self {
            Blocks::Q8_0 => &[Encoding::Q8_0, Encoding::Q5_0, Encoding::Q4_0],
            Blocks::Q4K => &[Encoding::Q4K],
        }
    }

    /// Packs a matrix whose rows are in `encoding`, which these blocks must [hold](Self::holds), in the same way as
    /// [`pack`](Self::pack) packs plain values. `write` receives the bytes of each panel. The panels have one group and no taps,
    /// and rows are whole blocks.
    pub(crate) fn repack(
        self,
        panels: &Panels,
        encoding: Encoding,
        encoded: &[u8],
        mut write: impl FnMut(usize, &[u8]),
    ) {
        let Panels { rows, depth, block: height, .. } = *panels;
        let plan = Plan::new(self, panels);
        let row_bytes = depth / encoding.elements() * encoding.bytes();
        let mut panel = vec![0; plan.bytes()];
        for (index, lines) in encoded.chunks(height * row_bytes).take(rows.div_ceil(height)).enumerate() {
            panel.fill(0);
            for (row, line) in lines.chunks_exact(row_bytes).enumerate() {
                for (i, block) in line.chunks_exact(encoding.bytes()).enumerate() {
                    match self {
                        Blocks::Q8_0 => q8_0(&plan, row, i, block, &encoding.integers(block), &mut panel),
                        Blocks::Q4K => q4_k(&plan, row, i, block, &mut panel),
                    }
                }
            }
            write(index * panel.len(), &panel);
        }
    }

    /// Writes the same rows as ggml's own blocks, `out`.
    pub(crate) fn reencode(self, encoding: Encoding, encoded: &[u8], out: &mut [u8]) {
        let own = if self == Blocks::Q8_0 { Encoding::Q8_0 } else { Encoding::Q4K };
        if encoding == own {
            return out.copy_from_slice(encoded);
        }
        let blocks = encoded.chunks_exact(encoding.bytes());
        for (block, out) in blocks.zip(out.chunks_exact_mut(own.bytes())) {
            out[..2].copy_from_slice(&block[..2]);
            out[2..].copy_from_slice(&encoding.integers(block));
        }
    }
}

fn q8_0(plan: &Plan, row: usize, index: usize, block: &[u8], integers: &[u8; BLOCK], panel: &mut [u8]) {
    panel[plan.scales(index) + 2 * row..][..2].copy_from_slice(&block[..2]);
    plan.put(index, row, integers, panel);
}

/// The scales and offsets of the first four sub-blocks are the lower six bits of bytes 0 to 3 and 4 to 7 of twelve. Those
/// of the others are the nibbles of bytes 8 to 11, with the rest of the first eight bytes as their upper bits.
fn q4_k(plan: &Plan, row: usize, group: usize, block: &[u8], panel: &mut [u8]) {
    let factors = plan.factors(group) + 2 * row;
    panel[factors..][..2].copy_from_slice(&block[..2]);
    panel[factors + 2 * plan.rows()..][..2].copy_from_slice(&block[2..4]);
    let six = &block[4..16];
    for part in 0..GROUP {
        let (scale, offset) = match part {
            0..4 => (six[part] & 63, six[part + 4] & 63),
            _ => (six[part + 4] & 15 | six[part - 4] >> 6 << 4, six[part + 4] >> 4 | six[part] >> 6 << 4),
        };
        let at = plan.scales(group * GROUP + part) + row;
        (panel[at], panel[at + plan.rows()]) = (scale, offset);
        // The lower nibbles of 32 bytes are one sub-block, the upper ones the next.
        let nibbles = &block[16 + part / 2 * BLOCK..];
        let mut integers = [0; BLOCK];
        for (integer, byte) in integers.iter_mut().zip(nibbles) {
            *integer = byte >> (part % 2 * 4) & 15;
        }
        plan.put(group * GROUP + part, row, &integers, panel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ffi::dequantize_row, kernels::panels::Order, simd::Words, tests::random_blocks};

    /// ggml reads the same numbers out of a file's blocks as our products multiply, in every order of panels.
    #[test]
    fn panels_hold_what_ggml_reads() {
        let (rows, depth) = (37, 768);
        for (blocks, encoding) in
            [Blocks::Q8_0, Blocks::Q4K].into_iter().flat_map(|b| b.holds().iter().map(move |e| (b, *e)))
        {
            let name = if encoding == Encoding::Q4K { "q4_K" } else { encoding.name() };
            let (bytes, elements) = (encoding.bytes(), encoding.elements());
            let encoded = random_blocks(encoding.name(), rows * depth / elements, 3);
            let expected = dequantize_row(name, &encoded, bytes, elements);
            for (words, block, order) in [
                (Words::F32, 14, Order::Columns),
                (Words::F32, 32, Order::Columns),
                (Words::Bf16, 14, Order::Columns),
                (Words::Bf16, 32, Order::Sixteens),
            ] {
                let panels = Panels { groups: 1, rows, depth, block, words, taps: 1, order };
                let mut packed = vec![0xff; blocks.bytes(&panels)];
                blocks.repack(&panels, encoding, &encoded, |start, panel| {
                    packed[start..][..panel.len()].copy_from_slice(panel)
                });
                // What plain values of these numbers would be multiplied as.
                let plain = panels.packed(&expected, false);
                for (index, bytes) in packed.chunks(blocks.panel_bytes(&panels)).enumerate() {
                    let mut found = vec![7; panels.panel_len()];
                    blocks.expand(&panels, bytes, 0..panels.steps(), &mut found);
                    let expected = &plain[index * panels.panel_len()..][..panels.panel_len()];
                    assert_eq!(found, expected, "{name} {panels:?} {index}");
                }
            }
            for block in [16, 32] {
                let order = Order::Columns;
                let panels = Panels { groups: 1, rows, depth, block, words: Words::Bytes, taps: 1, order };
                let check = |start: usize, panel: &[u8]| {
                    let first = start / panel.len() * block;
                    for (i, numbers) in blocks.numbers(&panels, panel).iter().enumerate() {
                        let (d, row) = (i / block * 4, first + i % block);
                        let expected = if row < rows { &expected[row * depth + d..][..4] } else { &[0.0; 4] };
                        assert_eq!(numbers, expected, "{name} {panels:?} {row} {d}");
                    }
                };
                blocks.repack(&panels, encoding, &encoded, check);
            }
            let own = if blocks == Blocks::Q8_0 { ("q8_0", 34, 32) } else { ("q4_K", 144, 256) };
            let mut reencoded = vec![0xff; rows * depth / own.2 * own.1];
            blocks.reencode(encoding, &encoded, &mut reencoded);
            assert_eq!(dequantize_row(own.0, &reencoded, own.1, own.2), expected, "{name}");
        }
    }
}
