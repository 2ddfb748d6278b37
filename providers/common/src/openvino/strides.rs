//! Stops OpenVINO from applying strides before padding.

use crate::nodes::Rewrite;
use sdrun_graph::{Graph, Node, Value, ValueId};

/// Splits a padded convolution with strides whose kernel has one element into a padding, a slice with steps and a convolution without
/// either, which computes the same.
///
/// OpenVINO 2026.4 moves the strides of such a convolution to an earlier node, but not the padding. With four columns, one column of padding
/// before them and a stride of 2, it takes the padding and columns 1 and 3 instead of the padding and columns 2 and 4. The same happens
/// to a Pad node before the convolution, because OpenVINO merges the two.
pub(super) fn pad_before_strides(graph: &mut Graph) {
    // Older versions of Pad and Slice take these values as attributes.
    if graph.opset() < 11 {
        return;
    }
    let mut pads = Vec::new();
    for mut node in std::mem::take(&mut graph.nodes) {
        if node.op_type == "Pad" && node.domain.is_empty() {
            pads.extend(node.output(0));
        }
        if let Some((x, padding, strides)) = strided(graph, &node, &pads) {
            let prepared = prepare(graph, &node, x, &padding, &strides);
            node.inputs[0] = Some(prepared);
            for name in ["pads", "strides", "dilations"] {
                node.attributes.remove(name);
            }
        }
        graph.nodes.push(node);
    }
}

/// The input, the padding and the strides of such a convolution.
fn strided(graph: &Graph, node: &Node, pads: &[ValueId]) -> Option<(ValueId, Vec<i64>, Vec<i64>)> {
    if node.op_type != "Conv" || !node.domain.is_empty() {
        return None;
    }
    let x = node.input(0)?;
    let kernel = graph.initializers.get(&node.input(1)?)?.shape().get(2..)?;
    let strides = node.ints("strides")?.to_vec();
    let padding = node.ints("pads").map_or_else(|| vec![0; 2 * kernel.len()], <[i64]>::to_vec);
    let padded = padding.iter().any(|pad| *pad > 0) || pads.contains(&x);
    let moves = kernel.iter().all(|size| *size == 1) && strides.iter().any(|stride| *stride > 1);
    (padded && moves).then_some((x, padding, strides))
}

/// Adds the padding and the slice. Returns the result.
fn prepare(graph: &mut Graph, conv: &Node, mut x: ValueId, padding: &[i64], strides: &[i64]) -> ValueId {
    let Some(y) = conv.output(0) else { return x };
    let Value { name, dtype, .. } = graph.value(y).clone();
    let mut rewrite = Rewrite::new(graph, conv, format!("{name}/strides"));
    let rank = strides.len();
    if padding.iter().any(|pad| *pad > 0) {
        let (before, after) = padding.split_at(rank);
        let pads = rewrite.ints(&[&[0, 0], before, &[0, 0], after].concat());
        x = rewrite.node("Pad", &[x, pads], dtype, None);
    }
    let axes: Vec<i64> = (2..2 + rank as i64).collect();
    let ranges = [&vec![0; rank], &vec![i64::MAX; rank], &axes, strides].map(|values| rewrite.ints(values));
    rewrite.node("Slice", &[&[x], &ranges[..]].concat(), dtype, None)
}
