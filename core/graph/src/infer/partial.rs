//! Integer tensors with only some elements known, such as shapes that pass through `Shape → Gather → Concat →
//! Reshape`.

use super::{Ctx, Fact, dims};
use crate::Dim;
use sdrun_abi::DType;

/// An element of a partially known integer tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartialInt {
    /// A number.
    Known(i64),
    /// The size of a named dimension; at least zero.
    Symbol(String),
    /// Unknown.
    Unknown,
}

impl PartialInt {
    pub(crate) fn known(&self) -> Option<i64> {
        match self {
            PartialInt::Known(v) => Some(*v),
            _ => None,
        }
    }
}

impl From<&Dim> for PartialInt {
    fn from(d: &Dim) -> Self {
        match d {
            Dim::Known(n) => i64::try_from(*n).map_or(PartialInt::Unknown, PartialInt::Known),
            Dim::Symbol(s) => PartialInt::Symbol(s.clone()),
            Dim::Unknown => PartialInt::Unknown,
        }
    }
}

impl From<&PartialInt> for Dim {
    fn from(v: &PartialInt) -> Self {
        match v {
            PartialInt::Known(n) => usize::try_from(*n).map_or(Dim::Unknown, Dim::Known),
            PartialInt::Symbol(s) => Dim::Symbol(s.clone()),
            PartialInt::Unknown => Dim::Unknown,
        }
    }
}

/// Maximum length of a tensor whose elements are tracked one by one.
const LIMIT: usize = 256;

/// Elements of a node's only output, if some of them follow from the inputs' elements.
pub(super) fn output_elements(c: &Ctx, output: &Fact) -> Option<Vec<PartialInt>> {
    if !matches!(output.dtype, Some(DType::I64 | DType::I32 | DType::Bool)) {
        return None;
    }
    let len = dims::count(output.shape.as_ref()?).filter(|n| *n <= LIMIT)?;
    let input = |i| c.partial_ints(i);
    let elements = match c.node.op_type.as_str() {
        "Identity" | "Squeeze" | "Unsqueeze" | "Reshape" | "Flatten" => input(0)?,
        "Cast" if c.dtype(0).is_some_and(|t| !t.is_float()) && output.dtype != Some(DType::Bool) => input(0)?,
        "Concat" => (0..c.inputs.len()).map(input).collect::<Option<Vec<_>>>()?.concat(),
        "Gather" if c.shape(0)?.len() == 1 => {
            let data = input(0)?;
            let pick = |i: i64| data.get(dims::axis(i, data.len()).ok()?).cloned();
            c.ints(1)?.into_iter().map(pick).collect::<Option<_>>()?
        }
        "Slice" if c.shape(0)?.len() == 1 => {
            let data = input(0)?;
            let range = super::slice::ranges(c, 1).ok()??.pop()??;
            let (start, step) = range.resolve(data.len());
            let at = |k: usize| data.get(usize::try_from(start + step * k as i64).ok()?).cloned();
            (0..len).map(at).collect::<Option<_>>()?
        }
        "Expand" | "Tile" if input(0)?.len() == 1 => vec![input(0)?[0].clone(); len],
        op @ ("Add" | "Sub" | "Mul" | "Div" | "Equal" | "Min" | "Max") if c.inputs.len() == 2 => {
            zip(&input(0)?, &input(1)?, |a, b| arithmetic(op, a, b))?
        }
        "Where" => {
            let (cond, yes, no) = (input(0)?, input(1)?, input(2)?);
            let chosen = zip(&yes, &no, |a, b| if a == b { a.clone() } else { PartialInt::Unknown })?;
            let at = |v: &[PartialInt], i: usize| v[if v.len() == 1 { 0 } else { i }].clone();
            if [&cond, &yes, &no].iter().any(|v| v.len() != 1 && v.len() != len) {
                return None;
            }
            (0..len)
                .map(|i| match at(&cond, i) {
                    PartialInt::Known(0) => at(&no, i),
                    PartialInt::Known(_) => at(&yes, i),
                    _ => at(&chosen, i),
                })
                .collect()
        }
        _ => return None,
    };
    (elements.len() == len && elements.iter().any(|e| *e != PartialInt::Unknown)).then_some(elements)
}

/// Combines elementwise; a single element broadcasts to the other side's length.
fn zip(
    a: &[PartialInt],
    b: &[PartialInt],
    f: impl Fn(&PartialInt, &PartialInt) -> PartialInt,
) -> Option<Vec<PartialInt>> {
    match (a.len(), b.len()) {
        (n, m) if n == m => Some(a.iter().zip(b).map(|(x, y)| f(x, y)).collect()),
        (1, _) => Some(b.iter().map(|y| f(&a[0], y)).collect()),
        (_, 1) => Some(a.iter().map(|x| f(x, &b[0])).collect()),
        _ => None,
    }
}

fn arithmetic(op: &str, a: &PartialInt, b: &PartialInt) -> PartialInt {
    use PartialInt::{Known, Symbol, Unknown};
    let known = match (op, a, b) {
        ("Add", Known(x), Known(y)) => x.checked_add(*y),
        ("Sub", Known(x), Known(y)) => x.checked_sub(*y),
        ("Mul", Known(x), Known(y)) => x.checked_mul(*y),
        ("Div", Known(x), Known(y)) => x.checked_div(*y),
        ("Min", Known(x), Known(y)) => Some(*x.min(y)),
        ("Max", Known(x), Known(y)) => Some(*x.max(y)),
        ("Equal", Known(x), Known(y)) => Some((x == y) as i64),
        ("Equal", Symbol(_), Known(n)) | ("Equal", Known(n), Symbol(_)) if *n < 0 => Some(0),
        ("Equal", Symbol(x), Symbol(y)) if x == y => Some(1),
        ("Add", x, Known(0)) | ("Add", Known(0), x) | ("Sub", x, Known(0)) => return x.clone(),
        ("Mul", x, Known(1)) | ("Mul", Known(1), x) | ("Div", x, Known(1)) => return x.clone(),
        ("Min" | "Max", Symbol(x), Symbol(y)) if x == y => return a.clone(),
        _ => None,
    };
    known.map_or(Unknown, Known)
}
