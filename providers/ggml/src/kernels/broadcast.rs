use crate::{
    ffi::{Binary, Grid, Inputs, Kernel, Tile},
    shape,
    simd::{Vectorized, vectorize},
};

/// An element-wise function of two f32 tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum BroadcastOp {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    Pow,
    /// The first if it is not negative, else the product.
    PRelu,
}

impl BroadcastOp {
    /// ggml's own function, if it has one.
    pub(crate) fn of_ggml(self) -> Option<Binary> {
        match self {
            BroadcastOp::Add => Some(Binary::Add),
            BroadcastOp::Sub => Some(Binary::Sub),
            BroadcastOp::Mul => Some(Binary::Mul),
            BroadcastOp::Div => Some(Binary::Div),
            BroadcastOp::Min | BroadcastOp::Max | BroadcastOp::Pow | BroadcastOp::PRelu => None,
        }
    }
}

/// An element-wise function of two f32 tensors, both broadcast to the shape of the output.
pub(crate) struct Broadcast {
    op: BroadcastOp,
    dims: Vec<usize>,
    a: Vec<isize>,
    b: Vec<isize>,
}

impl Broadcast {
    /// Returns `None` if the shapes cannot be broadcast to `out`.
    pub(crate) fn new(op: BroadcastOp, a: &[usize], b: &[usize], out: &[usize]) -> Option<Self> {
        let (a, b) = (shape::broadcast_strides(a, out)?, shape::broadcast_strides(b, out)?);
        let (dims, mut both) = shape::coalesce(out, &[&a, &b]);
        let b = both.pop()?;
        Some(Broadcast { op, dims, a: both.pop()?, b })
    }
}

impl Kernel for Broadcast {
    fn grid(&self, workers: usize) -> Grid {
        let cols = self.dims[self.dims.len() - 1];
        let rows = shape::len(&self.dims) / cols;
        if rows < workers {
            return Grid {
                together: 1,
                planes: 1,
                rows,
                cols,
                tile_rows: 1,
                tile_cols: cols.div_ceil(workers * 2).max(1024),
            };
        }
        Grid::rows(rows, cols, rows.div_ceil(workers * 4).max(4096 / cols.max(1)))
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (a, b) = (inputs.f32(0), inputs.f32(1));
        let last = self.dims.len() - 1;
        let cols = tile.cols.clone();
        let operand = |data, strides: &[isize], row| {
            let start = shape::offset(row, &self.dims[..last], &strides[..last]) as usize;
            // Inputs are contiguous, so the innermost stride is 1, or 0 if the value is repeated.
            if strides[last] == 0 {
                Operand::Repeated(<[f32]>::get(data, start).copied().unwrap_or(f32::NAN))
            } else {
                Operand::Row(&data[start + cols.start..start + cols.end])
            }
        };
        for row in tile.rows.clone() {
            let (a, b) = (operand(a, &self.a, row), operand(b, &self.b, row));
            vectorize(RowOp { op: self.op, a, b, out: tile.row(row) });
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Operand<'a> {
    Row(&'a [f32]),
    Repeated(f32),
}

struct RowOp<'a> {
    op: BroadcastOp,
    a: Operand<'a>,
    b: Operand<'a>,
    out: &'a mut [f32],
}

impl Vectorized for RowOp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let RowOp { op, a, b, out } = self;
        match op {
            BroadcastOp::Add => apply(a, b, out, |a, b| a + b),
            BroadcastOp::Sub => apply(a, b, out, |a, b| a - b),
            BroadcastOp::Mul => apply(a, b, out, |a, b| a * b),
            BroadcastOp::Div => apply(a, b, out, |a, b| a / b),
            // A NaN on either side gives NaN, as in NumPy.
            BroadcastOp::Min => apply(a, b, out, |a, b| if a < b || a.is_nan() { a } else { b }),
            BroadcastOp::Max => apply(a, b, out, |a, b| if a > b || a.is_nan() { a } else { b }),
            BroadcastOp::Pow => apply(a, b, out, f32::powf),
            BroadcastOp::PRelu => apply(a, b, out, |a, b| if a >= 0.0 { a } else { a * b }),
        }
    }
}

#[inline(always)]
fn apply(a: Operand<'_>, b: Operand<'_>, out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    match (a, b) {
        (Operand::Row(a), Operand::Row(b)) => {
            out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (a, b))| *out = f(*a, *b));
        }
        (Operand::Row(a), Operand::Repeated(b)) => out.iter_mut().zip(a).for_each(|(out, a)| *out = f(*a, b)),
        (Operand::Repeated(a), Operand::Row(b)) => out.iter_mut().zip(b).for_each(|(out, b)| *out = f(a, *b)),
        (Operand::Repeated(a), Operand::Repeated(b)) => out.fill(f(a, b)),
    }
}
