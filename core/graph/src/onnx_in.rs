//! Reads ONNX files into the IR.

mod attributes;
mod body;
mod budget;
mod functions;
mod graft;
mod hoist;
#[cfg(test)]
mod mutations;
mod order;
pub(crate) mod roles;
mod tensors;
#[cfg(test)]
mod tests;

use crate::{
    Dim, Graph, GraphError, Initializer, Node, Tensor, Value, ValueId, WeightData, WeightRef,
    external::{ExternalBase, ExternalFiles, OpenOptions},
    proto::{ModelProto, NodeProto, StringStringEntryProto, TensorProto, ValueInfoProto},
    scope,
};
pub use body::Body;
use bytes::Bytes;
pub(crate) use graft::graft;
use prost::Message;
use roles::{Origin, Role};
use sdrun_files::{Links, Map};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::RangeInclusive,
    path::Path,
};
use tensors::{Fault, Source, Stored};

/// Supported versions of the default operator set; the newest is onnx 1.23's.
pub const OPSETS: RangeInclusive<i64> = 7..=28;
/// Supported versions of the file format. Opset 7 came with version 3.
pub const IR_VERSIONS: RangeInclusive<i64> = 3..=14;

impl Graph {
    /// Opens an ONNX file.
    ///
    /// The file is mapped: its tensors are read when they are used, and files with external data are checked but not
    /// read. Model-local functions are inlined, `Constant` nodes become initializers, and weights inside bodies become
    /// weights of the graph. Initializers that an exporter merged because their values were equal become separate again
    /// under their own names.
    ///
    /// # Errors
    /// [`GraphError::Io`] if the file cannot be read, [`GraphError::Malformed`] if it violates the format,
    /// [`GraphError::UnsupportedModel`] if it is too old, too new or uses an unsupported feature,
    /// [`GraphError::ExternalData`] for tensors in other files.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Graph, GraphError> {
        let path = path.as_ref();
        let bytes = Bytes::from_owner(Map::open(path, Links::Follow)?);
        let dir = path.parent().unwrap_or(Path::new("."));
        Graph::from_bytes(bytes, path, ExternalBase::Folder { dir, options: *options })
    }

    /// Reads an ONNX model from memory. Errors use `name` as the file name. Tensors stay slices of `bytes`.
    ///
    /// # Errors
    /// As [`Graph::open`].
    pub fn from_bytes(
        bytes: Bytes,
        name: impl AsRef<Path>,
        external: ExternalBase<'_>,
    ) -> Result<Graph, GraphError> {
        let file = name.as_ref();
        read(bytes, ExternalFiles::new(external)).map_err(|error| match error {
            Failure::Fault(Fault::Malformed(reason)) => {
                GraphError::Malformed { file: file.to_owned(), reason }
            }
            Failure::Fault(Fault::Unsupported(reason)) => {
                GraphError::UnsupportedModel { file: file.to_owned(), reason }
            }
            Failure::Other(error) => error,
        })
    }
}

/// A [`Fault`] of the file, or an error that already says where it happened.
enum Failure {
    Fault(Fault),
    Other(GraphError),
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Failure::Fault(fault)
    }
}

fn malformed<T>(reason: String) -> Result<T, Fault> {
    Err(Fault::Malformed(reason))
}

fn unsupported<T>(reason: String) -> Result<T, Fault> {
    Err(Fault::Unsupported(reason))
}

/// Prefixes a fault with the part of the file it is in.
fn at(place: String) -> impl Fn(Fault) -> Fault {
    move |fault| match fault {
        Fault::Malformed(reason) => Fault::Malformed(format!("{place}: {reason}")),
        Fault::Unsupported(reason) => Fault::Unsupported(format!("{place}: {reason}")),
    }
}

fn read(bytes: Bytes, mut external: ExternalFiles<'_>) -> Result<Graph, Failure> {
    let mut model = decode(bytes)?;
    let opsets = versions(&model)?;
    functions::inline(&mut model)?;
    model.graph.iter_mut().for_each(hoist::hoist_weights);
    let mut import = Import::new(model, opsets)?;
    order::sort(&mut import.graph).map_err(Fault::Malformed)?;
    import.undo_merging();
    import.place_tensors(&mut external).map_err(Failure::Other)
}

fn decode(bytes: Bytes) -> Result<ModelProto, Fault> {
    if bytes.starts_with(b"version https://git-lfs") {
        return malformed("it is a Git LFS pointer; fetch the file itself with `git lfs pull`".into());
    }
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return malformed("it is compressed with gzip; unpack it first".into());
    }
    if bytes.len() > i32::MAX as usize {
        return malformed(
            "it is larger than 2 GB, the limit of its format; store large weights as external data".into(),
        );
    }
    if !budget::bearable(&bytes) {
        return Err(Fault::Unsupported(format!(
            "its nodes and values would take more than {} MB to read; real graphs take a tenth of that",
            budget::MAX_BYTES >> 20
        )));
    }
    match ModelProto::decode(bytes) {
        Ok(model) if model.graph.is_some() => Ok(model),
        Ok(_) => malformed("it contains no graph".into()),
        Err(error) => malformed(format!("it is truncated or not an ONNX file ({error})")),
    }
}

/// Checks the versions of the format and of the operator sets; returns the latter by domain.
fn versions(model: &ModelProto) -> Result<BTreeMap<String, i64>, Fault> {
    match model.ir_version {
        None => return malformed("it has no ir_version".into()),
        Some(v) if v < *IR_VERSIONS.start() => {
            return unsupported(format!(
                "its IR version {v} is older than {}; export it again",
                IR_VERSIONS.start()
            ));
        }
        Some(v) if v > *IR_VERSIONS.end() => {
            return unsupported(format!(
                "its IR version {v} is newer than {}, the newest supported; export it with an older one",
                IR_VERSIONS.end()
            ));
        }
        Some(_) => {}
    }
    let mut opsets = BTreeMap::new();
    for import in &model.opset_import {
        let (domain, version) = (functions::domain(import.domain()).to_owned(), import.version.unwrap_or(1));
        if let Some(other) = opsets.insert(domain.clone(), version).filter(|other| *other != version) {
            return malformed(format!(
                "it imports operator domain {domain:?} as version {other} and as {version}"
            ));
        }
    }
    match opsets.get("") {
        Some(v) if v < OPSETS.start() => unsupported(format!(
            "its operator set {v} is older than {}; convert it with onnx.version_converter or export it again",
            OPSETS.start()
        )),
        Some(v) if v > OPSETS.end() => unsupported(format!(
            "its operator set {v} is newer than {}, the newest supported; export it with an older one",
            OPSETS.end()
        )),
        _ => Ok(opsets),
    }
}

/// The graph under construction.
struct Import {
    graph: Graph,
    ids: HashMap<String, ValueId>,
    /// Values defined by an input, an initializer or a node.
    defined: HashSet<ValueId>,
    /// The outputs so far.
    listed: HashSet<ValueId>,
    /// Becomes `graph.initializers`.
    stored: BTreeMap<ValueId, (Stored, Origin)>,
}

impl Import {
    /// Imports everything but tensor data, and checks that names are consistent.
    fn new(model: ModelProto, opsets: BTreeMap<String, i64>) -> Result<Self, Fault> {
        let mut proto = model.graph.unwrap_or_default();
        if !proto.sparse_initializer.is_empty() {
            return unsupported("it has sparse initializers".into());
        }
        let producer = [model.producer_name, model.producer_version];
        let graph = Graph {
            name: proto.name.take().unwrap_or_default(),
            opsets,
            ir_version: model.ir_version.unwrap_or_default(),
            producer: producer.into_iter().flatten().filter(|s| !s.is_empty()).collect::<Vec<_>>().join(" "),
            metadata: metadata(model.metadata_props),
            ..Default::default()
        };
        let mut import = Import {
            graph,
            ids: HashMap::new(),
            defined: HashSet::new(),
            listed: HashSet::new(),
            stored: BTreeMap::new(),
        };
        // Tensors determine their own types, so they come before inputs that may repeat them.
        for tensor in &proto.initializer {
            import.add_initializer(tensor)?;
        }
        for input in &proto.input {
            import.add_input(input)?;
        }
        for node in proto.node {
            import.add_node(node)?;
        }
        for output in &proto.output {
            import.add_output(output)?;
        }
        if import.graph.outputs.is_empty() {
            return malformed("it has no outputs".into());
        }
        for info in &proto.value_info {
            if let Some(id) = import.ids.get(info.name()).copied() {
                import.set_type(id, info)?;
            }
        }
        import.check_uses()?;
        Ok(import)
    }

    /// The id of a name, which may be defined later.
    fn id(&mut self, name: &str) -> ValueId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        let id = self.graph.add_value(Value { name: name.to_owned(), dtype: None, shape: None });
        self.ids.insert(name.to_owned(), id);
        id
    }

    fn define(&mut self, name: &str, what: &str) -> Result<ValueId, Fault> {
        if name.is_empty() {
            return malformed(format!("{what} has no name"));
        }
        let id = self.id(name);
        match self.defined.insert(id) {
            true => Ok(id),
            false => malformed(format!("{what} {name:?} has the same name as another value")),
        }
    }

    /// Sets a declared type if none is known yet.
    fn set_type(&mut self, id: ValueId, info: &ValueInfoProto) -> Result<(), Fault> {
        let place = || format!("type of {:?}", info.name());
        let (dtype, shape) =
            tensors::value_type(info.r#type.as_ref()).map_err(|e| at(place())(Fault::Malformed(e)))?;
        let value = self.graph.value_mut(id);
        if value.dtype.is_none() {
            (value.dtype, value.shape) = (dtype, shape);
        }
        Ok(())
    }

    fn add_initializer(&mut self, tensor: &TensorProto) -> Result<(), Fault> {
        let name = tensor.name();
        let id = self.define(name, "initializer")?;
        let place = || format!("initializer {name:?}");
        let stored = tensors::read(tensor).map_err(|fault| at(place())(fault))?;
        let role = Role::stated(tensor).map_err(|e| at(place())(Fault::Malformed(e)))?;
        self.store(id, stored, Origin::Initializer(role));
        Ok(())
    }

    fn store(&mut self, id: ValueId, stored: Stored, origin: Origin) {
        let value = self.graph.value_mut(id);
        value.dtype = Some(stored.dtype);
        value.shape = Some(stored.shape.iter().map(|d| Dim::Known(*d)).collect());
        self.stored.insert(id, (stored, origin));
    }

    /// An input that is also an initializer counts only as an initializer: before IR version 4 every initializer had
    /// to be listed as an input.
    fn add_input(&mut self, input: &ValueInfoProto) -> Result<(), Fault> {
        let name = input.name();
        if self.ids.get(name).is_some_and(|id| self.stored.contains_key(id)) {
            return Ok(());
        }
        let id = self.define(name, "input")?;
        self.set_type(id, input)?;
        if self.graph.value(id).dtype.is_none() {
            return unsupported(format!("input {name:?} is not a tensor of a supported element type"));
        }
        self.graph.inputs.push(id);
        Ok(())
    }

    fn add_output(&mut self, output: &ValueInfoProto) -> Result<(), Fault> {
        let name = output.name();
        let Some(id) = self.ids.get(name).copied().filter(|id| self.defined.contains(id)) else {
            return malformed(format!("output {name:?} is not computed by any node"));
        };
        if !self.listed.insert(id) {
            return malformed(format!("output {name:?} is listed twice"));
        }
        self.set_type(id, output)?;
        if output.r#type.is_some() && self.graph.value(id).dtype.is_none() {
            return unsupported(format!("output {name:?} is not a tensor of a supported element type"));
        }
        self.graph.outputs.push(id);
        Ok(())
    }

    fn add_node(&mut self, mut proto: NodeProto) -> Result<(), Fault> {
        let name = proto.name.take().unwrap_or_default();
        let op_type = proto.op_type.take().unwrap_or_default();
        let domain = functions::domain(proto.domain()).to_owned();
        let place = || match (name.as_str(), proto.output.first()) {
            ("", Some(output)) => format!("{op_type} node of {output:?}"),
            ("", None) => format!("a {op_type} node"),
            _ => format!("{op_type} node {name:?}"),
        };
        if op_type.is_empty() {
            return malformed(format!("{}: it has no operator type", place()));
        }
        if !self.graph.opsets.contains_key(&domain) {
            return malformed(format!("{}: operator domain {domain:?} is not imported", place()));
        }
        let blame = at(place());
        let is_constant = domain.is_empty() && op_type == "Constant";
        if let Some(stored) = is_constant.then(|| constant(&proto)).transpose().map_err(&blame)?.flatten() {
            let id =
                self.define(proto.output.first().map_or("", String::as_str), "output of a Constant node")?;
            self.store(id, stored, Origin::ConstantNode);
            return Ok(());
        }
        let attributes = attributes::read_all(&mut proto).map_err(&blame)?;
        let mut inputs = Vec::with_capacity(proto.input.len());
        for input in &proto.input {
            inputs.push((!input.is_empty()).then(|| self.id(input)));
        }
        let mut outputs = Vec::with_capacity(proto.output.len());
        for output in &proto.output {
            outputs.push(if output.is_empty() { None } else { Some(self.define(output, "node output")?) });
        }
        let metadata = metadata(proto.metadata_props);
        self.graph.nodes.push(Node { name, domain, op_type, inputs, outputs, attributes, metadata });
        Ok(())
    }

    /// Checks that every name that nodes or bodies use is defined.
    fn check_uses(&self) -> Result<(), Fault> {
        for node in &self.graph.nodes {
            let undefined = |id: &&ValueId| !self.defined.contains(id);
            let outside = |name: &&str| !self.ids.get(*name).is_some_and(|id| self.defined.contains(id));
            let missing = match node.inputs.iter().flatten().find(undefined) {
                Some(id) => Some(self.graph.value(*id).name.as_str()),
                None => scope::bodies(node).find_map(|body| scope::captured(body).into_iter().find(outside)),
            };
            if let Some(name) = missing {
                let node = if node.name.is_empty() { &node.op_type } else { &node.name };
                return malformed(format!("node {node:?} uses {name:?}, which is not defined"));
            }
        }
        Ok(())
    }

    /// Exporters store tensors of equal value once and turn the others into `Identity` nodes of it. They are
    /// different tensors of the model, and a refit may give them different values. So each becomes an initializer of
    /// its own again (the data stays shared).
    fn undo_merging(&mut self) {
        let (stored, graph) = (&mut self.stored, &mut self.graph);
        let outputs: HashSet<ValueId> = graph.outputs.iter().copied().collect();
        let mut taken = Vec::new();
        graph.nodes.retain(|node| {
            let (Some(input), Some(output)) = (node.input(0), node.output(0)) else { return true };
            let is_identity = node.domain.is_empty() && node.op_type == "Identity";
            match stored.get(&input).filter(|_| is_identity && !outputs.contains(&output)).cloned() {
                Some(tensor) => {
                    stored.insert(output, tensor);
                    taken.push((output, input));
                    false
                }
                None => true,
            }
        });
        for (output, input) in taken {
            let Value { dtype, shape, .. } = graph.value(input).clone();
            let value = graph.value_mut(output);
            (value.dtype, value.shape) = (dtype, shape);
        }
    }

    /// Decides which stored tensors are weights, and locates their data.
    fn place_tensors(self, external: &mut ExternalFiles<'_>) -> Result<Graph, GraphError> {
        /// Constants are hashed, compared and copied. In known models, they take a few megabytes.
        const MOST: usize = 1 << 30;
        let Import { mut graph, stored, .. } = self;
        let mut constants = 0;
        let as_value = roles::values_used(&graph);
        for (id, (tensor, origin)) in stored {
            let name = &graph.value(id).name;
            let outside = matches!(tensor.source, Source::External(_));
            let role = match roles::role(id, &tensor, origin, &as_value) {
                _ if outside && external.stripped() => Role::Weight,
                role => role,
            };
            let bytes = tensor.bytes();
            if role == Role::Constant && outside {
                constants = bytes.saturating_add(constants);
                if constants > MOST {
                    let reason = format!("integers that belong to the graph take more than {MOST} bytes");
                    return Err(GraphError::ExternalData { tensor: name.clone(), reason });
                }
            }
            let Stored { dtype, shape, source } = tensor;
            let initializer = match (role, source) {
                (Role::Weight, Source::Inline(data)) => {
                    Initializer::Weight(WeightRef { dtype, shape, data: WeightData::Inline(data) })
                }
                (Role::Weight, Source::External(at)) => {
                    Initializer::Weight(WeightRef { dtype, shape, data: external.weight(name, &at, bytes)? })
                }
                (Role::Constant, Source::Inline(data)) => {
                    Initializer::Constant(Tensor::new(dtype, shape, data)?)
                }
                (Role::Constant, Source::External(at)) => {
                    Initializer::Constant(Tensor::new(dtype, shape, external.constant(name, &at, bytes)?)?)
                }
            };
            graph.initializers.insert(id, initializer);
        }
        Ok(graph)
    }
}

/// The tensor of a `Constant` node; `None` if it holds strings or a sparse tensor.
fn constant(node: &NodeProto) -> Result<Option<Stored>, Fault> {
    let [attribute] = &*node.attribute else {
        return malformed(format!("it has {} attributes instead of one", node.attribute.len()));
    };
    let tensor = match attribute.name() {
        "value" => {
            let Some(tensor) = &attribute.t else { return malformed("its value is not a tensor".into()) };
            return match tensors::read(tensor) {
                Ok(stored) => Ok(Some(stored)),
                Err(Fault::Unsupported(_)) => Ok(None),
                Err(fault) => Err(fault),
            };
        }
        "value_int" => Tensor::scalar(attribute.i.unwrap_or_default()),
        "value_ints" => Tensor::from_i64s(&attribute.ints),
        "value_float" => Tensor::scalar(attribute.f.unwrap_or_default()),
        "value_floats" => Tensor::from_elements(vec![attribute.floats.len()], &attribute.floats)
            .map_err(|e| Fault::Malformed(e.to_string()))?,
        "value_string" | "value_strings" | "sparse_value" => return Ok(None),
        other => return malformed(format!("it has an unknown attribute {other:?}")),
    };
    let source = Source::Inline(tensor.data().clone());
    Ok(Some(Stored { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), source }))
}

fn metadata(entries: Vec<StringStringEntryProto>) -> BTreeMap<String, String> {
    entries.into_iter().map(|e| (e.key.unwrap_or_default(), e.value.unwrap_or_default())).collect()
}
