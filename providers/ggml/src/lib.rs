//! The ggml provider.

mod cpu;
mod engine;
mod ffi;
mod flow;
mod form;
mod gpu;
mod kernels;
mod memory;
mod ops;
mod optimize;
mod provider;
mod session;
mod shape;
mod simd;
mod storage;
#[cfg(test)]
mod tests;
mod topology;
mod translate;
mod unsupported;
mod weights;

pub use provider::GgmlProvider;

sdrun_abi::export_provider! {
    id: "ggml",
    vendor: "sdrun",
    version: env!("CARGO_PKG_VERSION"),
    build_id: env!("SDRUN_BUILD_ID"),
    provider: GgmlProvider::default(),
}
