//! Converts f16 and bf16 to f32 and back, little-endian, a block of a matrix at a time.

/// A 16-bit floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an f32.
    BF16,
}

impl Half {
    pub(super) fn infinity(self) -> u16 {
        match self {
            Half::F16 => 0x7c00,
            Half::BF16 => 0x7f80,
        }
    }
}

/// Rows and columns of a block of a matrix, with the distance between rows on either side, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) from_stride: usize,
    pub(crate) to_stride: usize,
}

impl Block {
    /// Consecutive values.
    pub(crate) fn line(columns: usize) -> Self {
        Block { rows: 1, columns, from_stride: 0, to_stride: 0 }
    }

    /// Checks that sides of `from` and `to` elements hold the whole block.
    pub(super) fn check(&self, from: usize, to: usize) {
        let end = |stride: usize| self.rows.checked_sub(1).map_or(0, |last| last * stride + self.columns);
        assert!(
            end(self.from_stride) <= from && end(self.to_stride) <= to,
            "{self:?} in {from} and {to} elements"
        );
    }
}

/// Reads halves. Exact; NaNs become quiet. `from` is bytes, all counts are of elements.
pub(crate) fn widen(half: Half, from: &[u8], to: &mut [f32], block: Block) {
    let from = from.as_chunks().0;
    block.check(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if super::x86::widen(half, from, to, block) {
        return;
    }
    widen_plainly(half, from, to, block);
}

/// Writes halves, rounding to nearest, ties to even. Returns whether all results are finite.
pub(crate) fn narrow(half: Half, from: &[f32], to: &mut [u8], block: Block) -> bool {
    let to = to.as_chunks_mut().0;
    block.check(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if let Some(finite) = super::x86::narrow(half, from, to, block) {
        return finite;
    }
    narrow_plainly(half, from, to, block)
}

/// [`widen`] for any processor.
#[inline(always)]
pub(super) fn widen_plainly(half: Half, from: &[[u8; 2]], to: &mut [f32], block: Block) {
    for row in 0..block.rows {
        let from = &from[row * block.from_stride..][..block.columns];
        let to = &mut to[row * block.to_stride..][..block.columns];
        let pairs = to.iter_mut().zip(from);
        match half {
            Half::F16 => pairs.for_each(|(value, bytes)| *value = of_f16(u16::from_le_bytes(*bytes))),
            Half::BF16 => pairs.for_each(|(value, bytes)| *value = of_bf16(u16::from_le_bytes(*bytes))),
        }
    }
}

/// [`narrow`] for any processor.
#[inline(always)]
pub(super) fn narrow_plainly(half: Half, from: &[f32], to: &mut [[u8; 2]], block: Block) -> bool {
    let mut largest = 0;
    for row in 0..block.rows {
        let from = &from[row * block.from_stride..][..block.columns];
        let to = &mut to[row * block.to_stride..][..block.columns];
        let mut write = |convert: fn(f32) -> u16| {
            for (bytes, value) in to.iter_mut().zip(from) {
                let half = convert(*value);
                largest = largest.max(half & 0x7fff);
                *bytes = half.to_le_bytes();
            }
        };
        match half {
            Half::F16 => write(to_f16),
            Half::BF16 => write(to_bf16),
        }
    }
    largest < half.infinity()
}

/// All bits of an f32 except its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// The bits of infinity in f32, and the bit that makes a NaN quiet.
const INFINITY: u32 = 0x7f80_0000;
const QUIET: u32 = 0x0040_0000;

// Branch-free, so that the compiler vectorises them.

#[inline(always)]
fn of_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff) << 13;
    // The exponents' biases differ by 112; the product normalizes what was subnormal.
    let number = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let quiet = if magnitude > 0x0f80_0000 { QUIET } else { 0 };
    let bits = if magnitude >= 0x0f80_0000 { magnitude | INFINITY | quiet } else { number };
    f32::from_bits(sign | bits)
}

#[inline(always)]
fn to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & MAGNITUDE;
    let normal = (magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13) as u16;
    // A subnormal half has the last bit of an f32 between 0.5 and 1, so adding 0.5 rounds to it.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits()) as u16;
    let nan = 0x7e00 | (magnitude >> 13) as u16 & 0x3ff;
    let half = match magnitude {
        m if m < 0x3880_0000 => subnormal,
        m if m < 0x477f_f000 => normal,
        m if m <= INFINITY => 0x7c00,
        _ => nan,
    };
    sign | half
}

#[inline(always)]
fn of_bf16(half: u16) -> f32 {
    let bits = u32::from(half) << 16;
    let quiet = if bits & MAGNITUDE > INFINITY { QUIET } else { 0 };
    f32::from_bits(bits | quiet)
}

#[inline(always)]
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let is_nan = bits & MAGNITUDE > INFINITY;
    (if is_nan { (bits | QUIET) >> 16 } else { nearest }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// The bits of both paths: this processor's, and the one for any processor.
    fn narrowed(half: Half, values: &[f32]) -> [(Vec<[u8; 2]>, bool); 2] {
        let block = Block::line(values.len());
        let (mut best, mut plain) = (vec![[0; 2]; values.len()], vec![[0; 2]; values.len()]);
        let finite = narrow(half, values, best.as_flattened_mut(), block);
        let plainly = narrow_plainly(half, values, &mut plain, block);
        [(best, finite), (plain, plainly)]
    }

    #[test]
    fn every_half_is_read_as_the_crate_half_does() {
        let all: Vec<[u8; 2]> = (0..=u16::MAX).map(u16::to_le_bytes).collect();
        let block = Block::line(all.len());
        for half in [Half::F16, Half::BF16] {
            let (mut best, mut plain) = (vec![0f32; all.len()], vec![0f32; all.len()]);
            widen(half, all.as_flattened(), &mut best, block);
            widen_plainly(half, &all, &mut plain, block);
            for bits in 0..=u16::MAX {
                let expected = match half {
                    Half::F16 => f16::from_bits(bits).to_f32(),
                    Half::BF16 => bf16::from_bits(bits).to_f32(),
                };
                let got = [best[usize::from(bits)], plain[usize::from(bits)]].map(f32::to_bits);
                assert_eq!(got, [expected.to_bits(); 2], "{half:?} {bits:#x}");
            }
        }
    }

    /// Every half, the midpoints between neighbours and the values next to these, of both signs; NaNs of several payloads.
    fn hard_values(half: Half) -> Vec<f32> {
        let value = |bits| match half {
            Half::F16 => f16::from_bits(bits).to_f32(),
            Half::BF16 => bf16::from_bits(bits).to_f32(),
        };
        let mut values = Vec::new();
        for bits in 0..0x7fff {
            let (this, next) = (value(bits), value(bits + 1));
            let middle = if half == Half::BF16 {
                this.to_bits() | 0x8000
            } else {
                (this * 0.5 + next * 0.5).to_bits()
            };
            for bits in [this.to_bits(), middle, middle.wrapping_sub(1), middle + 1] {
                values.extend([f32::from_bits(bits), f32::from_bits(bits | 0x8000_0000)]);
            }
        }
        let others = [
            65519.996,
            65520.0,
            65536.0,
            1e30,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-45,
            2f32.powi(-25),
            2.9802326e-8,
        ];
        let nans = [0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff, 0xff80_1000, 0xffa0_0123].map(f32::from_bits);
        values.extend(
            others
                .into_iter()
                .chain(others.map(|v| -v))
                .chain(nans)
                .chain([f32::INFINITY, f32::NEG_INFINITY]),
        );
        values
    }

    #[test]
    fn ties_subnormals_and_what_is_no_number_are_written_as_the_crate_half_does() {
        for half in [Half::F16, Half::BF16] {
            let values = hard_values(half);
            let expected: Vec<[u8; 2]> = values
                .iter()
                .map(|v| match half {
                    Half::F16 => f16::from_f32(*v).to_le_bytes(),
                    Half::BF16 => bf16::from_f32(*v).to_le_bytes(),
                })
                .collect();
            for (got, _) in narrowed(half, &values) {
                for ((got, expected), value) in got.iter().zip(&expected).zip(&values) {
                    assert_eq!(got, expected, "{half:?} {value:e} {:#x}", value.to_bits());
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_told() {
        for half in [Half::F16, Half::BF16] {
            for place in [0, 7, 15, 16, 40] {
                for large in [-3.4e38, f32::INFINITY, f32::NAN, f32::NEG_INFINITY, f32::MAX] {
                    let mut values = vec![1.0f32; 41];
                    values[place] = large;
                    assert_eq!(
                        narrowed(half, &values).map(|(_, f)| f),
                        [false; 2],
                        "{half:?} {place} {large}"
                    );
                }
            }
            assert_eq!(narrowed(half, &[65504.0; 41]).map(|(_, finite)| finite), [true; 2]);
        }
    }

    #[test]
    fn blocks_leave_alone_what_is_beside_them() {
        let block = Block { rows: 3, columns: 21, from_stride: 30, to_stride: 25 };
        for half in [Half::F16, Half::BF16] {
            let values: Vec<f32> = (0..81).map(|i| i as f32).collect();
            let mut halves = vec![0xaa; 2 * 75];
            narrow(half, &values, &mut halves, block);
            let mut back = vec![-1f32; 90];
            widen(half, &halves, &mut back, Block { from_stride: 25, to_stride: 30, ..block });
            for (i, value) in back.iter().enumerate() {
                let expected = if i % 30 < 21 { i as f32 } else { -1.0 };
                assert_eq!(*value, expected, "{half:?} {i}");
            }
            for row in 0..3 {
                assert_eq!(halves[2 * (25 * row + 21)..2 * 25 * (row + 1)], [0xaa; 8]);
            }
        }
    }
}
