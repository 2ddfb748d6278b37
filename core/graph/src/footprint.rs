//! How much memory a graph needs, computed from its shapes alone.

use crate::{Graph, GraphError, Node, ValueId, passes};
use sdrun_abi::{DType, Precision};
use std::collections::{HashMap, HashSet};

/// Bytes that a session of a graph needs at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// All weights, in the precision they are kept in.
    pub weights: u64,
    /// The most that is alive at once while the graph runs, its inputs and outputs included.
    pub activations: u64,
    /// The same if an engine keeps floats in f32 between operators.
    pub wide_activations: u64,
}

/// Operators whose output may overwrite an input: each element depends only on the same element of that input, or on
/// statistics that are computed before.
const IN_PLACE: &[&str] = &[
    "Abs",
    "Add",
    "Celu",
    "Clip",
    "Cos",
    "Div",
    "Elu",
    "Erf",
    "Exp",
    "FastGelu",
    "Gelu",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "InstanceNormalization",
    "LayerNormalization",
    "LeakyRelu",
    "Log",
    "Mish",
    "Mul",
    "Neg",
    "PRelu",
    "Pow",
    "RMSNormalization",
    "Reciprocal",
    "Relu",
    "Sigmoid",
    "Sin",
    "Softmax",
    "Softplus",
    "Sqrt",
    "Sub",
    "Swish",
    "Tanh",
];

/// Operators whose output is their first input under another shape.
const VIEWS: &[&str] = &["Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"];

/// The memory of a bound graph in `precision`; `None` if a shape is open.
///
/// Looks at the graph after the fusion passes, because that is the graph engines run. A value is alive from the node that
/// computes it to its last use. Element-wise operators and normalisations work in place if nothing else uses their input,
/// and reshapes are views. Neither the scratch memory of single operators nor the memory a compiler keeps is counted.
///
/// # Errors
/// Errors of the passes.
pub fn footprint(graph: &Graph, precision: Precision) -> Result<Option<Footprint>, GraphError> {
    let mut fused = graph.clone();
    passes::optimize(&mut fused, passes::ALL)?;
    Ok(count(&fused, precision))
}

/// As [`footprint`], without fusing nodes first.
fn count(graph: &Graph, precision: Precision) -> Option<Footprint> {
    let weights = graph.weights().map(|(_, w)| weight_bytes(w.dtype, &w.shape, precision)).sum();
    let wide_activations = activations(graph, Precision::Fp32)?;
    let activations = match precision {
        Precision::Fp32 => wide_activations,
        _ => activations(graph, precision)?,
    };
    Some(Footprint { weights, activations, wide_activations })
}

/// The most that is alive at once, with floats in `precision`.
fn activations(graph: &Graph, precision: Precision) -> Option<u64> {
    let mut live = Liveness::new(graph, precision);
    for id in &graph.inputs {
        live.make(*id)?;
    }
    for (index, node) in graph.nodes.iter().enumerate() {
        for (position, id) in node.outputs.iter().enumerate() {
            let Some(id) = *id else { continue };
            match live.place_of(node, index, position, id)? {
                Some(input) => live.share(id, input),
                None => live.make(id)?,
            }
        }
        live.free_after(node, index);
    }
    Some(live.peak)
}

struct Liveness<'g> {
    graph: &'g Graph,
    precision: Precision,
    /// The last node that uses each value or any value computed so far in its memory; `usize::MAX` for outputs of the graph.
    last: Vec<usize>,
    /// The value whose memory each value uses.
    root: Vec<ValueId>,
    /// Values that are alive, with their bytes.
    alive: HashMap<ValueId, u64>,
    inputs: HashSet<ValueId>,
    /// What bodies of nodes use.
    captures: HashMap<usize, Vec<ValueId>>,
    now: u64,
    peak: u64,
}

impl<'g> Liveness<'g> {
    fn new(graph: &'g Graph, precision: Precision) -> Self {
        let (mut last, captures) = (vec![0; graph.values.len()], graph.captures());
        for (index, node) in graph.nodes.iter().enumerate() {
            for id in node.inputs.iter().flatten().chain(captures.get(&index).into_iter().flatten()) {
                last[id.0 as usize] = index;
            }
        }
        for id in &graph.outputs {
            last[id.0 as usize] = usize::MAX;
        }
        let root = (0..graph.values.len() as u32).map(ValueId).collect();
        let inputs = graph.inputs.iter().copied().collect();
        Liveness { graph, precision, last, root, alive: HashMap::new(), inputs, captures, now: 0, peak: 0 }
    }

    /// Bytes of a value; `None` if its shape or type is open.
    fn bytes(&self, id: ValueId) -> Option<u64> {
        let value = self.graph.value(id);
        let elements = value.known_shape()?.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64))?;
        elements.checked_mul(element_bytes(value.dtype?, self.precision))
    }

    fn make(&mut self, id: ValueId) -> Option<()> {
        let bytes = self.bytes(id)?;
        self.now = self.now.checked_add(bytes)?;
        self.peak = self.peak.max(self.now);
        self.alive.insert(id, bytes);
        Some(())
    }

    /// Puts a value into the memory of an input of its node.
    fn share(&mut self, id: ValueId, input: ValueId) {
        let root = self.root[input.0 as usize];
        self.root[id.0 as usize] = root;
        let last = self.last[id.0 as usize];
        let of_root = &mut self.last[root.0 as usize];
        *of_root = last.max(*of_root);
    }

    /// The input whose memory output `position` of a node reuses, if any.
    fn place_of(&self, node: &Node, index: usize, position: usize, id: ValueId) -> Option<Option<ValueId>> {
        if position > 0 {
            return Some(None);
        }
        let is = |list: &[&str]| list.contains(&node.op_type.as_str());
        let root = |input: ValueId| self.root[input.0 as usize];
        if is(VIEWS) {
            return Some(node.input(0).filter(|input| self.alive.contains_key(&root(*input))));
        }
        // Fused products and convolutions add their result to the residual in place.
        let inputs: Vec<ValueId> = match () {
            () if is(IN_PLACE) => node.inputs.iter().flatten().copied().collect(),
            () if is(&["FusedConv", "NhwcConv", "FusedMatMul"]) => node.input(3).into_iter().collect(),
            () => Vec::new(),
        };
        let bytes = self.bytes(id)?;
        let fits = |input: &ValueId| {
            self.bytes(*input) == Some(bytes)
                && self.alive.contains_key(&root(*input))
                && self.last[root(*input).0 as usize] == index
                && !self.inputs.contains(&root(*input))
        };
        Some(inputs.into_iter().find(fits))
    }

    /// Lets go of what node `index` uses last, and of its outputs if nobody uses them.
    fn free_after(&mut self, node: &Node, index: usize) {
        let captured = self.captures.get(&index).into_iter().flatten();
        // Inputs of the graph that nobody uses go after the first node.
        let unused = self.graph.inputs.iter().filter(|_| index == 0);
        for id in node.inputs.iter().chain(&node.outputs).flatten().chain(captured).chain(unused) {
            let root = self.root[id.0 as usize];
            if self.last[root.0 as usize] <= index {
                self.now -= self.alive.remove(&root).unwrap_or(0);
            }
        }
    }
}

/// Bytes of an element of an activation.
fn element_bytes(dtype: DType, precision: Precision) -> u64 {
    match dtype {
        // Activations of quantized engines are f32.
        DType::F32 | DType::F16 | DType::BF16 => precision.float_type().unwrap_or(DType::F32).size() as u64,
        other => other.size() as u64,
    }
}

/// Bytes of a weight as an engine keeps it. ggml's `q8_0` takes 34 bytes for 32 elements, its `q4_k` 144 for 256.
fn weight_bytes(dtype: DType, shape: &[usize], precision: Precision) -> u64 {
    let elements = shape.iter().map(|d| *d as u64).product::<u64>();
    match (precision, shape.len()) {
        (Precision::Q8_0, 2..) if dtype.is_float() => elements.div_ceil(32) * 34,
        (Precision::Q4K, 2..) if dtype.is_float() => elements.div_ceil(256) * 144,
        _ => elements * element_bytes(dtype, precision),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        OpenDims, simplify,
        testing::{model, ramp},
    };
    use std::collections::BTreeMap;

    fn bound(model: crate::testing::Model, shape: &[usize]) -> Graph {
        let mut graph = model.graph();
        let shapes = BTreeMap::from([("x".to_string(), shape.to_vec())]);
        simplify(&mut graph, &shapes, OpenDims::Refuse).unwrap();
        graph
    }

    /// x [n, 4] → a = x · w [n, 8] → r = relu(a) → y = r · v [n, 4] → z = y + x.
    fn sample() -> Graph {
        let model = model(17)
            .input("x", DType::F32, "n 4")
            .initializer("w", &ramp(&[4, 8]))
            .initializer("v", &ramp(&[8, 4]))
            .node("MatMul", &["x", "w"], &["a"])
            .node("Relu", &["a"], &["r"])
            .node("MatMul", &["r", "v"], &["y"])
            .node("Sub", &["y", "x"], &["z"])
            .output("z", "n 4");
        bound(model, &[10, 4])
    }

    #[test]
    fn a_hand_made_graph_is_counted_exactly() {
        // Alive at the second product: x (40 elements), r in the place of a (80), y (40). z takes the place of y.
        let expected = |element: u64| Footprint {
            weights: 64 * element,
            activations: 160 * element,
            wide_activations: 160 * 4,
        };
        assert_eq!(count(&sample(), Precision::Fp32), Some(expected(4)));
        assert_eq!(count(&sample(), Precision::Bf16), Some(expected(2)));
        // Each matrix of 32 elements is one block of q8_0, or less than one of q4_k.
        assert_eq!(count(&sample(), Precision::Q8_0).unwrap().weights, 2 * 34);
        assert_eq!(count(&sample(), Precision::Q4K).unwrap().weights, 2 * 144);
        assert_eq!(count(&sample(), Precision::Q8_0).unwrap().activations, 640);
    }

    #[test]
    fn a_value_that_is_used_later_keeps_its_memory() {
        let model = model(17)
            .input("x", DType::F32, "n 4")
            .initializer("w", &ramp(&[4, 4]))
            .node("MatMul", &["x", "w"], &["a"])
            .node("Relu", &["a"], &["r"])
            .node("Mul", &["r", "a"], &["y"])
            .output("y", "n 4");
        // x is dead after the product. a stays in memory together with r, and y reuses the memory of one of them.
        assert_eq!(count(&bound(model, &[2, 4]), Precision::Fp32).unwrap().activations, 2 * 8 * 4);
    }

    #[test]
    fn reshapes_are_views_and_integers_keep_their_size() {
        let model = model(17)
            .input("x", DType::I64, "n 4")
            .initializer("flat", &crate::Tensor::from_elements(vec![1], &[-1i64]).unwrap())
            .node("Reshape", &["x", "flat"], &["v"])
            .node_with("Cast", &["v"], &["y"], [("to", crate::Attribute::Int(1))])
            .output("y", "m");
        // Eight integers and, in addition, as many halves.
        let expected = Footprint { weights: 0, activations: 8 * 8 + 8 * 2, wide_activations: 8 * 8 + 8 * 4 };
        assert_eq!(count(&bound(model, &[2, 4]), Precision::Fp16), Some(expected));
    }

    #[test]
    fn open_shapes_are_unknown() {
        let model = model(17).input("x", DType::F32, "n 4").node("Relu", &["x"], &["y"]).output("y", "n 4");
        assert_eq!(footprint(&model.graph(), Precision::Fp32).unwrap(), None);
    }
}
