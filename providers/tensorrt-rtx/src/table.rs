//! The refit table: how to compute the weights of a plan from weights of the graph. It is made during the build and
//! stored in the engine, so that using the engine needs no ONNX.

use crate::ffi::{dtype, network::Record};
use bytes::Bytes;
use sdrun_abi::{DType, Error, ErrorCode, Hint, Result, Weight, WeightSource, WeightSpec};
use sdrun_graph::{Graph, Initializer, Tensor};
use sdrun_provider_common::{graph_error, weight};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use std::collections::{BTreeMap, BTreeSet};

/// One weight of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Its name in the plan.
    pub(crate) name: String,
    /// Its element type.
    pub(crate) dtype: DType,
    /// Number of elements.
    pub(crate) count: u64,
    /// How it is computed.
    #[serde(flatten)]
    pub(crate) transform: Transform,
}

/// How to compute a weight of a plan (`nvonnxparser::RefitTransformKind`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "transform", rename_all = "snake_case")]
pub(crate) enum Transform {
    /// The bytes of a weight of the graph.
    Identity { source: String },
    /// An f64 weight of the graph, rounded to f32.
    Narrow { source: String },
    /// `scale / sqrt(variance + epsilon)` of a batch normalization: scale, bias, mean, variance.
    BatchNormScale {
        sources: [String; 4],
        #[serde(deserialize_with = "finite")]
        epsilon: f32,
    },
    /// `bias - mean * scale / sqrt(variance + epsilon)` of a batch normalization.
    BatchNormBias {
        sources: [String; 4],
        #[serde(deserialize_with = "finite")]
        epsilon: f32,
    },
    /// A constant of the graph: hexadecimal bytes.
    Constant { hex: String },
}

/// Reads a number, which may be too large for f32.
fn finite<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<f32, D::Error> {
    let number = f32::deserialize(deserializer)?;
    number.is_finite().then_some(number).ok_or_else(|| D::Error::custom("a number is too large"))
}

impl Transform {
    /// The weights of the graph it needs.
    pub(crate) fn sources(&self) -> &[String] {
        match self {
            Transform::Identity { source } | Transform::Narrow { source } => std::slice::from_ref(source),
            Transform::BatchNormScale { sources, .. } | Transform::BatchNormBias { sources, .. } => sources,
            Transform::Constant { .. } => &[],
        }
    }
}

/// Whether a weight that the parser reports should be refittable: it has floats or bytes and is computed from weights of the
/// graph. All others are part of the topology.
pub(crate) fn is_refittable(record: &Record, weights: &BTreeSet<&str>) -> bool {
    let data = |dtype: DType| dtype.is_float() || matches!(dtype, DType::I8 | DType::U8);
    let data = dtype(record.data_type).is_some_and(data);
    // 0: unchanged; 1: f64 rounded to f32. 2 and 3, folded batch normalizations, cannot be marked without a GPU; see
    // `lower`.
    let kind = matches!(record.kind, 0 | 1);
    data && kind && !record.sources.is_empty() && record.sources.iter().all(|s| weights.contains(&**s))
}

/// Makes the table of a plan for `graph`. `made` holds the recipes for the graph's weights that are not among
/// `weights`, the host's.
///
/// Errors: `Unimplemented` if one of `weights` reaches no refittable weight of the plan.
pub(crate) fn of(
    records: &[Record],
    graph: &Graph,
    made: &BTreeMap<String, Transform>,
    weights: &[WeightSpec],
) -> Result<Vec<Entry>> {
    let own: BTreeSet<&str> = graph.weights().map(|(name, _)| name).collect();
    let constants = products_of_constants(graph);
    let mut table: BTreeMap<&str, Entry> = BTreeMap::new();
    for record in records {
        let Some(dtype) = dtype(record.data_type) else { continue };
        let transform = if is_refittable(record, &own) {
            transform(record, made)
        } else if let Some(tensor) = constants.get(&*record.name).filter(|_| record.kind == 0) {
            Transform::Constant { hex: hex(tensor.data()) }
        } else {
            continue;
        };
        let entry = Entry { name: record.name.clone(), dtype, count: record.count, transform };
        table.insert(&record.name, entry);
    }
    let covered: BTreeSet<&str> =
        table.values().flat_map(|entry| entry.transform.sources()).map(String::as_str).collect();
    let missed = weights.iter().map(|spec| spec.name.as_str()).find(|name| !covered.contains(name));
    if let Some(missed) = missed {
        let used = graph
            .nodes
            .iter()
            .find(|node| node.inputs.iter().flatten().any(|id| graph.value(*id).name == *missed));
        let by = used.map_or(String::new(), |n| format!(" (an input of {} `{}`)", n.op_type, n.name));
        return Err(Error::unsupported(format!(
            "TensorRT-RTX cannot change the weight `{missed}`{by} in a built engine"
        ))
        .with_hint(Hint::Bake));
    }
    Ok(table.into_values().collect())
}

/// Constants that are operands of convolutions and matrix products. The parser strips their values from the plan like
/// weights, so refitting must supply them.
fn products_of_constants(graph: &Graph) -> BTreeMap<&str, &Tensor> {
    const PRODUCTS: [&str; 4] = ["Conv", "Gemm", "MatMul", "DequantizeLinear"];
    let nodes = graph.nodes.iter().filter(|node| PRODUCTS.contains(&&*node.op_type));
    nodes
        .flat_map(|node| node.inputs.iter().flatten())
        .filter_map(|id| match graph.initializers.get(id)? {
            Initializer::Constant(tensor) => Some((graph.value(*id).name.as_str(), tensor)),
            Initializer::Weight(_) => None,
        })
        .collect()
}

fn transform(record: &Record, made: &BTreeMap<String, Transform>) -> Transform {
    let source = record.sources.first().cloned().unwrap_or_default();
    match (made.get(&source), record.kind) {
        (Some(transform), _) => transform.clone(),
        (None, 1) => Transform::Narrow { source },
        (None, _) => Transform::Identity { source },
    }
}

/// The bytes of one weight of a plan: a weight of the source unchanged, or computed from several.
pub(crate) enum Values<'a> {
    /// Unchanged.
    Weight(Weight<'a>),
    /// Computed.
    Made(Vec<u8>),
}

impl Values<'_> {
    /// Bytes of memory it takes. A weight in a file is mapped and does not count.
    pub(crate) fn held(&self) -> u64 {
        match self {
            Values::Weight(weight) if weight.file.is_some() => 0,
            values => values.bytes().len() as u64,
        }
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Values::Weight(weight) => weight.data(),
            Values::Made(bytes) => bytes,
        }
    }
}

impl Entry {
    /// Number of bytes of its values, which is exactly the size of [`Values`]. No values have `usize::MAX` bytes.
    pub(crate) fn bytes(&self) -> usize {
        let count = usize::try_from(self.count).ok();
        count.and_then(|count| self.dtype.bytes_of(&[count])).unwrap_or(usize::MAX)
    }

    /// Computes its values from the weights of the graph, which `specs` describes.
    pub(crate) fn values<'a>(
        &self,
        specs: &BTreeMap<&str, &WeightSpec>,
        source: &'a dyn WeightSource,
    ) -> Result<Values<'a>> {
        let get = |name: &str| match specs.get(name) {
            Some(spec) => weight(source, spec),
            None => Err(Error::new(
                ErrorCode::DataLoss,
                format!(
                    "the engine is damaged: its weight `{}` uses `{name}`, which the engine does not list",
                    self.name
                ),
            )),
        };
        let values = match &self.transform {
            Transform::Identity { source } => Values::Weight(get(source)?),
            Transform::Narrow { source } => {
                let weight = get(source)?;
                let doubles = weight.data().chunks_exact(8);
                let narrow = doubles.map(|b| f64::from_le_bytes(std::array::from_fn(|i| b[i])) as f32);
                Values::Made(narrow.flat_map(f32::to_le_bytes).collect())
            }
            Transform::BatchNormScale { sources, epsilon }
            | Transform::BatchNormBias { sources, epsilon } => {
                let [scale, bias, mean, variance] = sources;
                let [scale, bias, mean, variance] = [
                    floats(&get(scale)?)?,
                    floats(&get(bias)?)?,
                    floats(&get(mean)?)?,
                    floats(&get(variance)?)?,
                ];
                let is_scale = matches!(self.transform, Transform::BatchNormScale { .. });
                let folded = scale.iter().zip(&bias).zip(mean.iter().zip(&variance)).map(
                    |((scale, bias), (mean, variance))| {
                        let combined = scale / (variance + epsilon).sqrt();
                        if is_scale { combined } else { bias - mean * combined }
                    },
                );
                Values::Made(narrowed(folded.collect(), self.dtype)?)
            }
            Transform::Constant { hex } => Values::Made(unhex(hex).ok_or_else(|| {
                Error::new(
                    ErrorCode::DataLoss,
                    format!("the engine is damaged: it has a bad constant `{}`", self.name),
                )
            })?),
        };
        let expected = self.bytes();
        if values.bytes().len() != expected {
            return Err(Error::internal(format!(
                "the weight `{}` of the engine has {expected} bytes, what it is made of {}",
                self.name,
                values.bytes().len()
            )));
        }
        Ok(values)
    }
}

fn floats(weight: &Weight<'_>) -> Result<Vec<f32>> {
    let data = Bytes::copy_from_slice(weight.data());
    let tensor = Tensor::new(weight.dtype, weight.shape.clone(), data).map_err(graph_error)?;
    tensor.to_f32s().ok_or_else(|| {
        Error::unsupported(format!("cannot fold a batch normalization of {} values", weight.dtype))
    })
}

fn narrowed(values: Vec<f32>, dtype: DType) -> Result<Vec<u8>> {
    let tensor = Tensor::from_elements(vec![values.len()], &values).map_err(graph_error)?;
    let narrow = tensor.to_float_type(dtype);
    let narrow = narrow
        .ok_or_else(|| Error::unsupported(format!("cannot fold a batch normalization into {dtype}")))?;
    Ok(narrow.data().to_vec())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    let pairs = digits.chunks_exact(2);
    pairs.remainder().is_empty().then(|| digits.chunks_exact(2).map(|p| p[0] << 4 | p[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_graph::{Dim, Node, Value, WeightData, WeightRef};

    fn graph() -> Graph {
        let mut graph = Graph::default();
        let mut value = |name: &str| {
            graph.add_value(Value {
                name: name.into(),
                dtype: Some(DType::F32),
                shape: Some(vec![Dim::Known(2)]),
            })
        };
        let (x, w, c, y) = (value("x"), value("w"), value("c"), value("y"));
        let data = WeightData::Absent { location: "w".into(), offset: 0 };
        let weight = WeightRef { dtype: DType::F32, shape: vec![2], data };
        graph.initializers.insert(w, Initializer::Weight(weight));
        let constant = Tensor::from_elements(vec![1], &[0.5f32]).unwrap();
        graph.initializers.insert(c, Initializer::Constant(constant));
        graph.nodes.push(Node {
            name: "g".into(),
            domain: String::new(),
            op_type: "Gemm".into(),
            inputs: vec![Some(x), Some(w), Some(c)],
            outputs: vec![Some(y)],
            attributes: BTreeMap::new(),
            metadata: BTreeMap::new(),
        });
        graph
    }

    fn weights() -> Vec<WeightSpec> {
        vec![WeightSpec { name: "w".into(), dtype: DType::F32, shape: vec![2] }]
    }

    fn record(name: &str, kind: i32, data_type: i32, count: u64) -> Record {
        Record {
            name: name.into(),
            kind,
            onnx_type: 1,
            data_type,
            count,
            sources: vec![name.into()],
            epsilon: 0.0,
        }
    }

    #[test]
    fn weights_and_constants_of_products_are_in_the_table() {
        let table = of(
            &[record("w", 0, 0, 2), record("c", 0, 0, 1), record("shape", 0, 8, 4)],
            &graph(),
            &BTreeMap::new(),
            &weights(),
        )
        .unwrap();
        let found: Vec<&Transform> = table.iter().map(|entry| &entry.transform).collect();
        let constant = Transform::Constant { hex: "0000003f".into() };
        assert_eq!(found, [&constant, &Transform::Identity { source: "w".into() }]);
        let specs = BTreeMap::new();
        struct Nothing;
        impl WeightSource for Nothing {
            fn get(&self, name: &str) -> Result<Weight<'_>> {
                Err(Error::not_found(name.to_string()))
            }
        }
        assert_eq!(table[0].values(&specs, &Nothing).unwrap().bytes(), 0.5f32.to_le_bytes());
        assert_eq!(table[1].values(&specs, &Nothing).err().unwrap().code, ErrorCode::DataLoss);
        let json = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Entry>>(&json).unwrap(), table);
    }

    #[test]
    fn bytes_are_refittable_and_wider_integers_are_not() {
        let weights = BTreeSet::from(["w"]);
        let code = |dtype| crate::ffi::data_type(dtype).unwrap();
        for (dtype, expected) in [(DType::I8, true), (DType::F32, true), (DType::I32, false)] {
            assert_eq!(is_refittable(&record("w", 0, code(dtype), 2), &weights), expected, "{dtype}");
        }
    }

    #[test]
    fn a_weight_that_reaches_nothing_is_named() {
        // A folded batch normalization is not refittable.
        for records in [vec![], vec![record("w", 2, 0, 2)], vec![record("c", 0, 0, 1)]] {
            let error = of(&records, &graph(), &BTreeMap::new(), &weights()).unwrap_err();
            assert!(error.message.contains("the weight `w` (an input of Gemm `g`)"), "{error}");
        }
    }

    #[test]
    fn hexadecimal() {
        assert_eq!(unhex(&hex(&[0, 255, 16])), Some(vec![0, 255, 16]));
        assert_eq!((unhex("0"), unhex("0g")), (None, None));
    }

    #[test]
    fn doubles_are_narrowed_and_lengths_compared() {
        struct Doubles;
        impl WeightSource for Doubles {
            fn get(&self, _: &str) -> Result<Weight<'_>> {
                Weight::new(DType::F64, vec![2], [1.5f64, -2.0].map(f64::to_le_bytes).concat())
            }
        }
        let spec = WeightSpec { name: "d".into(), dtype: DType::F64, shape: vec![2] };
        let specs = BTreeMap::from([("d", &spec)]);
        let mut entry = Entry {
            name: "d".into(),
            dtype: DType::F32,
            count: 2,
            transform: Transform::Narrow { source: "d".into() },
        };
        let expected: Vec<u8> = [1.5f32, -2.0].map(f32::to_le_bytes).concat();
        assert_eq!(entry.values(&specs, &Doubles).unwrap().bytes(), expected);
        entry.count = 3;
        assert!(entry.values(&specs, &Doubles).err().unwrap().message.contains("12 bytes"));
    }
}
