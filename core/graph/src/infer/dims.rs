//! Arithmetic on partially known dimensions.

use crate::Dim;

/// Converts sizes to known dimensions.
pub(crate) fn known(shape: &[usize]) -> Vec<Dim> {
    shape.iter().copied().map(Dim::Known).collect()
}

/// A shape with only its rank known.
pub(crate) fn unknown(rank: usize) -> Vec<Dim> {
    vec![Dim::Unknown; rank]
}

/// Number of elements, if every dimension is known.
pub(crate) fn count(shape: &[Dim]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, d| n.checked_mul(d.known()?))
}

/// Merges two dimensions that must be equal; returns the more specific one.
pub(crate) fn same(a: &Dim, b: &Dim) -> Result<Dim, String> {
    match (a, b) {
        (Dim::Known(x), Dim::Known(y)) if x != y => Err(format!("dimension {x} must equal {y}")),
        (Dim::Known(_), _) | (_, Dim::Unknown) => Ok(a.clone()),
        (_, Dim::Known(_)) | (Dim::Unknown, _) => Ok(b.clone()),
        (Dim::Symbol(_), Dim::Symbol(_)) => Ok(a.clone()),
    }
}

/// Merges two shapes that must be equal.
pub(crate) fn same_shape(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, String> {
    if a.len() != b.len() {
        return Err(format!("shapes {} and {} must have the same rank", text(a), text(b)));
    }
    a.iter()
        .zip(b)
        .map(|(x, y)| same(x, y))
        .collect::<Result<_, _>>()
        .map_err(|_| format!("shapes {} and {} must be equal", text(a), text(b)))
}

/// Numpy-style broadcasting of two shapes.
pub(crate) fn broadcast(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, String> {
    let rank = a.len().max(b.len());
    let at = |s: &[Dim], i: usize| match (i + s.len()).checked_sub(rank) {
        Some(k) => s[k].clone(),
        None => Dim::Known(1),
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (Dim::Known(1), d) | (d, Dim::Known(1)) => Ok(d),
            (Dim::Known(x), Dim::Known(y)) if x != y => {
                Err(format!("shapes {} and {} do not broadcast", text(a), text(b)))
            }
            (Dim::Known(n), _) | (_, Dim::Known(n)) => Ok(Dim::Known(n)),
            (x, y) if x == y => Ok(x),
            _ => Ok(Dim::Unknown),
        })
        .collect()
}

/// Checks that `from` broadcasts to `to` and leaves `to` unchanged.
pub(crate) fn broadcast_onto(from: &[Dim], to: &[Dim]) -> Result<(), String> {
    let fits = from.len() <= to.len()
        && from.iter().rev().zip(to.iter().rev()).all(|(f, t)| match (f.known(), t.known()) {
            (Some(f), Some(t)) => f == 1 || f == t,
            _ => true,
        });
    fits.then_some(()).ok_or_else(|| format!("shape {} does not broadcast to {}", text(from), text(to)))
}

/// Applies `f` to a known dimension; otherwise the result is unknown.
pub(crate) fn map(d: &Dim, f: impl FnOnce(usize) -> Option<usize>) -> Dim {
    d.known().and_then(f).map_or(Dim::Unknown, Dim::Known)
}

/// Product of two dimensions. A factor of one keeps the other dimension's name.
pub(crate) fn product(a: &Dim, b: &Dim) -> Dim {
    match (a, b) {
        (Dim::Known(1), d) | (d, Dim::Known(1)) => d.clone(),
        _ => map(a, |x| x.checked_mul(b.known()?)),
    }
}

/// Sum of two dimensions. A term of zero keeps the other dimension's name.
pub(crate) fn sum(a: &Dim, b: &Dim) -> Dim {
    match (a, b) {
        (Dim::Known(0), d) | (d, Dim::Known(0)) => d.clone(),
        _ => map(a, |x| x.checked_add(b.known()?)),
    }
}

/// Formats a shape for messages: `[1, batch, ?]`.
pub(crate) fn text(shape: &[Dim]) -> String {
    let parts: Vec<String> = shape
        .iter()
        .map(|d| match d {
            Dim::Known(n) => n.to_string(),
            Dim::Symbol(s) => s.clone(),
            Dim::Unknown => "?".into(),
        })
        .collect();
    format!("[{}]", parts.join(", "))
}

/// Converts `axis` to a non-negative index; negative axes count from the back.
pub(crate) fn axis(axis: i64, rank: usize) -> Result<usize, String> {
    let r = rank as i64;
    match axis {
        a if (0..r).contains(&a) => Ok(a as usize),
        a if (-r..0).contains(&a) => Ok((a + r) as usize),
        a => Err(format!("axis {a} is out of range for rank {rank}")),
    }
}

/// Converts several axes to non-negative indices; refuses duplicates.
pub(crate) fn axes(values: &[i64], rank: usize) -> Result<Vec<usize>, String> {
    let mut out = Vec::with_capacity(values.len());
    for &v in values {
        let a = axis(v, rank)?;
        if out.contains(&a) {
            return Err(format!("axis {v} is given twice"));
        }
        out.push(a);
    }
    Ok(out)
}
