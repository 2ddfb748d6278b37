//! Activations that are attributes of other operators.

use crate::{
    ffi::{Tensor, Type},
    kernels::{Activation, Elementwise, Function},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

/// The activation in the attributes of a fused node.
pub(crate) fn activation(node: &Node) -> Outcome<Option<Activation>> {
    Activation::of(node).or_else(refuse)
}

/// The activation of a Gelu or Swish node.
pub(crate) fn own_activation(node: &Node) -> Outcome<Activation> {
    match (&node.op_type[..], node.str("approximate")) {
        ("Swish", _) => Ok(Activation::Swish(node.float("alpha").unwrap_or(1.0))),
        (_, None | Some("none")) => Ok(Activation::Gelu),
        (_, Some("tanh")) => Ok(Activation::GeluTanh),
        (_, Some(other)) => refuse(format!("its approximate is {other:?}")),
    }
}

/// Applies an activation to `x`.
pub(super) fn activate(
    t: &mut Translator<'_>,
    node: &Node,
    x: Tensor,
    shape: &[usize],
    activation: Activation,
) -> Outcome<Tensor> {
    map(t, node, x, shape, Function::Activation(activation))
}

/// Applies a function to each element of `x`.
pub(super) fn map(
    t: &mut Translator<'_>,
    node: &Node,
    x: Tensor,
    shape: &[usize],
    function: Function,
) -> Outcome<Tensor> {
    let kernel = Elementwise { len: shape::len(shape), function };
    t.custom(node, kernel, &[x], Type::F32, shape::extent(shape))
}
