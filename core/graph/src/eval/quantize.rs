//! Quantisation, and operators on quantised tensors.

use super::call::{Call, Fault, Outputs};
use super::cast::convert;
use super::conv::integer_convolution;
use super::matmul::{product, shifted};
use super::number::{load, load_as_f64, saturate, store};
use super::strided::around;
use crate::Tensor;
use crate::infer::dims;
use sdrun_abi::DType;

/// Which elements share a parameter (scale or zero point): all, those with the same index along an axis, or those in
/// the same block along an axis.
struct Granularity {
    inner: usize,
    axis_len: usize,
    /// Elements along the axis per parameter, and parameters along the axis.
    block: usize,
    blocks: usize,
    outer_matters: bool,
}

impl Granularity {
    fn new(c: &Call, x: &[usize], scale: &[usize]) -> Result<Self, Fault> {
        if scale.iter().product::<usize>() == 1 {
            return Ok(Granularity { inner: 1, axis_len: 1, block: 1, blocks: 1, outer_matters: false });
        }
        let axis = if c.opset() < 13 { 1 } else { c.node().int_or("axis", 1) };
        let axis = dims::axis(axis, x.len())?;
        let (_, n, inner) = around(x, axis);
        let block = if c.opset() < 21 { 0 } else { c.node().int_or("block_size", 0) };
        let mismatch =
            || Fault::from(format!("a scale of shape {scale:?} does not fit {x:?} along axis {axis}"));
        match usize::try_from(block).map_err(|_| mismatch())? {
            0 if scale == [n] => {
                Ok(Granularity { inner, axis_len: n, block: 1, blocks: n, outer_matters: false })
            }
            0 => Err(mismatch()),
            block => {
                let mut expected = x.to_vec();
                expected[axis] = n.div_ceil(block);
                if expected != scale {
                    return Err(mismatch());
                }
                Ok(Granularity { inner, axis_len: n, block, blocks: expected[axis], outer_matters: true })
            }
        }
    }

    fn parameter(&self, i: usize) -> usize {
        let (outer, along, inner) =
            (i / (self.inner * self.axis_len), i / self.inner % self.axis_len, i % self.inner);
        let along = along / self.block;
        if self.outer_matters {
            (outer * self.blocks + along) * self.inner + inner
        } else {
            along % self.blocks
        }
    }
}

/// Zero points; zeros if absent.
fn zero_points(zero: Option<&Tensor>, count: usize) -> Result<Vec<f64>, Fault> {
    let Some(zero) = zero else { return Ok(vec![0.0; count]) };
    if zero.len() != count {
        return Err(format!("there are {} zero points for {count} scales", zero.len()).into());
    }
    load_as_f64(zero)
}

fn load_as_f32(t: &Tensor) -> Result<Vec<f32>, Fault> {
    Ok(load_as_f64(t)?.into_iter().map(|v| v as f32).collect())
}

pub(super) fn quantize(c: &Call) -> Outputs {
    let (x, scale, dtype) = (c.input(0)?, c.input(1)?, c.out_dtype(0)?);
    let granularity = Granularity::new(c, x.shape(), scale.shape())?;
    let (values, scales) = (load_as_f32(x)?, load_as_f32(scale)?);
    let zeros = zero_points(c.opt(2), scale.len())?;
    let quotient = |(i, v): (usize, &f32)| v / scales[granularity.parameter(i)];
    let quotients = values.iter().enumerate().map(quotient);
    if matches!(dtype, DType::F8E4M3 | DType::F8E5M2) {
        let y = Tensor::from_elements(x.shape().to_vec(), &quotients.collect::<Vec<f32>>())?;
        return Ok(vec![convert(&y, dtype, c.node().int_or("saturate", 1) != 0)?]);
    }
    let shift = |(i, q): (usize, f32)| f64::from(q).round_ties_even() + zeros[granularity.parameter(i)];
    Ok(vec![saturate(dtype, x.shape().to_vec(), quotients.enumerate().map(shift))?])
}

pub(super) fn dequantize(c: &Call) -> Outputs {
    let (x, scale, dtype) = (c.input(0)?, c.input(1)?, c.out_dtype(0)?);
    let granularity = Granularity::new(c, x.shape(), scale.shape())?;
    let scales = load_as_f32(scale)?;
    let zeros = zero_points(c.opt(2), scale.len())?;
    let value = |(i, v): (usize, &f64)| {
        let p = granularity.parameter(i);
        (v - zeros[p]) as f32 * scales[p]
    };
    let y: Vec<f32> = load_as_f64(x)?.iter().enumerate().map(value).collect();
    Ok(vec![store(dtype, x.shape().to_vec(), &y)?])
}

/// Quantises to u8 over the range of the values, widened to include zero.
pub(super) fn dynamic(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let (y, scale, zero) = to_u8(&load::<f32>(x)?);
    Ok(vec![Tensor::from_elements(x.shape().to_vec(), &y)?, Tensor::scalar(scale), Tensor::scalar(zero)])
}

/// Quantises the values to u8; returns them with their scale and zero point.
pub(super) fn to_u8(values: &[f32]) -> (Vec<u8>, f32, u8) {
    let min = values.iter().fold(0f32, |m, v| m.min(*v));
    let max = values.iter().fold(0f32, |m, v| m.max(*v));
    let scale = (max - min) / 255.0;
    let scale = if scale == 0.0 { 1.0 } else { scale };
    let zero = (-min / scale).round_ties_even().clamp(0.0, 255.0);
    let y: Vec<u8> =
        values.iter().map(|v| ((v / scale).round_ties_even() + zero).clamp(0.0, 255.0) as u8).collect();
    (y, scale, zero as u8)
}

/// `A * B + bias`, where A is an f32 matrix to quantise and B is quantised.
pub(super) fn dynamic_matmul(c: &Call) -> Outputs {
    let a = c.input(0)?;
    let (values, scale, zero) = to_u8(&load::<f32>(a)?);
    let a = Tensor::from_elements(a.shape().to_vec(), &values)?;
    scaled_product(c, (&a, Some(&Tensor::scalar(zero)), scale), (c.input(2)?, c.opt(3), c.opt(4)))
}

/// `A * B + bias` for two quantised matrices.
pub(super) fn matmul_to_float(c: &Call) -> Outputs {
    let scale = scalar(c.input(2)?)?;
    scaled_product(c, (c.input(0)?, c.opt(4), scale), (c.input(3)?, c.opt(5), c.opt(6)))
}

/// The product of a quantised matrix and input 1 in f32. The scale is a scalar or per column.
fn scaled_product(
    c: &Call,
    (a, a_zero, a_scale): (&Tensor, Option<&Tensor>, f32),
    (scale, b_zero, bias): (&Tensor, Option<&Tensor>, Option<&Tensor>),
) -> Outputs {
    let (b, shape) = (c.input(1)?, c.out_shape(0)?);
    let x = shifted(a, a_zero, a.shape().len().saturating_sub(2))?;
    let y = shifted(b, b_zero, b.shape().len().saturating_sub(1))?;
    let columns = shape.last().copied().unwrap_or(1).max(1);
    let (scales, bias) = (load_as_f32(scale)?, bias.map(load_as_f32).transpose()?);
    if (scales.len() != 1 && scales.len() != columns) || bias.as_ref().is_some_and(|b| b.len() != columns) {
        return Err(format!("a scale or bias does not fit {columns} columns").into());
    }
    let sums = product((&x, a.shape()), (&y, b.shape()), &shape);
    let value = |(i, sum): (usize, &i128)| {
        let scale = a_scale * scales[if scales.len() == 1 { 0 } else { i % columns }];
        *sum as f32 * scale + bias.as_ref().map_or(0.0, |bias| bias[i % columns])
    };
    let y: Vec<f32> = sums.iter().enumerate().map(value).collect();
    Ok(vec![Tensor::from_elements(shape, &y)?])
}

/// `sums` times `scale(i)`, rounded, shifted by the zero point and saturated.
fn requantize(
    sums: &[i128],
    scale: impl Fn(usize) -> f32,
    zero: &Tensor,
    shape: Vec<usize>,
) -> Result<Tensor, Fault> {
    let dtype = zero.dtype();
    let zero = f64::from(scalar(zero)?);
    let value = |(i, v): (usize, &i128)| (*v as f64 * f64::from(scale(i))).round_ties_even() + zero;
    saturate(dtype, shape, sums.iter().enumerate().map(value))
}

fn scalar(t: &Tensor) -> Result<f32, Fault> {
    match load_as_f32(t)?.as_slice() {
        [v] => Ok(*v),
        _ => Err("scale and zero point must be scalars".into()),
    }
}

pub(super) fn qlinear_matmul(c: &Call) -> Outputs {
    let (a, b, shape) = (c.input(0)?, c.input(3)?, c.out_shape(0)?);
    let x = shifted(a, c.opt(2), a.shape().len().saturating_sub(2))?;
    let y = shifted(b, c.opt(5), b.shape().len().saturating_sub(1))?;
    let scale = scalar(c.input(1)?)? * scalar(c.input(4)?)? / scalar(c.input(6)?)?;
    let sums = product((&x, a.shape()), (&y, b.shape()), &shape);
    Ok(vec![requantize(&sums, |_| scale, c.input(7)?, shape)?])
}

pub(super) fn qlinear_conv(c: &Call) -> Outputs {
    let shape = c.out_shape(0)?;
    let bias = c.opt(8).map(load::<i128>).transpose()?;
    let sums = integer_convolution(c, (c.input(0)?, c.opt(2)), (c.input(3)?, c.opt(5)), bias.as_deref())?;
    let (x, w, y) = (scalar(c.input(1)?)?, load_as_f32(c.input(4)?)?, scalar(c.input(6)?)?);
    let (_, channels, inner) = around(&shape, 1);
    if w.len() != 1 && w.len() != channels {
        return Err(format!("there are {} weight scales for {channels} channels", w.len()).into());
    }
    let scale = |i: usize| x * w[if w.len() == 1 { 0 } else { i / inner % channels }] / y;
    Ok(vec![requantize(&sums, scale, c.input(7)?, shape)?])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s};
    use crate::Tensor;

    #[test]
    fn round_trip_per_tensor_and_per_axis() {
        let x = f32s(&[2, 2], &[0.0, 2.5, -3.0, 1000.0]);
        let zero = Tensor::from_elements(vec![2], &[128u8, 0]).unwrap();
        let scale = f32s(&[2], &[1.0, 2.0]);
        let q = Op::new("QuantizeLinear").int("axis", 0).run(&[&x, &scale, &zero]);
        assert_eq!(q.elements::<u8>().unwrap(), [128, 130, 0, 255]);
        let y = Op::new("DequantizeLinear").int("axis", 0).run(&[&q, &scale, &zero]);
        assert_close(&y, &f32s(&[2, 2], &[0.0, 2.0, 0.0, 510.0]));
    }

    #[test]
    fn blocks_share_a_scale() {
        let x = Tensor::from_elements(vec![1, 4], &[1i8, 2, 3, 4]).unwrap();
        let y = Op::new("DequantizeLinear").int("block_size", 3).run(&[&x, &f32s(&[1, 2], &[1.0, 10.0])]);
        assert_close(&y, &f32s(&[1, 4], &[1.0, 2.0, 3.0, 40.0]));
    }

    #[test]
    fn the_dynamic_range_includes_zero() {
        let y = Op::new("DynamicQuantizeLinear").outputs(3).try_run(&[&f32s(&[2], &[1.0, 2.55])]).unwrap();
        assert_eq!(
            (y[0].elements::<u8>().unwrap(), y[2].elements::<u8>().unwrap()),
            (vec![100, 255], vec![0])
        );
        assert_close(&y[1], &f32s(&[], &[0.01]));
    }
}
