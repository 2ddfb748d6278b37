//! A model as a case: providers and baselines that run it.

use super::{
    BenchOptions, Case, Event, Kind, Row,
    baseline::{self, Task, What},
    contender::{Contender, Field},
    provider,
};
use crate::{Isolation, Registry, Result, Tensors, onnx_file, verify::Tolerance};
use sdrun_abi::{Host, Precision, Provide, WeightSource};
use sdrun_graph::Graph;
use std::path::PathBuf;

pub(super) struct Systems<'a> {
    pub(super) registry: &'a Registry,
    pub(super) providers: &'a [&'a Provide],
    pub(super) case: &'a Case<'a>,
    pub(super) graph: &'a Graph,
    pub(super) inputs: &'a Tensors,
    pub(super) options: &'a BenchOptions,
    pub(super) isolation: &'a Isolation,
    pub(super) host: &'a dyn Host,
    /// The model for baselines, once it is written.
    pub(super) files: Option<Written>,
}

/// A model's files for baselines.
pub(super) struct Written {
    folder: crate::OwnedFolder,
    model: PathBuf,
    inputs: PathBuf,
}

impl<'a> Field<'a> for Systems<'a> {
    fn systems(&self) -> Vec<(String, Kind)> {
        let providers = self.providers.iter().map(|provide| (provide.id.clone(), Kind::Provider));
        let baselines = self.options.baselines.iter().map(|baseline| (baseline.name.clone(), Kind::Baseline));
        providers.chain(baselines).collect()
    }

    fn open(
        &mut self,
        at: usize,
        row: &mut Row,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> Result<Box<dyn Contender + 'a>> {
        let (registry, case, inputs, options) = (self.registry, self.case, self.inputs, self.options);
        let Some(baseline) = at.checked_sub(self.providers.len()).map(|at| &options.baselines[at]) else {
            let opened =
                provider::open(row, registry, case, inputs, options, self.isolation, self.host, listen)?;
            return Ok(Box::new(opened));
        };
        // Writing the model may take long.
        baseline.command()?;
        let host = self.host;
        let Written { folder, model, inputs } = self.written()?;
        let task = Task {
            model,
            name: case.model.builtin().map(|builtin| builtin.name),
            precision: case.precision,
            what: What::Network(inputs),
            folder: folder.path(),
        };
        baseline.open(row, &task, options, host, listen)
    }

    fn tolerance(&self, precision: Precision, reference: &Tensors) -> Tolerance {
        let tolerance = Tolerance::for_outputs(precision, reference);
        if self.graph.quantizes() { tolerance.quantized() } else { tolerance }
    }
}

impl Systems<'_> {
    /// The model's files, written once for a case.
    fn written(&mut self) -> Result<&Written> {
        let written = match self.files.take() {
            Some(written) => written,
            None => self.write()?,
        };
        Ok(self.files.insert(written))
    }

    fn write(&self) -> Result<Written> {
        let folder = self.registry.paths().temporary()?;
        let [model, inputs] = ["model.onnx", "inputs.safetensors"].map(|name| folder.path().join(name));
        let own = self.case.model.weights();
        let weights: &dyn WeightSource = self.case.weights.map_or(&own, |stack| stack);
        onnx_file::write(self.graph, weights, &model)?;
        baseline::save(&inputs, self.inputs)?;
        Ok(Written { folder, model, inputs })
    }
}
