//! Matrix products, `Einsum` and attention.

use super::{Ctx, Fact, Facts, dims, one};
use crate::Dim;
use crate::infer::einsum::Equation;
use sdrun_abi::DType;

/// Shape of a NumPy-style matrix product.
fn product(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, String> {
    let (Some(inner_a), Some(_)) = (a.last(), b.last()) else {
        return Err("scalars cannot be multiplied".into());
    };
    let inner_b = &b[b.len().saturating_sub(2)];
    dims::same(inner_a, inner_b).map_err(|_| {
        format!("matrices of shapes {} and {} cannot be multiplied", dims::text(a), dims::text(b))
    })?;
    let mut out = dims::broadcast(&a[..a.len().saturating_sub(2)], &b[..b.len().saturating_sub(2)])?;
    if a.len() > 1 {
        out.push(a[a.len() - 2].clone());
    }
    if b.len() > 1 {
        out.push(b[b.len() - 1].clone());
    }
    Ok(out)
}

fn product_of(c: &Ctx, a: usize, b: usize) -> Result<Option<Vec<Dim>>, String> {
    match (&c.need(a)?.shape, &c.need(b)?.shape) {
        (Some(a), Some(b)) => product(a, b).map(Some),
        _ => Ok(None),
    }
}

pub(super) fn matmul(c: &Ctx) -> Facts {
    let shape = product_of(c, 0, 1)?;
    one(c.common_dtype([0, 1])?, shape)
}

pub(super) fn matmul_integer(c: &Ctx) -> Facts {
    one(Some(DType::I32), product_of(c, 0, 1)?)
}

/// The shape of the product of inputs 0 and 1.
pub(super) fn matmul_shape(c: &Ctx) -> Result<Option<Vec<Dim>>, String> {
    product_of(c, 0, 1)
}

pub(super) fn qlinear_matmul(c: &Ctx) -> Facts {
    (0..8).try_for_each(|i| c.need(i).map(drop))?;
    one(c.dtype(7), product_of(c, 0, 3)?)
}

pub(super) fn gemm(c: &Ctx) -> Facts {
    c.need(0)?;
    c.need(1)?;
    let dtype = c.common_dtype([0, 1, 2])?;
    let matrix = |i: usize, transposed: &str| -> Result<[Dim; 2], String> {
        let Some(s) = c.ranked(i, 2)? else { return Ok([Dim::Unknown, Dim::Unknown]) };
        let (rows, columns) = (s[0].clone(), s[1].clone());
        Ok(if c.node.int_or(transposed, 0) != 0 { [columns, rows] } else { [rows, columns] })
    };
    let ([m, k], [k_b, n]) = (matrix(0, "transA")?, matrix(1, "transB")?);
    dims::same(&k, &k_b).map_err(|e| format!("the inner dimensions differ: {e}"))?;
    let out = vec![m, n];
    if let Some(s) = c.shape(2) {
        dims::broadcast_onto(s, &out)?;
    }
    one(dtype, Some(out))
}

pub(super) fn einsum(c: &Ctx) -> Facts {
    let dtype = c.common_dtype(0..c.inputs.len())?;
    let text = c.node.str("equation").ok_or("attribute equation is missing")?;
    let mut shapes = Vec::with_capacity(c.inputs.len());
    for i in 0..c.inputs.len() {
        match &c.need(i)?.shape {
            Some(s) => shapes.push(s.as_slice()),
            None => return one(dtype, None),
        }
    }
    let equation = Equation::parse(text, &shapes.iter().map(|s| s.len()).collect::<Vec<_>>())?;
    let sizes = equation.sizes(&shapes)?;
    one(dtype, Some(equation.output.iter().map(|l| sizes.get(l).cloned().unwrap_or(Dim::Unknown)).collect()))
}

pub(super) fn det(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let Some(s) = c.ranked_at_least(0, 2)? else { return one(x.dtype, None) };
    let (batch, matrix) = s.split_at(s.len() - 2);
    dims::same(&matrix[0], &matrix[1])?;
    one(x.dtype, Some(batch.to_vec()))
}

/// `[batch, heads, length, size]` of a query, key or value that is 4D or `[batch, length, heads * size]`.
fn heads(c: &Ctx, input: usize, attribute: &str) -> Result<Option<[Dim; 4]>, String> {
    let fact = c.need(input)?;
    match fact.shape.as_deref() {
        None => Ok(None),
        Some([b, h, l, d]) => Ok(Some([b.clone(), h.clone(), l.clone(), d.clone()])),
        Some([b, l, hidden]) => {
            let n = usize::try_from(c.int(attribute)?).ok().filter(|n| *n > 0);
            let n = n.ok_or_else(|| format!("attribute {attribute} must be positive"))?;
            if hidden.known().is_some_and(|h| h % n != 0) {
                return Err(format!(
                    "hidden size {hidden:?} of input {input} is not a multiple of {n} heads"
                ));
            }
            Ok(Some([b.clone(), Dim::Known(n), l.clone(), dims::map(hidden, |h| Some(h / n))]))
        }
        Some(s) => Err(format!("input {input} must have rank 3 or 4, but its shape is {}", dims::text(s))),
    }
}

pub(super) fn attention(c: &Ctx) -> Facts {
    let dtype = c.common_dtype([0, 1])?;
    // 0 means none.
    if c.node.float("softcap").is_some_and(|cap| cap < 0.0) {
        return Err("softcap must not be negative".into());
    }
    // -1 means none.
    if ["left_window_size", "right_window_size"].iter().any(|name| c.node.int_or(name, -1) < -1) {
        return Err("the sizes of its window must not be negative".into());
    }
    let q = heads(c, 0, "q_num_heads")?;
    let k = heads(c, 1, "kv_num_heads")?;
    let v = heads(c, 2, "kv_num_heads")?;
    if c.opt(4).is_some() != c.opt(5).is_some() {
        return Err("past_key and past_value must be given together".into());
    }
    let (Some(q), Some(k), Some(v)) = (q, k, v) else {
        let rank = c.shape(0).map(|s| dims::unknown(s.len()));
        let cache = Some(dims::unknown(4));
        return Ok(vec![
            Fact::new(dtype, rank),
            Fact::new(dtype, cache.clone()),
            Fact::new(c.dtype(2), cache.clone()),
            Fact::new(dtype, cache),
        ]);
    };
    if c.shape(1).map(<[Dim]>::len) != c.shape(0).map(<[Dim]>::len)
        || c.shape(2).map(<[Dim]>::len) != c.shape(0).map(<[Dim]>::len)
    {
        return Err("query, key and value must have the same rank".into());
    }
    let batch = dims::same(&dims::same(&q[0], &k[0])?, &v[0])?;
    dims::same(&q[3], &k[3]).map_err(|e| format!("head sizes of query and key: {e}"))?;
    dims::same(&k[1], &v[1]).map_err(|e| format!("heads of key and value: {e}"))?;
    dims::same(&k[2], &v[2]).map_err(|e| format!("lengths of key and value: {e}"))?;
    if let (Some(a), Some(b)) = (q[1].known(), k[1].known())
        && (b == 0 || a % b != 0)
    {
        return Err(format!("{a} query heads are not a multiple of {b} key heads"));
    }
    let mut total = k[2].clone();
    for (input, fresh) in [(4, &k), (5, &v)] {
        if c.opt(input).is_none() {
            continue;
        }
        match c.ranked(input, 4)? {
            None => total = Dim::Unknown,
            Some(past) => {
                for axis in [0, 1, 3] {
                    dims::same(&past[axis], &fresh[axis])
                        .map_err(|e| format!("past of input {input}: {e}"))?;
                }
                total = dims::sum(&past[2], &fresh[2]);
            }
        }
    }
    if let (Some(keys), Some(values)) = (c.shape(4), c.shape(5)) {
        dims::same(&keys[2], &values[2]).map_err(|e| format!("lengths of past_key and past_value: {e}"))?;
    }
    let scores = vec![batch.clone(), q[1].clone(), q[2].clone(), total.clone()];
    if let Some(mask) = c.shape(3) {
        let (last, rest) = mask.split_last().ok_or("the attention mask must not be a scalar")?;
        dims::broadcast_onto(rest, &scores[..3])?;
        // A shorter mask is extended with "do not attend".
        if let (Some(m), Some(t)) = (last.known(), total.known())
            && m > t
        {
            return Err(format!("the attention mask covers {m} keys of {t}"));
        }
    }
    let output = match c.shape(0).map(<[Dim]>::len) {
        Some(3) => vec![batch.clone(), q[2].clone(), dims::product(&q[1], &v[3])],
        _ => vec![batch.clone(), q[1].clone(), q[2].clone(), v[3].clone()],
    };
    let present = |x: &[Dim; 4]| vec![batch.clone(), x[1].clone(), total.clone(), x[3].clone()];
    Ok(vec![
        Fact::new(dtype, Some(output)),
        Fact::new(dtype, Some(present(&k))),
        Fact::new(c.dtype(2), Some(present(&v))),
        Fact::new(dtype, Some(scores)),
    ])
}
