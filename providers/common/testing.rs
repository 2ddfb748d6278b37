//! For the tests of providers: small ONNX models built in code, weights in memory, hosts that cancel.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use prost::Message;
use sdrun_abi::{
    BuildSpec, DType, Engine, Error, Flow, Host, InitConfig, LogLevel, NoHost, OutputSink, Precision,
    Provider, Result, Session, TensorView, VecSink, Weight, WeightSource,
};
use sdrun_graph::proto::{
    AttributeProto, Dimension, EXTERNAL, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    attribute_type,
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Mutex,
};

/// The folder of the runtime under test. These tests need the real runtime and fail without it.
pub fn runtime_dir(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(dir) => PathBuf::from(dir),
        None => panic!(
            "{variable} must name the folder of the runtime's libraries; `cargo xtask test` installs it"
        ),
    }
}

pub fn config(runtime: Option<&Path>, temp: &Path) -> InitConfig {
    InitConfig {
        runtime_dir: runtime.map(Path::to_path_buf),
        temp_dir: temp.to_path_buf(),
        ..Default::default()
    }
}

pub fn spec(precision: Precision) -> BuildSpec {
    BuildSpec::new("cpu", precision)
}

/// An ONNX model under construction, in the form that a host passes to a provider.
#[derive(Clone, Default)]
pub struct Model(GraphProto);

/// Dimensions; a negative one is open.
fn value(name: &str, dtype: DType, dims: &[i64]) -> ValueInfoProto {
    let dim = |d: &i64| match *d >= 0 {
        true => Dimension { dim_value: Some(*d), ..Default::default() },
        false => Dimension { dim_param: Some(format!("{name}_open{}", -d)), ..Default::default() },
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor_type = TensorTypeProto { elem_type: Some(dtype as i32), shape: Some(shape) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { tensor_type: Some(tensor_type), ..Default::default() }),
        ..Default::default()
    }
}

impl Model {
    pub fn input(mut self, name: &str, dtype: DType, dims: &[i64]) -> Self {
        self.0.input.push(value(name, dtype, dims));
        self
    }

    pub fn output(mut self, name: &str, dtype: DType, dims: &[i64]) -> Self {
        self.0.output.push(value(name, dtype, dims));
        self
    }

    /// A weight: external data whose location is its own name.
    pub fn weight(mut self, name: &str, dtype: DType, shape: &[usize]) -> Self {
        let entry =
            |key: &str, value: String| StringStringEntryProto { key: Some(key.into()), value: Some(value) };
        self.0.initializer.push(TensorProto {
            name: Some(name.into()),
            data_type: Some(dtype as i32),
            dims: shape.iter().map(|d| *d as i64).collect(),
            data_location: Some(EXTERNAL),
            external_data: vec![
                entry("location", name.into()),
                entry("offset", "0".into()),
                entry("length", dtype.bytes_of(shape).unwrap().to_string()),
            ],
            ..Default::default()
        });
        self
    }

    /// An inline constant.
    pub fn constant(mut self, name: &str, dtype: DType, shape: &[usize], data: Vec<u8>) -> Self {
        self.0.initializer.push(TensorProto {
            name: Some(name.into()),
            data_type: Some(dtype as i32),
            dims: shape.iter().map(|d| *d as i64).collect(),
            raw_data: Some(data.into()),
            ..Default::default()
        });
        self
    }

    pub fn node(self, op: &str, inputs: &[&str], outputs: &[&str]) -> Self {
        self.node_with(op, inputs, outputs, &[])
    }

    /// Gives the last node a list of integers.
    pub fn ints(mut self, name: &str, ints: &[i64]) -> Self {
        if let Some(node) = self.0.node.last_mut() {
            node.attribute.push(AttributeProto {
                name: Some(name.into()),
                r#type: Some(attribute_type::INTS),
                ints: ints.to_vec(),
                ..Default::default()
            });
        }
        self
    }

    pub fn node_with(mut self, op: &str, inputs: &[&str], outputs: &[&str], ints: &[(&str, i64)]) -> Self {
        let attribute = |(name, i): &(&str, i64)| AttributeProto {
            name: Some((*name).into()),
            r#type: Some(attribute_type::INT),
            i: Some(*i),
            ..Default::default()
        };
        self.0.node.push(NodeProto {
            op_type: Some(op.into()),
            input: inputs.iter().map(|s| s.to_string()).collect(),
            output: outputs.iter().map(|s| s.to_string()).collect(),
            attribute: ints.iter().map(attribute).collect(),
            ..Default::default()
        });
        self
    }

    /// Gives the last node a body.
    pub fn body(mut self, name: &str, body: Model) -> Self {
        if let Some(node) = self.0.node.last_mut() {
            node.attribute.push(AttributeProto {
                name: Some(name.into()),
                r#type: Some(attribute_type::GRAPH),
                g: Some(Box::new(GraphProto { name: Some(name.into()), ..body.0 })),
                ..Default::default()
            });
        }
        self
    }

    pub fn bytes(mut self) -> Vec<u8> {
        self.0.name = Some("test".into());
        ModelProto {
            ir_version: Some(10),
            opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(21) }],
            graph: Some(self.0),
            ..Default::default()
        }
        .encode_to_vec()
    }
}

/// Weights by name, in memory or declared to be in a file.
#[derive(Clone, Default)]
pub struct Source(pub BTreeMap<String, Stored>);

#[derive(Clone)]
pub struct Stored {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
    pub file: Option<(PathBuf, u64)>,
}

impl Source {
    pub fn with(mut self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let stored = Stored { dtype: DType::F32, shape: shape.to_vec(), data: bytes(values), file: None };
        self.0.insert(name.into(), stored);
        self
    }
}

impl WeightSource for Source {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let stored =
            self.0.get(name).ok_or_else(|| Error::not_found(format!("there is no weight `{name}`")))?;
        let weight = Weight::new(stored.dtype, stored.shape.clone(), &stored.data[..])?;
        Ok(match &stored.file {
            Some((path, offset)) => weight.in_file(path.clone(), *offset),
            None => weight,
        })
    }
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// `n` numbers in -1..1 that look random and depend on `seed` (a 32-bit linear congruential generator).
pub fn noise(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// `x · w + b` in f64, for x `[rows, inner]`, w `[inner, columns]`, b `[columns]`.
pub fn affine(x: &[f64], w: &[f32], b: &[f32], inner: usize) -> Vec<f64> {
    let columns = b.len();
    let at = |row: &[f64], c: usize| -> f64 {
        let products = row.iter().enumerate().map(|(i, x)| x * f64::from(w[i * columns + c]));
        products.sum::<f64>() + f64::from(b[c])
    };
    x.chunks_exact(inner).flat_map(|row| (0..columns).map(move |c| at(row, c))).collect()
}

pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// Largest difference, relative to the largest reference value.
pub fn error_of(found: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(found.len(), reference.len());
    let scale = reference.iter().fold(0.0, |m: f64, r| m.max(r.abs()));
    found.iter().zip(reference).fold(0.0, |m: f64, (f, r)| m.max((f64::from(*f) - r).abs())) / scale
}

/// `y = relu(x · w1 + b1) · w2 + b2`, x `[3, 64]`, w1 `[64, 96]`, w2 `[96, 8]`.
pub fn perceptron() -> Vec<u8> {
    Model::default()
        .input("x", DType::F32, &[3, 64])
        .output("y", DType::F32, &[3, 8])
        .weight("w1", DType::F32, &[64, 96])
        .weight("b1", DType::F32, &[96])
        .weight("w2", DType::F32, &[96, 8])
        .weight("b2", DType::F32, &[8])
        .node("MatMul", &["x", "w1"], &["h1"])
        .node("Add", &["h1", "b1"], &["h2"])
        .node("Relu", &["h2"], &["h3"])
        .node("MatMul", &["h3", "w2"], &["h4"])
        .node("Add", &["h4", "b2"], &["y"])
        .bytes()
}

/// Weights of [`perceptron`].
pub fn perceptron_weights(seed: u32) -> Source {
    Source::default()
        .with("w1", &[64, 96], &noise(seed, 64 * 96))
        .with("b1", &[96], &noise(seed + 1, 96))
        .with("w2", &[96, 8], &noise(seed + 2, 96 * 8))
        .with("b2", &[8], &noise(seed + 3, 8))
}

/// What [`perceptron`] computes.
pub fn perceptron_reference(weights: &Source, x: &[f32]) -> Vec<f64> {
    let get = |name: &str| floats(&weights.0[name].data);
    let hidden: Vec<f64> =
        affine(&widen(x), &get("w1"), &get("b1"), 64).into_iter().map(|v| v.max(0.0)).collect();
    affine(&hidden, &get("w2"), &get("b2"), 96)
}

/// Builds an engine and gives it weights.
pub fn session(
    provider: &dyn Provider,
    model: &[u8],
    spec: &BuildSpec,
    weights: &Source,
) -> Result<Box<dyn Session>> {
    engine(provider, model, spec, weights)?.session(weights, &NoHost)
}

pub fn engine(
    provider: &dyn Provider,
    model: &[u8],
    spec: &BuildSpec,
    weights: &Source,
) -> Result<Box<dyn Engine>> {
    provider.build(model, spec, weights, &NoHost)
}

/// Runs a session on one f32 input and returns its only output.
pub fn run(session: &mut dyn Session, shape: &[usize], x: &[f32]) -> Result<Vec<f32>> {
    let mut sink = VecSink::default();
    let data = bytes(x);
    session.run(&[TensorView { dtype: DType::F32, shape, data: &data }], &mut sink, &NoHost)?;
    assert_eq!(sink.len(), 1);
    Ok(floats(sink.get(0).unwrap().data))
}

/// The error of something that should have failed.
pub fn failure<T>(result: Result<T>) -> Error {
    match result {
        Ok(_) => panic!("succeeded although it must fail"),
        Err(error) => error,
    }
}

/// A host that cancels: a run immediately, a build at the phase of this name.
pub struct Stop(pub &'static str);

impl Host for Stop {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, phase: &str, _: u64, _: u64) -> Flow {
        if phase == self.0 { Flow::Cancel } else { Flow::Continue }
    }
    fn cancelled(&self) -> bool {
        true
    }
}

/// A host that records log messages.
#[derive(Default)]
pub struct Log(pub Mutex<Vec<(LogLevel, String)>>);

impl Host for Log {
    fn log(&self, level: LogLevel, _: &str, message: &str) {
        self.0.lock().unwrap().push((level, message.into()));
    }
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Continue
    }
    fn cancelled(&self) -> bool {
        false
    }
}

/// A sink that cannot provide buffers.
pub struct FullSink;

impl OutputSink for FullSink {
    fn allocate(&mut self, _: &[sdrun_abi::OutputSpec]) -> Result<Vec<&mut [u8]>> {
        Err(Error::new(sdrun_abi::ErrorCode::ResourceExhausted, "no room for outputs"))
    }
}
