use super::widen;
use crate::ffi::{Grid, Inputs, Kernel, Tile, Type};

/// ONNX Gather: picks slices of an axis by index. Input 0 has `outer` x `axis` x `inner` elements. Input 1 has the indices as i32 or
/// i64; negative ones count from the end.
///
/// ggml's `get_rows` would end the process on an index out of range.
pub(crate) struct Gather {
    pub(crate) outer: usize,
    pub(crate) axis: usize,
    pub(crate) inner: usize,
    pub(crate) indices: usize,
    /// Bytes of an element of the output.
    pub(crate) size: usize,
}

impl Kernel for Gather {
    fn grid(&self, workers: usize) -> Grid {
        let rows = self.outer * self.indices;
        Grid::rows(rows, self.inner, rows.div_ceil(workers * 2))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let mut buffer = Vec::new();
        let widens = matches!(inputs.type_of(0), Type::F16 | Type::Bf16) && self.size == 4;
        for row in tile.rows.clone() {
            let (outer, position) = (row / self.indices, row % self.indices);
            let index = match inputs.type_of(1) {
                Type::I64 => inputs.bytes(1).as_chunks().0.get(position).map(|b| i64::from_le_bytes(*b)),
                Type::I32 => {
                    inputs.bytes(1).as_chunks().0.get(position).map(|b| i32::from_le_bytes(*b).into())
                }
                _ => None,
            };
            let index = index.ok_or("an index input is too short")?;
            let slice = crate::shape::axis(index, self.axis).ok_or_else(|| {
                format!("index {index} at position {position} is out of range for an axis of {}", self.axis)
            })?;
            let start = (outer * self.axis + slice) * self.inner;
            if widens {
                tile.row(row).copy_from_slice(widen(inputs, 0, start..start + self.inner, &mut buffer));
            } else {
                let source = &inputs.bytes(0)[start * self.size..(start + self.inner) * self.size];
                tile.row_bytes(row).copy_from_slice(source);
            }
        }
        Ok(())
    }
}
