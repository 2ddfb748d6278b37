//! Engines with their weights: a model that an execution provider has compiled.

use crate::{
    engine::{Recipe, Target},
    ep, fallback,
    ffi::{self, Assigned, EpDevice, OrtSession},
    provider::COMPATIBILITY,
    session::RunningSession,
};
use bytes::Bytes;
use sdrun_abi::{Compatibility, Engine, EngineInfo, Error, Host, Result, Session, WeightSource};
use sdrun_graph::Graph;
use sdrun_provider_common::{checks::Checks, demand, payload, phase, read_graph};
use serde::{Deserialize, Serialize};

/// Marks a baked engine. An ONNX file never starts with these bytes.
const MARK: &[u8; 8] = b"SDRORTE1";

/// What a compiled model does not say about its engine.
#[derive(Serialize, Deserialize)]
struct Description {
    info: EngineInfo,
    checks: Checks,
}

/// What a compiled model needs, as the text of [`EngineInfo::compatibility`].
#[derive(Serialize, Deserialize, PartialEq)]
struct Requirements {
    /// The execution provider that compiled it.
    compiled_by: String,
    /// What that one says of devices and versions.
    needs: String,
    precision: String,
}

/// An engine with its weights.
pub(crate) struct Baked {
    target: Target,
    device: &'static EpDevice,
    description: Description,
    /// A graph of nodes `EPContext`, and of nodes that are left to the CPU.
    onnx: Bytes,
}

/// Whether a payload belongs to a baked engine.
pub(crate) fn is_baked(payload: &[u8]) -> bool {
    payload.starts_with(MARK)
}

/// See [`Provider::check`](sdrun_abi::Provider::check).
pub(crate) fn check(compatibility: &str, device: Option<&EpDevice>) -> Result<Compatibility> {
    if compatibility == COMPATIBILITY {
        return Ok(Compatibility::Optimal);
    }
    Requirements::parse(compatibility)?.fit(device)
}

impl Requirements {
    fn parse(compatibility: &str) -> Result<Self> {
        serde_json::from_str(compatibility).map_err(|_| {
            Error::invalid(format!("the compatibility string {compatibility:?} is not from onnxruntime"))
        })
    }

    /// How well a device can use the model.
    fn fit(&self, device: Option<&EpDevice>) -> Result<Compatibility> {
        match device.filter(|device| device.provider == self.compiled_by) {
            Some(device) => device.fit(&self.needs),
            None => Ok(Compatibility::Unsupported(format!(
                "{} compiled it, which does not serve this device",
                self.compiled_by
            ))),
        }
    }
}

impl Baked {
    /// Compiles a graph with these weights.
    pub(crate) fn new(recipe: &Recipe, weights: &dyn WeightSource, host: &dyn Host) -> Result<Self> {
        let target = recipe.target;
        let device = target.device.filter(|device| ep::bakes(device)).ok_or_else(|| {
            Error::unsupported("ONNX Runtime stores no weights in an engine for this device")
                .with_hint("build without baking")
        })?;
        let onnx = recipe.with_weights(weights, host, |onnx, lent, settings| {
            phase(host, "compile", 0, 1)?;
            ffi::compile(target.environment, onnx, lent, settings, host)
        })?;
        phase(host, "compile", 1, 1)?;
        let provider = &device.provider;
        let needs = ffi::compatibility(&onnx, provider)?
            .ok_or_else(|| Error::unsupported(format!("{provider} compiles nothing of this model")))?;
        let needed =
            Requirements { compiled_by: provider.clone(), needs, precision: target.precision.name().into() };
        let compatibility =
            serde_json::to_string(&needed).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))?;
        let info = EngineInfo { weights: Vec::new(), compatibility, ..recipe.info.clone() };
        let description = Description { info, checks: recipe.checks.clone() };
        let engine = Baked { target, device, description, onnx: onnx.into() };
        engine.judge(host)?;
        Ok(engine)
    }

    pub(crate) fn load(payload: &[u8], target: Target, host: &dyn Host) -> Result<Self> {
        let (description, onnx): (Description, _) = payload::split(MARK, payload)?;
        let needed = Requirements::parse(&description.info.compatibility)?;
        demand(needed.fit(target.device)?)?;
        let device = target.device.ok_or_else(|| payload::damaged("it is for no device"))?;
        if needed.precision != target.precision.name() {
            return Err(Error::invalid(format!(
                "the engine was built for {}, but the load asks for {}",
                needed.precision, target.precision
            )));
        }
        let onnx = Bytes::copy_from_slice(onnx);
        let engine = Baked { target, device, description, onnx };
        engine.judge(host)?;
        Ok(engine)
    }

    /// Judges what the execution provider has left to the CPU.
    fn judge(&self, host: &dyn Host) -> Result<()> {
        let graph = read_graph(&self.onnx)?;
        let nodes = graph.nodes.iter().map(|node| Assigned {
            provider: if node.op_type == "EPContext" { self.device.provider.clone() } else { ep::CPU.into() },
            name: node.name.clone(),
            op_type: node.op_type.clone(),
        });
        fallback::check(&graph, &nodes.collect::<Vec<_>>(), &self.device.provider, self.target.fallback, host)
    }
}

impl Engine for Baked {
    fn info(&self) -> &EngineInfo {
        &self.description.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let mut payload = payload::begin(MARK, &self.description, self.onnx.len())?;
        payload.extend_from_slice(&self.onnx);
        Ok(payload)
    }

    fn session(&self, _: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let Description { info, checks } = &self.description;
        let outputs = checks.with_outputs(&info.outputs);
        // What depends on the graph is compiled already.
        let options =
            ep::settings(self.device, &Graph::default(), self.target.precision, self.target.threads);
        let settings = self.target.settings(None, &options);
        phase(host, "create session", 0, 1)?;
        let io = (&info.inputs[..], &outputs[..]);
        let session = OrtSession::create(self.target.environment, &self.onnx, io, &[], &settings, host);
        crate::log::deliver(host);
        phase(host, "create session", 1, 1)?;
        Ok(Box::new(RunningSession::new(session?, info, checks, self.target, None)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::ErrorCode;

    #[test]
    fn foreign_requirements_are_refused() {
        assert_eq!(check(COMPATIBILITY, None).unwrap(), Compatibility::Optimal);
        assert_eq!(check("{}", None).unwrap_err().code, ErrorCode::InvalidArgument);
        let needed = r#"{"compiled_by":"SomeExecutionProvider","needs":"x","precision":"fp32"}"#;
        let Compatibility::Unsupported(why) = check(needed, None).unwrap() else { panic!("usable") };
        assert!(why.contains("SomeExecutionProvider"), "{why}");
    }
}
