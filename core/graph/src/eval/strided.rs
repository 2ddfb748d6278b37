//! Iterates over tensors in non-contiguous order.

use super::call::Fault;
use super::number::with_size;
use crate::Tensor;

/// Strides, in elements, of a contiguous tensor.
pub(super) fn contiguous(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i] as isize);
    }
    strides
}

/// Strides that broadcast a contiguous tensor of shape `from` to the shape `to`.
pub(super) fn broadcast(from: &[usize], to: &[usize]) -> Vec<isize> {
    let own = contiguous(from);
    let lead = to.len() - from.len();
    (0..to.len()).map(|i| if i < lead || from[i - lead] == 1 { 0 } else { own[i - lead] }).collect()
}

/// Calls `row(offsets, n, steps)` for each innermost row of `shape`, in order. Operand `k` has the row's first
/// element at `offsets[k]`, and its `n` elements are `steps[k]` apart. Adjacent axes are merged if every operand has
/// a uniform stride across them.
pub(super) fn rows<const K: usize>(
    shape: &[usize],
    strides: [&[isize]; K],
    starts: [usize; K],
    row: &mut dyn FnMut([usize; K], usize, [isize; K]),
) {
    if shape.contains(&0) {
        return;
    }
    let mut axes: Vec<(usize, [isize; K])> = Vec::with_capacity(shape.len());
    for (i, &n) in shape.iter().enumerate().filter(|(_, n)| **n != 1) {
        let steps = strides.map(|s| s[i]);
        match axes.last_mut() {
            Some((m, outer)) if (0..K).all(|k| outer[k] == steps[k] * n as isize) => {
                *m *= n;
                *outer = steps;
            }
            _ => axes.push((n, steps)),
        }
    }
    let (n, steps) = axes.pop().unwrap_or((1, [0; K]));
    let mut at = starts.map(|s| s as isize);
    let mut index = vec![0usize; axes.len()];
    loop {
        row(at.map(|a| a as usize), n, steps);
        let mut axis = axes.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            let (size, outer) = axes[axis];
            index[axis] += 1;
            if index[axis] < size {
                (0..K).for_each(|k| at[k] += outer[k]);
                break;
            }
            index[axis] = 0;
            (0..K).for_each(|k| at[k] -= outer[k] * (size as isize - 1));
        }
    }
}

/// A reordered view of a tensor: element `(i, j, …)` is at `start + i * strides[0] + …`.
pub(super) struct View {
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<isize>,
    pub(super) start: usize,
}

impl View {
    /// The tensor in its own order.
    pub(super) fn of(shape: &[usize]) -> Self {
        View { shape: shape.to_vec(), strides: contiguous(shape), start: 0 }
    }
    /// Permutes the axes.
    pub(super) fn permuted(self, perm: &[usize]) -> Self {
        View {
            shape: perm.iter().map(|p| self.shape[*p]).collect(),
            strides: perm.iter().map(|p| self.strides[*p]).collect(),
            start: self.start,
        }
    }
    /// Whether the view is the whole tensor in its own order.
    fn is_whole(&self) -> bool {
        let natural = contiguous(&self.shape);
        self.start == 0 && (0..self.shape.len()).all(|i| self.shape[i] == 1 || self.strides[i] == natural[i])
    }
    /// Copies the elements in the order of the view.
    pub(super) fn copy<T: Copy>(&self, source: &[T]) -> Vec<T> {
        if self.is_whole() && self.shape.iter().product::<usize>() == source.len() {
            return source.to_vec();
        }
        let mut out = Vec::with_capacity(self.shape.iter().product());
        rows(&self.shape, [&self.strides], [self.start], &mut |[at], n, [step]| match step {
            1 => out.extend_from_slice(&source[at..at + n]),
            0 => out.extend(std::iter::repeat_n(source[at], n)),
            _ => out.extend((0..n as isize).map(|i| source[(at as isize + i * step) as usize])),
        });
        out
    }
    /// Copies the view of `tensor` into a new tensor of shape `shape`.
    pub(super) fn tensor(&self, tensor: &Tensor, shape: Vec<usize>) -> Result<Tensor, Fault> {
        let data =
            with_size!(tensor.dtype(), N => self.copy(tensor.data().as_chunks::<N>().0).into_flattened());
        Ok(Tensor::new(tensor.dtype(), shape, data)?)
    }
}

/// Applies `f` to two operands, broadcast to `shape`.
pub(super) fn zip2<A: Copy, B: Copy, R>(
    shape: &[usize],
    (a, a_shape): (&[A], &[usize]),
    (b, b_shape): (&[B], &[usize]),
    mut f: impl FnMut(A, B) -> R,
) -> Vec<R> {
    let mut out = Vec::with_capacity(shape.iter().product());
    let strides = [&broadcast(a_shape, shape)[..], &broadcast(b_shape, shape)];
    rows(shape, strides, [0, 0], &mut |[i, j], n, [s, t]| match (s, t) {
        (1, 1) => out.extend(a[i..i + n].iter().zip(&b[j..j + n]).map(|(x, y)| f(*x, *y))),
        (1, 0) => out.extend(a[i..i + n].iter().map(|x| f(*x, b[j]))),
        (0, 1) => out.extend(b[j..j + n].iter().map(|y| f(a[i], *y))),
        _ => {
            let (s, t) = (s as usize, t as usize);
            out.extend((0..n).map(|k| f(a[i + k * s], b[j + k * t])));
        }
    });
    out
}

/// Splits `shape` at `axis`: number of elements before it, along it, and after it.
pub(super) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_merge_uniform_axes_and_follow_negative_strides() {
        let mut seen = Vec::new();
        rows(&[2, 3], [&[3, 1]], [0], &mut |[at], n, [step]| seen.push((at, n, step)));
        assert_eq!(seen, [(0, 6, 1)]);
        let reversed = View { shape: vec![2, 2], strides: vec![-3, -2], start: 5 };
        assert_eq!(reversed.copy(&[0, 1, 2, 3, 4, 5]), [5, 3, 2, 0]);
    }

    #[test]
    fn zip2_broadcasts_both_sides() {
        let out = zip2(&[2, 3], (&[10, 20], &[2, 1]), (&[1, 2, 3], &[3]), |a: i32, b: i32| a + b);
        assert_eq!(out, [11, 12, 13, 21, 22, 23]);
        assert!(zip2(&[0, 3], (&[], &[0, 1]), (&[1, 2, 3], &[3]), |a: i32, b: i32| a + b).is_empty());
    }

    #[test]
    fn a_scalar_is_one_row() {
        assert_eq!(View::of(&[]).copy(&[7]), [7]);
    }
}
