//! The inner loops over tensors, in the best instructions detected at run time.
//!
//! Conversions and transposes give the same bits on every processor. A product of small rank rounds each step once with
//! fused multiply-add and twice without, always in the same order.
//!
//! Unsafe code is in `x86`, whose loops run only after detection, and in `bands`, where threads write one matrix.

mod bands;
mod convert;
mod low_rank;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use bands::bands;
pub(crate) use convert::{Block, Half, narrow, widen};
pub(crate) use low_rank::{PANEL, Panels};
pub(crate) use transpose::transpose_halves;
