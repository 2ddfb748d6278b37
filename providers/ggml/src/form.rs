//! The arrangement of weights and constants in ggml tensors.

use crate::{
    ffi::{Extent, Type},
    kernels::{Blocks, Encoding, Panels, Quads},
    shape,
    simd::{Words, as_floats},
    storage::{Floats, into_storage, is_f32, put},
};
use sdrun_abi::{DType, Error, Result};
use std::borrow::Cow;

/// An arrangement of an initializer's elements in its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// As in the graph.
    Plain,
    /// Row-major matrices packed for our products. `transposed` means that the initializer is depth x rows. With blocks, the tensor
    /// holds bytes.
    Panels { panels: Panels, transposed: bool, blocks: Option<Blocks> },
    /// A stack of matrices, `[groups, rows, depth]`, in ggml's own blocks. `transposed` as for panels.
    Blocks { matrices: [usize; 3], transposed: bool, blocks: Blocks },
    /// Matrices of bytes packed for integer products.
    Quads(Quads),
}

impl Form {
    /// The elements of the tensor for an initializer of `len` elements. A bf16 pair counts as two.
    pub(crate) fn len(self, len: usize) -> usize {
        match self {
            Form::Plain | Form::Blocks { .. } => len,
            Form::Panels { panels, blocks: Some(blocks), .. } => blocks.bytes(&panels),
            Form::Quads(quads) => quads.bytes(),
            Form::Panels { panels, .. } => panels.len() * panels.words.elements(),
        }
    }

    /// The extent of the tensor for an initializer of this shape.
    pub(crate) fn extent(self, dims: &[usize]) -> Extent {
        match self {
            Form::Plain => shape::extent(dims),
            _ => [self.len(shape::len(dims)), 1, 1, 1],
        }
    }

    /// Fills `out`, the bytes of a tensor of type `type_`, from an initializer of type `dtype` with these bytes.
    ///
    /// # Errors
    /// `Internal` if the form needs floating-point values and `dtype` is another type.
    pub(crate) fn fill(self, type_: Type, dtype: DType, bytes: &[u8], out: &mut [u8]) -> Result<()> {
        match self {
            Form::Plain if is_f32(dtype) => Floats::new(dtype, bytes).copy_to(type_, out),
            Form::Panels { panels, transposed, blocks } => {
                pack((panels, blocks), transposed, floats(dtype, bytes)?, type_, out)?;
            }
            Form::Blocks { matrices, transposed, blocks } => {
                let (values, length) = (floats(dtype, bytes)?, type_.bytes(matrices.iter().product()));
                if out.len() != length {
                    return Err(Error::internal(format!(
                        "{length} bytes for a tensor of {} bytes",
                        out.len()
                    )));
                }
                let read = |start: usize, to: &mut [f32]| values.read(start, to);
                blocks.pack_rows(matrices, transposed, read, |start, line| {
                    out[start..][..line.len()].copy_from_slice(line)
                });
            }
            Form::Quads(quads) => {
                if out.len() != quads.bytes() || !matches!(dtype, DType::I8 | DType::U8) {
                    let (from, to) = (quads.bytes(), out.len());
                    return Err(Error::internal(format!(
                        "{from} bytes of {dtype} for a ggml tensor of {to}"
                    )));
                }
                quads.pack(dtype, bytes, out);
            }
            _ => {
                let arranged = self.arrange(type_, dtype, bytes)?;
                if arranged.len() != out.len() {
                    let (from, to) = (arranged.len(), out.len());
                    return Err(Error::internal(format!("{from} bytes for a ggml tensor of {to} bytes")));
                }
                out.copy_from_slice(&arranged);
            }
        }
        Ok(())
    }

    /// Which block encodings a tensor of this form accepts unchanged, for an initializer of this shape, and whether they hold
    /// its transpose.
    pub(crate) fn encodings(self, shape: &[usize]) -> (bool, impl Iterator<Item = Encoding>) {
        let found = match self {
            Form::Panels { panels: Panels { groups: 1, rows, depth, taps: 1, .. }, transposed, blocks } => {
                blocks.map(|blocks| (blocks, [rows, depth], transposed))
            }
            Form::Blocks { matrices: [1, rows, depth], transposed, blocks } => {
                Some((blocks, [rows, depth], transposed))
            }
            _ => None,
        };
        let found = found.filter(|(_, [rows, depth], transposed)| {
            shape == if *transposed { [*depth, *rows] } else { [*rows, *depth] }
        });
        let depth = found.map_or(0, |(_, [_, depth], _)| depth);
        let held = found.map_or(&[][..], |(blocks, ..)| blocks.holds());
        let whole = move |encoding: &Encoding| depth.is_multiple_of(encoding.elements());
        (found.is_some_and(|(_, _, transposed)| transposed), held.iter().copied().filter(whole))
    }

    /// The same tensor, filled from the transpose of an initializer of this shape; `None` if that is no matrix, or is not transposed
    /// itself.
    pub(crate) fn turned(self, shape: &[usize]) -> Option<Form> {
        match self {
            Form::Panels { panels, transposed: true, blocks }
                if panels.groups == 1 && shape == [panels.depth, panels.rows] =>
            {
                Some(Form::Panels { panels, transposed: false, blocks })
            }
            _ => None,
        }
    }

    /// How to fill a tensor of this form a few rows at a time from an initializer of this shape: whether to take the rows of its transpose,
    /// and how many rows make a panel. `None` if the tensor must be filled in one go.
    pub(crate) fn by_rows(self, shape: &[usize]) -> Option<(bool, usize)> {
        match self {
            Form::Panels { panels: Panels { groups: 1, rows, depth, block, .. }, transposed, .. } => {
                let fits = if transposed { shape == [depth, rows] } else { shape.first() == Some(&rows) };
                fits.then_some((transposed, block))
            }
            _ => None,
        }
    }

    /// Fills the part of `out` that holds the rows from `first` on, and returns their number. As [`fill`](Self::fill) for a form that has
    /// [`by_rows`](Self::by_rows).
    ///
    /// # Errors
    /// `Internal` if these are no rows of this tensor, or if more follow than whole panels.
    pub(crate) fn fill_rows(
        self,
        type_: Type,
        first: usize,
        dtype: DType,
        bytes: &[u8],
        out: &mut [u8],
    ) -> Result<usize> {
        let Form::Panels { panels: panels @ Panels { groups: 1, .. }, blocks, .. } = self else {
            return Err(Error::internal("rows for a tensor that is not filled by rows"));
        };
        let elements = bytes.len() / dtype.size();
        let rows = elements / panels.depth.max(1);
        let part = |rows| Form::Panels { panels: Panels { rows, ..panels }, transposed: false, blocks };
        let [start, len] = [first, rows].map(|rows| type_.bytes(part(rows).len(elements)));
        let end = first + rows;
        let ends = end == panels.rows || end < panels.rows && end.is_multiple_of(panels.block);
        match out.get_mut(start..start + len) {
            Some(out) if ends && rows * panels.depth == elements && first.is_multiple_of(panels.block) => {
                part(rows).fill(type_, dtype, bytes, out)?;
                Ok(rows)
            }
            _ => Err(Error::internal(format!("{elements} elements from row {first} on of {panels:?}"))),
        }
    }

    /// Fills `out` with a matrix in one of its [`encodings`](Self::encodings). No number changes.
    ///
    /// # Errors
    /// `InvalidArgument` if the number of blocks does not match the matrix; `Internal` if `out` has another length.
    pub(crate) fn fill_encoded(self, encoding: Encoding, encoded: &[u8], out: &mut [u8]) -> Result<()> {
        let (blocks, count, bytes) = match self {
            Form::Panels { panels, blocks: Some(blocks), .. } => {
                (blocks, panels.rows * panels.depth, blocks.bytes(&panels))
            }
            Form::Blocks { matrices: [groups, rows, depth], blocks, .. } => {
                let count = groups * rows * depth;
                (blocks, count, blocks.type_of_ggml().bytes(count))
            }
            _ => return Err(Error::internal("blocks for a tensor that is in none")),
        };
        check_blocks(encoding, encoded, count)?;
        if out.len() != bytes {
            return Err(Error::internal(format!("{bytes} bytes for a ggml tensor of {} bytes", out.len())));
        }
        match self {
            Form::Panels { panels, .. } => blocks.repack(&panels, encoding, encoded, |start, panel| {
                out[start..][..panel.len()].copy_from_slice(panel)
            }),
            _ => blocks.reencode(encoding, encoded, out),
        }
        Ok(())
    }

    /// As [`fill`](Self::fill), into new bytes.
    pub(crate) fn arrange<'a>(self, type_: Type, dtype: DType, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if self == Form::Plain {
            if !matches!(type_, Type::F16 | Type::Bf16) {
                return into_storage(dtype, bytes).map_err(Error::internal);
            }
            let mut out = vec![0; bytes.len() / dtype.size() * type_.size()];
            floats(dtype, bytes)?.copy_to(type_, &mut out);
            return Ok(Cow::Owned(out));
        }
        let mut out = vec![0; type_.bytes(self.len(bytes.len() / dtype.size()))];
        self.fill(type_, dtype, bytes, &mut out)?;
        Ok(Cow::Owned(out))
    }
}

/// `InvalidArgument` where these are not the blocks of so many elements.
pub(crate) fn check_blocks(encoding: Encoding, encoded: &[u8], elements: usize) -> Result<()> {
    let wanted = elements / encoding.elements() * encoding.bytes();
    if encoded.len() == wanted {
        return Ok(());
    }
    let (found, name) = (encoded.len(), encoding.name());
    Err(Error::invalid(format!(
        "{found} bytes of {name} blocks for {elements} elements, which take {wanted}"
    )))
}

fn floats(dtype: DType, bytes: &[u8]) -> Result<Floats<'_>> {
    match is_f32(dtype) {
        true => Ok(Floats::new(dtype, bytes)),
        false => Err(Error::internal(format!("a {dtype} initializer was taken for a matrix"))),
    }
}

/// Writes panels into the bytes of a tensor of type `type_`.
fn pack(
    (panels, blocks): (Panels, Option<Blocks>),
    transposed: bool,
    values: Floats<'_>,
    type_: Type,
    out: &mut [u8],
) -> Result<()> {
    // bf16 pairs and f32 are 32-bit words already.
    let type_ = if panels.words == Words::F32 { type_ } else { Type::F32 };
    let size = type_.size();
    let from = blocks.map_or(panels.len() * size, |blocks| blocks.bytes(&panels));
    if out.len() != from {
        return Err(Error::internal(format!("{from} bytes for a ggml tensor of {} bytes", out.len())));
    }
    let read = |start: usize, to: &mut [f32]| values.read(start, to);
    if let Some(blocks) = blocks {
        blocks.pack(&panels, transposed, read, |start, bytes| {
            out[start..][..bytes.len()].copy_from_slice(bytes)
        });
        return Ok(());
    }
    panels.pack(transposed, read, |start, words| {
        put(as_floats(words), type_, &mut out[start * size..][..words.len() * size])
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::to_bytes;

    #[test]
    fn rows_fill_what_the_whole_fills() {
        let [rows, depth] = [70, 300];
        let values: Vec<f32> = (0..rows * depth).map(|i| (i % 251) as f32 - 125.0).collect();
        let bytes = to_bytes(&values, Type::F32);
        let panels = |words| Panels { words, ..Panels::columns([1, rows, depth], 16) };
        for (words, blocks, type_) in [
            (Words::F32, None, Type::F32),
            (Words::F32, None, Type::F16),
            (Words::Bf16, None, Type::Bf16),
            (Words::F32, Some(Blocks::Q8_0), Type::I8),
            (Words::Bytes, Some(Blocks::Q4K), Type::I8),
        ] {
            let form = Form::Panels { panels: panels(words), transposed: false, blocks };
            assert_eq!(form.by_rows(&[rows, depth / 3, 3]), Some((false, 16)));
            let whole = form.arrange(type_, DType::F32, &bytes).unwrap();
            let mut out = vec![0xaa; whole.len()];
            let mut first = 0;
            for part in bytes.chunks(32 * depth * 4) {
                first += form.fill_rows(type_, first, DType::F32, part, &mut out).unwrap();
            }
            assert!(first == rows && out == whole[..], "{words:?} {blocks:?}");
            for (first, elements) in [(8, depth), (0, depth), (0, 16 * depth + 1), (64, 16 * depth)] {
                let error = form.fill_rows(type_, first, DType::F32, &bytes[..elements * 4], &mut out);
                assert!(error.is_err(), "{elements} elements at {first}");
            }
        }
        let turned = Form::Panels { panels: panels(Words::F32), transposed: true, blocks: None };
        assert_eq!(
            [[depth, rows], [rows, depth]].map(|shape| turned.by_rows(&shape)),
            [Some((true, 16)), None]
        );
    }

    #[test]
    fn filling_is_arranging() {
        let values: Vec<f32> = (0..3 * 40 * 70).map(|i| (i % 251) as f32 - 125.0).collect();
        let panels = Panels::columns([3, 40, 70], 16);
        let forms = [
            Form::Plain,
            Form::Panels { panels, transposed: false, blocks: None },
            Form::Panels { panels, transposed: true, blocks: None },
        ];
        for (dtype, bytes) in [
            (DType::F32, to_bytes(&values, Type::F32)),
            (DType::F16, to_bytes(&values, Type::F16)),
            (DType::BF16, to_bytes(&values, Type::Bf16)),
        ] {
            for type_ in [Type::F32, Type::F16, Type::Bf16] {
                for form in forms {
                    let mut out = vec![0xaa; form.len(values.len()) * type_.size()];
                    form.fill(type_, dtype, &bytes, &mut out).unwrap();
                    let arranged = form.arrange(type_, dtype, &bytes).unwrap();
                    assert_eq!(out[..], arranged[..], "{form:?} {dtype} {type_:?}");
                }
            }
        }
    }
}
