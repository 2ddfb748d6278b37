//! What takes part in a benchmark.

use super::{Event, Kind, Row};
use crate::{Result, Tensors, verify::Tolerance};
use sdrun_abi::{Host, Precision};

/// A system that has loaded a case and can run it.
pub trait Contender {
    /// Runs once and returns the outputs.
    ///
    /// # Errors
    /// What goes wrong is the reason in its row.
    fn outputs(&mut self, host: &dyn Host) -> Result<Tensors>;
    /// Runs `warmup` times, then `count` times, and returns the durations of the latter in milliseconds.
    ///
    /// # Errors
    /// What goes wrong is the reason in its row.
    fn times(&mut self, warmup: usize, count: usize, host: &dyn Host) -> Result<Vec<f64>>;
    /// Id of its process.
    fn process(&self) -> Option<u32>;
    /// Fills in what is known after a run, such as its memory.
    ///
    /// # Errors
    /// What goes wrong is the reason in its row.
    fn report(&mut self, row: &mut Row) -> Result<()>;
}

/// The systems of a case.
pub trait Field<'a> {
    /// Their names, in the order in which they load.
    fn systems(&self) -> Vec<(String, Kind)>;
    /// Loads a system, by its place in the list. `row` gets what it tells on the way.
    ///
    /// # Errors
    /// What goes wrong is the reason in its row.
    fn open(
        &mut self,
        at: usize,
        row: &mut Row,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> Result<Box<dyn Contender + 'a>>;
    /// What is allowed in a precision.
    fn tolerance(&self, precision: Precision, reference: &Tensors) -> Tolerance;
}
