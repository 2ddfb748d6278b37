//! Refuses nodes that a runtime silently gets wrong and that we cannot rewrite. The ONNX node tests show which.

use sdrun_abi::{Error, Result};
use sdrun_graph::{Dim, Graph, Node};

/// Looks for such nodes, also in loops and branches. `fault` returns what is wrong with a node, if anything.
///
/// # Errors
/// `Unimplemented` with the first one, the reason, and the number of others.
pub fn refuse(
    graph: &Graph,
    runtime: &str,
    fault: impl Fn(&Graph, &Node) -> Option<&'static str>,
) -> Result<()> {
    let mut found = Vec::new();
    collect(graph, &fault, &mut found);
    let [first, rest @ ..] = &found[..] else { return Ok(()) };
    let more = if rest.is_empty() { String::new() } else { format!(" (and {} more)", rest.len()) };
    Err(Error::unsupported(format!("{runtime} computes other numbers than ONNX for {first}{more}")))
}

fn collect(graph: &Graph, fault: &impl Fn(&Graph, &Node) -> Option<&'static str>, found: &mut Vec<String>) {
    for node in graph.nodes.iter().filter(|node| node.domain.is_empty()) {
        if let Some(why) = fault(graph, node) {
            let output = node.output(0).map_or("", |id| graph.value(id).name.as_str());
            let name = if node.name.is_empty() { output } else { &node.name };
            found.push(format!("{} `{name}`: {why}", node.op_type));
        }
        for body in graph.bodies(node) {
            collect(&body.graph, fault, found);
        }
    }
}

/// What is wrong with a Resize in OpenVINO and ONNX Runtime: to align corners, ONNX divides by the exact output size, which is the input
/// size times the scale. They round that size down first.
pub fn misplaced_corners(graph: &Graph, node: &Node) -> Option<&'static str> {
    let aligned = node.op_type == "Resize"
        && node.str("coordinate_transformation_mode").is_some_and(|mode| mode == "align_corners");
    let scales = node.input(2).filter(|_| aligned && node.input(3).is_none())?;
    let whole = || {
        let scales = graph.constant(scales)?.to_f32s()?;
        let sizes = graph.value(node.input(0)?).shape.as_ref()?;
        let one = |(dim, scale): (&Dim, &f32)| match dim.known() {
            Some(size) => (size as f32 * scale).fract() == 0.0,
            None => scale.fract() == 0.0,
        };
        Some(scales.len() == sizes.len() && sizes.iter().zip(&scales).all(one))
    };
    (whole() != Some(true)).then_some("it rounds the output size before it aligns the corners")
}
