//! ggml behind a table of function pointers. What the modules export is safe to call:
//!
//! * [`Ggml`]: the loaded libraries;
//! * [`Store`]: tensors that several graphs share, with the memory to fill them;
//! * [`Kernel`]: an operation of ours that runs inside ggml's thread pool on disjoint tiles of its output;
//! * [`Builder`]: a compute graph, checked against ggml's own conditions before ggml sees it, because a failed assertion inside
//!   ggml would end the process;
//! * [`Program`]: the same graph, ready to run; [`Program::profile`] says where its time goes;
//! * [`Executor`]: backends and the memory of activations, in which programs run;
//! * [`Kept`]: an output that stays on the device.
//!
//! Modules use each other in one direction only (`src/tests/layers.rs` has the order and checks it).
#![allow(unsafe_code)]

mod api;
mod backends;
mod builder;
mod custom;
#[cfg(test)]
mod dequantize;
mod device_ops;
mod executor;
mod files;
mod kept;
mod kernel;
mod library;
mod order;
mod pages;
mod profile;
mod program;
mod room;
mod store;
mod streams;
mod tensor;
#[cfg(test)]
mod testing;
mod threads;

pub(crate) use api::MAX_THREADS;
pub(crate) use builder::{Binary, Builder, Unary};
#[cfg(test)]
pub(crate) use dequantize::dequantize_row;
pub(crate) use device_ops::Gate;
pub(crate) use executor::{Executor, Spread};
#[cfg(test)]
pub(crate) use files::{LIBRARY_DIR, library_file};
pub(crate) use kept::Kept;
pub(crate) use kernel::{Grid, Inputs, Kernel, MAX_INPUTS, Tile};
pub(crate) use library::{Ggml, Gpu, Target};
pub(crate) use program::Program;
pub(crate) use tensor::{Extent, Tensor, Type};
#[cfg(test)]
pub(crate) use testing::{run_kernel, simulated_time};
pub(crate) use {
    room::{Home, Room},
    store::{Store, Stored},
};
