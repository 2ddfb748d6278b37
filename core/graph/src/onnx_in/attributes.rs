//! Reads attributes from their messages.

use super::tensors::{self, Fault, Source, Stored};
use crate::{
    Attribute, Tensor,
    proto::{self, AttributeProto, GraphProto, NodeProto, TensorProto, attribute_type as kind},
};
use std::collections::BTreeMap;

/// Reads all attributes of a node. The error names the wrong one.
pub(super) fn read_all(node: &mut NodeProto) -> Result<BTreeMap<String, Attribute>, Fault> {
    let mut attributes = BTreeMap::new();
    for attribute in std::mem::take(&mut node.attribute) {
        let name = attribute.name().to_owned();
        let blame = |reason: String| format!("attribute {name:?}: {reason}");
        let value = read(attribute).map_err(|fault| match fault {
            Fault::Malformed(reason) => Fault::Malformed(blame(reason)),
            Fault::Unsupported(reason) => Fault::Unsupported(blame(reason)),
        })?;
        if attributes.insert(name.clone(), value).is_some() {
            return Err(Fault::Malformed(format!("attribute {name:?} occurs twice")));
        }
    }
    Ok(attributes)
}

fn read(mut attribute: AttributeProto) -> Result<Attribute, Fault> {
    let missing = |what| Fault::Malformed(format!("it must hold a {what} but does not"));
    if !attribute.ref_attr_name().is_empty() {
        return Err(Fault::Malformed("it refers to a function's attribute but is not in a function".into()));
    }
    // A missing number or string has protobuf's default value: some writers omit zeros.
    Ok(match attribute.r#type.unwrap_or(0) {
        kind::INT => Attribute::Int(attribute.i.unwrap_or_default()),
        kind::INTS => Attribute::Ints(attribute.ints),
        kind::FLOAT => Attribute::Float(attribute.f.unwrap_or_default()),
        kind::FLOATS => Attribute::Floats(attribute.floats),
        kind::STRING => Attribute::String(attribute.s.unwrap_or_default().to_vec()),
        kind::STRINGS => Attribute::Strings(attribute.strings.iter().map(|s| s.to_vec()).collect()),
        kind::TENSOR => {
            let tensor = attribute.t.as_ref().ok_or_else(|| missing("tensor"))?;
            match tensors::read(tensor) {
                Ok(Stored { dtype, shape, source: Source::Inline(data) }) => Attribute::Tensor(
                    Tensor::new(dtype, shape, data).map_err(|e| Fault::Malformed(e.to_string()))?,
                ),
                Ok(_) => return Err(refused("a tensor")),
                // Strings, for example: the IR has no tensor type for them, but a consumer may.
                Err(Fault::Unsupported(_)) => return passed_through(attribute),
                Err(fault) => return Err(fault),
            }
        }
        kind::GRAPH => {
            let body = attribute.g.take().ok_or_else(|| missing("graph"))?;
            refuse_external(&body)?;
            Attribute::Graph(body)
        }
        kind::TENSORS
        | kind::GRAPHS
        | kind::SPARSE_TENSOR
        | kind::SPARSE_TENSORS
        | kind::TYPE_PROTO
        | kind::TYPE_PROTOS => return passed_through(attribute),
        0 => return Err(Fault::Malformed("it has no type".into())),
        other => return Err(Fault::Malformed(format!("{other} is not a valid attribute type"))),
    })
}

fn passed_through(mut attribute: AttributeProto) -> Result<Attribute, Fault> {
    refuse_external_in(&attribute)?;
    // A missing name is written as an empty one, and the topology hash sees the difference.
    attribute.name.get_or_insert_default();
    Ok(Attribute::Other(Box::new(attribute)))
}

/// Parts that pass through unchanged must not name other files, because nothing would check them.
fn refuse_external(body: &GraphProto) -> Result<(), Fault> {
    body.initializer.iter().try_for_each(refuse_external_tensor)?;
    let sparse = &body.sparse_initializer;
    sparse.iter().flat_map(|s| [&s.values, &s.indices]).flatten().try_for_each(refuse_external_tensor)?;
    body.node.iter().flat_map(|node| &node.attribute).try_for_each(refuse_external_in)
}

fn refuse_external_in(attribute: &AttributeProto) -> Result<(), Fault> {
    attribute.t.iter().chain(&attribute.tensors).try_for_each(refuse_external_tensor)?;
    let sparse = attribute.sparse_tensor.iter().chain(&attribute.sparse_tensors);
    sparse.flat_map(|s| [&s.values, &s.indices]).flatten().try_for_each(refuse_external_tensor)?;
    attribute.g.iter().map(|g| &**g).chain(&attribute.graphs).try_for_each(refuse_external)
}

fn refuse_external_tensor(tensor: &TensorProto) -> Result<(), Fault> {
    if tensor.data_location == Some(proto::EXTERNAL) || !tensor.external_data.is_empty() {
        return Err(refused(&format!("tensor {:?}", tensor.name())));
    }
    Ok(())
}

fn refused(what: &str) -> Fault {
    Fault::Unsupported(format!("{what} has external data; only initializers and Constant nodes may have it"))
}
