//! Tells the library which target triple it is compiled for; plugins for another one are skipped.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=SDRUN_TARGET={}", std::env::var("TARGET").unwrap_or_default());
}
