//! Operators as ggml's own operations, for devices, because our kernels run only on the CPU. Nodes that are refused here, or that
//! the device does not support, run on the CPU, with copies there and back.

mod attention;
mod conv;
mod elementwise;
mod layout;
mod matmul;
mod norm;

pub(crate) use layout::strided;
pub(crate) use matmul::multiply;

use crate::{
    ffi::{Binary, Home, Tensor, Type, Unary},
    form::Form,
    kernels::{Activation, BroadcastOp},
    shape,
    storage::is_f32,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::{Node, ValueId, fused::DOMAIN};

type Translate = fn(&mut Translator<'_>, &Node) -> Outcome;

/// The translation of a node. Softmax and the remaining element-wise functions of one value are in the operator table of the CPU, where
/// they are ggml's own too.
///
/// ggml's kernels for a device determine how it treats a NaN. Those for CUDA use `fminf` and `fmaxf`, which drop a NaN. So Relu,
/// LeakyRelu, Clip and HardSigmoid return a finite number there.
pub(crate) fn find(node: &Node) -> Option<Translate> {
    if !matches!(&node.domain[..], "" | "ai.onnx" | DOMAIN) {
        return None;
    }
    Some(match &node.op_type[..] {
        "Add" => |t, n| elementwise::binary(t, n, BroadcastOp::Add),
        "Sub" => |t, n| elementwise::binary(t, n, BroadcastOp::Sub),
        "Mul" => |t, n| elementwise::binary(t, n, BroadcastOp::Mul),
        "Div" => |t, n| elementwise::binary(t, n, BroadcastOp::Div),
        "Gelu" | "Swish" => elementwise::through,
        "Relu" | "Elu" | "LeakyRelu" | "HardSigmoid" | "Clip" => elementwise::function,
        "GLU" => elementwise::glu,
        "Conv" | "FusedConv" => conv::conv,
        "MatMul" | "FusedMatMul" => matmul::matmul,
        "Gemm" => matmul::gemm,
        "Attention" => attention::attention,
        "InstanceNormalization" => norm::instance_norm,
        "GroupNormalization" => norm::group_norm,
        "LayerNormalization" | "RMSNormalization" => norm::layer_norm,
        "Concat" => layout::concat,
        "Resize" | "Upsample" => layout::resize,
        "Pad" => layout::pad,
        _ => return None,
    })
}

/// A floating-point operand. Weights and constants are in the device's memory.
fn operand(t: &mut Translator<'_>, id: ValueId) -> Outcome<Operand> {
    operand_in(t, id, Type::F32)
}

/// As [`operand`], with weights stored in this type.
fn operand_in(t: &mut Translator<'_>, id: ValueId, type_: Type) -> Outcome<Operand> {
    let (dtype, shape) = (t.dtype(id)?, t.shape(id)?);
    if !is_f32(dtype) {
        return refuse(format!("an operand is {dtype}"));
    }
    let Some(stored) = stored(t, id) else { return t.operand(id) };
    let tensor = t.weight_at(stored, Form::Plain, type_, Home::Device)?;
    Ok(Operand { tensor: t.builder.reshape(tensor, shape::extent(&shape))?, dtype, shape })
}

/// The floating-point weight or constant behind a value, perhaps with another shape.
fn stored(t: &Translator<'_>, mut id: ValueId) -> Option<ValueId> {
    const VIEWS: [&str; 6] = ["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast"];
    while !t.is_stored(id) {
        let node = t.producer(id).filter(|node| VIEWS.contains(&&*node.op_type))?;
        id = node.input(0).filter(|id| t.dtype(*id).is_ok_and(is_f32))?;
    }
    Some(id)
}

/// Input `i` of a node.
fn input(t: &mut Translator<'_>, node: &Node, i: usize) -> Outcome<Operand> {
    let id = t.input_id(node, i)?;
    operand(t, id)
}

/// As [`input`], if the input is present.
fn optional(t: &mut Translator<'_>, node: &Node, i: usize) -> Outcome<Option<Operand>> {
    node.input(i).map(|id| operand(t, id)).transpose()
}

/// `a op b`, both broadcast to `shape`.
fn combine(
    t: &mut Translator<'_>,
    op: Binary,
    (a, a_shape): (Tensor, &[usize]),
    (b, b_shape): (Tensor, &[usize]),
    shape: &[usize],
) -> Outcome<Tensor> {
    let (Some(a_steps), Some(b_steps)) =
        (shape::broadcast_strides(a_shape, shape), shape::broadcast_strides(b_shape, shape))
    else {
        return refuse("its shapes do not broadcast");
    };
    let (dims, steps) = shape::coalesce(shape, &[&a_steps, &b_steps]);
    if dims.len() > 4 {
        return refuse("its operands are repeated along too many dimensions");
    }
    let all = shape::extent(&dims);
    let mut a = t.builder.reshape(a, shape::extent(&shape::once(&dims, &steps[0])))?;
    let mut b = t.builder.reshape(b, shape::extent(&shape::once(&dims, &steps[1])))?;
    if t.builder.extent(a) != all && op.commutes() {
        std::mem::swap(&mut a, &mut b);
    }
    if t.builder.extent(a) != all {
        a = t.builder.repeat(a, all)?;
    }
    let y = t.builder.binary(op, a, b)?;
    Ok(t.builder.reshape(y, shape::extent(shape))?)
}

/// Applies an activation to `x`.
fn activate(t: &mut Translator<'_>, x: Tensor, activation: Activation) -> Outcome<Tensor> {
    let unary = match activation {
        Activation::Relu => Unary::Relu,
        Activation::Gelu => Unary::GeluErf,
        Activation::GeluTanh => Unary::Gelu,
        Activation::Swish(1.0) => Unary::Silu,
        Activation::Swish(QUICK) => Unary::GeluQuick,
        Activation::Swish(alpha) => {
            let gate = t.builder.scale(x, alpha, 0.0)?;
            let gate = t.builder.unary(Unary::Sigmoid, gate)?;
            return Ok(t.builder.binary(Binary::Mul, x, gate)?);
        }
        Activation::Clip(low, high) => return Ok(t.builder.clamp(x, low, high)?),
    };
    Ok(t.builder.unary(unary, x)?)
}

/// The factor of CLIP's "quick GELU".
const QUICK: f32 = 1.702;
