//! Everything unsafe in this crate: ggml behind a table of function pointers, and CPU instructions behind
//! feature detection. What the modules export is safe to call:
//!
//! * [`Ggml`]: the loaded libraries;
//! * [`Store`]: tensors that several graphs share, with the memory to fill them;
//! * [`Builder`] → [`Program`]: a compute graph, checked against ggml's own conditions before ggml sees it
//!   (a failed assertion inside ggml would end the process), then the same graph, ready to run;
//! * [`Executor`]: backends and the memory of activations, in which programs run;
//! * [`Kept`]: an output that stays on the device;
//! * [`Kernel`]: an operation of ours that runs inside ggml's thread pool on disjoint tiles of its output;
//! * [`simd`]: code compiled once for each instruction set; [`product`]: the inner loop of matrix products;
//!   [`depthwise`], [`softmax`], [`winograd`]: what compilers do not vectorise well enough;
//! * [`Program::profile`]: where the time of a program goes.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod api;
mod builder;
pub(crate) mod depthwise;
#[cfg(test)]
mod dequantize;
mod device_ops;
mod executor;
pub(crate) mod int8;
mod kept;
mod kernel;
mod library;
pub(crate) mod lines;
mod order;
mod pages;
pub(crate) mod product;
mod profile;
mod program;
pub(crate) mod simd;
pub(crate) mod softmax;
mod store;
mod streams;
mod threads;
pub(crate) mod transpose;
mod variant;
mod vector;
pub(crate) mod winograd;

pub(crate) use builder::{Binary, Builder, Extent, Tensor, Type, Unary};
#[cfg(test)]
pub(crate) use dequantize::dequantize_row;
pub(crate) use device_ops::Gate;
pub(crate) use executor::{Executor, Spread};
pub(crate) use kept::Kept;
pub(crate) use kernel::{Grid, Inputs, Kernel, MAX_INPUTS, Tile, as_floats, as_words, as_words_mut};
#[cfg(test)]
pub(crate) use library::LIBRARY_DIR;
pub(crate) use library::{Ggml, Gpu, Target};
pub(crate) use program::Program;
pub(crate) use store::{Home, Room, Store, Stored};
pub(crate) use threads::MAX_THREADS;
#[cfg(test)]
pub(crate) use {kernel::run_kernel, library::library_file};
