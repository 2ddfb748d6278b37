//! Activations that are attributes of other operators.

use crate::{
    ffi::Tensor,
    kernels::{Activation, Elementwise},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

/// The activation that the attributes `activation` and `activation_params` name.
pub(super) fn activation(node: &Node) -> Outcome<Option<Activation>> {
    let Some(name) = node.str("activation") else { return Ok(None) };
    let parameters = node.floats("activation_params").unwrap_or_default();
    Ok(Some(match (name, parameters) {
        ("Relu", []) => Activation::Clip(0.0, f32::INFINITY),
        ("Clip", &[low, high]) => Activation::Clip(low, high),
        ("Swish", &[alpha]) => Activation::Swish(alpha),
        ("Gelu", []) => Activation::Gelu,
        ("FastGelu", []) => Activation::GeluTanh,
        _ => return refuse(format!("its activation is {name:?} with parameters {parameters:?}")),
    }))
}

/// `x` through an activation.
pub(super) fn activate(
    t: &mut Translator<'_>,
    node: &Node,
    x: Tensor,
    shape: &[usize],
    activation: Activation,
) -> Outcome<Tensor> {
    let kernel = Elementwise { len: shape::len(shape), activation };
    t.custom(node, kernel, &[x], crate::ffi::Type::F32, shape::extent(shape))
}
