use super::{
    Activation,
    activation::{apply, each, erf, exp, exp_m1},
};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, mul_add, vectorize},
};

/// A function of one number, defined by the ONNX operator of its name. NaN and infinities follow IEEE arithmetic. So a NaN stays a
/// NaN, except in functions that select by a comparison, which a NaN fails.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub(crate) enum Function {
    Activation(Activation),
    Ceil,
    Celu(f32),
    Elu(f32),
    Erf,
    Floor,
    HardSigmoid {
        alpha: f32,
        beta: f32,
    },
    LeakyRelu(f32),
    Mish,
    /// Ties to even.
    Round,
    Selu {
        alpha: f32,
        gamma: f32,
    },
    /// 0 for a NaN.
    Shrink {
        bias: f32,
        lambda: f32,
    },
    Sign,
    Softplus,
    Softsign,
    /// `Pow` with the exponent 0.5. It is infinity for negative infinity, whose square root is a NaN.
    SquareRootPower,
    /// 0 for a NaN.
    ThresholdedRelu(f32),
}

/// Applies a function to values in place. Comparisons are written so that a NaN ends in the branch that returns `x`: they compile to
/// minimum and maximum instructions, which return the second operand if one is a NaN.
pub(crate) struct Map<'a>(pub(crate) Function, pub(crate) &'a mut [f32]);

impl Vectorized for Map<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Map(function, values) = self;
        match function {
            Function::Activation(activation) => apply::<FMA>(activation, values),
            Function::Ceil => each(values, f32::ceil),
            Function::Celu(alpha) => {
                let inverse = 1.0 / alpha;
                each(values, |x| above(x, 0.0) + below(alpha * exp_m1::<FMA>(x * inverse), 0.0));
            }
            Function::Elu(alpha) => {
                each(values, |x| if x >= 0.0 { x } else { alpha * exp_m1::<FMA>(below(x, 0.0)) });
            }
            Function::Erf => each(values, precise_erf::<FMA>),
            Function::Floor => each(values, f32::floor),
            Function::HardSigmoid { alpha, beta } => {
                each(values, |x| below(above(mul_add::<FMA>(alpha, x, beta), 0.0), 1.0));
            }
            Function::LeakyRelu(alpha) => each(values, |x| if x >= 0.0 { x } else { alpha * x }),
            // tanh(ln(1 + e)) = (e² + 2e) / (e² + 2e + 2), which rounds to 1 from x = 20 on.
            Function::Mish => each(values, |x| {
                let e = exp::<FMA>(below(x, 20.0));
                let n = mul_add::<FMA>(e, e, 2.0 * e);
                x * (n / (n + 2.0))
            }),
            Function::Round => each(values, f32::round_ties_even),
            Function::Selu { alpha, gamma } => {
                each(values, |x| gamma * (above(x, 0.0) + alpha * exp_m1::<FMA>(below(x, 0.0))));
            }
            Function::Shrink { bias, lambda } => each(values, |x| {
                let low = if x < -lambda { x + bias } else { 0.0 };
                if x > lambda { x - bias } else { low }
            }),
            Function::Sign => each(values, |x| {
                let positive = if x > 0.0 { 1.0 } else { x };
                if x < 0.0 { -1.0 } else { positive }
            }),
            Function::Softplus => each(values, |x| above(x, 0.0) + ln_1p::<FMA>(exp::<FMA>(-x.abs()))),
            Function::Softsign => each(values, |x| x / (1.0 + x.abs())),
            Function::SquareRootPower => {
                each(values, |x| if x == f32::NEG_INFINITY { f32::INFINITY } else { x.sqrt() + 0.0 });
            }
            Function::ThresholdedRelu(alpha) => each(values, |x| if x > alpha { x } else { 0.0 }),
        }
    }
}

/// The larger of `x` and a bound. A NaN stays a NaN.
#[inline(always)]
fn above(x: f32, bound: f32) -> f32 {
    if x < bound { bound } else { x }
}

/// The smaller of `x` and a bound. A NaN stays a NaN.
#[inline(always)]
fn below(x: f32, bound: f32) -> f32 {
    if x > bound { bound } else { x }
}

/// ln(1 + e) for e in [0, 1] with a relative error of about 2e-7, as the series of 2 artanh(e / (2 + e)).
#[inline(always)]
fn ln_1p<const FMA: bool>(e: f32) -> f32 {
    let s = e / (2.0 + e);
    let square = s * s;
    let mut p = 1.0 / 15.0;
    for k in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        p = mul_add::<FMA>(p, square, 1.0 / k);
    }
    2.0 * s * p
}

/// The error function with a relative error of about 3e-7. Near zero, where [`erf`] only has a small absolute error, it is a
/// polynomial.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn precise_erf<const FMA: bool>(x: f32) -> f32 {
    // A polynomial for erf(x) / x in x², fitted at Chebyshev nodes.
    const P: [f32; 7] = [
        8.326_005_6e-5,
        -8.133_867_5e-4,
        5.200_416_8e-3,
        -2.685_922_8e-2,
        1.128_369_4e-1,
        -3.761_263_5e-1,
        std::f32::consts::FRAC_2_SQRT_PI,
    ];
    let square = x * x;
    let mut p = P[0];
    for factor in &P[1..] {
        p = mul_add::<FMA>(p, square, *factor);
    }
    if x.abs() < 0.9 { x * p } else { erf::<FMA>(x) }
}

/// Applies a function to a tensor of `len` elements.
pub(crate) struct Elementwise {
    pub(crate) len: usize,
    pub(crate) function: Function,
}

impl Kernel for Elementwise {
    fn grid(&self, workers: usize) -> Grid {
        Grid::even(self.len, workers)
    }

    fn can_be_over(&self) -> bool {
        true
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let cols = tile.cols.clone();
        let out = tile.row(0);
        if !inputs.is_over() {
            out.copy_from_slice(&inputs.f32(0)[cols]);
        }
        vectorize(Map(self.function, out));
        Ok(())
    }
}
