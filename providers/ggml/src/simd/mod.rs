//! Vector instructions behind feature detection. What the modules export is safe to call, and they know nothing of ggml.
//!
//! * [`Level`]: the instruction set detected at run time; [`vectorize`] compiles ordinary code for each of them;
//! * [`product`]: the inner loop of matrix products in f32 and bf16; [`int8`]: that of products of bytes;
//! * [`depthwise_row`], [`softmax`], [`winograd`], [`transpose`]: loops that compilers do not vectorize well enough;
//! * [`bf16`], [`Words`]: rounding to bf16, and numbers as words of 32 bits;
//! * [`lines`]: memory aligned to cache lines.
//!
//! Modules use each other in one direction only (`src/tests/layers.rs` has the order and checks it).
#![allow(unsafe_code)]

pub(crate) mod bf16;
pub(crate) mod depthwise_row;
pub(crate) mod int8;
mod level;
pub(crate) mod lines;
pub(crate) mod product;
pub(crate) mod softmax;
pub(crate) mod transpose;
mod vector;
pub(crate) mod winograd;
mod words;

#[cfg(test)]
pub(crate) use level::vectorize_at;
pub(crate) use level::{Level, Vectorized, mul_add, vectorize};
pub(crate) use words::{Words, as_bytes, as_floats, as_words, as_words_mut};
