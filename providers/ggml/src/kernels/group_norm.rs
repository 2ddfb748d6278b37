use super::{Activation, activation::apply};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    simd::{Vectorized, mul_add, vectorize},
};

/// Group normalization together with the operations that usually follow it, in two passes over the data:
///
/// `y = act(((x - mean) / sqrt(variance + epsilon) * scale + bias) * weight + shift)`
///
/// Input 0 is `[batch, channels, inner]`. Mean and (biased) variance are over the `channels / groups` channels of a group and all of
/// `inner`. The optional operands follow as inputs in the order of the formula. With as many groups as channels, this is
/// InstanceNormalization.
pub(crate) struct GroupNorm {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) inner: usize,
    pub(crate) groups: usize,
    pub(crate) epsilon: f32,
    /// The length of the `scale` and `bias` inputs: the number of groups or channels, or 0 if they are absent.
    pub(crate) affine: usize,
    /// Whether there is a `weight`, one element for each channel.
    pub(crate) weight: bool,
    /// Whether there is a `shift`, one element for each channel.
    pub(crate) shift: bool,
    pub(crate) activation: Option<Activation>,
}

impl Kernel for GroupNorm {
    fn grid(&self, _: usize) -> Grid {
        Grid::rows(self.batch * self.groups, self.channels / self.groups * self.inner, 1)
    }

    fn can_be_over(&self) -> bool {
        true
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let row = tile.rows.start;
        let (group, per_group) = (row % self.groups, self.channels / self.groups);
        let len = per_group * self.inner;
        // `None` if the tile holds the input.
        let x = (!inputs.is_over()).then(|| &inputs.f32(0)[row * len..(row + 1) * len]);
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

        let out = tile.row(row);
        let (mean, variance) = vectorize(Moments(x.unwrap_or(out)));
        let inverse = 1.0 / (variance + f64::from(self.epsilon)).sqrt();
        for (i, out) in out.chunks_exact_mut(self.inner).enumerate() {
            let channel = group * per_group + i;
            let affine = if self.affine == self.groups { group } else { channel };
            let at = |factor: Option<&[f32]>, index: usize, neutral: f64| {
                factor.map_or(neutral, |values| f64::from(values[index]))
            };
            let weight = at(weight, channel, 1.0);
            let factor = inverse * at(scale, affine, 1.0) * weight;
            let offset = at(bias, affine, 0.0) * weight + at(shift, channel, 0.0) - mean * factor;
            vectorize(Affine {
                x: x.map(|x| &x[i * self.inner..][..self.inner]),
                factor: factor as f32,
                offset: offset as f32,
                activation: self.activation,
                out,
            });
        }
        Ok(())
    }
}

/// Mean and biased variance in one pass over memory. It computes those of runs that stay in the cache and combines them in f64 (Chan,
/// Golub and LeVeque, 1979).
pub(super) struct Moments<'a>(pub(super) &'a [f32]);

const LANES: usize = 32;
const RUN: usize = 128 * LANES;

impl Vectorized for Moments<'_> {
    type Output = (f64, f64);

    #[inline(always)]
    fn run<const FMA: bool>(self) -> (f64, f64) {
        let (mut count, mut mean, mut squares) = (0.0, 0.0, 0.0);
        for run in self.0.chunks(RUN) {
            let len = run.len() as f64;
            let own = sum(run, |x| x) / len;
            let centre = own as f32;
            // Around a centre near the mean nothing cancels. The next line corrects for its distance from the mean.
            let off = own - f64::from(centre);
            let around = sum(run, |x| (x - centre) * (x - centre)) - len * off * off;
            let (apart, total) = (own - mean, count + len);
            squares += around + apart * apart * count * len / total;
            mean += apart * len / total;
            count = total;
        }
        let variance = squares / count;
        (mean, variance.max(0.0))
    }
}

/// A sum over a run that is short enough for f32.
#[inline(always)]
fn sum(run: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    let mut lanes = [0f32; LANES];
    let (whole, rest) = run.as_chunks::<LANES>();
    for x in whole {
        lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane += f(*x));
    }
    let rest = rest.iter().map(|x| f64::from(f(*x))).sum::<f64>();
    lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>() + rest
}

struct Affine<'a> {
    /// The input. `None` if it is in `out`.
    x: Option<&'a [f32]>,
    factor: f32,
    offset: f32,
    activation: Option<Activation>,
    out: &'a mut [f32],
}

impl Vectorized for Affine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Affine { x, factor, offset, activation, out } = self;
        match x {
            Some(x) => out.iter_mut().zip(x).for_each(|(out, x)| *out = mul_add::<FMA>(*x, factor, offset)),
            None => out.iter_mut().for_each(|out| *out = mul_add::<FMA>(*out, factor, offset)),
        }
        if let Some(activation) = activation {
            apply::<FMA>(activation, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
