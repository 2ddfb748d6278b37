//! Random number generators of other programs, so that the same seed gives the same picture.
//!
//! diffusers and ComfyUI draw from [`TorchCpu`]. [`Philox`] is A1111's "NV" source. The SDE samplers of A1111 and ComfyUI use
//! [`BrownianTree`].

mod brownian;
mod mersenne;
mod philox;
mod seed_sequence;
mod torch;

pub use brownian::BrownianTree;
pub use philox::Philox;
pub use torch::TorchCpu;
