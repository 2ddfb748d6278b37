//! Checks integers for runtimes that do not: an index out of range makes them return bytes of other data, or crash, and some compute in 32
//! bits.

use crate::{graph_error, nodes::Rewrite};
use sdrun_abi::{DType, Error, Result, TensorSpec, TensorView};
use sdrun_graph::{Body, Dim, Graph, GraphError, Node, Tensor, Value, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// What to check in each run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Checks {
    inputs: Vec<Input>,
    /// Indices that the graph computes, in the order of their outputs.
    computed: Vec<Computed>,
    /// Numbers and names of inputs that must fit into 32 bits.
    #[serde(default)]
    narrow: Vec<(usize, String)>,
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
/// that were out of range. `narrow` says that the runtime computes integers in 32 bits.
///
/// It skips indices into dimensions of unknown size, and computed indices whose shape is unknown, with which OpenVINO 2026.4 returns
/// outputs without a shape.
///
/// # Errors
/// `InvalidArgument` for constants that are out of range, `Unimplemented` for computed indices in loops and branches.
pub fn prepare(graph: &mut Graph, narrow: bool) -> Result<Checks> {
    let same = same(graph);
    let mut checks = Checks::default();
    for (number, id) in graph.inputs.iter().enumerate() {
        let Value { name, dtype, .. } = graph.value(*id);
        if narrow && matches!(dtype, Some(DType::I64 | DType::U64)) {
            checks.narrow.push((number, name.clone()));
        }
    }
    for mut node in std::mem::take(&mut graph.nodes) {
        let number = |id| graph.inputs.iter().position(|input| *input == origin(&same, id));
        for body in graph.bodies(&node) {
            inside(&body, &number, &mut checks.inputs)?;
        }
        if let (Some(used), Some(indices)) = (Use::of(graph, &node), node.input(1)) {
            if let Some(number) = number(indices) {
                checks.inputs.push(Input {
                    number,
                    name: graph.value(graph.inputs[number]).name.clone(),
                    used,
                });
            } else if !used.check_constant(graph, origin(&same, indices))?
                && graph.value(indices).known_shape().is_some()
            {
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

/// Checks the constants of a loop or branch, and finds the inputs of the graph that it uses as indices. `number` is that of an input of
/// the graph, for a value around the body.
fn inside(body: &Body, number: &dyn Fn(ValueId) -> Option<usize>, found: &mut Vec<Input>) -> Result<()> {
    let graph = &body.graph;
    let same = same(graph);
    let number = |id| {
        let input = graph.inputs.iter().position(|input| *input == origin(&same, id))?;
        number(body.captures[input.checked_sub(body.formal)?])
    };
    for node in &graph.nodes {
        for body in graph.bodies(node) {
            inside(&body, &number, found)?;
        }
        let Some(indices) = indices(node) else { continue };
        let (from, used) = (origin(&same, indices), Use::of(graph, node));
        let checked = match (number(indices), used) {
            (Some(number), Some(used)) => {
                found.push(Input { number, name: graph.value(from).name.clone(), used });
                true
            }
            (Some(_), None) => true,
            (None, Some(used)) => used.check_constant(graph, from)?,
            (None, None) => graph.constant(from).is_some(),
        };
        if !checked {
            return Err(Error::unsupported(format!(
                "{} `{}` in a loop or branch takes indices that the model computes, and they cannot be checked there",
                node.op_type, node.name
            )));
        }
    }
    Ok(())
}

/// Follows [`same`] to the first value.
fn origin(same: &HashMap<ValueId, ValueId>, mut id: ValueId) -> ValueId {
    while let Some(from) = same.get(&id) {
        id = *from;
    }
    id
}

/// The indices that a node takes.
fn indices(node: &Node) -> Option<ValueId> {
    const TAKE: [&str; 5] = ["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"];
    node.input(1).filter(|_| node.domain.is_empty() && TAKE.contains(&node.op_type.as_str()))
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
    let name = format!("{PREFIX}/{}/", graph.outputs.len());
    let Value { dtype, shape, .. } = graph.value(indices).clone();
    let mut rewrite = Rewrite::new(graph, node, name);
    let mut limits = |limit: fn(i64) -> i64| {
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
        Ok::<_, GraphError>(rewrite.constant(limits))
    };
    let (last, first) = (limits(|size| size - 1)?, limits(|size| -size)?);
    let flat = rewrite.ints(&[-1]);
    let (bool, i32) = (Some(DType::Bool), Some(DType::I32));
    let below = rewrite.node("Min", &[indices, last], dtype, shape.clone());
    let safe = rewrite.node("Max", &[below, first], dtype, shape.clone());
    let inside = rewrite.node("Equal", &[safe, indices], bool, shape.clone());
    let outside = rewrite.node("Not", &[inside], bool, shape.clone());
    let ones = rewrite.node("Cast", &[outside], i32, shape);
    rewrite.set("to", i64::from(DType::I32 as i32));
    // OpenVINO cannot infer the shape of a sum over an unknown number of dimensions.
    let ones = rewrite.node("Reshape", &[ones, flat], i32, Some(vec![Dim::Unknown]));
    let count = rewrite.node("ReduceSum", &[ones], i32, Some(vec![]));
    rewrite.set("keepdims", 0);
    Ok((safe, count))
}

impl Use {
    /// What the indices of `node` refer to, if it takes integers as indices.
    fn of(graph: &Graph, node: &Node) -> Option<Self> {
        let indices = indices(node).filter(|id| is_integer(graph, *id))?;
        let dims = graph.value(node.input(0)?).shape.as_ref()?;
        let size = |at: usize| Some(dims.get(at)?.known()? as i64);
        let sizes: Vec<i64> = match node.op_type.as_str() {
            "GatherND" | "ScatterND" => {
                let columns = graph.value(indices).shape.as_ref()?.last()?.known()?;
                let first = usize::try_from(node.int_or("batch_dims", 0)).ok()?;
                (first..first + columns).map(size).collect::<Option<_>>()?
            }
            _ => {
                let axis = node.int_or("axis", 0);
                let axis = if axis < 0 { axis + dims.len() as i64 } else { axis };
                vec![size(usize::try_from(axis).ok()?)?]
            }
        };
        let node = format!("{} `{}`", node.op_type, node.name);
        (!sizes.is_empty()).then_some(Use { node, sizes })
    }

    /// Whether the indices are a constant.
    ///
    /// # Errors
    /// `InvalidArgument` if one is out of range.
    fn check_constant(&self, graph: &Graph, indices: ValueId) -> Result<bool> {
        let Some(constant) = graph.constant(indices) else { return Ok(false) };
        let name = &graph.value(indices).name;
        self.check(constant.to_i64s().unwrap_or_default().into_iter())
            .map_err(|wrong| Error::invalid(format!("the constant `{name}` has {wrong}")))?;
        Ok(true)
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
    /// `InvalidArgument` with the first integer that is out of range.
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
        for (number, name) in &self.narrow {
            let Some(tensor) = inputs.get(*number) else { continue };
            let words = tensor.data.as_chunks::<8>().0.iter();
            let mut values = words.map(|word| match tensor.dtype {
                DType::U64 => i128::from(u64::from_le_bytes(*word)),
                _ => i64::from_le_bytes(*word).into(),
            });
            let wide = values.find(|value| i32::try_from(*value).is_err());
            if let Some(wide) = wide {
                let what =
                    format!("input `{name}` has {wide}, and this runtime computes integers in 32 bits");
                return Err(Error::invalid(what));
            }
        }
        Ok(())
    }

    /// Whether [`Checks::inputs`] reads the values of this input.
    pub fn read_input(&self, number: usize) -> bool {
        self.inputs.iter().any(|input| input.number == number)
            || self.narrow.iter().any(|(at, _)| *at == number)
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
