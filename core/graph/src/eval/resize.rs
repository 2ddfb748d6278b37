//! `Resize` and `Upsample`: interpolation along one axis at a time.

use super::call::{Call, Fault, Outputs};
use super::layout::take;
use super::number::{Num, load, load_as_f64, saturate, store, with_float};
use super::strided::around;
use crate::infer::resize::Axis;
use crate::infer::{Ctx, Fact, dims, resize as plan};
use crate::{Node, Tensor};
use rayon::prelude::*;

/// Input elements of an axis and their weights for one output position. `None`: outside the input, so the
/// extrapolation value applies.
pub type Taps = Option<Vec<(usize, f64)>>;

/// How `Resize` and `Upsample` compute their output, one axis at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Interpolation {
    /// For each axis, the taps of its output positions; `None` if the axis is unchanged.
    pub axes: Vec<Option<Vec<Taps>>>,
    /// The extrapolation value.
    pub outside: f64,
}

/// The interpolation of a node with first input of shape `input` and output of shape `output`.
///
/// # Errors
/// One sentence if an attribute is undefined, or if scales, sizes or the region of interest are unknown.
pub fn interpolation(
    node: &Node,
    opset: i64,
    inputs: &[Option<Fact>],
    input: &[usize],
    output: &[usize],
) -> Result<Interpolation, String> {
    let ctx = Ctx { node, opset, inputs };
    let axes = plan::plan(&ctx, &dims::known(input))?.ok_or("scales, sizes and roi must hold numbers")?;
    let sampler = Sampler::new(node, opset)?;
    let taps = |(i, axis): (usize, &Axis)| {
        let (from, to) = (input[i], output[i]);
        if from == to && axis.scale == Some(1.0) && axis.region == (0.0, 1.0) {
            return Ok(None);
        }
        if from == 0 {
            return Err("an empty axis cannot be resized".to_owned());
        }
        let taps: Result<Vec<Taps>, String> = (0..to).map(|o| sampler.taps(axis, from, to, o)).collect();
        taps.map(Some)
    };
    let axes: Result<_, String> = axes.iter().enumerate().map(taps).collect();
    Ok(Interpolation { axes: axes?, outside: sampler.outside })
}

pub(super) fn resize(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let Interpolation { axes, outside } =
        interpolation(c.node(), c.opset(), c.ctx.inputs, x.shape(), &shape)?;
    let mut y = x.clone();
    for (i, taps) in axes.iter().enumerate() {
        if let Some(taps) = taps {
            y = interpolate(&y, i, taps, outside)?;
        }
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

/// The attributes that determine sample positions and weights.
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
    fn new(node: &'a Node, opset: i64) -> Result<Self, String> {
        let old = node.op_type == "Upsample" || opset < 11;
        let text = |name: &str, default: &'a str| node.str(name).unwrap_or(default);
        let mode = match text("mode", "nearest") {
            "bilinear" if old => "linear",
            mode => mode,
        };
        if !matches!(mode, "nearest" | "linear" | "cubic") {
            return Err(format!("mode {mode:?} is not defined"));
        }
        let attribute = |name: &str, default: f32| f64::from(node.float(name).unwrap_or(default));
        Ok(Sampler {
            mode,
            // Up to opset 10 there was only one mode.
            coordinates: if old {
                "asymmetric"
            } else {
                text("coordinate_transformation_mode", "half_pixel")
            },
            nearest: if old { "floor" } else { text("nearest_mode", "round_prefer_floor") },
            cubic: attribute("cubic_coeff_a", -0.75),
            exclude_outside: node.int_or("exclude_outside", 0) != 0,
            antialias: opset >= 18 && node.int_or("antialias", 0) != 0,
            outside: attribute("extrapolation_value", 0.0),
        })
    }

    /// Position in the input of output element `o`.
    fn position(&self, axis: &Axis, from: usize, to: usize, scale: f64, o: usize) -> Result<f64, String> {
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
            other => return Err(format!("coordinate_transformation_mode {other:?} is not defined")),
        })
    }

    fn taps(&self, axis: &Axis, from: usize, to: usize, o: usize) -> Result<Taps, String> {
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
                other => return Err(format!("nearest_mode {other:?} is not defined")),
            };
            return Ok(Some(vec![(inside(i), 1.0)]));
        }
        // Antialiasing stretches the filter over all input elements that an output element covers.
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

    /// The interpolation filter at distance `d`. The cubic filter is equation (4) of Keys, "Cubic convolution
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
        // A triangle of half-width two around 0.5: weights 0.75, 0.75, 0.25, and 0.25 for the repeated edge.
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
