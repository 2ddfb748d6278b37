//! Bounds the memory that decoding a file takes.
//!
//! A message of two bytes becomes a struct of hundreds, so a small hostile file could exhaust memory. This walks over
//! the wire format first and adds up what the decoder would allocate.

use crate::proto::{
    AttributeProto, Dimension, ElementTypeProto, FunctionProto, GraphProto, MapTypeProto, ModelProto,
    NodeProto, OperatorSetIdProto, SparseTensorProto, StringStringEntryProto, TensorAnnotation, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};

/// Upper bound on the memory for the structure of a model, excluding data stored as raw bytes. It is enough for 300,000 nodes, which take
/// a few seconds and under a gigabyte to read. The largest graphs in use have tens of thousands.
pub(super) const MAX_BYTES: usize = 192 << 20;
/// Deepest nesting of messages that the decoder accepts.
const MAX_DEPTH: usize = 100;

/// The message types that differ in their fields.
#[derive(Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Sparse,
    Function,
    ValueInfo,
    Type,
    TensorType,
    /// Type of the elements of a sequence or optional.
    Element,
    Map,
    Shape,
    /// A message whose fields need no further inspection.
    Leaf(usize),
}

/// What a length-delimited field decodes to.
enum Field {
    Message(Kind),
    /// Packed varints: up to eight bytes in memory per byte in the file.
    Varints,
    /// Strings are copied, bytes are not; both have a header.
    Other,
}

const ENTRY: Kind = Kind::Leaf(size_of::<StringStringEntryProto>());
const OPSET: Kind = Kind::Leaf(size_of::<OperatorSetIdProto>());

impl Kind {
    fn field(self, number: u64) -> Field {
        use Kind::*;
        let kind = match (self, number) {
            (Model, 7) => Graph,
            (Model, 8) | (Function, 9) => OPSET,
            (Model, 14) | (Graph, 16) | (Node, 9) | (Function, 14) | (ValueInfo, 4) => ENTRY,
            (Model, 25) => Function,
            (Graph, 1) | (Function, 7) => Node,
            (Graph, 5) => Tensor,
            (Graph, 15) => Sparse,
            (Graph, 11..=13) | (Function, 12) => ValueInfo,
            (Graph, 14) => Leaf(size_of::<TensorAnnotation>()),
            (Node, 5) | (Function, 11) => Attribute,
            (Attribute, 5 | 10) => Tensor,
            (Attribute, 6 | 11) => Graph,
            (Attribute, 22 | 23) => Sparse,
            (Attribute, 14 | 15) | (ValueInfo, 2) => Type,
            (Type, 1 | 8) => TensorType,
            (Type, 4 | 9) => Element,
            (Type, 5) => Map,
            (Element, 1) | (Map, 2) => Type,
            (TensorType, 2) => Shape,
            (Shape, 1) => Leaf(size_of::<Dimension>()),
            (Sparse, 1 | 2) => Tensor,
            (Tensor, 13 | 16) => ENTRY,
            (Attribute, 8) | (Tensor, 1 | 5 | 7 | 11) | (Sparse, 3) => return Field::Varints,
            _ => return Field::Other,
        };
        Field::Message(kind)
    }

    fn size(self) -> usize {
        match self {
            Kind::Model => size_of::<ModelProto>(),
            Kind::Graph => size_of::<GraphProto>(),
            Kind::Node => size_of::<NodeProto>(),
            Kind::Attribute => size_of::<AttributeProto>(),
            Kind::Tensor => size_of::<TensorProto>(),
            Kind::Sparse => size_of::<SparseTensorProto>(),
            Kind::Function => size_of::<FunctionProto>(),
            Kind::ValueInfo => size_of::<ValueInfoProto>(),
            Kind::Type => size_of::<TypeProto>(),
            Kind::TensorType => size_of::<TensorTypeProto>(),
            Kind::Element => size_of::<ElementTypeProto>(),
            Kind::Map => size_of::<MapTypeProto>(),
            Kind::Shape => size_of::<TensorShapeProto>(),
            Kind::Leaf(size) => size,
        }
    }
}

/// Whether decoding `bytes` as a `ModelProto` stays within the budget. Bytes that are not protobuf pass, because the
/// decoder reports them better.
pub(super) fn bearable(bytes: &[u8]) -> bool {
    let mut left = MAX_BYTES;
    walk(bytes, Kind::Model, 0, &mut left).is_some()
}

/// Returns `None` when the budget is exhausted.
fn walk(mut bytes: &[u8], kind: Kind, depth: usize, left: &mut usize) -> Option<()> {
    while let Some(key) = varint(&mut bytes) {
        let skip = match key & 7 {
            0 => {
                spend(left, 8)?;
                varint(&mut bytes).map(|_| 0)
            }
            1 => Some(8),
            5 => Some(4),
            2 => varint(&mut bytes).and_then(|n| usize::try_from(n).ok()),
            // ONNX uses no groups.
            _ => return Some(()),
        };
        let Some((field, rest)) = skip.and_then(|n| bytes.split_at_checked(n)) else { return Some(()) };
        if key & 7 == 2 {
            match kind.field(key >> 3) {
                // It contains only a few strings and numbers.
                Field::Message(Kind::Leaf(size)) => spend(left, size)?,
                Field::Message(inner) => {
                    spend(left, inner.size())?;
                    if depth < MAX_DEPTH {
                        walk(field, inner, depth + 1, left)?;
                    }
                }
                Field::Varints => spend(left, 8 * field.len())?,
                Field::Other => spend(left, size_of::<String>())?,
            }
        } else {
            spend(left, field.len())?;
        }
        bytes = rest;
    }
    Some(())
}

fn spend(left: &mut usize, bytes: usize) -> Option<()> {
    // Vectors double as they grow.
    *left = left.checked_sub(bytes.saturating_mul(2))?;
    Some(())
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for i in 0..10 {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << (7 * i);
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ExternalBase, Graph,
        testing::{model, ramp},
    };
    use proptest::prelude::*;
    use sdrun_abi::DType;

    /// Nested messages around `inner`, outermost first.
    fn wrapped(mut inner: Vec<u8>, numbers: &[u8]) -> Vec<u8> {
        for number in numbers.iter().rev() {
            let mut outer = vec![number << 3 | 2];
            let mut len = inner.len();
            while len >= 0x80 {
                outer.push(len as u8 | 0x80);
                len >>= 7;
            }
            outer.push(len as u8);
            outer.extend(inner);
            inner = outer;
        }
        inner
    }

    fn costs_at_most(bytes: &[u8], budget: usize) -> bool {
        walk(bytes, Kind::Model, 0, &mut budget.clone()).is_some()
    }

    #[test]
    fn many_empty_messages_are_expensive() {
        const MANY: usize = 10_000;
        let empty = |number: u8| [number << 3 | 2, 0].repeat(MANY);
        for (what, size, bytes) in [
            ("nodes", size_of::<NodeProto>(), wrapped(empty(1), &[7])),
            ("attributes", size_of::<AttributeProto>(), wrapped(empty(5), &[7, 1])),
            ("tensors of a body", size_of::<TensorProto>(), wrapped(empty(5), &[7, 1, 5, 6])),
            ("dimensions", size_of::<Dimension>(), wrapped(empty(1), &[7, 11, 2, 1, 2])),
            ("names", size_of::<String>(), wrapped(empty(1), &[7, 1])),
            ("integers", 8, wrapped(vec![1; MANY], &[7, 1, 5, 8])),
        ] {
            assert!(!costs_at_most(&bytes, size * MANY), "{what}");
            assert!(costs_at_most(&bytes, 2 * size * MANY + 10_000), "{what}");
        }
    }

    #[test]
    fn a_file_that_would_take_more_than_the_limit_is_refused() {
        let attributes = MAX_BYTES / size_of::<AttributeProto>();
        let bytes = wrapped([5 << 3 | 2, 0].repeat(attributes), &[7, 1]);
        assert!(!bearable(&bytes));
        let error = Graph::from_bytes(bytes.into(), "m", ExternalBase::Stripped).unwrap_err().to_string();
        assert!(error.contains("more than 192 MB"), "{error}");
    }

    #[test]
    fn weights_cost_nothing() {
        let big = model(17).input("x", DType::F32, "n").initializer("w", &ramp(&[1 << 20])).bytes();
        assert!(costs_at_most(&big, 10_000));
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            bearable(&bytes);
        }
    }
}
