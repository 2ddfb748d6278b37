//! The instruction set detected at run time, and code compiled for each of them.

use super::words::Words;
#[cfg(target_arch = "x86_64")]
use crate::cpu;
use std::sync::OnceLock;

/// An instruction set that this processor has. Only detection makes one, so holding one proves that its instructions may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(Set);

/// The instruction sets that code here is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Set {
    /// What every processor of the target has: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 and FMA with products of bytes (AVX-VNNI).
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 F, VL, BW and DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with products of bf16 pairs.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX-512 with products of bf16 pairs, also in tiles (AMX).
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// Rows and columns of the block of a product that fits the registers of each set.
pub(super) const BASELINE_BLOCK: (usize, usize) =
    if cfg!(target_arch = "aarch64") { (8, 12) } else { (4, 8) };
#[cfg(target_arch = "x86_64")]
pub(super) const AVX2_BLOCK: (usize, usize) = (6, 16);
#[cfg(target_arch = "x86_64")]
const AVX512_BLOCK: (usize, usize) = (14, 32);
#[cfg(target_arch = "x86_64")]
pub(super) const AMX_BLOCK: (usize, usize) = (32, 32);
/// The same for bytes, whose sums take two registers for each vector of columns.
#[cfg(target_arch = "x86_64")]
pub(super) const BYTES_BLOCK_512: (usize, usize) = (7, 32);
#[cfg(target_arch = "x86_64")]
pub(super) const BYTES_BLOCK_256: (usize, usize) = (3, 16);
/// The largest byte that AVX2 multiplies: sums of 16 products of it with another byte, of at most 127, fit 16 bits.
#[cfg(target_arch = "x86_64")]
const SMALL: u8 = 15;

impl Level {
    /// The best level of this processor, detected once.
    pub(crate) fn detect() -> Self {
        static LEVEL: OnceLock<Level> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                if cpu::avx512_bf16() {
                    if tiles::usable() {
                        return Level(Set::Amx);
                    }
                    if !cpu::bf16_is_slow() {
                        return Level(Set::Avx512Bf16);
                    }
                }
                if cpu::avx512() {
                    return Level(Set::Avx512);
                }
                if cpu::avx_vnni() {
                    return Level(Set::AvxVnni);
                }
                if cpu::avx2() {
                    return Level(Set::Avx2);
                }
            }
            Level(Set::Baseline)
        })
    }
    /// The instruction set.
    pub(super) fn set(self) -> Set {
        self.0
    }
    /// Rows and columns of the block that a [`Product`](super::product::Product) computes.
    pub(crate) fn block(self, words: Words) -> (usize, usize) {
        match (self.0, words) {
            (Set::Baseline, _) => BASELINE_BLOCK,
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2 | Set::AvxVnni, Words::Bytes) => BYTES_BLOCK_256,
            #[cfg(target_arch = "x86_64")]
            (_, Words::Bytes) => BYTES_BLOCK_512,
            #[cfg(target_arch = "x86_64")]
            (Set::Amx, Words::Bf16) => AMX_BLOCK,
            #[cfg(target_arch = "x86_64")]
            (Set::Avx2 | Set::AvxVnni, _) => AVX2_BLOCK,
            #[cfg(target_arch = "x86_64")]
            (Set::Avx512 | Set::Avx512Bf16 | Set::Amx, _) => AVX512_BLOCK,
        }
    }
    /// Whether its registers have at least 256 bits.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn has_256_bits(self) -> bool {
        !matches!(self.0, Set::Baseline)
    }
    /// Whether its registers have 512 bits.
    pub(super) fn has_512_bits(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self.0, Set::Avx512 | Set::Avx512Bf16 | Set::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
    /// Whether it multiplies pairs of bf16. If the best level does not, weights in bf16 are widened to f32.
    pub(crate) fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self.0, Set::Avx512Bf16 | Set::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }
    /// Whether products of bytes are its fastest ones, if no byte of the right operand is more than `largest`. VNNI multiplies and adds
    /// four pairs of bytes at a time. AVX2 multiplies as many and adds two of them, in 16 bits, which only suffice for small bytes. AMX has
    /// products of bytes too, but its tiles would have to be emptied for the scales after every 32 elements.
    pub(crate) fn multiplies_bytes(self, largest: u8) -> bool {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = largest;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => largest <= SMALL,
            #[cfg(target_arch = "x86_64")]
            Set::AvxVnni => true,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Bf16 => cpu::avx512_vnni(),
            _ => false,
        }
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
        let mut levels = vec![Level(Set::Baseline)];
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(cpu::avx2().then_some(Level(Set::Avx2)));
            levels.extend(cpu::avx_vnni().then_some(Level(Set::AvxVnni)));
            levels.extend(cpu::avx512().then_some(Level(Set::Avx512)));
            levels.extend(cpu::avx512_bf16().then_some(Level(Set::Avx512Bf16)));
            levels.extend(tiles::usable().then_some(Level(Set::Amx)));
        }
        levels
    }
}

/// Whether the tiles of AMX may be used.
#[cfg(target_arch = "x86_64")]
mod tiles {
    use crate::cpu;
    use std::sync::OnceLock;

    /// Whether this processor has tiles of bf16 and the system lets this process use them.
    pub(super) fn usable() -> bool {
        static USABLE: OnceLock<bool> = OnceLock::new();
        *USABLE.get_or_init(|| {
            const BF16: u32 = 1 << 22;
            const TILES: u32 = 1 << 24;
            let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
            features & BF16 != 0 && features & TILES != 0 && cpu::unlimited() && permitted()
        })
    }

    /// Requests the state of the tiles from Linux, as each process must (`Documentation/arch/x86/xstate.rst`).
    #[cfg(target_os = "linux")]
    fn permitted() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: the call changes only what this process may use.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn permitted() -> bool {
        false
    }
}

/// Work that gains from wide registers: [`vectorize`] compiles `run` for each [`Level`]. `run` and everything it calls must be
/// `#[inline(always)]`; otherwise they are compiled for the baseline only.
pub(crate) trait Vectorized {
    /// What the work returns.
    type Output;
    /// Does the work. `FMA` says whether `mul_add` is an instruction rather than a function call; see [`mul_add`].
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// `a * b + c`, rounded once if there is an instruction for it.
#[inline(always)]
pub(crate) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Runs `work` with the best instructions of this processor.
pub(crate) fn vectorize<V: Vectorized>(work: V) -> V::Output {
    vectorize_at(Level::detect(), work)
}

/// Runs `work` with the instructions of `level`.
pub(crate) fn vectorize_at<V: Vectorized>(level: Level, work: V) -> V::Output {
    match level.0 {
        Set::Baseline => work.run::<{ cfg!(target_arch = "aarch64") }>(),
        // SAFETY: the processor has the features, for only detection makes a `Level`.
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 | Set::AvxVnni => unsafe { with_avx2(work) },
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
