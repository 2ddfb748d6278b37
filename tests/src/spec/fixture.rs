//! A small model whose results are computed here: `t = x·w + b + r`, `y = max(t, 0)`, and `c`, a copy of the input `r`.
//!
//! All numbers are multiples of 1/8 below 1. So products and sums are exact in every precision that a provider can offer, and
//! results must be equal.

use prost::Message;
use sdrun::{Model, Shapes, graph::proto, weights::Cast};
use sdrun_abi::{
    AlignedBuffer, DType, Engine, Error, Flow, Host, LogLevel, OutputSink, OutputSpec, Result as AbiResult,
    Session, TensorView, Weight, WeightSource,
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

const ROWS: usize = 2;
const INNER: usize = 4;
const COLUMNS: usize = 3;

/// The model as passed to a provider, and its inputs.
pub(super) struct Fixture {
    /// ONNX bytes. The weights `w` and `b` are external, under their own names.
    pub(super) bytes: Vec<u8>,
    /// The `.onnx` file, for checks that go through the library.
    pub(super) path: PathBuf,
    x: AlignedBuffer,
    r: AlignedBuffer,
}

/// Names and shapes that the engine information must report.
pub(super) const INPUTS: [(&str, [usize; 2]); 2] = [("x", [ROWS, INNER]), ("r", [ROWS, COLUMNS])];
pub(super) const OUTPUTS: [(&str, [usize; 2]); 3] =
    [("y", [ROWS, COLUMNS]), ("t", [ROWS, COLUMNS]), ("c", [ROWS, COLUMNS])];
pub(super) const WEIGHTS: [(&str, &[usize]); 2] = [("w", &[INNER, COLUMNS]), ("b", &[COLUMNS])];

impl Fixture {
    /// Writes the model into `dir` and prepares it.
    pub(super) fn new(dir: &Path) -> Result<Self, String> {
        let path = dir.join("fixture.onnx");
        let bytes = prepare(&model(), &path)?;
        let x = bytes_of(&values(100, ROWS * INNER));
        let r = bytes_of(&values(200, ROWS * COLUMNS));
        let aligned = |bytes: &[u8]| AlignedBuffer::copy_of(bytes).map_err(|e| e.to_string());
        Ok(Fixture { bytes, path, x: aligned(&x)?, r: aligned(&r)? })
    }

    /// One of several sets of weights, chosen by `set`.
    pub(super) fn weights(&self, set: usize) -> Weights {
        let tensors = WEIGHTS.map(|(name, shape)| {
            let values =
                values(set * 10 + name.len() + usize::from(name.as_bytes()[0]), shape.iter().product());
            (name.to_string(), (shape.to_vec(), bytes_of(&values)))
        });
        Weights { tensors: BTreeMap::from(tensors), broken: Vec::new(), folder: None }
    }

    /// The expected outputs for a set of weights.
    pub(super) fn expected(&self, weights: &Weights) -> [Vec<f32>; 3] {
        let (w, b) = (weights.floats("w"), weights.floats("b"));
        let (x, r) = (floats(&self.x), floats(&self.r));
        let mut t = Vec::new();
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                let product: f32 = (0..INNER).map(|k| x[row * INNER + k] * w[k * COLUMNS + column]).sum();
                t.push(product + b[column] + r[row * COLUMNS + column]);
            }
        }
        [t.iter().map(|v| v.max(0.0)).collect(), t, r]
    }

    /// Inputs in the order of the graph.
    pub(super) fn inputs(&self) -> [TensorView<'_>; 2] {
        [
            TensorView { dtype: DType::F32, shape: &INPUTS[0].1, data: &self.x },
            TensorView { dtype: DType::F32, shape: &INPUTS[1].1, data: &self.r },
        ]
    }

    /// Runs a session. The buffers start as NaN, so an unfilled one shows.
    pub(super) fn run(&self, session: &mut dyn Session, host: &dyn Host) -> AbiResult<Vec<Vec<f32>>> {
        let mut sink = NanSink::default();
        session.run(&self.inputs(), &mut sink, host)?;
        Ok(sink.buffers.iter().map(|b| floats(b)).collect())
    }

    /// Creates a session with `weights`, runs it and compares.
    pub(super) fn check(&self, engine: &dyn Engine, weights: &Weights) -> Result<(), String> {
        // Cast as the library does: an engine in another precision may want other types.
        let source = Cast::new(weights, &engine.info().weights);
        let mut session = engine.session(&source, &sdrun_abi::NoHost).map_err(|e| format!("session: {e}"))?;
        self.check_session(session.as_mut(), weights)
    }

    /// Runs a session that holds `weights` and compares.
    pub(super) fn check_session(&self, session: &mut dyn Session, weights: &Weights) -> Result<(), String> {
        let got = self.run(session, &sdrun_abi::NoHost).map_err(|e| format!("run: {e}"))?;
        let want = self.expected(weights);
        if got == want { Ok(()) } else { Err(format!("the outputs are {got:?}; they should be {want:?}")) }
    }
}

/// Writes a model and lets the library bind and strip it, as it does for every provider.
pub(super) fn prepare(model: &proto::ModelProto, path: &Path) -> Result<Vec<u8>, String> {
    fs::write(path, model.encode_to_vec()).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    Model::open(path)
        .and_then(|model| model.bound(&Shapes::new()))
        .and_then(|graph| Ok(graph.to_onnx_stripped()?))
        .map_err(|e| format!("the library cannot prepare {}: {e}", path.display()))
}

/// Collects outputs in buffers that start as NaN.
#[derive(Default)]
pub(super) struct NanSink {
    pub(super) buffers: Vec<AlignedBuffer>,
}

impl OutputSink for NanSink {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> AbiResult<Vec<&mut [u8]>> {
        for spec in outputs {
            let bytes = spec.dtype.bytes_of(&spec.shape).ok_or_else(|| Error::invalid("too large"))?;
            let mut buffer = AlignedBuffer::new(bytes)?;
            buffer.fill(0xff);
            self.buffers.push(buffer);
        }
        Ok(self.buffers.iter_mut().map(|b| &mut **b).collect())
    }
}

/// Weights in memory or in a file. One of them can be set to fail.
pub(super) struct Weights {
    tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
    broken: Vec<&'static str>,
    folder: Option<PathBuf>,
}

impl Weights {
    /// The same weights without `name`.
    pub(super) fn without(mut self, name: &'static str) -> Self {
        self.broken.push(name);
        self
    }

    /// Takes the weight `name` from another set.
    pub(super) fn take(&mut self, name: &str, other: &Weights) {
        if let Some(tensor) = other.tensors.get(name) {
            self.tensors.insert(name.to_string(), tensor.clone());
        }
    }

    /// The same weights, also as files in `folder`.
    pub(super) fn in_files(mut self, folder: &Path) -> Result<Self, String> {
        for (name, (_, bytes)) in &self.tensors {
            // After some other bytes, as in any real weight file.
            let content = [vec![0xff; 4096], bytes.clone()].concat();
            fs::write(folder.join(name), content).map_err(|e| format!("cannot write weights: {e}"))?;
        }
        self.folder = Some(folder.to_path_buf());
        Ok(self)
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.tensors.get(name).map(|(_, bytes)| floats(bytes)).unwrap_or_default()
    }
}

impl WeightSource for Weights {
    fn get(&self, name: &str) -> AbiResult<Weight<'_>> {
        let found = self.tensors.get(name).filter(|_| !self.broken.contains(&name));
        let (shape, bytes) = found.ok_or_else(|| Error::not_found(format!("there is no weight {name:?}")))?;
        let weight = Weight::new(DType::F32, shape.clone(), &bytes[..])?;
        Ok(match &self.folder {
            Some(folder) => weight.in_file(folder.join(name), 4096),
            None => weight,
        })
    }
}

/// A host that cancels from the start, and counts how often the provider was told.
#[derive(Default)]
pub(super) struct Canceller {
    /// Number of times in response to a progress report.
    pub(super) told: AtomicUsize,
    /// Number of times in response to a poll.
    pub(super) polled: AtomicUsize,
}

impl Host for Canceller {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        self.told.fetch_add(1, Relaxed);
        Flow::Cancel
    }
    fn cancelled(&self) -> bool {
        self.polled.fetch_add(1, Relaxed);
        true
    }
}

/// Multiples of 1/8 between -7/8 and 7/8, in a different sequence for every seed.
fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + seed * 5 + i * i) % 15) as f32 / 8.0 - 0.875).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// The model.
pub(super) fn model() -> proto::ModelProto {
    let node = |op: &str, inputs: &[&str], output: &str| proto::NodeProto {
        op_type: Some(op.into()),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: vec![output.into()],
        ..Default::default()
    };
    let initializer = |(name, shape): (&str, &[usize])| proto::TensorProto {
        name: Some(name.into()),
        data_type: Some(DType::F32 as i32),
        dims: shape.iter().map(|d| *d as i64).collect(),
        raw_data: Some(bytes_of(&values(0, shape.iter().product())).into()),
        ..Default::default()
    };
    wrap(proto::GraphProto {
        name: Some("fixture".into()),
        node: vec![
            node("MatMul", &["x", "w"], "product"),
            node("Add", &["product", "b"], "biased"),
            node("Add", &["biased", "r"], "t"),
            node("Relu", &["t"], "y"),
            node("Identity", &["r"], "c"),
        ],
        initializer: WEIGHTS.into_iter().map(initializer).collect(),
        input: INPUTS.iter().map(|(name, shape)| tensor(name, shape)).collect(),
        output: OUTPUTS.iter().map(|(name, shape)| tensor(name, shape)).collect(),
        ..Default::default()
    })
}

/// Side of the matrices of [`slow`].
pub(super) const SLOW: usize = 1024;

/// A model that takes seconds on one thread: `x` multiplied by the weight `w` a hundred times. If `w` is the identity, the output
/// equals the input.
pub(super) fn slow() -> proto::ModelProto {
    let name = |i: usize| match i {
        0 => "x".to_string(),
        100 => "y".to_string(),
        _ => format!("x{i}"),
    };
    let node = |i: usize| proto::NodeProto {
        op_type: Some("MatMul".into()),
        input: vec![name(i), "w".into()],
        output: vec![name(i + 1)],
        ..Default::default()
    };
    let w = proto::TensorProto {
        name: Some("w".into()),
        data_type: Some(DType::F32 as i32),
        dims: vec![SLOW as i64; 2],
        raw_data: Some(identity().into()),
        ..Default::default()
    };
    wrap(proto::GraphProto {
        name: Some("slow".into()),
        node: (0..100).map(node).collect(),
        initializer: vec![w],
        input: vec![tensor("x", &[SLOW, SLOW])],
        output: vec![tensor("y", &[SLOW, SLOW])],
        ..Default::default()
    })
}

/// The identity matrix of [`slow`].
pub(super) fn identity() -> Vec<u8> {
    bytes_of(&(0..SLOW * SLOW).map(|i| if i % (SLOW + 1) == 0 { 1.0 } else { 0.0 }).collect::<Vec<f32>>())
}

/// A valid model with one operator that no runtime knows.
pub(super) fn unknown_operator() -> Vec<u8> {
    chain(&[("NoSuchOperator", "culprit")])
}

/// Like [`unknown_operator`], followed by a known operator and another unknown one.
pub(super) fn unknown_operators() -> Vec<u8> {
    chain(&[("NoSuchOperator", "culprit"), ("Relu", "innocent"), ("NoOtherOperator", "accomplice")])
}

/// A model with a chain of nodes (operator, name) from `x` to `y`.
fn chain(nodes: &[(&str, &str)]) -> Vec<u8> {
    let value = |i: usize| match i {
        0 => "x".to_string(),
        i if i == nodes.len() => "y".to_string(),
        i => format!("x{i}"),
    };
    let node = |(i, (op, name)): (usize, &(&str, &str))| proto::NodeProto {
        op_type: Some(op.to_string()),
        name: Some(name.to_string()),
        input: vec![value(i)],
        output: vec![value(i + 1)],
        ..Default::default()
    };
    let graph = proto::GraphProto {
        name: Some("unknown".into()),
        node: nodes.iter().enumerate().map(node).collect(),
        input: vec![tensor("x", &[2])],
        output: vec![tensor("y", &[2])],
        ..Default::default()
    };
    wrap(graph).encode_to_vec()
}

fn wrap(graph: proto::GraphProto) -> proto::ModelProto {
    proto::ModelProto {
        ir_version: Some(8),
        opset_import: vec![proto::OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(graph),
        ..Default::default()
    }
}

fn tensor(name: &str, shape: &[usize]) -> proto::ValueInfoProto {
    let dim = shape.iter().map(|d| proto::Dimension { dim_value: Some(*d as i64), ..Default::default() });
    let tensor = proto::TensorTypeProto {
        elem_type: Some(DType::F32 as i32),
        shape: Some(proto::TensorShapeProto { dim: dim.collect() }),
    };
    proto::ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(proto::TypeProto { tensor_type: Some(tensor), ..Default::default() }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_weights_give_different_results_with_both_signs() {
        let dir = tempfile::tempdir().unwrap();
        let fixture = Fixture::new(dir.path()).unwrap();
        let [a, b] = [0, 1].map(|set| fixture.expected(&fixture.weights(set)));
        assert_ne!(a, b);
        assert!(a[1].iter().any(|v| *v < 0.0) && a[1].iter().any(|v| *v > 0.0));
        assert_ne!(fixture.weights(0).floats("b"), fixture.weights(1).floats("b"));
    }
}
