//! The parts of a diffusion pipeline that are not neural networks: noise, schedules, samplers, guidance, prompts, metadata.

pub mod guidance;
pub mod infotext;
pub mod names;
pub mod noise;
pub mod prediction;
pub mod prompt;
pub mod sampler;
pub mod schedule;
