//! Random numbers that other programs' users know: the same seed gives the same picture.
//!
//! [`TorchCpu`] is what diffusers and ComfyUI draw from, [`Philox`] what A1111 calls "NV", and [`BrownianTree`] what
//! the SDE samplers of A1111 and ComfyUI use between two noise levels.

mod brownian;
mod mersenne;
mod philox;
mod seed_sequence;
mod torch;

pub use brownian::BrownianTree;
pub use philox::Philox;
pub use torch::TorchCpu;
