//! Checks indices for runtimes that do not: an index out of range makes them return bytes of other data, or crash.

use crate::{
    graph_error,
    nodes::{new_constant, new_node},
};
use sdrun_abi::{DType, Error, Result, TensorSpec, TensorView};
use sdrun_graph::{Attribute, Dim, Graph, GraphError, Node, Tensor, Value, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// What to check in each run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Checks {
    inputs: Vec<Input>,
    /// Indices that the graph computes, in the order of their outputs.
    computed: Vec<Computed>,
}

/// An input of the graph with indices.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Input {
    number: usize,
    name: String,
    used: Use,
}

/// An output that counts wrong indices.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Computed {
    output: String,
    used: Use,
}

/// A node that takes indices.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Use {
    node: String,
    /// The indices of position `i` refer to a dimension of this size, `sizes[i % sizes.len()]`.
    sizes: Vec<i64>,
}

/// Finds what to check. Clamps the indices that the graph computes, and adds an output for each node that takes them, which counts those
/// that were out of range.
///
/// It skips nodes inside loops and branches, indices into dimensions of unknown size, and computed indices whose shape is unknown, with
/// which OpenVINO 2026.4 returns outputs without a shape.
///
/// # Errors
/// `InvalidArgument` for constants that are out of range.
pub fn prepare(graph: &mut Graph) -> Result<Checks> {
    let same = same(graph);
    let mut checks = Checks::default();
    for mut node in std::mem::take(&mut graph.nodes) {
        if let (Some(used), Some(indices)) = (Use::of(graph, &node), node.input(1)) {
            let mut origin = indices;
            while let Some(from) = same.get(&origin) {
                origin = *from;
            }
            let name = &graph.value(origin).name;
            if let Some(number) = graph.inputs.iter().position(|id| *id == origin) {
                checks.inputs.push(Input { number, name: name.clone(), used });
            } else if let Some(constant) = graph.constant(origin) {
                used.check(constant.to_i64s().unwrap_or_default().into_iter())
                    .map_err(|wrong| Error::invalid(format!("the constant `{name}` has {wrong}")))?;
            } else if graph.value(indices).known_shape().is_some() {
                let (safe, count) = contain(graph, &node, indices, &used.sizes).map_err(graph_error)?;
                node.inputs[1] = Some(safe);
                graph.outputs.push(count);
                checks.computed.push(Computed { output: graph.value(count).name.clone(), used });
            }
        }
        graph.nodes.push(node);
    }
    Ok(checks)
}

/// Where values come from that have the numbers of another integer tensor in the same order.
fn same(graph: &Graph) -> HashMap<ValueId, ValueId> {
    const SAME: [&str; 6] = ["Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"];
    let of = |node: &Node| {
        let (from, to) = (node.input(0)?, node.output(0)?);
        let known = node.domain.is_empty() && SAME.contains(&node.op_type.as_str());
        (known && [from, to].into_iter().all(|id| is_integer(graph, id))).then_some((to, from))
    };
    graph.nodes.iter().filter_map(of).collect()
}

fn is_integer(graph: &Graph, id: ValueId) -> bool {
    matches!(graph.value(id).dtype, Some(DType::I64 | DType::I32))
}

/// Starts the names of values that [`prepare`] adds.
const PREFIX: &str = "sdrun/indices";

/// Adds nodes before `node` that clamp its indices, and others that count those that were out of range. Returns the clamped indices and the
/// count.
fn contain(
    graph: &mut Graph,
    node: &Node,
    indices: ValueId,
    sizes: &[i64],
) -> Result<(ValueId, ValueId), GraphError> {
    let start = format!("{PREFIX}/{}", graph.outputs.len());
    let name = |part: &str| format!("{start}/{part}");
    let Value { dtype, shape, .. } = graph.value(indices).clone();
    let mut limits = |part: &str, limit: fn(i64) -> i64| {
        let shape = if sizes.len() == 1 { vec![] } else { vec![sizes.len()] };
        let limits = sizes.iter().map(|size| limit(*size));
        let limits = match dtype {
            // No i32 exceeds a larger size.
            Some(DType::I32) => {
                let narrow = |limit: i64| limit.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
                Tensor::from_elements(shape, &limits.map(narrow).collect::<Vec<_>>())
            }
            _ => Tensor::from_elements(shape, &limits.collect::<Vec<_>>()),
        }?;
        Ok::<_, GraphError>(new_constant(graph, name(part), limits))
    };
    let (last, first) = (limits("last", |size| size - 1)?, limits("first", |size| -size)?);
    let flat = new_constant(graph, name("flat"), Tensor::from_i64s(&[-1]));
    let mut add = |op: &str, inputs: &[ValueId], attribute: Option<(&str, i64)>, dtype, shape| {
        let value = graph.add_value(Value { name: name(op), dtype, shape });
        let mut new = new_node(node, name(op), op, inputs, value);
        new.attributes.extend(attribute.map(|(name, value)| (name.to_string(), Attribute::Int(value))));
        graph.nodes.push(new);
        value
    };
    let (bool, i32) = (Some(DType::Bool), Some(DType::I32));
    let below = add("Min", &[indices, last], None, dtype, shape.clone());
    let safe = add("Max", &[below, first], None, dtype, shape.clone());
    let inside = add("Equal", &[safe, indices], None, bool, shape.clone());
    let outside = add("Not", &[inside], None, bool, shape.clone());
    let ones = add("Cast", &[outside], Some(("to", i64::from(DType::I32 as i32))), i32, shape);
    // OpenVINO cannot infer the shape of a sum over an unknown number of dimensions.
    let ones = add("Reshape", &[ones, flat], None, i32, Some(vec![Dim::Unknown]));
    let count = add("ReduceSum", &[ones], Some(("keepdims", 0)), i32, Some(vec![]));
    Ok((safe, count))
}

impl Use {
    /// What the indices of `node` refer to, if it takes integers as indices.
    fn of(graph: &Graph, node: &Node) -> Option<Self> {
        let indices = node.input(1).filter(|id| node.domain.is_empty() && is_integer(graph, *id))?;
        let dims = graph.value(node.input(0)?).shape.as_ref()?;
        let size = |at: usize| Some(dims.get(at)?.known()? as i64);
        let sizes: Vec<i64> = match node.op_type.as_str() {
            "Gather" | "GatherElements" | "ScatterElements" => {
                let axis = node.int_or("axis", 0);
                let axis = if axis < 0 { axis + dims.len() as i64 } else { axis };
                vec![size(usize::try_from(axis).ok()?)?]
            }
            "GatherND" | "ScatterND" => {
                let columns = graph.value(indices).shape.as_ref()?.last()?.known()?;
                let first = usize::try_from(node.int_or("batch_dims", 0)).ok()?;
                (first..first + columns).map(size).collect::<Option<_>>()?
            }
            _ => return None,
        };
        let node = format!("{} `{}`", node.op_type, node.name);
        (!sizes.is_empty()).then_some(Use { node, sizes })
    }

    /// Fails with the first index that is out of range.
    fn check(&self, indices: impl Iterator<Item = i64>) -> Result<(), String> {
        let wrong = indices.enumerate().find_map(|(at, index)| {
            let size = self.sizes[at % self.sizes.len()];
            (!(-size..size).contains(&index))
                .then(|| format!("{index} at position {at}, an index of {} into {size} elements", self.node))
        });
        wrong.map_or(Ok(()), Err)
    }
}

impl Checks {
    /// Checks the inputs of a run.
    ///
    /// # Errors
    /// `InvalidArgument` with the first index that is out of range.
    pub fn inputs(&self, inputs: &[TensorView<'_>]) -> Result<()> {
        for Input { number, name, used } in &self.inputs {
            let Some(tensor) = inputs.get(*number) else { continue };
            let data = tensor.data;
            let checked = match tensor.dtype {
                DType::I64 => used.check(data.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes))),
                _ => used.check(data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into())),
            };
            checked.map_err(|wrong| Error::invalid(format!("input `{name}` has {wrong}")))?;
        }
        Ok(())
    }

    /// Whether [`Checks::inputs`] reads the values of this input.
    pub fn read_input(&self, number: usize) -> bool {
        self.inputs.iter().any(|input| input.number == number)
    }

    /// The outputs of the graph, then those that [`prepare`] has added: numbers of indices.
    pub fn with_outputs(&self, outputs: &[TensorSpec]) -> Vec<TensorSpec> {
        let added = self.computed.iter().map(|computed| TensorSpec {
            name: computed.output.clone(),
            dtype: DType::I32,
            shape: vec![],
        });
        outputs.iter().cloned().chain(added).collect()
    }

    /// Buffers for the outputs that [`prepare`] has added.
    pub fn counts(&self) -> Vec<[u8; 4]> {
        vec![[0; 4]; self.computed.len()]
    }

    /// Checks the indices that the graph has computed in a run, by the outputs that [`prepare`] has added.
    ///
    /// # Errors
    /// `InvalidArgument` for the first node with an index that is out of range.
    pub fn computed(&self, counts: &[[u8; 4]]) -> Result<()> {
        let mut wrong = self.computed.iter().zip(counts).filter(|(_, count)| **count != [0; 4]);
        let Some((Computed { used: Use { node, sizes }, .. }, count)) = wrong.next() else { return Ok(()) };
        let count = i32::from_le_bytes(*count);
        let sizes: Vec<String> = sizes.iter().map(i64::to_string).collect();
        Err(Error::invalid(format!(
            "with these inputs, the model computes {count} indices for {node} that are not in the range of its {} elements",
            sizes.join(" x ")
        )))
    }
}
