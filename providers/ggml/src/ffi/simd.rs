//! Code compiled for several instruction sets, one of them chosen at run time.

use super::product::{PLAIN_BLOCK, Words};
#[cfg(target_arch = "x86_64")]
use super::{amx, product::AVX2_BLOCK};
use std::sync::OnceLock;

/// Instruction sets that code here is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every processor of the target has; with aarch64 that includes NEON.
    Plain,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, VL, BW, DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same and products of bf16 pairs.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The same, these in tiles.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Level {
    /// The best this processor can run.
    pub(crate) fn detect() -> Self {
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                if super::variant::avx512_bf16() {
                    if amx::usable() {
                        return Level::Amx;
                    }
                    if !super::variant::bf16_is_slow() {
                        return Level::Avx512Bf16;
                    }
                }
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
    /// Rows and columns of the block that a [`Product`](super::product::Product) computes.
    pub(crate) fn block(self, words: Words) -> (usize, usize) {
        match (self, words) {
            #[cfg(target_arch = "x86_64")]
            (Level::Amx, Words::Bf16) => (amx::BLOCK, amx::BLOCK),
            (Level::Plain, _) => PLAIN_BLOCK,
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, _) => AVX2_BLOCK,
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512 | Level::Avx512Bf16 | Level::Amx, _) => (14, 32),
        }
    }
    /// Whether its registers have 512 bits.
    pub(super) fn is_of_512_bits(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Level::Avx512 | Level::Avx512Bf16 | Level::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
    /// Whether it multiplies pairs of bf16. Where the best level does not, weights in bf16 are widened to f32.
    pub(crate) fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Level::Avx512Bf16 | Level::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
    /// Whether it multiplies these words in tiles.
    pub(crate) fn has_tiles(self, words: Words) -> bool {
        match (self, words) {
            #[cfg(target_arch = "x86_64")]
            (Level::Amx, Words::Bf16) => true,
            _ => false,
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
            levels.extend(super::variant::avx512_bf16().then_some(Level::Avx512Bf16));
            levels.extend(amx::usable().then_some(Level::Amx));
        }
        levels
    }
}

/// Work that gains from wide registers: [`vectorize`] compiles `run` for each [`Level`]. `run` and what it
/// calls must be `#[inline(always)]`, or they are compiled for the plain level only.
pub(crate) trait Vectorized {
    /// What the work yields.
    type Output;
    /// Does the work; `FMA`: whether `mul_add` is an instruction and not a function call, see [`mul_add`].
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// `a * b + c`, rounded once where that is an instruction.
#[inline(always)]
pub(crate) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Runs `work` with the best instructions of this processor.
pub(crate) fn vectorize<V: Vectorized>(work: V) -> V::Output {
    match Level::detect() {
        Level::Plain => work.run::<{ cfg!(target_arch = "aarch64") }>(),
        // SAFETY: the processor has the features, by `detect`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { with_avx2(work) },
        // SAFETY: the processor has the features, by `detect`.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { with_avx512(work) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2")]
fn with_avx2<V: Vectorized>(work: V) -> V::Output {
    work.run::<true>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512vl,avx512bw,avx512dq")]
fn with_avx512<V: Vectorized>(work: V) -> V::Output {
    work.run::<true>()
}
