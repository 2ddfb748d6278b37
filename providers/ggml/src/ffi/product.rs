//! The inner loop of every matrix product: a block of rows and columns that fits the registers.
//!
//! Operands are 32-bit words: an f32, or two bf16 that are neighbours along the depth (the lower half first), which
//! [`Set::Avx512Bf16`] multiplies and adds in f32 at once. [`Set::Amx`] takes 16 of them at a time, whose rows in the right
//! operand are equally far apart.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::simd::{Level, Set};
#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// What the words of the operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Words {
    /// One f32 each.
    F32,
    /// Two bf16 each; only for [`Set::Avx512Bf16`] and [`Set::Amx`].
    Bf16,
}

/// How the left operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// For each step of the depth a column of as many rows as [`Level::block`] has, so many words after the one before.
    Columns(usize),
    /// Rows, each [`ROW_STRIDE`] words after the one before.
    Rows,
    /// For each [`TILE`] of steps as many rows as [`Level::block`] has, of a word for each; only for [`Set::Amx`].
    Tiles,
    /// Rows [`TILE`] words apart, in which the taps find each step of the depth; the right operand then has a row of
    /// [`Level::block`]'s columns for each step. Only for [`Set::Amx`].
    Taps,
}

/// Most words of depth of one call with [`Left::Rows`].
pub(crate) const DEPTH: usize = 256;
/// Words from row to row: a cache line more than the depth, so that rows do not fall on the same cache sets.
pub(crate) const ROW_STRIDE: usize = DEPTH + 16;

/// Rows and columns of a tile of [`Set::Amx`], and pairs of the depth that one of its instructions takes.
pub(crate) const TILE: usize = 16;

/// Where each step of the depth finds its row in the right operand (with [`Left::Taps`] the first row's word in the left one), in
/// words.
#[derive(Clone, Debug)]
pub(crate) struct Taps {
    offsets: Vec<u32>,
    /// The largest up to each step.
    reach: Vec<u32>,
    /// How far apart the steps of each [`TILE`] are, if that is the same for all.
    in_tiles: Option<u32>,
}

impl Taps {
    pub(crate) fn new(offsets: impl IntoIterator<Item = usize>) -> Self {
        let offsets: Vec<u32> = offsets.into_iter().map(|o| u32::try_from(o).unwrap_or(u32::MAX)).collect();
        let mut largest = 0;
        let reach = offsets.iter().map(|offset| {
            largest = largest.max(*offset);
            largest
        });
        let mut steps = offsets
            .chunks_exact(TILE)
            .flat_map(|tile| tile.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])));
        let in_tiles = steps.next().filter(|first| steps.all(|step| step == *first));
        Taps { reach: reach.collect(), in_tiles, offsets }
    }
    /// The offsets, and how far apart those of a [`TILE`] are, which is 0 if they differ.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn of_tiles(&self) -> (&[u32], usize) {
        (&self.offsets, self.in_tiles.unwrap_or(0) as usize)
    }
    /// Rows that follow each other at a distance of `stride` words.
    pub(crate) fn dense(depth: usize, stride: usize) -> Self {
        Self::new((0..depth).map(|i| i * stride))
    }
}

/// A matrix inside a larger one that nobody else reads or writes meanwhile.
pub(crate) struct Block<'a> {
    data: *mut f32,
    stride: usize,
    rows: usize,
    cols: usize,
    exclusive: PhantomData<&'a mut [f32]>,
}

impl<'a> Block<'a> {
    /// The first `rows` x `cols` elements of a matrix with rows of `stride` elements.
    pub(crate) fn new(data: &'a mut [f32], stride: usize, rows: usize, cols: usize) -> Self {
        assert!(cols <= stride && rows > 0 && (rows - 1) * stride + cols <= data.len(), "a block outside");
        Block { data: data.as_mut_ptr(), stride, rows, cols, exclusive: PhantomData }
    }
    /// # Safety
    /// `rows` rows of `cols` elements, `stride` apart from `data` on, are the caller's alone during `'a`.
    pub(super) unsafe fn from_raw(data: *mut f32, stride: usize, rows: usize, cols: usize) -> Self {
        Block { data, stride, rows, cols, exclusive: PhantomData }
    }
    /// Rows and columns.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn size(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }
    /// Where it begins, and the distance of rows.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn raw(&mut self) -> (*mut f32, usize) {
        (self.data, self.stride)
    }
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: one of the rows this value owns.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride), self.cols) }
    }
}

/// A panel of the left matrix times a panel of the right one: `depth` steps, each the product of a column of the left
/// panel with `cols` words of the right panel from the tap's offset on.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) level: Level,
    pub(crate) words: Words,
    pub(crate) left: Left,
    pub(crate) depth: usize,
    pub(crate) a: &'a [u32],
    /// As many words as the last tap and [`Level::block`]'s columns need, whatever the width of the output.
    pub(crate) b: &'a [u32],
    pub(crate) taps: &'a Taps,
    /// What the product is added to.
    pub(crate) start: Start<'a>,
    /// Bounds of what is written; a NaN stays.
    pub(crate) clip: Option<[f32; 2]>,
}

/// What a product is added to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Start<'a> {
    /// Nothing.
    Zero,
    /// An element for each column.
    Row(&'a [f32]),
    /// What the output holds.
    Output,
}

impl Product<'_> {
    /// Computes a block of at most the level's rows and columns. Every element is the sum over the depth in order,
    /// whatever the size of the block.
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
        // Tiles have all their rows.
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
        // The others start from what the output holds, and what they write is clipped after them.
        let native = self.level.is_of_512_bits() && !tiles;
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
                unsafe { f32x512::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Avx512Bf16, Words::Bf16) => {
                // SAFETY: as above.
                unsafe { bf16x512::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Amx, Words::Bf16) => {
                // SAFETY: as above.
                unsafe { amx::block(&self, &mut out) }
            }
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2, Words::F32) => {
                // SAFETY: as above.
                unsafe { f32x256::block(&self, &mut out) }
            }
            #[cfg(target_arch = "aarch64")]
            (Set::Plain, Words::F32) => {
                // SAFETY: as above; every aarch64 has NEON.
                unsafe { f32x128::block(&self, &mut out) }
            }
            #[cfg(not(target_arch = "aarch64"))]
            (Set::Plain, Words::F32) => plain(&self, &mut out),
            (set, Words::Bf16) => unreachable!("{set:?} does not multiply bf16"),
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

    /// Whether the depth is cut into whole tiles.
    fn is_in_tiles(&self) -> bool {
        let taps = match self.left {
            Left::Columns(_) => false,
            Left::Rows | Left::Tiles => self.taps.in_tiles.is_some(),
            Left::Taps => self.taps.in_tiles == Some(1),
        };
        taps && self.depth.is_multiple_of(TILE)
    }
}

/// Rows and columns of a block without any special instructions: those of NEON, which every aarch64 has.
pub(super) const PLAIN_BLOCK: (usize, usize) = if cfg!(target_arch = "aarch64") { (8, 12) } else { (4, 8) };
#[cfg(target_arch = "x86_64")]
pub(super) const AVX2_BLOCK: (usize, usize) = (6, 16);

#[cfg(not(target_arch = "aarch64"))]
fn plain(product: &Product<'_>, out: &mut Block<'_>) {
    const ROWS: usize = PLAIN_BLOCK.0;
    const COLS: usize = PLAIN_BLOCK.1;
    let (row_step, depth_step) = match product.left {
        Left::Rows => (ROW_STRIDE, 1),
        Left::Columns(step) => (1, step),
        Left::Tiles | Left::Taps => unreachable!("tiles of another level"),
    };
    let mut sums = [[0f32; COLS]; ROWS];
    let height = out.rows;
    for (step, tap) in product.taps.offsets[..product.depth].iter().enumerate() {
        let b: &[u32; COLS] = product.b[*tap as usize..].first_chunk().unwrap_or(&[0; COLS]);
        let b = b.map(f32::from_bits);
        for (i, sums) in sums.iter_mut().enumerate() {
            // Rows that are not there repeat the first.
            let row = if i < height { i } else { 0 };
            let a = f32::from_bits(product.a[row * row_step + step * depth_step]);
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
    for (i, sums) in sums.iter().enumerate().take(out.rows) {
        finish(product, out.row(i), sums);
    }
}

/// Writes the sums of a row, or adds them to it.
#[inline(always)]
fn finish(product: &Product<'_>, row: &mut [f32], sums: &[f32]) {
    let row = row.iter_mut().zip(sums);
    if product.start == Start::Output {
        row.for_each(|(x, sum)| *x += sum)
    } else {
        row.for_each(|(x, sum)| *x = *sum)
    }
}

/// Calls the function for the output's number of rows.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! of_rows {
    ($product:ident, $out:ident, $row_step:expr, $depth_step:expr, $vectors:literal; $($rows:literal)*) => {
        match $out.rows {
            // SAFETY: by the contract of the function this is part of.
            $($rows => unsafe { rows::<$rows, { $row_step }, $vectors>($product, $out, $depth_step) },)*
            _ => {}
        }
    };
}

/// A block of f32 in registers whose stores have no masks.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! block_without_masks {
    (
        $name:ident, $features:literal, $block:expr, $lanes:literal x $vectors:literal; $($rows:literal)*;
        $zero:expr, $load:expr, $store:expr, $multiply:expr
    ) => {
        mod $name {
            use super::*;

            /// # Safety
            /// The processor has the features; [`Product::into`] has checked the lengths.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn block(product: &Product<'_>, out: &mut Block<'_>) {
                match product.left {
                    Left::Columns(step) => of_rows!(product, out, 1, step, $vectors; $($rows)*),
                    Left::Rows => of_rows!(product, out, ROW_STRIDE, 1, $vectors; $($rows)*),
                    Left::Tiles | Left::Taps => unreachable!("tiles of another level"),
                }
            }

            /// # Safety
            /// As [`block`]; the output has `ROWS` rows.
            #[target_feature(enable = $features)]
            unsafe fn rows<
                const ROWS: usize,
                const ROW_STEP: usize,
                const VECTORS: usize,
            >(
                product: &Product<'_>,
                out: &mut Block<'_>,
                depth_step: usize,
            ) {
                let mut sums = [[$zero; VECTORS]; ROWS];
                // SAFETY: the taps and the columns of a block after them lie inside `b`, the steps inside `a`.
                unsafe {
                    let mut a = product.a.as_ptr().cast::<f32>();
                    for tap in &product.taps.offsets[..product.depth] {
                        let b = product.b.as_ptr().add(*tap as usize).cast::<f32>();
                        let b: [_; VECTORS] = std::array::from_fn(|i| $load(b.add($lanes * i)));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = *a.add(i * ROW_STEP);
                            for i in 0..VECTORS {
                                sum[i] = $multiply(sum[i], b[i], x);
                            }
                        }
                        a = a.wrapping_add(depth_step);
                    }
                }
                for (i, sum) in sums.iter().enumerate() {
                    let mut row = [0f32; $block.1];
                    for (i, sum) in sum.iter().enumerate() {
                        // SAFETY: a row of the block is `VECTORS` vectors.
                        unsafe { $store(row.as_mut_ptr().add($lanes * i), *sum) };
                    }
                    finish(product, out.row(i), &row);
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
block_without_masks!(
    f32x256, "avx2,fma", AVX2_BLOCK, 8 x 2; 1 2 3 4 5 6;
    _mm256_setzero_ps(), _mm256_loadu_ps, _mm256_storeu_ps, |sum, b, x| _mm256_fmadd_ps(_mm256_set1_ps(x), b, sum)
);
#[cfg(target_arch = "aarch64")]
block_without_masks!(
    f32x128, "neon", PLAIN_BLOCK, 4 x 3; 1 2 3 4 5 6 7 8;
    vdupq_n_f32(0.0), vld1q_f32, vst1q_f32, vfmaq_n_f32
);

/// The 14 x 32 block, once for each kind of words.
#[cfg(target_arch = "x86_64")]
macro_rules! block_of_512_bits {
    ($name:ident, $features:literal, $multiply:expr) => {
        mod $name {
            use super::*;

            /// # Safety
            /// The processor has the features; [`Product::into`] has checked the lengths.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn block(product: &Product<'_>, out: &mut Block<'_>) {
                match (product.left, out.cols > 16) {
                    (Left::Columns(step), true) => {
                        of_rows!(product, out, 1, step, 2; 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
                    }
                    (Left::Columns(step), false) => {
                        of_rows!(product, out, 1, step, 1; 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
                    }
                    (Left::Rows, true) => of_rows!(product, out, ROW_STRIDE, 1, 2; 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
                    (Left::Rows, false) => of_rows!(product, out, ROW_STRIDE, 1, 1; 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
                    (Left::Tiles | Left::Taps, _) => unreachable!("tiles of another level"),
                }
            }

            /// # Safety
            /// As [`block`]; the output has `ROWS` rows of at most `VECTORS` vectors.
            #[target_feature(enable = $features)]
            unsafe fn rows<
                const ROWS: usize,
                const ROW_STEP: usize,
                const VECTORS: usize,
            >(
                product: &Product<'_>,
                out: &mut Block<'_>,
                depth_step: usize,
            ) {
                let masks: [__mmask16; VECTORS] = std::array::from_fn(|i| lanes(out.cols.saturating_sub(16 * i)));
                let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
                // SAFETY: the taps and the 32 columns after them lie inside `b`, the steps inside `a`; masks keep the
                // accesses to the output and to what it starts from inside its columns.
                unsafe {
                    match product.start {
                        Start::Zero => {}
                        Start::Row(row) => {
                            for i in 0..VECTORS {
                                let some = _mm512_maskz_loadu_ps(masks[i], row.as_ptr().wrapping_add(16 * i));
                                sums.iter_mut().for_each(|sum| sum[i] = some);
                            }
                        }
                        Start::Output => {
                            for (i, sum) in sums.iter_mut().enumerate() {
                                let row = out.data.add(i * out.stride);
                                for i in 0..VECTORS {
                                    sum[i] = _mm512_maskz_loadu_ps(masks[i], row.wrapping_add(16 * i));
                                }
                            }
                        }
                    }
                    let mut a = product.a.as_ptr();
                    let mut tap = product.taps.offsets.as_ptr();
                    for _ in 0..product.depth {
                        let b = product.b.as_ptr().add(*tap as usize).cast::<f32>();
                        let b: [__m512; VECTORS] = std::array::from_fn(|i| _mm512_loadu_ps(b.add(16 * i)));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = _mm512_set1_ps(f32::from_bits(*a.add(i * ROW_STEP)));
                            for i in 0..VECTORS {
                                sum[i] = $multiply(sum[i], x, b[i]);
                            }
                        }
                        a = a.wrapping_add(depth_step);
                        tap = tap.add(1);
                    }
                    if let Some([least, most]) = product.clip {
                        // Of a NaN and a number they give the second operand.
                        let (least, most) = (_mm512_set1_ps(least), _mm512_set1_ps(most));
                        for sum in sums.as_flattened_mut() {
                            *sum = _mm512_min_ps(most, _mm512_max_ps(least, *sum));
                        }
                    }
                    for (i, sum) in sums.iter().enumerate() {
                        let row = out.data.add(i * out.stride);
                        for i in 0..VECTORS {
                            _mm512_mask_storeu_ps(row.wrapping_add(16 * i), masks[i], sum[i]);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
block_of_512_bits!(f32x512, "avx512f,avx512vl,avx512bw,avx512dq", |sum, x, y| _mm512_fmadd_ps(x, y, sum));
#[cfg(target_arch = "x86_64")]
block_of_512_bits!(bf16x512, "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16", |sum, x: __m512, y: __m512| {
    _mm512_dpbf16_ps(
        sum,
        std::mem::transmute::<__m512, __m512bh>(x),
        std::mem::transmute::<__m512, __m512bh>(y),
    )
});

/// The mask of the first `n` of 16 lanes.
#[cfg(target_arch = "x86_64")]
fn lanes(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}
