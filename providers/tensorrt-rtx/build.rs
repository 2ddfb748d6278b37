//! Compiles the shim, which needs only a C++ compiler, and sets the build id (`SDRUN_BUILD_ID`).
//!
//! Environment: `CXX` and `CXXFLAGS` as in any C++ build. `SDRUN_TENSORRT_RTX_INCLUDE` names a folder with NVIDIA's
//! headers (`NvInfer.h`) of the same release, which replace those of the pinned package.

#[path = "../common/build_id.rs"]
mod build_id;
#[path = "../common/pinned_package.rs"]
mod pinned_package;

use std::{env, error::Error, path::PathBuf};

const OVERRIDE: &str = "SDRUN_TENSORRT_RTX_INCLUDE";
/// The release the shim is written for, spelled like the package's folder.
const RELEASE: &str = "TRT-RTX-1.7";

fn main() {
    build_id::emit(&["src", "shim", "../common/src", "../../core/abi/src", "../../core/graph/src"]);
    println!("cargo::rerun-if-env-changed={OVERRIDE}");
    if let Err(error) = shim() {
        println!("cargo::error=cannot build the shim over TensorRT-RTX: {error}");
        std::process::exit(1);
    }
}

fn shim() -> Result<(), Box<dyn Error>> {
    let hint = format!(
        "set {OVERRIDE} to the folder of NvInfer.h, or let cargo reach its registry once (`cargo fetch`)"
    );
    let folders = match env::var_os(OVERRIDE) {
        Some(folder) => vec![PathBuf::from(folder)],
        None => {
            let headers = pinned_package::folder("trtx-sys", &hint)?.join("TensorRT-Headers");
            // The second folder holds the two CUDA types that the headers name.
            vec![headers.join(RELEASE), headers]
        }
    };
    let header = folders[0].join("NvInfer.h");
    if !header.is_file() {
        return Err(format!("{} does not exist; {hint}", header.display()).into());
    }
    let mut build = cxx_build::bridge("src/ffi/bridge.rs");
    build.std("c++17").files(["shim/build.cpp", "shim/runtime.cpp"]).include("shim");
    // Warnings in the vendor's headers are ignored; warnings in our files are not.
    build.flag_if_supported("-Wno-deprecated-declarations").flag_if_supported("-Wno-unused-parameter");
    for folder in &folders {
        build.include(folder);
    }
    // What is shipped must not name the folder it was built in, which `__FILE__` would.
    for folder in [env::var("OUT_DIR")?, env::var("CARGO_MANIFEST_DIR")?] {
        build.flag_if_supported(format!("-ffile-prefix-map={folder}=."));
    }
    build.compile("sdrun_tensorrt_rtx_shim");
    let folders = env::join_paths(folders)?;
    println!("cargo::rustc-env=SDRUN_TENSORRT_RTX_HEADERS={}", folders.display());
    Ok(())
}
