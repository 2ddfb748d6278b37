//! From a prompt to a picture: the parts of a diffusion pipeline that are no neural network.

pub mod noise;
pub mod sampler;
pub mod schedule;
