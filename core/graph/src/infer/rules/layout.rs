//! Operators that read, change or permute shapes.

use super::{Ctx, Fact, Facts, Ints, dims, one};
use crate::infer::{PartialInt, slice as ranges};
use crate::{Dim, Tensor};
use sdrun_abi::DType;

pub(super) fn shape(c: &Ctx) -> Facts {
    let Some(s) = &c.need(0)?.shape else { return one(Some(DType::I64), Some(dims::unknown(1))) };
    let rank = s.len() as i64;
    let clamp = |v: i64| (if v < 0 { v.saturating_add(rank) } else { v }).clamp(0, rank) as usize;
    let (start, end) = match c.opset {
        ..15 => (0, s.len()),
        _ => (clamp(c.node.int_or("start", 0)), clamp(c.node.int_or("end", rank))),
    };
    let part = s.get(start..end.max(start)).unwrap_or_default();
    let elements: Vec<PartialInt> = part.iter().map(PartialInt::from).collect();
    if let Some(values) = elements.iter().map(PartialInt::known).collect::<Option<Vec<i64>>>() {
        return Ok(vec![Fact::constant(Tensor::from_i64s(&values))]);
    }
    let mut fact = Fact::new(Some(DType::I64), Some(vec![Dim::Known(elements.len())]));
    fact.elements = Some(elements);
    Ok(vec![fact])
}

pub(super) fn size(c: &Ctx) -> Facts {
    match c.need(0)?.shape.as_deref().and_then(dims::count).and_then(|n| i64::try_from(n).ok()) {
        Some(n) => Ok(vec![Fact::constant(Tensor::scalar(n))]),
        None => one(Some(DType::I64), Some(vec![])),
    }
}

pub(super) fn reshape(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    c.need(1)?;
    let Some(target) = c.partial_vector(1)? else {
        let rank = c.ranked(1, 1)?.and_then(|s| s[0].known()).filter(|r| *r <= 64);
        return one(x.dtype, rank.map(dims::unknown));
    };
    let zero_copies = c.opset < 14 || c.node.int_or("allowzero", 0) == 0;
    let (mut wildcard, mut copied) = (None, Vec::new());
    let mut out = Vec::with_capacity(target.len());
    for (i, t) in target.iter().enumerate() {
        out.push(match t {
            PartialInt::Known(-1) => {
                if wildcard.replace(i).is_some() {
                    return Err("the shape holds -1 twice".into());
                }
                Dim::Known(1)
            }
            PartialInt::Known(0) if zero_copies => {
                copied.push(i);
                let dim = |s: &Vec<Dim>| s.get(i).cloned();
                match x.shape.as_ref().map(dim) {
                    None => Dim::Unknown,
                    Some(Some(d)) => d,
                    Some(None) => return Err(format!("the input has no dimension {i} to copy")),
                }
            }
            PartialInt::Known(n) if *n < 0 => return Err(format!("{n} is not a valid dimension")),
            known => Dim::from(known),
        });
    }
    if wildcard.is_some() && !zero_copies && out.contains(&Dim::Known(0)) {
        return Err("with allowzero the shape cannot hold both 0 and -1".into());
    }
    let rest = x.shape.as_ref().map_or(Ok(Dim::Unknown), |input| quotient(input, &out, &copied));
    match (rest, wildcard) {
        (Ok(rest), Some(i)) => out[i] = rest,
        (Ok(Dim::Known(n)), None) if n != 1 => return Err(reshape_mismatch(x, &out)),
        (Ok(_), None) => {}
        (Err(()), _) => return Err(reshape_mismatch(x, &out)),
    }
    one(x.dtype, Some(out))
}

fn reshape_mismatch(x: &Fact, out: &[Dim]) -> String {
    let from = dims::text(x.shape.as_deref().unwrap_or_default());
    format!("a tensor of shape {from} cannot take the shape {}", dims::text(out))
}

/// Elements of `input` divided by elements of `out`; `Err` if there is a remainder. The dimensions `copied` occur in
/// both.
fn quotient(input: &[Dim], out: &[Dim], copied: &[usize]) -> Result<Dim, ()> {
    let without_copied =
        |s: &[Dim]| (0..s.len()).filter(|i| !copied.contains(i)).map(|i| s[i].clone()).collect::<Vec<_>>();
    let (mut above, mut below) = (without_copied(input), without_copied(out));
    below.retain(|d| match above.iter().position(|a| a == d && matches!(d, Dim::Symbol(_))) {
        Some(p) => {
            above.remove(p);
            false
        }
        None => true,
    });
    let Some(divisor) = dims::count(&below) else { return Ok(Dim::Unknown) };
    let mut numbers = above.iter().filter_map(Dim::known);
    let number = numbers.try_fold(1usize, |n, d| n.checked_mul(d)).ok_or(())?;
    let named: Vec<&Dim> = above.iter().filter(|d| d.known().is_none()).collect();
    match named.as_slice() {
        [] if divisor == 0 => (number == 0).then_some(Dim::Known(1)).ok_or(()),
        [] if number % divisor == 0 => Ok(Dim::Known(number / divisor)),
        [] => Err(()),
        [single] if number == divisor && number > 0 => Ok((*single).clone()),
        _ => Ok(Dim::Unknown),
    }
}

pub(super) fn flatten(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let Some(s) = &x.shape else { return one(x.dtype, Some(dims::unknown(2))) };
    let axis = match c.node.int_or("axis", 1) {
        a if a == s.len() as i64 => s.len(),
        a => dims::axis(a, s.len())?,
    };
    let fold = |part: &[Dim]| part.iter().fold(Dim::Known(1), |a, b| dims::product(&a, b));
    one(x.dtype, Some(vec![fold(&s[..axis]), fold(&s[axis..])]))
}

pub(super) fn squeeze(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let drop: Vec<usize> = match c.list("axes", 1, 13) {
        Ints::Known(axes) => dims::axes(&axes, s.len())?,
        Ints::Unknown => return one(x.dtype, None),
        Ints::Absent if s.iter().all(|d| d.known().is_some()) => {
            (0..s.len()).filter(|i| s[*i] == Dim::Known(1)).collect()
        }
        Ints::Absent => return one(x.dtype, None),
    };
    if let Some(a) = drop.iter().find(|a| s[**a].known().is_some_and(|n| n != 1)) {
        return Err(format!("axis {a} of {} is not 1 and cannot be squeezed", dims::text(s)));
    }
    one(x.dtype, Some((0..s.len()).filter(|i| !drop.contains(i)).map(|i| s[i].clone()).collect()))
}

pub(super) fn unsqueeze(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let axes = match c.list("axes", 1, 13) {
        Ints::Known(axes) => axes,
        Ints::Unknown => return one(x.dtype, None),
        Ints::Absent => return Err("axes are missing".into()),
    };
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let rank = s.len() + axes.len();
    let axes = dims::axes(&axes, rank)?;
    let mut old = s.iter().cloned();
    let dim = |i| if axes.contains(&i) { Dim::Known(1) } else { old.next().unwrap_or(Dim::Unknown) };
    one(x.dtype, Some((0..rank).map(dim).collect()))
}

pub(super) fn expand(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    c.need(1)?;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let Some(target) = c.partial_vector(1)? else {
        let rank = c.ranked(1, 1)?.and_then(|s| s[0].known()).filter(|r| *r <= 64);
        return one(x.dtype, rank.map(|r| dims::broadcast(s, &dims::unknown(r))).transpose()?);
    };
    if let Some(n) = target.iter().filter_map(PartialInt::known).find(|n| *n < 0) {
        return Err(format!("{n} is not a valid dimension"));
    }
    let target: Vec<Dim> = target.iter().map(Dim::from).collect();
    one(x.dtype, Some(dims::broadcast(s, &target)?))
}

pub(super) fn tile(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    c.need(1)?;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let Some(repeats) = c.partial_vector(1)? else { return one(x.dtype, Some(dims::unknown(s.len()))) };
    if repeats.len() != s.len() || repeats.iter().any(|r| r.known().is_some_and(|n| n < 0)) {
        return Err(format!("repeats {repeats:?} do not fit shape {}", dims::text(s)));
    }
    one(x.dtype, Some(s.iter().zip(&repeats).map(|(d, r)| dims::product(d, &Dim::from(r))).collect()))
}

/// The permutation of a `Transpose` of `rank` axes.
pub(crate) fn permutation(c: &Ctx, rank: usize) -> Result<Vec<usize>, String> {
    let Some(perm) = c.node.ints("perm") else { return Ok((0..rank).rev().collect()) };
    let axes = dims::axes(perm, rank)?;
    if axes.len() != rank {
        return Err(format!("perm {perm:?} does not fit rank {rank}"));
    }
    Ok(axes)
}

pub(super) fn transpose(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let Some(s) = &x.shape else {
        return one(x.dtype, c.node.ints("perm").map(|p| dims::unknown(p.len())));
    };
    let perm = permutation(c, s.len())?;
    one(x.dtype, Some(perm.into_iter().map(|i| s[i].clone()).collect()))
}

pub(super) fn concat(c: &Ctx) -> Facts {
    let axis = c.int("axis")?;
    let dtype = c.common_dtype(0..c.inputs.len())?;
    c.need(0)?;
    let Some(first) = (0..c.inputs.len()).find_map(|i| c.shape(i)) else { return one(dtype, None) };
    let axis = dims::axis(axis, first.len())?;
    let (mut out, mut total) = (first.to_vec(), Dim::Known(0));
    for i in 0..c.inputs.len() {
        total = match &c.need(i)?.shape {
            None => Dim::Unknown,
            Some(s) if s.len() != out.len() => {
                return Err(format!("input {i} of shape {} must have rank {}", dims::text(s), out.len()));
            }
            Some(s) => {
                let mut others = s.clone();
                others[axis] = out[axis].clone();
                out = dims::same_shape(&out, &others)?;
                dims::sum(&total, &s[axis])
            }
        };
    }
    out[axis] = total;
    one(dtype, Some(out))
}

/// Sizes of the parts when `Split` cuts an axis of `dim` elements into `parts`; `None` if computed at run time.
pub(crate) fn split_sizes(c: &Ctx, dim: usize, parts: usize) -> Result<Option<Vec<usize>>, String> {
    match c.list("split", 1, 13) {
        Ints::Unknown => Ok(None),
        Ints::Known(sizes) => {
            let sizes = sizes.iter().map(|s| usize::try_from(*s).ok()).collect::<Option<Vec<usize>>>();
            let fits = |v: &Vec<usize>| {
                v.len() == parts && v.iter().try_fold(0usize, |a, b| a.checked_add(*b)) == Some(dim)
            };
            sizes.filter(fits).map(Some).ok_or_else(|| format!("split sizes do not add up to {dim}"))
        }
        Ints::Absent => {
            let parts = match c.opset {
                18.. => usize::try_from(c.node.int_or("num_outputs", parts as i64)).unwrap_or(0),
                _ => parts,
            };
            if c.opset >= 18 && c.node.int("num_outputs").is_some() && parts != c.node.outputs.len() {
                return Err(format!("num_outputs is {parts}, and it has {} outputs", c.node.outputs.len()));
            }
            if parts == 0 || (c.opset < 18 && !dim.is_multiple_of(parts)) {
                return Err(format!("{dim} elements cannot be split into {parts} equal parts"));
            }
            let each = dim.div_ceil(parts);
            let sizes: Vec<usize> = (0..parts).map(|i| dim.saturating_sub(i * each).min(each)).collect();
            Ok(Some(sizes))
        }
    }
}

pub(super) fn split(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let parts = c.node.outputs.len();
    let Some(s) = &x.shape else { return Ok(vec![Fact::new(x.dtype, None); parts]) };
    let axis = dims::axis(c.node.int_or("axis", 0), s.len())?;
    let sizes = match (s[axis].known(), c.list("split", 1, 13)) {
        (Some(dim), _) => split_sizes(c, dim, parts)?.map(|v| dims::known(&v)),
        (None, Ints::Known(v)) => Some(v.iter().map(|n| Dim::from(&PartialInt::Known(*n))).collect()),
        _ => None,
    };
    let part = |i: usize| {
        let mut shape = s.clone();
        shape[axis] = sizes.as_ref().and_then(|v| v.get(i)).cloned().unwrap_or(Dim::Unknown);
        Fact::new(x.dtype, Some(shape))
    };
    Ok((0..parts).map(part).collect())
}

pub(super) fn slice(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let Some(ranges) = ranges::ranges(c, s.len())? else {
        let touched = ranges::touched_axes(c, s.len())?;
        let keep = |i: &usize| touched.as_ref().is_some_and(|t| !t.contains(i));
        let shape = (0..s.len()).map(|i| if keep(&i) { s[i].clone() } else { Dim::Unknown }).collect();
        return one(x.dtype, Some(shape));
    };
    let shape = s.iter().zip(ranges).map(|(d, r)| match r {
        None => d.clone(),
        Some(r) if r.is_everything() => d.clone(),
        Some(r) => dims::map(d, |n| Some(r.len(n))),
    });
    one(x.dtype, Some(shape.collect()))
}

/// Padding before and after each axis; `None` if computed at run time.
pub(crate) fn pads(c: &Ctx, rank: usize) -> Result<Option<Vec<(i64, i64)>>, String> {
    let values = match c.list("pads", 1, 11) {
        Ints::Known(v) => v,
        Ints::Absent => return Err("pads are missing".into()),
        Ints::Unknown => return Ok(None),
    };
    let axes = match if c.opset < 18 { Ints::Absent } else { c.list("axes", 3, 18) } {
        Ints::Absent => (0..rank).collect(),
        Ints::Known(a) => dims::axes(&a, rank)?,
        Ints::Unknown => return Ok(None),
    };
    let n = axes.len();
    if values.len() != 2 * n || values.iter().any(|v| v.unsigned_abs() > 1 << 40) {
        return Err(format!("pads {values:?} do not fit {n} axes"));
    }
    let mut out = vec![(0, 0); rank];
    for (i, a) in axes.into_iter().enumerate() {
        out[a] = (values[i], values[i + n]);
    }
    Ok(Some(out))
}

pub(super) fn pad(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let Some(pads) = pads(c, s.len())? else { return one(x.dtype, Some(dims::unknown(s.len()))) };
    let mut out = Vec::with_capacity(s.len());
    for (d, (before, behind)) in s.iter().zip(pads) {
        out.push(match d.known() {
            None if (before, behind) == (0, 0) => d.clone(),
            None => Dim::Unknown,
            Some(n) => {
                let size = i64::try_from(n).ok().and_then(|n| n.checked_add(before + behind));
                let size = size.and_then(|n| usize::try_from(n).ok());
                Dim::Known(
                    size.ok_or_else(|| {
                        format!("padding {before}+{behind} removes more than the {n} elements")
                    })?,
                )
            }
        });
    }
    one(x.dtype, Some(out))
}

pub(super) fn center_crop_pad(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    c.need(1)?;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let axes = match c.node.ints("axes") {
        Some(a) => dims::axes(a, s.len())?,
        None => (0..s.len()).collect(),
    };
    let mut out = s.clone();
    let target = c.partial_vector(1)?;
    if target.as_ref().is_some_and(|t| t.len() != axes.len()) {
        return Err(format!("the shape must have {} entries", axes.len()));
    }
    for (i, a) in axes.into_iter().enumerate() {
        out[a] = target.as_ref().map_or(Dim::Unknown, |t| Dim::from(&t[i]));
    }
    one(x.dtype, Some(out))
}

fn block_size(c: &Ctx) -> Result<usize, String> {
    let block = c.int("blocksize")?;
    usize::try_from(block)
        .ok()
        .filter(|b| (1..=1 << 20).contains(b))
        .ok_or_else(|| format!("blocksize {block} is out of range"))
}

pub(super) fn depth_to_space(c: &Ctx) -> Facts {
    let (x, b) = (c.need(0)?, block_size(c)?);
    let Some(s) = c.ranked(0, 4)? else { return one(x.dtype, Some(dims::unknown(4))) };
    if s[1].known().is_some_and(|n| n % (b * b) != 0) {
        return Err(format!("the channels of {} are not a multiple of {}", dims::text(s), b * b));
    }
    let grow = |d: &Dim| dims::product(d, &Dim::Known(b));
    let channels = dims::map(&s[1], |n| Some(n / (b * b)));
    one(x.dtype, Some(vec![s[0].clone(), channels, grow(&s[2]), grow(&s[3])]))
}

pub(super) fn space_to_depth(c: &Ctx) -> Facts {
    let (x, b) = (c.need(0)?, block_size(c)?);
    let Some(s) = c.ranked(0, 4)? else { return one(x.dtype, Some(dims::unknown(4))) };
    if s[2..].iter().any(|d| d.known().is_some_and(|n| n % b != 0)) {
        return Err(format!("the image of {} is not a multiple of {b}", dims::text(s)));
    }
    let shrink = |d: &Dim| dims::map(d, |n| Some(n / b));
    let channels = dims::product(&s[1], &Dim::Known(b * b));
    one(x.dtype, Some(vec![s[0].clone(), channels, shrink(&s[2]), shrink(&s[3])]))
}
