//! Loads the contenders of a case and lets them run in turns.

use super::{
    BenchOptions, Event, PrecisionChoice, Row,
    contender::Field,
    disturbance::Watch,
    go_on,
    judge::judge,
    rounds::{Racer, heat},
};
use crate::{Error, Result, Tensors, memory};
use sdrun_abi::{Host, Precision};
use std::time::Instant;

/// A case while it is measured.
pub(super) struct Race<'a> {
    /// Name of the model.
    pub(super) model: &'a str,
    pub(super) precision: PrecisionChoice,
    pub(super) reference: Option<&'a Tensors>,
    pub(super) options: &'a BenchOptions,
    pub(super) host: &'a dyn Host,
    /// One for each system that has started.
    pub(super) rows: Vec<Row>,
    /// The loaded systems, each with the index of its row. The first one is the anchor: it stays for all heats, so that their times can
    /// be compared, unless memory does not hold another system beside it.
    pub(super) racers: Vec<(usize, Racer<'a>)>,
    /// Heats that are over.
    pub(super) heats: usize,
}

/// Loading takes more memory than running, and the next system may need more than those so far.
const SPARE_MEMORY: f64 = 1.5;

impl<'a> Race<'a> {
    /// Loads one system after the other, and runs those that fit into memory together.
    pub(super) fn run(
        &mut self,
        field: &mut dyn Field<'a>,
        watch: &mut Watch,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        for (at, (name, kind)) in field.systems().into_iter().enumerate() {
            while !self.has_room() {
                match &self.racers[..] {
                    [] => break,
                    // An anchor that has run.
                    [(_, anchor)] if !anchor.turns.is_empty() => self.end_all(),
                    _ => self.heat(watch, listen)?,
                }
            }
            let mut row = Row::new(&name, kind);
            let mut loaded = self.load(field, at, &mut row, listen);
            if loaded.as_ref().is_err_and(Error::is_out_of_memory) && !self.racers.is_empty() {
                // Alone it may fit.
                self.finish(watch, listen)?;
                row = Row::new(&name, kind);
                loaded = self.load(field, at, &mut row, listen);
            }
            match loaded {
                Ok(racer) => self.racers.push((self.rows.len(), racer)),
                Err(error) => row.fail(&error),
            }
            self.rows.push(row);
            go_on(self.host)?;
        }
        self.finish(watch, listen)
    }

    /// Runs and ends the loaded systems.
    fn finish(&mut self, watch: &mut Watch, listen: &mut dyn FnMut(Event<'_>)) -> Result<()> {
        // An anchor alone may have run before.
        if self.racers.iter().any(|(_, racer)| racer.turns.is_empty()) || self.heats == 0 {
            self.heat(watch, listen)?;
        }
        self.end_all();
        Ok(())
    }

    fn end_all(&mut self) {
        while let Some((row, racer)) = self.racers.pop() {
            self.end(row, racer);
        }
    }

    /// Whether another system like those that are loaded probably fits into memory.
    fn has_room(&self) -> bool {
        let peaks = self.racers.iter().filter_map(|(row, _)| self.rows[*row].memory.peak_bytes());
        match (peaks.max(), memory::available()) {
            (Some(most), Some(free)) => free as f64 >= most as f64 * SPARE_MEMORY,
            _ => true,
        }
    }

    /// Loads a system.
    fn load(
        &self,
        field: &mut dyn Field<'a>,
        at: usize,
        row: &mut Row,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> Result<Racer<'a>> {
        listen(Event::Start { model: self.model, precision: self.precision, system: &row.system });
        let mut contender = field.open(at, row, listen)?;
        listen(Event::Phase("first run"));
        let started = Instant::now();
        let outputs = contender.outputs(self.host)?;
        let first = started.elapsed().as_secs_f64() * 1e3;
        row.first_run_ms = Some(first);
        // Its memory decides whether another one fits beside it.
        contender.report(row)?;
        let precision = match row.precision.as_deref() {
            // 8-bit products of a baseline have the tolerance of 8-bit blocks.
            Some("int8") => Precision::Q8_0,
            Some(name) => name.parse().unwrap_or(Precision::Fp32),
            None => Precision::Fp32,
        };
        let reference = self.reference.map(|reference| (reference, field.tolerance(precision, reference)));
        judge(row, &outputs, reference)?;
        Ok(Racer::new(contender, first))
    }

    /// Runs the loaded systems in turns. Only the anchor stays loaded afterwards.
    fn heat(&mut self, watch: &mut Watch, listen: &mut dyn FnMut(Event<'_>)) -> Result<()> {
        listen(Event::Runs);
        let mut racers: Vec<&mut Racer<'_>> = self.racers.iter_mut().map(|(_, racer)| racer).collect();
        heat(&mut racers, self.heats, self.options, watch, self.host)?;
        self.heats += 1;
        let anchor = self.racers.iter().position(|(_, racer)| racer.error.is_none());
        for (at, (row, racer)) in std::mem::take(&mut self.racers).into_iter().enumerate() {
            if Some(at) == anchor {
                self.racers.push((row, racer));
            } else {
                self.end(row, racer);
            }
        }
        Ok(())
    }

    /// Fills in a system's row.
    fn end(&mut self, row: usize, mut racer: Racer<'_>) {
        let row = &mut self.rows[row];
        row.take(racer.turns);
        let done = racer.contender.report(row);
        if let Some(error) = racer.error.or(done.err()) {
            row.fail(&error);
        }
    }
}
