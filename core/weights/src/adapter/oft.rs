//! Orthogonal fine-tuning (Qiu et al., 2023), as in LyCORIS' `DiagOFTModule`.

use ndarray::Array2;
use sdrun_abi::{Error, Result};

/// Returns the matrices that multiply the blocks of rows of a weight from the left.
///
/// With `B` the stored blocks `[number, size, size]`: `Q = B − Bᵀ`. If `‖Q‖` over all blocks exceeds `constraint · number ·
/// size`, Q is scaled down to that; a constraint of 0 means none. `R = (I + Q)(I − Q)⁻¹` (Cayley) is orthogonal. At strength
/// s the result is `s·R + (1 − s)·I`. LyCORIS multiplies by its transpose. (ComfyUI uses the constraint without the number
/// of outputs.)
pub(super) fn rotations(
    values: &[f32],
    number: usize,
    size: usize,
    constraint: f64,
    strength: f32,
) -> Result<Vec<Array2<f32>>> {
    if size == 0 || Some(values.len()) != number.checked_mul(size).and_then(|n| n.checked_mul(size)) {
        return Err(Error::invalid("the blocks of OFT are not as many as their shape says"));
    }
    let blocks: Vec<Array2<f64>> = values
        .chunks_exact(size * size)
        .map(|block| {
            let at = |i: usize, j: usize| f64::from(block[i * size + j]);
            Array2::from_shape_fn((size, size), |(i, j)| at(i, j) - at(j, i))
        })
        .collect();
    let norm = blocks.iter().flatten().map(|q| q * q).sum::<f64>().sqrt();
    let limit = constraint * (number * size) as f64;
    let shrink = if constraint > 0.0 && norm > limit { limit / norm } else { 1.0 };
    let s = f64::from(strength);
    blocks
        .into_iter()
        .map(|q| {
            let r = cayley(&(q * shrink))?;
            let blended = Array2::from_shape_fn((size, size), |(i, j)| {
                // The transpose, see above.
                let identity = if i == j { 1.0 - s } else { 0.0 };
                (s * r[[j, i]] + identity) as f32
            });
            Ok(blended)
        })
        .collect()
}

/// `(I + Q)(I − Q)⁻¹`, which is also `(I − Q)⁻¹(I + Q)`: solves `(I − Q) R = I + Q` by elimination with partial
/// pivoting. `I − Q` is never singular if Q is skew.
fn cayley(q: &Array2<f64>) -> Result<Array2<f64>> {
    let n = q.nrows();
    let mut left = Array2::<f64>::eye(n) - q;
    let mut right = Array2::<f64>::eye(n) + q;
    for column in 0..n {
        let pivot = (column..n).max_by(|a, b| left[[*a, column]].abs().total_cmp(&left[[*b, column]].abs()));
        let pivot = pivot.filter(|row| left[[*row, column]] != 0.0);
        let pivot = pivot.ok_or_else(|| Error::invalid("a block of OFT cannot be inverted"))?;
        for k in 0..n {
            left.swap([pivot, k], [column, k]);
            right.swap([pivot, k], [column, k]);
        }
        let diagonal = left[[column, column]];
        left.row_mut(column).mapv_inplace(|v| v / diagonal);
        right.row_mut(column).mapv_inplace(|v| v / diagonal);
        let (pivot_left, pivot_right) = (left.row(column).to_owned(), right.row(column).to_owned());
        for row in (0..n).filter(|row| *row != column) {
            let factor = left[[row, column]];
            left.row_mut(row).scaled_add(-factor, &pivot_left);
            right.row_mut(row).scaled_add(-factor, &pivot_right);
        }
    }
    Ok(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cayley_is_orthogonal_and_inverts_what_it_divides_by() {
        let n = 5;
        let b = Array2::from_shape_fn((n, n), |(i, j)| ((i * 7 + j * 3) % 11) as f64 / 5.0 - 1.0);
        let q = &b - &b.t();
        let r = cayley(&q).unwrap();
        let identity = Array2::<f64>::eye(n);
        let near = |a: &Array2<f64>, b: &Array2<f64>| (a - b).iter().all(|d| d.abs() < 1e-12);
        assert!(near(&r.dot(&r.t()), &identity));
        assert!(near(&r.dot(&(&identity - &q)), &(&identity + &q)));
    }
}
