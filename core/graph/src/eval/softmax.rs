//! Softmax and related operators.

use super::call::{Call, Fault, Outputs};
use super::number::{Num, load, store, with_float};
use super::strided::{View, around};
use rayon::prelude::*;

/// Turns scores into probabilities. A row of negative infinities becomes NaN, as the definition implies.
pub(super) fn softmax_row<T: Num>(row: &mut [T]) {
    let max = row.iter().fold(f64::NEG_INFINITY, |m, v| m.larger(v.to_f64()));
    let mut sum = 0.0;
    for v in row.iter_mut() {
        let e = (v.to_f64() - max).exp();
        sum += e;
        *v = T::from_f64(e);
    }
    row.iter_mut().for_each(|v| *v = T::from_f64(v.to_f64() / sum));
}

fn log_softmax_row<T: Num>(row: &mut [T]) {
    let max = row.iter().fold(f64::NEG_INFINITY, |m, v| m.larger(v.to_f64()));
    let sum: f64 = row.iter().map(|v| (v.to_f64() - max).exp()).sum();
    row.iter_mut().for_each(|v| *v = T::from_f64(v.to_f64() - max - sum.ln()));
}

fn hardmax_row<T: Num>(row: &mut [T]) {
    let best = (1..row.len()).fold(0, |best, k| if row[k] > row[best] { k } else { best });
    row.iter_mut().enumerate().for_each(|(i, v)| *v = if i == best { T::ONE } else { T::default() });
}

pub(super) fn softmax(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let rank = x.shape().len();
    // Before opset 13, everything from the axis on is one row.
    let (outer, n, inner) = if c.opset() < 13 {
        let axis = match c.node().int_or("axis", 1) {
            a if a == rank as i64 => rank,
            _ => c.axis("axis", 1, rank)?,
        };
        let (before, behind) = x.shape().split_at(axis);
        (before.iter().product(), behind.iter().product(), 1)
    } else {
        around(x.shape(), c.axis("axis", -1, rank)?)
    };
    with_float!(x.dtype(), T => {
        let f: fn(&mut [T]) = match c.node().op_type.as_str() {
            "Softmax" => softmax_row,
            "LogSoftmax" => log_softmax_row,
            "Hardmax" => hardmax_row,
            op => return Err(Fault::Unsupported(format!("{op} is not a softmax"))),
        };
        let values = load::<T>(x)?;
        let mut rows = View::of(&[outer, n, inner]).permuted(&[0, 2, 1]).copy(&values);
        rows.par_chunks_mut(n.max(1)).for_each(f);
        let y = View::of(&[outer, inner, n]).permuted(&[0, 2, 1]).copy(&rows);
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s};

    #[test]
    fn large_scores_do_not_overflow() {
        let x = f32s(&[1, 2], &[1e4, 1e4 + 1.0]);
        assert_close(&Op::new("Softmax").run(&[&x]), &f32s(&[1, 2], &[0.268_941_43, 0.731_058_6]));
        assert_close(&Op::new("LogSoftmax").run(&[&x]), &f32s(&[1, 2], &[-1.313_261_7, -0.313_261_7]));
    }

    #[test]
    fn the_meaning_of_axis_changed_in_opset_13() {
        let x = f32s(&[1, 2, 2], &[0.0; 4]);
        let at = |opset| Op::new("Softmax").opset(opset).int("axis", 1).run(&[&x]);
        assert_close(&at(12), &f32s(&[1, 2, 2], &[0.25; 4]));
        assert_close(&at(13), &f32s(&[1, 2, 2], &[0.5; 4]));
    }

    #[test]
    fn hardmax_takes_the_first() {
        let x = f32s(&[2, 3], &[3.0, 1.0, 2.0, 0.0, 4.0, 4.0]);
        assert_eq!(Op::new("Hardmax").run(&[&x]), f32s(&[2, 3], &[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]));
    }
}
