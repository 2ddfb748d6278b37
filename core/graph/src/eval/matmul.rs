//! Matrix products.

use super::call::{Call, Fault, Outputs};
use super::number::{Num, load, load_as_f64, store, with_float, with_number};
use super::strided::{View, broadcast, rows, zip2};
use crate::Tensor;
use crate::infer::dims;
use rayon::prelude::*;
use sdrun_abi::DType;

/// Tile size in rows and columns of the result, chosen so that a tile stays in the L1 cache.
const ROWS: usize = 8;
const COLUMNS: usize = 1024;

/// Adds the product of `a` (`m × k`) and `b` (`k × n`) to `out` (`m × n`); all are row-major.
pub(super) fn gemm<T: Num>(k: usize, n: usize, a: &[T], b: &[T], out: &mut [T]) {
    if n == 0 || k == 0 {
        return;
    }
    out.par_chunks_mut(ROWS * n).zip(a.par_chunks(ROWS * k)).for_each(|(out, a)| {
        for left in (0..n).step_by(COLUMNS) {
            let right = (left + COLUMNS).min(n);
            for p in 0..k {
                let b = &b[p * n + left..p * n + right];
                for (out, a) in out.chunks_exact_mut(n).zip(a.chunks_exact(k)) {
                    let a = a[p];
                    out[left..right].iter_mut().zip(b).for_each(|(o, b)| *o = o.add(a.mul(*b)));
                }
            }
        }
    });
}

/// NumPy-style product of tensors given as elements and shapes; batch dimensions broadcast. The shapes have passed
/// the operator's inference rule; `shape` is the shape of the result.
pub(super) fn product<T: Num>(
    (a, a_shape): (&[T], &[usize]),
    (b, b_shape): (&[T], &[usize]),
    shape: &[usize],
) -> Vec<T> {
    let (a_batch, a_matrix) = a_shape.split_at(a_shape.len().saturating_sub(2));
    let (b_batch, b_matrix) = b_shape.split_at(b_shape.len().saturating_sub(2));
    let (m, k) = match a_matrix {
        [m, k] => (*m, *k),
        _ => (1, a_shape[0]),
    };
    let n = if b_matrix.len() == 2 { b_matrix[1] } else { 1 };
    // Vector operands drop dimensions from the result.
    let matrix_dims = usize::from(a_shape.len() > 1) + usize::from(b_shape.len() > 1);
    let batch = &shape[..shape.len() - matrix_dims];
    let mut out = vec![T::default(); shape.iter().product()];
    let mut results = out.chunks_exact_mut((m * n).max(1));
    let strides = [&broadcast(a_batch, batch)[..], &broadcast(b_batch, batch)];
    rows(batch, strides, [0, 0], &mut |[i, j], count, [s, t]| {
        for e in 0..count {
            let (i, j) = (i + e * s as usize, j + e * t as usize);
            if let Some(out) = results.next() {
                gemm(k, n, &a[i * m * k..(i + 1) * m * k], &b[j * k * n..(j + 1) * k * n], out);
            }
        }
    });
    out
}

pub(super) fn matmul(c: &Call) -> Outputs {
    let (a, b, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    with_number!(a.dtype(), T => {
        let y = product::<T>((&load(a)?, a.shape()), (&load(b)?, b.shape()), &shape);
        Ok(vec![store(a.dtype(), shape, &y)?])
    })
}

/// Subtracts the zero point, which is a scalar or has one entry per index of axis `axis`.
pub(super) fn shifted(x: &Tensor, zero: Option<&Tensor>, axis: usize) -> Result<Vec<i128>, Fault> {
    let values = load::<i128>(x)?;
    let Some(zero) = zero else { return Ok(values) };
    let zeros = load::<i128>(zero)?;
    let n = if zeros.len() == 1 { None } else { x.shape().get(axis) };
    let mut shape = vec![1; x.shape().len()];
    match n {
        None if zeros.len() == 1 => {}
        Some(n) if zero.len() == *n => shape[axis] = *n,
        // Zero points per matrix or per row have a shape that broadcasts.
        _ => shape = zero.shape().to_vec(),
    }
    dims::broadcast_onto(&dims::known(&shape), &dims::known(x.shape()))?;
    Ok(zip2(x.shape(), (&values, x.shape()), (&zeros, &shape), |v, z| v - z))
}

pub(super) fn matmul_integer(c: &Call) -> Outputs {
    let (a, b, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let values = (
        shifted(a, c.opt(2), a.shape().len().saturating_sub(2))?,
        shifted(b, c.opt(3), b.shape().len().saturating_sub(1))?,
    );
    let y = product((&values.0, a.shape()), (&values.1, b.shape()), &shape);
    Ok(vec![store(DType::I32, shape, &y)?])
}

pub(super) fn gemm_node(c: &Call) -> Outputs {
    let (a, b, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let factor = |name: &str| f64::from(c.node().float(name).unwrap_or(1.0));
    let (alpha, beta) = (factor("alpha"), factor("beta"));
    with_number!(a.dtype(), T => {
        let matrix = |t: &Tensor, transposed: &str| -> Result<Vec<T>, Fault> {
            let view = View::of(t.shape());
            let view = if c.node().int_or(transposed, 0) != 0 { view.permuted(&[1, 0]) } else { view };
            Ok(view.copy(&load::<T>(t)?))
        };
        let k = a.shape()[usize::from(c.node().int_or("transA", 0) == 0)];
        let mut y = vec![T::default(); shape[0] * shape[1]];
        gemm(k, shape[1], &matrix(a, "transA")?, &matrix(b, "transB")?, &mut y);
        let scaled = |v: T, f: f64| if f == 1.0 { v } else { T::from_f64(v.to_f64() * f) };
        y.iter_mut().for_each(|v| *v = scaled(*v, alpha));
        if let Some(bias) = c.opt(2) {
            y = zip2(&shape, (&y, &shape), (&load::<T>(bias)?, bias.shape()), |v, b| v.add(scaled(b, beta)));
        }
        Ok(vec![store(a.dtype(), shape, &y)?])
    })
}

/// Determinants by Gaussian elimination with pivoting.
pub(super) fn det(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let n = x.shape()[x.shape().len() - 1];
    with_float!(x.dtype(), T => {
        let values = load_as_f64(x)?;
        let count: usize = shape.iter().product();
        let dets: Vec<T> = (0..count).map(|i| T::from_f64(determinant(n, &values[i * n * n..(i + 1) * n * n]))).collect();
        Ok(vec![store(x.dtype(), shape, &dets)?])
    })
}

fn determinant(n: usize, matrix: &[f64]) -> f64 {
    let mut m = matrix.to_vec();
    let mut det = 1.0;
    for col in 0..n {
        let pivot =
            (col..n).fold(col, |p, r| if m[r * n + col].abs() > m[p * n + col].abs() { r } else { p });
        if m[pivot * n + col] == 0.0 {
            return 0.0;
        }
        if pivot != col {
            (0..n).for_each(|k| m.swap(pivot * n + k, col * n + k));
            det = -det;
        }
        det *= m[col * n + col];
        for r in col + 1..n {
            let f = m[r * n + col] / m[col * n + col];
            (col..n).for_each(|k| m[r * n + k] -= f * m[col * n + k]);
        }
    }
    det
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s, i64s};
    use crate::Tensor;

    #[test]
    fn products_of_matrices_vectors_and_batches() {
        let a = i64s(&[2, 2], &[1, 2, 3, 4]);
        let v = i64s(&[2], &[1, 1]);
        let run = |x: &Tensor, y: &Tensor| Op::new("MatMul").run(&[x, y]);
        assert_eq!(run(&a, &a), i64s(&[2, 2], &[7, 10, 15, 22]));
        assert_eq!(run(&a, &v), i64s(&[2], &[3, 7]));
        assert_eq!(run(&v, &a), i64s(&[2], &[4, 6]));
        assert_eq!(run(&v, &v), i64s(&[], &[2]));
        let batch = i64s(&[2, 1, 2], &[1, 0, 0, 1]);
        assert_eq!(run(&batch, &a), i64s(&[2, 1, 2], &[1, 2, 3, 4]));
        assert!(Op::new("MatMul").try_run(&[&a, &i64s(&[3], &[1, 2, 3])]).is_err());
    }

    #[test]
    fn blocks_do_not_change_the_result() {
        // Larger than one tile in each direction. Every entry is k times the product of its factors.
        let (m, k, n) = (19, 3, 1500);
        let a: Vec<i64> = (0..m).flat_map(|i| [i; 3]).collect();
        let b: Vec<i64> = (0..k).flat_map(|_| 0..n).collect();
        let y = Op::new("MatMul").run(&[&i64s(&[19, 3], &a), &i64s(&[3, 1500], &b)]);
        let expected: Vec<i64> = (0..m).flat_map(|i| (0..n).map(move |j| 3 * i * j)).collect();
        assert_eq!(y, i64s(&[19, 1500], &expected));
    }

    #[test]
    fn gemm_scales_and_transposes() {
        let (a, b) = (f32s(&[2, 1], &[1.0, 2.0]), f32s(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
        let op = Op::new("Gemm").int("transA", 1).int("transB", 1).float("alpha", 2.0).float("beta", 0.5);
        let y = op.run(&[&a, &b, &f32s(&[1], &[10.0])]);
        assert_close(&y, &f32s(&[1, 3], &[15.0, 27.0, 39.0]));
    }

    #[test]
    fn quantised_products_and_determinants() {
        let (a, b) = (
            Tensor::from_elements(vec![1, 2], &[11u8, 7]).unwrap(),
            Tensor::from_elements(vec![2, 1], &[1u8, 4]).unwrap(),
        );
        let zero = Tensor::scalar(12u8);
        let y = Op::new("MatMulInteger").run(&[&a, &b, &zero]);
        assert_eq!(y.elements::<i32>().unwrap(), [-1 - 20]);
        assert_close(&Op::new("Det").run(&[&f32s(&[2, 2], &[0.0, 2.0, 3.0, 4.0])]), &f32s(&[], &[-6.0]));
    }
}
