//! Applies the rules to nodes and graphs, and evaluates small constant subgraphs along the way.

use super::{Ctx, Fact, PartialInt, dims, partial, rules};
use crate::{
    Attribute, Dim, Graph, GraphError, Initializer, Node, OPSETS, Tensor, ValueId, eval, fused,
    recurrent::MICROSOFT,
};
use std::collections::HashMap;

/// Maximum number of elements of a tensor that is carried as a known value.
const VALUE_LIMIT: usize = 4096;

/// Most elementary steps to compute a value during inference: enough for any function of a shape, and a file of a hundred thousand such
/// nodes is still read in seconds.
const WORK_LIMIT: u64 = 1 << 16;

/// Names a node for messages.
pub(crate) fn describe(node: &Node) -> String {
    match node.name.as_str() {
        "" => format!("an unnamed {} node", node.op_type),
        name => format!("node {name:?} ({})", node.op_type),
    }
}

/// Attributes that are 0 or 1. Runtimes differ in how they read other numbers.
const FLAGS: [&str; 28] = [
    "align_corners",
    "allowzero",
    "antialias",
    "ceil_mode",
    "center_point_box",
    "count_include_pad",
    "exclude_outside",
    "exclusive",
    "fmod",
    "input_forget",
    "interleaved",
    "inverse",
    "is_causal",
    "keepdims",
    "largest",
    "layout",
    "linear_before_reset",
    "noop_with_empty_axes",
    "onesided",
    "reverse",
    "saturate",
    "select_last_index",
    "sorted",
    "storage_order",
    "training_mode",
    "transA",
    "transB",
    "upper",
];

/// Applies the rule of the node's operator; `Ok(None)` if the operator has none.
pub(crate) fn outputs_by_rule(ctx: &Ctx) -> Result<Option<Vec<Fact>>, GraphError> {
    let node = ctx.node;
    let rule = match node.domain.as_str() {
        "" | "ai.onnx" if OPSETS.contains(&ctx.opset) => rules::find(&node.op_type),
        MICROSOFT => rules::find_microsoft(&node.op_type),
        _ => None,
    };
    let Some(rule) = rule else { return Ok(None) };
    let wrong = node.attributes.iter().find_map(|(name, value)| match value {
        Attribute::Int(value) if ![0, 1].contains(value) && FLAGS.contains(&&**name) => Some((name, value)),
        _ => None,
    });
    if let Some((name, value)) = wrong {
        return Err(GraphError::Invalid(format!("{}: {name} must be 0 or 1, not {value}", describe(node))));
    }
    let facts = rule(ctx).map_err(|e| GraphError::Invalid(format!("{}: {e}", describe(node))))?;
    Ok(Some(facts))
}

/// Infers the outputs of one node, in order; `Ok(None)` for an unknown operator.
///
/// `inputs[i]` is `None` if optional input `i` is absent. If all inputs are small constants, the node is evaluated
/// and the facts carry its values. Fails if the inputs or attributes contradict the operator's definition.
pub fn node_outputs(
    node: &Node,
    opset: i64,
    inputs: &[Option<Fact>],
) -> Result<Option<Vec<Fact>>, GraphError> {
    if fused::is_fused(node) {
        let mut facts = fused::infer(node, inputs)?;
        facts.resize(node.outputs.len(), Fact::default());
        return Ok(Some(facts));
    }
    let ctx = Ctx { node, opset, inputs };
    let Some(mut facts) = outputs_by_rule(&ctx)? else { return Ok(None) };
    facts.resize(node.outputs.len(), Fact::default());
    if facts.iter().all(|f| f.value.is_some()) {
        return Ok(Some(facts));
    }
    if let Some(values) = fold(&ctx, &facts)? {
        return Ok(Some(values.into_iter().map(Fact::constant).collect()));
    }
    if let [output] = facts.as_mut_slice()
        && output.elements.is_none()
    {
        output.elements = partial::output_elements(&ctx, output);
    }
    Ok(Some(facts))
}

/// The output values, if all inputs are known and everything is small.
fn fold(ctx: &Ctx, facts: &[Fact]) -> Result<Option<Vec<Tensor>>, GraphError> {
    let small = |f: &Fact| f.known_shape().is_none_or(|_| is_small(f));
    if ctx.inputs.is_empty() || !facts.iter().all(small) || !eval::supports(ctx.node, ctx.opset) {
        return Ok(None);
    }
    let mut inputs = Vec::with_capacity(ctx.inputs.len());
    for fact in ctx.inputs {
        match fact {
            None => inputs.push(None),
            Some(Fact { value: Some(v), .. }) if v.len() <= VALUE_LIMIT => inputs.push(Some(v)),
            Some(_) => return Ok(None),
        }
    }
    let shapes: Vec<Vec<usize>> = facts.iter().filter_map(Fact::known_shape).collect();
    let sizes = inputs.iter().map(|input| input.map(Tensor::shape));
    if eval::work(ctx.node, sizes, shapes.iter().map(Vec::as_slice)) > WORK_LIMIT {
        return Ok(None);
    }
    match eval::evaluate(ctx.node, ctx.opset, &inputs) {
        Ok(values) => Ok(Some(values)),
        Err(eval::EvalError::Unsupported { .. }) => Ok(None),
        Err(eval::EvalError::Invalid(e)) => Err(GraphError::Invalid(e)),
    }
}

fn is_small(fact: &Fact) -> bool {
    fact.shape.as_deref().and_then(dims::count).is_some_and(|n| n <= VALUE_LIMIT)
}

/// Facts about a value beyond the type and shape that the graph itself stores.
#[derive(Default)]
struct Content {
    value: Option<Tensor>,
    elements: Option<Vec<PartialInt>>,
}

/// Infers the element type and shape of every value, as far as they follow from the graph's inputs, initializers and
/// the operators' definitions.
///
/// Inferred types replace the declarations in the file. A value that cannot be inferred (an output of an unknown
/// operator, a size that depends on data) keeps its declaration. Fails if a node contradicts its operator's
/// definition.
pub fn infer_shapes(graph: &mut Graph) -> Result<(), GraphError> {
    let mut contents: HashMap<ValueId, Content> = HashMap::new();
    for (id, initializer) in &graph.initializers {
        let value = &mut graph.values[id.0 as usize];
        value.dtype = Some(initializer.dtype());
        value.shape = Some(dims::known(initializer.shape()));
        // Rules read whole values, and no shape depends on larger ones.
        if let Initializer::Constant(t) = initializer
            && t.is_few()
        {
            contents.insert(*id, Content { value: Some(t.clone()), elements: None });
        }
    }
    for i in 0..graph.nodes.len() {
        let node = &graph.nodes[i];
        let fact = |id: ValueId| {
            let value = graph.value(id);
            let content = contents.get(&id);
            Fact {
                dtype: value.dtype,
                shape: value.shape.clone(),
                value: content.and_then(|c| c.value.clone()),
                elements: content.and_then(|c| c.elements.clone()),
            }
        };
        let inputs: Vec<Option<Fact>> = node.inputs.iter().map(|id| id.map(fact)).collect();
        let opset = graph.opsets.get(&node.domain).copied().unwrap_or_else(|| graph.opset());
        let facts = node_outputs(node, opset, &inputs).map_err(|e| locate(graph, node, e))?;
        let outputs = node.outputs.clone();
        for (id, fact) in outputs.into_iter().zip(facts.into_iter().flatten()) {
            let Some(id) = id else { continue };
            record(graph, id, &fact);
            if fact.value.is_some() || fact.elements.is_some() {
                contents.insert(id, Content { value: fact.value, elements: fact.elements });
            }
        }
    }
    Ok(())
}

/// Adds the value that an unnamed node computes to the message, so that the user can find the node.
fn locate(graph: &Graph, node: &Node, error: GraphError) -> GraphError {
    match (error, node.output(0)) {
        (GraphError::Invalid(text), Some(id)) if node.name.is_empty() => {
            GraphError::Invalid(format!("{text} (it computes {:?})", graph.value(id).name))
        }
        (error, _) => error,
    }
}

/// Writes an inferred fact into the graph. A declared dimension survives if the inferred one is unknown.
fn record(graph: &mut Graph, id: ValueId, fact: &Fact) {
    let value = graph.value_mut(id);
    value.dtype = fact.dtype.or(value.dtype);
    let Some(inferred) = &fact.shape else { return };
    let declared = value.shape.take().filter(|s| s.len() == inferred.len());
    let merged = inferred.iter().enumerate().map(|(i, d)| match (d, &declared) {
        (Dim::Unknown, Some(s)) => s[i].clone(),
        _ => d.clone(),
    });
    value.shape = Some(merged.collect());
}
