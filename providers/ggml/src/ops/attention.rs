//! Attention.

use super::Operator;
use crate::{
    ffi::Type,
    kernels::{Attention, Heads, Layout, Panels},
    shape,
    simd::Level,
    storage::is_f32,
    translate::{Outcome, Translator, View, refuse},
};
use sdrun_abi::DType;
use sdrun_graph::{Node, ValueId};

pub(super) const OPERATORS: &[Operator] = &[Operator {
    name: "Attention",
    takes: "float without cache, softcap and further outputs, with a mask, float or bool, that broadcasts",
    translate: attention,
}];

/// An operand as `[batch, heads, length, size]`.
fn operand(t: &mut Translator<'_>, id: ValueId, heads: Option<usize>) -> Outcome<View> {
    if !is_f32(t.dtype(id)?) {
        return refuse("an operand is not float");
    }
    let view = t.view(id)?;
    match (view.shape.len(), heads) {
        (4, _) => Ok(view),
        (3, Some(heads)) if heads > 0 && view.shape[2] % heads == 0 => {
            let (batch, length, size) = (view.shape[0], view.shape[1], view.shape[2] / heads);
            let step = view.strides[2];
            let strides = vec![view.strides[0], size as isize * step, view.strides[1], step];
            Ok(View { shape: vec![batch, heads, length, size], strides, ..view })
        }
        (3, Some(heads)) => refuse(format!("{heads} heads do not divide its operand")),
        (3, None) => refuse("it does not say how many heads it has"),
        (rank, _) => refuse(format!("an operand has {rank} dimensions")),
    }
}

/// Refuses unsupported forms of attention.
pub(crate) fn check(node: &Node) -> Outcome {
    let windowed = ["left_window_size", "right_window_size"].iter().any(|name| node.int_or(name, -1) != -1);
    let more = node.inputs.iter().skip(4).chain(node.outputs.iter().skip(1)).flatten().count() > 0;
    if more || windowed || node.float("softcap").unwrap_or(0.0) != 0.0 {
        return refuse("it has a cache, a window, a softcap or a second output");
    }
    Ok(())
}

fn attention(t: &mut Translator<'_>, node: &Node) -> Outcome {
    check(node)?;
    let heads = |name: &str| node.int(name).and_then(|n| usize::try_from(n).ok());
    let (q_id, k_id, v_id) = (t.input_id(node, 0)?, t.input_id(node, 1)?, t.input_id(node, 2)?);
    let q = operand(t, q_id, heads("q_num_heads"))?;
    let k = operand(t, k_id, heads("kv_num_heads"))?;
    let v = operand(t, v_id, heads("kv_num_heads"))?;
    let &[batch, heads, queries, size] = &q.shape[..] else { return refuse("its queries have no heads") };
    let (&[kb, kh, length, ks], &[vb, vh, vl, width]) = (&k.shape[..], &v.shape[..]) else {
        return refuse("its keys or values have no heads");
    };
    if (kb, vb) != (batch, batch) || kh != vh || (length, size) != (vl, ks) || kh == 0 || heads % kh != 0 {
        return refuse(format!(
            "its operands {:?}, {:?}, {:?} do not go together",
            q.shape, k.shape, v.shape
        ));
    }
    let mask = match node.input(3) {
        Some(id) if !is_f32(t.dtype(id)?) && t.dtype(id)? != DType::Bool => {
            return refuse("its mask is neither float nor bool");
        }
        Some(id) => {
            let view = t.view(id)?;
            let scores = [batch, heads, queries, length];
            let Some(strides) = shape::broadcast_view(&view.shape, &view.strides, &scores) else {
                return refuse(format!("its mask {:?} does not broadcast", view.shape));
            };
            Some((view.tensor, of_heads(&strides)))
        }
        None => None,
    };
    let scale = node.float("scale").unwrap_or_else(|| 1.0 / (size as f32).sqrt());
    let (level, words) = (Level::detect(), t.words());
    let groups = batch * kh;
    let keys = Panels::left(level, words, [groups, length, size]);
    let values = Panels::left(level, words, [groups, width, length]);
    let pack = |t: &mut Translator<'_>, view: &View, panels: Panels, row: usize| {
        let step = |axis: usize| view.strides[axis].unsigned_abs();
        let layout = Layout { start: 0, row_step: step(row), depth_step: step(5 - row) };
        t.panels(node, view.tensor, panels, layout, &[batch, kh], &view.strides[..2])
    };
    let (k, v) = (pack(t, &k, keys, 2)?, pack(t, &v, values, 3)?);
    let out = t.output_shape(node, 0)?;
    let kernel = Attention {
        level,
        batch,
        heads,
        sharing: heads / kh,
        queries,
        scale,
        q: of_heads(&q.strides),
        keys,
        values,
        mask: mask.as_ref().map(|(_, heads)| heads.clone()),
        causal: node.int_or("is_causal", 0) != 0,
        heads_inside: out.len() == 3,
        taps: Attention::taps(level, &keys),
    };
    let mut inputs = vec![q.tensor, k, v];
    inputs.extend(mask.map(|(tensor, _)| tensor));
    let y = t.custom(node, kernel, &inputs, Type::F32, shape::extent(&out))?;
    t.define(node, 0, y)
}

/// The layout of heads with the four strides of a view.
fn of_heads(strides: &[isize]) -> Heads {
    let layout =
        Layout { start: 0, row_step: strides[2].unsigned_abs(), depth_step: strides[3].unsigned_abs() };
    Heads { strides: [strides[0], strides[1]], layout }
}
