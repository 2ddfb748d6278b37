//! Checks indices in inputs. OpenVINO does not: an index out of range makes it return bytes of other data, or crash.

use sdrun_abi::{DType, Error, Result, TensorView};
use sdrun_graph::{Graph, Node, ValueId};
use std::collections::HashMap;

/// The range of an input that a graph uses as indices. Indices that the graph computes are not checked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Indices {
    /// Number of the input.
    input: usize,
    name: String,
    /// The indices of position `i` refer to a dimension of this size, `sizes[i % sizes.len()]`.
    sizes: Vec<i64>,
    /// The node that takes them.
    node: String,
}

/// The inputs of a graph that are indices into dimensions of known size.
pub(crate) fn of(graph: &Graph) -> Vec<Indices> {
    let made: HashMap<ValueId, &Node> = graph
        .nodes
        .iter()
        .flat_map(|node| node.outputs.iter().flatten().map(move |id| (*id, node)))
        .collect();
    let mut found = Vec::new();
    for node in graph.nodes.iter().filter(|node| node.domain.is_empty()) {
        let Some(sizes) = sizes(graph, node).filter(|sizes| !sizes.is_empty()) else { continue };
        let Some(origin) = node.input(1).map(|id| origin(&made, id)) else { continue };
        if let Some(input) = graph.inputs.iter().position(|id| *id == origin) {
            let name = graph.value(origin).name.clone();
            found.push(Indices { input, name, sizes, node: format!("{} `{}`", node.op_type, node.name) });
        }
    }
    found
}

/// The sizes of the dimensions that the indices of a node refer to.
fn sizes(graph: &Graph, node: &Node) -> Option<Vec<i64>> {
    let dims = graph.value(node.input(0)?).shape.as_ref()?;
    let size = |at: usize| Some(dims.get(at)?.known()? as i64);
    match node.op_type.as_str() {
        "Gather" | "GatherElements" | "ScatterElements" => {
            let axis = node.int_or("axis", 0);
            let axis = if axis < 0 { axis + dims.len() as i64 } else { axis };
            Some(vec![size(usize::try_from(axis).ok()?)?])
        }
        "GatherND" | "ScatterND" => {
            let columns = graph.value(node.input(1)?).shape.as_ref()?.last()?.known()?;
            let first = usize::try_from(node.int_or("batch_dims", 0)).ok()?;
            (first..first + columns).map(size).collect()
        }
        _ => None,
    }
}

/// Where a value comes from, through nodes that change neither the numbers nor their order.
fn origin(made: &HashMap<ValueId, &Node>, mut id: ValueId) -> ValueId {
    const SAME: [&str; 6] = ["Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"];
    while let Some(from) =
        made.get(&id).filter(|node| SAME.contains(&node.op_type.as_str())).and_then(|n| n.input(0))
    {
        id = from;
    }
    id
}

/// # Errors
/// `InvalidArgument` with the first index that is out of range.
pub(crate) fn check(indices: &[Indices], inputs: &[TensorView<'_>]) -> Result<()> {
    for Indices { input, name, sizes, node } in indices {
        let Some(tensor) = inputs.get(*input) else { continue };
        let wrong = |(at, index): (usize, i64)| {
            let size = sizes[at % sizes.len()];
            (!(-size..size).contains(&index)).then_some((at, index, size))
        };
        let found = match tensor.dtype {
            DType::I64 => {
                let all = tensor.data.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
                all.enumerate().find_map(wrong)
            }
            DType::I32 => {
                let all = tensor.data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into());
                all.enumerate().find_map(wrong)
            }
            _ => None,
        };
        if let Some((at, index, size)) = found {
            return Err(Error::invalid(format!(
                "input `{name}` has {index} at position {at}, an index of {node} into {size} elements"
            )));
        }
    }
    Ok(())
}
