//! Quantization.

use super::{Operator, reduce};
use crate::{
    ffi::Type,
    kernels::{Dequantize, DynamicRange, Granularity, Quantize, Reduction},
    shape,
    storage::{is_f32, storage_type},
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_abi::DType;
use sdrun_graph::{Node, Tensor as HostTensor, eval};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "DequantizeLinear",
        takes: "integers of up to 32 bits, float scales for the tensor, an axis or blocks",
        translate: dequantize,
    },
    Operator {
        name: "QuantizeLinear",
        takes: "float to integers of 8 or 16 bits, scales for the tensor, an axis or blocks",
        translate: quantize,
    },
    Operator { name: "DynamicQuantizeLinear", takes: "float", translate: dynamic },
];

fn dequantize(t: &mut Translator<'_>, node: &Node) -> Outcome {
    if fold(t, node)? {
        return Ok(());
    }
    let (x, [scale, zero], granularity) = operands(t, node)?;
    if !matches!(x.dtype, DType::U8 | DType::I8 | DType::U16 | DType::I16 | DType::I32) {
        return refuse(format!("its input is {}", x.dtype));
    }
    let out = t.output_shape(node, 0)?;
    let Some(scale) = scale.filter(|scale| is_f32(scale.dtype)) else {
        return refuse("its scale is not float");
    };
    let mut inputs = vec![x.tensor, scale.tensor];
    inputs.extend(zero.iter().map(|zero| zero.tensor));
    let kernel =
        Dequantize { len: shape::len(&out), from: x.dtype, zero: zero.map(|zero| zero.dtype), granularity };
    let y = t.custom(node, kernel, &inputs, Type::F32, shape::extent(&out))?;
    t.define(node, 0, y)
}

fn quantize(t: &mut Translator<'_>, node: &Node) -> Outcome {
    if fold(t, node)? {
        return Ok(());
    }
    let (x, [scale, zero], granularity) = operands(t, node)?;
    let Some(id) = node.output(0) else { return refuse("it has no output") };
    let to = t.dtype(id)?;
    if !matches!(to, DType::U8 | DType::I8 | DType::U16 | DType::I16) || !is_f32(x.dtype) {
        return refuse(format!("it takes {} to {to}", x.dtype));
    }
    // Another precision would round the quotient.
    if node.int_or("precision", 0) > 1 {
        return refuse("its precision is not that of its scale");
    }
    let out = t.output_shape(node, 0)?;
    let Some(scale) = scale.filter(|scale| is_f32(scale.dtype)) else {
        return refuse("its scale is not float");
    };
    let mut inputs = vec![x.tensor, scale.tensor];
    inputs.extend(zero.iter().map(|zero| zero.tensor));
    let kernel = Quantize { len: shape::len(&out), to, zero: zero.map(|zero| zero.dtype), granularity };
    let Some(type_) = storage_type(to) else { return refuse(format!("{to} values are not supported")) };
    let y = t.custom(node, kernel, &inputs, type_, shape::extent(&out))?;
    t.define(node, 0, y)
}

/// DynamicQuantizeLinear: to u8, over the range of the values.
fn dynamic(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let x = t.float(node, 0)?;
    let all = vec![true; x.shape.len()];
    let least = reduce::over(t, node, &all, Reduction::Min)?;
    let most = reduce::over(t, node, &all, Reduction::Max)?;
    let scale =
        t.custom(node, DynamicRange { zero_point: false }, &[least, most], Type::F32, [1, 1, 1, 1])?;
    let zero = t.custom(node, DynamicRange { zero_point: true }, &[least, most], Type::I8, [1, 1, 1, 1])?;
    let (to, granularity) = (DType::U8, Granularity::Tensor);
    let kernel = Quantize { len: shape::len(&x.shape), to, zero: Some(to), granularity };
    let y = t.custom(node, kernel, &[x.tensor, scale, zero], Type::I8, shape::extent(&x.shape))?;
    t.define(node, 0, y)?;
    t.define(node, 1, scale)?;
    t.define(node, 2, zero)
}

/// Evaluates a node whose inputs are constants when the graph is translated. Returns whether it was such a node.
fn fold(t: &mut Translator<'_>, node: &Node) -> Outcome<bool> {
    let constants: Option<Vec<Option<HostTensor>>> =
        node.inputs.iter().map(|id| id.map_or(Some(None), |id| t.constant(id).cloned().map(Some))).collect();
    let Some(constants) = constants else { return Ok(false) };
    let inputs: Vec<Option<&HostTensor>> = constants.iter().map(Option::as_ref).collect();
    match eval::evaluate(node, t.graph.opset(), &inputs) {
        Ok(mut values) if values.len() == 1 => {
            t.define_constant(node, values.remove(0));
            Ok(true)
        }
        Ok(_) => refuse("it does not have one output"),
        Err(error) => refuse(error.to_string()),
    }
}

/// The input, its scale and zero point, and their granularity.
fn operands(t: &mut Translator<'_>, node: &Node) -> Outcome<(Operand, [Option<Operand>; 2], Granularity)> {
    let operand = |t: &mut Translator<'_>, i: usize| node.input(i).map(|id| t.operand(id)).transpose();
    let Some(x) = operand(t, 0)? else { return refuse("input 0 is missing") };
    let (scale, zero) = (operand(t, 1)?, operand(t, 2)?);
    let scale_shape = scale.as_ref().map(|scale| scale.shape.clone()).unwrap_or_default();
    if zero.as_ref().is_some_and(|zero| shape::len(&zero.shape) != shape::len(&scale_shape)) {
        return refuse("its scale and its zero point have different shapes");
    }
    if shape::len(&scale_shape) == 1 {
        return Ok((x, [scale, zero], Granularity::Tensor));
    }
    let opset = t.graph.opset();
    let Some(axis) = shape::axis(if opset < 13 { 1 } else { node.int_or("axis", 1) }, x.shape.len()) else {
        return refuse("its axis is out of range");
    };
    let (len, inner) = (x.shape[axis], shape::len(&x.shape[axis + 1..]));
    let granularity = match usize::try_from(node.int_or("block_size", 0)) {
        Ok(0) if scale_shape == [len] => Granularity::Axis { len, inner },
        Ok(block) if block > 0 => {
            let mut expected = x.shape.clone();
            expected[axis] = len.div_ceil(block);
            if scale_shape != expected {
                return refuse(format!("a scale of shape {scale_shape:?} does not fit {:?}", x.shape));
            }
            Granularity::Block { len, inner, block }
        }
        _ => return refuse(format!("a scale of shape {scale_shape:?} does not fit {:?}", x.shape)),
    };
    Ok((x, [scale, zero], granularity))
}
