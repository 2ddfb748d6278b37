//! What OpenVINO silently computes wrongly and we cannot rewrite.

use crate::refused::{misplaced_corners, refuse as refuse_nodes};
use sdrun_abi::{DType, Error, Result};
use sdrun_graph::{Graph, Node, ValueId};

/// # Errors
/// `Unimplemented` for inputs and outputs in f64, which OpenVINO computes in f32, and for the nodes in [`fault`].
pub(super) fn refuse(graph: &Graph) -> Result<()> {
    let mut ends = graph.inputs.iter().chain(&graph.outputs).map(|id| graph.value(*id));
    if let Some(value) = ends.find(|value| value.dtype == Some(DType::F64)) {
        let name = &value.name;
        return Err(Error::unsupported(format!("`{name}` is f64, and OpenVINO computes in f32")));
    }
    refuse_nodes(graph, "OpenVINO", fault)
}

/// Why OpenVINO 2026.4 computes a node differently from ONNX.
fn fault(graph: &Graph, node: &Node) -> Option<&'static str> {
    let computed = |at: usize| node.input(at).is_some_and(|id| graph.constant(id).is_none());
    let dtype = |id: Option<ValueId>| graph.value(id?).dtype;
    match node.op_type.as_str() {
        "Attention"
            if ["left_window_size", "right_window_size"].iter().any(|name| node.int_or(name, -1) >= 0) =>
        {
            Some("it ignores the window")
        }
        "Attention"
            if node.int_or("is_causal", 0) != 0 && node.input(3).is_some() && node.input(4).is_some() =>
        {
            Some("it hides other positions if there are a mask and past keys")
        }
        "Attention" if node.input(6).is_some() && dtype(node.input(0)) == Some(DType::BF16) => {
            Some("in bf16, without AVX-512, it averages values where all keys are padding")
        }
        "BitShift" if dtype(node.input(0)).is_some_and(is_signed) => {
            Some("it shifts signed integers as the processor does")
        }
        "Cast" | "CastLike" if dtype(node.output(0)).is_some_and(is_8_bit_float) => {
            Some("it rounds to 8-bit floats differently")
        }
        "DFT" if computed(2) => Some("it ignores an axis that is computed"),
        "Div" if matches!(dtype(node.input(0)), Some(DType::I8 | DType::U8)) => {
            Some("it rounds quotients of bytes on processors without AVX")
        }
        "LSTM" if node.input(7).is_some() => Some("it ignores peepholes"),
        "NonMaxSuppression" => Some("it also drops boxes whose overlap is exactly the threshold"),
        "QuantizeLinear" if dtype(node.output(0)).is_some_and(|dtype| dtype.size() == 2) => {
            Some("it quantises to 16 bits differently")
        }
        "Resize" if node.int_or("antialias", 0) != 0 => Some("it has another antialiasing"),
        "Resize" if node.int_or("exclude_outside", 0) != 0 => Some("it weighs what is outside differently"),
        "Resize" if node.str("keep_aspect_ratio_policy").is_some_and(|policy| policy != "stretch") => {
            Some("it ignores keep_aspect_ratio_policy")
        }
        "RoiAlign" if node.str("mode") == Some("max") => Some("it takes the maximum of other samples"),
        "Softsign" => Some("it computes 1 on processors without AVX"),
        "SpaceToDepth" if node.str("mode").is_some_and(|mode| mode != "DCR") => Some("it ignores the mode"),
        "TopK" if node.output(1).is_some() => Some("it lists equal elements in any order"),
        "Tile" if computed(1) => Some("it gives zeros if the repeats are computed"),
        _ => misplaced_corners(graph, node),
    }
}

fn is_signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

fn is_8_bit_float(dtype: DType) -> bool {
    dtype.is_float() && dtype.size() == 1
}
