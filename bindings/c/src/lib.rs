//! sdrun for C and C++. `include/sdrun.h` is generated from this crate by `cargo xtask header`; its comments are the ones here.
//!
//! * `failure`: errors as values, and panics that become errors.
//! * `given`: reads what C passes.
//! * `calls`: callbacks and cancelling.
//! * `registry`, `session`, `pipeline`: what the header declares.
//!
//! This whole crate is a boundary to C: each function converts what it is given in one unsafe block, under the rules that the header
//! states, and goes on in safe code.

#![allow(unsafe_code, reason = "a boundary to C")]
#![allow(unreachable_pub, reason = "C sees what Rust does not")]

mod calls;
mod failure;
mod given;
mod pipeline;
mod registry;
mod session;

use std::ffi::c_char;

/// The version of the library, such as `0.1.0`.
#[unsafe(no_mangle)]
pub extern "C" fn sdrun_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
