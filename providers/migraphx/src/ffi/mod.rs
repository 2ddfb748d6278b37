//! The thin safe layer over MIGraphX's C API and the HIP runtime, both loaded at run time. All unsafe code of this crate
//! is below this module.
//!
//! | module | holds |
//! |---|---|
//! | `api` | the table of the C API's functions, each of which may be missing |
//! | `shape` | element types, whose numbers depend on the release, and shapes |
//! | `program` | [`Program`]: parsed, compiled, saved, loaded, run |
//! | `bound` | [`Bound`]: the buffers of a program, and its runs |
//! | `hip` | [`Hip`]: devices, their memory, streams |
//!
//! Handles are created by the C API only where a call succeeds and are destroyed once, on drop.
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
