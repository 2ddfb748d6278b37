//! Code compiled for several instruction sets, one of them chosen at run time.

use super::product::{PLAIN_BLOCK, Words};
#[cfg(target_arch = "x86_64")]
use super::{amx, product::AVX2_BLOCK};
use std::sync::OnceLock;

/// An instruction set that this processor has: only detection makes one, so that holding one is proof enough to use its
/// instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(Set);

/// Instruction sets that code here is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Set {
    /// The baseline of the target; on aarch64 that includes NEON.
    Plain,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, VL, BW, DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with products of bf16 pairs.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX-512 with products of bf16 pairs, also in tiles.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Level {
    /// The best one, detected once.
    pub(crate) fn detect() -> Self {
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                if super::variant::avx512_bf16() {
                    if amx::usable() {
                        return Level(Set::Amx);
                    }
                    if !super::variant::bf16_is_slow() {
                        return Level(Set::Avx512Bf16);
                    }
                }
                if super::variant::avx512() {
                    return Level(Set::Avx512);
                }
                if super::variant::avx2() {
                    return Level(Set::Avx2);
                }
            }
            Level(Set::Plain)
        })
    }
    /// Its instruction set.
    pub(super) fn set(self) -> Set {
        self.0
    }
    /// Rows and columns of the block that a [`Product`](super::product::Product) computes.
    pub(crate) fn block(self, words: Words) -> (usize, usize) {
        match (self.0, words) {
            #[cfg(target_arch = "x86_64")]
            (Set::Amx, Words::Bf16) => (amx::BLOCK, amx::BLOCK),
            (Set::Plain, _) => PLAIN_BLOCK,
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2, _) => AVX2_BLOCK,
            #[cfg(target_arch = "x86_64")]
            (Set::Avx512 | Set::Avx512Bf16 | Set::Amx, _) => (14, 32),
        }
    }
    /// Whether its registers have 512 bits.
    pub(super) fn is_of_512_bits(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self.0, Set::Avx512 | Set::Avx512Bf16 | Set::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
    /// Whether it multiplies pairs of bf16. Where the best level does not, weights in bf16 are widened to f32.
    pub(crate) fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self.0, Set::Avx512Bf16 | Set::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
    /// Whether it multiplies these words in tiles.
    pub(crate) fn has_tiles(self, words: Words) -> bool {
        match (self.0, words) {
            #[cfg(target_arch = "x86_64")]
            (Set::Amx, Words::Bf16) => true,
            _ => false,
        }
    }
    /// All levels of this processor.
    #[cfg(test)]
    pub(crate) fn usable() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut levels = vec![Level(Set::Plain)];
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(super::variant::avx2().then_some(Level(Set::Avx2)));
            levels.extend(super::variant::avx512().then_some(Level(Set::Avx512)));
            levels.extend(super::variant::avx512_bf16().then_some(Level(Set::Avx512Bf16)));
            levels.extend(amx::usable().then_some(Level(Set::Amx)));
        }
        levels
    }
}

/// Work that gains from wide registers: [`vectorize`] compiles `run` for each [`Level`]. `run` and what it
/// calls must be `#[inline(always)]`, or they are compiled for the plain level only.
pub(crate) trait Vectorized {
    /// What the work returns.
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
    vectorize_at(Level::detect(), work)
}

/// Runs `work` with the instructions of a level.
pub(crate) fn vectorize_at<V: Vectorized>(level: Level, work: V) -> V::Output {
    match level.0 {
        Set::Plain => work.run::<{ cfg!(target_arch = "aarch64") }>(),
        // SAFETY: the processor has the features, for only detection makes a `Level`.
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 => unsafe { with_avx2(work) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 | Set::Avx512Bf16 | Set::Amx => unsafe { with_avx512(work) },
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
