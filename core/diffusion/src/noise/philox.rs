//! Philox, the generator of NVIDIA's cuRAND.

use std::f64::consts::TAU;

/// Philox 4x32 with 10 rounds (Salmon et al., 2011), one counter for each element.
///
/// This is A1111's source "NV" and stable-diffusion.cpp's `--rng cuda`. PyTorch on CUDA gives the same numbers as
/// long as the GPU has a thread for each element: always for SD 1.x latents, and for larger ones depending on the GPU.
#[derive(Clone)]
pub struct Philox {
    seed: u64,
    /// The number of draws so far.
    offset: u32,
}

impl Philox {
    /// Creates a generator.
    pub fn new(seed: u64) -> Self {
        Self { seed, offset: 0 }
    }

    /// Fills `out` with normal numbers.
    pub fn randn(&mut self, out: &mut [f32]) {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        for (index, value) in out.iter_mut().enumerate() {
            let [x, y, ..] = rounds([self.offset, 0, index as u32, 0], key);
            *value = box_muller(x, y);
        }
        self.offset = self.offset.wrapping_add(1);
    }
}

/// The ten rounds.
fn rounds(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
        }
        let first = u64::from(counter[0]) * 0xd251_1f53;
        let second = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
    }
    counter
}

/// The sine branch of the Box-Muller transform, as in A1111's `rng_philox.py`.
fn box_muller(x: u32, y: u32) -> f32 {
    const UNIT: f64 = 1.0 / (1u64 << 32) as f64;
    let u = f64::from(x) * UNIT + UNIT / 2.0;
    let v = (f64::from(y) * UNIT + UNIT / 2.0) * TAU;
    ((-2.0 * u.ln()).sqrt() * v.sin()) as f32
}

#[cfg(test)]
mod tests {
    use super::{Philox, rounds};

    /// Known answers of Random123's `kat_vectors`, `philox4x32 10`.
    #[test]
    fn rounds_are_those_of_random123() {
        assert_eq!(rounds([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        let counter = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        let expected = [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1];
        assert_eq!(rounds(counter, [0xa4093822, 0x299f31d0]), expected);
    }

    /// Values from the documentation of A1111's `rng_philox.py`, and a second draw.
    #[test]
    fn numbers_are_those_of_cuda() {
        let mut out = [0.0f32; 4];
        Philox::new(0).randn(&mut out);
        assert_eq!(out, [-0.9246626, -0.42534415, -2.6438457, 0.14518388]);
        let mut generator = Philox::new(42);
        for expected in
            [[0.194019, 2.161374, -0.172051, 0.849060], [0.139138, -0.108216, -0.717422, 0.756649]]
        {
            generator.randn(&mut out);
            assert!(out.iter().zip(expected).all(|(a, e): (&f32, f32)| (a - e).abs() < 1e-6), "{out:?}");
        }
    }
}
