//! What MIGraphX computes differently from ONNX.

use sdrun_abi::DType;
use sdrun_graph::{Graph, Node, Value};
use sdrun_provider_common::nodes::Rewrite;

/// Why MIGraphX 2.14 computes a node differently. The ONNX backend node tests show it.
///
/// Casts are left out: they turn infinities into the largest number of the type, but nearly every model contains casts.
pub(crate) fn fault(graph: &Graph, node: &Node) -> Option<&'static str> {
    let is_float = |at: usize| {
        let dtype = node.input(at).and_then(|id| graph.value(id).dtype);
        dtype.is_some_and(DType::is_float)
    };
    match node.op_type.as_str() {
        "ConvInteger" => Some("it gets zero points wrong"),
        "Dropout" if node.input(2).is_some() => Some("it ignores training_mode"),
        "Mod" if is_float(0) && node.int_or("fmod", 0) == 0 => Some("it gets remainders of infinities wrong"),
        "NegativeLogLikelihoodLoss" | "SoftmaxCrossEntropyLoss"
            if node.input(2).is_none()
                && node.int("ignore_index").is_some()
                && node.str("reduction").is_none_or(|reduction| reduction == "mean") =>
        {
            Some("its mean includes what ignore_index leaves out")
        }
        "SpaceToDepth" if node.str("mode").is_some_and(|mode| mode != "DCR") => Some("it ignores the mode"),
        _ => None,
    }
}

/// Rewrites Equal on floats. MIGraphX 2.14 treats adjacent floats as equal and an infinity as unequal to itself, so graphs that look for
/// fully masked rows of attention do not find them.
pub(crate) fn compare_exactly(graph: &mut Graph) {
    for node in std::mem::take(&mut graph.nodes) {
        let ends = (node.op_type == "Equal" && node.domain.is_empty())
            .then(|| Some((node.input(0)?, node.input(1)?, node.output(0)?)))
            .flatten()
            .filter(|(a, ..)| graph.value(*a).dtype.is_some_and(DType::is_float));
        let Some((a, b, y)) = ends else {
            graph.nodes.push(node);
            continue;
        };
        let Value { name, dtype, shape } = graph.value(y).clone();
        let mut rewrite = Rewrite::new(graph, &node, format!("{name}/equal"));
        let mut bool = |op: &str, inputs: &[_]| rewrite.node(op, inputs, dtype, shape.clone());
        let orders = [bool("Less", &[a, b]), bool("Greater", &[a, b])];
        let differ = bool("Or", &orders);
        // A NaN is neither less nor greater.
        let numbers = [a, b].map(|x| {
            let shape = rewrite.graph.value(x).shape.clone();
            rewrite.node("IsNaN", &[x], dtype, shape)
        });
        let mut bool = |op: &str, inputs: &[_]| rewrite.node(op, inputs, dtype, shape.clone());
        let neither = bool("Or", &numbers);
        let unequal = bool("Or", &[differ, neither]);
        rewrite.node_into("Not", &[unequal], y);
    }
}
