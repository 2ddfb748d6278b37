//! Stops OpenVINO from losing the width of the tables of rotary embeddings.
//!
//! OpenVINO 2026.4 fuses a rotary embedding into one node. If cosines and sines are half as wide as the rotated part, the node says so, but
//! this is lost when a compiled model is exported or stored in `CACHE_DIR`. After the import, the node reads the second half of each row behind
//! the row. It fuses only results that one Concat joins along the last dimension, so we join them in another way.

use crate::nodes::Rewrite;
use sdrun_abi::DType;
use sdrun_graph::{Dim, Graph, GraphError, Node, Value, ValueId};
use std::collections::HashMap;

/// Spells out `RotaryEmbedding`, and joins the halves of rotary embeddings that are already spelled out differently.
pub(super) fn join_halves_apart(graph: &mut Graph) -> Result<(), GraphError> {
    let mut producers: HashMap<ValueId, (String, Vec<ValueId>)> = HashMap::new();
    for node in std::mem::take(&mut graph.nodes) {
        if let (true, Some(y)) = (node.domain.is_empty(), node.output(0)) {
            let producer = match (node.op_type.as_str(), node.input(0)) {
                // In f32, OpenVINO drops casts between halves and floats before it fuses.
                ("Cast" | "Identity", Some(x)) => producers.get(&x).cloned(),
                (op, _) => Some((op.to_string(), node.inputs.iter().flatten().copied().collect())),
            };
            producers.extend(producer.map(|producer| (y, producer)));
        }
        let Some(y) = node.output(0) else {
            graph.nodes.push(node);
            continue;
        };
        let Value { name, dtype, .. } = graph.value(y).clone();
        let mut parts = Parts { rewrite: Rewrite::new(graph, &node, format!("{name}/rotary")), dtype };
        if node.op_type == "RotaryEmbedding" && node.domain.is_empty() {
            parts.spell_out(&node, y)?;
        } else if let Some((a, b, rank)) = halves(parts.rewrite.graph, &node, &producers) {
            let joined = parts.join(a, b, -2, rank);
            parts.rewrite.node_into("Identity", &[joined], y);
        } else {
            graph.nodes.push(node);
        }
    }
    Ok(())
}

/// The two halves that a Concat joins, and how many dimensions they have: sums or differences of products, as long as each other.
fn halves(
    graph: &Graph,
    node: &Node,
    producers: &HashMap<ValueId, (String, Vec<ValueId>)>,
) -> Option<(ValueId, ValueId, usize)> {
    let [Some(a), Some(b)] = node.inputs[..] else { return None };
    if node.op_type != "Concat" || !node.domain.is_empty() {
        return None;
    }
    let shape = |id| graph.value(id).shape.as_deref();
    let rank = shape(a)?.len();
    let last = (shape(a)?.last()?, shape(b)?.last()?);
    let equal = matches!(last, (Dim::Known(a), Dim::Known(b)) if a == b);
    let is_last = [-1, rank as i64 - 1].contains(&node.int_or("axis", 0));
    let made_by = |id: ValueId, ops: &[&str]| {
        producers.get(&id).filter(|(op, _)| ops.contains(&op.as_str())).map(|(_, inputs)| inputs)
    };
    let rotated = |id| {
        made_by(id, &["Add", "Sub"])
            .is_some_and(|terms| terms.iter().all(|term| made_by(*term, &["Mul", "Neg"]).is_some()))
    };
    (equal && is_last && rotated(a) && rotated(b)).then_some((a, b, rank))
}

/// Adds the nodes that replace a node.
struct Parts<'a> {
    rewrite: Rewrite<'a>,
    /// The type of all values.
    dtype: Option<DType>,
}

impl Parts<'_> {
    /// See the function body of RotaryEmbedding in the ONNX specification. `x` is `[batch, heads, tokens, size]`, or
    /// `[batch, tokens, heads * size]`; the tables are `[positions, half]` with position ids, else `[batch, tokens, half]`.
    fn spell_out(&mut self, of: &Node, y: ValueId) -> Result<(), GraphError> {
        let name = self.rewrite.graph.value(y).name.clone();
        let wrong = |what: &str| GraphError::Invalid(format!("RotaryEmbedding `{name}` {what}"));
        let input = |at| of.input(at).ok_or_else(|| wrong("lacks an input"));
        let (x, cos, sin) = (input(0)?, input(1)?, input(2)?);
        let rank = self.rewrite.graph.value(x).shape.as_ref().map(Vec::len);
        // The dimension of the heads, which the tables lack.
        let (heads, x) = match rank {
            Some(4) => (1, x),
            Some(3) => (2, self.reshape(x, &[0, 0, of.int_or("num_heads", 0), -1])),
            _ => return Err(wrong("has an input that is not known to have three or four dimensions")),
        };
        let mut table = |table: ValueId| {
            let rows = match of.input(3) {
                Some(ids) => self.node("Gather", &[table, ids]),
                None => table,
            };
            let heads = self.rewrite.ints(&[heads]);
            self.node("Unsqueeze", &[rows, heads])
        };
        let (cos, sin) = (table(cos), table(sin));
        let (rotated, rest) = match of.int_or("rotary_embedding_dim", 0) {
            0 => (x, None),
            size => (self.slice(x, 0, size, 1), Some(self.slice(x, size, i64::MAX, 1))),
        };
        let interleaved = of.int_or("interleaved", 0) != 0;
        let (a, b) = match interleaved {
            true => (self.slice(rotated, 0, i64::MAX, 2), self.slice(rotated, 1, i64::MAX, 2)),
            false => self.split(rotated),
        };
        let (a_cos, b_sin) = (self.node("Mul", &[a, cos]), self.node("Mul", &[b, sin]));
        let (a_sin, b_cos) = (self.node("Mul", &[a, sin]), self.node("Mul", &[b, cos]));
        let (a, b) = (self.node("Sub", &[a_cos, b_sin]), self.node("Add", &[a_sin, b_cos]));
        let mut all = self.join(a, b, if interleaved { -1 } else { -2 }, 4);
        if let Some(rest) = rest {
            all = self.node("Concat", &[all, rest]);
            self.rewrite.set("axis", -1);
        }
        if rank == Some(3) {
            all = self.reshape(all, &[0, 0, -1]);
        }
        self.rewrite.node_into("Identity", &[all], y);
        Ok(())
    }

    /// Joins two parts with `rank` dimensions along the last one: one after the other if `axis` is -2, element by element if it is -1.
    fn join(&mut self, a: ValueId, b: ValueId, axis: i64, rank: usize) -> ValueId {
        let mut apart = vec![0; rank - 1];
        apart.extend(if axis == -2 { [1, -1] } else { [-1, 1] });
        let (a, b) = (self.reshape(a, &apart), self.reshape(b, &apart));
        let both = self.node("Concat", &[a, b]);
        self.rewrite.set("axis", axis);
        let mut sizes = vec![0; rank];
        sizes[rank - 1] = -1;
        self.reshape(both, &sizes)
    }

    fn split(&mut self, x: ValueId) -> (ValueId, ValueId) {
        let a = self.node("Split", &[x]);
        self.rewrite.set("axis", -1);
        self.rewrite.set("num_outputs", 2);
        let b = self.rewrite.value(self.dtype, None);
        if let Some(node) = self.rewrite.graph.nodes.last_mut() {
            node.outputs.push(Some(b));
        }
        (a, b)
    }

    fn slice(&mut self, x: ValueId, start: i64, end: i64, step: i64) -> ValueId {
        let [start, end, axis, step] = [start, end, -1, step].map(|value| self.rewrite.ints(&[value]));
        self.node("Slice", &[x, start, end, axis, step])
    }

    fn reshape(&mut self, x: ValueId, sizes: &[i64]) -> ValueId {
        let sizes = self.rewrite.ints(sizes);
        self.node("Reshape", &[x, sizes])
    }

    fn node(&mut self, op: &str, inputs: &[ValueId]) -> ValueId {
        self.rewrite.node(op, inputs, self.dtype, None)
    }
}
