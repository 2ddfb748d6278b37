//! Transposed convolutions over one to three spatial axes.

use super::call::{Call, Outputs};
use super::conv::Geometry;
use super::number::{Num, load, store, with_number};
use rayon::prelude::*;

pub(super) fn conv_transpose(c: &Call) -> Outputs {
    let (x, w, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let g = Geometry::new(c, x.shape(), w.shape(), &shape, true)?;
    with_number!(x.dtype(), T => {
        let bias = c.opt(2).map(load::<T>).transpose()?;
        let y = convolve::<T>(&g, &load(x)?, &load(w)?, bias.as_deref(), shape.iter().product());
        Ok(vec![store(x.dtype(), shape, &y)?])
    })
}

/// Transposed convolution of `x` (`[n, groups * in, …]`) with `w` (`[groups * in, out, …]`): each input element adds
/// a scaled copy of the kernel to the output.
fn convolve<T: Num>(g: &Geometry, x: &[T], w: &[T], bias: Option<&[T]>, count: usize) -> Vec<T> {
    let (ins, outs) = g.channels;
    let [kd, kh, kw] = g.kernel;
    let (in_plane, taps) = (g.input.iter().product::<usize>(), kd * kh * kw);
    // The output position that input element `i` and kernel element `k` contribute to along an axis.
    let target = |axis: usize, i: usize, k: usize| {
        let at = (i * g.strides[axis]) as i64 + (k * g.dilations[axis]) as i64 - g.pads[axis];
        usize::try_from(at).ok().filter(|at| *at < g.output[axis])
    };
    let mut out = vec![T::default(); count];
    out.par_chunks_mut(g.output.iter().product::<usize>().max(1)).enumerate().for_each(|(i, plane)| {
        let (n, channel) = (i / (g.groups * outs), i % (g.groups * outs));
        let group = channel / outs;
        plane.fill(bias.map_or(T::default(), |b| b[channel]));
        for c in group * ins..(group + 1) * ins {
            let image = &x[(n * g.groups * ins + c) * in_plane..][..in_plane];
            let weights = &w[(c * outs + channel % outs) * taps..][..taps];
            for (r, line) in image.chunks_exact(g.input[2].max(1)).enumerate() {
                let (iz, iy) = (r / g.input[1], r % g.input[1]);
                for (k, w) in weights.iter().enumerate() {
                    let (kz, ky, kx) = (k / (kh * kw), k / kw % kh, k % kw);
                    let (Some(oz), Some(oy)) = (target(0, iz, kz), target(1, iy, ky)) else { continue };
                    let row = &mut plane[(oz * g.output[1] + oy) * g.output[2]..][..g.output[2]];
                    for (ix, v) in line.iter().enumerate() {
                        if let Some(ox) = target(2, ix, kx) {
                            row[ox] = row[ox].add(w.mul(*v));
                        }
                    }
                }
            }
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s};

    #[test]
    fn strides_pads_and_groups() {
        let (x, w) = (f32s(&[1, 1, 2], &[1.0, 2.0]), f32s(&[1, 1, 3], &[1.0, 10.0, 100.0]));
        let y = Op::new("ConvTranspose").ints("strides", &[2]).run(&[&x, &w]);
        assert_close(&y, &f32s(&[1, 1, 5], &[1.0, 10.0, 102.0, 20.0, 200.0]));
        let y = Op::new("ConvTranspose").ints("strides", &[2]).ints("pads", &[1, 0]).run(&[&x, &w]);
        assert_close(&y, &f32s(&[1, 1, 4], &[10.0, 102.0, 20.0, 200.0]));
        let (x, w) = (f32s(&[1, 2, 1], &[1.0, 2.0]), f32s(&[2, 2, 1], &[1.0, 2.0, 3.0, 4.0]));
        let y = Op::new("ConvTranspose").int("group", 2).run(&[&x, &w, &f32s(&[4], &[0.0, 0.0, 0.0, 1.0])]);
        assert_close(&y, &f32s(&[1, 4, 1], &[1.0, 2.0, 6.0, 9.0]));
    }
}
