//! The table of operators: one file for each family, one entry for each operator.

mod conv;
mod elementwise;
mod layout;
mod matmul;
mod norm;
mod reduce;

pub(crate) use norm::{GroupNormParts, group_norm};

use crate::translate::{Outcome, Translator};
use sdrun_graph::Node;

/// How an operator of the default domain is said in ggml's terms.
pub(crate) struct Operator {
    /// ONNX name.
    pub(crate) name: &'static str,
    /// Attributes, ranks and types it takes; what is outside is left to the reference implementation or refused.
    /// "float" stands for f32, f16 and bf16.
    pub(crate) takes: &'static str,
    /// Translates one node, or refuses it before or after having added nodes that nobody uses.
    pub(crate) translate: fn(&mut Translator<'_>, &Node) -> Outcome,
}

const FAMILIES: [&[Operator]; 6] = [
    elementwise::OPERATORS,
    matmul::OPERATORS,
    conv::OPERATORS,
    norm::OPERATORS,
    reduce::OPERATORS,
    layout::OPERATORS,
];

/// The table, family after family.
pub(crate) fn all() -> impl Iterator<Item = &'static Operator> {
    FAMILIES.into_iter().flatten()
}

/// The entry for a node.
pub(crate) fn find(node: &Node) -> Option<&'static Operator> {
    let default_domain = matches!(&node.domain[..], "" | "ai.onnx");
    all().find(|operator| default_domain && operator.name == node.op_type)
}
