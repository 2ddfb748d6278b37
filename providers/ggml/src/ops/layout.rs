//! Operators that only move elements.

use super::Operator;
use crate::{
    ffi::{MAX_INPUTS, Tensor, Type},
    kernels::{Concat, Gather},
    shape,
    storage::{is_f32, storage_type},
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::{Node, ValueId, eval};

const VIEW: &str = "any type; costs nothing";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "Constant", takes: "any type", translate: constant },
    Operator { name: "Identity", takes: VIEW, translate: same },
    Operator { name: "Flatten", takes: VIEW, translate: same },
    Operator { name: "Reshape", takes: VIEW, translate: same },
    Operator { name: "Squeeze", takes: VIEW, translate: same },
    Operator { name: "Unsqueeze", takes: VIEW, translate: same },
    Operator { name: "Dropout", takes: "any type, one output, not in training mode", translate: dropout },
    Operator { name: "Cast", takes: "between float types, and to the same type", translate: cast },
    Operator { name: "Transpose", takes: "any type, any rank", translate: transpose },
    Operator { name: "Concat", takes: "any type, any rank and number of inputs", translate: concat },
    Operator { name: "Split", takes: "any type, any rank", translate: split },
    Operator { name: "Slice", takes: "any type, constant starts, ends, axes and steps", translate: slice },
    Operator { name: "Expand", takes: "any type, any rank", translate: expand },
    Operator { name: "Tile", takes: "any type, any rank", translate: tile },
    Operator { name: "Gather", takes: "any type, i32 or i64 indices", translate: gather },
    Operator { name: "DepthToSpace", takes: "any type", translate: depth_to_space },
    Operator { name: "SpaceToDepth", takes: "any type", translate: space_to_depth },
];

fn constant(t: &mut Translator<'_>, node: &Node) -> Outcome {
    match eval::evaluate(node, t.graph.opset(), &[]) {
        Ok(mut values) if values.len() == 1 => {
            t.define_constant(node, values.remove(0));
            Ok(())
        }
        Ok(_) => refuse("it does not have one value"),
        Err(error) => refuse(error.to_string()),
    }
}

fn same(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let x = t.operand(id)?;
    t.define(node, 0, x.tensor)
}

fn dropout(t: &mut Translator<'_>, node: &Node) -> Outcome {
    if node.outputs.iter().flatten().count() > 1 {
        return refuse("it has a second output");
    }
    let training = match node.input(2) {
        None => false,
        Some(id) => t.constant(id).and_then(|c| c.to_i64s()).is_none_or(|values| values != [0]),
    };
    if training { refuse("it may be in training mode") } else { same(t, node) }
}

fn cast(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (from, Some(to)) = (t.input_id(node, 0)?, node.output(0)) else { return refuse("it has no output") };
    let (from, to) = (t.dtype(from)?, t.dtype(to)?);
    if from == to || (is_f32(from) && is_f32(to)) {
        same(t, node)
    } else {
        refuse(format!("it casts {from} to {to}"))
    }
}

/// The order of axes of a Transpose.
pub(crate) fn permutation(node: &Node, rank: usize) -> Option<Vec<usize>> {
    let perm: Vec<usize> = match node.ints("perm") {
        None => (0..rank).rev().collect(),
        Some(perm) => perm.iter().map(|axis| usize::try_from(*axis).ok()).collect::<Option<_>>()?,
    };
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    (sorted == (0..rank).collect::<Vec<_>>()).then_some(perm)
}

fn transpose(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let x = t.operand(id)?;
    let Some(perm) = permutation(node, x.shape.len()) else { return refuse("its perm is not a permutation") };
    let y = t.transpose(node, x.tensor, &x.shape, &perm)?;
    t.define(node, 0, y)
}

fn concat(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let out = t.output_shape(node, 0)?;
    let Some(axis) = node.int("axis").and_then(|axis| shape::axis(axis, out.len())) else {
        return refuse("its axis is missing or out of range");
    };
    let outer = shape::len(&out[..axis]);
    let mut parts: Vec<(Tensor, usize)> = Vec::new();
    for id in node.inputs.iter().flatten() {
        // Skip inputs without elements.
        if t.graph.value(*id).known_shape().is_some_and(|shape| shape.contains(&0)) {
            continue;
        }
        let x = t.operand(*id)?;
        parts.push((x.tensor, shape::len(&x.shape) / outer));
    }
    while parts.len() > 1 {
        let group: Vec<(Tensor, usize)> = parts.drain(..parts.len().min(MAX_INPUTS)).collect();
        let (tensors, lens): (Vec<Tensor>, Vec<usize>) = group.into_iter().unzip();
        let (type_, len) = (t.builder.type_of(tensors[0]), lens.iter().sum::<usize>());
        let joined =
            t.custom(node, Concat::new(outer, lens, type_.size()), &tensors, type_, [len, outer, 1, 1])?;
        parts.insert(0, (joined, len));
    }
    match parts.first() {
        Some((tensor, _)) => t.define(node, 0, *tensor),
        None => refuse("it has no input"),
    }
}

fn split(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let x = t.operand(id)?;
    let Some(axis) = shape::axis(node.int_or("axis", 0), x.shape.len()) else {
        return refuse("its axis is out of range");
    };
    let strides = shape::dense(&x.shape);
    let mut start = 0;
    for (i, output) in node.outputs.iter().enumerate() {
        let Some(output) = output else {
            return refuse("an output is missing, so that its length is not known");
        };
        let dims = t.shape(*output)?;
        let part = t.strided(node, x.tensor, &dims, &strides, start * strides[axis].unsigned_abs())?;
        t.define(node, i, part)?;
        start += dims[axis];
    }
    Ok(())
}

fn slice(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let x = t.operand(id)?;
    let out = t.output_shape(node, 0)?;
    let from_inputs = node.inputs.len() > 1;
    let list = |t: &Translator<'_>, i: usize, name: &str| match from_inputs {
        true => t.constant_ints(node, i, &format!("its {name}")),
        false => Ok(node.ints(name).map(<[i64]>::to_vec)),
    };
    let (Some(starts), Some(_)) = (list(t, 1, "starts")?, list(t, 2, "ends")?) else {
        return refuse("it has no starts or ends");
    };
    let axes = list(t, 3, "axes")?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = list(t, 4, "steps")?.unwrap_or_else(|| vec![1; starts.len()]);
    if axes.len() != starts.len() || steps.len() != starts.len() {
        return refuse("its lists have different lengths");
    }
    let dense = shape::strides(&x.shape);
    let mut strides = shape::dense(&x.shape);
    let mut first = 0;
    for ((start, axis), step) in starts.into_iter().zip(axes).zip(steps) {
        let Some(axis) = shape::axis(axis, x.shape.len()) else {
            return refuse(format!("axis {axis} is out of range"));
        };
        let dim = x.shape[axis] as i64;
        let start = if start < 0 { start.saturating_add(dim) } else { start };
        // A non-empty slice begins at an element. The output has its length.
        let start = if step > 0 { start.clamp(0, dim) } else { start.clamp(0, dim - 1) };
        first += start as usize * dense[axis];
        strides[axis] = strides[axis].saturating_mul(isize::try_from(step).unwrap_or(isize::MAX));
    }
    let y = t.strided(node, x.tensor, &out, &strides, first)?;
    t.define(node, 0, y)
}

fn expand(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let x = t.operand(id)?;
    let out = t.output_shape(node, 0)?;
    let Some(strides) = shape::broadcast_strides(&x.shape, &out) else {
        return refuse("its shapes do not broadcast");
    };
    let y = t.strided(node, x.tensor, &out, &strides, 0)?;
    t.define(node, 0, y)
}

fn tile(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let x = t.operand(id)?;
    let out = t.output_shape(node, 0)?;
    // Each axis becomes two: the repetitions, with stride 0, and the axis itself.
    let dense = shape::strides(&x.shape);
    let dims: Vec<usize> = x.shape.iter().zip(&out).flat_map(|(d, o)| [o / d, *d]).collect();
    let strides: Vec<isize> = dense.iter().flat_map(|s| [0, *s as isize]).collect();
    let y = t.strided(node, x.tensor, &dims, &strides, 0)?;
    t.define(node, 0, y)
}

fn gather(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (data_id, index_id) = (t.input_id(node, 0)?, t.input_id(node, 1)?);
    let shape = t.shape(data_id)?;
    let Some(axis) = shape::axis(node.int_or("axis", 0), shape.len()) else {
        return refuse("its axis is out of range");
    };
    let (outer, len, inner) = (shape::len(&shape[..axis]), shape[axis], shape::len(&shape[axis + 1..]));
    // One constant index is a slice.
    if let Some(&[index]) = t.constant(index_id).and_then(|c| c.to_i64s()).as_deref() {
        let Some(index) = shape::axis(index, len) else {
            return refuse(format!("index {index} is out of range"));
        };
        let data = t.operand(data_id)?.tensor;
        let strides = [(len * inner) as isize, 1];
        let y = t.strided(node, data, &[outer, inner], &strides, index * inner)?;
        return t.define(node, 0, y);
    }
    let dtype = t.dtype(data_id)?;
    let Some(type_) = storage_type(dtype) else { return refuse(format!("{dtype} values are not supported")) };
    // Embedding tables are stored in the low precision, if there is one.
    let table = is_f32(dtype) && t.is_stored(data_id) && t.constant(data_id).is_none() && shape.len() > 1;
    let data = match table {
        true => t.weight(data_id, crate::form::Form::Plain, t.matrix_type())?,
        false => t.operand(data_id)?.tensor,
    };
    let indices = t.operand(index_id)?;
    if !matches!(t.builder.type_of(indices.tensor), Type::I32 | Type::I64) {
        return refuse(format!("its indices are {}", indices.dtype));
    }
    let count = shape::len(&indices.shape);
    let kernel = Gather { outer, axis: len, inner, indices: count, size: type_.size() };
    let y = t.custom(node, kernel, &[data, indices.tensor], type_, [inner, outer * count, 1, 1])?;
    t.define(node, 0, y)
}

/// The tensor of an image, and the factor by which its rows and columns are repeated. This avoids copying the result of a Resize.
pub(super) fn repeated(t: &mut Translator<'_>, id: ValueId) -> Outcome<(Tensor, usize)> {
    let resize =
        t.producer(id).filter(|n| n.domain.is_empty() && matches!(&n.op_type[..], "Resize" | "Upsample"));
    if let Some(node) = resize
        && let Ok(factors) = whole_factors(t, node)
        && let [1, 1, height, width] = factors[..]
        && height == width
        && let Some(source) = node.input(0)
    {
        return Ok((t.operand(source)?.tensor, height));
    }
    Ok((t.operand(id)?.tensor, 1))
}

/// The whole factor by which a Resize repeats the elements along each axis.
pub(crate) fn whole_factors(t: &Translator<'_>, node: &Node) -> Outcome<Vec<usize>> {
    let (x, out) = (t.shape(t.input_id(node, 0)?)?, t.output_shape(node, 0)?);
    let mode = node.str("mode").unwrap_or("nearest");
    if mode != "nearest" {
        return refuse(format!("its mode is {mode:?}"));
    }
    let factors: Vec<usize> = x.iter().zip(&out).map(|(d, o)| if o % d == 0 { o / d } else { 0 }).collect();
    if factors.contains(&0) {
        return refuse(format!("it takes {x:?} to {out:?}, not by whole factors"));
    }
    // If the node states scales, they must equal the factors.
    let legacy = node.op_type == "Upsample" || t.graph.opset() < 11;
    if let Some(scales) = node.input(if legacy { 1 } else { 2 }).and_then(|id| t.constant(id)?.to_f32s()) {
        let axes: Option<Vec<usize>> = match node.ints("axes") {
            Some(axes) => axes.iter().map(|axis| shape::axis(*axis, factors.len())).collect(),
            None => Some((0..factors.len()).collect()),
        };
        let exact =
            axes.is_some_and(|axes| axes.iter().zip(&scales).all(|(axis, s)| factors[*axis] as f32 == *s));
        if !exact {
            return refuse(format!("its scales are {scales:?}"));
        }
    } else if node.str("keep_aspect_ratio_policy").is_some_and(|policy| policy != "stretch") {
        return refuse("it keeps the aspect ratio");
    }
    let in_place = if legacy {
        true
    } else {
        let coordinates = node.str("coordinate_transformation_mode").unwrap_or("half_pixel");
        let nearest = node.str("nearest_mode").unwrap_or("round_prefer_floor");
        match (coordinates, nearest) {
            ("asymmetric", "floor") => true,
            // (x + 0.5) / f - 0.5 is less than half away from floor(x / f).
            ("half_pixel" | "half_pixel_symmetric", "round_prefer_floor" | "round_prefer_ceil") => true,
            ("asymmetric", "round_prefer_floor") => factors.iter().all(|f| *f <= 2),
            _ => return refuse(format!("it combines {coordinates:?} with {nearest:?}")),
        }
    };
    if !in_place {
        return refuse("its factors do not repeat elements in place");
    }
    Ok(factors)
}

fn depth_to_space(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, block) = blocks(t, node)?;
    let &[n, c, h, w] = &x.shape[..] else { return refuse("its input is not an image") };
    let depth = c / (block * block);
    let (dims, perm) = match node.str("mode").unwrap_or("DCR") {
        "DCR" => ([n, block, block, depth, h, w], [0, 3, 4, 1, 5, 2]),
        "CRD" => ([n, depth, block, block, h, w], [0, 1, 4, 2, 5, 3]),
        other => return refuse(format!("its mode is {other:?}")),
    };
    let y = t.transpose(node, x.tensor, &dims, &perm)?;
    t.define(node, 0, y)
}

fn space_to_depth(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (x, block) = blocks(t, node)?;
    let &[n, c, h, w] = &x.shape[..] else { return refuse("its input is not an image") };
    let dims = [n, c, h / block, block, w / block, block];
    let perm = match node.str("mode").unwrap_or("DCR") {
        "DCR" => [0, 3, 5, 1, 2, 4],
        "CRD" => [0, 1, 3, 5, 2, 4],
        other => return refuse(format!("its mode is {other:?}")),
    };
    let y = t.transpose(node, x.tensor, &dims, &perm)?;
    t.define(node, 0, y)
}

fn blocks(t: &mut Translator<'_>, node: &Node) -> Outcome<(crate::translate::Operand, usize)> {
    let id = t.input_id(node, 0)?;
    match node.int("blocksize").and_then(|b| usize::try_from(b).ok()).filter(|b| *b > 0) {
        Some(block) => Ok((t.operand(id)?, block)),
        None => refuse("it has no blocksize"),
    }
}
