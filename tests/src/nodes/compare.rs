//! Compares an output with the expected one.

use half::{bf16, f16};
use sdrun::HostTensor;
use sdrun_abi::DType;

/// Limit for `|got - want|`, as `absolute + relative * |want|`. The tests' own tolerances (onnx: 1e-7 and 1e-3) leave no room for
/// another order of summation near zero, as in Fourier transforms: there the rounding follows the largest value.
fn tolerance(dtype: DType, largest: f64) -> (f64, f64) {
    match dtype {
        DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => (1e-2, 1e-2),
        _ => (f64::max(1e-5, 4e-6 * largest), 1e-3),
    }
}

/// Compares type, shape and values. Integers must be equal; NaN equals NaN. The error is the kind of difference and its place. `rounding` is
/// for bytes that differ by one, `saturated` for infinities that became the largest number of a type.
pub fn same(got: &HostTensor, want: &HostTensor) -> Result<(), (&'static str, String)> {
    if got.dtype() != want.dtype() {
        return Err(("wrong-type", format!("{} instead of {}", got.dtype(), want.dtype())));
    }
    if got.shape() != want.shape() {
        return Err(("wrong-shape", format!("{:?} instead of {:?}", got.shape(), want.shape())));
    }
    if !got.dtype().is_float() {
        if got.bytes() == want.bytes() {
            return Ok(());
        }
        let size = got.dtype().size();
        let elements = || got.bytes().chunks(size).zip(want.bytes().chunks(size));
        let first = elements().position(|(g, w)| g != w).unwrap_or(0);
        let bytes = matches!(got.dtype(), DType::I8 | DType::U8);
        let steps = bytes && elements().all(|(g, w)| matches!(g[0].wrapping_sub(w[0]), 0 | 1 | 255));
        let kind = if steps { "rounding" } else { "wrong-values" };
        return Err((kind, format!("integers differ, first element {first}")));
    }
    let (dtype, got, want) = (got.dtype(), floats(got), floats(want));
    let finite = want.iter().filter(|value| value.is_finite());
    let (absolute, relative) = tolerance(dtype, finite.fold(0.0, |most, value| most.max(value.abs())));
    let close = |g: f64, w: f64| {
        g == w
            || (g.is_nan() && w.is_nan())
            || (w.is_finite() && (g - w).abs() <= absolute + relative * w.abs())
    };
    let wrong: Vec<usize> = (0..want.len()).filter(|i| !close(got[*i], want[*i])).collect();
    match wrong.first() {
        None => Ok(()),
        Some(first) => Err((
            if wrong.iter().all(|i| want[*i].is_infinite() && is_largest(got[*i]) && got[*i] * want[*i] > 0.0)
            {
                "saturated"
            } else {
                "wrong-values"
            },
            format!(
                "{} of {} differ; element {first} is {} instead of {}",
                wrong.len(),
                want.len(),
                got[*first],
                want[*first]
            ),
        )),
    }
}

/// The largest finite numbers of the types. What passed through another type may have its largest.
fn is_largest(value: f64) -> bool {
    [f16::MAX.to_f64(), bf16::MAX.to_f64(), f32::MAX.into()].contains(&value.abs())
}

/// Elements of a floating-point tensor.
fn floats(tensor: &HostTensor) -> Vec<f64> {
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|b| value(*b)).collect()
    }
    let bytes = tensor.bytes();
    match tensor.dtype() {
        DType::F64 => each(bytes, f64::from_le_bytes),
        DType::F16 => each(bytes, |b| f16::from_le_bytes(b).to_f64()),
        DType::BF16 => each(bytes, |b| bf16::from_le_bytes(b).to_f64()),
        DType::F8E4M3 => each(bytes, |[b]: [u8; 1]| float8(b, 4, 3)),
        DType::F8E5M2 => each(bytes, |[b]: [u8; 1]| float8(b, 5, 2)),
        _ => each(bytes, |b| f64::from(f32::from_le_bytes(b))),
    }
}

/// ONNX's float8 types (onnx `docs/docsgen/source/technical/float8.md`): E5M2 has infinities like IEEE types; E4M3FN has none and a
/// single NaN pattern.
fn float8(bits: u8, exponent_bits: i32, mantissa_bits: i32) -> f64 {
    let sign = if bits & 0x80 != 0 { -1.0 } else { 1.0 };
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(bits & 0x7f) >> mantissa_bits;
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    if exponent_bits == 5 && exponent == 31 {
        return if mantissa == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    if exponent_bits == 4 && bits & 0x7f == 0x7f {
        return f64::NAN;
    }
    if exponent == 0 {
        sign * mantissa * 2f64.powi(1 - bias)
    } else {
        sign * (1.0 + mantissa) * 2f64.powi(exponent - bias)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> HostTensor {
        HostTensor::from_f32(vec![values.len()], values).unwrap()
    }

    #[test]
    fn tolerates_rounding_and_nothing_else() {
        let want = f32s(&[1000.0, 0.0, f32::NAN, f32::INFINITY]);
        assert!(same(&f32s(&[1000.9, 3.9e-3, f32::NAN, f32::INFINITY]), &want).is_ok());
        for (got, what) in [
            (f32s(&[1001.1, 0.0, f32::NAN, f32::INFINITY]), "wrong-values"),
            (f32s(&[1000.0, 4.1e-3, f32::NAN, f32::INFINITY]), "wrong-values"),
            (f32s(&[1000.0, 0.0, 1.0, f32::INFINITY]), "wrong-values"),
            (f32s(&[1000.0, 0.0, f32::NAN, f32::MAX]), "saturated"),
            (f32s(&[1000.0, 0.0, f32::NAN, f32::MIN]), "wrong-values"),
            (f32s(&[1001.1, 0.0, f32::NAN, f32::MAX]), "wrong-values"),
            (f32s(&[1000.0, 0.0, f32::NAN, f32::NEG_INFINITY]), "wrong-values"),
            (f32s(&[1000.0]), "wrong-shape"),
            (HostTensor::from_i64(vec![4], &[0; 4]).unwrap(), "wrong-type"),
        ] {
            assert_eq!(same(&got, &want).unwrap_err().0, what, "{got:?}");
        }
        assert!(same(&f32s(&[1.0, 9e-6]), &f32s(&[1.0, 0.0])).is_ok());
        assert!(same(&f32s(&[1.0, 2e-5]), &f32s(&[1.0, 0.0])).is_err());
    }

    #[test]
    fn integers_are_exact() {
        let t = |v: i64| HostTensor::from_i64(vec![2], &[0, v]).unwrap();
        assert!(same(&t(1 << 60), &t(1 << 60)).is_ok());
        assert!(same(&t((1 << 60) + 1), &t(1 << 60)).unwrap_err().1.contains("element 1"));
        let t = |v: u8| HostTensor::from_bytes(DType::U8, vec![2], &[255, v]).unwrap();
        for (got, what) in [(4, "rounding"), (6, "rounding"), (7, "wrong-values")] {
            assert_eq!(same(&t(got), &t(5)).unwrap_err().0, what);
        }
    }

    #[test]
    fn float8_values() {
        // Largest finite, smallest subnormal, one, NaN: from the table in ONNX's float8 page.
        assert_eq!([0x7e, 0x01, 0x38, 0xb8].map(|b| float8(b, 4, 3)), [448.0, 2f64.powi(-9), 1.0, -1.0]);
        assert!(float8(0x7f, 4, 3).is_nan() && float8(0x7d, 5, 2).is_nan());
        assert_eq!(
            [0x7b, 0x01, 0x3c, 0xfc].map(|b| float8(b, 5, 2)),
            [57344.0, 2f64.powi(-16), 1.0, f64::NEG_INFINITY]
        );
    }
}
