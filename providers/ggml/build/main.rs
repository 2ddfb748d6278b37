//! Compiles ggml's libraries, with only a C and a C++ compiler, and passes their folder to the crate.
//!
//! The results are shared libraries in `$OUT_DIR/lib`: `ggml-base` and one `ggml-cpu-<variant>` for each instruction set. The crate
//! does not link them. It loads them when a host initializes the provider.
//!
//! Environment: `CC`, `CXX`, `CFLAGS`, `CXXFLAGS` as for any C build; `SDRUN_GGML_SOURCE` names a ggml source
//! folder to use in place of the pinned package.

#[path = "../../common/build_id.rs"]
mod build_id;
mod compile;
#[path = "../../common/pinned_package.rs"]
mod pinned_package;
mod source;
mod variants;

use std::{env, error::Error, path::PathBuf};

fn main() {
    if let Err(error) = run() {
        println!("cargo::error=cannot build ggml: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    build_id::emit(&["build", "src", "../../core/abi/src", "../../core/graph/src"]);
    println!("cargo::rerun-if-env-changed={}", source::OVERRIDE);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let source = source::Source::locate()?;
    // Clippy runs nothing, and gives build scripts of the workspace another OUT_DIR, so that it would compile ggml once more.
    let is_clippy =
        env::var("RUSTC_WORKSPACE_WRAPPER").is_ok_and(|wrapper| wrapper.contains("clippy-driver"));
    let libraries = if is_clippy { out } else { compile::compile(&source, &out)? };
    println!("cargo::rustc-env=SDRUN_GGML_LIB_DIR={}", libraries.display());
    println!("cargo::rustc-env=SDRUN_GGML_VERSION={}", source.version);
    Ok(())
}
