//! Matrices in ggml's own block layout, for products on devices.

use super::{
    Blocks, Panels,
    blocks::{BLOCK, GROUP, Plan},
};
use crate::ffi::Type;

impl Blocks {
    /// The format and ggml type for rows of `depth` elements. Falls back to `Q8_0` if the depth is no multiple of a `Q4K` block, and
    /// returns `None` if no format fits.
    pub(crate) fn of_ggml(self, depth: usize) -> Option<(Blocks, Type)> {
        match self {
            Blocks::Q4K if depth.is_multiple_of(GROUP * BLOCK) => Some((self, self.type_of_ggml())),
            _ if depth.is_multiple_of(BLOCK) => Some((Blocks::Q8_0, Blocks::Q8_0.type_of_ggml())),
            _ => None,
        }
    }

    pub(crate) fn type_of_ggml(self) -> Type {
        match self {
            Blocks::Q8_0 => Type::Q8_0,
            Blocks::Q4K => Type::Q4K,
        }
    }

    /// Packs a stack of row-major matrices, `[groups, rows, depth]`, or depth x rows if `transposed`. `write` receives the bytes of each
    /// row. [`of_ggml`](Self::of_ggml) must allow the depth.
    pub(crate) fn pack_rows(
        self,
        [groups, rows, depth]: [usize; 3],
        transposed: bool,
        read: impl Fn(usize, &mut [f32]),
        mut write: impl FnMut(usize, &[u8]),
    ) {
        /// Rows that are read together. One by one would be slow if they are transposed.
        const HEIGHT: usize = 32;
        let panels = Panels::columns([groups, rows, depth], HEIGHT);
        let plan = Plan::new(self, &panels);
        let mut line = vec![0; self.type_of_ggml().bytes(depth)];
        self.pack(&panels, transposed, read, |start, panel| {
            let index = start / panel.len();
            let (group, first) = (index / panels.per_group(), index % panels.per_group() * HEIGHT);
            for row in 0..HEIGHT.min(rows - first) {
                match self {
                    Blocks::Q8_0 => q8_0(&plan, panel, row, &mut line),
                    Blocks::Q4K => q4_k(&plan, panel, row, &mut line),
                }
                write((group * rows + first + row) * line.len(), &line);
            }
        });
    }
}

/// Writes `block_q8_0`s: the scale, then 32 integers.
fn q8_0(plan: &Plan, panel: &[u8], row: usize, line: &mut [u8]) {
    for (block, out) in line.chunks_exact_mut(Type::Q8_0.size()).enumerate() {
        out[..2].copy_from_slice(&panel[plan.scales(block) + 2 * row..][..2]);
        for (i, integer) in out[2..].iter_mut().enumerate() {
            *integer = plan.integer(panel, block, row, i);
        }
    }
}

/// Writes `block_q4_K`s: two factors; scales and offsets of eight blocks with 6 bits each; the integers, with two blocks in the nibbles
/// of 32 bytes.
fn q4_k(plan: &Plan, panel: &[u8], row: usize, line: &mut [u8]) {
    for (group, out) in line.chunks_exact_mut(Type::Q4K.size()).enumerate() {
        let factors = plan.factors(group) + 2 * row;
        out[..2].copy_from_slice(&panel[factors..][..2]);
        out[2..4].copy_from_slice(&panel[factors + 2 * plan.rows()..][..2]);
        let of_block = |i: usize| plan.scales(group * GROUP + i) + row;
        let scale = |i: usize| panel[of_block(i)];
        let offset = |i: usize| panel[of_block(i) + plan.rows()];
        for i in 0..4 {
            out[4 + i] = scale(i) | scale(i + 4) >> 4 << 6;
            out[8 + i] = offset(i) | offset(i + 4) >> 4 << 6;
            out[12 + i] = scale(i + 4) & 15 | offset(i + 4) << 4;
        }
        for (pair, out) in out[16..].chunks_exact_mut(BLOCK).enumerate() {
            let block = group * GROUP + 2 * pair;
            for (i, byte) in out.iter_mut().enumerate() {
                *byte = plan.integer(panel, block, row, i) | plan.integer(panel, block + 1, row, i) << 4;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn f16_at(bytes: &[u8]) -> f32 {
        f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }

    /// The values that ggml decodes.
    fn decode(type_: Type, bytes: &[u8]) -> Vec<f32> {
        let block = |bytes: &[u8]| -> Vec<f32> {
            if type_ == Type::Q8_0 {
                return bytes[2..].iter().map(|q| f16_at(bytes) * f32::from(q.cast_signed())).collect();
            }
            let (d, min, packed) = (f16_at(bytes), f16_at(&bytes[2..]), &bytes[4..16]);
            let six = |j: usize| match j {
                0..4 => (packed[j] & 63, packed[j + 4] & 63),
                _ => (
                    packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4,
                    packed[j + 4] >> 4 | (packed[j] >> 6) << 4,
                ),
            };
            let value = |i: usize| {
                let (pair, j) = (i / 64, i / 32);
                let byte = bytes[16 + 32 * pair + i % 32];
                let q = if j % 2 == 0 { byte & 15 } else { byte >> 4 };
                d * f32::from(six(j).0) * f32::from(q) - min * f32::from(six(j).1)
            };
            (0..256).map(value).collect()
        };
        bytes.chunks_exact(type_.size()).flat_map(block).collect()
    }

    #[test]
    fn ggml_reads_what_was_packed() {
        let (groups, rows, depth) = (2, 37, 512);
        let values: Vec<f32> = (0..groups * rows * depth)
            .map(|i| ((i * 7919 % 1013) as f32 / 506.5 - 1.0) * (1 + i % 5) as f32)
            .collect();
        // Tolerances, for values of this test: half of 127 steps, and one of 15 steps.
        for (blocks, type_, most) in [(Blocks::Q8_0, Type::Q8_0, 0.005), (Blocks::Q4K, Type::Q4K, 0.14)] {
            assert_eq!(blocks.of_ggml(depth), Some((blocks, type_)));
            for transposed in [false, true] {
                let at = |group: usize, row: usize, d: usize| match transposed {
                    true => (group * depth + d) * rows + row,
                    false => (group * rows + row) * depth + d,
                };
                let mut bytes = vec![0xff; type_.bytes(values.len())];
                let read = |start: usize, to: &mut [f32]| to.copy_from_slice(&values[start..][..to.len()]);
                blocks.pack_rows([groups, rows, depth], transposed, read, |start, line| {
                    bytes[start..][..line.len()].copy_from_slice(line)
                });
                let found = decode(type_, &bytes);
                for group in 0..groups {
                    for row in 0..rows {
                        for d in 0..depth {
                            let (x, y) = (values[at(group, row, d)], found[(group * rows + row) * depth + d]);
                            assert!(
                                (x - y).abs() <= most * 5.0,
                                "{blocks:?} [{group}, {row}, {d}]: {x} as {y}"
                            );
                        }
                    }
                }
            }
        }
        assert_eq!(Blocks::Q4K.of_ggml(320), Some((Blocks::Q8_0, Type::Q8_0)));
        assert_eq!(Blocks::Q8_0.of_ggml(40), None);
    }
}
