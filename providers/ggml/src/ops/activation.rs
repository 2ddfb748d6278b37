//! Activations that are attributes of other operators.

use crate::{
    ffi::{Tensor, Type},
    kernels::{Activation, Elementwise},
    shape,
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::{Node, fused};

/// The node's activation.
pub(super) fn activation(node: &Node) -> Outcome<Option<Activation>> {
    Ok(fused::Activation::of(node).or_else(refuse)?.map(|activation| match activation {
        fused::Activation::Relu => Activation::Clip(0.0, f32::INFINITY),
        fused::Activation::Clip(low, high) => Activation::Clip(low, high),
        fused::Activation::Swish(alpha) => Activation::Swish(alpha),
        fused::Activation::Gelu => Activation::Gelu,
        fused::Activation::GeluTanh => Activation::GeluTanh,
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
    t.custom(node, kernel, &[x], Type::F32, shape::extent(shape))
}
