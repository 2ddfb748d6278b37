//! Registers of f32, and work compiled for the registers of each level.

use super::level::{Level, Set};
#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Work that is compiled for each [`Vector`].
pub(super) trait Work {
    /// # Safety
    /// The processor has the register, and the caller may access all memory that the work reads and writes.
    unsafe fn run<V: Vector>(&self);
}

/// # Safety
/// The caller may access all memory that the work reads and writes.
pub(super) unsafe fn dispatch(level: Level, work: &impl Work) {
    // SAFETY: by this function's contract; the processor has the registers, for only detection makes a `Level`.
    unsafe {
        match level.set() {
            Set::Baseline => work.run::<Baseline>(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 | Set::AvxVnni => with_avx2(work),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Avx512Bf16 | Set::Amx => with_avx512(work),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn with_avx2(work: &impl Work) {
    // SAFETY: by the caller's contract.
    unsafe { work.run::<__m256>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn with_avx512(work: &impl Work) {
    // SAFETY: by the caller's contract.
    unsafe { work.run::<__m512>() }
}

/// A register of f32 of one level. Its operations are inlined into code for that level.
pub(super) trait Vector: Copy {
    const LANES: usize;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn splat(x: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, factor: Self) -> Self;
    /// `self * factor + addend`.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `self * factor`.
    #[inline(always)]
    unsafe fn scale(self, factor: f32) -> Self {
        // SAFETY: the caller has the features.
        unsafe { self.mul(Self::splat(factor)) }
    }
    /// `self * factor + addend`.
    #[inline(always)]
    unsafe fn scale_add(self, factor: f32, addend: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { self.mul_add(Self::splat(factor), addend) }
    }
    /// Clamps to `least` and `most`. A NaN stays a NaN.
    unsafe fn clip(self, least: Self, most: Self) -> Self;
    /// De-interleaves: register `i` of the result has elements `i`, `i + 4`, `i + 8`, ….
    unsafe fn fourths(from: *const f32) -> [Self; 4];
}

macro_rules! vector {
    (
        $type:ty, $lanes:literal, $load:expr, $store:expr, $splat:expr, $add:expr, $sub:expr, $mul:expr, $mul_add:expr,
        $max:expr, $min:expr, $fourths:expr
    ) => {
        impl Vector for $type {
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: by the trait's contract: the elements exist and the processor has the features. The same holds below.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: as above.
                unsafe { $store(to, self) }
            }
            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: as above.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: as above.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn sub(self, other: Self) -> Self {
                // SAFETY: as above.
                unsafe { $sub(self, other) }
            }
            #[inline(always)]
            unsafe fn mul(self, factor: Self) -> Self {
                // SAFETY: as above.
                unsafe { $mul(self, factor) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
                // SAFETY: as above.
                unsafe { $mul_add(self, factor, addend) }
            }
            #[inline(always)]
            unsafe fn clip(self, least: Self, most: Self) -> Self {
                // SAFETY: as above. If one operand is a NaN, x86 returns the second operand and ARM the NaN.
                unsafe { $min(most, $max(least, self)) }
            }
            #[inline(always)]
            unsafe fn fourths(from: *const f32) -> [Self; 4] {
                // SAFETY: as above.
                unsafe { $fourths(from) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector!(
    __m512,
    16,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_add_ps,
    _mm512_sub_ps,
    _mm512_mul_ps,
    _mm512_fmadd_ps,
    _mm512_max_ps,
    _mm512_min_ps,
    fourths_of_512_bits
);
#[cfg(target_arch = "x86_64")]
vector!(
    __m256,
    8,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_add_ps,
    _mm256_sub_ps,
    _mm256_mul_ps,
    _mm256_fmadd_ps,
    _mm256_max_ps,
    _mm256_min_ps,
    fourths_of_256_bits
);
#[cfg(target_arch = "aarch64")]
vector!(
    float32x4_t,
    4,
    vld1q_f32,
    vst1q_f32,
    vdupq_n_f32,
    vaddq_f32,
    vsubq_f32,
    vmulq_f32,
    |a, b, c| vfmaq_f32(c, a, b),
    vmaxq_f32,
    vminq_f32,
    |from| {
        let fourths = vld4q_f32(from);
        [fourths.0, fourths.1, fourths.2, fourths.3]
    }
);

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn fourths_of_512_bits(from: *const f32) -> [__m512; 4] {
    // SAFETY: the elements exist and the processor has the features. The same holds below.
    unsafe {
        let [a, b, c, d] = [
            _mm512_loadu_ps(from),
            _mm512_loadu_ps(from.add(16)),
            _mm512_loadu_ps(from.add(32)),
            _mm512_loadu_ps(from.add(48)),
        ];
        let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        let third = _mm512_add_epi32(first, _mm512_set1_epi32(2));
        let low = [_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(c, first, d)];
        let high = [_mm512_permutex2var_ps(a, third, b), _mm512_permutex2var_ps(c, third, d)];
        [
            _mm512_shuffle_f32x4::<0x44>(low[0], low[1]),
            _mm512_shuffle_f32x4::<0xee>(low[0], low[1]),
            _mm512_shuffle_f32x4::<0x44>(high[0], high[1]),
            _mm512_shuffle_f32x4::<0xee>(high[0], high[1]),
        ]
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn fourths_of_256_bits(from: *const f32) -> [__m256; 4] {
    // SAFETY: as above.
    unsafe {
        let [a, b, c, d] = [
            _mm256_loadu2_m128(from.add(16), from),
            _mm256_loadu2_m128(from.add(20), from.add(4)),
            _mm256_loadu2_m128(from.add(24), from.add(8)),
            _mm256_loadu2_m128(from.add(28), from.add(12)),
        ];
        let low = [_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d)];
        let high = [_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d)];
        [
            _mm256_shuffle_ps::<0x44>(low[0], low[1]),
            _mm256_shuffle_ps::<0xee>(low[0], low[1]),
            _mm256_shuffle_ps::<0x44>(high[0], high[1]),
            _mm256_shuffle_ps::<0xee>(high[0], high[1]),
        ]
    }
}

#[cfg(target_arch = "aarch64")]
type Baseline = float32x4_t;
#[cfg(not(target_arch = "aarch64"))]
type Baseline = [f32; 4];

/// For targets without a vector type here.
#[cfg(not(target_arch = "aarch64"))]
impl Vector for [f32; 4] {
    const LANES: usize = 4;
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the elements exist. The same holds below.
        unsafe { from.cast::<Self>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { to.cast::<Self>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] + other[i])
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] - other[i])
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        std::array::from_fn(|i| self[i] * factor[i])
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        std::array::from_fn(|i| self[i] * factor[i] + addend[i])
    }
    #[inline(always)]
    unsafe fn clip(self, least: Self, most: Self) -> Self {
        // SAFETY: `clip` of an f32 has no requirements.
        std::array::from_fn(|i| unsafe { self[i].clip(least[i], most[i]) })
    }
    #[inline(always)]
    unsafe fn fourths(from: *const f32) -> [Self; 4] {
        // SAFETY: as above.
        let rows = unsafe { from.cast::<[Self; 4]>().read_unaligned() };
        std::array::from_fn(|x| rows.map(|row| row[x]))
    }
}

/// A single number, for the elements that do not fill a register.
impl Vector for f32 {
    const LANES: usize = 1;
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the element exists. The same holds below.
        unsafe { *from }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { *to = self }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        x
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self + other
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self - other
    }
    #[inline(always)]
    unsafe fn mul(self, factor: Self) -> Self {
        self * factor
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        self * factor + addend
    }
    #[inline(always)]
    unsafe fn clip(self, least: Self, most: Self) -> Self {
        let raised = if self < least { least } else { self };
        if raised > most { most } else { raised }
    }
    #[inline(always)]
    unsafe fn fourths(from: *const f32) -> [Self; 4] {
        // SAFETY: as above.
        std::array::from_fn(|i| unsafe { *from.add(i) })
    }
}
