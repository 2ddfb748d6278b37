//! What takes part in a benchmark.

use super::Row;
use crate::{Result, Tensors};
use sdrun_abi::Host;

/// A system that has loaded a case and can run it.
pub(super) trait Contender {
    /// Runs once and returns the outputs.
    fn outputs(&mut self, host: &dyn Host) -> Result<Tensors>;

    /// Runs `warmup` times, then `count` times, and returns the durations of the latter in milliseconds.
    fn times(&mut self, warmup: usize, count: usize, host: &dyn Host) -> Result<Vec<f64>>;

    /// Id of its process.
    fn process(&self) -> Option<u32>;

    /// Fills in what is known after the last run.
    fn finish(&mut self, row: &mut Row) -> Result<()>;
}
