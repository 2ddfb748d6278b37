//! Computes the stored outputs anew: `cargo run -p sdrun-selftest --example references`, with the reference provider's runtime installed.

use sdrun::{Isolation, Registry, TracingHost, abi::Error};
use std::{fs, path::Path};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = Registry::discover()?;
    let reference =
        registry.reference().ok_or_else(|| Error::not_found("no usable provider is the reference"))?;
    let provider = registry.open(&reference.id, &Isolation::worker(Default::default()))?;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("references/outputs.safetensors");
    let bytes = sdrun_selftest::references::compute(&provider, &TracingHost)?;
    fs::write(&file, &bytes)?;
    println!("{}: {} bytes", file.display(), bytes.len());
    Ok(())
}
