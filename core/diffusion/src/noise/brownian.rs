//! Noise from one Brownian path, which steps of any length share.

use super::{seed_sequence::generate_state, torch::TorchCpu};

/// Size of the entropy pool that torchsde asks NumPy for.
const POOL: usize = 24;

/// A Brownian path over noise levels, as `BrownianTreeNoiseSampler` of k-diffusion computes it with torchsde's
/// `BrownianTree` (0.2.6) on the CPU.
///
/// The path is a binary tree of increments. Each node halves its interval with a Brownian bridge. The bridge's numbers depend
/// only on the seed and the node's position, so intervals can be queried in any order.
#[derive(Clone)]
pub struct BrownianTree {
    seed: u64,
    start: f64,
    end: f64,
    /// The increment over the whole interval.
    whole: Vec<f32>,
}

impl BrownianTree {
    /// Creates a path from `sigma_min` to `sigma_max` with `len` elements.
    pub fn new(seed: u64, sigma_min: f64, sigma_max: f64, len: usize) -> Self {
        let (start, end) = (rounded(sigma_min), rounded(sigma_max));
        let mut whole = vec![0.0; len];
        let [first, ..] = generate_state::<POOL, 3>(seed, &[]);
        TorchCpu::new(first.into()).randn(&mut whole);
        let scale = (end - start).sqrt() as f32;
        whole.iter_mut().for_each(|value| *value *= scale);
        Self { seed, start, end, whole }
    }

    /// Fills `out` with unit-variance noise for a step from `sigma` to `next`: the path's increment divided by the square root of
    /// their distance. Levels outside the path are clamped to its ends.
    pub fn noise(&self, sigma: f64, next: f64, out: &mut [f32]) {
        let clamped = |level: f64| rounded(level).clamp(self.start, self.end);
        let (from, to) = (clamped(sigma.min(next)), clamped(sigma.max(next)));
        out.fill(0.0);
        let root = Node { key: 0, depth: 0, start: self.start, end: self.end };
        self.add(root, &self.whole, (from, to), out);
        let sign = if next < sigma { -1.0 } else { 1.0 };
        let scale = (sign / (sigma - next).abs().sqrt()) as f32;
        out.iter_mut().for_each(|value| *value *= scale);
    }

    /// Adds the increment over the part of `range` that lies in `node`, whose own increment is `increment`.
    fn add(&self, node: Node, increment: &[f32], range: (f64, f64), out: &mut [f32]) {
        let (from, to) = range;
        if to <= node.start || node.end <= from || to <= from {
            return;
        }
        let middle = node.middle();
        let whole = from <= node.start && node.end <= to;
        if whole || middle <= node.start || node.end <= middle {
            out.iter_mut().zip(increment).for_each(|(sum, value)| *sum += value);
            return;
        }
        let (left, right) = self.halve(&node, increment);
        self.add(Node { key: node.key * 2, depth: node.depth + 1, end: middle, ..node }, &left, range, out);
        self.add(
            Node { key: node.key * 2 + 1, depth: node.depth + 1, start: middle, ..node },
            &right,
            range,
            out,
        );
    }

    /// Returns the increments of both halves (a Brownian bridge).
    fn halve(&self, node: &Node, increment: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let [seed, ..] = generate_state::<POOL, 4>(self.seed, &[node.key, node.depth]);
        let mut left = vec![0.0; increment.len()];
        TorchCpu::new(seed.into()).randn(&mut left);
        let (length, first) = (node.end - node.start, node.middle() - node.start);
        let (share, spread) = ((first / length) as f32, (first * (length - first) / length).sqrt() as f32);
        left.iter_mut().zip(increment).for_each(|(value, whole)| *value = whole * share + spread * *value);
        let right = increment.iter().zip(&left).map(|(whole, left)| whole - left).collect();
        (left, right)
    }
}

/// An interval of the tree.
#[derive(Clone, Copy)]
struct Node {
    key: u64,
    depth: u64,
    start: f64,
    end: f64,
}

impl Node {
    fn middle(&self) -> f64 {
        rounded((self.start + self.end) / 2.0)
    }
}

/// Rounds to six decimals by the number's exact value, as Python's `round` does. Many midpoints are near-ties, which
/// `(x * 1e6).round()` would round the wrong way.
fn rounded(level: f64) -> f64 {
    format!("{level:.6}").parse().unwrap_or(level)
}

#[cfg(test)]
mod tests {
    use super::BrownianTree;

    const MIN: f64 = 0.0291671582;
    const MAX: f64 = 14.6146412293;

    fn noise(tree: &BrownianTree, sigma: f64, next: f64) -> Vec<f32> {
        let mut out = vec![0.0; 16];
        tree.noise(sigma, next, &mut out);
        out
    }

    /// Values computed in Python by torchsde's rules.
    #[test]
    fn steps_are_those_of_torchsde() {
        let tree = BrownianTree::new(0, MIN, MAX, 16);
        for (sigma, next, expected) in [
            (MAX, 9.1029, [0.06927, -1.19753, -0.10650, 1.16067]),
            (9.1029, 5.4784, [0.73715, 2.69962, 0.76602, 0.12694]),
        ] {
            let actual = noise(&tree, sigma, next);
            assert!(
                actual.iter().zip(expected).all(|(a, e): (&f32, f32)| (a - e).abs() < 1e-5),
                "{actual:?}"
            );
        }
    }

    #[test]
    fn increments_of_parts_add_up() {
        let tree = BrownianTree::new(9, MIN, MAX, 16);
        let (a, b, c) = (11.0, 4.2, 0.3);
        let part = |from: f64, to: f64| -> Vec<f64> {
            noise(&tree, from, to).iter().map(|v| f64::from(*v) * (from - to).sqrt()).collect()
        };
        let (first, second, both) = (part(a, b), part(b, c), part(a, c));
        for i in 0..16 {
            assert!((first[i] + second[i] - both[i]).abs() < 1e-4);
        }
    }
}
