use super::Activation;
use crate::simd::{Vectorized, mul_add};

/// Applies an activation to each value.
#[inline(always)]
pub(super) fn apply<const FMA: bool>(activation: Activation, values: &mut [f32]) {
    match activation {
        Activation::Relu => clip(values, 0.0, f32::INFINITY),
        Activation::Clip(low, high) => clip(values, low, high),
        Activation::Swish(alpha) => each(values, |x| x / (1.0 + exp::<FMA>(-alpha * x))),
        Activation::Gelu => {
            each(values, |x| 0.5 * x * (1.0 + erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2)))
        }
        Activation::GeluTanh => each(values, |x| {
            let inner = 1.595_769 * (x + 0.044_715 * x * x * x);
            x / (1.0 + exp::<FMA>(-inner))
        }),
    }
}

#[inline(always)]
fn clip(values: &mut [f32], low: f32, high: f32) {
    each(values, |x| {
        // A NaN stays a NaN.
        let x = if x < low { low } else { x };
        if x > high { high } else { x }
    });
}

#[inline(always)]
pub(super) fn each(values: &mut [f32], f: impl Fn(f32) -> f32) {
    // Not `for_each`: a function inside two closures is not always inlined into code for wider registers. Gelu then took 85 times as long.
    for x in values {
        *x = f(*x);
    }
}

/// [`apply`] as work for [`vectorize`](crate::simd::vectorize).
pub(super) struct Activate<'a>(pub(super) Activation, pub(super) &'a mut [f32]);

impl Vectorized for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        apply::<FMA>(self.0, self.1);
    }
}

/// The bounds of an activation that only clamps. `None` for other activations.
pub(super) fn bounds(activation: Activation) -> Option<[f32; 2]> {
    match activation {
        Activation::Relu => Some([0.0, f32::INFINITY]),
        Activation::Clip(low, high) => Some([low, high]),
        _ => None,
    }
}

/// e^x with a relative error of about 2e-7; 0 below -87.7 and infinity above 88.4. It has no branches, so that loops vectorize.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    let (p, power) = scaled_exp_m1::<FMA>(x);
    (p + 1.0) * power
}

/// e^x - 1 with a relative error of about 3e-7 for x up to 88.4; -1 below -87.7.
#[inline(always)]
pub(super) fn exp_m1<const FMA: bool>(x: f32) -> f32 {
    let (p, power) = scaled_exp_m1::<FMA>(x);
    mul_add::<FMA>(p, power, power - 1.0)
}

/// Returns e^r - 1 and 2^n for x = n ln 2 + r with an integer n. Range reduction and the degree-6 polynomial follow Cephes' `expf`.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn scaled_exp_m1<const FMA: bool>(x: f32) -> (f32, f32) {
    // Adding this to a small number leaves the nearest integer in the low bits of the mantissa.
    const SHIFTER: f32 = 12_582_912.0;
    // Not `clamp`, which checks its bounds. A NaN stays a NaN. At the bounds the power is 0 or infinity.
    let x = if x < -88.0 { -88.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = mul_add::<FMA>(x, std::f32::consts::LOG2_E, SHIFTER);
    let n = shifted - SHIFTER;
    let r = mul_add::<FMA>(n, 2.121_944_4e-4, mul_add::<FMA>(n, -0.693_359_375, x));
    let p = mul_add::<FMA>(1.987_569_15e-4, r, 1.398_199_95e-3);
    let p = mul_add::<FMA>(p, r, 8.333_451_9e-3);
    let p = mul_add::<FMA>(p, r, 4.166_579_6e-2);
    let p = mul_add::<FMA>(p, r, 1.666_666_55e-1);
    let p = mul_add::<FMA>(p, r, 5.000_000_1e-1);
    // Nothing overflows, but loops with overflow checks do not vectorize.
    let exponent = shifted.to_bits().wrapping_sub(SHIFTER.to_bits()).wrapping_add(127);
    (mul_add::<FMA>(p * r, r, r), f32::from_bits(exponent << 23))
}

/// The error function by formula 7.1.26 of Abramowitz and Stegun, with an absolute error of 1.5e-7.
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub(super) fn erf<const FMA: bool>(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let p = mul_add::<FMA>(1.061_405_43, t, -1.453_152_03);
    let p = mul_add::<FMA>(p, t, 1.421_413_74);
    let p = mul_add::<FMA>(p, t, -0.284_496_736);
    let p = mul_add::<FMA>(p, t, 0.254_829_592) * t;
    mul_add::<FMA>(-p, exp::<FMA>(-x * x), 1.0).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::vectorize;

    #[test]
    fn exp_is_close() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let expected = f64::from(x).exp();
            assert!(
                (f64::from(exp::<false>(x)) / expected - 1.0).abs() < 3e-7,
                "exp({x}) = {}",
                exp::<false>(x)
            );
        }
        for x in [-1000.0, f32::NEG_INFINITY] {
            assert_eq!(exp::<false>(x), 0.0);
            assert_eq!(exp_m1::<false>(x), -1.0);
        }
        for x in [89.0, 1000.0, f32::INFINITY] {
            assert_eq!(exp::<false>(x), f32::INFINITY);
        }
        assert!(exp::<false>(f32::NAN).is_nan() && exp_m1::<false>(f32::NAN).is_nan());
        for x in [1e-30f32, -1e-5, 1e-3, -0.3, 0.4, -2.0] {
            let expected = f64::from(x).exp_m1();
            assert!((f64::from(exp_m1::<false>(x)) / expected - 1.0).abs() < 3e-7, "exp_m1({x})");
        }
    }

    /// The integral of the density by Simpson's rule.
    fn exact_erf(x: f64) -> f64 {
        let (n, f) = (2000, |t: f64| (-t * t).exp());
        let h = x / f64::from(n);
        let inner: f64 =
            (1..n).map(|i| f64::from(if i % 2 == 1 { 4 } else { 2 }) * f(f64::from(i) * h)).sum();
        (f(0.0) + inner + f(x)) * h / 3.0 * std::f64::consts::FRAC_2_SQRT_PI
    }

    #[test]
    fn activations_are_close() {
        type Exact = fn(f64) -> f64;
        let cases: [(Activation, Exact); 4] = [
            (Activation::Clip(0.0, 6.0), |x| x.clamp(0.0, 6.0)),
            (Activation::Swish(1.702), |x| x / (1.0 + (-1.702 * x).exp())),
            (Activation::Gelu, |x| 0.5 * x * (1.0 + exact_erf(x / 2f64.sqrt()))),
            (Activation::GeluTanh, |x| {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }),
        ];
        let inputs: Vec<f32> = (-600..600).map(|i| i as f32 / 60.0).collect();
        for (activation, exact) in cases {
            let mut found = inputs.clone();
            vectorize(Activate(activation, &mut found));
            for (x, y) in inputs.iter().zip(found) {
                let expected = exact(f64::from(*x));
                assert!((f64::from(y) - expected).abs() < 2e-6, "{activation:?}({x}) = {y}, not {expected}");
            }
        }
        let mut nan = [f32::NAN];
        vectorize(Activate(Activation::Clip(0.0, 1.0), &mut nan));
        assert!(nan[0].is_nan());
    }
}
