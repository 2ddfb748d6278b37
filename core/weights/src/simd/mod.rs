//! The inner loops over tensors, in the best instructions of the processor at hand.
//!
//! Conversions and transpositions give the same bits whatever the processor; a product of small rank rounds each step
//! once where there is fused multiply-add, else twice, always in the same order.
//!
//! Unsafe code is in `x86`, which asks the processor once for what it then uses, and in `bands`, where threads write one matrix.

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
