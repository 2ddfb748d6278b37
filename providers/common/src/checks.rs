//! Checks values for runtimes that do not: an index out of range makes them return bytes of other data, or crash. OpenVINO also computes
//! integers in 32 bits, and turns NaN into numbers.

use crate::{graph_error, nodes::Rewrite};
use sdrun_abi::{DType, Error, Hint, Input as Given, Result, TensorSpec, TensorView};
use sdrun_graph::{Body, Dim, Graph, Node, Tensor, Value, ValueId};
use serde::{Deserialize, Serialize};
use std::{collections::HashMap, ops::Range};

/// What to check in each run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checks {
    inputs: Vec<Input>,
    /// Indices that the graph computes, in the order of their outputs.
    computed: Vec<Computed>,
    /// Numbers and names of inputs that must fit into 32 bits.
    #[serde(default)]
    narrow: Vec<(usize, String)>,
    /// Numbers and names of inputs that must not contain NaN.
    #[serde(default)]
    numbers: Vec<(usize, String)>,
}

/// An input of the graph with indices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Input {
    number: usize,
    name: String,
    used: Use,
}

/// An output that counts wrong indices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Computed {
    output: String,
    used: Use,
}

/// A node that takes indices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Use {
    node: String,
    /// The indices of position `i` refer to a dimension of this size, `sizes[i % sizes.len()]`. `None` if they are known only in a run.
    sizes: Option<Vec<i64>>,
}

/// Finds what to check. Clamps the indices that the graph computes, and adds an output for each node that takes them, which counts those
/// that were out of range. `openvino` says that the runtime is OpenVINO.
///
/// # Errors
/// `InvalidArgument` for constants that are out of range; `Unimplemented` for indices that cannot be checked: in loops and branches,
/// computed ones and those into dimensions of unknown size; in GatherND and ScatterND, those into an unknown number of dimensions.
pub fn prepare(graph: &mut Graph, openvino: bool) -> Result<Checks> {
    let same = same(graph);
    let mut checks = Checks::default();
    if openvino {
        let named = |wanted: &dyn Fn(DType) -> bool| {
            let inputs = graph.inputs.iter().map(|id| graph.value(*id)).enumerate();
            let wanted = inputs.filter(|(_, value)| value.dtype.is_some_and(wanted));
            wanted.map(|(number, value)| (number, value.name.clone())).collect()
        };
        checks.narrow = named(&|dtype| matches!(dtype, DType::I64 | DType::U64));
        checks.numbers = if loses_nan(graph) { named(&DType::is_float) } else { Vec::new() };
    }
    for mut node in std::mem::take(&mut graph.nodes) {
        let number = |id| graph.inputs.iter().position(|input| *input == origin(&same, id));
        for body in graph.bodies(&node) {
            inside(&body, &number, &mut checks.inputs)?;
        }
        if let Some(indices) = indices(&node) {
            let (from, used) = (origin(&same, indices), Use::of(graph, &node, indices));
            if !used.is_checked(graph, from, number(indices), &mut checks.inputs)? {
                let (safe, count) = contain(graph, &node, indices, &used)?;
                node.inputs[1] = Some(safe);
                graph.outputs.push(count);
                checks.computed.push(Computed { output: graph.value(count).name.clone(), used });
            }
        }
        graph.nodes.push(node);
    }
    Ok(checks)
}

/// Finds the inputs to check, and leaves the graph as it is. It skips indices that the graph computes, indices into dimensions of unknown
/// size, and loops and branches.
///
/// # Errors
/// `InvalidArgument` for constants that are out of range.
pub fn of_inputs(graph: &Graph) -> Result<Checks> {
    let same = same(graph);
    let mut checks = Checks::default();
    for node in &graph.nodes {
        let Some(indices) = indices(node) else { continue };
        let (from, used) = (origin(&same, indices), Use::of(graph, node, indices));
        let number = graph.inputs.iter().position(|input| *input == from);
        used.is_checked(graph, from, number, &mut checks.inputs)?;
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
        let (from, used) = (origin(&same, indices), Use::of(graph, node, indices));
        if !used.is_checked(graph, from, number(indices), found)? {
            return Err(Error::unsupported(format!(
                "{} `{}` in a loop or branch takes indices that cannot be checked there: the model computes them or the number of \
                 elements",
                node.op_type, node.name
            )));
        }
    }
    Ok(())
}

/// Whether a graph has operators for which OpenVINO 2026.4 returns numbers where an input is NaN.
fn loses_nan(graph: &Graph) -> bool {
    const LOSE: [&str; 12] = [
        "Celu",
        "Clip",
        "Exp",
        "Greater",
        "HardSigmoid",
        "LogSoftmax",
        "Max",
        "Min",
        "ReduceMax",
        "ReduceMin",
        "Relu",
        "Softmax",
    ];
    let loses = |node: &Node| {
        LOSE.contains(&node.op_type.as_str()) || graph.bodies(node).any(|body| loses_nan(&body.graph))
    };
    graph.nodes.iter().any(loses)
}

/// Whether a tensor contains NaN.
fn has_nan(tensor: &TensorView<'_>) -> bool {
    // A fold without early return, so that the compiler vectorises it.
    fn any<const N: usize>(bytes: &[u8], is_nan: impl Fn([u8; N]) -> bool) -> bool {
        bytes.as_chunks::<N>().0.iter().fold(false, |found, value| found | is_nan(*value))
    }
    match tensor.dtype {
        DType::F64 => any(tensor.data, |value| f64::from_le_bytes(value).is_nan()),
        DType::F32 => any(tensor.data, |value| f32::from_le_bytes(value).is_nan()),
        DType::F16 => any(tensor.data, |value| u16::from_le_bytes(value) & 0x7fff > 0x7c00),
        DType::BF16 => any(tensor.data, |value| u16::from_le_bytes(value) & 0x7fff > 0x7f80),
        _ => false,
    }
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
fn contain(graph: &mut Graph, node: &Node, indices: ValueId, used: &Use) -> Result<(ValueId, ValueId)> {
    let name = format!("{PREFIX}/{}/", graph.outputs.len());
    let Value { dtype, shape, .. } = graph.value(indices).clone();
    let dims = dims(graph, node, indices);
    let mut rewrite = Rewrite::new(graph, node, name);
    let (last, first) = if let Some(sizes) = &used.sizes {
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
            };
            Ok::<_, Error>(rewrite.constant(limits.map_err(graph_error)?))
        };
        (limits(|size| size - 1)?, limits(|size| -size)?)
    } else {
        let (data, dims) = node.input(0).zip(dims).ok_or_else(|| {
            let what = format!("{} takes indices into an unknown number of dimensions", used.node);
            Error::unsupported(what)
        })?;
        computed_limits(&mut rewrite, data, &dims, dtype)
    };
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

/// Adds nodes that compute the largest and the smallest index into dimensions of `data`.
fn computed_limits(
    rewrite: &mut Rewrite<'_>,
    data: ValueId,
    dims: &Dims,
    dtype: Option<DType>,
) -> (ValueId, ValueId) {
    let i64 = Some(DType::I64);
    let shape = rewrite.node("Shape", &[data], i64, Some(vec![Dim::Unknown]));
    let (places, of_places) = match dims {
        Dims::One(at) => (rewrite.constant(Tensor::scalar(*at)), vec![]),
        Dims::Several(range) => {
            let places: Vec<i64> = range.clone().collect();
            (rewrite.ints(&places), vec![Dim::Known(places.len())])
        }
    };
    let mut sizes = rewrite.node("Gather", &[shape, places], i64, Some(of_places.clone()));
    if dtype == Some(DType::I32) {
        sizes = rewrite.node("Cast", &[sizes], dtype, Some(of_places.clone()));
        rewrite.set("to", i64::from(DType::I32 as i32));
    }
    let first = rewrite.node("Neg", &[sizes], dtype, Some(of_places.clone()));
    let one = match dtype {
        Some(DType::I32) => rewrite.constant(Tensor::scalar(1i32)),
        _ => rewrite.constant(Tensor::scalar(1i64)),
    };
    (rewrite.node("Sub", &[sizes, one], dtype, Some(of_places)), first)
}

/// Which dimensions of the data indices refer to.
enum Dims {
    /// All to this one, counted from the end if it is negative.
    One(i64),
    /// The last dimension of the indices has one for each of these.
    Several(Range<i64>),
}

/// `None` if that is not known.
fn dims(graph: &Graph, node: &Node, indices: ValueId) -> Option<Dims> {
    Some(match node.op_type.as_str() {
        "GatherND" | "ScatterND" => {
            let columns = graph.value(indices).shape.as_ref()?.last()?.known()? as i64;
            let first = node.int_or("batch_dims", 0);
            Dims::Several(first..first.checked_add(columns)?)
        }
        _ => Dims::One(node.int_or("axis", 0)),
    })
}

impl Use {
    /// What the indices of `node` refer to.
    fn of(graph: &Graph, node: &Node, indices: ValueId) -> Self {
        let sizes = || {
            let shape = graph.value(node.input(0)?).shape.as_ref()?;
            let size = |at: i64| {
                let at = if at < 0 { at + shape.len() as i64 } else { at };
                Some(shape.get(usize::try_from(at).ok()?)?.known()? as i64)
            };
            match dims(graph, node, indices)? {
                Dims::One(at) => Some(vec![size(at)?]),
                Dims::Several(range) => range.map(size).collect(),
            }
        };
        Use { node: format!("{} `{}`", node.op_type, node.name), sizes: sizes() }
    }

    /// Whether the indices, which come from `from`, can be checked. A constant is checked at once. An input of the graph, which has this
    /// `number`, is added to `found`.
    ///
    /// # Errors
    /// `InvalidArgument` if an index in a constant is out of range.
    fn is_checked(
        &self,
        graph: &Graph,
        from: ValueId,
        number: Option<usize>,
        found: &mut Vec<Input>,
    ) -> Result<bool> {
        let name = &graph.value(from).name;
        if self.sizes.is_none() {
            return Ok(false);
        }
        if let Some(number) = number {
            found.push(Input { number, name: name.clone(), used: self.clone() });
            return Ok(true);
        }
        let Some(constant) = graph.constant(from) else { return Ok(false) };
        self.check(constant.to_i64s().unwrap_or_default().into_iter())
            .map_err(|wrong| Error::invalid(format!("the constant `{name}` has {wrong}")))?;
        Ok(true)
    }

    /// Fails with the first index that is out of range.
    fn check(&self, indices: impl Iterator<Item = i64>) -> Result<(), String> {
        let Some(sizes) = &self.sizes else { return Ok(()) };
        let wrong = indices.enumerate().find_map(|(at, index)| {
            let size = sizes[at % sizes.len()];
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
    /// `InvalidArgument` with the first integer that is out of range, and for NaN.
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
        let nan =
            self.numbers.iter().find(|(number, _)| inputs.get(*number).is_some_and(|tensor| has_nan(tensor)));
        if let Some((_, name)) = nan {
            let what = format!("input `{name}` has NaN, which this runtime would turn into numbers");
            return Err(Error::invalid(what).with_hint(Hint::UseProvider(None)));
        }
        Ok(())
    }

    /// As [`inputs`](Self::inputs), but some inputs may be on a device. It copies those that it has to read.
    ///
    /// # Errors
    /// As [`inputs`](Self::inputs); errors of the device.
    pub fn inputs_anywhere(&self, inputs: &[Given<'_>]) -> Result<()> {
        let mut copies = Vec::new();
        for (number, input) in inputs.iter().enumerate() {
            let mut copy = Vec::new();
            if let (Given::Device(tensor), true) = (input, self.read_input(number)) {
                let spec = tensor.spec();
                copy = vec![0; spec.dtype.bytes_of(&spec.shape).unwrap_or(0)];
                tensor.read(&mut copy)?;
            }
            copies.push(copy);
        }
        let views: Vec<TensorView<'_>> = inputs
            .iter()
            .zip(&copies)
            .map(|(input, copy)| match *input {
                Given::Host(view) => view,
                Given::Device(tensor) => {
                    let spec = tensor.spec();
                    TensorView { dtype: spec.dtype, shape: &spec.shape, data: copy }
                }
            })
            .collect();
        self.inputs(&views)
    }

    /// Whether [`Checks::inputs`] reads the values of this input.
    fn read_input(&self, number: usize) -> bool {
        self.inputs.iter().any(|input| input.number == number)
            || self.narrow.iter().chain(&self.numbers).any(|(at, _)| *at == number)
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
        let sizes: Vec<String> = sizes.iter().flatten().map(i64::to_string).collect();
        let sizes = if sizes.is_empty() { String::new() } else { sizes.join(" x ") + " " };
        Err(Error::invalid(format!(
            "with these inputs, the model computes {count} indices for {node} that are not in the range of its {sizes}elements"
        )))
    }
}
