//! Engines with their weights: a model that an execution provider has compiled.

use crate::{
    engine::{Recipe, Target, watch},
    ep, fallback,
    ffi::{self, Assigned, EpDevice, OrtSession},
    provider::COMPATIBILITY,
    session::RunningSession,
};
use bytes::Bytes;
use ort::environment::Environment;
use sdrun_abi::{Compatibility, Engine, EngineInfo, Error, Host, Result, Session, TensorSpec, WeightSource};
use sdrun_graph::Graph;
use sdrun_provider_common::{indices::Checks, payload, phase, read_graph};
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
    environment: &'static Environment,
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
    let needed: Requirements = serde_json::from_str(compatibility).map_err(|_| {
        Error::invalid(format!("the compatibility string {compatibility:?} is not from onnxruntime"))
    })?;
    match device.filter(|device| device.provider == needed.compiled_by) {
        Some(device) => device.fit(&needed.needs),
        None => Ok(Compatibility::Unsupported(format!(
            "{} compiled it, which does not serve this device",
            needed.compiled_by
        ))),
    }
}

impl Baked {
    /// Compiles a graph with these weights.
    pub(crate) fn new(recipe: &Recipe, weights: &dyn WeightSource, host: &dyn Host) -> Result<Self> {
        let Recipe { environment, target, .. } = *recipe;
        let device = target.device.filter(|device| ep::bakes(device)).ok_or_else(|| {
            Error::unsupported("ONNX Runtime stores no weights in an engine for this device")
                .with_hint("build without baking")
        })?;
        let onnx = recipe.with_weights(weights, host, |onnx, lent, settings| {
            phase(host, "compile", 0, 1)?;
            ffi::compile(recipe.environment, onnx, lent, settings, |canceller, work| {
                watch(host, canceller, work)
            })
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
        let engine = Baked { environment, target, device, description, onnx: onnx.into() };
        engine.judge(host)?;
        Ok(engine)
    }

    pub(crate) fn load(
        environment: &'static Environment,
        payload: &[u8],
        target: Target,
        host: &dyn Host,
    ) -> Result<Self> {
        let (description, onnx): (Description, _) = payload::split(MARK, payload)?;
        let compatibility = &description.info.compatibility;
        if let Compatibility::Unsupported(why) = check(compatibility, target.device)? {
            return Err(Error::precondition(format!("the engine cannot be used here: {why}"))
                .with_hint("build it again"));
        }
        let device = target.device.ok_or_else(|| payload::damaged("it is for no device"))?;
        let needed: Requirements = serde_json::from_str(compatibility)
            .map_err(|_| payload::damaged("it does not say what it needs"))?;
        if needed.precision != target.precision.name() {
            return Err(Error::invalid(format!(
                "the engine was built for {}, but the load asks for {}",
                needed.precision, target.precision
            )));
        }
        let onnx = Bytes::copy_from_slice(onnx);
        let engine = Baked { environment, target, device, description, onnx };
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
        let outputs: Vec<TensorSpec> = info.outputs.iter().cloned().chain(checks.outputs()).collect();
        // What depends on the graph is compiled already.
        let options =
            ep::settings(self.device, &Graph::default(), self.target.precision, self.target.threads);
        let settings = self.target.settings(None, &options);
        phase(host, "create session", 0, 1)?;
        let session = OrtSession::create(
            self.environment,
            &self.onnx,
            (&info.inputs, &outputs),
            &[],
            &settings,
            |canceller, work| watch(host, canceller, work),
        );
        crate::log::deliver(host);
        phase(host, "create session", 1, 1)?;
        let place = (self.target, self.environment);
        Ok(Box::new(RunningSession::new(session?, info, checks, place, None)))
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
