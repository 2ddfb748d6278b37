//! The inner loop of every matrix product: a block of rows and columns that fits the registers.
//!
//! Operands are 32-bit words. A word is one f32, or two bf16 that are neighbours along the depth, the first in the lower half.
//! [`Set::Avx512Bf16`] multiplies such a pair and adds both products in f32 with one instruction. [`Set::Amx`] multiplies tiles
//! of 16 words by 16 rows; the rows of the right operand must then be equally far apart. Or a word is four integers of 8 bits, the first in
//! the lowest byte.

use super::{Words, level::Set};

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bytes;
mod operands;
mod registers;

pub(crate) use operands::{
    Block, DEPTH, Left, Product, ROW_STRIDE, SCALES, STEPS, Scales, Start, TILE, Taps,
};

impl Product<'_> {
    /// Computes a block of at most [`Level::block`](crate::simd::Level::block) rows and columns. Every element is summed over the
    /// depth in order, so its bits do not depend on the size of the block.
    pub(crate) fn into(mut self, mut out: Block<'_>) {
        let (rows, cols) = self.level.block(self.words);
        assert!(out.rows <= rows && out.cols <= cols, "a block larger than the registers");
        let tiles = self.level.has_tiles(self.words);
        assert!(
            if tiles { self.is_in_tiles() } else { !matches!(self.left, Left::Tiles | Left::Taps) },
            "operands of another level"
        );
        let reach = self.depth.checked_sub(1).and_then(|last| self.taps.reach.get(last));
        let reach = reach.map_or(usize::MAX, |reach| *reach as usize);
        // AMX reads whole tiles.
        let last_row = if tiles { out.rows.next_multiple_of(TILE) } else { out.rows }.saturating_sub(1);
        let (a, b) = match self.left {
            Left::Columns(step) => ((self.depth - 1) * step + rows, reach.saturating_add(cols)),
            Left::Tiles => (self.depth * rows, reach.saturating_add(cols)),
            Left::Rows => (last_row * ROW_STRIDE + self.depth, reach.saturating_add(cols)),
            Left::Taps => (reach.saturating_add(last_row * TILE + 1), self.depth * cols),
        };
        assert!(a <= self.a.len() && b <= self.b.len(), "operands of another depth");
        if let Start::Row(row) = self.start {
            assert!(row.len() >= out.cols, "a row of fewer columns");
        }
        if self.words == Words::Bytes {
            assert!(self.are_scaled(&out), "bytes without scales");
            let largest = || self.b.iter().flat_map(|word| word.to_ne_bytes()).max().unwrap_or(0);
            debug_assert!(self.level.multiplies_bytes(largest()), "bytes that are too large");
        }
        // The other loops can only add to the output, and their results are clipped afterwards.
        let native = self.level.has_512_bits() && !tiles && self.words != Words::Bytes;
        if let Start::Row(row) = self.start
            && !native
        {
            let row = &row[..out.cols];
            (0..out.rows).for_each(|i| out.row(i).copy_from_slice(row));
            self.start = Start::Output;
        }
        match (self.level.set(), self.words) {
            #[cfg(target_arch = "x86_64")]
            (Set::Avx512 | Set::Avx512Bf16 | Set::Amx, Words::F32) => {
                // SAFETY: the processor has the features, for only detection makes a `Level`; the lengths
                // were checked.
                unsafe { registers::f32x512::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Avx512Bf16, Words::Bf16) => {
                // SAFETY: as above.
                unsafe { registers::bf16x512::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Amx, Words::Bf16) => {
                // SAFETY: as above.
                unsafe { amx::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2 | Set::AvxVnni, Words::F32) => {
                // SAFETY: as above.
                unsafe { registers::f32x256::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Avx512 | Set::Avx512Bf16, Words::Bytes) => {
                // SAFETY: as above; the level multiplies bytes.
                unsafe { bytes::x512::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::AvxVnni, Words::Bytes) => {
                // SAFETY: as above.
                unsafe { bytes::x256::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2, Words::Bytes) => {
                // SAFETY: as above.
                unsafe { bytes::small_x256::block(&self, &mut out) }
            }
            #[cfg(target_arch = "aarch64")]
            (Set::Baseline, Words::F32) => {
                // SAFETY: as above; every aarch64 has NEON.
                unsafe { registers::f32x128::block(&self, &mut out) }
            }
            #[cfg(not(target_arch = "aarch64"))]
            (Set::Baseline, Words::F32) => registers::plain(&self, &mut out),
            (set, words) => unreachable!("{set:?} does not multiply {words:?}"),
        }
        if let Some([low, high]) = self.clip.filter(|_| !native) {
            for i in 0..out.rows {
                out.row(i).iter_mut().for_each(|x| {
                    let least = if *x < low { low } else { *x };
                    *x = if least > high { high } else { least };
                });
            }
        }
    }

    /// Whether the level multiplies bytes, and each row and column has a scale for all steps.
    fn are_scaled(&self, out: &Block<'_>) -> bool {
        let (_, cols) = self.level.block(self.words);
        let blocks = self.depth / STEPS;
        self.level.multiplies_bytes(0)
            && self.left == Left::Rows
            && self.depth.is_multiple_of(STEPS)
            && self.depth * cols <= self.b.len()
            && out.rows.saturating_sub(1) * SCALES + blocks <= self.scales.rows.len()
            && blocks * 2 * cols <= self.scales.cols.len()
    }

    /// Whether the depth is a multiple of [`TILE`] and the taps fit AMX.
    fn is_in_tiles(&self) -> bool {
        let taps = match self.left {
            Left::Columns(_) => false,
            Left::Rows | Left::Tiles => self.taps.in_tiles.is_some(),
            Left::Taps => self.taps.in_tiles == Some(1),
        };
        taps && self.depth.is_multiple_of(TILE)
    }
}
