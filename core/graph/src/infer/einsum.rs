//! The equation of `Einsum`.

use super::dims;
use crate::Dim;
use std::collections::BTreeMap;

/// Index of a dimension in an equation: a letter, or (from 256 on) a dimension covered by `...`, counted from the
/// right.
pub(crate) type Label = u32;

const ELLIPSIS: Label = 256;

/// A parsed equation: the labels of each operand's dimensions and of the output's dimensions.
#[derive(Debug, PartialEq)]
pub(crate) struct Equation {
    pub(crate) operands: Vec<Vec<Label>>,
    pub(crate) output: Vec<Label>,
}

impl Equation {
    /// Parses `equation` for operands of the given ranks.
    pub(crate) fn parse(equation: &str, ranks: &[usize]) -> Result<Self, String> {
        let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match text.split_once("->") {
            Some((l, r)) => (l, Some(r)),
            None => (text.as_str(), None),
        };
        let terms: Vec<&str> = left.split(',').collect();
        if terms.len() != ranks.len() {
            return Err(format!(
                "equation {equation:?} has {} operands, but the node has {}",
                terms.len(),
                ranks.len()
            ));
        }
        let operands =
            terms.iter().zip(ranks).map(|(t, r)| labels(t, Some(*r))).collect::<Result<Vec<_>, _>>()?;
        let broadcast =
            operands.iter().flatten().filter(|l| **l >= ELLIPSIS).max().map_or(0, |l| l - ELLIPSIS + 1);
        let output = match right {
            Some(term) => {
                let explicit = labels(term, None)?;
                let expand = |l: Label| match l {
                    ELLIPSIS => (0..broadcast).rev().map(|k| ELLIPSIS + k).collect(),
                    l => vec![l],
                };
                explicit.into_iter().flat_map(expand).collect()
            }
            None => {
                let mut count: BTreeMap<Label, usize> = BTreeMap::new();
                operands.iter().flatten().for_each(|l| *count.entry(*l).or_default() += 1);
                let once = count.into_iter().filter(|(l, n)| *n == 1 && *l < ELLIPSIS).map(|(l, _)| l);
                (0..broadcast).rev().map(|k| ELLIPSIS + k).chain(once).collect::<Vec<_>>()
            }
        };
        for (i, label) in output.iter().enumerate() {
            let used = operands.iter().flatten().any(|l| l == label);
            if !used || output[..i].contains(label) {
                return Err(format!(
                    "the output of equation {equation:?} repeats a dimension or names one that no operand has"
                ));
            }
        }
        Ok(Equation { operands, output })
    }

    /// The size of each label, given the operands' shapes.
    pub(crate) fn sizes(&self, shapes: &[&[Dim]]) -> Result<BTreeMap<Label, Dim>, String> {
        let mut sizes: BTreeMap<Label, Dim> = BTreeMap::new();
        for (labels, shape) in self.operands.iter().zip(shapes) {
            for (label, dim) in labels.iter().zip(*shape) {
                let merged = match sizes.get(label) {
                    None => dim.clone(),
                    Some(d) if *label < ELLIPSIS => dims::same(d, dim)?,
                    Some(d) => {
                        dims::broadcast(std::slice::from_ref(d), std::slice::from_ref(dim))?[0].clone()
                    }
                };
                sizes.insert(*label, merged);
            }
        }
        Ok(sizes)
    }
}

/// The labels of a term. If `rank` is given, `...` expands to as many dimensions as needed to reach it.
fn labels(term: &str, rank: Option<usize>) -> Result<Vec<Label>, String> {
    let (head, tail) = match term.split_once("...") {
        Some((h, t)) => (h, Some(t)),
        None => (term, None),
    };
    let letters = |s: &str| -> Result<Vec<Label>, String> {
        let one = |c: char| c.is_ascii_alphabetic().then_some(c as Label);
        s.chars()
            .map(one)
            .collect::<Option<_>>()
            .ok_or_else(|| format!("equation term {term:?} is malformed"))
    };
    let (mut all, after) = (letters(head)?, letters(tail.unwrap_or(""))?);
    let named = all.len() + after.len();
    match (rank, tail) {
        (Some(r), Some(_)) if r >= named => {
            all.extend((0..(r - named) as Label).rev().map(|k| ELLIPSIS + k));
        }
        (Some(r), None) if r == named => {}
        (None, Some(_)) => all.push(ELLIPSIS),
        (None, None) => {}
        (Some(r), _) => return Err(format!("equation term {term:?} does not fit an operand of rank {r}")),
    }
    all.extend(after);
    Ok(all)
}
