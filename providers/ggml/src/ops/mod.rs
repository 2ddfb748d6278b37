//! The table of operators: one file for each family, one entry for each operator.

mod activation;
mod attention;
mod conv;
mod conv_transpose;
mod einsum;
mod elementwise;
mod layout;
mod matmul;
mod nhwc_conv;
mod norm;
mod pad;
mod quantize;
mod quantized;
mod recurrent;
mod reduce;
mod resample;
mod scatter;

pub(crate) use activation::{activation, own_activation};
pub(crate) use attention::check as check_attention;
pub(crate) use conv::window;
pub(crate) use elementwise::{as_line, clip_bounds};
pub(crate) use layout::{permutation, whole_factors};
pub(crate) use pad::pads;

use crate::translate::{Outcome, Translator};
use sdrun_graph::{Node, fused::DOMAIN, recurrent::MICROSOFT};

/// The translation of an operator of ai.onnx, or of a fused operator.
pub(crate) struct Operator {
    /// The ONNX name.
    pub(crate) name: &'static str,
    /// The supported attributes, ranks and types, for error messages. The reference implementation evaluates other nodes, or they are
    /// refused. "float" stands for f32, f16 and bf16.
    pub(crate) takes: &'static str,
    /// Translates one node or refuses it. A refusal may leave unused nodes behind.
    pub(crate) translate: fn(&mut Translator<'_>, &Node) -> Outcome,
}

const FAMILIES: [&[Operator]; 16] = [
    elementwise::OPERATORS,
    matmul::OPERATORS,
    attention::OPERATORS,
    conv::OPERATORS,
    nhwc_conv::OPERATORS,
    norm::OPERATORS,
    reduce::OPERATORS,
    layout::OPERATORS,
    pad::OPERATORS,
    einsum::OPERATORS,
    quantized::OPERATORS,
    recurrent::OPERATORS,
    resample::OPERATORS,
    quantize::OPERATORS,
    scatter::OPERATORS,
    conv_transpose::OPERATORS,
];

/// All operators.
pub(crate) fn all() -> impl Iterator<Item = &'static Operator> {
    FAMILIES.into_iter().flatten()
}

/// The entry for a node.
pub(crate) fn find(node: &Node) -> Option<&'static Operator> {
    // Operators that ONNX Runtime added are not part of ai.onnx.
    let known = match &node.domain[..] {
        "" | "ai.onnx" | DOMAIN => true,
        MICROSOFT => {
            matches!(&*node.op_type, "DynamicQuantizeLSTM" | "DynamicQuantizeMatMul" | "MatMulIntegerToFloat")
        }
        _ => false,
    };
    all().find(|operator| known && operator.name == node.op_type)
}
