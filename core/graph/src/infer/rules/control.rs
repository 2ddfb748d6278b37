//! Control flow: uses only what the bodies declare about their outputs.

use super::{Ctx, Fact, Facts};
use crate::{Attribute, Dim, proto};
use sdrun_abi::DType;

/// The outputs of the branch taken, or what both branches have in common.
pub(super) fn if_(c: &Ctx) -> Facts {
    c.need(0)?;
    let branch = |name: &str| match c.node.attributes.get(name) {
        Some(Attribute::Graph(body)) => Ok(body.output.iter().map(declared).collect::<Vec<Fact>>()),
        _ => Err(format!("attribute {name} is missing")),
    };
    let (yes, no) = (branch("then_branch")?, branch("else_branch")?);
    if yes.len() != no.len() {
        return Err("the branches have different numbers of outputs".into());
    }
    Ok(match c.ints(0).as_deref() {
        Some([0]) => no,
        Some([_]) => yes,
        _ => yes.iter().zip(&no).map(|(a, b)| common(a, b)).collect(),
    })
}

fn declared(info: &proto::ValueInfoProto) -> Fact {
    let Some(tensor) = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref()) else {
        return Fact::default();
    };
    let dim = |d: &proto::Dimension| {
        d.dim_value.and_then(|v| usize::try_from(v).ok()).map_or(Dim::Unknown, Dim::Known)
    };
    let shape = tensor.shape.as_ref().map(|s| s.dim.iter().map(dim).collect());
    Fact::new(tensor.elem_type.and_then(DType::from_onnx), shape)
}

fn common(a: &Fact, b: &Fact) -> Fact {
    let shape = match (&a.shape, &b.shape) {
        (Some(a), Some(b)) if a.len() == b.len() => {
            let dim = |(a, b): (&Dim, &Dim)| if a == b { a.clone() } else { Dim::Unknown };
            Some(a.iter().zip(b).map(dim).collect())
        }
        _ => None,
    };
    Fact::new(a.dtype.filter(|t| Some(*t) == b.dtype), shape)
}
