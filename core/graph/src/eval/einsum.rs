//! Einstein summation.

use super::call::{Call, Fault, Outputs};
use super::number::{Num, load, store, with_number};
use super::strided::{contiguous, rows};
use crate::infer::dims;
use crate::infer::einsum::{Equation, Label};
use std::collections::BTreeMap;

/// A tensor with labelled dimensions; each label occurs once.
struct Labelled<T> {
    labels: Vec<Label>,
    values: Vec<T>,
}

/// Strides of an operand along `axes`: zero where it lacks the dimension or broadcasts. Repeated labels step along
/// the diagonal.
fn strides(labels: &[Label], shape: &[usize], axes: &[Label]) -> Vec<isize> {
    let own = contiguous(shape);
    let along = |axis: &Label| {
        let dims = (0..labels.len()).filter(|i| labels[*i] == *axis && shape[*i] != 1);
        dims.map(|i| own[i]).sum()
    };
    axes.iter().map(along).collect()
}

pub(super) fn einsum(c: &Call) -> Outputs {
    let shape = c.out_shape(0)?;
    let mut operands = Vec::with_capacity(c.inputs.len());
    for i in 0..c.inputs.len() {
        operands.push(c.input(i)?);
    }
    let equation = c.node().str("equation").ok_or("attribute equation is missing")?;
    let equation = Equation::parse(equation, &operands.iter().map(|t| t.shape().len()).collect::<Vec<_>>())?;
    let shapes: Vec<_> = operands.iter().map(|t| dims::known(t.shape())).collect();
    let sizes: BTreeMap<Label, usize> = equation
        .sizes(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>())?
        .into_iter()
        .filter_map(|(l, d)| Some((l, d.known()?)))
        .collect();
    let dtype = operands[0].dtype();
    with_number!(dtype, T => {
        // Contracts one operand at a time and keeps the labels that later operands or the output still need.
        let mut left = Labelled::<T> { labels: vec![], values: vec![T::ONE] };
        for (i, operand) in operands.iter().enumerate() {
            let rest = equation.operands[i + 1..].iter().flatten().chain(&equation.output);
            let last = i + 1 == operands.len();
            let mut kept: Vec<Label> = Vec::new();
            for l in rest {
                let here = left.labels.contains(l) || equation.operands[i].contains(l);
                if here && !kept.contains(l) {
                    kept.push(*l);
                }
            }
            let kept = if last { equation.output.clone() } else { kept };
            left = contract(&left, (&equation.operands[i], operand.shape(), &load::<T>(operand)?), kept, &sizes)?;
        }
        Ok(vec![store(dtype, shape, &left.values)?])
    })
}

/// Multiplies two operands and sums over the labels that are not kept.
fn contract<T: Num>(
    left: &Labelled<T>,
    (labels, shape, values): (&[Label], &[usize], &[T]),
    kept: Vec<Label>,
    sizes: &BTreeMap<Label, usize>,
) -> Result<Labelled<T>, Fault> {
    let mut axes = kept.clone();
    for l in left.labels.iter().chain(labels) {
        if !axes.contains(l) {
            axes.push(*l);
        }
    }
    let size = |labels: &[Label]| labels.iter().map(|l| sizes[l]).collect::<Vec<usize>>();
    let (walk, left_shape, out_shape) = (size(&axes), size(&left.labels), size(&kept));
    let count = out_shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).filter(|n| *n <= 1 << 28);
    let count = count.ok_or_else(|| Fault::Unsupported("an intermediate result is too large".into()))?;
    let mut out = vec![T::default(); count];
    let steps = [
        &strides(&left.labels, &left_shape, &axes)[..],
        &strides(labels, shape, &axes),
        &strides(&kept, &out_shape, &axes),
    ];
    rows(&walk, steps, [0; 3], &mut |[a, b, o], n, [s, t, u]| {
        let term = |k: usize| left.values[a + k * s as usize].mul(values[b + k * t as usize]);
        if u == 0 {
            out[o] = (0..n).fold(out[o], |sum, k| sum.add(term(k)));
        } else {
            (0..n).for_each(|k| {
                let at = o + k * u as usize;
                out[at] = out[at].add(term(k));
            });
        }
    });
    Ok(Labelled { labels: kept, values: out })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, i64s};
    use crate::Tensor;

    fn run(equation: &str, inputs: &[&Tensor]) -> Tensor {
        Op::new("Einsum").str("equation", equation).run(inputs)
    }

    #[test]
    fn products_sums_and_diagonals() {
        let a = i64s(&[2, 2], &[1, 2, 3, 4]);
        assert_eq!(run("ij,jk->ik", &[&a, &a]), i64s(&[2, 2], &[7, 10, 15, 22]));
        assert_eq!(run("ij->ji", &[&a]), i64s(&[2, 2], &[1, 3, 2, 4]));
        assert_eq!(run("ii", &[&a]), i64s(&[], &[5]));
        assert_eq!(run("ii->i", &[&a]), i64s(&[2], &[1, 4]));
        assert_eq!(
            run("i,j->ij", &[&i64s(&[2], &[1, 2]), &i64s(&[2], &[3, 4])]),
            i64s(&[2, 2], &[3, 4, 6, 8])
        );
        assert_eq!(run("ij,jk,kl->il", &[&a, &a, &a]), i64s(&[2, 2], &[37, 54, 81, 118]));
    }

    #[test]
    fn ellipses_broadcast() {
        let a = i64s(&[2, 1, 2], &[1, 2, 3, 4]);
        let b = i64s(&[2, 2], &[1, 0, 0, 1]);
        assert_eq!(run("...ij,...jk->...ik", &[&a, &b]), i64s(&[2, 1, 2], &[1, 2, 3, 4]));
        assert!(Op::new("Einsum").str("equation", "ij->ik").try_run(&[&b]).is_err());
    }
}
