//! Weights and constants on their way into ggml tensors.

use crate::{
    ffi::{Tensor, Type},
    kernels::{pack_panels, panels_len},
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
    /// `batch` matrices of `rows` x `cols`, each transposed.
    Transposed { batch: usize, rows: usize, cols: usize },
    /// `groups` matrices of `rows` x `depth`, packed for the convolution kernel.
    Panels { groups: usize, rows: usize, depth: usize },
}

impl Form {
    /// Elements of the tensor for an initializer of `len` elements.
    pub(crate) fn len(self, len: usize) -> usize {
        match self {
            Form::Panels { groups, rows, depth } => panels_len(groups, rows, depth),
            _ => len,
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
        let arranged = match self.form {
            Form::Plain => values,
            Form::Transposed { rows, cols, .. } => Cow::Owned(transpose(&values, rows, cols)),
            Form::Panels { groups, rows, depth } => Cow::Owned(pack_panels(&values, groups, rows, depth)),
        };
        Ok(Cow::Owned(to_bytes(&arranged, self.type_)))
    }
}

/// Transposes matrices of `rows` x `cols`, in blocks that fit the first level cache.
fn transpose(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    const BLOCK: usize = 32;
    let mut out = vec![0.0; values.len()];
    for (from, to) in values.chunks_exact(rows * cols).zip(out.chunks_exact_mut(rows * cols)) {
        for row_block in (0..rows).step_by(BLOCK) {
            for col_block in (0..cols).step_by(BLOCK) {
                for row in row_block..(row_block + BLOCK).min(rows) {
                    for col in col_block..(col_block + BLOCK).min(cols) {
                        to[col * rows + row] = from[row * cols + col];
                    }
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_each_matrix() {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        assert_eq!(transpose(&values, 2, 3), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 9.0, 7.0, 10.0, 8.0, 11.0]);
        let large: Vec<f32> = (0..70 * 45).map(|i| i as f32).collect();
        assert_eq!(transpose(&transpose(&large, 70, 45), 45, 70), large);
    }
}
