use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::int8::COLS,
};
use sdrun_abi::DType;

/// The layout of byte matrices for integer products: words of four neighbours along the depth, which is padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Quads {
    /// The left operand, signed: rows of `channels` runs of `taps` bytes. The channels of a tap follow those of the previous tap.
    Rows { rows: usize, channels: usize, taps: usize },
    /// The right operand, unsigned: `matrices` of `depth` x `cols` in panels of [`COLS`] columns.
    Panels { matrices: usize, depth: usize, cols: usize },
    /// An image, unsigned: `planes` of `channels` x `pixels`. A word holds the same pixel of four channels.
    Image { planes: usize, channels: usize, pixels: usize },
}

/// XOR with this, or adding it modulo 256, converts a byte from unsigned to signed and back.
pub(crate) const TURN: u8 = 0x80;

impl Quads {
    /// The number of parts that are packed independently, and the words of each.
    fn parts(&self) -> (usize, usize) {
        match *self {
            Quads::Rows { rows, channels, taps } => (rows, channels.div_ceil(4) * taps),
            Quads::Panels { matrices, depth, cols } => {
                (matrices * cols.div_ceil(COLS), depth.div_ceil(4) * COLS)
            }
            Quads::Image { planes, channels, pixels } => (planes * channels.div_ceil(4), pixels),
        }
    }
    /// The size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let (parts, words) = self.parts();
        4 * parts * words
    }

    /// Packs bytes of type `dtype`.
    pub(crate) fn pack(&self, dtype: DType, from: &[u8], out: &mut [u8]) {
        let (_, words) = self.parts();
        for (part, out) in out.chunks_exact_mut(4 * words.max(1)).enumerate() {
            self.pack_part(part, dtype == DType::I8, from, out);
        }
    }

    fn pack_part(&self, part: usize, signed: bool, from: &[u8], out: &mut [u8]) {
        out.fill(0);
        let words = out.as_chunks_mut::<4>().0;
        match *self {
            Quads::Rows { channels, taps, .. } => {
                let turn = if signed { 0 } else { TURN };
                let row = &from[part * channels * taps..][..channels * taps];
                let per_tap = channels.div_ceil(4);
                if taps == 1 {
                    let (whole, rest) = row.as_chunks::<4>();
                    for (word, bytes) in words.iter_mut().zip(whole) {
                        *word = bytes.map(|byte| byte ^ turn);
                    }
                    if let Some(last) = words.get_mut(whole.len()) {
                        last.iter_mut().zip(rest).for_each(|(out, byte)| *out = byte ^ turn);
                    }
                    return;
                }
                for (i, byte) in row.iter().enumerate() {
                    let (channel, tap) = (i / taps, i % taps);
                    words[tap * per_tap + channel / 4][channel % 4] = byte ^ turn;
                }
            }
            Quads::Panels { depth, cols, .. } => {
                let turn = if signed { TURN } else { 0 };
                let panels = cols.div_ceil(COLS);
                let (matrix, first) = (part / panels, part % panels * COLS);
                let from = &from[matrix * depth * cols..][..depth * cols];
                let width = COLS.min(cols - first);
                for (k, row) in from.chunks_exact(cols).enumerate() {
                    let words = &mut words[k / 4 * COLS..][..width];
                    words.iter_mut().zip(&row[first..]).for_each(|(word, byte)| word[k % 4] = byte ^ turn);
                }
            }
            Quads::Image { channels, pixels, .. } => {
                let turn = if signed { TURN } else { 0 };
                let per_plane = channels.div_ceil(4);
                let (plane, first) = (part / per_plane, part % per_plane * 4);
                for (i, channel) in (first..channels.min(first + 4)).enumerate() {
                    let line = &from[(plane * channels + channel) * pixels..][..pixels];
                    words.iter_mut().zip(line).for_each(|(word, byte)| word[i] = byte ^ turn);
                }
            }
        }
    }
}

/// Packs the signed or unsigned bytes of input 0.
pub(crate) struct PackQuads {
    pub(crate) quads: Quads,
    pub(crate) signed: bool,
}

impl Kernel for PackQuads {
    fn grid(&self, workers: usize) -> Grid {
        let (parts, words) = self.quads.parts();
        Grid::rows(parts, 4 * words, parts.div_ceil(4 * workers).max(4096 / (4 * words).max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        for part in tile.rows.clone() {
            self.quads.pack_part(part, self.signed, inputs.bytes(0), tile.row_bytes(part));
        }
        Ok(())
    }
}

/// The index in a list of zero points or scales for element `at` of `count` in matrix `of`. The list has one entry for all, one for each
/// element, one for each matrix, or one for each element of each matrix.
pub(crate) fn entry(len: usize, of: usize, at: usize, count: usize) -> usize {
    match len {
        1 => 0,
        _ if len == count => at,
        _ if len.is_multiple_of(count) => of * count + at,
        _ => of,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_along_the_depth_share_a_word() {
        let bytes: Vec<u8> = (0..10).collect();
        let pack = |quads: Quads, dtype| {
            let mut out = vec![9; quads.bytes()];
            quads.pack(dtype, &bytes, &mut out);
            out
        };
        let rows = Quads::Rows { rows: 2, channels: 5, taps: 1 };
        assert_eq!(pack(rows, DType::I8), [0, 1, 2, 3, 4, 0, 0, 0, 5, 6, 7, 8, 9, 0, 0, 0]);
        let taps = Quads::Rows { rows: 1, channels: 5, taps: 2 };
        assert_eq!(pack(taps, DType::I8), [0, 2, 4, 6, 8, 0, 0, 0, 1, 3, 5, 7, 9, 0, 0, 0]);
        assert_eq!(pack(taps, DType::U8)[..4], [128, 130, 132, 134]);
        let panels = pack(Quads::Panels { matrices: 1, depth: 5, cols: 2 }, DType::U8);
        assert_eq!(panels[..8], [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(panels[4 * COLS..][..8], [8, 0, 0, 0, 9, 0, 0, 0]);
        let image = Quads::Image { planes: 1, channels: 5, pixels: 2 };
        assert_eq!(pack(image, DType::U8), [0, 2, 4, 6, 1, 3, 5, 7, 8, 0, 0, 0, 9, 0, 0, 0]);
        assert_eq!(pack(image, DType::I8)[..4], [128, 130, 132, 134]);
    }
}
