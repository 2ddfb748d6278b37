//! Pooling over one to three spatial axes.

use super::call::{Call, Fault, Outputs};
use super::conv::three;
use super::number::{Num, load, store, with_float, with_number};
use crate::Tensor;
use crate::infer::window::{Window, kernel_shape};
use rayon::prelude::*;
use std::ops::Range;

/// Windows over three spatial axes.
struct Windows {
    input: [usize; 3],
    output: [usize; 3],
    kernel: [usize; 3],
    strides: [usize; 3],
    dilations: [usize; 3],
    pads: [(i64, i64); 3],
}

impl Windows {
    fn new(c: &Call) -> Result<Self, Fault> {
        let spatial = &c.input(0)?.shape()[2..];
        let kernel = kernel_shape(&c.ctx, spatial.len())?.ok_or("attribute kernel_shape is missing")?;
        let window = Window::new(&c.ctx, kernel)?;
        let mut pads = Vec::with_capacity(spatial.len());
        for (i, n) in spatial.iter().enumerate() {
            let axis = window.axis(i, *n)?;
            pads.push((axis.pad_begin, axis.pad_end));
        }
        Ok(Windows {
            input: three(spatial, 1)?,
            output: three(&c.out_shape(0)?[2..], 1)?,
            kernel: three(&window.kernel, 1)?,
            strides: three(&window.strides, 1)?,
            dilations: three(&window.dilations, 1)?,
            pads: three(&pads, (0, 0))?,
        })
    }

    /// For window `o` along axis `i`: the kernel elements inside the input, and the number inside the input or its
    /// padding (a window added by ceil_mode may extend beyond both).
    fn taps(&self, i: usize, o: usize) -> (Range<usize>, usize) {
        let (first, dilation) = ((o * self.strides[i]) as i64 - self.pads[i].0, self.dilations[i] as i64);
        let below = |limit: i64| {
            (limit - first + dilation - 1).div_euclid(dilation).clamp(0, self.kernel[i] as i64) as usize
        };
        let n = self.input[i] as i64;
        (below(0)..below(n), below(n + self.pads[i].1))
    }

    /// Calls `f` with the offset, within an image, of each element in window `o`. Returns the number of elements,
    /// including padding.
    fn visit(&self, o: usize, mut f: impl FnMut(usize)) -> usize {
        let [_, height, width] = self.output;
        let at = [o / (height * width), o / width % height, o % width];
        let taps = [0, 1, 2].map(|i| self.taps(i, at[i]));
        let place = |i: usize, k: usize| {
            ((at[i] * self.strides[i] + k * self.dilations[i]) as i64 - self.pads[i].0) as usize
        };
        for z in taps[0].0.clone() {
            for y in taps[1].0.clone() {
                for x in taps[2].0.clone() {
                    f((place(0, z) * self.input[1] + place(1, y)) * self.input[2] + place(2, x));
                }
            }
        }
        taps.iter().map(|t| t.1).product()
    }

    /// Computes `f(image, window)` for every window of every image.
    fn map<T: Num, R: Send>(&self, x: &[T], images: usize, f: impl Fn(&[T], usize) -> R + Sync) -> Vec<R> {
        let (plane, windows) = (self.input.iter().product::<usize>(), self.output.iter().product::<usize>());
        let image = |i: usize| &x[i * plane..(i + 1) * plane];
        (0..images * windows).into_par_iter().map(|i| f(image(i / windows), i % windows)).collect()
    }
}

fn images(x: &Tensor) -> usize {
    x.shape()[..2].iter().product()
}

pub(super) fn max_pool(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let windows = Windows::new(c)?;
    with_number!(x.dtype(), T => {
        let best = windows.map(&load::<T>(x)?, images(x), |image: &[T], o| {
            let mut best: Option<(T, usize)> = None;
            windows.visit(o, |i| {
                if best.is_none_or(|(v, _)| image[i] > v || image[i].is_nan()) {
                    best = Some((image[i], i));
                }
            });
            best.unwrap_or((T::from_f64(f64::NEG_INFINITY), 0))
        });
        let values: Vec<T> = best.iter().map(|b| b.0).collect();
        let mut outputs = vec![store(x.dtype(), shape.clone(), &values)?];
        if c.wants(1) {
            let column_major = c.node().int_or("storage_order", 0) != 0;
            let [depth, height, width] = windows.input;
            let per_image = best.len() / images(x).max(1);
            let index = |(k, b): (usize, &(T, usize))| {
                let (z, y, x) = (b.1 / (height * width), b.1 / width % height, b.1 % width);
                let inside = if column_major { (x * height + y) * depth + z } else { b.1 };
                (k / per_image * depth * height * width + inside) as i64
            };
            let indices: Vec<i64> = best.iter().enumerate().map(index).collect();
            outputs.push(Tensor::from_elements(shape, &indices)?);
        }
        Ok(outputs)
    })
}

/// How a window is reduced to one element.
#[derive(Clone, Copy)]
enum Norm {
    Average,
    Lp(i32),
}

impl Norm {
    fn of(c: &Call) -> Result<Self, Fault> {
        match c.node().int_or("p", 2) {
            _ if c.node().op_type.ends_with("AveragePool") => Ok(Norm::Average),
            p @ 1..=1024 => Ok(Norm::Lp(p as i32)),
            p => Err(format!("p = {p} is out of range").into()),
        }
    }
    fn term(self, v: f64) -> f64 {
        match self {
            Norm::Average => v,
            Norm::Lp(p) => v.abs().powi(p),
        }
    }
    fn finish(self, sum: f64, count: usize) -> f64 {
        match self {
            Norm::Average => sum / count as f64,
            Norm::Lp(p) => sum.powf(1.0 / f64::from(p)),
        }
    }
}

pub(super) fn pool(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let (windows, norm) = (Windows::new(c)?, Norm::of(c)?);
    let count_padding = c.node().int_or("count_include_pad", 0) != 0;
    with_float!(x.dtype(), T => {
        let y = windows.map(&load::<T>(x)?, images(x), |image: &[T], o| {
            let (mut sum, mut inside) = (0.0, 0);
            let all = windows.visit(o, |i| {
                sum += norm.term(image[i].to_f64());
                inside += 1;
            });
            T::from_f64(norm.finish(sum, if count_padding { all } else { inside }))
        });
        Ok(vec![store(x.dtype(), shape, &y)?])
    })
}

pub(super) fn global_pool(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let norm = Norm::of(c)?;
    let n: usize = x.shape()[2..].iter().product();
    if n == 0 {
        return Err("the input has no elements to pool".into());
    }
    with_float!(x.dtype(), T => {
        let reduce = |image: &[T]| match c.node().op_type.as_str() {
            "GlobalMaxPool" => image.iter().copied().reduce(T::larger).unwrap_or_default(),
            _ => T::from_f64(norm.finish(image.iter().map(|v| norm.term(v.to_f64())).sum(), n)),
        };
        let y: Vec<T> = load::<T>(x)?.chunks_exact(n).map(reduce).collect();
        Ok(vec![store(x.dtype(), shape, &y)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s, i64s};

    #[test]
    fn maxima_with_indices() {
        let x = f32s(&[1, 2, 2, 2], &[1.0, 5.0, 3.0, 2.0, -1.0, -2.0, -3.0, -4.0]);
        let y = Op::new("MaxPool").ints("kernel_shape", &[2, 2]).outputs(2).try_run(&[&x]).unwrap();
        assert_eq!(y, [f32s(&[1, 2, 1, 1], &[5.0, -1.0]), i64s(&[1, 2, 1, 1], &[1, 4])]);
        let op = Op::new("MaxPool").ints("kernel_shape", &[2, 2]).int("storage_order", 1).outputs(2);
        assert_eq!(op.try_run(&[&x]).unwrap()[1], i64s(&[1, 2, 1, 1], &[2, 4]));
    }

    #[test]
    fn averages_count_padding_only_on_request() {
        let x = f32s(&[1, 1, 3], &[3.0, 6.0, 9.0]);
        let op = || Op::new("AveragePool").ints("kernel_shape", &[2]).ints("pads", &[1, 0]);
        assert_close(&op().run(&[&x]), &f32s(&[1, 1, 3], &[3.0, 4.5, 7.5]));
        assert_close(&op().int("count_include_pad", 1).run(&[&x]), &f32s(&[1, 1, 3], &[1.5, 4.5, 7.5]));
        // The last window starts inside the input and extends beyond its end.
        let op = Op::new("AveragePool").ints("kernel_shape", &[2]).ints("strides", &[2]).int("ceil_mode", 1);
        assert_close(&op.int("count_include_pad", 1).run(&[&x]), &f32s(&[1, 1, 2], &[4.5, 9.0]));
    }

    #[test]
    fn norms_and_global_pools() {
        let x = f32s(&[1, 1, 2], &[3.0, -4.0]);
        assert_close(&Op::new("LpPool").ints("kernel_shape", &[2]).run(&[&x]), &f32s(&[1, 1, 1], &[5.0]));
        assert_close(&Op::new("GlobalLpPool").int("p", 1).run(&[&x]), &f32s(&[1, 1, 1], &[7.0]));
        assert_close(&Op::new("GlobalAveragePool").run(&[&x]), &f32s(&[1, 1, 1], &[-0.5]));
        assert_close(&Op::new("GlobalMaxPool").run(&[&x]), &f32s(&[1, 1, 1], &[3.0]));
    }
}
