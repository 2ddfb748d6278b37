//! Compiles ggml's libraries with the C and C++ compiler alone and tells the crate where they are.
//!
//! Out come, in `$OUT_DIR/lib`, `ggml-base` and one `ggml-cpu-<variant>` for each instruction set, as shared
//! libraries. The crate links none of them: it loads them when a host initialises the provider.
//!
//! Environment: `CC`, `CXX`, `CFLAGS`, `CXXFLAGS` as for any C build; `SDRUN_GGML_SOURCE` names a ggml source
//! folder to use in place of the pinned package.

mod compile;
#[path = "../../common/pinned_package.rs"]
mod pinned_package;
mod source;
mod variants;

use sha2::{Digest, Sha256};
use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

fn main() {
    if let Err(error) = run() {
        println!("cargo::error=cannot build ggml: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    for path in ["build", "src", "Cargo.toml", "../../Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    println!("cargo::rerun-if-env-changed={}", source::OVERRIDE);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let source = source::Source::locate()?;
    let libraries = compile::compile(&source, &out)?;
    println!("cargo::rustc-env=SDRUN_GGML_LIB_DIR={}", libraries.display());
    println!("cargo::rustc-env=SDRUN_GGML_VERSION={}", source.version);
    println!("cargo::rustc-env=SDRUN_BUILD_ID={}", build_id(&source.version)?);
    Ok(())
}

/// Names what this build does: a hash of the crate's own sources and the version of ggml.
fn build_id(ggml_version: &str) -> Result<String, Box<dyn Error>> {
    let mut files = vec![PathBuf::from("Cargo.toml")];
    collect(Path::new("src"), &mut files)?;
    collect(Path::new("build"), &mut files)?;
    files.sort();
    let mut hash = Sha256::new();
    hash.update(ggml_version);
    for file in files {
        let bytes = fs::read(&file)?;
        hash.update(file.to_string_lossy().replace('\\', "/"));
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(&bytes);
    }
    let hex: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{}-ggml{ggml_version}-{hex}", env::var("CARGO_PKG_VERSION")?))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
