//! Convolutions over one to three spatial axes.

use super::call::{Call, Fault, Outputs};
use super::matmul::shifted;
use super::number::{Num, load, store, with_number};
use crate::Tensor;
use crate::infer::window::Window;
use rayon::prelude::*;
use sdrun_abi::DType;

/// Sizes of a convolution, padded to three spatial axes. For a transposed convolution, `input` and `output` are those
/// of the operator itself.
pub(super) struct Geometry {
    pub(super) groups: usize,
    /// Input and output channels per group.
    pub(super) channels: (usize, usize),
    pub(super) input: [usize; 3],
    pub(super) output: [usize; 3],
    pub(super) kernel: [usize; 3],
    pub(super) strides: [usize; 3],
    pub(super) dilations: [usize; 3],
    pub(super) pads: [i64; 3],
}

/// Pads per-axis numbers to three, with `lead` for the missing leading axes.
pub(super) fn three<T: Copy>(values: &[T], lead: T) -> Result<[T; 3], Fault> {
    let missing = 3usize.checked_sub(values.len());
    let missing =
        missing.ok_or_else(|| Fault::Unsupported("there are more than three spatial axes".into()))?;
    Ok([0, 1, 2].map(|i| if i < missing { lead } else { values[i - missing] }))
}

impl Geometry {
    /// The geometry of a node with input `x`, weights `w` of `channels` per group and an output `shape`.
    pub(super) fn new(
        c: &Call,
        x: &[usize],
        w: &[usize],
        shape: &[usize],
        transposed: bool,
    ) -> Result<Self, Fault> {
        let groups = c.node().int_or("group", 1) as usize;
        let window = Window::new(&c.ctx, w[2..].to_vec())?;
        let mut pads = Vec::with_capacity(x.len());
        for (i, n) in x[2..].iter().enumerate() {
            let axis = if transposed { window.transposed(&c.ctx, i, *n)? } else { window.axis(i, *n)? };
            pads.push(axis.pad_begin);
        }
        Ok(Geometry {
            groups,
            channels: (x[1] / groups, shape[1] / groups),
            input: three(&x[2..], 1)?,
            output: three(&shape[2..], 1)?,
            kernel: three(&window.kernel, 1)?,
            strides: three(&window.strides, 1)?,
            dilations: three(&window.dilations, 1)?,
            pads: three(&pads, 0)?,
        })
    }

    /// The input position along axis `i` that kernel element `k` reads for window `o`.
    fn source(&self, i: usize, o: usize, k: usize) -> Option<usize> {
        let at = (o * self.strides[i]) as i64 + (k * self.dilations[i]) as i64 - self.pads[i];
        usize::try_from(at).ok().filter(|at| *at < self.input[i])
    }

    /// The windows along the last axis for which kernel element `k` lies inside the input.
    fn inside(&self, k: usize) -> (usize, usize) {
        let (stride, offset) = (self.strides[2] as i64, (k * self.dilations[2]) as i64 - self.pads[2]);
        let first = (-offset).max(0).unsigned_abs().div_ceil(stride as u64) as usize;
        let last = self.input[2] as i64 - 1 - offset;
        let end = if last < 0 { 0 } else { (last / stride) as usize + 1 };
        (first, end.min(self.output[2]))
    }
}

/// Convolves `x` (`[n, groups * in, …]`) with `w` (`[groups * out, in, …]`).
pub(super) fn convolve<T: Num>(g: &Geometry, x: &[T], w: &[T], bias: Option<&[T]>, count: usize) -> Vec<T> {
    let (ins, outs) = g.channels;
    let [depth, height, width] = g.output;
    let [kd, kh, kw] = g.kernel;
    let in_plane: usize = g.input.iter().product();
    let mut out = vec![T::default(); count];
    // Computes one output channel of one image at a time, row by row: a row stays in the L1 cache while all input
    // channels and kernel elements are added to it.
    out.par_chunks_mut((depth * height * width).max(1)).enumerate().for_each(|(i, plane)| {
        let (n, channel) = (i / (g.groups * outs), i % (g.groups * outs));
        let first_in = (n * g.groups + channel / outs) * ins;
        for (r, row) in plane.chunks_exact_mut(width).enumerate() {
            let (oz, oy) = (r / height, r % height);
            row.fill(bias.map_or(T::default(), |b| b[channel]));
            for c in 0..ins {
                let image = &x[(first_in + c) * in_plane..][..in_plane];
                let weights = &w[(channel * ins + c) * kd * kh * kw..][..kd * kh * kw];
                for kz in 0..kd {
                    let Some(iz) = g.source(0, oz, kz) else { continue };
                    for ky in 0..kh {
                        let Some(iy) = g.source(1, oy, ky) else { continue };
                        let line = &image[(iz * g.input[1] + iy) * g.input[2]..][..g.input[2]];
                        add_row(g, row, line, &weights[(kz * kh + ky) * kw..][..kw]);
                    }
                }
            }
        }
    });
    out
}

/// Convolves one row of the input with one row of the kernel, and adds the result to one row of the output.
fn add_row<T: Num>(g: &Geometry, row: &mut [T], line: &[T], weights: &[T]) {
    let stride = g.strides[2];
    for (kx, w) in weights.iter().enumerate() {
        let (first, end) = g.inside(kx);
        let Some(start) = g.source(2, first, kx).filter(|_| first < end) else { continue };
        let row = &mut row[first..end];
        if stride == 1 {
            row.iter_mut().zip(&line[start..]).for_each(|(o, v)| *o = o.add(w.mul(*v)));
        } else {
            row.iter_mut().zip(line[start..].iter().step_by(stride)).for_each(|(o, v)| *o = o.add(w.mul(*v)));
        }
    }
}

pub(super) fn conv(c: &Call) -> Outputs {
    let (x, w, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let g = Geometry::new(c, x.shape(), w.shape(), &shape, false)?;
    with_number!(x.dtype(), T => {
        let bias = c.opt(2).map(load::<T>).transpose()?;
        let y = convolve::<T>(&g, &load(x)?, &load(w)?, bias.as_deref(), shape.iter().product());
        Ok(vec![store(x.dtype(), shape, &y)?])
    })
}

/// The integer convolution of `x` and `w` after subtracting their zero points.
pub(super) fn integer_convolution(
    c: &Call,
    (x, x_zero): (&Tensor, Option<&Tensor>),
    (w, w_zero): (&Tensor, Option<&Tensor>),
    bias: Option<&[i128]>,
) -> Result<Vec<i128>, Fault> {
    let shape = c.out_shape(0)?;
    let g = Geometry::new(c, x.shape(), w.shape(), &shape, false)?;
    // Channels are axis 1 of the input and axis 0 of the weights.
    let (x, w) = (shifted(x, x_zero, 1)?, shifted(w, w_zero, 0)?);
    Ok(convolve(&g, &x, &w, bias, shape.iter().product()))
}

pub(super) fn conv_integer(c: &Call) -> Outputs {
    let y = integer_convolution(c, (c.input(0)?, c.opt(2)), (c.input(1)?, c.opt(3)), None)?;
    Ok(vec![store(DType::I32, c.out_shape(0)?, &y)?])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s};
    use crate::Tensor;

    fn ramp(shape: &[usize]) -> Tensor {
        let n: usize = shape.iter().product();
        f32s(shape, &(0..n).map(|v| v as f32).collect::<Vec<_>>())
    }

    #[test]
    fn padding_strides_and_dilations() {
        let (x, w) = (ramp(&[1, 1, 3, 3]), f32s(&[1, 1, 2, 2], &[1.0, 1.0, 1.0, 1.0]));
        assert_close(&Op::new("Conv").run(&[&x, &w]), &f32s(&[1, 1, 2, 2], &[8.0, 12.0, 20.0, 24.0]));
        let op = Op::new("Conv").ints("pads", &[1, 1, 0, 0]).ints("strides", &[2, 2]);
        assert_close(&op.run(&[&x, &w]), &f32s(&[1, 1, 2, 2], &[0.0, 3.0, 9.0, 24.0]));
        let op = Op::new("Conv").ints("dilations", &[2, 2]);
        assert_close(&op.run(&[&x, &w]), &f32s(&[1, 1, 1, 1], &[16.0]));
        let op = Op::new("Conv").str("auto_pad", "SAME_UPPER");
        let same = f32s(&[1, 1, 3, 3], &[8.0, 12.0, 7.0, 20.0, 24.0, 13.0, 13.0, 15.0, 8.0]);
        assert_close(&op.run(&[&x, &w]), &same);
    }

    #[test]
    fn groups_and_bias() {
        let x = f32s(&[1, 2, 2], &[1.0, 2.0, 10.0, 20.0]);
        let (w, b) = (f32s(&[2, 1, 1], &[3.0, 5.0]), f32s(&[2], &[0.5, -0.5]));
        let y = Op::new("Conv").int("group", 2).run(&[&x, &w, &b]);
        assert_close(&y, &f32s(&[1, 2, 2], &[3.5, 6.5, 49.5, 99.5]));
        assert!(Op::new("Conv").try_run(&[&x, &w, &b]).is_err());
    }

    #[test]
    fn three_axes() {
        let x = ramp(&[1, 1, 2, 2, 2]);
        let w = f32s(&[1, 1, 2, 1, 1], &[1.0, -1.0]);
        assert_close(&Op::new("Conv").run(&[&x, &w]), &f32s(&[1, 1, 1, 2, 2], &[-4.0; 4]));
    }
}
