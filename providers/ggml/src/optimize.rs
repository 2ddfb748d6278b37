//! The passes that run before a graph is translated.

use half::{bf16, f16};
use sdrun_abi::DType;
use sdrun_graph::{
    Dim, Graph, GraphError, Initializer, Node, Tensor, Value, ValueId,
    passes::{self, PassReport},
};
use std::collections::HashMap;

/// Simplifies the graph and fuses operators that our kernels, or ggml's on a device, compute as one. Each fused operator has an entry in
/// the operator table. Types and shapes must be inferred; sizes may be open. On devices, images keep their channels first, as ggml's
/// convolutions require, and rotary embeddings stay as they are.
pub(crate) fn optimize(graph: &mut Graph, for_device: bool) -> Result<Vec<PassReport>, GraphError> {
    let mut names = passes::ALL.to_vec();
    names.retain(|name| !for_device || !["channels_last", "fuse_rotary"].contains(name));
    let reports = passes::optimize(graph, &names)?;
    drop_overflow_guards(graph);
    Ok(reports)
}

/// Removes checks for infinity. T5 in half precision clamps values to the largest f16 or bf16, or slightly below if one of them is
/// infinite. Here the values are f32 and do not become infinite, so the check is superfluous.
fn drop_overflow_guards(graph: &mut Graph) -> usize {
    let mut guards = Vec::new();
    {
        let search = Search::new(graph);
        for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| is(node, "Clip")) {
            if let Some((dtype, bounds)) = search.guard(node) {
                guards.push((index, dtype, bounds));
            }
        }
    }
    let count = guards.len();
    for (index, dtype, bounds) in guards {
        for (slot, bound) in bounds.into_iter().enumerate() {
            let value = match dtype {
                DType::F16 => Tensor::scalar(f16::from_f32(bound)),
                _ => Tensor::scalar(bf16::from_f32(bound)),
            };
            let name = format!("ggml/{index}/{slot}");
            let id = graph.add_value(Value { name, dtype: Some(dtype), shape: Some(Vec::<Dim>::new()) });
            graph.initializers.insert(id, Initializer::Constant(value));
            graph.nodes[index].inputs[slot + 1] = Some(id);
        }
    }
    if count > 0 {
        passes::eliminate_dead(graph);
    }
    count
}

fn is(node: &Node, op: &str) -> bool {
    node.op_type == op && node.domain.is_empty()
}

struct Search<'g> {
    graph: &'g Graph,
    producers: HashMap<ValueId, usize>,
}

impl<'g> Search<'g> {
    fn new(graph: &'g Graph) -> Self {
        let outputs = |(i, node): (usize, &Node)| -> Vec<(ValueId, usize)> {
            node.outputs.iter().flatten().map(|id| (*id, i)).collect()
        };
        Search { graph, producers: graph.nodes.iter().enumerate().flat_map(outputs).collect() }
    }
    fn made_by(&self, id: ValueId, op: &str) -> Option<&'g Node> {
        self.producers.get(&id).map(|i| &self.graph.nodes[*i]).filter(|node| is(node, op))
    }
    fn before_casts(&self, mut id: ValueId) -> ValueId {
        while let Some(from) = self.made_by(id, "Cast").and_then(|cast| cast.input(0)) {
            id = from;
        }
        id
    }

    /// For a Clip whose bounds depend on whether its input has infinities: the type, and the bounds for an input without any.
    fn guard(&self, clip: &Node) -> Option<(DType, [f32; 2])> {
        let x = clip.input(0)?;
        let dtype = self.graph.value(x).dtype.filter(|dtype| matches!(dtype, DType::F16 | DType::BF16))?;
        Some((dtype, [self.bound(x, clip.input(1)?)?, self.bound(x, clip.input(2)?)?]))
    }

    fn bound(&self, x: ValueId, id: ValueId) -> Option<f32> {
        let id = self.before_casts(id);
        if let Some(negated) = self.made_by(id, "Neg") {
            return Some(-self.bound(x, negated.input(0)?)?);
        }
        let choice = self.made_by(id, "Where")?;
        let more = self.made_by(choice.input(0)?, "Greater")?;
        let none = self.graph.constant(more.input(1)?)?.to_i64s()? == [0];
        let count = self.made_by(more.input(0)?, "ReduceSum")?;
        let infinite = self.made_by(self.before_casts(count.input(0)?), "IsInf")?;
        let same = self.before_casts(infinite.input(0)?) == self.before_casts(x);
        let finite = self.graph.constant(choice.input(2)?).filter(|c| c.len() == 1)?;
        (none && same).then(|| finite.to_f32s()?.first().copied()).flatten()
    }
}
