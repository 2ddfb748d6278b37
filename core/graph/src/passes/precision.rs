//! Converts a graph to another precision: changes element types and inserts casts.

mod keep;
mod matching;

use crate::{Attribute, Graph, Initializer, Node, Value, ValueId, WeightData, scope};
use sdrun_abi::DType;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What [`convert_precision`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrecisionReport {
    /// Nodes that compute in the requested type.
    pub converted: usize,
    /// Nodes that stay in f32 because half precision would harm their results.
    pub kept: usize,
    /// Inserted casts.
    pub casts: usize,
}

/// Operators whose element types are fixed by attributes or by other operators. They keep their types.
const FIXED: [&str; 13] = [
    "Bernoulli",
    "CastLike",
    "ConstantOfShape",
    "DequantizeLinear",
    "Dropout",
    "EyeLike",
    "Multinomial",
    "QuantizeLinear",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "StringNormalizer",
];

/// How a node takes part in the conversion.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    /// Floating-point inputs and outputs become this type.
    Computes(DType),
    /// Converts types: any input type, this output type.
    Casts(DType),
    /// Inputs and outputs keep their types.
    Fixed,
}

/// Makes a graph compute in `to` (f32, f16 or bf16). Floating-point values between inputs and outputs become `to`,
/// except those on the keep-list (`precision/keep.rs`). These stay in f32, because half precision would overflow or
/// lose too much: norms, softmax and the products before it, residual streams, embeddings of time and position, and
/// the known weak spots of some model families. Inputs and outputs keep their types; casts are inserted where types
/// meet. Constants are converted; numbers out of f16's range become its largest finite number.
///
/// Weights keep their names but change type: f32 if only kept nodes read them. They lose their values
/// ([`WeightData::Absent`]); the weight source must deliver the new type.
///
/// If the graph already has weights narrower than f32, its exporter chose which nodes compute in f32. Those nodes
/// stay in f32 too.
///
/// Cost compared with plain half precision: residual streams, scores and norm inputs take 4 bytes per element instead
/// of 2. Casts before a norm move to the summands of the stream. Of the matrix products, those of the scores and
/// those on the keep-list run in f32: in T5-XXL `wo` (a fifth of all weights, which double in size), and most of a
/// VAE.
///
/// Types must be inferred ([`infer_shapes`](crate::infer::infer_shapes)); values of unknown type stay unchanged.
pub fn convert_precision(graph: &mut Graph, to: DType) -> PrecisionReport {
    let mut report = PrecisionReport::default();
    let original: Vec<Option<DType>> = graph.values.iter().map(|value| value.dtype).collect();
    let roles = roles(graph, to);
    let pinned = pinned(graph);
    let mut conversion = Conversion { casts: BTreeMap::new(), cast_nodes: Vec::new(), names: names(graph) };
    conversion.initializers(graph, &roles, &pinned);

    let mut nodes = Vec::with_capacity(graph.nodes.len());
    for (mut node, role) in std::mem::take(&mut graph.nodes).into_iter().zip(roles) {
        let floats =
            |ids: &[Option<ValueId>]| ids.iter().flatten().any(|id| is_float(original_of(&original, *id)));
        match role {
            Role::Computes(dtype) if floats(&node.inputs) || floats(&node.outputs) => {
                *(if dtype == to { &mut report.converted } else { &mut report.kept }) += 1;
            }
            _ => {}
        }
        for (position, input) in node.inputs.iter_mut().enumerate() {
            let Some(id) = input else { continue };
            if !is_float(graph.value(*id).dtype) {
                continue;
            }
            let wanted = match role {
                Role::Computes(_) if takes_f32(&node.op_type, position) => Some(DType::F32),
                Role::Computes(dtype) => Some(dtype),
                Role::Casts(_) => None,
                Role::Fixed => original_of(&original, *id),
            };
            if let Some(wanted) = wanted {
                *id = conversion.cast(graph, *id, wanted);
            }
        }
        nodes.append(&mut conversion.cast_nodes);
        let made = match role {
            Role::Computes(dtype) | Role::Casts(dtype) => Some(dtype),
            Role::Fixed => None,
        };
        if let (Role::Casts(dtype), Some(Attribute::Int(to))) = (role, node.attributes.get_mut("to")) {
            *to = dtype as i64;
        }
        let mut restored = Vec::new();
        for output in node.outputs.iter_mut() {
            let (Some(id), Some(dtype)) = (*output, made) else { continue };
            let before = graph.value(id).dtype;
            if !is_float(before) || before == Some(dtype) {
                continue;
            }
            if pinned.contains(&id) {
                // The value keeps its name and type for outside users; a cast produces it.
                let inner = conversion.new_value(graph, id, dtype);
                *output = Some(inner);
                restored.push(cast_node(inner, id, before.unwrap_or(DType::F32)));
                conversion.casts.insert((id, dtype), inner);
            } else {
                graph.value_mut(id).dtype = Some(dtype);
            }
        }
        nodes.push(node);
        nodes.append(&mut restored);
    }
    graph.nodes = nodes;
    report.casts = graph.nodes.iter().filter(|node| node.metadata.contains_key(MADE)).count();
    tracing::debug!(?report, "precision {to}");
    report
}

/// Marks inserted casts.
const MADE: &str = "sdrun.precision";

fn is_float(dtype: Option<DType>) -> bool {
    matches!(dtype, Some(DType::F32 | DType::F16 | DType::BF16))
}

fn original_of(original: &[Option<DType>], id: ValueId) -> Option<DType> {
    original.get(id.0 as usize).copied().flatten()
}

/// Inputs that ONNX defines as f32 whatever the type of the others.
fn takes_f32(op: &str, position: usize) -> bool {
    matches!((op, position), ("Resize", 2) | ("Upsample", 1))
}

fn roles(graph: &Graph, to: DType) -> Vec<Role> {
    let wide = DType::F32;
    let kept = keep::kept(graph, to);
    let exporter_chose = graph.weights().any(|(_, w)| is_float(Some(w.dtype)) && w.dtype != wide);
    let types = |ids: &[Option<ValueId>]| -> BTreeSet<DType> {
        ids.iter().flatten().filter_map(|id| graph.value(*id).dtype).filter(|d| is_float(Some(*d))).collect()
    };
    // A comparison has no floating-point output; its operands determine its precision.
    let computes_wide = |node: &Node| {
        let made = types(&node.outputs);
        if made.is_empty() { types(&node.inputs).contains(&wide) } else { made.contains(&wide) }
    };
    let role = |(node, kept): (&Node, bool)| {
        let cast_to = node.int("to").and_then(|t| DType::from_onnx(t as i32));
        let foreign = !matches!(&*node.domain, "" | "ai.onnx");
        let chosen = exporter_chose && computes_wide(node);
        let dtype = if kept || chosen { wide } else { to };
        match &*node.op_type {
            op if foreign || FIXED.contains(&op) || scope::bodies(node).next().is_some() => Role::Fixed,
            "Cast" if is_float(cast_to) => Role::Casts(dtype),
            "Cast" => Role::Casts(cast_to.unwrap_or(wide)),
            _ => Role::Computes(dtype),
        }
    };
    graph.nodes.iter().zip(kept).map(role).collect()
}

/// Values whose name and type are visible outside: outputs of the graph, and values that bodies capture.
fn pinned(graph: &Graph) -> BTreeSet<ValueId> {
    let mut pinned: BTreeSet<ValueId> = graph.outputs.iter().copied().collect();
    pinned.extend(graph.captures().into_values().flatten());
    pinned
}

fn names(graph: &Graph) -> BTreeSet<String> {
    graph.values.iter().map(|value| value.name.clone()).collect()
}

fn cast_node(from: ValueId, into: ValueId, to: DType) -> Node {
    Node {
        name: String::new(),
        domain: String::new(),
        op_type: "Cast".into(),
        inputs: vec![Some(from)],
        outputs: vec![Some(into)],
        attributes: [("to".to_string(), Attribute::Int(to as i64))].into(),
        metadata: [(MADE.to_string(), to.name().to_string())].into(),
    }
}

struct Conversion {
    /// The same values in other types.
    casts: BTreeMap<(ValueId, DType), ValueId>,
    /// Casts to insert before the current node.
    cast_nodes: Vec<Node>,
    names: BTreeSet<String>,
}

impl Conversion {
    /// Gives each initializer the type that its users want: the narrow type if they differ.
    fn initializers(&mut self, graph: &mut Graph, roles: &[Role], pinned: &BTreeSet<ValueId>) {
        let mut wanted: BTreeMap<ValueId, BTreeSet<Option<DType>>> = BTreeMap::new();
        for (node, role) in graph.nodes.iter().zip(roles) {
            for (position, id) in node.inputs.iter().enumerate() {
                let Some(id) = id.filter(|id| graph.initializers.contains_key(id)) else { continue };
                let dtype = match role {
                    Role::Computes(_) if takes_f32(&node.op_type, position) => Some(DType::F32),
                    Role::Computes(dtype) => Some(*dtype),
                    Role::Casts(_) | Role::Fixed => None,
                };
                wanted.entry(id).or_default().insert(dtype);
            }
        }
        for (id, types) in wanted {
            let Some(dtype) = graph.value(id).dtype.filter(|d| is_float(Some(*d))) else { continue };
            if pinned.contains(&id) || types.contains(&None) {
                continue;
            }
            let narrow = types.iter().flatten().copied().find(|d| *d != DType::F32);
            let new = narrow.unwrap_or(DType::F32);
            let name = graph.value(id).name.clone();
            let Some(initializer) = graph.initializers.get_mut(&id) else { continue };
            let mut wide = None;
            match initializer {
                Initializer::Weight(weight) if new != dtype => {
                    weight.dtype = new;
                    weight.data = WeightData::Absent { location: name, offset: 0 };
                }
                Initializer::Constant(tensor) => {
                    // A constant exists in each requested type, so nothing is rounded twice.
                    wide =
                        types.contains(&Some(DType::F32)).then(|| tensor.to_float_type(DType::F32)).flatten();
                    match tensor.to_float_type(new) {
                        Some(narrower) => *tensor = narrower,
                        None => continue,
                    }
                }
                Initializer::Weight(_) => {}
            }
            graph.value_mut(id).dtype = Some(new);
            if let Some(tensor) = wide.filter(|_| new != DType::F32) {
                let copy = self.new_value(graph, id, DType::F32);
                graph.initializers.insert(copy, Initializer::Constant(tensor));
                self.casts.insert((id, DType::F32), copy);
            }
        }
    }

    /// The value in another type: unchanged, converted earlier, or by a new cast.
    fn cast(&mut self, graph: &mut Graph, id: ValueId, to: DType) -> ValueId {
        if graph.value(id).dtype == Some(to) {
            return id;
        }
        if let Some(known) = self.casts.get(&(id, to)) {
            return *known;
        }
        let copy = self.new_value(graph, id, to);
        self.cast_nodes.push(cast_node(id, copy, to));
        self.casts.insert((id, to), copy);
        copy
    }

    fn new_value(&mut self, graph: &mut Graph, like: ValueId, dtype: DType) -> ValueId {
        let Value { name, shape, .. } = graph.value(like).clone();
        let mut new = format!("{name}/{dtype}");
        while !self.names.insert(new.clone()) {
            new.push('_');
        }
        graph.add_value(Value { name: new, dtype: Some(dtype), shape })
    }
}

#[cfg(test)]
mod tests;
