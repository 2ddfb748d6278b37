//! Engines: the graph itself, or OpenVINO's blob.

use crate::{
    devices::Target,
    ffi::{CompiledModel, Model},
    refit::Refittable,
    runtime::Runtime,
    session::OvSession,
    staging::Staging,
};
use bytes::Bytes;
use sdrun_abi::{BuildSpec, Compatibility, Engine, EngineInfo, Error, Host, Result, Session, WeightSource};
use sdrun_graph::{Graph, GraphError, passes::weights_as_inputs};
use sdrun_provider_common::{
    checks::{self, Checks},
    demand, describe, graph_error,
    openvino::avoid_faults,
    payload, phase, read_graph,
};
use serde::{Deserialize, Serialize};
use std::{io::Read, sync::Arc};

/// An engine's requirements on the runtime, stored as the text of [`EngineInfo::compatibility`].
#[derive(Serialize, Deserialize, PartialEq, Debug)]
#[serde(tag = "payload", rename_all = "snake_case")]
enum Requirements {
    /// The graph as ONNX. Every OpenVINO that this plugin accepts can read it.
    Onnx,
    /// A blob. Needs exactly the build of OpenVINO that wrote it, and a device of the same class.
    Blob { openvino: String, class: String, precision: String },
}

impl Requirements {
    fn blob(runtime: &Runtime, target: &Target, spec: &BuildSpec) -> Self {
        Requirements::Blob {
            openvino: runtime.version.clone(),
            class: target.device.class.clone(),
            precision: spec.precision.name().into(),
        }
    }

    fn text(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))
    }
}

/// See [`Provider::check`](sdrun_abi::Provider::check).
pub(crate) fn check(compatibility: &str, runtime: &Runtime, target: &Target) -> Result<Compatibility> {
    let requirements: Requirements = serde_json::from_str(compatibility).map_err(|e| {
        Error::invalid(format!("the compatibility string {compatibility:?} is not from openvino: {e}"))
    })?;
    Ok(match requirements {
        Requirements::Onnx => Compatibility::Optimal,
        Requirements::Blob { openvino, .. } if openvino != runtime.version => {
            Compatibility::Unsupported(format!("built with OpenVINO {openvino}, found {}", runtime.version))
        }
        Requirements::Blob { class, .. } if class != target.device.class => Compatibility::Unsupported(
            format!("built for `{class}`, this device is `{}`", target.device.class),
        ),
        Requirements::Blob { .. } => Compatibility::Optimal,
    })
}

/// An engine without weights: the graph, recompiled for each set of weights.
pub(crate) struct Stripped(Arc<Recipe>);

/// Everything needed to compile a graph with weights.
pub(crate) struct Recipe {
    runtime: &'static Runtime,
    model: Bytes,
    graph: Graph,
    spec: BuildSpec,
    target: Target,
    pub(crate) info: EngineInfo,
    /// What to check in each run.
    pub(crate) checks: Checks,
}

impl Recipe {
    /// Creates the recipe for an engine whose payload is the graph.
    pub(crate) fn of_graph(
        runtime: &'static Runtime,
        model: Bytes,
        spec: &BuildSpec,
        target: Target,
    ) -> Result<Self> {
        let mut graph = read_graph(&model)?;
        avoid_faults(&mut graph)?;
        let info = describe(&graph, Requirements::Onnx.text()?)?;
        let checks = checks::prepare(&mut graph, true)?;
        Ok(Recipe { runtime, model, graph, spec: spec.clone(), target, info, checks })
    }

    /// The payload of the engine: the graph.
    pub(crate) fn payload(&self) -> Vec<u8> {
        self.model.to_vec()
    }

    /// Reads and compiles the graph with weights as additional inputs, after the graph's own inputs.
    pub(crate) fn compile_with_weights_as_inputs(&self, host: &dyn Host) -> Result<CompiledModel> {
        phase(host, "read", 0, 1)?;
        let mut graph = self.graph.clone();
        weights_as_inputs(&mut graph);
        let onnx = graph
            .to_onnx(|name, _| Err(GraphError::Invalid(format!("`{name}` is still a weight"))))
            .map_err(graph_error)?;
        let model = self.runtime.core.read_bytes(&onnx)?;
        phase(host, "compile", 0, 1)?;
        let compiled = self.runtime.compile(&model, &self.target, &self.spec, Some(0))?;
        phase(host, "compile", 1, 1)?;
        Ok(compiled)
    }

    /// Reads the graph with its weights.
    pub(crate) fn read_with(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Model> {
        let Runtime { temp_dir, links_dir, .. } = self.runtime;
        let folders = (&**temp_dir, links_dir.as_deref());
        let staging = Staging::with_weights(folders, &self.graph, &self.info.weights, weights, host)?;
        phase(host, "read", 0, 1)?;
        // OpenVINO has mapped the files, so the folder is removed before the long compilation.
        self.read(&staging)
    }

    /// Compiles a model from [`Recipe::read_with`]. `keep` says whether to store it in the cache: yes for the weights
    /// that a session starts with, no for weights that are tried one after another.
    pub(crate) fn compile(&self, model: &Model, keep: bool, host: &dyn Host) -> Result<Arc<CompiledModel>> {
        phase(host, "compile", 0, 1)?;
        let bytes = || self.info.weights.iter().filter_map(|w| w.dtype.bytes_of(&w.shape)).sum::<usize>();
        let cached = keep.then(|| bytes() as u64);
        let compiled = self.runtime.compile(model, &self.target, &self.spec, cached)?;
        phase(host, "compile", 1, 1)?;
        Ok(Arc::new(compiled))
    }

    fn read(&self, staging: &Staging) -> Result<Model> {
        let model = self.runtime.core.read(&staging.model())?;
        let (inputs, outputs) = (self.info.inputs.len(), self.graph.outputs.len());
        let counts = model.io_counts()?;
        // OpenVINO drops unused inputs.
        if counts.0 > inputs || counts.1 != outputs {
            return Err(Error::internal(format!(
                "OpenVINO reads {} inputs and {} outputs, but the model has {inputs} and {outputs}",
                counts.0, counts.1
            )));
        }
        Ok(model)
    }
}

impl Stripped {
    /// Also reads the graph with placeholder weights. So operators that OpenVINO lacks fail the build, not the first
    /// session.
    pub(crate) fn build(
        runtime: &'static Runtime,
        model: Bytes,
        spec: &BuildSpec,
        target: Target,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let recipe = Recipe::of_graph(runtime, model, spec, target)?;
        phase(host, "read", 0, 1)?;
        let staging = Staging::with_placeholders(&runtime.temp_dir, &recipe.graph, &recipe.info.weights)?;
        recipe.read(&staging)?;
        phase(host, "read", 1, 1)?;
        Ok(Box::new(Stripped(Arc::new(recipe))))
    }

    pub(crate) fn load(
        runtime: &'static Runtime,
        payload: Bytes,
        spec: &BuildSpec,
        target: Target,
    ) -> Result<Box<dyn Engine>> {
        let recipe = Recipe::of_graph(runtime, payload, spec, target)?;
        Ok(Box::new(Stripped(Arc::new(recipe))))
    }
}

impl Engine for Stripped {
    fn info(&self) -> &EngineInfo {
        &self.0.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        Ok(self.0.payload())
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        Baked::of(&self.0, weights, host)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        Ok(Box::new(Refittable::new(self.0.clone(), weights, host)?))
    }
}

/// An engine with its weights: a compiled model as OpenVINO's blob.
pub(crate) struct Baked {
    runtime: &'static Runtime,
    compiled: Arc<CompiledModel>,
    described: Described,
}

/// What a blob does not say about its engine.
#[derive(Debug, Serialize, Deserialize)]
struct Described {
    info: EngineInfo,
    checks: Checks,
}

/// Marks a baked engine. An ONNX file never starts with these bytes.
const MARK: &[u8; 8] = b"SDROVIN1";

/// Whether a payload belongs to a baked engine.
pub(crate) fn is_baked(payload: &[u8]) -> bool {
    payload.starts_with(MARK)
}

impl Baked {
    pub(crate) fn build(
        runtime: &'static Runtime,
        model: Bytes,
        spec: &BuildSpec,
        target: Target,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        Self::of(&Recipe::of_graph(runtime, model, spec, target)?, weights, host)
    }

    fn of(recipe: &Recipe, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        recipe.target.check_bake()?;
        let compiled = recipe.compile(&recipe.read_with(weights, host)?, false, host)?;
        let compatibility = Requirements::blob(recipe.runtime, &recipe.target, &recipe.spec).text()?;
        let info = EngineInfo { weights: Vec::new(), compatibility, ..recipe.info.clone() };
        let described = Described { info, checks: recipe.checks.clone() };
        Ok(Box::new(Baked { runtime: recipe.runtime, compiled, described }))
    }

    pub(crate) fn load(
        runtime: &'static Runtime,
        payload: &[u8],
        spec: &BuildSpec,
        target: Target,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let (described, blob): (Described, _) = payload::split(MARK, payload)?;
        let info = &described.info;
        demand(check(&info.compatibility, runtime, &target)?)?;
        let wanted = Requirements::blob(runtime, &target, spec).text()?;
        if info.compatibility != wanted {
            return Err(Error::invalid(format!(
                "the engine was built for {}, but the load asks for {wanted}",
                info.compatibility
            )));
        }
        phase(host, "import", 0, 1)?;
        let compiled = Arc::new(runtime.import(blob, &target, spec)?);
        Ok(Box::new(Baked { runtime, compiled, described }))
    }
}

impl Engine for Baked {
    fn info(&self) -> &EngineInfo {
        &self.described.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let staging = Staging::new(&self.runtime.temp_dir)?;
        // The C API can only export to files.
        let file = staging.file("model.blob");
        self.compiled.export(&file)?;
        let io = |e: std::io::Error| Error::io("read", &file, &e);
        let mut blob = std::fs::File::open(&file).map_err(io)?;
        let length = blob.metadata().map_err(io)?.len() as usize;
        let mut payload = payload::begin(MARK, &self.described, length)?;
        blob.read_to_end(&mut payload).map_err(io)?;
        Ok(payload)
    }

    fn session(&self, _: &dyn WeightSource, _: &dyn Host) -> Result<Box<dyn Session>> {
        let Described { info, checks } = &self.described;
        Ok(Box::new(OvSession::new(&self.compiled, info, checks.clone())?))
    }
}
