//! The numbers of `torch.randn` on the CPU.

use super::mersenne::Mersenne;
use std::f64::consts::TAU;

/// PyTorch transforms this many numbers together.
const BLOCK: usize = 16;

/// A `torch.Generator` on the CPU, for float32.
///
/// The numbers match PyTorch's except in the last few bits, where PyTorch's vectorised logarithm and cosine vary by processor.
///
/// Source: `aten/src/ATen/native/cpu/DistributionTemplates.h` (`normal_fill`) and
/// `aten/src/ATen/core/DistributionsHelper.h` (`normal_distribution`).
#[derive(Clone)]
pub struct TorchCpu {
    engine: Mersenne,
    /// The unused second number of the last pair drawn one at a time.
    cached: Option<f64>,
}

impl TorchCpu {
    /// Seeds a generator like `manual_seed(seed)`. PyTorch ignores the upper 32 bits of the seed.
    pub fn new(seed: u64) -> Self {
        Self { engine: Mersenne::new(seed as u32), cached: None }
    }

    /// Fills `out` as `torch.randn(out.len(), generator=self)` would. PyTorch draws fewer than 16 numbers by another
    /// method, so splitting a draw into several calls changes the result.
    pub fn randn(&mut self, out: &mut [f32]) {
        if out.len() < BLOCK {
            for value in out {
                *value = self.single() as f32;
            }
            return;
        }
        for value in out.iter_mut() {
            *value = self.uniform();
        }
        let whole = out.len() - out.len() % BLOCK;
        out[..whole].chunks_exact_mut(BLOCK).for_each(box_muller);
        if whole < out.len() {
            let from = out.len() - BLOCK;
            let last = &mut out[from..];
            for value in last.iter_mut() {
                *value = self.uniform();
            }
            box_muller(last);
        }
    }

    /// A number in [0, 1) with 24 random bits.
    fn uniform(&mut self) -> f32 {
        (self.engine.next() & 0x00ff_ffff) as f32 / (1 << 24) as f32
    }

    /// A number in [0, 1) with 53 random bits.
    fn uniform_f64(&mut self) -> f64 {
        let (high, low) = (self.engine.next(), self.engine.next());
        let bits = (u64::from(high) << 32 | u64::from(low)) & ((1 << 53) - 1);
        bits as f64 / (1u64 << 53) as f64
    }

    fn single(&mut self) -> f64 {
        if let Some(value) = self.cached.take() {
            return value;
        }
        let (angle, radius) = (self.uniform_f64() * TAU, self.uniform_f64());
        let radius = (-2.0 * (-radius).ln_1p()).sqrt();
        self.cached = Some(radius * angle.sin());
        radius * angle.cos()
    }
}

/// Turns 16 uniform numbers into 16 normal ones, pairing `j` with `j + 8`. Like PyTorch, rounds to f32 after each operation.
fn box_muller(block: &mut [f32]) {
    let (first, second) = block.split_at_mut(BLOCK / 2);
    for (a, b) in first.iter_mut().zip(second) {
        let logarithm = f64::from(1.0 - *a).ln() as f32;
        let radius = (-2.0 * logarithm).sqrt();
        let angle = f64::from((TAU * f64::from(*b)) as f32);
        *a = radius * angle.cos() as f32;
        *b = radius * angle.sin() as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::TorchCpu;

    fn randn(seed: u64, count: usize) -> Vec<f32> {
        let mut out = vec![0.0; count];
        TorchCpu::new(seed).randn(&mut out);
        out
    }

    fn close(actual: &[f32], expected: &[f32]) {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            assert!((a - e).abs() <= 6e-5, "{actual:?} instead of {expected:?}");
        }
    }

    /// What `torch.manual_seed(0); torch.randn(n)` prints.
    #[test]
    fn short_and_long_draws_are_those_of_torch() {
        close(&randn(0, 6), &[1.5410, -0.2934, -2.1788, 0.5684, -1.0845, -1.3986]);
        let sixteen = [
            -1.1258, -1.1524, -0.2506, -0.4339, 0.8487, 0.6920, -0.3160, -2.1152, 0.3223, -1.2633, 0.3500,
            0.3081, 0.1198, 1.2377, 1.1168, -0.2473,
        ];
        close(&randn(0, 16), &sixteen);
        let sixteen = [
            1.9269, 1.4873, 0.9007, -2.1055, 0.6784, -1.2345, -0.0431, -1.6047, -0.7521, 1.6487, -0.3925,
            -1.4036, -0.7279, -0.5594, -0.7688, 0.7624,
        ];
        close(&randn(42, 16), &sixteen);
    }

    #[test]
    fn the_last_sixteen_are_drawn_again_where_the_length_is_no_multiple() {
        let expected = [
            -0.4339, 0.5988, -1.5551, -0.3414, 1.8530, 0.4681, -0.1577, 1.4437, 0.2660, 1.3894, 1.5863,
            0.9463, -0.8437, 0.9318, 1.2590, 2.0050, 0.0537,
        ];
        close(&randn(0, 20)[3..], &expected);
    }

    /// Initial noise of a 512x512 picture.
    #[test]
    fn latents_of_stable_diffusion() {
        for (seed, sum, last) in
            [(0, -124.1130, [-1.36647, -1.078208]), (42, 149.7645, [0.972810, -0.293406])]
        {
            let noise = randn(seed, 4 * 64 * 64);
            let total: f64 = noise.iter().map(|v| f64::from(*v)).sum();
            assert!((total - sum).abs() < 1e-3, "seed {seed}: {total}");
            close(&noise[noise.len() - 2..], &last);
        }
    }

    #[test]
    fn the_upper_half_of_the_seed_is_ignored() {
        assert_eq!(randn(7, 32), randn(7 + (5 << 32), 32));
    }
}
