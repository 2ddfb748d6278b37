use crate::{
    ffi::{Grid, Inputs, Kernel, Tile, Type},
    simd::{Vectorized, vectorize},
};
use sdrun_abi::DType;
use std::ops::Range;

/// The granularity of scales and zero points in ONNX QuantizeLinear and DequantizeLinear.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Granularity {
    /// One for all elements.
    Tensor,
    /// One for each of `len` positions along an axis. `inner` is the number of elements behind the axis.
    Axis { len: usize, inner: usize },
    /// One for each `block` positions along an axis of `len`, separately for each index before the axis and each of `inner` behind it.
    Block { len: usize, inner: usize, block: usize },
}

/// The index of the parameters of a run of elements: the same for all, or consecutive.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Parameters {
    One(usize),
    From(usize),
}

impl Granularity {
    /// Divides a run of elements into segments with constant or consecutive parameters.
    fn segments(self, run: Range<usize>) -> impl Iterator<Item = (Range<usize>, Parameters)> {
        let mut at = run.start;
        std::iter::from_fn(move || {
            let (length, parameters) = match self {
                Granularity::Tensor => (run.end - at, Parameters::One(0)),
                Granularity::Axis { len, inner: 1 } => (len - at % len, Parameters::From(at % len)),
                Granularity::Axis { len, inner } => (inner - at % inner, Parameters::One(at / inner % len)),
                Granularity::Block { len, inner, block } => {
                    let (outer, along, behind) = (at / (len * inner), at / inner % len, at % inner);
                    let row = outer * len.div_ceil(block) + along / block;
                    match inner {
                        1 => ((block - along % block).min(len - along), Parameters::One(row)),
                        _ => (inner - behind, Parameters::From(row * inner + behind)),
                    }
                }
            };
            let segment = at..(at + length).min(run.end);
            at = segment.end;
            (!segment.is_empty()).then_some((segment, parameters))
        })
    }
}

/// Converts stored integers to f32. Beyond 2^24 they are rounded.
fn widen(dtype: DType, bytes: &[u8], out: &mut Vec<f32>) {
    out.clear();
    match dtype {
        DType::U8 => out.extend(bytes.iter().map(|b| f32::from(*b))),
        DType::I8 => out.extend(bytes.iter().map(|b| f32::from(*b as i8))),
        DType::U16 => out.extend(bytes.as_chunks().0.iter().map(|b| f32::from(u16::from_le_bytes(*b)))),
        DType::I16 => out.extend(bytes.as_chunks().0.iter().map(|b| f32::from(i16::from_le_bytes(*b)))),
        _ => out.extend(bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b) as f32)),
    }
}

/// The scales (input 1) as f32. They may be stored in half precision.
fn scales(inputs: &Inputs<'_>, buffer: &mut Vec<f32>) {
    let len = inputs.bytes(1).len() / inputs.type_of(1).size();
    *buffer = match inputs.type_of(1) {
        Type::F32 => inputs.f32(1).to_vec(),
        _ => super::widen(inputs, 1, 0..len, &mut Vec::new()).to_vec(),
    };
}

/// The zero points (the optional input 2).
fn zeros(inputs: &Inputs<'_>, dtype: Option<DType>, count: usize) -> Vec<f32> {
    let mut zeros = vec![0.0; count];
    if let Some(dtype) = dtype {
        widen(dtype, inputs.bytes(2), &mut zeros);
    }
    zeros
}

/// `(x - zero) * scale`. Input 0 has integers of type `from`, input 1 scales, and the optional input 2 zero points of type `zero`.
pub(crate) struct Dequantize {
    pub(crate) len: usize,
    pub(crate) from: DType,
    pub(crate) zero: Option<DType>,
    pub(crate) granularity: Granularity,
}

impl Kernel for Dequantize {
    fn grid(&self, workers: usize) -> Grid {
        Grid::even(self.len, workers)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (size, cols) = (self.from.size(), tile.cols.clone());
        let (mut scale, mut x) = (Vec::new(), Vec::new());
        scales(inputs, &mut scale);
        let zero = zeros(inputs, self.zero, scale.len());
        widen(self.from, &inputs.bytes(0)[cols.start * size..cols.end * size], &mut x);
        let out = tile.row(0);
        for (segment, parameters) in self.granularity.segments(cols.clone()) {
            let place = segment.start - cols.start..segment.end - cols.start;
            let (x, out) = (&x[place.clone()], &mut out[place]);
            match parameters {
                Parameters::One(p) => {
                    let (zero, scale) = (zero[p], scale[p]);
                    vectorize(Each { x, out, f: |_, x| (x - zero) * scale });
                }
                Parameters::From(p) => {
                    let (zero, scale) = (&zero[p..p + x.len()], &scale[p..p + x.len()]);
                    vectorize(Each { x, out, f: |i: usize, x| (x - zero[i]) * scale[i] });
                }
            }
        }
        Ok(())
    }
}

/// `round(x / scale) + zero`, rounded to even and clamped to the range of the type `to`. Input 0 is f32; the others are as for
/// [`Dequantize`].
pub(crate) struct Quantize {
    pub(crate) len: usize,
    /// An integer type of 8 or 16 bits.
    pub(crate) to: DType,
    pub(crate) zero: Option<DType>,
    pub(crate) granularity: Granularity,
}

impl Kernel for Quantize {
    fn grid(&self, workers: usize) -> Grid {
        Grid::even(self.len, workers)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let cols = tile.cols.clone();
        let mut scale = Vec::new();
        scales(inputs, &mut scale);
        let zero = zeros(inputs, self.zero, scale.len());
        let mut levels = vec![0f32; cols.len()];
        for (segment, parameters) in self.granularity.segments(cols.clone()) {
            let out = &mut levels[segment.start - cols.start..segment.end - cols.start];
            let x = &inputs.f32(0)[segment];
            match parameters {
                Parameters::One(p) => {
                    let (zero, scale) = (zero[p], scale[p]);
                    vectorize(Each { x, out, f: |_, x: f32| (x / scale).round_ties_even() + zero });
                }
                Parameters::From(p) => {
                    let (zero, scale) = (&zero[p..p + x.len()], &scale[p..p + x.len()]);
                    vectorize(Each {
                        x,
                        out,
                        f: |i: usize, x: f32| (x / scale[i]).round_ties_even() + zero[i],
                    });
                }
            }
        }
        narrow(self.to, &levels, tile.run_bytes());
        Ok(())
    }
}

/// The scale, or the zero point as u8, of ONNX DynamicQuantizeLinear. Inputs are the smallest and the largest value.
pub(crate) struct DynamicRange {
    pub(crate) zero_point: bool,
}

impl Kernel for DynamicRange {
    fn grid(&self, _: usize) -> Grid {
        Grid::flat(1, 1)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (&[least, ..], &[most, ..]) = (inputs.f32(0), inputs.f32(1)) else {
            return Err("no range".into());
        };
        // The range always includes 0.
        let (least, most) = (if least > 0.0 { 0.0 } else { least }, if most < 0.0 { 0.0 } else { most });
        let scale = (most - least) / 255.0;
        let scale = if scale == 0.0 { 1.0 } else { scale };
        if self.zero_point {
            narrow(DType::U8, &[(-least / scale).round_ties_even()], tile.run_bytes());
        } else {
            tile.row(0)[0] = scale;
        }
        Ok(())
    }
}

/// Converts whole numbers to integers, clamped to their range. A NaN becomes 0.
fn narrow(to: DType, values: &[f32], out: &mut [u8]) {
    match to {
        DType::U8 => out.iter_mut().zip(values).for_each(|(out, v)| *out = *v as u8),
        DType::I8 => out.iter_mut().zip(values).for_each(|(out, v)| *out = *v as i8 as u8),
        DType::U16 => {
            let out = out.as_chunks_mut().0.iter_mut();
            out.zip(values).for_each(|(out, v)| *out = (*v as u16).to_le_bytes());
        }
        _ => {
            let out = out.as_chunks_mut().0.iter_mut();
            out.zip(values).for_each(|(out, v)| *out = (*v as i16).to_le_bytes());
        }
    }
}

/// Applies a function to each element and its index.
struct Each<'a, F> {
    x: &'a [f32],
    out: &'a mut [f32],
    f: F,
}

impl<F: Fn(usize, f32) -> f32> Vectorized for Each<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        self.out.iter_mut().zip(self.x).enumerate().for_each(|(i, (out, x))| *out = (self.f)(i, *x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares segments with the definition, element by element, from every start.
    #[test]
    fn segments_have_the_parameters_of_their_elements() {
        let (outer, len) = (3, 7);
        for inner in [1, 5] {
            let total = outer * len * inner;
            let block = Granularity::Block { len, inner, block: 3 };
            for granularity in [Granularity::Tensor, Granularity::Axis { len, inner }, block] {
                let expected = |i: usize| match granularity {
                    Granularity::Tensor => 0,
                    Granularity::Axis { .. } => i / inner % len,
                    Granularity::Block { block, .. } => {
                        (i / (len * inner) * len.div_ceil(block) + i / inner % len / block) * inner
                            + i % inner
                    }
                };
                for start in 0..total {
                    let mut next = start;
                    for (segment, parameters) in granularity.segments(start..total) {
                        assert_eq!(segment.start, next);
                        for i in segment.clone() {
                            let found = match parameters {
                                Parameters::One(p) => p,
                                Parameters::From(p) => p + i - segment.start,
                            };
                            assert_eq!(found, expected(i), "{granularity:?}, element {i} from {start}");
                        }
                        next = segment.end;
                    }
                    assert_eq!(next, total);
                }
            }
        }
    }
}
