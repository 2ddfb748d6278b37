//! Rotary position embedding.

use super::call::{Call, Fault, Outputs};
use super::gather::position;
use super::number::{Num, load, store, with_float};
use super::strided::broadcast;
use crate::infer::dims;

/// Rotates pairs of elements in each head by the angle of the token's position.
pub(super) fn rotary_embedding(c: &Call) -> Outputs {
    let (x, cos, sin) = (c.input(0)?, c.input(1)?, c.input(2)?);
    // Offset of token `l`, head `h` in batch `b`.
    let (batch, heads, length, size, by_head) = match x.shape() {
        [b, h, l, d] => (*b, *h, *l, *d, true),
        [b, l, hidden] => {
            let h = usize::try_from(c.ctx.int("num_heads")?).ok().filter(|h| *h > 0 && hidden % h == 0);
            let h = h.ok_or_else(|| format!("num_heads does not divide the hidden size {hidden}"))?;
            (*b, h, *l, hidden / h, false)
        }
        s => return Err(format!("the input must have rank 3 or 4, but its shape is {s:?}").into()),
    };
    let rotated = match c.node().int_or("rotary_embedding_dim", 0) {
        0 => size,
        d => usize::try_from(d).ok().filter(|d| *d <= size).ok_or("rotary_embedding_dim is out of range")?,
    };
    let half = rotated / 2;
    let interleaved = c.node().int_or("interleaved", 0) != 0;
    if cos.shape() != sin.shape() || cos.shape().last() != Some(&half) || rotated % 2 != 0 {
        return Err(format!(
            "caches of shapes {:?} and {:?} do not fit {rotated} rotated elements",
            cos.shape(),
            sin.shape()
        )
        .into());
    }
    // The cache row of each token.
    let rows: Vec<usize> = match (c.opt(3), cos.shape()) {
        (Some(ids), [positions, _]) if ids.len() == batch * length => {
            c.ints(3)?.into_iter().map(|i| position(i, *positions)).collect::<Result<_, Fault>>()?
        }
        (None, [b, l, _]) => {
            dims::broadcast_onto(&dims::known(&[*b, *l]), &dims::known(&[batch, length]))?;
            let steps = broadcast(&[*b, *l], &[batch, length]);
            (0..batch * length)
                .map(|i| i / length * steps[0] as usize + i % length * steps[1] as usize)
                .collect()
        }
        _ => return Err("the shapes of the caches do not match the positions".into()),
    };
    with_float!(x.dtype(), T => {
        let (mut y, cos, sin) = (load::<T>(x)?, load::<T>(cos)?, load::<T>(sin)?);
        for (i, head) in y.chunks_exact_mut(size.max(1)).enumerate() {
            let token = match by_head {
                true => i / (heads * length) * length + i % length,
                false => i / heads,
            };
            let row = rows[token] * half;
            for k in 0..half {
                let (a, b) = if interleaved { (2 * k, 2 * k + 1) } else { (k, k + half) };
                let (cos, sin, u, v) = (cos[row + k], sin[row + k], head[a], head[b]);
                head[a] = cos.mul(u).sub(sin.mul(v));
                head[b] = sin.mul(u).add(cos.mul(v));
            }
        }
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s, i64s};

    #[test]
    fn a_quarter_turn() {
        // One batch, one head, two tokens; the second token is rotated by 90°.
        let x = f32s(&[1, 1, 2, 4], &[1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
        let (cos, sin) = (f32s(&[2, 2], &[1.0, 1.0, 0.0, 0.0]), f32s(&[2, 2], &[0.0, 0.0, 1.0, 1.0]));
        let ids = i64s(&[1, 2], &[0, 1]);
        let y = Op::new("RotaryEmbedding").opset(23).run(&[&x, &cos, &sin, &ids]);
        assert_close(&y, &f32s(&[1, 1, 2, 4], &[1.0, 2.0, 3.0, 4.0, -3.0, -4.0, 1.0, 2.0]));
        let y = Op::new("RotaryEmbedding").opset(23).int("interleaved", 1).run(&[&x, &cos, &sin, &ids]);
        assert_close(&y, &f32s(&[1, 1, 2, 4], &[1.0, 2.0, 3.0, 4.0, -2.0, 1.0, -4.0, 3.0]));
    }
}
