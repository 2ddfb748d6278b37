//! The activations of recurrent layers.

use crate::{
    kernels::activation::exp,
    simd::{Vectorized, mul_add},
};
use sdrun_graph::recurrent::Function;

/// An activation of values whose magnitude is bounded before.
pub(super) struct Apply<'a>(pub(super) Function, pub(super) Option<f32>, pub(super) &'a mut [f32]);

impl Vectorized for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Apply(function, clip, values) = self;
        if let Some(clip) = clip {
            // A NaN stays.
            each(values, |x| {
                if x > clip {
                    clip
                } else if x < -clip {
                    -clip
                } else {
                    x
                }
            });
        }
        match function {
            Function::Affine(alpha, beta) => each(values, |x| alpha * x + beta),
            Function::Elu(alpha) => each(values, |x| if x < 0.0 { alpha * (exp::<FMA>(x) - 1.0) } else { x }),
            Function::HardSigmoid(alpha, beta) => each(values, |x| (alpha * x + beta).clamp(0.0, 1.0)),
            Function::LeakyRelu(alpha) => each(values, |x| if x < 0.0 { alpha * x } else { x }),
            Function::Relu => each(values, |x| if x < 0.0 { 0.0 } else { x }),
            Function::ScaledTanh(alpha, beta) => each(values, |x| alpha * tanh::<FMA>(beta * x)),
            Function::Sigmoid => each(values, |x| 1.0 / (1.0 + exp::<FMA>(-x))),
            Function::Softplus => values.iter_mut().for_each(|x| *x = x.max(0.0) + (-x.abs()).exp().ln_1p()),
            Function::Softsign => each(values, |x| x / (1.0 + x.abs())),
            Function::Tanh => each(values, tanh::<FMA>),
            Function::ThresholdedRelu(alpha) => each(values, |x| if x <= alpha { 0.0 } else { x }),
        }
    }
}

#[inline(always)]
fn each(values: &mut [f32], f: impl Fn(f32) -> f32) {
    values.iter_mut().for_each(|x| *x = f(*x));
}

/// tanh to about 2e-7 relative, without branches so that loops of it vectorise: a polynomial of Cephes' `tanhf` near zero,
/// the definition by exponentials elsewhere.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn tanh<const FMA: bool>(x: f32) -> f32 {
    let z = x * x;
    let p = mul_add::<FMA>(-5.704_988_7e-3, z, 2.063_908_9e-2);
    let p = mul_add::<FMA>(p, z, -5.373_971_6e-2);
    let p = mul_add::<FMA>(p, z, 1.333_144_2e-1);
    let p = mul_add::<FMA>(p, z, -3.333_328_2e-1);
    let near = mul_add::<FMA>(p * z, x, x);
    let far = (1.0 - 2.0 / (exp::<FMA>(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::vectorize;

    #[test]
    fn tanh_is_close_and_keeps_a_nan() {
        for i in -3000..3000 {
            let x = i as f32 / 150.0;
            let (found, exact) = (f64::from(tanh::<false>(x)), f64::from(x).tanh());
            assert!((found - exact).abs() <= 3e-7 * exact.abs(), "tanh({x}) = {found}, not {exact}");
        }
        assert!(tanh::<false>(f32::NAN).is_nan());
        assert_eq!((tanh::<true>(f32::INFINITY), tanh::<true>(f32::NEG_INFINITY)), (1.0, -1.0));
    }

    #[test]
    fn activations_are_those_of_their_definition() {
        use Function::*;
        let all = [
            Affine(0.5, 0.25),
            Elu(0.7),
            HardSigmoid(0.2, 0.5),
            LeakyRelu(0.1),
            Relu,
            ScaledTanh(0.9, 1.1),
            Sigmoid,
            Softplus,
            Softsign,
            Tanh,
            ThresholdedRelu(0.5),
        ];
        for function in all {
            let inputs: Vec<f32> = (-400..400).map(|i| i as f32 / 40.0).collect();
            let mut found = inputs.clone();
            vectorize(Apply(function, None, &mut found));
            for (x, y) in inputs.iter().zip(found) {
                let exact = function.at(f64::from(*x));
                assert!((f64::from(y) - exact).abs() < 1e-6, "{function:?} at {x}: {y}, not {exact}");
            }
            let mut nan = [f32::NAN; 1];
            vectorize(Apply(function, Some(0.5), &mut nan));
            assert!(nan[0].is_nan(), "{function:?}");
        }
    }
}
