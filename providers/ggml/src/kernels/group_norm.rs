use crate::ffi::{
    Grid, Inputs, Kernel, Tile,
    simd::{Vectorized, vectorize},
};

/// Normalisation of groups of channels with everything that usually follows it, in two passes over the data:
///
/// `y = act(((x - mean) / sqrt(variance + epsilon) * scale + bias) * weight + shift)`
///
/// Input 0 is `[batch, channels, inner]`; mean and (biased) variance are over the `channels / groups` channels of
/// a group and all of `inner`. The factors that are present follow as inputs in the order of the formula. With as
/// many groups as channels it is InstanceNormalization.
pub(crate) struct GroupNorm {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) inner: usize,
    pub(crate) groups: usize,
    pub(crate) epsilon: f32,
    /// Elements of the `scale` and `bias` inputs: one for each group or for each channel; 0 = absent.
    pub(crate) affine: usize,
    /// Whether `weight`, one element for each channel, is there.
    pub(crate) weight: bool,
    /// Whether `shift`, one element for each channel, is there.
    pub(crate) shift: bool,
    /// Whether `act` is x * sigmoid(x) and not the identity.
    pub(crate) silu: bool,
}

impl Kernel for GroupNorm {
    fn grid(&self, _: usize) -> Grid {
        Grid::rows(self.batch * self.groups, self.channels / self.groups * self.inner, 1)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let row = tile.rows.start;
        let (group, per_group) = (row % self.groups, self.channels / self.groups);
        let len = per_group * self.inner;
        let x = &inputs.f32(0)[row * len..(row + 1) * len];
        let mut next = 1;
        let mut factor = |present: bool| {
            present.then(|| {
                next += 1;
                inputs.f32(next - 1)
            })
        };
        let scale = factor(self.affine > 0);
        let bias = factor(self.affine > 0);
        let weight = factor(self.weight);
        let shift = factor(self.shift);

        let (mean, variance) = vectorize(Moments(x));
        let inverse = 1.0 / (variance + f64::from(self.epsilon)).sqrt();
        let out = tile.row(row);
        for (i, (out, x)) in out.chunks_exact_mut(self.inner).zip(x.chunks_exact(self.inner)).enumerate() {
            let channel = group * per_group + i;
            let affine = if self.affine == self.groups { group } else { channel };
            let at = |factor: Option<&[f32]>, index: usize, neutral: f64| {
                factor.map_or(neutral, |values| f64::from(values[index]))
            };
            let weight = at(weight, channel, 1.0);
            let factor = inverse * at(scale, affine, 1.0) * weight;
            let offset = at(bias, affine, 0.0) * weight + at(shift, channel, 0.0) - mean * factor;
            vectorize(Affine { x, factor: factor as f32, offset: offset as f32, silu: self.silu, out });
        }
        Ok(())
    }
}

/// Mean and biased variance, summed in f32 over runs short enough to keep its precision and in f64 beyond.
struct Moments<'a>(&'a [f32]);

const LANES: usize = 32;
const RUN: usize = 128 * LANES;

impl Vectorized for Moments<'_> {
    type Output = (f64, f64);

    #[inline(always)]
    fn run(self) -> (f64, f64) {
        let mean = sum(self.0, |x| x) / self.0.len() as f64;
        let centre = mean as f32;
        // Around a centre near the mean: no cancellation, and the rest of the mean is corrected for.
        let rest = mean - f64::from(centre);
        let variance = sum(self.0, |x| (x - centre) * (x - centre)) / self.0.len() as f64 - rest * rest;
        (mean, variance.max(0.0))
    }
}

#[inline(always)]
pub(super) fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    let mut total = 0.0;
    for run in x.chunks(RUN) {
        let mut lanes = [0f32; LANES];
        let (whole, rest) = run.as_chunks::<LANES>();
        for x in whole {
            lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane += f(*x));
        }
        total += lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>();
        total += rest.iter().map(|x| f64::from(f(*x))).sum::<f64>();
    }
    total
}

struct Affine<'a> {
    x: &'a [f32],
    factor: f32,
    offset: f32,
    silu: bool,
    out: &'a mut [f32],
}

impl Vectorized for Affine<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Affine { x, factor, offset, silu, out } = self;
        if silu {
            out.iter_mut().zip(x).for_each(|(out, x)| {
                let y = x * factor + offset;
                *out = y / (1.0 + exp(-y));
            });
        } else {
            out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor + offset);
        }
    }
}

/// e^x to about 2e-7 relative, without branches so that loops of it vectorise; 0 and infinity beyond f32's range
/// become its ends. Range reduction and the degree-6 polynomial follow Cephes' `expf`.
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding it to a small number leaves that number's nearest integer in the low bits of the mantissa.
    const SHIFTER: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + SHIFTER;
    let n = shifted - SHIFTER;
    let r = x - n * 0.693_359_375 + n * 2.121_944_4e-4;
    let p = 1.987_569_15e-4 * r + 1.398_199_95e-3;
    let p = p * r + 8.333_451_9e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_55e-1;
    let p = p * r + 5.000_000_1e-1;
    let power =
        f32::from_bits((shifted.to_bits() as i32 - SHIFTER.to_bits() as i32 + 127).cast_unsigned() << 23);
    (p * r * r + r + 1.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) / expected - 1.0).abs() < 3e-7, "exp({x}) = {}", exp(x));
        }
        assert!(exp(-1000.0) < 1e-37 && exp(1000.0) > 1e38);
    }

    #[test]
    fn moments_survive_a_large_mean() {
        let x: Vec<f32> = (0..100_000).map(|i| 10_000.0 + (i % 7) as f32).collect();
        let (mean, variance) = vectorize(Moments(&x));
        let exact_mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
        let exact = x.iter().map(|x| (f64::from(*x) - exact_mean).powi(2)).sum::<f64>() / x.len() as f64;
        assert!((mean - exact_mean).abs() < 1e-2, "{mean} {exact_mean}");
        assert!((variance - exact).abs() < 1e-3 * exact, "{variance} {exact}");
    }
}
