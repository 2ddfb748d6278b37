//! Decides which stored tensors are refittable weights and which belong to the topology.

use super::tensors::{Source, Stored};
use crate::{Graph, ValueId, proto::TensorProto, recurrent::MICROSOFT};
use sdrun_abi::DType;
use std::collections::{BTreeSet, HashSet};

/// Key of the `metadata_props` entry that preserves a tensor's role when a graph is written and read again.
pub(crate) const ROLE_KEY: &str = "sdrun.role";

/// See [`Initializer`](crate::Initializer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Constant,
    Weight,
}

impl Role {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Role::Constant => "constant",
            Role::Weight => "weight",
        }
    }

    /// The role that the file states, if we wrote it.
    pub(super) fn stated(tensor: &TensorProto) -> Result<Option<Self>, String> {
        let entry = tensor.metadata_props.iter().find(|entry| entry.key() == ROLE_KEY);
        let Some(value) = entry.map(|entry| entry.value()) else { return Ok(None) };
        match [Role::Constant, Role::Weight].into_iter().find(|role| role.name() == value) {
            Some(role) => Ok(Some(role)),
            None => Err(format!("metadata {ROLE_KEY} must be \"constant\" or \"weight\", not {value:?}")),
        }
    }
}

/// Where a stored tensor came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// An initializer with the role that the file states, if any.
    Initializer(Option<Role>),
    /// The attribute of a `Constant` node.
    ConstantNode,
}

/// A `Constant` node with fewer elements is a constant: exporters write literals of the program that way, and real
/// weights as initializers.
const LITERAL_ELEMENTS: usize = 1024;

/// Whether a `Constant` node holds a literal: a small tensor, or one filled with a single element (the ones and
/// zeros of a normalisation without parameters).
pub(super) fn is_literal(stored: &Stored) -> bool {
    let filled = |data: &[u8]| {
        let size = stored.dtype.size();
        data.chunks_exact(size).all(|element| *element == data[..size])
    };
    stored.elements() < LITERAL_ELEMENTS || matches!(&stored.source, Source::Inline(data) if filled(data))
}

/// Whether weights may be of this type: floats, and integers of 8 bits (quantised weights). Wider integers are shapes,
/// indices and quantised biases.
pub(crate) fn is_data(dtype: DType) -> bool {
    dtype.is_float() || matches!(dtype, DType::I8 | DType::U8)
}

/// Whether a tensor of this type and shape can be a weight: it has at least one dimension and more than one element.
pub(crate) fn can_be_weight(dtype: DType, shape: &[usize]) -> bool {
    is_data(dtype) && !shape.contains(&0) && shape.iter().any(|d| *d > 1)
}

/// The role of a stored tensor. `as_value` holds what `values_used` returns.
pub(super) fn role(id: ValueId, stored: &Stored, origin: Origin, as_value: &HashSet<ValueId>) -> Role {
    if !can_be_weight(stored.dtype, &stored.shape) {
        return Role::Constant;
    }
    match origin {
        Origin::Initializer(Some(role)) => role,
        Origin::ConstantNode if is_literal(stored) => Role::Constant,
        Origin::ConstantNode => Role::Weight,
        Origin::Initializer(None) if as_value.contains(&id) => Role::Weight,
        Origin::Initializer(None) => Role::Constant,
    }
}

/// Values whose elements are used as data, and values that are unused.
pub(super) fn values_used(graph: &Graph) -> HashSet<ValueId> {
    let mut settings = BTreeSet::new();
    let mut values: HashSet<ValueId> = graph.outputs.iter().copied().collect();
    values.extend(graph.captures().into_values().flatten());
    for node in &graph.nodes {
        for (slot, id) in node.inputs.iter().enumerate() {
            let Some(id) = *id else { continue };
            if is_setting(&node.domain, &node.op_type, slot) {
                settings.insert(id);
            } else {
                values.insert(id);
            }
        }
    }
    values.extend((0..graph.values.len() as u32).map(ValueId).filter(|id| !settings.contains(id)));
    values
}

/// Whether input `slot` of an operator decides shapes or meaning instead of carrying values. Inputs that are never of a
/// type that weights have are not listed.
pub(super) fn is_setting(domain: &str, op_type: &str, slot: usize) -> bool {
    match (domain, op_type) {
        // roi, scales, sizes
        ("", "Resize") => slot >= 1,
        // scales; constant_value; ratio; on and off value
        ("", "Upsample" | "Dropout") => slot == 1,
        ("", "Pad" | "OneHot") => slot == 2,
        // min, max
        ("", "Clip") => slot >= 1,
        ("", "Range") => true,
        // IoU and score threshold
        ("", "NonMaxSuppression") => slot >= 3,
        // Zero points: compilers look at them.
        ("", "DequantizeLinear" | "QuantizeLinear") => slot == 2,
        ("", "ConvInteger" | "MatMulInteger") => slot >= 2,
        ("", "QLinearConv" | "QLinearMatMul") => matches!(slot, 2 | 5 | 7),
        (MICROSOFT, "DynamicQuantizeMatMul") => slot == 3,
        (MICROSOFT, "MatMulIntegerToFloat") => matches!(slot, 4 | 5),
        (MICROSOFT, "DynamicQuantizeLSTM") => matches!(slot, 9 | 11),
        _ => false,
    }
}
