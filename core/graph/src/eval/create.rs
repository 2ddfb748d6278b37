//! Creates tensors from shapes, scalars and attributes.

use super::call::{Call, Fault, Outputs};
use super::number::{Num, load, load_as_f64, store, with_any, with_number, with_size};
use super::strided::around;
use crate::Tensor;
use crate::infer::dims;

/// Operators whose value follows from attributes and shapes alone; the inference rule has computed it.
pub(super) fn from_rule(c: &Call) -> Outputs {
    let value = c.outputs.first().and_then(|f| f.value.clone());
    Ok(vec![value.ok_or_else(|| Fault::Unsupported("this kind of value is not supported".into()))?])
}

pub(super) fn constant_of_shape(c: &Call) -> Outputs {
    let (shape, dtype) = (c.out_shape(0)?, c.out_dtype(0)?);
    let zero = vec![0; dtype.size()];
    let one = c.node().tensor("value").map_or(zero.as_slice(), |t| &t.data()[..]);
    Ok(vec![Tensor::new(dtype, shape.clone(), one.repeat(shape.iter().product()))?])
}

pub(super) fn range(c: &Call) -> Outputs {
    let (shape, dtype) = (c.out_shape(0)?, c.out_dtype(0)?);
    with_number!(dtype, T => {
        let scalar = |i: usize| -> Result<T, Fault> { Ok(load::<T>(c.input(i)?)?[0]) };
        let (start, delta) = (scalar(0)?, scalar(2)?);
        let values: Vec<T> = (0..shape[0]).map(|i| start.add(T::from_f64(i as f64).mul(delta))).collect();
        Ok(vec![store(dtype, shape, &values)?])
    })
}

pub(super) fn eye_like(c: &Call) -> Outputs {
    let (shape, dtype) = (c.out_shape(0)?, c.out_dtype(0)?);
    let k = c.node().int_or("k", 0);
    with_any!(dtype, T => {
        let mut values = vec![T::default(); shape[0] * shape[1]];
        for i in 0..shape[0] {
            if let Some(j) = (i as i64).checked_add(k).and_then(|j| usize::try_from(j).ok()).filter(|j| *j < shape[1]) {
                values[i * shape[1] + j] = T::ONE;
            }
        }
        Ok(vec![store(dtype, shape, &values)?])
    })
}

pub(super) fn one_hot(c: &Call) -> Outputs {
    let (indices, values, shape) = (c.input(0)?, c.input(2)?, c.out_shape(0)?);
    let axis = dims::axis(c.node().int_or("axis", -1), shape.len())?;
    let (outer, depth, inner) = around(&shape, axis);
    let positions = load_as_f64(indices)?;
    let data = with_size!(values.dtype(), N => {
        let values = values.data().as_chunks::<N>().0;
        let mut out = vec![values[0]; outer * depth * inner];
        for (i, p) in positions.iter().enumerate() {
            let p = if *p < 0.0 { p + depth as f64 } else { *p };
            if p >= 0.0 && p < depth as f64 {
                out[(i / inner * depth + p as usize) * inner + i % inner] = values[1];
            }
        }
        out.into_flattened()
    });
    Ok(vec![Tensor::new(values.dtype(), shape, data)?])
}

pub(super) fn trilu(c: &Call) -> Outputs {
    let x = c.input(0)?;
    let upper = c.node().int_or("upper", 1) != 0;
    let k = if c.opt(1).is_some() { c.int(1)? } else { 0 };
    let (rows, columns) = match x.shape() {
        [.., r, c] => (*r, *c),
        _ => return Err("the input must be a matrix".into()),
    };
    let size = x.dtype().size();
    let mut data = x.data().to_vec();
    for (row, line) in data.chunks_exact_mut((columns * size).max(1)).enumerate() {
        // The first column of the upper triangle, and the first column to the right of the lower one.
        let diagonal = ((row % rows) as i64).saturating_add(k);
        let edge = |v: i64| v.clamp(0, columns as i64) as usize * size;
        let outside =
            if upper { 0..edge(diagonal) } else { edge(diagonal.saturating_add(1))..columns * size };
        line[outside].fill(0);
    }
    Ok(vec![Tensor::new(x.dtype(), x.shape().to_vec(), data)?])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, f32s, i64s};
    use crate::Attribute;

    #[test]
    fn constants_and_ranges() {
        let y = Op::new("ConstantOfShape")
            .attribute("value", Attribute::Tensor(i64s(&[1], &[7])))
            .run(&[&i64s(&[2], &[2, 1])]);
        assert_eq!(y, i64s(&[2, 1], &[7, 7]));
        let y = Op::new("Range").run(&[&i64s(&[], &[10]), &i64s(&[], &[3]), &i64s(&[], &[-3])]);
        assert_eq!(y, i64s(&[3], &[10, 7, 4]));
        let step = f32s(&[], &[0.0]);
        assert!(Op::new("Range").try_run(&[&f32s(&[], &[0.0]), &f32s(&[], &[1.0]), &step]).is_err());
    }

    #[test]
    fn one_hot_wraps_negative_and_ignores_out_of_range_indices() {
        let (indices, depth, values) = (i64s(&[3], &[1, -1, 5]), i64s(&[], &[3]), f32s(&[2], &[0.0, 2.0]));
        let y = Op::new("OneHot").run(&[&indices, &depth, &values]);
        assert_eq!(y, f32s(&[3, 3], &[0.0, 2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]));
    }

    #[test]
    fn triangles() {
        let x = i64s(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        assert_eq!(Op::new("Trilu").run(&[&x]), i64s(&[2, 3], &[1, 2, 3, 0, 5, 6]));
        assert_eq!(Op::new("Trilu").int("upper", 0).run(&[&x]), i64s(&[2, 3], &[1, 0, 0, 4, 5, 0]));
        let shifted = Op::new("Trilu").run(&[&x, &i64s(&[], &[1])]);
        assert_eq!(shifted, i64s(&[2, 3], &[0, 2, 3, 0, 0, 6]));
        let eye = Op::new("EyeLike").int("k", 1).run(&[&x]);
        assert_eq!(eye, i64s(&[2, 3], &[0, 1, 0, 0, 0, 1]));
    }
}
