//! Runs `core/sdrun/examples/embed.rs`, a complete host, on a small UNet with a checkpoint and an adapter.

#![allow(clippy::unwrap_used)]

use sdrun_tests::{lab::Lab, pipelines};
use std::{path::Path, process::Command};

#[test]
fn the_example_chooses_switches_an_adapter_and_cancels() {
    let lab = Lab::default();
    let part = pipelines::part("sd/unet");
    let target = sdrun_tiny::target().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    // Cargo does not say where another crate's examples are. Building with the features of the whole workspace avoids a
    // rebuild.
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--workspace", "--example", "embed", "--target-dir"])
        .arg(&target)
        .current_dir(root)
        .status()
        .unwrap();
    assert!(built.success());
    let cache = tempfile::tempdir().unwrap();
    let dims = |shape: &Vec<usize>| shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let output = Command::new(target.join("debug/examples/embed"))
        .arg(part.model.path())
        .arg(part.folder.join("single_file/tiny_sd_B_fp16.safetensors"))
        .arg(part.folder.join("lora/kohya.safetensors"))
        .args(part.shapes().iter().map(|(name, shape)| format!("{name}={}", dims(shape))))
        .env("SDRUN_PROVIDER_FILES", sdrun_tests::place::Place::Dist.find().unwrap().join("providers"))
        .env("SDRUN_DATA_DIR", &lab.paths.data)
        .env("SDRUN_CACHE_DIR", cache.path())
        .output()
        .unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    for words in
        ["built in", "tiny_sd_B_fp16", "adapter on", "adapter off: the same bits as before", "cancelled"]
    {
        assert!(said.contains(words), "{words:?} is not in {said}{errors}");
    }
}
