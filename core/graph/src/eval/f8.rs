//! Eight-bit floats of the OCP 8-bit floating point specification, as ONNX defines them (FLOAT8E4M3FN,
//! FLOAT8E5M2): <https://onnx.ai/onnx/technical/float8.html>.

/// Bias 7, three mantissa bits, no infinity, NaN = 0x7f / 0xff.
pub(super) fn e4m3_to_f32(b: u8) -> f32 {
    let sign = if b & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(b >> 3 & 0xf), f32::from(b & 7));
    sign * match (exponent, b & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

/// Converts via f16: the byte is the upper byte of an f16.
pub(super) fn e5m2_to_f32(b: u8) -> f32 {
    half::f16::from_bits(u16::from(b) << 8).to_f32()
}

/// Rounds to nearest even. Above 448 and for infinity: 448 with `saturate`, else NaN.
pub(super) fn e4m3_from_f32(v: f32, saturate: bool) -> u8 {
    let sign = if v.is_sign_negative() { 0x80 } else { 0 };
    let rounded = round_mantissa(v.abs(), 3, -6);
    if v.is_nan() || (rounded > 448.0 && !saturate) {
        return sign | 0x7f;
    }
    sign | encode(rounded.min(448.0), 3, -6)
}

/// Rounds to nearest even. Above 57344 and for infinity: 57344 with `saturate`, else infinity.
pub(super) fn e5m2_from_f32(v: f32, saturate: bool) -> u8 {
    let sign = if v.is_sign_negative() { 0x80 } else { 0 };
    let rounded = round_mantissa(v.abs(), 2, -14);
    if v.is_nan() {
        // The quiet NaN, as in f16.
        return sign | 0x7e;
    }
    if rounded > 57344.0 && !saturate {
        return sign | 0x7c;
    }
    sign | encode(rounded.min(57344.0), 2, -14)
}

/// Exponent of the leading bit of a finite positive `v`; at least `smallest`.
fn exponent(v: f32, smallest: i32) -> i32 {
    ((v.to_bits() >> 23) as i32 - 127).max(smallest)
}

/// Rounds `v >= 0` to nearest even with `bits` mantissa bits; the spacing is constant below `2^smallest`.
fn round_mantissa(v: f32, bits: i32, smallest: i32) -> f32 {
    if !v.is_finite() {
        return v;
    }
    let spacing = f64::from(2f32).powi(exponent(v, smallest) - bits);
    ((f64::from(v) / spacing).round_ties_even() * spacing) as f32
}

/// Encodes a representable `v >= 0`.
fn encode(v: f32, bits: i32, smallest: i32) -> u8 {
    let e = exponent(v, smallest);
    let units = (f64::from(v) / 2f64.powi(e - bits)) as u8;
    // In a normal number, `units` includes the leading bit at `1 << bits`, so the exponent field starts one lower.
    (((e - smallest) as u8) << bits) + units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_a_round_trip() {
        for b in 0..=255u8 {
            for (decode, encode) in [
                (e4m3_to_f32 as fn(u8) -> f32, e4m3_from_f32 as fn(f32, bool) -> u8),
                (e5m2_to_f32, e5m2_from_f32),
            ] {
                let v = decode(b);
                let back = encode(v, false);
                assert!(
                    if v.is_nan() { decode(back).is_nan() } else { back == b },
                    "{b:#x} -> {v} -> {back:#x}"
                );
            }
        }
    }

    #[test]
    fn known_values_and_limits() {
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
        assert_eq!(e4m3_to_f32(0x01), 2f32.powi(-9));
        assert_eq!(e5m2_to_f32(0x7b), 57344.0);
        assert_eq!(e4m3_from_f32(1e6, true), 0x7e);
        assert_eq!(e4m3_from_f32(1e6, false), 0x7f);
        assert_eq!(e5m2_from_f32(f32::INFINITY, true), 0x7b);
        assert_eq!(e5m2_from_f32(f32::INFINITY, false), 0x7c);
        // Halfway between 1 and 1.125 rounds to the even mantissa.
        assert_eq!(e4m3_to_f32(e4m3_from_f32(1.0625, true)), 1.0);
        assert_eq!(e4m3_to_f32(e4m3_from_f32(1.1875, true)), 1.25);
    }
}
