//! The instruction sets for which ggml's CPU kernels are compiled. This is a selection of ggml's own `GGML_CPU_ALL_VARIANTS` build,
//! with its names and flags. `src/cpu.rs` picks one at run time.

/// One build of the CPU backend.
pub(crate) struct Variant {
    /// The suffix of the library's name.
    pub(crate) name: &'static str,
    /// Flags for gcc and clang.
    pub(crate) gnu: &'static [&'static str],
    /// Flags for cl. `None` if it cannot build the variant.
    pub(crate) msvc: Option<&'static [&'static str]>,
}

/// The variants for a target, and the folder of ggml's architecture-specific sources.
pub(crate) fn of(arch: &str, os: &str) -> (&'static [Variant], Option<&'static str>) {
    match (arch, os) {
        ("x86_64", _) => (X86_64, Some("x86")),
        ("aarch64", "macos") => (APPLE, Some("arm")),
        ("aarch64", _) => (AARCH64, Some("arm")),
        _ => (GENERIC, None),
    }
}

const AVX2: &[&str] = &["-msse4.2", "-mavx", "-mf16c", "-mfma", "-mavx2", "-mbmi2"];
const AVX512: &[&str] = &[
    "-msse4.2",
    "-mavx",
    "-mf16c",
    "-mfma",
    "-mavx2",
    "-mbmi2",
    "-mavx512f",
    "-mavx512cd",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bw",
];
const AVX512_BF16: &[&str] = &[
    "-msse4.2",
    "-mavx",
    "-mf16c",
    "-mfma",
    "-mavx2",
    "-mbmi2",
    "-mavx512f",
    "-mavx512cd",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bw",
    "-mavx512vbmi",
    "-mavx512vnni",
    "-mavx512bf16",
];

const X86_64: &[Variant] = &[
    Variant { name: "x64", gnu: &[], msvc: Some(&[]) },
    Variant { name: "haswell", gnu: AVX2, msvc: Some(&["/arch:AVX2", "/D__BMI2__"]) },
    Variant { name: "skylakex", gnu: AVX512, msvc: Some(&["/arch:AVX512", "/D__BMI2__"]) },
    Variant { name: "zen4", gnu: AVX512_BF16, msvc: None },
];
const AARCH64: &[Variant] = &[
    Variant { name: "armv8.0_1", gnu: &["-march=armv8-a"], msvc: None },
    Variant { name: "armv8.2_1", gnu: &["-march=armv8.2-a+dotprod"], msvc: None },
    Variant { name: "armv8.2_2", gnu: &["-march=armv8.2-a+dotprod+fp16"], msvc: None },
    Variant { name: "armv8.6_1", gnu: &["-march=armv8.6-a+dotprod+fp16+sve+i8mm"], msvc: None },
];
const APPLE: &[Variant] = &[
    Variant { name: "apple_m1", gnu: &["-march=armv8.2-a+dotprod"], msvc: None },
    Variant { name: "apple_m2_m3", gnu: &["-march=armv8.6-a+dotprod+i8mm"], msvc: None },
];
const GENERIC: &[Variant] = &[Variant { name: "generic", gnu: &[], msvc: Some(&[]) }];
