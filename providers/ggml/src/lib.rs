//! The ggml provider.

mod engine;
mod ffi;
mod kernels;
mod ops;
mod patterns;
mod provider;
mod shape;
mod session;
mod storage;
mod translate;
mod weights;

pub use provider::GgmlProvider;
