//! Random number generators of other programs, so that the same seed gives the same picture.
//!
//! diffusers and ComfyUI draw from [`TorchCpu`]. [`Philox`] is A1111's "NV" source. The SDE samplers of A1111 and ComfyUI use
//! [`BrownianTree`].

mod brownian;
mod mersenne;
mod philox;
mod seed_sequence;
mod torch;
mod variation;

pub use brownian::BrownianTree;
pub use philox::Philox;
pub use torch::TorchCpu;
pub use variation::Variation;
pub(crate) use variation::towards;

use serde::{Deserialize, Serialize};

/// Where noise comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rng {
    /// torch's generator for CPUs: ComfyUI, diffusers, A1111's "CPU".
    #[default]
    Cpu,
    /// [`Philox`]: A1111's "NV", which repeats torch's generator for small pictures on NVIDIA GPUs, A1111's default.
    Nv,
}

/// Normal numbers of a generator, from a seed.
#[derive(Clone)]
pub enum Stream {
    /// See [`Rng::Cpu`].
    Cpu(TorchCpu),
    /// See [`Rng::Nv`].
    Nv(Philox),
}

impl Stream {
    /// A generator.
    pub fn new(rng: Rng, seed: u64) -> Self {
        match rng {
            Rng::Cpu => Self::Cpu(TorchCpu::new(seed)),
            Rng::Nv => Self::Nv(Philox::new(seed)),
        }
    }

    /// Fills `out` with normal numbers, as one call of the program does.
    pub fn randn(&mut self, out: &mut [f32]) {
        match self {
            Self::Cpu(torch) => torch.randn(out),
            Self::Nv(philox) => philox.randn(out),
        }
    }
}
