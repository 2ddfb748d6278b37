//! The engine: a graph without weights, and the file it is kept in.

use crate::{
    ffi::Ggml, optimize::optimize, session::GgmlSession, storage::storage_type, translate::translate,
};
use sdrun_abi::{
    BuildSpec, Engine, EngineInfo, Error, ErrorCode, Host, LogLevel, Precision, Result, Session, TensorSpec,
    WeightSource, WeightSpec,
};
use sdrun_graph::{ExternalBase, Graph, GraphError, ValueId, infer::infer_shapes};
use serde::{Deserialize, Serialize};

/// Version of the payload and of what the translator takes. A payload of another version is not read.
pub(crate) const FORMAT: u32 = 1;

const MAGIC: &[u8; 8] = b"SDRGGML\0";
/// Most bytes of a payload's header.
const MAX_HEADER: usize = 1 << 16;

/// `GGML_MAX_N_THREADS`.
const MAX_THREADS: usize = 512;

/// What an engine was built for; the JSON header of a payload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    format: u32,
    precision: Precision,
    /// Bytes of the ONNX graph that follows.
    graph_bytes: u64,
}

/// What [`sdrun_abi::Provider::check`] compares.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CompatibilityRecord {
    pub(crate) format: u32,
    pub(crate) ggml: String,
}

pub(crate) struct GgmlEngine {
    ggml: &'static Ggml,
    graph: Graph,
    /// The ONNX graph as it was given.
    model: Vec<u8>,
    precision: Precision,
    /// `None`: all cores, where the graph is worth them.
    threads: Option<usize>,
    info: EngineInfo,
}

impl GgmlEngine {
    /// Reads, checks and translates a graph once, so that a session of the engine cannot fail on the graph.
    pub(crate) fn new(ggml: &'static Ggml, model: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Self> {
        let graph = read(model)?;
        let translation = translate(&graph, spec.precision, ggml)?;
        if !translation.host_operators.is_empty() {
            let list: Vec<String> =
                translation.host_operators.iter().map(|(name, count)| format!("{name} x{count}")).collect();
            let message =
                format!("evaluated by the reference implementation on one thread: {}", list.join(", "));
            host.log(LogLevel::Info, "ggml", &message);
        }
        let compatibility = CompatibilityRecord { format: FORMAT, ggml: ggml.version().into() };
        let info = EngineInfo {
            inputs: tensor_specs(&graph, &graph.inputs)?,
            outputs: tensor_specs(&graph, &graph.outputs)?,
            weights: graph
                .weights()
                .map(|(name, w)| WeightSpec { name: name.into(), dtype: w.dtype, shape: w.shape.clone() })
                .collect(),
            compatibility: serde_json::to_string(&compatibility)
                .map_err(|e| Error::internal(e.to_string()))?,
        };
        if let Some(threads) = spec.threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            return Err(Error::invalid(format!("{threads} threads: ggml runs with 1 to {MAX_THREADS}")));
        }
        let (precision, threads) = (spec.precision, spec.threads);
        Ok(GgmlEngine { ggml, graph, model: model.to_vec(), precision, threads, info })
    }

    /// Reads what [`Engine::serialize`] wrote.
    pub(crate) fn from_payload(
        ggml: &'static Ggml,
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
        Self::new(ggml, model, spec, host)
    }
}

impl Engine for GgmlEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let header =
            Header { format: FORMAT, precision: self.precision, graph_bytes: self.model.len() as u64 };
        let header = serde_json::to_vec(&header).map_err(|e| Error::internal(e.to_string()))?;
        let mut payload = Vec::with_capacity(MAGIC.len() + 4 + header.len() + self.model.len());
        payload.extend_from_slice(MAGIC);
        payload.extend_from_slice(&(header.len() as u32).to_le_bytes());
        payload.extend_from_slice(&header);
        payload.extend_from_slice(&self.model);
        Ok(payload)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let translation = translate(&self.graph, self.precision, self.ggml)?;
        let threads =
            self.threads.unwrap_or_else(|| if translation.builder.is_worth_threads() { cores() } else { 1 });
        Ok(Box::new(GgmlSession::new(translation, &self.info, threads, weights, host)?))
    }
}

/// Cores this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS))
}

fn read(model: &[u8]) -> Result<Graph> {
    let explain = |error: GraphError| match error {
        GraphError::Unsupported { .. } | GraphError::UnsupportedModel { .. } => {
            Error::unsupported(error.to_string())
        }
        _ => Error::invalid(error.to_string()),
    };
    let mut graph =
        Graph::from_bytes(model.to_vec().into(), "model", ExternalBase::Stripped).map_err(explain)?;
    infer_shapes(&mut graph).map_err(explain)?;
    optimize(&mut graph).map_err(explain)?;
    Ok(graph)
}

fn tensor_specs(graph: &Graph, ids: &[ValueId]) -> Result<Vec<TensorSpec>> {
    ids.iter()
        .map(|id| {
            let value = graph.value(*id);
            let dtype = value.dtype.filter(|dtype| storage_type(*dtype).is_some());
            match (dtype, value.known_shape()) {
                (Some(dtype), Some(shape)) => Ok(TensorSpec {
                    name: value.name.clone(),
                    dtype,
                    shape: shape.into_iter().map(Some).collect(),
                }),
                _ => Err(Error::invalid(format!("the type or shape of {:?} is not known", value.name))),
            }
        })
        .collect()
}
