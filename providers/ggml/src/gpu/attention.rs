//! Attention.

use super::{combine, operand};
use crate::{
    ffi::{Binary, Home, Tensor, Type},
    ops::check_attention,
    shape,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_abi::{DType, Precision};
use sdrun_graph::{Node, Tensor as HostTensor, ValueId};

/// Queries, keys or values.
struct Heads {
    tensor: Tensor,
    /// Batch, heads, length, size.
    shape: [usize; 4],
    /// Whether the heads of one sequence element lie next to each other.
    inside: bool,
}

impl Heads {
    fn of(t: &mut Translator<'_>, id: ValueId, heads: Option<i64>) -> Outcome<Self> {
        let x = operand(t, id)?;
        let heads = heads.and_then(|heads| usize::try_from(heads).ok()).filter(|heads| *heads > 0);
        let (shape, inside) = match (&x.shape[..], heads) {
            (&[batch, heads, length, size], _) => ([batch, heads, length, size], false),
            (&[batch, length, all], Some(heads)) if all % heads == 0 => {
                ([batch, heads, length, all / heads], true)
            }
            _ => return refuse(format!("an operand is {:?}", x.shape)),
        };
        let [batch, heads, length, size] = shape;
        let extent = if inside { [size, heads, length, batch] } else { [size, length, heads, batch] };
        Ok(Heads { tensor: t.builder.reshape(x.tensor, extent)?, shape, inside })
    }

    /// The strides of batch, heads, length and size.
    fn steps(&self) -> [isize; 4] {
        let [_, heads, length, size] = self.shape.map(|n| n as isize);
        let (head, row) = if self.inside { (size, heads * size) } else { (length * size, size) };
        [heads * length * size, head, row, 1]
    }

    /// A matrix for each head, transposed on request.
    fn matrices(&self, t: &mut Translator<'_>, node: &Node, transposed: bool) -> Outcome<Tensor> {
        let (mut dims, mut steps) = (self.shape, self.steps());
        if transposed {
            dims.swap(2, 3);
            steps.swap(2, 3);
        }
        let matrices = t.strided(node, self.tensor, &dims, &steps, 0)?;
        Ok(t.builder.reshape(matrices, shape::extent(&dims))?)
    }
}

/// The mask as an addend of the scores. Refuses a mask that hides all keys from a query, because the softmax would be NaN.
fn mask(t: &mut Translator<'_>, id: ValueId, causal: bool) -> Outcome<Operand> {
    let Some(seen) = t.constant(id).and_then(HostTensor::elements::<bool>) else { return operand(t, id) };
    let shape = t.shape(id)?;
    let [.., queries, keys] = shape[..] else { return refuse("its mask has less than two dimensions") };
    let sees = |(row, keys): (usize, &[bool])| {
        let keys = if causal { &keys[..keys.len().min(row % queries + 1)] } else { keys };
        keys.contains(&true)
    };
    if keys == 0 || !seen.chunks(keys).enumerate().all(sees) {
        return refuse("its mask hides all keys from a query");
    }
    let added: Vec<f32> = seen.into_iter().map(|seen| if seen { 0.0 } else { f32::NEG_INFINITY }).collect();
    let Ok(added) = HostTensor::from_elements(shape.clone(), &added) else {
        return refuse("its mask is too large");
    };
    Ok(Operand { tensor: t.constant_tensor(added, Home::Device)?, dtype: DType::F32, shape })
}

/// Attention without a cache and without further outputs. A mask must broadcast; it is float, or a bool constant.
pub(super) fn attention(t: &mut Translator<'_>, node: &Node) -> Outcome {
    check_attention(node)?;
    let ids = [t.input_id(node, 0)?, t.input_id(node, 1)?, t.input_id(node, 2)?];
    let q = Heads::of(t, ids[0], node.int("q_num_heads"))?;
    let k = Heads::of(t, ids[1], node.int("kv_num_heads"))?;
    let v = Heads::of(t, ids[2], node.int("kv_num_heads"))?;
    let ([batch, heads, queries, size], [kb, kh, length, ks]) = (q.shape, k.shape);
    let [vb, vh, vl, width] = v.shape;
    if (kb, vb, ks) != (batch, batch, size) || (vh, vl) != (kh, length) || heads % kh != 0 {
        return refuse("its operands do not go together");
    }
    let scale = node.float("scale").unwrap_or_else(|| 1.0 / (size as f32).sqrt());
    let causal = node.int_or("is_causal", 0) != 0;
    let mask = node.input(3).map(|id| mask(t, id, causal)).transpose()?;
    let out = t.output_shape(node, 0)?;
    let inside = out.len() == 3;

    let before = t.builder.tensors();
    if mask.is_none() && !causal {
        let stored = if t.precision() == Precision::Fp32 { Type::F32 } else { Type::F16 };
        let all = [&q, &k, &v];
        let (tensors, places) = (all.map(|x| x.tensor), all.map(|x| x.inside));
        let y = t.builder.flash_attention(tensors, places, stored, scale)?;
        if t.builder.give_to_device(y, before) {
            let y = Heads { tensor: y, shape: [batch, heads, queries, width], inside: true };
            let y = if inside { y.tensor } else { y.matrices(t, node, false)? };
            return t.define(node, 0, y);
        }
    }

    let (q, k) = (q.matrices(t, node, false)?, k.matrices(t, node, false)?);
    let v = v.matrices(t, node, true)?;
    let scores = t.builder.mul_mat(k, q)?;
    let mut scores = t.builder.scale(scores, scale, 0.0)?;
    let dims = [batch, heads, queries, length];
    if let Some(mask) = mask {
        scores = combine(t, Binary::Add, (scores, &dims), (mask.tensor, &mask.shape), &dims)?;
    }
    if causal {
        let after = |i: usize| if i % length > i / length { f32::NEG_INFINITY } else { 0.0 };
        let later: Vec<f32> = (0..queries * length).map(after).collect();
        let Ok(later) = HostTensor::from_elements(vec![queries, length], &later) else {
            return refuse("its mask is too large");
        };
        let later = t.constant_tensor(later, Home::Device)?;
        scores = combine(t, Binary::Add, (scores, &dims), (later, &dims[2..]), &dims)?;
    }
    let weights = t.builder.soft_max(scores)?;
    let y = t.builder.mul_mat(v, weights)?;
    let y = match inside {
        false => y,
        true => {
            let steps = [heads * queries * width, width, queries * width, 1].map(|n| n as isize);
            t.strided(node, y, &[batch, queries, heads, width], &steps, 0)?
        }
    };
    t.define(node, 0, y)
}
