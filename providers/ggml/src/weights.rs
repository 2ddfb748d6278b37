//! Weights and constants on their way into ggml tensors.

use crate::{
    ffi::{Tensor, Type, as_bytes, product::Words},
    kernels::Panels,
    storage::{into_storage, to_bytes, to_f32s},
};
use sdrun_abi::{DType, Error, Result};
use sdrun_graph::Tensor as HostTensor;
use std::borrow::Cow;

/// How the elements of an initializer are arranged in its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// As in the graph.
    Plain,
    /// Row-major matrices packed for our products, `transposed` where they are stored as depth x rows.
    Panels { panels: Panels, transposed: bool },
}

impl Form {
    /// Elements of the tensor, of which a word of bf16 pairs has two, for an initializer of `len` elements.
    pub(crate) fn len(self, len: usize) -> usize {
        match self {
            Form::Plain => len,
            Form::Panels { panels, .. } => panels.len() * if panels.words == Words::Bf16 { 2 } else { 1 },
        }
    }
}

/// Where the elements come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// A weight of the engine, by name.
    Weight(String),
    /// The graph itself.
    Constant(HostTensor),
}

/// A tensor to be filled before the first run.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    pub(crate) tensor: Tensor,
    pub(crate) source: Source,
    pub(crate) form: Form,
    /// Type of the tensor.
    pub(crate) type_: Type,
}

impl Placement {
    /// The bytes of the tensor for an initializer of type `dtype` with the given bytes.
    ///
    /// # Errors
    /// `Internal` where a form that is arithmetic is asked for values that are not floating-point.
    pub(crate) fn arrange<'a>(&self, dtype: DType, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if self.form == Form::Plain && !matches!(self.type_, Type::F16 | Type::Bf16) {
            return into_storage(dtype, bytes).map_err(Error::internal);
        }
        let values = to_f32s(dtype, bytes)
            .ok_or_else(|| Error::internal(format!("a {dtype} initializer was taken for a matrix")))?;
        let (panels, transposed) = match self.form {
            Form::Plain => return Ok(Cow::Owned(to_bytes(&values, self.type_))),
            Form::Panels { panels, transposed } => (panels, transposed),
        };
        let mut words = vec![0; panels.len()];
        panels.pack(&values, transposed, 0, &mut words);
        Ok(match (panels.words, self.type_) {
            (Words::F32, Type::F16 | Type::Bf16) => {
                let values: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                Cow::Owned(to_bytes(&values, self.type_))
            }
            _ => Cow::Owned(as_bytes(&words).to_vec()),
        })
    }
}
