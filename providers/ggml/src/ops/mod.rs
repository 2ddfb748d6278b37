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

/// How an operator of ai.onnx, or one that passes make of several, is said in ggml's terms.
pub(crate) struct Operator {
    /// ONNX name.
    pub(crate) name: &'static str,
    /// Attributes, ranks and types it takes; what is outside is left to the reference implementation or refused.
    /// "float" stands for f32, f16 and bf16.
    pub(crate) takes: &'static str,
    /// Translates one node, or refuses it before or after having added nodes that nobody uses.
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

/// The table, family after family.
pub(crate) fn all() -> impl Iterator<Item = &'static Operator> {
    FAMILIES.into_iter().flatten()
}

/// The entry for a node.
pub(crate) fn find(node: &Node) -> Option<&'static Operator> {
    // Names that ONNX Runtime has added are none of ai.onnx.
    let known = match &node.domain[..] {
        "" | "ai.onnx" | DOMAIN => true,
        MICROSOFT => {
            matches!(&*node.op_type, "DynamicQuantizeLSTM" | "DynamicQuantizeMatMul" | "MatMulIntegerToFloat")
        }
        _ => false,
    };
    all().find(|operator| known && operator.name == node.op_type)
}
