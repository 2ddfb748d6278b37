//! Each function here reads bytes that may come from a stranger. It must return whatever they are: without a panic, an abort or a hang,
//! and with little memory. If it accepts the bytes, writing and reading the result must give the same again.
//!
//! `cargo xtask fuzz` runs them under libFuzzer (CONTRIBUTING.md). The test `known` runs them on the inputs in `seeds/`, which grow by
//! one file for each fault that was found.

mod files;
mod graphs;
mod texts;

/// A function of bytes and its name.
pub struct Target {
    /// Name, also of its folder in `seeds/`.
    pub name: &'static str,
    /// Reads the bytes.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "onnx", run: graphs::onnx },
    Target { name: "external-data", run: graphs::external_data },
    Target { name: "safetensors", run: files::safetensors },
    Target { name: "sharded-index", run: files::sharded_index },
    Target { name: "gguf", run: files::gguf },
    Target { name: "adapter", run: files::adapter },
    Target { name: "adapter-keys", run: files::adapter_keys },
    Target { name: "embedding", run: files::embedding },
    Target { name: "npy", run: files::npy },
    Target { name: "npz", run: files::npz },
    Target { name: "engine", run: files::engine },
    Target { name: "refit-table", run: sdrun_provider_tensorrt_rtx::read_anything },
    Target { name: "picture", run: files::picture },
    Target { name: "messages", run: sdrun::worker::read_messages },
    Target { name: "manifest", run: texts::manifest },
    Target { name: "binding", run: texts::binding },
    Target { name: "report", run: texts::report },
    Target { name: "prompt", run: texts::prompt },
    Target { name: "metadata", run: texts::metadata },
    Target { name: "tokenizer", run: texts::tokenizer },
];

/// The target with this name.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn target(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("there is no target {name}"))
}
