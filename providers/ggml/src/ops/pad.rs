//! Padding.

use super::Operator;
use crate::{
    kernels::Pad,
    shape,
    storage::{into_storage, storage_type},
    translate::{Outcome, Translator, refuse},
};
use sdrun_graph::Node;

/// The most elements of all axes of an output together: the source of each is listed, in 16 bytes.
const MOST_POSITIONS: usize = 1 << 26;

pub(super) const OPERATORS: &[Operator] = &[Operator {
    name: "Pad",
    takes: "any type, constant pads and value, all modes, also negative pads",
    translate: pad,
}];

fn pad(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let id = t.input_id(node, 0)?;
    let (x, out) = (t.operand(id)?, t.output_shape(node, 0)?);
    let rank = x.shape.len();
    let pads = pads(t, node)?;
    let axes = match t.constant_ints(node, 3, "its axes")? {
        None => (0..rank).collect(),
        Some(axes) => match axes.iter().map(|axis| shape::axis(*axis, rank)).collect::<Option<Vec<_>>>() {
            Some(axes) => axes,
            None => return refuse(format!("its axes are {axes:?}")),
        },
    };
    if rank == 0 || pads.len() != 2 * axes.len() {
        return refuse(format!("it has {} pads for {} axes", pads.len(), axes.len()));
    }
    let mut before = vec![0; rank];
    axes.iter().zip(&pads).for_each(|(axis, pad)| before[*axis] = *pad);
    let mode = node.str("mode").unwrap_or("constant");
    if out.iter().fold(0, |sum: usize, len| sum.saturating_add(*len)) > MOST_POSITIONS {
        return refuse(format!(
            "its output has the shape {out:?}, with more than {MOST_POSITIONS} positions on its axes"
        ));
    }
    let mut sources = Vec::with_capacity(rank);
    for axis in 0..rank {
        match (0..out[axis] as i64).map(|i| source(i - before[axis], x.shape[axis] as i64, mode)).collect() {
            Some(map) => sources.push(map),
            None => return refuse(format!("its mode is {mode:?}")),
        }
    }
    let Some(type_) = storage_type(x.dtype) else {
        return refuse(format!("{} values are not supported", x.dtype));
    };
    let fill = match node.input(2).map(|id| t.constant(id).cloned()) {
        None => match node.float("value") {
            Some(value) if value != 0.0 => value.to_le_bytes().to_vec(),
            _ => vec![0; type_.size()],
        },
        Some(Some(value)) if value.len() == 1 && value.dtype() == x.dtype => {
            into_storage(value.dtype(), value.data()).or_else(refuse)?.into_owned()
        }
        Some(_) => return refuse("its value is computed by the graph"),
    };
    let Some(kernel) = Pad::new(&x.shape, sources, fill).filter(|_| out.len() == rank) else {
        return refuse("its output has another rank");
    };
    let y = t.custom(node, kernel, &[x.tensor], type_, shape::extent(&out))?;
    t.define(node, 0, y)
}

/// The number of added elements: first before each axis, then after each.
pub(crate) fn pads(t: &Translator<'_>, node: &Node) -> Outcome<Vec<i64>> {
    match node.ints("pads") {
        Some(pads) => Ok(pads.to_vec()),
        None => Ok(t.constant_ints(node, 1, "its pads")?.unwrap_or_default()),
    }
}

/// The element of an axis of `len` elements that `mode` puts at position `i`, counted from the first element. The inner `None` is the
/// fill value, the outer `None` an unknown mode.
fn source(i: i64, len: i64, mode: &str) -> Option<Option<usize>> {
    let at = match mode {
        "constant" => return Some(usize::try_from(i).ok().filter(|i| *i < len as usize)),
        "edge" => i.clamp(0, len - 1),
        "wrap" => i.rem_euclid(len),
        "reflect" => {
            let period = (2 * (len - 1)).max(1);
            let i = i.rem_euclid(period);
            i.min(period - i)
        }
        _ => return None,
    };
    Some(Some((at as usize).min(len as usize - 1)))
}

#[cfg(test)]
mod tests {
    use super::source;

    #[test]
    fn modes_continue_an_axis() {
        let line = |mode| -> Vec<Option<usize>> { (-3..6).map(|i| source(i, 3, mode).unwrap()).collect() };
        let all = |v: [usize; 9]| v.map(Some).to_vec();
        assert_eq!(line("edge"), all([0, 0, 0, 0, 1, 2, 2, 2, 2]));
        assert_eq!(line("wrap"), all([0, 1, 2, 0, 1, 2, 0, 1, 2]));
        assert_eq!(line("reflect"), all([1, 2, 1, 0, 1, 2, 1, 0, 1]));
        assert_eq!(line("constant")[2..7], [None, Some(0), Some(1), Some(2), None]);
        assert_eq!(source(2, 1, "reflect"), Some(Some(0)));
        assert_eq!(source(0, 3, "other"), None);
    }
}
