//! Code compiled for several instruction sets, one of them chosen at run time, and the inner loop of matrix
//! multiplication written for each.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Instruction sets that code here is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every processor of the target has.
    Plain,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, VL, BW, DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The best this processor can run.
    pub(crate) fn detect() -> Self {
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                if super::variant::avx512() {
                    return Level::Avx512;
                }
                if super::variant::avx2() {
                    return Level::Avx2;
                }
            }
            Level::Plain
        })
    }
    /// Rows and columns of the block that [`multiply_block`] computes.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            Level::Plain => (PLAIN_ROWS, PLAIN_COLS),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => (6, 16),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => (14, 32),
        }
    }
    /// All levels this processor can run.
    #[cfg(test)]
    pub(crate) fn usable() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut levels = vec![Level::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(super::variant::avx2().then_some(Level::Avx2));
            levels.extend(super::variant::avx512().then_some(Level::Avx512));
        }
        levels
    }
}

/// Work that gains from wide registers: [`vectorize`] compiles `run` for each [`Level`]. `run` and what it
/// calls must be `#[inline(always)]`, or they are compiled for the plain level only.
pub(crate) trait Vectorized {
    /// What the work yields.
    type Output;
    /// Does the work.
    fn run(self) -> Self::Output;
}

/// Runs `work` with the best instructions of this processor.
pub(crate) fn vectorize<V: Vectorized>(work: V) -> V::Output {
    match Level::detect() {
        Level::Plain => work.run(),
        // SAFETY: the processor has the features, by `detect`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { with_avx2(work) },
        // SAFETY: the processor has the features, by `detect`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { with_avx512(work) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2")]
fn with_avx2<V: Vectorized>(work: V) -> V::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512vl,avx512bw,avx512dq")]
fn with_avx512<V: Vectorized>(work: V) -> V::Output {
    work.run()
}

/// Adds to `block` (`rows` x `cols` of [`Level::block`], row-major) the product of a panel of A, given as
/// `k` columns of `rows` elements, and a panel of B, given as `k` rows of `cols` elements.
pub(crate) fn multiply_block(level: Level, a: &[f32], b: &[f32], block: &mut [f32]) {
    let (rows, cols) = level.block();
    assert_eq!(a.len() / rows, b.len() / cols, "panels of different depth");
    assert_eq!(block.len(), rows * cols, "a block of another size");
    match level {
        Level::Plain => multiply_plain(a, b, block),
        // SAFETY: the processor has the features, for `Level`s come from `detect` and `usable`; the lengths
        // were checked.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { multiply_avx2(a, b, block) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { multiply_avx512(a, b, block) },
    }
}

const PLAIN_ROWS: usize = if cfg!(target_arch = "aarch64") { 8 } else { 4 };
const PLAIN_COLS: usize = 8;

fn multiply_plain(a: &[f32], b: &[f32], block: &mut [f32]) {
    let mut sums = [[0f32; PLAIN_COLS]; PLAIN_ROWS];
    for (a, b) in a.chunks_exact(PLAIN_ROWS).zip(b.chunks_exact(PLAIN_COLS)) {
        for (sums, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                // Where the target has no fused instruction `mul_add` would be a function call.
                *sum = if cfg!(target_arch = "aarch64") { a.mul_add(*b, *sum) } else { *sum + a * b };
            }
        }
    }
    for (row, sums) in block.chunks_exact_mut(PLAIN_COLS).zip(&sums) {
        row.iter_mut().zip(sums).for_each(|(x, sum)| *x += sum);
    }
}

/// # Safety
/// The processor has AVX2 and FMA; `a` holds `k * 6`, `b` `k * 16`, `block` 96 elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_avx2(a: &[f32], b: &[f32], block: &mut [f32]) {
    // SAFETY: all offsets stay inside the lengths of this function's contract.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); 2]; 6];
        let (mut pa, mut pb) = (a.as_ptr(), b.as_ptr());
        for _ in 0..a.len() / 6 {
            let (low, high) = (_mm256_loadu_ps(pb), _mm256_loadu_ps(pb.add(8)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = _mm256_broadcast_ss(&*pa.add(i));
                sum[0] = _mm256_fmadd_ps(x, low, sum[0]);
                sum[1] = _mm256_fmadd_ps(x, high, sum[1]);
            }
            pa = pa.add(6);
            pb = pb.add(16);
        }
        for (i, sum) in sums.iter().enumerate() {
            let row = block.as_mut_ptr().add(i * 16);
            _mm256_storeu_ps(row, _mm256_add_ps(_mm256_loadu_ps(row), sum[0]));
            _mm256_storeu_ps(row.add(8), _mm256_add_ps(_mm256_loadu_ps(row.add(8)), sum[1]));
        }
    }
}

/// # Safety
/// The processor has AVX-512 F; `a` holds `k * 14`, `b` `k * 32`, `block` 448 elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn multiply_avx512(a: &[f32], b: &[f32], block: &mut [f32]) {
    // SAFETY: all offsets stay inside the lengths of this function's contract.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; 14];
        let (mut pa, mut pb) = (a.as_ptr(), b.as_ptr());
        for _ in 0..a.len() / 14 {
            let (low, high) = (_mm512_loadu_ps(pb), _mm512_loadu_ps(pb.add(16)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*pa.add(i));
                sum[0] = _mm512_fmadd_ps(x, low, sum[0]);
                sum[1] = _mm512_fmadd_ps(x, high, sum[1]);
            }
            pa = pa.add(14);
            pb = pb.add(32);
        }
        for (i, sum) in sums.iter().enumerate() {
            let row = block.as_mut_ptr().add(i * 32);
            _mm512_storeu_ps(row, _mm512_add_ps(_mm512_loadu_ps(row), sum[0]));
            _mm512_storeu_ps(row.add(16), _mm512_add_ps(_mm512_loadu_ps(row.add(16)), sum[1]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_multiplies() {
        for level in Level::usable() {
            let (rows, cols) = level.block();
            let k = 37;
            // Small integers: the products and sums are exact in any order.
            let a: Vec<f32> = (0..k * rows).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
            let b: Vec<f32> = (0..k * cols).map(|i| (i * 5 % 13) as f32 - 6.0).collect();
            let mut block: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
            multiply_block(level, &a, &b, &mut block);
            for i in 0..rows {
                for j in 0..cols {
                    let product: f32 = (0..k).map(|p| a[p * rows + i] * b[p * cols + j]).sum();
                    assert_eq!(block[i * cols + j], (i * cols + j) as f32 + product, "{level:?} {i} {j}");
                }
            }
        }
    }
}
