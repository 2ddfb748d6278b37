//! Small graphs through the whole provider, against `sdrun_graph::eval`.

mod devices;
mod errors;
mod flow;
mod gguf;
mod kept;
mod layers;
mod models;
mod operators;
mod patterns;
mod prepared;
mod recurrent;
mod scaling;
mod session;
mod shapes;
mod special;

use crate::{
    GgmlProvider,
    ffi::{Ggml, LIBRARY_DIR, Target},
    translate::translate,
    weights::Bank,
};
use sdrun_abi::{
    BuildSpec, DType, Engine, Error, InitConfig, NoHost, Precision, Provider, Result, Session, TensorView,
    VecSink, Weight, WeightSource, WeightSpec,
};
use sdrun_graph::{
    Attribute, Dim, Element, ExternalBase, Graph, Initializer, Node, Tensor, Value, ValueId, WeightData,
    WeightRef, eval, infer::infer_shapes,
};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::Arc,
};

/// A graph, its inputs in a test, and the values of its weights.
#[derive(Clone)]
pub(super) struct Model {
    pub(super) graph: Graph,
    pub(super) feeds: Vec<Tensor>,
    pub(super) weights: BTreeMap<String, Tensor>,
}

impl Model {
    pub(super) fn new(opset: i64) -> Self {
        let graph = Graph {
            name: "test".into(),
            opsets: BTreeMap::from([(String::new(), opset)]),
            ir_version: 8,
            ..Graph::default()
        };
        Model { graph, feeds: Vec::new(), weights: BTreeMap::new() }
    }
    fn value(&mut self, prefix: &str, dtype: Option<DType>, shape: Option<&[usize]>) -> ValueId {
        let name = format!("{prefix}{}", self.graph.values.len());
        let shape = shape.map(|shape| shape.iter().map(|d| Dim::Known(*d)).collect());
        self.graph.add_value(Value { name, dtype, shape })
    }
    /// A graph input that has this value in the test.
    pub(super) fn input(&mut self, tensor: Tensor) -> ValueId {
        let id = self.value("input", Some(tensor.dtype()), Some(tensor.shape()));
        self.graph.inputs.push(id);
        self.feeds.push(tensor);
        id
    }
    /// A refittable initializer.
    pub(super) fn weight(&mut self, tensor: Tensor) -> ValueId {
        let id = self.value("weight", Some(tensor.dtype()), Some(tensor.shape()));
        let name = self.graph.value(id).name.clone();
        let data = WeightData::Absent { location: name.clone(), offset: 0 };
        let weight = WeightRef { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), data };
        self.graph.initializers.insert(id, Initializer::Weight(weight));
        self.weights.insert(name, tensor);
        id
    }
    /// An initializer that is part of the topology.
    pub(super) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let id = self.value("constant", Some(tensor.dtype()), Some(tensor.shape()));
        self.graph.initializers.insert(id, Initializer::Constant(tensor));
        id
    }
    /// A node with `outputs` outputs.
    pub(super) fn node_n(
        &mut self,
        op: &str,
        attributes: &[(&str, Attribute)],
        inputs: &[Option<ValueId>],
        outputs: usize,
    ) -> Vec<ValueId> {
        let outputs: Vec<ValueId> = (0..outputs).map(|_| self.value("value", None, None)).collect();
        self.graph.nodes.push(Node {
            name: format!("/{op}_{}", self.graph.nodes.len()),
            domain: String::new(),
            op_type: op.into(),
            inputs: inputs.to_vec(),
            outputs: outputs.iter().copied().map(Some).collect(),
            attributes: attributes.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            metadata: BTreeMap::new(),
        });
        outputs
    }
    /// A node with one output.
    pub(super) fn node(&mut self, op: &str, attributes: &[(&str, Attribute)], inputs: &[ValueId]) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.node_n(op, attributes, &inputs, 1)[0]
    }
    pub(super) fn output(&mut self, id: ValueId) {
        self.graph.outputs.push(id);
    }
    /// The model as a host passes it.
    pub(super) fn onnx(&self) -> Vec<u8> {
        let mut graph = self.graph.clone();
        infer_shapes(&mut graph).unwrap();
        graph.to_onnx_stripped().unwrap()
    }
    /// The outputs of the reference implementation, node by node.
    pub(super) fn reference(&self) -> Vec<Tensor> {
        let mut values: HashMap<ValueId, Tensor> = HashMap::new();
        values.extend(self.graph.inputs.iter().copied().zip(self.feeds.iter().cloned()));
        for (id, initializer) in &self.graph.initializers {
            let tensor = match initializer {
                Initializer::Constant(tensor) => tensor.clone(),
                Initializer::Weight(_) => self.weights[&self.graph.value(*id).name].clone(),
            };
            values.insert(*id, tensor);
        }
        for node in &self.graph.nodes {
            let inputs: Vec<Option<&Tensor>> =
                node.inputs.iter().map(|id| id.map(|id| &values[&id])).collect();
            let opset = self.graph.opsets.get(&node.domain).copied().unwrap_or_else(|| self.graph.opset());
            let results = eval::evaluate(node, opset, &inputs).unwrap();
            values.extend(node.outputs.iter().copied().zip(results).filter_map(|(id, t)| Some((id?, t))));
        }
        self.graph.outputs.iter().map(|id| values[id].clone()).collect()
    }
    /// The operators that neither ggml nor a kernel computes, with their number of nodes.
    pub(super) fn host_operators(&self) -> BTreeMap<String, usize> {
        let bytes = self.onnx();
        let mut graph = Graph::from_bytes(bytes.into(), "test", ExternalBase::Stripped).unwrap();
        infer_shapes(&mut graph).unwrap();
        translate(&graph, Precision::Fp32, cpu(), &mut bank(&graph)).unwrap().host_operators
    }
}

impl WeightSource for Model {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let tensor = self.weights.get(name).ok_or_else(|| Error::not_found(format!("no weight {name:?}")))?;
        Weight::new(tensor.dtype(), tensor.shape().to_vec(), &tensor.data()[..])
    }
}

/// Room for the weights of a graph.
pub(super) fn bank(graph: &Graph) -> Bank {
    let spec = |(name, w): (&str, &WeightRef)| WeightSpec {
        name: name.into(),
        dtype: w.dtype,
        shape: w.shape.clone(),
    };
    Bank::new(cpu(), &graph.weights().map(spec).collect::<Vec<_>>(), Arc::default())
}

pub(super) fn ggml() -> &'static Ggml {
    Ggml::load(&libraries()).unwrap()
}

/// The folder of the libraries, with a drive if a build on another system left that out.
fn libraries() -> PathBuf {
    std::path::absolute(LIBRARY_DIR).unwrap()
}

pub(super) fn cpu() -> Target {
    Target { ggml: ggml(), gpu: None, budget: None }
}

pub(super) fn provider() -> GgmlProvider {
    let provider = GgmlProvider::default();
    provider.init(&InitConfig { plugin_dir: libraries(), ..InitConfig::default() }, &NoHost).unwrap();
    provider
}

pub(super) fn spec(precision: Precision) -> BuildSpec {
    BuildSpec::new("cpu", precision)
}

pub(super) fn build(model: &Model, spec: &BuildSpec) -> Result<Box<dyn Engine>> {
    provider().build(&model.onnx(), spec, model, &NoHost)
}

/// Runs a session once on the model's inputs.
pub(super) fn run(session: &mut dyn Session, feeds: &[Tensor]) -> Result<Vec<Tensor>> {
    let views: Vec<TensorView<'_>> =
        feeds.iter().map(|t| TensorView { dtype: t.dtype(), shape: t.shape(), data: t.data() }).collect();
    let mut sink = VecSink::default();
    session.run(&views, &mut sink, &NoHost)?;
    let outputs = (0..sink.len()).map(|i| {
        let view = sink.get(i).unwrap();
        Tensor::new(view.dtype, view.shape.to_vec(), view.data.to_vec()).unwrap()
    });
    Ok(outputs.collect())
}

/// The outputs of the provider.
pub(super) fn outputs(model: &Model, spec: &BuildSpec) -> Vec<Tensor> {
    let engine = build(model, spec).unwrap();
    run(&mut *engine.session(model, &NoHost).unwrap(), &model.feeds).unwrap()
}

/// The provider's outputs must be the reference's: equal, or for floats within `tolerance` times the largest value.
pub(super) fn check(what: &str, model: &Model, tolerance: f64) {
    for threads in [1, 3] {
        let spec = BuildSpec { threads: Some(threads), ..spec(Precision::Fp32) };
        for (i, (found, expected)) in outputs(model, &spec).iter().zip(&model.reference()).enumerate() {
            compare(&format!("{what}, output {i}, {threads} threads"), found, expected, tolerance);
        }
    }
}

pub(super) fn compare(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!((found.dtype(), found.shape()), (expected.dtype(), expected.shape()), "{what}");
    let (Some(f), Some(e)) = (found.to_f32s(), expected.to_f32s()) else {
        assert_eq!(found, expected, "{what}");
        return;
    };
    let error = distance(&f, &e);
    assert!(error <= tolerance, "{what}: off by {error:e} of the largest value\n{f:?}\n{e:?}");
}

/// The largest difference over the largest value; NaN and infinity must be in the same places.
pub(super) fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let largest = expected.iter().filter(|v| v.is_finite()).fold(0f64, |m, v| m.max(f64::from(v.abs())));
    let difference = found.iter().zip(expected).map(|(f, e)| match (f.is_finite(), e.is_finite()) {
        (true, true) => (f64::from(*f) - f64::from(*e)).abs(),
        _ if f.is_nan() && e.is_nan() || f == e => 0.0,
        _ => f64::INFINITY,
    });
    difference.fold(0.0, f64::max) / largest.max(f64::MIN_POSITIVE)
}

/// Pseudo-random numbers in [-1, 1), the same in every run.
pub(super) fn noise(shape: &[usize], seed: u64) -> Tensor {
    from(shape, |i| {
        let mut z =
            (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed.wrapping_mul(0xD1B5_4A32_D192_ED03);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z >> 40) as f32) / (1 << 23) as f32 - 1.0
    })
}

/// Blocks of a GGUF type with random bytes, except for their f16 scales, which are finite.
pub(crate) fn random_blocks(encoding: &str, count: usize, seed: u64) -> Vec<u8> {
    let (bytes, scales): (usize, &[usize]) = match encoding {
        "q8_0" => (34, &[0]),
        "q5_0" => (22, &[0]),
        "q4_0" => (18, &[0]),
        "q4_k" => (144, &[0, 2]),
        other => panic!("{other}"),
    };
    let mut state = seed;
    let mut byte = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    let mut blocks: Vec<u8> = (0..count * bytes).map(|_| byte()).collect();
    for block in blocks.chunks_exact_mut(bytes) {
        // Without the exponent's upper bits: below 2^-7.
        scales.iter().for_each(|at| block[at + 1] &= 0xa3);
    }
    blocks
}

/// A tensor whose elements are a function of their index.
pub(super) fn from<T: Element>(shape: &[usize], f: impl Fn(usize) -> T) -> Tensor {
    let elements: Vec<T> = (0..shape.iter().product()).map(f).collect();
    Tensor::from_elements(shape.to_vec(), &elements).unwrap()
}
