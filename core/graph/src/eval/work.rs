//! How much work a node is, so that a small file cannot keep the host busy for hours.

use crate::{Node, fused, infer::einsum::Equation};
use std::collections::BTreeMap;

/// Elementary steps that [`evaluate`](super::evaluate) needs for a node: about a nanosecond each, rather too many than too few.
/// `inputs` has the shapes of those that are present, `outputs` the shapes that are known.
pub(crate) fn work<'a>(
    node: &Node,
    inputs: impl IntoIterator<Item = Option<&'a [usize]>>,
    outputs: impl IntoIterator<Item = &'a [usize]>,
) -> u64 {
    let inputs: Vec<Option<&[usize]>> = inputs.into_iter().collect();
    let shapes: Vec<&[usize]> = inputs.iter().map(|input| input.unwrap_or_default()).collect();
    let shape = |at: usize| shapes.get(at).copied().unwrap_or_default();
    let moved = inputs.iter().flatten().map(|input| count(input)).fold(0, u64::saturating_add);
    let made = outputs.into_iter().map(count).fold(0, u64::saturating_add);
    let last = |shape: &[usize]| shape.last().map_or(1, |n| *n as u64);
    let steps = match &*node.op_type {
        _ if fused::is_fused(node) => moved.saturating_mul(made),
        "MatMul" | "MatMulInteger" | "QLinearMatMul" | "DynamicQuantizeMatMul" | "MatMulIntegerToFloat" => {
            made.saturating_mul(last(shape(0)))
        }
        "Gemm" => {
            let along = shape(0).get(usize::from(node.int_or("transA", 0) == 0));
            made.saturating_mul(along.map_or(1, |n| *n as u64))
        }
        "Det" => moved.saturating_mul(last(shape(0))),
        "Einsum" => einsum(node, &shapes),
        "Attention" => {
            // Each query meets each key, of its own batch and head at most.
            let keys = count(shape(1)) / last(shape(1)).max(1) + count(shape(4)) / last(shape(4)).max(1);
            count(shape(0)).saturating_mul(keys)
        }
        "Conv" | "ConvInteger" => made.saturating_mul(per_channel(shape(1))),
        "QLinearConv" => made.saturating_mul(per_channel(shape(3))),
        // It also computes the position of each product.
        "ConvTranspose" => count(shape(0)).saturating_mul(per_channel(shape(1))).saturating_mul(4),
        "MaxPool" | "AveragePool" | "LpPool" => made.saturating_mul(kernel(node)),
        "LRN" => {
            let channels = shape(0).get(1).map_or(1, |n| *n as u64);
            // Neighbours are a plane apart.
            made.saturating_mul(channels.min(node.int_or("size", 1).max(1) as u64)).saturating_mul(2)
        }
        "RoiAlign" => {
            let plane = shape(0).iter().skip(2).fold(1, |n: u64, d| n.saturating_mul(*d as u64));
            let samples = node.int_or("sampling_ratio", 0).max(0) as u64;
            made.saturating_mul(if samples == 0 { plane } else { samples.saturating_mul(samples) })
        }
        // Each step of each sequence meets all weights.
        "LSTM" | "GRU" | "RNN" | "DynamicQuantizeLSTM" => {
            let steps = shape(0).iter().take(2).fold(1, |n: u64, d| n.saturating_mul(*d as u64));
            steps.saturating_mul(count(shape(1)).saturating_add(count(shape(2))))
        }
        "TopK" | "Unique" | "Resize" | "Upsample" | "GridSample" => {
            moved.saturating_add(made).saturating_mul(32)
        }
        // Some of these are functions such as the tangent.
        _ => made.saturating_mul(8),
    };
    steps.saturating_add(moved).saturating_add(made)
}

/// Elements of a tensor of this shape.
pub(crate) fn count(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |n, d| n.saturating_mul(*d as u64))
}

/// Elements of a filter for each of its first channels.
fn per_channel(shape: &[usize]) -> u64 {
    count(shape.get(1..).unwrap_or_default())
}

/// Elements of a pool's window.
fn kernel(node: &Node) -> u64 {
    let sides = node.ints("kernel_shape").unwrap_or_default();
    sides.iter().fold(1, |n: u64, side| n.saturating_mul((*side).max(1) as u64))
}

/// Whether a node on inputs of these shapes, with outputs of these, takes more than about a hundredth of a second.
#[must_use]
pub fn is_long(node: &Node, inputs: &[Option<&[usize]>], outputs: &[&[usize]]) -> bool {
    work(node, inputs.iter().copied(), outputs.iter().copied()) > 10_000_000
}

/// One step for each combination of all indices.
fn einsum(node: &Node, shapes: &[&[usize]]) -> u64 {
    let ranks: Vec<usize> = shapes.iter().map(|shape| shape.len()).collect();
    // An equation that cannot be read is refused at once.
    let Some(equation) = node.str("equation").and_then(|text| Equation::parse(text, &ranks).ok()) else {
        return 0;
    };
    let mut sizes = BTreeMap::new();
    for (labels, shape) in equation.operands.iter().zip(shapes) {
        for (label, size) in labels.iter().zip(*shape) {
            let largest = sizes.entry(*label).or_insert(1);
            *largest = (*largest).max(*size as u64);
        }
    }
    sizes.values().fold(1, |n: u64, size| n.saturating_mul(*size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Attribute;

    fn steps(op: &str, attributes: &[(&str, Attribute)], inputs: &[&[usize]], output: &[usize]) -> u64 {
        let attributes = attributes.iter().map(|(name, value)| ((*name).to_string(), value.clone()));
        let node = Node {
            name: String::new(),
            domain: String::new(),
            op_type: op.into(),
            inputs: vec![],
            outputs: vec![],
            attributes: attributes.collect(),
            metadata: Default::default(),
        };
        work(&node, inputs.iter().map(|shape| Some(*shape)), [output])
    }

    /// Each count is that of the operator's definition, plus one for each element that is read or written.
    #[test]
    fn products_and_windows_are_counted() {
        let ints = |values: &[i64]| Attribute::Ints(values.to_vec());
        let text = |value: &str| Attribute::String(value.as_bytes().to_vec());
        assert_eq!(steps("MatMul", &[], &[&[2, 3, 5], &[5, 7]], &[2, 3, 7]), 2 * 3 * 7 * 5 + 30 + 35 + 42);
        let transposed = [("transA", Attribute::Int(1))];
        assert_eq!(steps("Gemm", &transposed, &[&[5, 3], &[5, 7]], &[3, 7]), 3 * 7 * 5 + 15 + 35 + 21);
        assert_eq!(steps("Gemm", &[], &[&[3, 5], &[5, 7]], &[3, 7]), 3 * 7 * 5 + 15 + 35 + 21);
        let conv = steps("Conv", &[], &[&[1, 4, 6, 6], &[8, 4, 3, 3]], &[1, 8, 4, 4]);
        assert_eq!(conv, 8 * 4 * 4 * (4 * 3 * 3) + 144 + 288 + 128);
        let window = [("kernel_shape", ints(&[3, 5]))];
        assert_eq!(steps("AveragePool", &window, &[&[1, 1, 9, 9]], &[1, 1, 7, 5]), 35 * 15 + 81 + 35);
        let channels = [("size", Attribute::Int(1 << 40))];
        assert_eq!(steps("LRN", &channels, &[&[1, 6, 2]], &[1, 6, 2]), 12 * 6 * 2 + 12 + 12);
        let equation = [("equation", text("bij,bjk->bik"))];
        assert_eq!(
            steps("Einsum", &equation, &[&[2, 3, 5], &[2, 5, 7]], &[2, 3, 7]),
            2 * 3 * 5 * 7 + 30 + 70 + 42
        );
        assert_eq!(steps("Tan", &[], &[&[10]], &[10]), 80 + 20);
    }

    #[test]
    fn huge_counts_stay_huge() {
        let sides = Attribute::Ints(vec![i64::MAX, i64::MAX]);
        assert_eq!(steps("MaxPool", &[("kernel_shape", sides)], &[&[1, 1, 2, 2]], &[1, 1, 2, 2]), u64::MAX);
    }
}
