//! Rounds rows of f32 to words of two bf16, with the instructions of AVX512-BF16.

#[cfg(target_arch = "x86_64")]
use super::level::Level;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Rounds two rows to bf16 pairs, or returns `false` if the processor lacks the instruction.
pub(crate) fn interleave(low: &[f32], high: &[f32], words: &mut [u32]) -> bool {
    assert!(low.len() == words.len() && high.len() == words.len(), "rows of different length");
    #[cfg(target_arch = "x86_64")]
    if Level::detect().multiplies_bf16() {
        // SAFETY: the processor has the features, by `detect`; the lengths were checked.
        unsafe { interleave_rows(low, high, words) };
        return true;
    }
    false
}

/// Rounds neighbouring elements to bf16 pairs, or returns `false` if the processor lacks the instruction.
pub(crate) fn narrow(elements: &[[f32; 2]], words: &mut [u32]) -> bool {
    assert!(elements.len() == words.len(), "a word for each pair");
    #[cfg(target_arch = "x86_64")]
    if Level::detect().multiplies_bf16() {
        // SAFETY: the processor has the features, by `detect`; the lengths were checked.
        unsafe { narrow_pairs(elements, words) };
        return true;
    }
    false
}

/// # Safety
/// The processor has AVX-512 F, BW, VL and BF16; the slices have the same length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn narrow_pairs(elements: &[[f32; 2]], words: &mut [u32]) {
    for at in (0..words.len()).step_by(8) {
        let rest = words.len() - at;
        let (some, of_words): (__mmask16, __mmask8) = match rest {
            8.. => (0xffff, 0xff),
            _ => ((1 << (2 * rest)) - 1, (1 << rest) - 1),
        };
        // SAFETY: the masks keep the accesses inside the slices; vectors of the same size, any of whose bit patterns is valid.
        unsafe {
            let pairs = _mm512_maskz_loadu_ps(some, elements.as_ptr().add(at).cast());
            let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(pairs));
            _mm256_mask_storeu_epi32(words.as_mut_ptr().add(at).cast(), of_words, halves);
        }
    }
}

/// # Safety
/// The processor has AVX-512 F, BW and BF16; the slices have the same length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn interleave_rows(low: &[f32], high: &[f32], words: &mut [u32]) {
    for at in (0..words.len()).step_by(16) {
        let rest = words.len() - at;
        let mask: __mmask16 = if rest >= 16 { 0xffff } else { (1 << rest) - 1 };
        // SAFETY: the mask keeps the accesses inside the slices.
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask, low.as_ptr().add(at));
            let high = _mm512_maskz_loadu_ps(mask, high.as_ptr().add(at));
            _mm512_mask_storeu_epi32(words.as_mut_ptr().add(at).cast(), mask, interleaved(low, high));
        }
    }
}

/// Rounds two vectors to bf16 pairs, the first in the lower halves.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn interleaved(low: __m512, high: __m512) -> __m512i {
    const PLACES: [u16; 32] = {
        let mut places = [0; 32];
        let mut i = 0;
        while i < 32 {
            places[i] = (i % 2 * 16 + i / 2) as u16;
            i += 1;
        }
        places
    };
    // SAFETY: vectors of the same size, any of whose bit patterns is valid.
    unsafe {
        let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_permutexvar_epi16(std::mem::transmute::<[u16; 32], __m512i>(PLACES), halves)
    }
}
