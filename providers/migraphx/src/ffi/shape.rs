//! Element types and shapes.

use super::api::{Api, Object, Owned, call};
use sdrun_abi::{DType, Error, Result};
use std::{ffi::c_int, ptr, slice};

/// Codes of element types since ROCm 7.1; see [`Api::load`].
const CODES: [(DType, c_int); 15] = [
    (DType::Bool, 2),
    (DType::F16, 3),
    (DType::F32, 4),
    (DType::F64, 5),
    (DType::U8, 6),
    (DType::I8, 7),
    (DType::U16, 8),
    (DType::I16, 9),
    (DType::I32, 10),
    (DType::I64, 11),
    (DType::U32, 12),
    (DType::U64, 13),
    (DType::F8E4M3, 15),
    (DType::F8E5M2, 16),
    (DType::BF16, 17),
];

/// Type and memory layout of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layout {
    /// Element type.
    pub(crate) dtype: DType,
    /// Dimensions. A scalar in ONNX has one dimension of size 1 here.
    pub(crate) lengths: Vec<usize>,
    /// Distance between neighbours along each dimension, in elements. 0 if the dimension is broadcast.
    pub(crate) strides: Vec<usize>,
}

impl Layout {
    /// Number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.lengths.iter().product()
    }

    /// Distance from the first to the last element, inclusive: the size of a buffer for this layout, in elements.
    pub(crate) fn span(&self) -> usize {
        if self.elements() == 0 {
            return 0;
        }
        self.lengths.iter().zip(&self.strides).map(|(n, stride)| (n - 1) * stride).sum::<usize>() + 1
    }

    /// Whether the elements are contiguous in row-major order.
    pub(crate) fn is_packed(&self) -> bool {
        let mut expected = 1;
        self.lengths.iter().zip(&self.strides).rev().all(|(n, stride)| {
            let packed = *n == 1 || *stride == expected;
            expected *= n;
            packed
        })
    }

    /// Copies a tensor of this layout in row-major order into `to`, which must have exactly its size. `from` holds
    /// [`span`](Layout::span) elements.
    pub(crate) fn pack(&self, from: &[u8], to: &mut [u8]) {
        let size = self.dtype.size();
        if self.is_packed() {
            to.copy_from_slice(&from[..to.len()]);
            return;
        }
        let mut at = vec![0; self.lengths.len()];
        for element in to.chunks_exact_mut(size) {
            let index: usize = at.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum();
            element.copy_from_slice(&from[index * size..(index + 1) * size]);
            for (i, n) in at.iter_mut().zip(&self.lengths).rev() {
                *i += 1;
                if *i < *n {
                    break;
                }
                *i = 0;
            }
        }
    }
}

impl Api {
    fn code(&self, dtype: DType) -> c_int {
        CODES.iter().find(|(known, _)| *known == dtype).map_or(0, |(_, code)| code + self.type_offset)
    }

    /// Creates a shape object. MIGraphX also compares strides; those of a scalar are 0.
    pub(super) fn shape_of(&self, layout: &Layout) -> Result<Owned> {
        let Layout { dtype, lengths, strides } = layout;
        Owned::new(&self.shape_destroy, |out| {
            call!(
                self,
                shape_create_with_strides(
                    out,
                    self.code(*dtype),
                    lengths.as_ptr(),
                    lengths.len(),
                    strides.as_ptr(),
                    strides.len()
                ),
                || format!("describe a tensor of shape {lengths:?}")
            )
        })
    }

    /// Reads a live shape object. Returns `None` if it has open dimensions.
    pub(super) fn layout_if_fixed(&self, shape: Object) -> Result<Option<Layout>> {
        let doing = || "describe a tensor".to_string();
        let (mut dynamic, mut code) = (false, 0);
        if self.shape_dynamic.get().is_ok() {
            call!(self, shape_dynamic(&mut dynamic, shape), doing)?;
        }
        if dynamic {
            return Ok(None);
        }
        call!(self, shape_type(&mut code, shape), doing)?;
        let known = CODES.iter().find(|(_, known)| known + self.type_offset == code);
        let (dtype, _) = known.ok_or_else(|| {
            Error::unsupported(format!("MIGraphX uses element type {code}, which is unknown"))
        })?;
        let list = |get: &dyn Fn(*mut *const usize, *mut usize) -> Result<()>| -> Result<Vec<usize>> {
            let (mut first, mut count) = (ptr::null(), 0);
            get(&mut first, &mut count)?;
            if count == 0 || first.is_null() {
                return Ok(Vec::new());
            }
            // SAFETY: the library lends `count` numbers that live as long as the shape; we copy them at once.
            Ok(unsafe { slice::from_raw_parts(first, count) }.to_vec())
        };
        let lengths = list(&|first, count| call!(self, shape_lengths(first, count, shape), doing))?;
        let strides = list(&|first, count| call!(self, shape_strides(first, count, shape), doing))?;
        if lengths.len() != strides.len() {
            return Err(Error::internal("MIGraphX describes a tensor with more dimensions than strides"));
        }
        Ok(Some(Layout { dtype: *dtype, lengths, strides }))
    }

    /// Reads a live shape object without open dimensions.
    pub(super) fn layout(&self, shape: Object) -> Result<Layout> {
        self.layout_if_fixed(shape)?.ok_or_else(|| {
            Error::unsupported(
                "MIGraphX reports an open shape although all inputs of the graph have fixed shapes",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(lengths: &[usize], strides: &[usize]) -> Layout {
        Layout { dtype: DType::U8, lengths: lengths.into(), strides: strides.into() }
    }

    #[test]
    fn every_element_type_has_its_own_code() {
        for dtype in DType::ALL {
            assert_eq!(CODES.iter().filter(|(known, _)| *known == dtype).count(), 1, "{dtype}");
        }
        let mut codes: Vec<c_int> = CODES.iter().map(|(_, code)| *code).collect();
        codes.dedup();
        assert_eq!(codes.len(), CODES.len());
    }

    #[test]
    fn strided_tensors_are_packed() {
        let packed = |layout: &Layout, from: &[u8]| {
            let mut to = vec![0; layout.elements()];
            layout.pack(from, &mut to);
            to
        };
        let transposed = layout(&[3, 2], &[1, 3]);
        assert!(!transposed.is_packed());
        assert_eq!(
            (transposed.span(), packed(&transposed, &[0, 1, 2, 3, 4, 5])),
            (6, vec![0, 3, 1, 4, 2, 5])
        );
        let broadcast = layout(&[2, 3], &[0, 1]);
        assert_eq!((broadcast.span(), packed(&broadcast, &[7, 8, 9])), (3, vec![7, 8, 9, 7, 8, 9]));
        // A dimension of size 1 may have any stride.
        let plain = layout(&[2, 1, 2], &[2, 9, 1]);
        assert!(plain.is_packed());
        assert_eq!(packed(&plain, &[1, 2, 3, 4]), [1, 2, 3, 4]);
        assert_eq!(layout(&[1], &[0]).span(), 1);
        assert_eq!(layout(&[0, 2], &[2, 1]).span(), 0);
    }
}
