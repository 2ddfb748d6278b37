use crate::{
    ffi::{Grid, Inputs, Kernel, Tile, Type},
    shape,
};

/// Which slices of a tensor of shape `data` an index tensor names, in its order.
#[derive(Clone, Debug)]
pub(crate) enum Places {
    /// ONNX GatherElements and ScatterElements: each element of `indices` refers to the element in the same place, except along
    /// `axis`, where the index counts.
    Elements { data: Vec<usize>, indices: Vec<usize>, axis: usize },
    /// ONNX GatherND and ScatterND: rows of `depth` indices, each row of one slice; `indexed` are the dimensions they count along.
    /// `batches` parts of the data have as many rows each.
    Slices { indexed: Vec<usize>, rows: usize, depth: usize, batches: usize, slice: usize },
}

impl Places {
    /// How many slices are named.
    pub(crate) fn count(&self) -> usize {
        match self {
            Places::Elements { indices, .. } => shape::len(indices),
            Places::Slices { rows, .. } => *rows,
        }
    }

    /// Elements of a slice.
    pub(crate) fn slice(&self) -> usize {
        match self {
            Places::Elements { .. } => 1,
            Places::Slices { slice, .. } => *slice,
        }
    }

    /// Which slice of the data the `i`th one is.
    fn at(&self, i: usize, index: impl Fn(usize) -> Result<i64, String>) -> Result<usize, String> {
        let resolve = |index: i64, len: usize| {
            shape::axis(index, len)
                .ok_or_else(|| format!("index {index} at position {i} is out of range for an axis of {len}"))
        };
        match self {
            Places::Elements { data, indices, axis } => {
                let mut strides = shape::dense(data);
                let step = std::mem::take(&mut strides[*axis]).unsigned_abs();
                let own = shape::offset(i, indices, &strides).unsigned_abs();
                Ok(own + resolve(index(i)?, data[*axis])? * step)
            }
            Places::Slices { indexed, rows, depth, batches, .. } => {
                let mut at = i / (rows / batches).max(1);
                for (k, len) in indexed.iter().enumerate() {
                    at = at * len + resolve(index(i * depth + k)?, *len)?;
                }
                Ok(at)
            }
        }
    }
}

/// Element `i` of an index input.
fn index(inputs: &Inputs<'_>, input: usize, i: usize) -> Result<i64, String> {
    let bytes = inputs.bytes(input);
    let index = match inputs.type_of(input) {
        Type::I64 => bytes.as_chunks().0.get(i).map(|b| i64::from_le_bytes(*b)),
        Type::I32 => bytes.as_chunks().0.get(i).map(|b| i32::from_le_bytes(*b).into()),
        _ => None,
    };
    index.ok_or_else(|| "an index input is too short".to_string())
}

/// Picks slices of input 0 by the indices in input 1.
pub(crate) struct Pick {
    pub(crate) places: Places,
    /// Bytes of an element.
    pub(crate) size: usize,
}

impl Kernel for Pick {
    fn grid(&self, workers: usize) -> Grid {
        let (rows, cols) = (self.places.count(), self.places.slice());
        Grid::rows(rows, cols, rows.div_ceil(workers * 4).max(1024 / cols.max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let bytes = self.places.slice() * self.size;
        for row in tile.rows.clone() {
            let at = self.places.at(row, |i| index(inputs, 1, i))?;
            tile.row_bytes(row).copy_from_slice(&inputs.bytes(0)[at * bytes..(at + 1) * bytes]);
        }
        Ok(())
    }
}

/// What becomes of an element and its update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    /// The update replaces it; any type.
    Replace,
    /// The others are of f32.
    Add,
    Multiply,
    Max,
    Min,
}

/// Writes slices of input 2 into a copy of input 0 at the indices in input 1, one after the other. Each tile looks at all
/// indices and applies the updates that fall into it, so their order is kept on any thread.
pub(crate) struct Scatter {
    pub(crate) places: Places,
    /// Elements of the output, and bytes of one.
    pub(crate) len: usize,
    pub(crate) size: usize,
    pub(crate) update: Update,
}

impl Kernel for Scatter {
    fn grid(&self, workers: usize) -> Grid {
        // One for each worker, for each reads all indices.
        Grid::flat(self.len, self.len.div_ceil(workers).max(4096))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (size, slice, cols) = (self.size, self.places.slice(), tile.cols.clone());
        let updates = inputs.bytes(2);
        let out = tile.run_bytes();
        out.copy_from_slice(&inputs.bytes(0)[cols.start * size..cols.end * size]);
        for i in 0..self.places.count() {
            let to = self.places.at(i, |i| index(inputs, 1, i))? * slice;
            let (first, end) = (to.max(cols.start), (to + slice).min(cols.end));
            if first >= end {
                continue;
            }
            let from = &updates[(i * slice + first - to) * size..(i * slice + end - to) * size];
            let out = &mut out[(first - cols.start) * size..(end - cols.start) * size];
            let f: fn(f32, f32) -> f32 = match self.update {
                Update::Replace => {
                    out.copy_from_slice(from);
                    continue;
                }
                Update::Add => |a, b| a + b,
                Update::Multiply => |a, b| a * b,
                // A NaN stays.
                Update::Max => |a, b| if b > a || b.is_nan() { b } else { a },
                Update::Min => |a, b| if b < a || b.is_nan() { b } else { a },
            };
            for (out, from) in out.as_chunks_mut::<4>().0.iter_mut().zip(from.as_chunks::<4>().0) {
                *out = f(f32::from_le_bytes(*out), f32::from_le_bytes(*from)).to_le_bytes();
            }
        }
        Ok(())
    }
}
