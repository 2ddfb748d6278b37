//! Refuses nodes that OpenVINO silently computes wrongly and that we cannot rewrite.

use sdrun_abi::{DType, Error, Result};
use sdrun_graph::{Graph, Node, ValueId};

/// Looks for nodes that OpenVINO 2026.4 computes differently from ONNX. The ONNX backend node tests show that it does.
///
/// # Errors
/// `Unimplemented` with the first one, the reason, and the number of others.
pub(super) fn refuse(graph: &Graph) -> Result<()> {
    let words = |node: &Node| {
        let why = fault(graph, node)?;
        let output = node.output(0).map_or("", |id| graph.value(id).name.as_str());
        let name = if node.name.is_empty() { output } else { &node.name };
        Some(format!("{} `{name}`: {why}", node.op_type))
    };
    let nodes = graph.nodes.iter().filter(|node| node.domain.is_empty());
    let found: Vec<String> = nodes.filter_map(words).collect();
    match &found[..] {
        [] => Ok(()),
        [one] => Err(Error::unsupported(format!("OpenVINO computes other numbers than ONNX for {one}"))),
        [first, rest @ ..] => Err(Error::unsupported(format!(
            "OpenVINO computes other numbers than ONNX for {first} and {} more nodes",
            rest.len()
        ))),
    }
}

fn fault(graph: &Graph, node: &Node) -> Option<&'static str> {
    let computed = |at: usize| node.input(at).is_some_and(|id| graph.constant(id).is_none());
    let dtype = |id: Option<ValueId>| graph.value(id?).dtype;
    match node.op_type.as_str() {
        "Attention"
            if ["left_window_size", "right_window_size"].iter().any(|name| node.int_or(name, -1) >= 0) =>
        {
            Some("it ignores the window")
        }
        "BitShift" if dtype(node.input(0)).is_some_and(is_signed) => {
            Some("it shifts signed integers as the processor does")
        }
        "Cast" | "CastLike" if dtype(node.output(0)).is_some_and(is_8_bit_float) => {
            Some("it rounds to 8-bit floats differently")
        }
        "DFT" if computed(2) => Some("it ignores an axis that is computed"),
        "LSTM" if node.input(7).is_some() => Some("it ignores peepholes"),
        "QuantizeLinear" if dtype(node.output(0)).is_some_and(|dtype| dtype.size() == 2) => {
            Some("it quantises to 16 bits differently")
        }
        "Resize" if node.int_or("antialias", 0) != 0 => Some("it has another antialiasing"),
        "Resize" if node.int_or("exclude_outside", 0) != 0 => Some("it weighs what is outside differently"),
        "Resize" if node.str("keep_aspect_ratio_policy").is_some_and(|policy| policy != "stretch") => {
            Some("it ignores keep_aspect_ratio_policy")
        }
        "RoiAlign" if node.str("mode") == Some("max") => Some("it takes the maximum of other samples"),
        "SpaceToDepth" if node.str("mode").is_some_and(|mode| mode != "DCR") => Some("it ignores the mode"),
        "Tile" if computed(1) => Some("it gives zeros if the repeats are computed"),
        _ => None,
    }
}

fn is_signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

fn is_8_bit_float(dtype: DType) -> bool {
    dtype.is_float() && dtype.size() == 1
}
