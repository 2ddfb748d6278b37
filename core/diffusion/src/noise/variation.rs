//! Noise between that of two seeds, so that a picture varies a little.

use serde::{Deserialize, Serialize};

/// A share of another seed's noise in a picture's start noise (A1111's "Extra" settings beside the seed).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Variation {
    /// The other seed.
    pub seed: u64,
    /// Its share, from 0 to 1. At 1 the noise is all the other's.
    pub strength: f64,
}

/// Above this mean cosine, two noises count as parallel.
const PARALLEL: f32 = 0.9995;

/// Moves `noise` `[channels, rows, columns]` towards `other` by `share`, on the sphere (A1111's `slerp`). As there, each column of a
/// channel has its own angle, and the share counts the other way round between parallel noises.
pub(crate) fn towards(noise: &mut [f32], other: &[f32], share: f64, [_, rows, columns]: [usize; 3]) {
    if rows == 0 || columns == 0 {
        return;
    }
    let share = share as f32;
    let column =
        |values: &[f32], at: usize| -> Vec<f32> { values[at..].iter().step_by(columns).copied().collect() };
    let cosines: Vec<f32> = noise
        .chunks(rows * columns)
        .zip(other.chunks(rows * columns))
        .flat_map(|(a, b)| (0..columns).map(|at| cosine(&column(a, at), &column(b, at))).collect::<Vec<_>>())
        .collect();
    let parallel = cosines.iter().sum::<f32>() / cosines.len() as f32 > PARALLEL;
    for (place, (a, b)) in noise.iter_mut().zip(other).enumerate() {
        let (own, others) = if parallel {
            (share, 1.0 - share)
        } else {
            between(cosines[place / (rows * columns) * columns + place % columns], share)
        };
        *a = own * *a + others * b;
    }
}

/// The factors of two directions on the way from one to the other.
fn between(cosine: f32, share: f32) -> (f32, f32) {
    let angle = cosine.clamp(-1.0, 1.0).acos();
    if angle.sin() < 1e-6 {
        return (1.0 - share, share);
    }
    (((1.0 - share) * angle).sin() / angle.sin(), (share * angle).sin() / angle.sin())
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let norm = |values: &[f32]| values.iter().map(|v| v * v).sum::<f32>().sqrt();
    let (norm_a, norm_b) = (norm(a), norm(b));
    a.iter().zip(b).map(|(a, b)| a / norm_a * (b / norm_b)).sum()
}

#[cfg(test)]
mod tests {
    use super::towards;

    fn mixed(a: &[f32], b: &[f32], share: f64, shape: [usize; 3]) -> Vec<f32> {
        let mut noise = a.to_vec();
        towards(&mut noise, b, share, shape);
        noise
    }

    /// `torch` runs of A1111's `slerp(0.3, a, b)`.
    #[test]
    fn columns_have_their_own_angles() {
        const EXPECTED: [f32; 12] = [
            3.707751, 3.96627, 4.529096, 4.780169, 5.35044, 5.594067, 6.001016, 6.582458, 6.814914, 7.403802,
            7.628812, 8.225147,
        ];
        let a: Vec<f32> = (0..12).map(|v| v as f32).collect();
        let b: Vec<f32> = a.iter().rev().copied().collect();
        for (found, expected) in mixed(&a, &b, 0.3, [2, 3, 2]).iter().zip(EXPECTED) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }

    #[test]
    fn the_ends_are_the_two_noises_and_between_them_the_length_stays() {
        let (a, b) = ([1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 2.0, 0.0]);
        for (share, expected) in [(0.0, a), (1.0, b)] {
            let found = mixed(&a, &b, share, [1, 2, 2]);
            assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6), "{share}: {found:?}");
        }
        // The noises are orthogonal in both columns: the factors are those of 0.6 and 0.4 of a right angle.
        let (near, far) = (0.809017, 0.587785);
        let found = mixed(&a, &b, 0.4, [1, 2, 2]);
        assert!(
            found.iter().zip([near, far, 2.0 * far, 2.0 * near]).all(|(x, y)| (x - y).abs() < 1e-5),
            "{found:?}"
        );
        // A1111's share of parallel noises is the other way round.
        assert_eq!(mixed(&[1.0, 1.0], &[2.0, 2.0], 0.25, [1, 2, 1]), [1.75, 1.75]);
        // One number in each column: the angles are 0 or half a turn, where the sphere has no way between them.
        assert_eq!(mixed(&[1.0, -1.0], &[2.0, 2.0], 0.25, [1, 1, 2]), [1.25, -0.25]);
    }
}
