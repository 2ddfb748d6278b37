//! From a parsed prompt to what a denoiser takes.
//!
//! [`tokenizer`] turns text into ids. [`chunks`] (CLIP) and [`sequence`] (T5) arrange them for an encoder. [`encode`] runs the
//! encoder, a function from ids to hidden states, and applies weights ([`emphasis`]). [`condition`] assembles what each family of
//! models takes.

pub mod chunks;
pub mod condition;
pub mod emphasis;
pub mod encode;
pub mod sequence;
pub mod tokenizer;
