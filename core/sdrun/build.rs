//! Tells the library its target triple, so that it skips plugins for other targets.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=SDRUN_TARGET={}", std::env::var("TARGET").unwrap_or_default());
}
