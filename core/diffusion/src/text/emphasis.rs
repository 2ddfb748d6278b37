//! Emphasis: weights of tokens, applied to hidden states.
//!
//! States are row-major `[places, width]`; there is one weight for each place.

/// How weights change hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emphasis {
    /// Multiplies states, then restores the mean over the whole chunk (A1111's "Original").
    Original,
    /// Multiplies states (A1111's "No norm").
    NoNorm,
    /// Scales the difference from the states of an empty prompt (ComfyUI).
    ComfyUi,
    /// Ignores weights.
    None,
}

/// Multiplies the states of each place by its weight.
pub fn multiply(states: &mut [f32], weights: &[f32]) {
    for (row, weight) in rows(states, weights) {
        row.iter_mut().for_each(|value| *value *= weight);
    }
}

/// Multiplies the states of each place by its weight, then all states by one factor that restores their mean. Where the new mean is
/// 0 there is no such factor, and the states stay multiplied.
///
/// Source: `EmphasisOriginal` in A1111's `modules/sd_emphasis.py`.
pub fn multiply_keeping_mean(states: &mut [f32], weights: &[f32]) {
    let sum = |states: &[f32]| states.iter().map(|value| f64::from(*value)).sum::<f64>();
    let before = sum(states);
    multiply(states, weights);
    let factor = before / sum(states);
    if factor.is_finite() {
        states.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
    }
}

/// Moves the states of each place away from `empty`, the states of an empty prompt of the same length: weight 0 gives those,
/// weight 1 changes nothing.
///
/// Source: `ClipTokenWeightEncoder` in ComfyUI's `comfy/sd1_clip.py`.
pub fn scale_from_empty(states: &mut [f32], weights: &[f32], empty: &[f32]) {
    let width = width(states, weights);
    let changed = rows(states, weights).zip(empty.chunks(width)).filter(|((_, weight), _)| *weight != 1.0);
    for ((row, weight), empty) in changed {
        for (value, empty) in row.iter_mut().zip(empty) {
            *value = (*value - empty) * weight + empty;
        }
    }
}

fn width(states: &[f32], weights: &[f32]) -> usize {
    (states.len() / weights.len().max(1)).max(1)
}

/// The states of each place and its weight.
fn rows<'a>(states: &'a mut [f32], weights: &'a [f32]) -> impl Iterator<Item = (&'a mut [f32], f32)> {
    let width = width(states, weights);
    states.chunks_mut(width).zip(weights.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::{multiply, multiply_keeping_mean, scale_from_empty};
    use std::collections::BTreeMap;

    /// What Python computes; see `tools/diffusion/text.py`.
    #[test]
    fn states_are_those_of_other_programs() {
        let data = include_str!("../../testdata/text/emphasis.json");
        let data: BTreeMap<String, Vec<f32>> = serde_json::from_str(data).unwrap();
        let (weights, empty) = (&data["weights"], &data["empty"]);
        assert_eq!((weights.len(), empty.len()), (77, 77 * 3));
        type Rule<'a> = &'a dyn Fn(&mut [f32]);
        let rules: [(&str, Rule<'_>); 3] = [
            ("original", &|states| multiply_keeping_mean(states, weights)),
            ("no_norm", &|states| multiply(states, weights)),
            ("comfy", &|states| scale_from_empty(states, weights, empty)),
        ];
        for (name, rule) in rules {
            let mut states = data["states"].clone();
            rule(&mut states);
            for (actual, expected) in states.iter().zip(&data[name]) {
                assert!((actual - expected).abs() < 2e-6, "{name}: {actual} for {expected}");
            }
            assert_ne!(states, data["states"], "{name}");
        }
    }

    #[test]
    fn a_mean_of_zero_cannot_be_restored() {
        let mut states = [1.0, 1.0];
        multiply_keeping_mean(&mut states, &[0.0, 0.0]);
        assert_eq!(states, [0.0, 0.0]);
        multiply_keeping_mean(&mut [], &[]);
    }
}
