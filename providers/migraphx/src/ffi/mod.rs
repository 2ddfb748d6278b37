//! A thin safe layer over MIGraphX's C API and the HIP runtime, both loaded at run time. All unsafe code of this
//! crate is below this module.
//!
//! | module | contents |
//! |---|---|
//! | `api` | the function table of the C API; each function may be missing |
//! | `shape` | shapes, and element types, whose codes depend on the release |
//! | `program` | [`Program`]: parsed, compiled, saved, loaded, run |
//! | `bound` | [`Bound`]: the buffers of a program, and its runs |
//! | `hip` | [`Hip`]: devices, their memory, streams |
//!
//! Only successful calls create handles, and each handle is destroyed once, on drop.
#![allow(unsafe_code)]

mod api;
mod bound;
mod hip;
mod program;
mod shape;

pub(crate) use api::Api;
pub(crate) use bound::{Bound, Buffer};
pub(crate) use hip::{DeviceBuffer, Hip, HipDevice, Stream};
pub(crate) use program::{CompileOptions, Program};
pub(crate) use shape::Layout;
