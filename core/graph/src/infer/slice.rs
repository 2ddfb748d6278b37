//! The index ranges of `Slice`.

use super::context::{Ctx, Ints};
use super::dims;

/// The range that `Slice` takes from one axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Range {
    pub(crate) start: i64,
    pub(crate) end: i64,
    pub(crate) step: i64,
}

impl Range {
    /// First index and step for an axis of `dim` elements, after clamping.
    pub(crate) fn resolve(&self, dim: usize) -> (i64, i64) {
        (self.bounds(dim).0, self.step)
    }
    /// Number of elements taken from an axis of `dim` elements.
    pub(crate) fn len(&self, dim: usize) -> usize {
        if dim == 0 {
            return 0;
        }
        let (start, end) = self.bounds(dim);
        let span = if self.step > 0 { end - start } else { start - end };
        if span <= 0 { 0 } else { ((span - 1) as u64 / self.step.unsigned_abs()) as usize + 1 }
    }
    /// Whether the range covers every element in order, for any axis size.
    pub(crate) fn is_everything(&self) -> bool {
        self.start == 0 && self.step == 1 && self.end >= i64::from(i32::MAX)
    }
    fn bounds(&self, dim: usize) -> (i64, i64) {
        let n = dim as i64;
        let from_front = |v: i64| if v < 0 { v.saturating_add(n) } else { v };
        let (low, high) = if self.step > 0 { (0, n) } else { (-1, n - 1) };
        (from_front(self.start).clamp(low.max(0), high.max(0)), from_front(self.end).clamp(low, high))
    }
}

/// The range of each axis (`None`: untouched). The outer `None` means that the ranges are computed at run time.
pub(crate) fn ranges(c: &Ctx, rank: usize) -> Result<Option<Vec<Option<Range>>>, String> {
    let list = |name, i| c.list(name, i, 10);
    let (starts, ends) = match (list("starts", 1), list("ends", 2)) {
        (Ints::Known(s), Ints::Known(e)) => (s, e),
        (Ints::Absent, _) | (_, Ints::Absent) => return Err("starts and ends are missing".into()),
        _ => return Ok(None),
    };
    let axes = match list("axes", 3) {
        Ints::Absent => (0..starts.len().min(rank)).collect(),
        Ints::Known(a) => dims::axes(&a, rank)?,
        Ints::Unknown => return Ok(None),
    };
    let steps = match if c.opset < 10 { Ints::Absent } else { list("steps", 4) } {
        Ints::Absent => vec![1; starts.len()],
        Ints::Known(s) => s,
        Ints::Unknown => return Ok(None),
    };
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        return Err("starts, ends, axes and steps must have the same length".into());
    }
    let mut out = vec![None; rank];
    for (i, a) in axes.into_iter().enumerate() {
        if steps[i] == 0 || steps[i] == i64::MIN {
            return Err(format!("step {} is not allowed", steps[i]));
        }
        out[a] = Some(Range { start: starts[i], end: ends[i], step: steps[i] });
    }
    Ok(Some(out))
}

/// The axes that a `Slice` with unknown bounds touches, if those are known.
pub(crate) fn touched_axes(c: &Ctx, rank: usize) -> Result<Option<Vec<usize>>, String> {
    match c.list("axes", 3, 10) {
        Ints::Known(a) => dims::axes(&a, rank).map(Some),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::Range;

    #[test]
    fn ranges_clamp_like_python() {
        let r = |start, end, step| Range { start, end, step };
        // (range, axis) -> (first index, number of elements), as in Python.
        for (range, dim, expected) in [
            (r(0, i64::MAX, 1), 5, (0, 5)),
            (r(-3, -1, 1), 5, (2, 2)),
            (r(-100, 100, 2), 5, (0, 3)),
            (r(4, 2, 1), 5, (4, 0)),
            (r(-1, i64::MIN, -1), 5, (4, 5)),
            (r(100, 0, -2), 5, (4, 2)),
        ] {
            assert_eq!((range.resolve(dim).0, range.len(dim)), expected, "{range:?} of {dim}");
        }
        assert_eq!(r(0, i64::MAX, 1).len(0), 0);
        assert_eq!(r(-1, i64::MIN, -1).len(0), 0);
    }
}
