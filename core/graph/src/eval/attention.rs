//! Scaled dot-product attention.

use super::call::{Call, Fault, Outputs};
use super::number::{Num, load, load_as_f64, store, with_float};
use super::softmax::softmax_row;
use super::strided::{View, broadcast};
use crate::Tensor;
use rayon::prelude::*;
use sdrun_abi::DType;

/// A query, key or value as `[batch, heads, length, size]`.
struct Heads<T> {
    values: Vec<T>,
    shape: [usize; 4],
}

impl<T: Num> Heads<T> {
    /// Loads `[batch, heads, length, size]`, or `[batch, length, heads * size]` with the head count in attribute
    /// `heads`.
    fn load(c: &Call, input: usize, heads: &str) -> Result<Self, Fault> {
        let x = c.input(input)?;
        let values = load::<T>(x)?;
        Ok(match x.shape() {
            [b, l, hidden] => {
                let h = c.ctx.int(heads)? as usize;
                let view = View::of(&[*b, *l, h, hidden / h]).permuted(&[0, 2, 1, 3]);
                Heads { values: view.copy(&values), shape: [*b, h, *l, hidden / h] }
            }
            [b, h, l, d] => Heads { values, shape: [*b, *h, *l, *d] },
            s => return Err(format!("input {input} must have rank 3 or 4, but its shape is {s:?}").into()),
        })
    }

    /// Prepends the cached `past`.
    fn behind(self, past: Option<&Tensor>) -> Result<Self, Fault> {
        let Some(past) = past else { return Ok(self) };
        let [b, h, l, d] = self.shape;
        let (cached, before) = (load::<T>(past)?, past.shape()[2]);
        let mut values = Vec::with_capacity(b * h * (before + l) * d);
        for head in 0..b * h {
            values.extend_from_slice(&cached[head * before * d..(head + 1) * before * d]);
            values.extend_from_slice(&self.values[head * l * d..(head + 1) * l * d]);
        }
        Ok(Heads { values, shape: [b, h, before + l, d] })
    }

    fn tensor(&self, dtype: DType) -> Result<Tensor, Fault> {
        store(dtype, self.shape.to_vec(), &self.values)
    }
}

/// The bias added to the scores of one query.
struct Bias {
    mask: Option<(Vec<f64>, Vec<isize>, usize)>,
    causal: bool,
    left: i64,
    right: i64,
    /// For each batch: valid keys before the query block, and total valid keys.
    offsets: Vec<i64>,
    valid: Vec<i64>,
}

impl Bias {
    /// For scores of shape `[batch, heads, queries, keys]`.
    fn new(c: &Call, [batch, heads, queries, keys]: [usize; 4]) -> Result<Self, Fault> {
        let mask = match c.opt(3) {
            None => None,
            Some(m) => {
                let boolean = m.dtype() == DType::Bool;
                let bias = |v: f64| match boolean {
                    true if v == 0.0 => f64::NEG_INFINITY,
                    true => 0.0,
                    false => v,
                };
                let values: Vec<f64> = load_as_f64(m)?.into_iter().map(bias).collect();
                let covered = m.shape().last().copied().unwrap_or(0);
                let covered_shape = [batch, heads, queries, covered];
                Some((
                    values,
                    broadcast(m.shape(), &covered_shape),
                    if covered == 1 { keys } else { covered },
                ))
            }
        };
        let past = c.opt(4).map(|t| t.shape()[2] as i64);
        let valid = if c.opt(6).is_some() { c.ints(6)? } else { vec![keys as i64; batch] };
        if valid.len() != batch {
            return Err(format!("nonpad_kv_seqlen must have {batch} entries").into());
        }
        let offset = |n: &i64| match past {
            Some(past) => past,
            None if c.opt(6).is_some() => n - queries as i64,
            None => 0,
        };
        let window = |name: &str| if c.opset() < 25 { -1 } else { c.node().int_or(name, -1) };
        Ok(Bias {
            mask,
            causal: c.node().int_or("is_causal", 0) != 0,
            left: window("left_window_size"),
            right: window("right_window_size"),
            offsets: valid.iter().map(offset).collect(),
            valid,
        })
    }

    fn at(&self, [b, h, i, j]: [usize; 4]) -> f64 {
        let (p, key) = (i as i64 + self.offsets[b], j as i64);
        let hidden = (self.causal && key > p)
            || (self.left >= 0 && key < p - self.left)
            || (self.right >= 0 && key > p + self.right)
            || key >= self.valid[b];
        match &self.mask {
            _ if hidden => f64::NEG_INFINITY,
            Some((_, _, covered)) if j >= *covered => f64::NEG_INFINITY,
            Some((values, s, _)) => {
                values[b * s[0] as usize + h * s[1] as usize + i * s[2] as usize + j * s[3] as usize]
            }
            None => 0.0,
        }
    }
}

pub(super) fn attention(c: &Call) -> Outputs {
    let (dtype, value_dtype) = (c.input(0)?.dtype(), c.input(2)?.dtype());
    with_float!(dtype, T => {
        let q = Heads::<T>::load(c, 0, "q_num_heads")?;
        let k = Heads::<T>::load(c, 1, "kv_num_heads")?.behind(c.opt(4))?;
        let v = load_values::<T>(c, value_dtype)?.behind(c.opt(5))?;
        let [batch, heads, queries, size] = q.shape;
        let [_, kv_heads, keys, _] = k.shape;
        let width = v.shape[3];
        let bias = Bias::new(c, [batch, heads, queries, keys])?;
        let scale = c.node().float("scale").map_or(1.0 / (size as f64).sqrt(), f64::from);
        let softcap = f64::from(c.node().float("softcap").unwrap_or(0.0));
        let mode = c.node().int_or("qk_matmul_output_mode", 0);
        // Per query: its scores over all keys, its output, and its part of output 3.
        let one = |r: usize| -> (Vec<T>, Vec<T>) {
            let (b, h, i) = (r / (heads * queries), r / queries % heads, r % queries);
            let kv = b * kv_heads + h / (heads / kv_heads);
            let (keys_of, values_of) = (&k.values[kv * keys * size..], &v.values[kv * keys * width..]);
            let query = &q.values[r * size..(r + 1) * size];
            let mut shown = Vec::new();
            let mut show = |at: i64, row: &[T]| if c.wants(3) && mode == at { shown = row.to_vec() };
            let dot = |key: &[T]| key.iter().zip(query).fold(T::default(), |sum, (a, b)| sum.add(a.mul(*b)));
            let mut row: Vec<T> =
                (0..keys).map(|j| T::from_f64(dot(&keys_of[j * size..(j + 1) * size]).to_f64() * scale)).collect();
            show(0, &row);
            if softcap != 0.0 {
                row.iter_mut().for_each(|s| *s = T::from_f64(softcap * (s.to_f64() / softcap).tanh()));
            }
            show(1, &row);
            let mut all_hidden = true;
            for (j, s) in row.iter_mut().enumerate() {
                let bias = bias.at([b, h, i, j]);
                all_hidden &= bias == f64::NEG_INFINITY;
                *s = T::from_f64(s.to_f64() + bias);
            }
            show(2, &row);
            // A query that may not attend to any key yields zeros.
            if all_hidden { row.fill(T::default()) } else { softmax_row(&mut row) }
            show(3, &row);
            let mut out = vec![T::default(); width];
            for (j, p) in row.iter().enumerate() {
                let value = &values_of[j * width..(j + 1) * width];
                out.iter_mut().zip(value).for_each(|(o, v)| *o = o.add(p.mul(*v)));
            }
            (out, shown)
        };
        let (outs, shown): (Vec<Vec<T>>, Vec<Vec<T>>) = (0..batch * heads * queries).into_par_iter().map(one).unzip();
        let mut y = outs.concat();
        if c.input(0)?.shape().len() == 3 {
            y = View::of(&[batch, heads, queries, width]).permuted(&[0, 2, 1, 3]).copy(&y);
        }
        let mut outputs = vec![store(dtype, c.out_shape(0)?, &y)?, k.tensor(dtype)?, v.tensor(value_dtype)?];
        if c.wants(3) {
            outputs.push(store(dtype, c.out_shape(3)?, &shown.concat())?);
        }
        Ok(outputs)
    })
}

/// Loads the values in the type that the queries compute in.
fn load_values<T: Num>(c: &Call, dtype: DType) -> Result<Heads<T>, Fault> {
    with_float!(dtype, U => {
        let v = Heads::<U>::load(c, 2, "kv_num_heads")?;
        Ok(Heads { values: v.values.iter().map(|x| T::from_f64(x.to_f64())).collect(), shape: v.shape })
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s};
    use crate::Tensor;

    fn op() -> Op {
        Op::new("Attention").opset(23).float("scale", 1.0)
    }

    /// Two queries and two keys of size one; scores are `q * k`.
    fn qkv() -> [Tensor; 3] {
        let t = |v: &[f32]| f32s(&[1, 1, 2, 1], v);
        [t(&[0.0, 1.0]), t(&[0.0, 1.0]), t(&[10.0, 20.0])]
    }

    #[test]
    fn plain_and_causal() {
        let [q, k, v] = qkv();
        // softmax(0, 0) = ½, ½ and softmax(0, 1) = 0.2689414, 0.7310586.
        assert_close(&op().run(&[&q, &k, &v]), &f32s(&[1, 1, 2, 1], &[15.0, 17.310_585]));
        assert_close(&op().int("is_causal", 1).run(&[&q, &k, &v]), &f32s(&[1, 1, 2, 1], &[10.0, 17.310_585]));
    }

    #[test]
    fn masks_hide_and_a_hidden_row_is_zero() {
        let [q, k, v] = qkv();
        let mask = Tensor::from_elements(vec![2, 2], &[false, false, true, false]).unwrap();
        assert_close(&op().run(&[&q, &k, &v, &mask]), &f32s(&[1, 1, 2, 1], &[0.0, 10.0]));
        let short = f32s(&[1, 1], &[0.0]);
        let y = op().run(&[&q, &k, &v, &short]);
        assert_close(&y, &f32s(&[1, 1, 2, 1], &[15.0, 17.310_585]));
    }

    #[test]
    fn caches_grow_and_heads_are_shared() {
        let [q, k, v] = qkv();
        let past = f32s(&[1, 1, 1, 1], &[0.0]);
        let inputs = [Some(&q), Some(&k), Some(&v), None, Some(&past), Some(&past)];
        let y = op().outputs(3).try_run_optional(&inputs).unwrap();
        assert_eq!(y[1], f32s(&[1, 1, 3, 1], &[0.0, 0.0, 1.0]));
        assert_close(&y[0], &f32s(&[1, 1, 2, 1], &[10.0, 13.641_752]));
        // Two query heads in one row share one key head.
        let q2 = f32s(&[1, 1, 2], &[0.0, 1.0]);
        let (k2, v2) = (f32s(&[1, 2, 1], &[0.0, 1.0]), f32s(&[1, 2, 1], &[10.0, 20.0]));
        let y = op().int("q_num_heads", 2).int("kv_num_heads", 1).run(&[&q2, &k2, &v2]);
        assert_close(&y, &f32s(&[1, 1, 2], &[15.0, 17.310_585]));
    }
}
