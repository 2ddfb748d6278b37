//! The instruction sets of this processor, and the builds of ggml's CPU backend that it can run.

use std::{ffi::OsString, sync::OnceLock};

/// Environment variable with the most capable variant that may be used. It makes this processor compute as an older one would.
pub(crate) const VARIABLE: &str = "SDRUN_GGML_CPU";

/// The variants whose instructions this processor has, the most capable first. `build/variants.rs` names them and compiles each
/// with the instructions that it needs here.
///
/// # Errors
/// Lists the variants if `SDRUN_GGML_CPU` names an unknown one.
pub(crate) fn usable() -> Result<Vec<&'static str>, String> {
    match limit() {
        Ok(first) => Ok(ALL[*first..].iter().filter(|(_, runs)| runs()).map(|(name, _)| *name).collect()),
        Err(given) => {
            let names: Vec<_> = ALL.iter().map(|(name, _)| *name).collect();
            Err(format!("{VARIABLE} is {given:?}, which is none of {}", names.join(", ")))
        }
    }
}

/// The value of the variable.
fn given() -> Option<OsString> {
    std::env::var_os(VARIABLE).filter(|given| !given.is_empty())
}

/// The index of the first variant that may be used, or the value of the variable if that names no variant.
fn limit() -> &'static Result<usize, String> {
    static LIMIT: OnceLock<Result<usize, String>> = OnceLock::new();
    LIMIT.get_or_init(|| {
        let Some(given) = given() else { return Ok(0) };
        let given = given.to_string_lossy().into_owned();
        ALL.iter().position(|(name, _)| *name == given).ok_or(given)
    })
}

/// Whether the variable allows `variant`.
#[cfg(target_arch = "x86_64")]
fn allowed(variant: &str) -> bool {
    limit().as_ref().is_ok_and(|first| ALL[*first..].iter().any(|(name, _)| *name == variant))
}

/// Whether the variable is unset, so that all instructions may be used.
#[cfg(target_arch = "x86_64")]
pub(crate) fn unlimited() -> bool {
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
pub(crate) fn avx2() -> bool {
    allowed("haswell") && has!("sse4.2", "avx", "avx2", "fma", "f16c", "bmi2")
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn avx512() -> bool {
    avx2() && allowed("skylakex") && has!("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw")
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn avx512_bf16() -> bool {
    avx512() && allowed("zen4") && has!("avx512bf16")
}

/// AVX-512 with products of bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) fn avx512_vnni() -> bool {
    avx512() && has!("avx512vnni")
}

/// AVX2 with products of bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) fn avx_vnni() -> bool {
    avx2() && has!("avxvnni")
}

/// Whether products of f32 are faster than products of bf16 pairs. That is so on Intel's cores since Sapphire Rapids, which are made
/// to multiply bf16 in tiles; AVX-512 FP16 identifies them. An Emerald Rapids whose tiles are hidden does 175 GFLOP/s in pairs and
/// 325 in f32. This is a fixed rule, because a measurement could choose differently in the next run and change the results.
#[cfg(target_arch = "x86_64")]
pub(crate) fn bf16_is_slow() -> bool {
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
