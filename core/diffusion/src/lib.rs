//! From a prompt to a picture: the parts of a diffusion pipeline that are no neural network.

pub mod guidance;
pub mod infotext;
pub mod names;
pub mod noise;
pub mod prediction;
pub mod prompt;
pub mod sampler;
pub mod schedule;
