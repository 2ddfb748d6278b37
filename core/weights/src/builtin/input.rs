//! Seeded inputs for built-in models: every machine runs a model on the same numbers.

use crate::synthetic;
use half::{bf16, f16};
use sdrun_abi::{DType, Error, Result};
use sdrun_graph::Tensor;

/// An input of a built-in model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Input {
    /// Name in the graph.
    pub name: &'static str,
    /// Element type in the graph.
    pub dtype: DType,
    /// The default shape.
    pub shape: &'static [usize],
    /// The meaning of its numbers.
    pub kind: InputKind,
}

/// The meaning of an input, which decides how it is generated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InputKind {
    /// Unit-variance noise: latents, embeddings, hidden states. [`synthetic::inputs`].
    Noise,
    /// A picture `[batch, channels, height, width]` with values from `low` to `high`. Most of its variance is in
    /// large areas, as in photographs: networks that end in a global pooling cannot tell one picture of pure
    /// noise from another.
    Picture {
        /// Black.
        low: f32,
        /// White.
        high: f32,
    },
    /// Rows of token ids: `first` if given, text below `below`, and `last` at the end.
    TokenIds {
        /// Begin-of-text token.
        first: Option<u32>,
        /// End-of-text token.
        last: u32,
        /// Bound of the tokens between, exclusive.
        below: u32,
    },
    /// One number everywhere: timestep, guidance, scale.
    Constant(f32),
    /// These numbers in every row.
    Row(&'static [f32]),
    /// `[tokens, 3]`: `(0, y, x)` of each token of a picture that is as wide as high, rounded up.
    Grid,
}

impl Input {
    /// The input for `model` (a built-in's name) in `shape`.
    ///
    /// `InvalidArgument` if the shape has another rank than [`Input::shape`], does not suit the kind, or
    /// overflows.
    pub fn tensor(&self, model: &str, shape: &[usize]) -> Result<Tensor> {
        let (name, expected) = (self.name, self.shape);
        let refuse =
            || Error::invalid(format!("input {name:?} cannot have shape {shape:?}; it is like {expected:?}"));
        if shape.len() != expected.len() || DType::F64.bytes_of(shape).is_none() {
            return Err(refuse());
        }
        let elements = shape.iter().product();
        let values = match self.kind {
            InputKind::Noise => synthetic::inputs(model, name, shape)?,
            InputKind::Picture { low, high } => match *shape {
                [batch, channels, height, width] => {
                    picture(model, name, [batch, channels, height, width], low, high)?
                }
                _ => return Err(refuse()),
            },
            InputKind::Constant(value) => vec![value; elements],
            InputKind::Row(row) => match shape.last() {
                Some(columns) if *columns == row.len() => row.repeat(elements / row.len()),
                _ => return Err(refuse()),
            },
            InputKind::Grid => match *shape {
                [tokens, 3] => {
                    let width = (1..).find(|w| w * w >= tokens).unwrap_or(1);
                    (0..tokens).flat_map(|t| [0.0, (t / width) as f32, (t % width) as f32]).collect()
                }
                _ => return Err(refuse()),
            },
            InputKind::TokenIds { first, last, below } => {
                let mut ids: Vec<i64> =
                    synthetic::integers(model, name, below, elements).map(i64::from).collect();
                for row in ids.chunks_mut(shape.last().copied().unwrap_or(1).max(1)) {
                    if let (Some(first), [start, ..]) = (first, &mut *row) {
                        *start = i64::from(first);
                    }
                    if let [.., end] = row {
                        *end = i64::from(last);
                    }
                }
                return integers(self.dtype, shape, &ids).ok_or_else(refuse);
            }
        };
        floats(self.dtype, shape, &values).ok_or_else(refuse)
    }
}

/// Colour, 32-pixel blocks and noise in the proportion 1 : 0.3 : 0.3, clipped at two standard deviations.
fn picture(model: &str, name: &str, shape: [usize; 4], low: f32, high: f32) -> Result<Vec<f32>> {
    const BLOCK: usize = 32;
    let [batch, channels, height, width] = shape;
    let (rows, columns) = (height.div_ceil(BLOCK), width.div_ceil(BLOCK));
    let colour = synthetic::inputs(model, &format!("{name}/colour"), &[batch, channels, 1, 1])?;
    let blocks = synthetic::inputs(model, &format!("{name}/blocks"), &[batch, channels, rows, columns])?;
    let mut values = synthetic::inputs(model, &format!("{name}/noise"), &shape)?;
    let unit = (1.0f64 / 1.18).sqrt() as f32;
    let slope = (high - low) / 4.0;
    for (i, value) in values.iter_mut().enumerate() {
        let (x, y, plane) = (i % width, i / width % height, i / width / height);
        let block = blocks[(plane * rows + y / BLOCK) * columns + x / BLOCK];
        let sum = (colour[plane] + 0.3 * block + 0.3 * *value) * unit;
        *value = low + (sum.clamp(-2.0, 2.0) + 2.0) * slope;
    }
    Ok(values)
}

fn floats(dtype: DType, shape: &[usize], values: &[f32]) -> Option<Tensor> {
    let shape = shape.to_vec();
    match dtype {
        DType::F32 => Tensor::from_elements(shape, values),
        DType::F16 => {
            Tensor::from_elements(shape, &values.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>())
        }
        DType::BF16 => {
            Tensor::from_elements(shape, &values.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>())
        }
        DType::I64 => Tensor::from_elements(shape, &values.iter().map(|v| *v as i64).collect::<Vec<_>>()),
        _ => return None,
    }
    .ok()
}

fn integers(dtype: DType, shape: &[usize], values: &[i64]) -> Option<Tensor> {
    let shape = shape.to_vec();
    match dtype {
        DType::I64 => Tensor::from_elements(shape, values),
        DType::I32 => Tensor::from_elements(shape, &values.iter().map(|v| *v as i32).collect::<Vec<_>>()),
        _ => return None,
    }
    .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(dtype: DType, shape: &'static [usize], kind: InputKind) -> Input {
        Input { name: "x", dtype, shape, kind }
    }

    #[test]
    fn pictures_fill_their_range_and_differ() {
        let picture = input(DType::F32, &[2, 3, 100, 70], InputKind::Picture { low: -1.0, high: 3.0 });
        let values = picture.tensor("m", picture.shape).unwrap().to_f32s().unwrap();
        assert!(values.iter().all(|v| (-1.0..=3.0).contains(v)));
        let (a, b) = values.split_at(values.len() / 2);
        let mean = |v: &[f32]| v.iter().sum::<f32>() / v.len() as f32;
        // Each picture has three colours, so the means of two pictures differ by a few tenths. Those of noise would not.
        assert!((mean(a) - mean(b)).abs() > 0.05, "{} {}", mean(a), mean(b));
        // From the numpy implementation (tools/export/synth.py).
        assert_eq!([values[0].to_bits(), values[values.len() - 1].to_bits()], [0x4008_e9aa, 0x3f38_b772]);
    }

    #[test]
    fn token_rows_begin_and_end_as_told() {
        let kind = InputKind::TokenIds { first: Some(49_406), last: 49_407, below: 49_406 };
        let ids = input(DType::I64, &[1, 77], kind).tensor("m", &[2, 77]).unwrap().to_i64s().unwrap();
        for row in ids.chunks(77) {
            assert_eq!((row[0], row[76]), (49_406, 49_407));
            assert!(row[1..76].iter().all(|id| (0..49_406).contains(id)));
        }
        assert_ne!(ids[1..76], ids[78..153]);
        let kind = InputKind::TokenIds { first: None, last: 1, below: 10 };
        assert_eq!(input(DType::I32, &[1, 4], kind).tensor("m", &[1, 1]).unwrap().to_i64s().unwrap(), [1]);
    }

    #[test]
    fn grids_rows_and_constants() {
        let grid = input(DType::F32, &[4, 3], InputKind::Grid).tensor("m", &[6, 3]).unwrap();
        let expected =
            [[0., 0., 0.], [0., 0., 1.], [0., 0., 2.], [0., 1., 0.], [0., 1., 1.], [0., 1., 2.]].concat();
        assert_eq!(grid.to_f32s().unwrap(), expected);
        let row = input(DType::F16, &[1, 2], InputKind::Row(&[1.0, 2.0])).tensor("m", &[2, 2]).unwrap();
        assert_eq!((row.dtype(), row.to_f32s().unwrap()), (DType::F16, vec![1.0, 2.0, 1.0, 2.0]));
        let step = input(DType::I64, &[1], InputKind::Constant(500.0)).tensor("m", &[2]).unwrap();
        assert_eq!(step.to_i64s().unwrap(), [500, 500]);
        let scale = input(DType::F32, &[], InputKind::Constant(0.75)).tensor("m", &[]).unwrap();
        assert_eq!(scale.to_f32s().unwrap(), [0.75]);
    }

    #[test]
    fn shapes_that_do_not_suit_are_refused() {
        let noise = input(DType::F32, &[1, 4], InputKind::Noise);
        assert!(noise.tensor("m", &[4]).unwrap_err().message.contains("like [1, 4]"));
        assert!(noise.tensor("m", &[usize::MAX, 8]).is_err());
        assert!(input(DType::F32, &[1, 6], InputKind::Row(&[0.0; 6])).tensor("m", &[1, 5]).is_err());
        assert!(input(DType::F32, &[1, 3], InputKind::Grid).tensor("m", &[1, 2]).is_err());
        assert_eq!(noise.tensor("m", &[0, 4]).unwrap().len(), 0);
    }
}
