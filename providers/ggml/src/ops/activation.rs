//! Activations that are attributes of other operators.

use crate::{
    ffi::{Tensor, Type},
    kernels::{Activation, Elementwise, Function},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

/// The activation that is an attribute of a node.
pub(crate) fn activation(node: &Node) -> Outcome<Option<Activation>> {
    Activation::of(node).or_else(refuse)
}

/// The one that a Gelu or a Swish is.
pub(crate) fn own_activation(node: &Node) -> Outcome<Activation> {
    match (&node.op_type[..], node.str("approximate")) {
        ("Swish", _) => Ok(Activation::Swish(node.float("alpha").unwrap_or(1.0))),
        (_, None | Some("none")) => Ok(Activation::Gelu),
        (_, Some("tanh")) => Ok(Activation::GeluTanh),
        (_, Some(other)) => refuse(format!("its approximate is {other:?}")),
    }
}

/// `x` through an activation.
pub(super) fn activate(
    t: &mut Translator<'_>,
    node: &Node,
    x: Tensor,
    shape: &[usize],
    activation: Activation,
) -> Outcome<Tensor> {
    map(t, node, x, shape, Function::Activation(activation))
}

/// A function of each element of `x`.
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
