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
use crate::{Error, Isolation, Registry, Result, Tensors, memory, onnx_file};
use sdrun_abi::{Host, Precision, Provide, WeightSource};
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
    /// The loaded systems, each with the index of its row. The first one is the anchor, which runs in every heat.
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

/// Loading takes more memory than running, and the next system may need more than those so far.
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
                let command = system.command()?;
                let (case, options, host) = (self.case, self.options, self.host);
                let Written { folder, model, inputs } = self.written()?;
                let files = baseline::Files { model, inputs, folder: folder.path() };
                Box::new(baseline::open(row, command, case, &files, options, host, listen)?)
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
            None => self.write()?,
        };
        Ok(self.files.insert(written))
    }

    fn write(&self) -> Result<Written> {
        let scratch = self.registry.paths().scratch()?;
        let folder =
            tempfile::tempdir_in(&scratch).map_err(|e| Error::io("create a folder in", &scratch, &e))?;
        let [model, inputs] = ["model.onnx", "inputs.safetensors"].map(|name| folder.path().join(name));
        let own = self.case.model.weights();
        let weights: &dyn WeightSource = self.case.weights.map_or(&own, |stack| stack);
        onnx_file::write(self.graph, weights, &model)?;
        baseline::save(&inputs, self.inputs)?;
        Ok(Written { folder, model, inputs })
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
        let done = racer.contender.finish(row);
        if let Some(error) = racer.error.or(done.err()) {
            row.fail(&error);
        }
    }
}
