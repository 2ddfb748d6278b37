//! Engines: the graph itself.

use crate::{
    baked::Baked,
    ep, fallback,
    ffi::{EpDevice, OrtSession, Settings},
    log,
    provider::COMPATIBILITY,
    session::RunningSession,
    weights::Weights,
};
use bytes::Bytes;
use ort::environment::Environment;
use sdrun_abi::{
    Engine, EngineInfo, Host, Precision, Result, Session, TensorSpec, Weight, WeightSource, default_threads,
};
use sdrun_graph::{
    Graph, GraphError, Placement,
    infer::infer_shapes,
    passes::{convert_precision, weights_as_inputs},
};
use sdrun_provider_common::{
    checks::{self, Checks},
    describe, graph_error, phase, read_graph, unsupported,
};
use std::sync::Arc;

/// An engine: a graph without weights.
pub(crate) struct OrtEngine(Arc<Recipe>);

/// Everything needed to create a session with weights.
pub(crate) struct Recipe {
    model: Bytes,
    graph: Graph,
    pub(crate) target: Target,
    pub(crate) info: EngineInfo,
    /// What to check in each run. ONNX Runtime's CPU does that itself.
    pub(crate) checks: Checks,
}

/// Where an engine runs.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) environment: &'static Environment,
    /// Threads of the CPU, if the user named a number.
    pub(crate) threads: Option<usize>,
    /// The device of an execution provider; without one, everything runs on the CPU.
    pub(crate) device: Option<&'static EpDevice>,
    /// What the device computes in.
    pub(crate) precision: Precision,
    /// Whether the CPU may compute what the device cannot.
    pub(crate) fallback: bool,
}

impl Target {
    /// Threads of the CPU.
    fn all_threads(&self) -> usize {
        self.threads.unwrap_or_else(default_threads)
    }

    /// Settings of a session on the device.
    pub(crate) fn settings<'a>(
        &self,
        folder: Option<&'a str>,
        options: &'a [(&'static str, String)],
    ) -> Settings<'a> {
        Settings { threads: self.all_threads(), optimise: true, folder, device: self.device, options }
    }
}

impl OrtEngine {
    pub(crate) fn new(model: Bytes, target: Target) -> Result<Self> {
        let mut graph = read_graph(&model)?;
        ep::avoid_faults(target.device, &mut graph)?;
        if let Some(device) = target.device {
            infer_shapes(&mut graph).map_err(graph_error)?;
            convert_precision(&mut graph, ep::graph_type(device, target.precision));
        }
        let info = describe(&graph, COMPATIBILITY.into())?;
        let checks = match target.device {
            Some(device) => checks::prepare(&mut graph, ep::is_openvino(device))?,
            None => Checks::default(),
        };
        // ONNX Runtime infers the shapes in both branches of an If and refuses the model if that fails in one of
        // them. Without sizes, it only checks the branch that it runs.
        if !graph.contradictory_bodies().is_empty() {
            graph.forget_sizes();
        }
        // `fallback` finds nodes by name.
        for (index, node) in graph.nodes.iter_mut().enumerate().filter(|(_, node)| node.name.is_empty()) {
            node.name = format!("node {index}");
        }
        Ok(OrtEngine(Arc::new(Recipe { model, graph, target, info, checks })))
    }

    /// Creates a session with the weights as inputs and without optimisation, and drops it. So operators that ONNX
    /// Runtime lacks fail the build and not the first session, at a low cost in time and memory.
    pub(crate) fn try_without_weights(&self, host: &dyn Host) -> Result<()> {
        let recipe = &*self.0;
        phase(host, "validate", 0, 1)?;
        let mut graph = recipe.graph.clone();
        weights_as_inputs(&mut graph);
        let onnx = graph
            .to_onnx(|name, _| Err(GraphError::Invalid(format!("weight `{name}` is left"))))
            .map_err(graph_error)?;
        let settings = Settings {
            threads: recipe.target.all_threads(),
            optimise: false,
            folder: None,
            device: None,
            options: &[],
        };
        recipe.create(&onnx, (&[], &[]), &[], &settings, host).map_err(unsupported)?;
        phase(host, "validate", 1, 1)
    }
}

impl Engine for OrtEngine {
    fn info(&self) -> &EngineInfo {
        &self.0.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        Ok(self.0.model.to_vec())
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let baked = Baked::new(&self.0, weights, host);
        log::deliver(host);
        Ok(Box::new(baked?))
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let session = self.0.session(weights, host);
        log::deliver(host);
        let Recipe { info, checks, target, .. } = &*self.0;
        Ok(Box::new(RunningSession::new(session?, info, checks, *target, Some(self.0.clone()))))
    }
}

impl Recipe {
    /// Creates a session with these weights.
    pub(crate) fn session(&self, source: &dyn WeightSource, host: &dyn Host) -> Result<OrtSession> {
        let outputs = self.checks.with_outputs(&self.info.outputs);
        let session = self.with_weights(source, host, |onnx, lent, settings| {
            phase(host, "create session", 0, 1)?;
            self.create(onnx, (&self.info.inputs, &outputs), lent, settings, host)
        })?;
        if let Target { device: Some(device), fallback, .. } = self.target {
            fallback::check(&self.graph, &session.assigned()?, &device.provider, fallback, host)?;
        }
        phase(host, "create session", 1, 1)?;
        Ok(session)
    }

    /// Calls `make` with the model, the weights that are lent to it, and the settings of a session.
    pub(crate) fn with_weights<T>(
        &self,
        source: &dyn WeightSource,
        host: &dyn Host,
        make: impl FnOnce(&[u8], &[(&str, Weight<'_>)], &Settings<'_>) -> Result<T>,
    ) -> Result<T> {
        let weights = Weights::take(&self.info.weights, source, host)?;
        let onnx = self
            .graph
            .to_onnx(|name, weight| {
                let length = weight.dtype.bytes_of(&weight.shape).unwrap_or(usize::MAX) as u64;
                // ONNX Runtime replaces references to lent weights before it reads any file.
                let (location, offset) = weights.in_files.get(name).cloned().unwrap_or(("lent".into(), 0));
                Ok(Placement::External { location, offset, length })
            })
            .map_err(graph_error)?;
        let Target { threads, device, precision, .. } = self.target;
        let options = device.map(|device| ep::settings(device, &self.graph, precision, threads));
        let options = options.as_deref().unwrap_or_default();
        make(&onnx, &weights.lent, &self.target.settings(weights.folder.as_deref(), options))
    }

    fn create(
        &self,
        onnx: &[u8],
        io: (&[TensorSpec], &[TensorSpec]),
        lent: &[(&str, Weight<'_>)],
        settings: &Settings<'_>,
        host: &dyn Host,
    ) -> Result<OrtSession> {
        OrtSession::create(self.target.environment, onnx, io, lent, settings, host)
    }
}
