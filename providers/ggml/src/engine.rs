//! The engine: a graph without weights, and its payload in an engine file.

use crate::{
    ffi::{Ggml, Target},
    session::GgmlSession,
    topology::{Topology, explain},
};
use sdrun_abi::{
    BuildSpec, Engine, EngineInfo, Error, ErrorCode, Host, LogLevel, Precision, Result, Session, WeightSource,
};
use sdrun_graph::{ExternalBase, Graph, infer::infer_shapes};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The version of the payload and of the graphs that the translator accepts. Payloads of other versions are refused.
pub(crate) const FORMAT: u32 = 1;

const MAGIC: &[u8; 8] = b"SDRGGML\0";
/// The most bytes of a payload's header.
const MAX_HEADER: usize = 1 << 16;

/// The build parameters of an engine: the JSON header of a payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    format: u32,
    precision: Precision,
    /// The bytes of the ONNX graph that follows.
    graph_bytes: u64,
}

/// The record that [`sdrun_abi::Provider::check`] compares.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CompatibilityRecord {
    pub(crate) format: u32,
    pub(crate) ggml: String,
}

/// The compatibility string of engines built with this ggml.
pub(crate) fn compatibility(ggml: &Ggml) -> Result<String> {
    let record = CompatibilityRecord { format: FORMAT, ggml: ggml.version().into() };
    serde_json::to_string(&record).map_err(|e| Error::internal(e.to_string()))
}

pub(crate) struct GgmlEngine {
    topology: Arc<Topology>,
    /// The ONNX graph as given to the build.
    model: Vec<u8>,
}

impl GgmlEngine {
    /// Reads, checks and translates a graph once, so that no session of the engine can fail on the graph.
    pub(crate) fn new(target: Target, model: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Self> {
        let (topology, host_operators) = Topology::new(target, read(model)?, spec)?;
        if !host_operators.is_empty() {
            let list: Vec<String> =
                host_operators.iter().map(|(name, count)| format!("{name} x{count}")).collect();
            let message =
                format!("evaluated by the reference implementation on one thread: {}", list.join(", "));
            host.log(LogLevel::Info, "ggml", &message);
        }
        Ok(GgmlEngine { topology: Arc::new(topology), model: model.to_vec() })
    }

    /// Reads a payload from [`Engine::serialize`].
    pub(crate) fn from_payload(
        target: Target,
        payload: &[u8],
        spec: &BuildSpec,
        host: &dyn Host,
    ) -> Result<Self> {
        let corrupt =
            |why: &str| Error::new(ErrorCode::DataLoss, format!("the ggml engine is corrupt: {why}"));
        let rest =
            payload.strip_prefix(MAGIC).ok_or_else(|| corrupt("it does not begin with its magic number"))?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or_else(|| corrupt("it ends in its header"))?;
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_HEADER || len > rest.len() {
            return Err(corrupt("its header is longer than it"));
        }
        let (header, model) = rest.split_at(len);
        let header: Header =
            serde_json::from_slice(header).map_err(|e| corrupt(&format!("its header: {e}")))?;
        if header.format != FORMAT {
            return Err(Error::precondition(format!(
                "the ggml engine has format {}, this plugin reads {FORMAT}",
                header.format
            ))
            .with_hint("build the engine again"));
        }
        if header.graph_bytes != model.len() as u64 {
            return Err(corrupt("its graph has another length than stated"));
        }
        if header.precision != spec.precision {
            return Err(Error::invalid(format!(
                "the engine was built for {}, not for {}",
                header.precision, spec.precision
            )));
        }
        Self::new(target, model, spec, host)
    }
}

impl Engine for GgmlEngine {
    fn info(&self) -> &EngineInfo {
        self.topology.info()
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let (precision, graph_bytes) = (self.topology.precision(), self.model.len() as u64);
        let header = Header { format: FORMAT, precision, graph_bytes };
        let header = serde_json::to_vec(&header).map_err(|e| Error::internal(e.to_string()))?;
        let mut payload = Vec::with_capacity(MAGIC.len() + 4 + header.len() + self.model.len());
        payload.extend_from_slice(MAGIC);
        payload.extend_from_slice(&(header.len() as u32).to_le_bytes());
        payload.extend_from_slice(&header);
        payload.extend_from_slice(&self.model);
        Ok(payload)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        Ok(Box::new(GgmlSession::new(self.topology.clone(), weights, host)?))
    }
}

/// The graph of a build, with inferred shapes.
pub(crate) fn read(model: &[u8]) -> Result<Graph> {
    let mut graph =
        Graph::from_bytes(model.to_vec().into(), "model", ExternalBase::Stripped).map_err(explain)?;
    // Metadata of exporters, such as stack traces, would be copied for every shape.
    graph.nodes.iter_mut().for_each(|node| node.metadata.clear());
    infer_shapes(&mut graph).map_err(explain)?;
    Ok(graph)
}
