//! Changes of element type.

use super::call::{Call, Fault, Outputs};
use super::f8;
use super::number::{load, load_as_f64, saturate as saturate_to, store, to_odd, with_any};
use crate::Tensor;
use sdrun_abi::DType;

pub(super) fn cast(c: &Call) -> Outputs {
    let to = c.out_dtype(0)?;
    let saturate = c.opset() < 19 || c.node().int_or("saturate", 1) != 0;
    Ok(vec![convert(c.input(0)?, to, saturate)?])
}

/// Converts the elements of `x` to `to`. Floats round to nearest even. Conversions to integers truncate and clamp to
/// the range. Integers keep their low bits. On overflow, f8 becomes its largest number if `saturate` is set.
pub(super) fn convert(x: &Tensor, to: DType, saturate: bool) -> Result<Tensor, Fault> {
    let (from, shape) = (x.dtype(), x.shape().to_vec());
    if from == to {
        return Ok(x.clone());
    }
    match to {
        DType::F8E4M3 | DType::F8E5M2 => {
            let encode = if to == DType::F8E4M3 { f8::e4m3_from_f32 } else { f8::e5m2_from_f32 };
            let data: Vec<u8> = load_as_f64(x)?.into_iter().map(|v| encode(to_odd(v), saturate)).collect();
            Ok(Tensor::new(to, shape, data)?)
        }
        to if from.is_float() && !to.is_float() && to != DType::Bool => {
            saturate_to(to, shape, load_as_f64(x)?.into_iter())
        }
        to => with_any!(from, T => store(to, shape, &load::<T>(x)?)),
    }
}

pub(super) fn bit_cast(c: &Call) -> Outputs {
    let x = c.input(0)?;
    Ok(vec![Tensor::new(c.out_dtype(0)?, x.shape().to_vec(), x.data().clone())?])
}

#[cfg(test)]
mod tests {
    use super::super::testing::f32s;
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn casts_follow_the_table_of_the_operator() {
        let x = f32s(&[4], &[-1.9, 0.0, 300.7, f32::NAN]);
        assert_eq!(convert(&x, DType::I32, true).unwrap().elements::<i32>().unwrap()[..3], [-1, 0, 300]);
        assert_eq!(
            convert(&x, DType::Bool, true).unwrap().elements::<bool>().unwrap(),
            [true, false, true, true]
        );
        let n = Tensor::from_elements(vec![2], &[300i64, -1]).unwrap();
        assert_eq!(convert(&n, DType::U8, true).unwrap().elements::<u8>().unwrap(), [44, 255]);
        assert_eq!(
            convert(&n, DType::BF16, true).unwrap().elements::<bf16>().unwrap()[0],
            bf16::from_f32(300.0)
        );
    }

    #[test]
    fn f64_to_f16_rounds_once() {
        // Just above the midpoint of 1 and 1 + 2^-10. A detour through f32 would round it to the midpoint.
        let x = Tensor::scalar(1.0 + 2f64.powi(-11) + 2f64.powi(-40));
        let y = convert(&x, DType::F16, true).unwrap();
        assert_eq!(y, Tensor::scalar(f16::from_f32(1.0 + 2f32.powi(-10))));
    }

    #[test]
    fn f8_saturates_only_on_request() {
        let x = f32s(&[1], &[1e9]);
        assert_eq!(convert(&x, DType::F8E4M3, true).unwrap().data()[..], [0x7e]);
        assert_eq!(convert(&x, DType::F8E4M3, false).unwrap().data()[..], [0x7f]);
    }
}
