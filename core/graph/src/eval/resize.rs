//! `Resize` and `Upsample`: interpolation along one axis after the other.

use super::call::{Call, Fault, Outputs};
use super::layout::take;
use super::number::{Num, load, load_as_f64, saturate, store, with_float};
use super::strided::around;
use crate::Tensor;
use crate::infer::resize::Axis;
use crate::infer::{dims, resize as plan};
use rayon::prelude::*;

/// Input elements and their weights for one output position; `None`: outside, takes the extrapolation value.
type Taps = Option<Vec<(usize, f64)>>;

pub(super) fn resize(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let axes =
        plan::plan(&c.ctx, &dims::known(x.shape()))?.ok_or("scales, sizes and roi must hold numbers")?;
    let shape = c.out_shape(0)?;
    let sampler = Sampler::new(c)?;
    let mut y = x.clone();
    for (i, axis) in axes.iter().enumerate() {
        let (from, to) = (x.shape()[i], shape[i]);
        if from == to && axis.scale == Some(1.0) && axis.region == (0.0, 1.0) {
            continue;
        }
        if from == 0 {
            return Err("an empty axis cannot be resized".into());
        }
        let taps: Vec<Taps> = (0..to).map(|o| sampler.taps(axis, from, to, o)).collect::<Result<_, _>>()?;
        y = interpolate(&y, i, &taps, sampler.outside)?;
    }
    Ok(vec![y])
}

/// Weighted sums of elements along an axis. Integers are rounded.
fn interpolate(x: &Tensor, axis: usize, taps: &[Taps], outside: f64) -> Result<Tensor, Fault> {
    let single = |t: &Taps| matches!(t.as_deref(), Some([(_, 1.0)]));
    if taps.iter().all(single) {
        let index = |t: &Taps| t.as_ref().and_then(|t| t.first()).map(|t| t.0);
        return take(x, axis, taps.iter().map(index), &[]);
    }
    let mut shape = x.shape().to_vec();
    shape[axis] = taps.len();
    if x.dtype().is_float() {
        return with_float!(x.dtype(), T => {
            let y = weighted(&load::<T>(x)?, around(x.shape(), axis), taps, outside);
            store(x.dtype(), shape, &y)
        });
    }
    let y = weighted(&load_as_f64(x)?, around(x.shape(), axis), taps, outside);
    saturate(x.dtype(), shape, y.into_iter().map(f64::round_ties_even))
}

fn weighted<T: Num>(
    x: &[T],
    (outer, n, inner): (usize, usize, usize),
    taps: &[Taps],
    outside: f64,
) -> Vec<T> {
    let mut out = vec![T::default(); outer * taps.len() * inner];
    out.par_chunks_mut(inner.max(1)).enumerate().for_each(|(i, row)| {
        let base = i / taps.len() * n;
        let Some(taps) = &taps[i % taps.len()] else { return row.fill(T::from_f64(outside)) };
        for (source, weight) in taps {
            let from = &x[(base + source) * inner..][..inner];
            let weight = T::from_f64(*weight);
            row.iter_mut().zip(from).for_each(|(o, v)| *o = o.add(weight.mul(*v)));
        }
    });
    out
}

/// The attributes that say where samples are taken and how they are weighted.
struct Sampler<'a> {
    mode: &'a str,
    coordinates: &'a str,
    nearest: &'a str,
    cubic: f64,
    exclude_outside: bool,
    antialias: bool,
    outside: f64,
}

impl<'a> Sampler<'a> {
    fn new(c: &Call<'a>) -> Result<Self, Fault> {
        let old = c.node().op_type == "Upsample" || c.opset() < 11;
        let mode = match c.mode("mode", "nearest") {
            "bilinear" if old => "linear",
            mode => mode,
        };
        if !matches!(mode, "nearest" | "linear" | "cubic") {
            return Err(format!("mode {mode:?} is not defined").into());
        }
        let attribute = |name: &str, default: f32| f64::from(c.node().float(name).unwrap_or(default));
        Ok(Sampler {
            mode,
            // Up to opset 10 there was one way only.
            coordinates: if old {
                "asymmetric"
            } else {
                c.mode("coordinate_transformation_mode", "half_pixel")
            },
            nearest: if old { "floor" } else { c.mode("nearest_mode", "round_prefer_floor") },
            cubic: attribute("cubic_coeff_a", -0.75),
            exclude_outside: c.node().int_or("exclude_outside", 0) != 0,
            antialias: c.opset() >= 18 && c.node().int_or("antialias", 0) != 0,
            outside: attribute("extrapolation_value", 0.0),
        })
    }

    /// Position in the input of output element `o`.
    fn position(&self, axis: &Axis, from: usize, to: usize, scale: f64, o: usize) -> Result<f64, Fault> {
        let (o, n, resized) = (o as f64, from as f64, scale * from as f64);
        let (start, end) = axis.region;
        Ok(match self.coordinates {
            "half_pixel" => (o + 0.5) / scale - 0.5,
            "half_pixel_symmetric" => n / 2.0 * (1.0 - to as f64 / resized) + (o + 0.5) / scale - 0.5,
            "pytorch_half_pixel" => {
                if to > 1 {
                    (o + 0.5) / scale - 0.5
                } else {
                    0.0
                }
            }
            "tf_half_pixel_for_nn" => (o + 0.5) / scale,
            "asymmetric" => o / scale,
            "align_corners" => {
                if resized == 1.0 {
                    0.0
                } else {
                    o * (n - 1.0) / (resized - 1.0)
                }
            }
            "tf_crop_and_resize" if to > 1 => {
                start * (n - 1.0) + o * (end - start) * (n - 1.0) / (to as f64 - 1.0)
            }
            "tf_crop_and_resize" => 0.5 * (start + end) * (n - 1.0),
            other => return Err(format!("coordinate_transformation_mode {other:?} is not defined").into()),
        })
    }

    fn taps(&self, axis: &Axis, from: usize, to: usize, o: usize) -> Result<Taps, Fault> {
        let scale = axis.scale.unwrap_or(to as f64 / from as f64);
        let x = self.position(axis, from, to, scale, o)?;
        if self.coordinates == "tf_crop_and_resize" && !(0.0..=from as f64 - 1.0).contains(&x) {
            return Ok(None);
        }
        let inside = |i: f64| i.clamp(0.0, from as f64 - 1.0) as usize;
        if self.mode == "nearest" {
            let i = match self.nearest {
                "round_prefer_floor" => (x - 0.5).ceil(),
                "round_prefer_ceil" => (x + 0.5).floor(),
                "floor" => x.floor(),
                "ceil" => x.ceil(),
                other => return Err(format!("nearest_mode {other:?} is not defined").into()),
            };
            return Ok(Some(vec![(inside(i), 1.0)]));
        }
        // Antialiasing stretches the filter over all the input elements that an output element covers.
        let squeeze = if self.antialias { scale.min(1.0) } else { 1.0 };
        let reach = if self.mode == "linear" { 1.0 } else { 2.0 } / squeeze;
        let (first, last) = ((x - reach).floor() as i64 + 1, (x + reach).ceil() as i64 - 1);
        let mut taps: Vec<(i64, f64)> =
            (first..=last).map(|i| (i, self.filter((i as f64 - x) * squeeze))).collect();
        if self.exclude_outside {
            taps.retain(|(i, _)| (0..from as i64).contains(i));
        }
        if self.antialias || self.exclude_outside {
            let sum: f64 = taps.iter().map(|t| t.1).sum();
            taps.iter_mut().for_each(|t| t.1 /= if sum == 0.0 { 1.0 } else { sum });
        }
        Ok(Some(taps.into_iter().filter(|t| t.1 != 0.0).map(|(i, w)| (inside(i as f64), w)).collect()))
    }

    /// The interpolation filter at distance `d`; the cubic one is equation (4) of Keys, "Cubic convolution
    /// interpolation for digital image processing" (1981).
    fn filter(&self, d: f64) -> f64 {
        let (d, a) = (d.abs(), self.cubic);
        match (self.mode, d) {
            ("linear", _) => (1.0 - d).max(0.0),
            (_, ..=1.0) => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
            (_, ..=2.0) => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s, i64s};
    use crate::Tensor;

    fn line(op: Op, x: &[f32], scales: &[f32]) -> Tensor {
        let (x, scales) = (f32s(&[1, x.len()], x), f32s(&[2], &[1.0, scales[0]]));
        op.try_run_optional(&[Some(&x), None, Some(&scales)]).unwrap().swap_remove(0)
    }

    #[test]
    fn doubling_a_line() {
        let y = line(Op::new("Resize"), &[1.0, 2.0], &[2.0]);
        assert_eq!(y, f32s(&[1, 4], &[1.0, 1.0, 2.0, 2.0]));
        let y = line(Op::new("Resize").str("mode", "linear"), &[1.0, 2.0], &[2.0]);
        assert_close(&y, &f32s(&[1, 4], &[1.0, 1.25, 1.75, 2.0]));
        let corners =
            Op::new("Resize").str("mode", "linear").str("coordinate_transformation_mode", "align_corners");
        assert_close(&line(corners, &[0.0, 3.0], &[2.0]), &f32s(&[1, 4], &[0.0, 1.0, 2.0, 3.0]));
        let asymmetric = Op::new("Resize")
            .str("coordinate_transformation_mode", "asymmetric")
            .str("nearest_mode", "floor");
        assert_eq!(line(asymmetric, &[1.0, 2.0], &[2.0]), f32s(&[1, 4], &[1.0, 1.0, 2.0, 2.0]));
    }

    #[test]
    fn halving_with_antialias_averages() {
        let op = Op::new("Resize").str("mode", "linear").int("antialias", 1);
        // Triangle of half-width two around 0.5: weights 0.75, 0.75, 0.25 and 0.25 for the repeated edge.
        assert_close(&line(op, &[0.0, 4.0, 8.0, 12.0], &[0.5]), &f32s(&[1, 2], &[2.5, 9.5]));
    }

    #[test]
    fn cubic_keeps_a_constant_and_sizes_work() {
        let (x, sizes) = (f32s(&[1, 1, 4], &[2.0; 4]), i64s(&[3], &[1, 1, 7]));
        let op = Op::new("Resize").str("mode", "cubic");
        let y = op.try_run_optional(&[Some(&x), None, None, Some(&sizes)]).unwrap();
        assert_close(&y[0], &f32s(&[1, 1, 7], &[2.0; 7]));
        let old = Op::new("Upsample").opset(9).run(&[&f32s(&[2], &[1.0, 2.0]), &f32s(&[1], &[2.0])]);
        assert_eq!(old, f32s(&[4], &[1.0, 1.0, 2.0, 2.0]));
    }
}
