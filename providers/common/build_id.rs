//! For the build scripts of providers: identifies the code that a build produces.

use sha2::{Digest, Sha256};
use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// Sets `SDRUN_BUILD_ID` for the crate: its version and a hash of every file below `folders`, of its
/// `Cargo.toml` and of the lock file (which pins its dependencies).
pub(crate) fn emit(folders: &[&str]) {
    let mut files = vec![PathBuf::from("Cargo.toml"), PathBuf::from("../../Cargo.lock")];
    for folder in folders {
        println!("cargo::rerun-if-changed={folder}");
        if let Err(error) = collect(Path::new(folder), &mut files) {
            println!("cargo::error=cannot read {folder}: {error}");
        }
    }
    for file in &files[..2] {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        match fs::read(&file) {
            Ok(bytes) => {
                hash.update(file.to_string_lossy().replace('\\', "/"));
                hash.update((bytes.len() as u64).to_le_bytes());
                hash.update(&bytes);
            }
            Err(error) => println!("cargo::error=cannot read {}: {error}", file.display()),
        }
    }
    let hex: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    println!("cargo::rustc-env=SDRUN_BUILD_ID={version}-{hex}");
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
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
