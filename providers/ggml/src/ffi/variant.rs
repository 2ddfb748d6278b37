//! Which builds of ggml's CPU backend this processor can run.

use std::{ffi::OsString, sync::OnceLock};

/// Names the most capable variant that may be used, so that what other processors compute can be seen on this one.
pub(super) const VARIABLE: &str = "SDRUN_GGML_CPU";

/// Variants the processor has every instruction of, the most capable first. The names are those of
/// `build/variants.rs`; what each needs is what it is compiled with.
///
/// # Errors
/// The names there are, where `SDRUN_GGML_CPU` has another.
pub(super) fn usable() -> Result<Vec<&'static str>, String> {
    match limit() {
        Ok(first) => Ok(ALL[*first..].iter().filter(|(_, runs)| runs()).map(|(name, _)| *name).collect()),
        Err(given) => {
            let names: Vec<_> = ALL.iter().map(|(name, _)| *name).collect();
            Err(format!("{VARIABLE} is {given:?}, which is none of {}", names.join(", ")))
        }
    }
}

/// What the variable says.
fn given() -> Option<OsString> {
    std::env::var_os(VARIABLE).filter(|given| !given.is_empty())
}

/// Where the variants that may be used begin; what the variable says, where that is none.
fn limit() -> &'static Result<usize, String> {
    static LIMIT: OnceLock<Result<usize, String>> = OnceLock::new();
    LIMIT.get_or_init(|| {
        let Some(given) = given() else { return Ok(0) };
        let given = given.to_string_lossy().into_owned();
        ALL.iter().position(|(name, _)| *name == given).ok_or(given)
    })
}

/// Whether the variable lets `variant` be used.
#[cfg(target_arch = "x86_64")]
fn allowed(variant: &str) -> bool {
    limit().as_ref().is_ok_and(|first| ALL[*first..].iter().any(|(name, _)| *name == variant))
}

/// Whether the variable leaves all that the processor has.
#[cfg(target_arch = "x86_64")]
pub(super) fn unlimited() -> bool {
    given().is_none()
}

type Candidate = (&'static str, fn() -> bool);

#[cfg(target_arch = "x86_64")]
const ALL: &[Candidate] = &[
    ("zen4", || avx512_bf16() && has!("avx512vbmi", "avx512vnni")),
    ("skylakex", avx512),
    ("haswell", avx2),
    ("x64", || true),
];

#[cfg(all(target_arch = "aarch64", target_os = "macos"))]
const ALL: &[Candidate] = &[("apple_m2_m3", || has!("dotprod", "i8mm")), ("apple_m1", || has!("dotprod"))];

#[cfg(all(target_arch = "aarch64", not(target_os = "macos")))]
const ALL: &[Candidate] = &[
    ("armv8.6_1", || has!("dotprod", "fp16", "sve", "i8mm")),
    ("armv8.2_2", || has!("dotprod", "fp16")),
    ("armv8.2_1", || has!("dotprod")),
    ("armv8.0_1", || true),
];

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ALL: &[Candidate] = &[("generic", || true)];

#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($($feature:tt),+) => { $(std::arch::is_x86_feature_detected!($feature))&&+ };
}
#[cfg(target_arch = "aarch64")]
macro_rules! has {
    ($($feature:tt),+) => { $(std::arch::is_aarch64_feature_detected!($feature))&&+ };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use has;

#[cfg(target_arch = "x86_64")]
pub(super) fn avx2() -> bool {
    allowed("haswell") && has!("sse4.2", "avx", "avx2", "fma", "f16c", "bmi2")
}

#[cfg(target_arch = "x86_64")]
pub(super) fn avx512() -> bool {
    avx2() && allowed("skylakex") && has!("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw")
}

#[cfg(target_arch = "x86_64")]
pub(super) fn avx512_bf16() -> bool {
    avx512() && allowed("zen4") && has!("avx512bf16")
}

/// With instructions for products of bytes.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx512_vnni() -> bool {
    avx512() && has!("avx512vnni")
}

/// Whether products of f32 are faster than those of bf16 pairs. So they are on Intel's cores since Sapphire Rapids (which
/// AVX-512 FP16 tells), made to multiply bf16 in tiles: an Emerald Rapids whose tiles are hidden does 175 GFLOP/s in pairs and
/// 325 in f32. This is a rule because a measurement might choose, and so compute, something else in the next run.
#[cfg(target_arch = "x86_64")]
pub(super) fn bf16_is_slow() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let is_intel =
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel";
    is_intel && has!("avx512fp16")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plain_variant_is_always_the_last_resort() {
        let usable = usable().unwrap();
        if cfg!(target_arch = "x86_64") {
            assert_eq!(usable.last(), Some(&"x64"));
        }
        assert!(usable.iter().all(|name| ALL.iter().any(|(known, _)| known == name)));
    }
}
