//! Einstein summation of one or two operands.

use super::{Operator, matmul::stack_product};
use crate::{
    ffi::{Builder, Tensor},
    shape,
    translate::{Operand, Outcome, Translator, refuse},
};
use sdrun_graph::Node;

pub(super) const OPERATORS: &[Operator] = &[Operator {
    name: "Einsum",
    takes: "float, one or two operands, an equation with an output, no label twice in a term, no ellipsis",
    translate: einsum,
}];

/// An operand and the labels of its axes.
struct Term {
    x: Operand,
    labels: Vec<char>,
}

impl Term {
    fn size(&self, label: char) -> Option<usize> {
        Some(self.x.shape[self.labels.iter().position(|l| *l == label)?])
    }
    fn has(&self, label: char) -> bool {
        self.labels.contains(&label)
    }

    /// The tensor with its axes in the order of `labels`, summed over the axes that are not in `labels`.
    fn arranged(&self, t: &mut Translator<'_>, node: &Node, labels: &[char]) -> Outcome<Tensor> {
        let summed = self.labels.iter().copied().filter(|l| !labels.contains(l));
        let order: Vec<char> = labels.iter().copied().chain(summed).collect();
        let perm: Vec<usize> =
            order.iter().filter_map(|l| self.labels.iter().position(|own| own == l)).collect();
        let y = t.transpose(node, self.x.tensor, &self.x.shape, &perm)?;
        let len: usize = perm[labels.len()..].iter().map(|axis| self.x.shape[*axis]).product();
        if perm.len() == labels.len() {
            return Ok(y);
        }
        let rows = t.builder.reshape(y, [len, shape::len(&self.x.shape) / len, 1, 1])?;
        Ok(Builder::sum(&mut t.builder, rows)?)
    }
}

fn einsum(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let equation: String = node.str("equation").unwrap_or_default().chars().filter(|c| *c != ' ').collect();
    let Some((inputs, output)) = equation.split_once("->").filter(|_| !equation.contains('.')) else {
        return refuse(format!("its equation is {equation:?}"));
    };
    let output: Vec<char> = output.chars().collect();
    let mut terms = Vec::new();
    for (i, term) in inputs.split(',').enumerate() {
        let (x, labels) = (t.float(node, i)?, term.chars().collect::<Vec<_>>());
        let distinct = labels.iter().enumerate().all(|(i, l)| !labels[..i].contains(l));
        if labels.len() != x.shape.len() || !distinct {
            return refuse(format!("its equation is {equation:?}"));
        }
        terms.push(Term { x, labels });
    }
    let y = match &terms[..] {
        [one] => one.arranged(t, node, &output)?,
        [a, b] => {
            let of = |keep: &dyn Fn(char) -> bool| -> Vec<char> {
                output.iter().copied().filter(|l| keep(*l)).collect()
            };
            let batch = of(&|l| a.has(l) && b.has(l));
            let (rows, cols) = (of(&|l| !b.has(l)), of(&|l| !a.has(l)));
            let inner: Vec<char> =
                a.labels.iter().copied().filter(|l| b.has(*l) && !output.contains(l)).collect();
            if batch.iter().chain(&inner).any(|l| a.size(*l) != b.size(*l)) {
                return refuse("it broadcasts an axis of one element");
            }
            let size = |labels: &[char]| -> usize {
                labels.iter().filter_map(|l| a.size(*l).or_else(|| b.size(*l))).product()
            };
            let left = a.arranged(t, node, &[&batch[..], &rows, &inner].concat())?;
            let right = b.arranged(t, node, &[&batch[..], &cols, &inner].concat())?;
            let sizes = [size(&batch), size(&rows), size(&cols), size(&inner)];
            let product = stack_product(t, node, left, right, sizes)?;
            let order = [&batch[..], &rows, &cols].concat();
            let dims: Vec<usize> = order.iter().map(|l| size(&[*l])).collect();
            let perm: Vec<usize> = output.iter().filter_map(|l| order.iter().position(|o| o == l)).collect();
            if perm.len() != dims.len() {
                return refuse(format!("its equation is {equation:?}"));
            }
            t.transpose(node, product, &dims, &perm)?
        }
        _ => return refuse(format!("it has {} operands", terms.len())),
    };
    t.define(node, 0, y)
}
