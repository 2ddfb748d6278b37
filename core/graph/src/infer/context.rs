//! The input of an inference rule: a node and the facts about its inputs.

use super::{Fact, PartialInt, dims};
use crate::{Dim, Node, Tensor};
use sdrun_abi::DType;

/// One operator application to infer.
pub(crate) struct Ctx<'a> {
    pub(crate) node: &'a Node,
    pub(crate) opset: i64,
    pub(crate) inputs: &'a [Option<Fact>],
}

/// Facts about the outputs, or an error message.
pub(super) type Facts = Result<Vec<Fact>, String>;

/// An integer list: absent, present but computed at run time, or known.
pub(crate) enum Ints {
    Absent,
    Unknown,
    Known(Vec<i64>),
}

impl<'a> Ctx<'a> {
    /// Fact about a required input.
    pub(crate) fn need(&self, i: usize) -> Result<&'a Fact, String> {
        self.opt(i).ok_or_else(|| format!("required input {i} is missing"))
    }
    /// Fact about an optional input.
    pub(crate) fn opt(&self, i: usize) -> Option<&'a Fact> {
        self.inputs.get(i)?.as_ref()
    }
    pub(crate) fn dtype(&self, i: usize) -> Option<DType> {
        self.opt(i)?.dtype
    }
    pub(crate) fn shape(&self, i: usize) -> Option<&'a [Dim]> {
        self.opt(i)?.shape.as_deref()
    }
    pub(crate) fn value(&self, i: usize) -> Option<&'a Tensor> {
        self.opt(i)?.value.as_ref()
    }
    /// All elements of a constant integer input.
    pub(crate) fn ints(&self, i: usize) -> Option<Vec<i64>> {
        self.value(i)?.to_i64s()
    }
    /// The elements of an integer input, as far as they are known.
    pub(crate) fn partial_ints(&self, i: usize) -> Option<Vec<PartialInt>> {
        let fact = self.opt(i)?;
        match fact.value.as_ref().and_then(Tensor::to_i64s) {
            Some(ints) => Some(ints.into_iter().map(PartialInt::Known).collect()),
            None => fact.elements.clone(),
        }
    }
    /// The elements, as far as they are known, of an input that must be an integer vector, such as a shape.
    pub(crate) fn partial_vector(&self, i: usize) -> Result<Option<Vec<PartialInt>>, String> {
        self.ranked(i, 1)?;
        if let Some(dtype) = self.dtype(i).filter(|t| t.is_float()) {
            return Err(format!("input {i} must hold integers, not {dtype}"));
        }
        Ok(self.partial_ints(i))
    }
    /// A required attribute.
    pub(crate) fn int(&self, name: &str) -> Result<i64, String> {
        self.node.int(name).ok_or_else(|| format!("attribute {name} is missing"))
    }
    /// A list that is the attribute `name` before opset `since` and input `i` from then on.
    pub(crate) fn list(&self, name: &str, i: usize, since: i64) -> Ints {
        if self.opset < since {
            return self.node.ints(name).map_or(Ints::Absent, |v| Ints::Known(v.to_vec()));
        }
        match self.opt(i) {
            None => Ints::Absent,
            Some(_) => self.ints(i).map_or(Ints::Unknown, Ints::Known),
        }
    }
    /// The element type that all these inputs must share.
    pub(crate) fn common_dtype(
        &self,
        inputs: impl IntoIterator<Item = usize>,
    ) -> Result<Option<DType>, String> {
        let mut common = None;
        for i in inputs {
            match (common, self.dtype(i)) {
                (Some(a), Some(b)) if a != b => {
                    return Err(format!("inputs must share one element type, but input {i} is {b}, not {a}"));
                }
                (None, d) => common = d,
                _ => {}
            }
        }
        Ok(common)
    }
    /// The shape, if known, of an input whose rank must be `rank`.
    pub(crate) fn ranked(&self, i: usize, rank: usize) -> Result<Option<&'a [Dim]>, String> {
        match self.shape(i) {
            Some(s) if s.len() != rank => {
                Err(format!("input {i} must have rank {rank}, but its shape is {}", dims::text(s)))
            }
            s => Ok(s),
        }
    }
    /// The shape, if known, of an input whose rank must be at least `rank`.
    pub(crate) fn ranked_at_least(&self, i: usize, rank: usize) -> Result<Option<&'a [Dim]>, String> {
        match self.shape(i) {
            Some(s) if s.len() < rank => Err(format!(
                "input {i} must have at least {rank} dimensions, but its shape is {}",
                dims::text(s)
            )),
            s => Ok(s),
        }
    }
    /// Refuses an optional vector input whose length is known to differ from `len`.
    pub(crate) fn vector_of(&self, i: usize, len: &Dim) -> Result<(), String> {
        if self.opt(i).is_some()
            && let Some(s) = self.ranked(i, 1)?
        {
            dims::same(&s[0], len).map_err(|e| format!("input {i}: {e}"))?;
        }
        Ok(())
    }
}
