//! Normalisations. Statistics use f64.

use super::call::{Call, Outputs};
use super::number::{Num, load, load_as_f64, store, with_float};
use super::reduce::gathered;
use super::strided::{View, around, zip2};
use crate::Tensor;
use crate::infer::dims;
use rayon::prelude::*;

/// Mean and population variance.
fn moments<T: Num>(values: &[T]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|v| v.to_f64()).sum::<f64>() / n;
    let variance = values.iter().map(|v| (v.to_f64() - mean).powi(2)).sum::<f64>() / n;
    (mean, variance)
}

fn epsilon(c: &Call) -> f64 {
    f64::from(c.node().float("epsilon").unwrap_or(1e-5))
}

/// Instance and group normalisation: over the channels of a group and all later axes.
pub(super) fn group(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let (_, channels, inner) = around(x.shape(), 1);
    let groups = match c.node().op_type.as_str() {
        "InstanceNormalization" => channels,
        _ => c.ctx.int("num_groups")? as usize,
    };
    let per_group = channels.checked_div(groups).unwrap_or(0);
    let epsilon = epsilon(c);
    with_float!(x.dtype(), T => {
        let (scale, bias) = (load::<T>(c.input(1)?)?, load::<T>(c.input(2)?)?);
        let per_channel = scale.len() == channels;
        let mut y = load::<T>(x)?;
        y.par_chunks_mut((per_group * inner).max(1)).enumerate().for_each(|(i, values)| {
            let (mean, variance) = moments(values);
            let factor = 1.0 / (variance + epsilon).sqrt();
            for (k, image) in values.chunks_exact_mut(inner.max(1)).enumerate() {
                let group = i % groups;
                let s = if per_channel { group * per_group + k } else { group };
                let (scale, bias) = (scale[s].to_f64(), bias[s].to_f64());
                image.iter_mut().for_each(|v| *v = T::from_f64((v.to_f64() - mean) * factor * scale + bias));
            }
        });
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
    })
}

pub(super) fn batch(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let training = c.opset() >= 14 && c.node().int_or("training_mode", 0) != 0;
    let (_, channels, inner) = if x.shape().len() > 1 { around(x.shape(), 1) } else { (1, 1, x.len()) };
    let channel = |i: usize| i / inner % channels;
    let epsilon = epsilon(c);
    let momentum = f64::from(c.node().float("momentum").unwrap_or(0.9));
    let (scale, bias) = (load_as_f64(c.input(1)?)?, load_as_f64(c.input(2)?)?);
    let (mut mean, mut variance) = (load_as_f64(c.input(3)?)?, load_as_f64(c.input(4)?)?);
    with_float!(x.dtype(), T => {
        let values = load::<T>(x)?;
        let mut running = Vec::new();
        if training {
            for k in 0..channels {
                let of_channel: Vec<T> = (0..values.len()).filter(|i| channel(*i) == k).map(|i| values[i]).collect();
                let (m, v) = moments(&of_channel);
                running.push((mean[k] * momentum + m * (1.0 - momentum), variance[k] * momentum + v * (1.0 - momentum)));
                (mean[k], variance[k]) = (m, v);
            }
        }
        let factor: Vec<f64> = (0..channels).map(|k| scale[k] / (variance[k] + epsilon).sqrt()).collect();
        let normalise = |(i, v): (usize, &T)| {
            let k = channel(i);
            T::from_f64((v.to_f64() - mean[k]) * factor[k] + bias[k])
        };
        let y: Vec<T> = values.iter().enumerate().map(normalise).collect();
        let mut outputs = vec![store(x.dtype(), x.shape().to_vec(), &y)?];
        if training {
            let (means, variances): (Vec<f64>, Vec<f64>) = running.into_iter().unzip();
            for values in [means, variances] {
                outputs.push(store(c.input(3)?.dtype(), vec![channels], &values)?);
            }
        }
        Ok(outputs)
    })
}

pub(super) fn layer(c: &Call) -> Outputs {
    let (x, scale) = (c.input(0)?, c.input(1)?);
    let shape = x.shape();
    let axis = c.axis("axis", -1, shape.len())?;
    let n = shape[axis..].iter().product::<usize>();
    let epsilon = epsilon(c);
    with_float!(x.dtype(), T => {
        let mut y = load::<T>(x)?;
        let statistics: Vec<(f64, f64)> = y
            .par_chunks_mut(n.max(1))
            .map(|row| {
                let (mean, variance) = moments(row);
                let factor = 1.0 / (variance + epsilon).sqrt();
                row.iter_mut().for_each(|v| *v = T::from_f64((v.to_f64() - mean) * factor));
                (mean, factor)
            })
            .collect();
        y = zip2(shape, (&y, shape), (&load::<T>(scale)?, scale.shape()), T::mul);
        if let Some(bias) = c.opt(2) {
            y = zip2(shape, (&y, shape), (&load::<T>(bias)?, bias.shape()), T::add);
        }
        let mut outputs = vec![store(x.dtype(), shape.to_vec(), &y)?];
        if c.node().outputs.len() > 1 {
            let (means, factors): (Vec<f64>, Vec<f64>) = statistics.into_iter().unzip();
            for (i, values) in [(1, means), (2, factors)] {
                outputs.push(store(c.out_dtype(i)?, c.out_shape(i)?, &values)?);
            }
        }
        Ok(outputs)
    })
}

pub(super) fn rms(c: &Call) -> Outputs {
    let (x, scale) = (c.input(0)?, c.input(1)?);
    let shape = x.shape();
    let axis = c.axis("axis", -1, shape.len())?;
    let n = shape[axis..].iter().product::<usize>();
    let epsilon = epsilon(c);
    with_float!(x.dtype(), T => {
        let mut y = load::<T>(x)?;
        y.par_chunks_mut(n.max(1)).for_each(|row| {
            let square = row.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / n as f64;
            let factor = 1.0 / (square + epsilon).sqrt();
            row.iter_mut().for_each(|v| *v = T::from_f64(v.to_f64() * factor));
        });
        with_float!(scale.dtype(), U => {
            let multiply = |v: T, s: U| U::from_f64(v.to_f64() * s.to_f64());
            let y = zip2(shape, (&y, shape), (&load::<U>(scale)?, scale.shape()), multiply);
            Ok(vec![store(scale.dtype(), shape.to_vec(), &y)?])
        })
    })
}

/// Normalises each run of elements along `axes` with `f`.
fn along(x: &Tensor, axes: &[usize], f: impl Fn(&[f64]) -> Vec<f64> + Sync) -> Outputs {
    let rank = x.shape().len();
    let mut perm: Vec<usize> = (0..rank).filter(|a| !axes.contains(a)).collect();
    perm.extend((0..rank).filter(|a| axes.contains(a)));
    let permuted: Vec<usize> = perm.iter().map(|a| x.shape()[*a]).collect();
    let back: Vec<usize> = (0..rank).map(|a| perm.iter().position(|p| *p == a).unwrap_or(a)).collect();
    with_float!(x.dtype(), T => {
        let (values, n) = gathered::<T>(x, axes)?;
        let run = |run: &[T]| f(&run.iter().map(|v| v.to_f64()).collect::<Vec<_>>());
        let y: Vec<T> = values.par_chunks(n.max(1)).flat_map_iter(run).map(T::from_f64).collect();
        let y = View::of(&permuted).permuted(&back).copy(&y);
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
    })
}

pub(super) fn lp(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let axis = c.axis("axis", -1, x.shape().len())?;
    let p = c.node().int_or("p", 2);
    if !matches!(p, 1 | 2) {
        return Err(format!("p = {p} is not defined").into());
    }
    along(x, &[axis], |run| {
        let norm = match p {
            1 => run.iter().map(|v| v.abs()).sum::<f64>(),
            _ => run.iter().map(|v| v * v).sum::<f64>().sqrt(),
        };
        run.iter().map(|v| if norm == 0.0 { 0.0 } else { v / norm }).collect()
    })
}

pub(super) fn mean_variance(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let axes = dims::axes(c.node().ints("axes").unwrap_or(&[0, 2, 3]), x.shape().len())?;
    along(x, &axes, |run| {
        let (mean, variance) = moments(run);
        // The operator's definition adds this constant to the deviation.
        run.iter().map(|v| (v - mean) / (variance.sqrt() + 1e-9)).collect()
    })
}

/// Local response normalisation, across neighbouring channels.
pub(super) fn local_response(c: &Call) -> Outputs {
    let x = c.input(0)?;
    if x.shape().len() < 2 {
        return Err("the input must have a channel axis".into());
    }
    let attribute = |name: &str, default: f32| f64::from(c.node().float(name).unwrap_or(default));
    let (alpha, beta, bias) = (attribute("alpha", 1e-4), attribute("beta", 0.75), attribute("bias", 1.0));
    let size = c.ctx.int("size")?;
    let size = usize::try_from(size).ok().filter(|s| *s > 0).ok_or("attribute size must be positive")?;
    let (_, channels, inner) = around(x.shape(), 1);
    with_float!(x.dtype(), T => {
        let values = load::<T>(x)?;
        let normalise = |(i, v): (usize, &T)| {
            let channel = i / inner % channels;
            let first = channel.saturating_sub((size - 1) / 2);
            let end = (channel.saturating_add(size / 2)).min(channels - 1);
            let sum: f64 = (first..=end).map(|k| values[i - channel * inner + k * inner].to_f64().powi(2)).sum();
            T::from_f64(v.to_f64() / (bias + alpha / size as f64 * sum).powf(beta))
        };
        let y: Vec<T> = values.iter().enumerate().map(normalise).collect();
        Ok(vec![store(x.dtype(), x.shape().to_vec(), &y)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s};

    #[test]
    fn scales_are_per_group_up_to_opset_20() {
        let x = f32s(&[1, 4, 1], &[-1.0, 1.0, -3.0, 3.0]);
        let op =
            |opset| Op::new("GroupNormalization").opset(opset).int("num_groups", 2).float("epsilon", 0.0);
        let (scale, bias) = (f32s(&[2], &[1.0, 2.0]), f32s(&[2], &[0.0, 1.0]));
        assert_close(&op(18).run(&[&x, &scale, &bias]), &f32s(&[1, 4, 1], &[-1.0, 1.0, -1.0, 3.0]));
        let (scale, bias) = (f32s(&[4], &[1.0, 2.0, 3.0, 4.0]), f32s(&[4], &[0.0; 4]));
        assert_close(&op(21).run(&[&x, &scale, &bias]), &f32s(&[1, 4, 1], &[-1.0, 2.0, -3.0, 4.0]));
        assert!(op(18).try_run(&[&x, &scale, &bias]).is_err());
    }

    #[test]
    fn layer_norm_and_its_statistics() {
        let x = f32s(&[2, 2], &[1.0, 3.0, -2.0, 2.0]);
        let op = Op::new("LayerNormalization").float("epsilon", 0.0).outputs(3);
        let y = op.try_run(&[&x, &f32s(&[2], &[1.0, 2.0]), &f32s(&[2], &[0.0, 1.0])]).unwrap();
        assert_close(&y[0], &f32s(&[2, 2], &[-1.0, 3.0, -1.0, 3.0]));
        assert_close(&y[1], &f32s(&[2, 1], &[2.0, 0.0]));
        assert_close(&y[2], &f32s(&[2, 1], &[1.0, 0.5]));
    }

    #[test]
    fn the_other_norms() {
        let x = f32s(&[1, 2], &[3.0, 4.0]);
        let rms =
            Op::new("RMSNormalization").opset(23).float("epsilon", 0.0).run(&[&x, &f32s(&[2], &[1.0, 1.0])]);
        assert_close(&rms, &f32s(&[1, 2], &[0.848_528_14, 1.131_370_9]));
        assert_close(&Op::new("LpNormalization").run(&[&x]), &f32s(&[1, 2], &[0.6, 0.8]));
        let one = |v: f32| f32s(&[2], &[v, v]);
        let op = Op::new("BatchNormalization").float("epsilon", 1.0);
        let y = op.run(&[&x, &one(2.0), &one(1.0), &one(2.0), &one(3.0)]);
        assert_close(&y, &f32s(&[1, 2], &[2.0, 3.0]));
        let y = Op::new("LRN").int("size", 3).float("alpha", 3.0).float("beta", 1.0).run(&[&x]);
        assert_close(&y, &f32s(&[1, 2], &[3.0 / 26.0, 4.0 / 26.0]));
        let y = Op::new("MeanVarianceNormalization").ints("axes", &[1]).run(&[&x]);
        assert_close(&y, &f32s(&[1, 2], &[-1.0, 1.0]));
    }
}
