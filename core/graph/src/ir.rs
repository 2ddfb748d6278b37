//! The typed intermediate representation. It follows ONNX closely; each consumer rejects what it does not support.

use crate::{GraphError, Tensor, proto};
use sdrun_abi::DType;
use sdrun_files::{Links, open_regular};
use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::PathBuf,
    sync::Arc,
};

/// Index of a [`Value`] in [`Graph::values`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl fmt::Debug for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// One dimension of a shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// A fixed size.
    Known(usize),
    /// A named dimension (`batch`); equal names mean equal sizes.
    Symbol(String),
    /// Unknown size.
    Unknown,
}

impl Dim {
    /// The size, if known.
    pub fn known(&self) -> Option<usize> {
        match self {
            Dim::Known(n) => Some(*n),
            _ => None,
        }
    }
}

/// A tensor that flows through the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Name in the ONNX file; unique in the graph.
    pub name: String,
    /// Element type, if known.
    pub dtype: Option<DType>,
    /// Shape, if the rank is known.
    pub shape: Option<Vec<Dim>>,
}

impl Value {
    /// The shape, if every dimension is known.
    pub fn known_shape(&self) -> Option<Vec<usize>> {
        self.shape.as_ref()?.iter().map(Dim::known).collect()
    }
}

/// One operator application.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name in the ONNX file; may be empty. TorchScript exports hold the module path here.
    pub name: String,
    /// Operator domain; `""` is ai.onnx.
    pub domain: String,
    /// Operator name, for example `Conv`.
    pub op_type: String,
    /// Inputs; `None` is an absent optional input.
    pub inputs: Vec<Option<ValueId>>,
    /// Outputs; `None` is an unused optional output.
    pub outputs: Vec<Option<ValueId>>,
    /// Attributes by name.
    pub attributes: BTreeMap<String, Attribute>,
    /// `metadata_props` (dynamo exports hold the module path here).
    pub metadata: BTreeMap<String, String>,
}

impl Node {
    /// Input `i`, if present.
    pub fn input(&self, i: usize) -> Option<ValueId> {
        self.inputs.get(i).copied().flatten()
    }
    /// Output `i`, if present.
    pub fn output(&self, i: usize) -> Option<ValueId> {
        self.outputs.get(i).copied().flatten()
    }
    /// Integer attribute.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.attributes.get(name)? {
            Attribute::Int(v) => Some(*v),
            _ => None,
        }
    }
    /// Integer attribute, or `default`.
    pub fn int_or(&self, name: &str, default: i64) -> i64 {
        self.int(name).unwrap_or(default)
    }
    /// Integer-list attribute.
    pub fn ints(&self, name: &str) -> Option<&[i64]> {
        match self.attributes.get(name)? {
            Attribute::Ints(v) => Some(v),
            _ => None,
        }
    }
    /// Float attribute.
    pub fn float(&self, name: &str) -> Option<f32> {
        match self.attributes.get(name)? {
            Attribute::Float(v) => Some(*v),
            _ => None,
        }
    }
    /// Float-list attribute.
    pub fn floats(&self, name: &str) -> Option<&[f32]> {
        match self.attributes.get(name)? {
            Attribute::Floats(v) => Some(v),
            _ => None,
        }
    }
    /// String attribute, if it is valid UTF-8.
    pub fn str(&self, name: &str) -> Option<&str> {
        match self.attributes.get(name)? {
            Attribute::String(v) => std::str::from_utf8(v).ok(),
            _ => None,
        }
    }
    /// Tensor attribute.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        match self.attributes.get(name)? {
            Attribute::Tensor(v) => Some(v),
            _ => None,
        }
    }
}

/// An attribute of a [`Node`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Attribute {
    Int(i64),
    Ints(Vec<i64>),
    Float(f32),
    Floats(Vec<f32>),
    String(Vec<u8>),
    Strings(Vec<Vec<u8>>),
    Tensor(Tensor),
    /// A body (If, Loop, Scan) as it stood in the file, without its weights, which are weights of the graph. The values it
    /// captures are kept alive under their names.
    Graph(Box<proto::GraphProto>),
    /// Anything else (sparse tensors, types, tensors of strings), passed through.
    Other(Box<proto::AttributeProto>),
}

/// A named tensor stored with the graph.
#[derive(Clone, Debug, PartialEq)]
pub enum Initializer {
    /// Part of the topology: integers of more than 8 bits, booleans, scalars, zero points, and what an operator needs to
    /// know its output's shape. Counted in the topology hash, folded by passes.
    Constant(Tensor),
    /// Refittable: floats or integers of 8 bits, at least one dimension, more than one element. Only its type and shape
    /// belong to the topology.
    Weight(WeightRef),
}

impl Initializer {
    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Initializer::Constant(t) => t.dtype(),
            Initializer::Weight(w) => w.dtype,
        }
    }
    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        match self {
            Initializer::Constant(t) => t.shape(),
            Initializer::Weight(w) => &w.shape,
        }
    }
}

/// Type, shape and storage location of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightRef {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Where its values are stored.
    pub data: WeightData,
}

impl WeightRef {
    /// Reads the values of this weight as contiguous little-endian bytes; errors call it `name`. Values in the
    /// model's own file are shared without a copy. Values in other files are read now.
    ///
    /// # Errors
    /// [`GraphError::ExternalData`] if the weight has no values or their file cannot be read.
    pub fn read(&self, name: &str) -> Result<bytes::Bytes, GraphError> {
        let fail = |reason| GraphError::ExternalData { tensor: name.to_owned(), reason };
        match &self.data {
            WeightData::Inline(data) => Ok(data.clone()),
            WeightData::Absent { location, .. } => Err(fail(format!("file {location:?} is missing"))),
            WeightData::External { file, offset } => {
                let cannot = |e: io::Error| fail(format!("cannot read {}: {e}", file.display()));
                let bytes = self.dtype.bytes_of(&self.shape).unwrap_or(usize::MAX);
                // Links were checked when the model was opened, and the path is the one that they led to.
                let mut source = open_regular(file, Links::Follow).map_err(|e| fail(e.message))?;
                let len = source.metadata().map_err(cannot)?.len();
                if offset.checked_add(bytes as u64).is_none_or(|end| end > len) {
                    return Err(fail(format!(
                        "{} is shorter than when the model was opened",
                        file.display()
                    )));
                }
                source.seek(SeekFrom::Start(*offset)).map_err(cannot)?;
                let mut data = vec![0; bytes];
                source.read_exact(&mut data).map_err(cannot)?;
                Ok(data.into())
            }
        }
    }
}

/// Where the values of a weight are stored.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightData {
    /// In the ONNX file (a slice of its mapping).
    Inline(bytes::Bytes),
    /// In another file, which is inside the model's folder and long enough (both checked).
    External {
        /// Absolute path.
        file: Arc<PathBuf>,
        /// Byte offset.
        offset: u64,
    },
    /// Nowhere yet: the graph is weightless. `location` is copied from the file.
    Absent {
        /// The `location` entry of the external data.
        location: String,
        /// Byte offset into it.
        offset: u64,
    },
}

/// A graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Name in the file.
    pub name: String,
    /// Operator set versions by domain; `""` is ai.onnx.
    pub opsets: BTreeMap<String, i64>,
    /// `ir_version` of the file.
    pub ir_version: i64,
    /// Name and version of the exporter.
    pub producer: String,
    /// All values, indexed by [`ValueId`].
    pub values: Vec<Value>,
    /// Nodes in topological order.
    pub nodes: Vec<Node>,
    /// Graph inputs, without initializers.
    pub inputs: Vec<ValueId>,
    /// Graph outputs.
    pub outputs: Vec<ValueId>,
    /// Initializers, keyed by the value they define.
    pub initializers: BTreeMap<ValueId, Initializer>,
    /// `metadata_props` of the model.
    pub metadata: BTreeMap<String, String>,
}

impl Graph {
    /// The value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }
    /// The value with this id.
    pub fn value_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.0 as usize]
    }
    /// Adds a value.
    pub fn add_value(&mut self, value: Value) -> ValueId {
        self.values.push(value);
        ValueId(self.values.len() as u32 - 1)
    }
    /// Version of the default operator set.
    pub fn opset(&self) -> i64 {
        self.opsets.get("").copied().unwrap_or(1)
    }
    /// The constant that defines this value, if any.
    pub fn constant(&self, id: ValueId) -> Option<&Tensor> {
        match self.initializers.get(&id)? {
            Initializer::Constant(t) => Some(t),
            Initializer::Weight(_) => None,
        }
    }
    /// Names, types, shapes and locations of all weights, in the order of their ids.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &WeightRef)> {
        self.initializers.iter().filter_map(|(id, init)| match init {
            Initializer::Weight(w) => Some((self.value(*id).name.as_str(), w)),
            Initializer::Constant(_) => None,
        })
    }
}
