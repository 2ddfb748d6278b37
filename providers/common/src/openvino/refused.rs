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
    let is_zero = |name: &str| node.float(name) == Some(0.0);
    match node.op_type.as_str() {
        "Add" | "Div" | "Mul" | "Pow" | "Sub"
            if dtype(node.input(0)).is_some_and(|dtype| !dtype.is_float() && dtype.size() < 4) =>
        {
            Some("it rounds or saturates integers of 8 and 16 bits")
        }
        "Attention"
            if ["left_window_size", "right_window_size"].iter().any(|name| node.int_or(name, -1) >= 0) =>
        {
            Some("it ignores the window")
        }
        "Attention" if node.int_or("is_causal", 0) != 0 && node.input(4).is_some() => {
            Some("it applies the causal mask at the wrong positions after past keys")
        }
        "Attention" if node.input(6).is_some() && dtype(node.input(0)) == Some(DType::BF16) => {
            Some("in bf16, without AVX-512, it averages the values of rows whose keys are all padding")
        }
        "Attention" if node.float("scale") == Some(0.0) => Some("it takes a scale of 0 for an absent one"),
        "BitShift" if dtype(node.input(0)).is_some_and(is_signed) => {
            Some("it shifts signed integers as the processor does")
        }
        "Cast" | "CastLike" if dtype(node.output(0)).is_some_and(is_8_bit_float) => {
            Some("it rounds to 8-bit floats differently")
        }
        "DFT" if computed(2) => Some("it ignores an axis that is computed"),
        "Gather" if node.input(0).is_some_and(|id| is_empty(graph, id)) => {
            Some("it crashes on tensors without elements")
        }
        "GRU" | "LSTM" | "RNN" if node.int_or("layout", 0) != 0 => Some("it ignores the layout"),
        "HardSigmoid" if is_zero("alpha") || is_zero("beta") => {
            Some("it takes a parameter of 0 for an absent one")
        }
        "LRN" if node.float("bias").is_some_and(|bias| bias.fract() != 0.0) => {
            Some("it rounds the bias to a whole number")
        }
        "LSTM" if node.input(7).is_some() => Some("it ignores peepholes"),
        "LpPool" if node.int_or("ceil_mode", 0) != 0 || is_dilated(node) => {
            Some("it gets windows with dilations or ceil_mode wrong")
        }
        "Mod" if dtype(node.input(0)).is_some_and(DType::is_float) => {
            Some("it gets remainders of infinities wrong")
        }
        "NonMaxSuppression" => Some("it also drops boxes that overlap by exactly the threshold"),
        "QuantizeLinear" if dtype(node.output(0)).is_some_and(|dtype| dtype.size() == 2) => {
            Some("it quantises to 16 bits differently")
        }
        "Range" if !counts_up(graph, node) => Some("it returns elements for an empty range"),
        "Resize" if node.int_or("antialias", 0) != 0 => Some("it has another antialiasing"),
        "Resize" if node.int_or("exclude_outside", 0) != 0 => Some("it weighs what is outside differently"),
        "Resize" if node.str("keep_aspect_ratio_policy").is_some_and(|policy| policy != "stretch") => {
            Some("it ignores keep_aspect_ratio_policy")
        }
        "RoiAlign" if node.str("mode") == Some("max") || node.int_or("sampling_ratio", 0) == 0 => {
            Some("it samples at other points")
        }
        "Selu" if is_zero("alpha") || is_zero("gamma") => Some("it takes a parameter of 0 for an absent one"),
        "Softsign" => Some("it returns 1 on processors without AVX"),
        "SpaceToDepth" if node.str("mode").is_some_and(|mode| mode != "DCR") => Some("it ignores the mode"),
        "Tile" if computed(1) => Some("it gives zeros if the repeats are computed"),
        "TopK" if node.output(1).is_some() => Some("it returns equal elements in any order"),
        _ => misplaced_corners(graph, node),
    }
}

fn is_empty(graph: &Graph, id: ValueId) -> bool {
    graph.value(id).shape.iter().flatten().any(|dim| dim.known() == Some(0))
}

fn is_dilated(node: &Node) -> bool {
    node.ints("dilations").is_some_and(|dilations| dilations.iter().any(|dilation| *dilation != 1))
}

/// Whether a Range starts at 0 and counts in ones. It ends at a size then, which is not negative.
fn counts_up(graph: &Graph, node: &Node) -> bool {
    let is = |at: usize, wanted: i64| {
        let constant = node.input(at).and_then(|id| graph.constant(id));
        constant.is_some_and(|tensor| tensor.to_i64s() == Some(vec![wanted]))
    };
    is(0, 0) && is(2, 1)
}

fn is_signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

fn is_8_bit_float(dtype: DType) -> bool {
    dtype.is_float() && dtype.size() == 1
}
