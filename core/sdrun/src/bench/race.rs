//! Loads the contenders of a case and lets them run in turns.

use super::{
    BenchOptions, Case, Event, Kind, Row, baseline,
    contender::Contender,
    disturbance::Watch,
    go_on,
    judge::judge,
    provider,
    rounds::{Racer, heat},
};
use crate::{Isolation, Registry, Result, Tensors, memory};
use sdrun_abi::{Host, Precision, Provide};
use sdrun_graph::Graph;
use std::{path::PathBuf, time::Instant};

/// A case while it is measured.
pub(super) struct Race<'a> {
    pub(super) registry: &'a Registry,
    pub(super) case: &'a Case<'a>,
    pub(super) graph: &'a Graph,
    pub(super) inputs: &'a Tensors,
    pub(super) reference: Option<&'a Tensors>,
    pub(super) options: &'a BenchOptions,
    pub(super) isolation: &'a Isolation,
    pub(super) host: &'a dyn Host,
    /// The model for baselines, once it is written.
    pub(super) files: Option<Written>,
    /// One for each system that has started.
    pub(super) rows: Vec<Row>,
    /// Those that are loaded, with the place of their row. The first one is the anchor, which takes part in every heat.
    pub(super) racers: Vec<(usize, Racer<'a>)>,
    /// Heats that are over.
    pub(super) heats: usize,
}

/// A model's files for baselines.
pub(super) struct Written {
    folder: tempfile::TempDir,
    model: PathBuf,
    inputs: PathBuf,
}

/// A system needs more memory while it loads than when it runs, and each needs another amount.
const SPARE_MEMORY: f64 = 1.5;

impl<'a> Race<'a> {
    /// Loads one system after the other, and runs those that fit into memory together.
    pub(super) fn run(
        &mut self,
        providers: &[&Provide],
        watch: &mut Watch,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        let baselines = &self.options.baselines;
        let systems = providers.iter().map(|provide| (&*provide.id, None));
        for (name, baseline) in systems.chain(baselines.iter().map(|b| (&*b.name, Some(b)))) {
            if !self.has_room() && self.racers.len() > 1 {
                self.heat(watch, listen)?;
            }
            listen(Event::Start {
                model: self.case.model.name(),
                precision: self.case.precision,
                system: name,
            });
            let kind = if baseline.is_some() { Kind::Baseline } else { Kind::Provider };
            let mut row = Row::new(name, kind);
            match self.load(&mut row, baseline, listen) {
                Ok(racer) => self.racers.push((self.rows.len(), racer)),
                Err(error) => row.fail(&error),
            }
            self.rows.push(row);
            go_on(self.host)?;
        }
        // An anchor alone has run before.
        if self.racers.len() > 1 || self.heats == 0 {
            self.heat(watch, listen)?;
        }
        while let Some((row, racer)) = self.racers.pop() {
            self.end(row, racer);
        }
        Ok(())
    }

    /// Whether another system like those that are loaded probably fits into memory.
    fn has_room(&self) -> bool {
        let peaks = self.racers.iter().filter_map(|(row, _)| self.rows[*row].memory.peak_bytes());
        match (peaks.max(), memory::available()) {
            (Some(most), Some(free)) => free as f64 >= most as f64 * SPARE_MEMORY,
            _ => true,
        }
    }

    fn load(
        &mut self,
        row: &mut Row,
        baseline: Option<&super::Baseline>,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> Result<Racer<'a>> {
        let mut contender: Box<dyn Contender + 'a> = match baseline {
            None => Box::new(provider::open(
                row,
                self.registry,
                self.case,
                self.inputs,
                self.options,
                self.isolation,
                self.host,
                listen,
            )?),
            Some(system) => {
                let (case, options, host) = (self.case, self.options, self.host);
                let written = match system.command {
                    Ok(_) => Some(self.written()?),
                    Err(_) => None,
                };
                let files = written.map(|written| baseline::Files {
                    model: &written.model,
                    inputs: &written.inputs,
                    folder: written.folder.path(),
                });
                Box::new(baseline::open(row, system, case, files.as_ref(), options, host, listen)?)
            }
        };
        listen(Event::Phase("first run"));
        let started = Instant::now();
        let outputs = contender.outputs(self.host)?;
        let first = started.elapsed().as_secs_f64() * 1e3;
        row.first_run_ms = Some(first);
        let precision = match row.precision.as_deref() {
            // 8-bit products of a baseline have the tolerance of 8-bit blocks.
            Some("int8") => Precision::Q8_0,
            Some(name) => name.parse().unwrap_or(Precision::Fp32),
            None => Precision::Fp32,
        };
        judge(row, precision, self.graph.quantizes(), &outputs, self.reference)?;
        Ok(Racer::new(contender, first))
    }

    /// The model's files, written once for a case.
    fn written(&mut self) -> Result<&Written> {
        let written = match self.files.take() {
            Some(written) => written,
            None => {
                let scratch = self.registry.paths().scratch()?;
                let folder = tempfile::tempdir_in(&scratch)
                    .map_err(|e| crate::Error::io("create a folder in", &scratch, &e))?;
                let (model, inputs) =
                    (folder.path().join("model.onnx"), folder.path().join("inputs.safetensors"));
                let own = self.case.model.weights();
                match self.case.weights {
                    Some(stack) => crate::onnx_file::write(self.graph, stack, &model)?,
                    None => crate::onnx_file::write(self.graph, &own, &model)?,
                }
                baseline::save(&inputs, self.inputs)?;
                Written { folder, model, inputs }
            }
        };
        Ok(self.files.insert(written))
    }

    /// Runs what is loaded in turns. Then only the anchor stays.
    fn heat(&mut self, watch: &mut Watch, listen: &mut dyn FnMut(Event<'_>)) -> Result<()> {
        listen(Event::Runs);
        let mut racers: Vec<&mut Racer<'_>> = self.racers.iter_mut().map(|(_, racer)| racer).collect();
        heat(&mut racers, self.heats, self.options, watch, self.host)?;
        self.heats += 1;
        let anchor = self.racers.iter().position(|(_, racer)| racer.error.is_none()).unwrap_or(0);
        for (at, (row, racer)) in std::mem::take(&mut self.racers).into_iter().enumerate() {
            if at == anchor && racer.error.is_none() {
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
        let done = racer.contender.finish(row);
        if let Some(error) = racer.error.or(done.err()) {
            row.fail(&error);
        }
    }
}
