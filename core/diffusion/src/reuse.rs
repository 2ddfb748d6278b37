//! Steps that skip the network: a cache adds the change that the network made in an earlier step to the new input.
//!
//! *EasyCache* (Zhou et al., "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching", 2025) measures
//! how strongly the output follows the input, and from that estimates the error of skipping a step. When the estimates add up to a
//! threshold, the network runs again. *UCache* is stable-diffusion.cpp's variant for UNets: it compares the estimate with the usual
//! change between steps, and is stricter in early steps and after each skipped step. Both follow stable-diffusion.cpp, with one
//! difference: it gives EasyCache's range in timesteps, and sdrun gives both ranges in steps.

use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// When to reuse a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reuse {
    /// The rule.
    pub mode: Mode,
    /// The sum of estimated errors at which the network runs again. More is faster and worse.
    pub threshold: f64,
    /// The share of the steps before which all steps are computed.
    pub start: f64,
    /// The share of the steps after which all steps are computed.
    pub end: f64,
}

/// The rule by which steps are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// For transformers.
    EasyCache,
    /// For UNets.
    UCache,
}

/// Why settings make no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReuseError {
    /// The threshold is not a positive number.
    #[error("a threshold of {0} reuses no step: take a number above 0, such as 0.2")]
    Threshold(f64),
    /// The range is empty or not within 0 to 1.
    #[error("steps from {0} to {1} are no range in 0 to 1")]
    Range(f64, f64),
}

impl Reuse {
    /// The defaults of ComfyUI and stable-diffusion.cpp.
    pub fn new(mode: Mode) -> Self {
        let threshold = match mode {
            Mode::EasyCache => 0.2,
            Mode::UCache => 1.0,
        };
        Reuse { mode, threshold, start: 0.15, end: 0.95 }
    }

    /// # Errors
    /// If no step could ever be reused, or a number is not finite.
    pub fn check(&self) -> Result<(), ReuseError> {
        let Reuse { threshold, start, end, .. } = *self;
        if !(threshold.is_finite() && threshold > 0.0) {
            return Err(ReuseError::Threshold(threshold));
        }
        if !(0.0 <= start && start < end && end <= 1.0) {
            return Err(ReuseError::Range(start, end));
        }
        Ok(())
    }
}

/// The outputs of earlier steps of one picture. A *row* is a condition: the network's output for one prompt.
pub(crate) struct Cache {
    reuse: Reuse,
    /// The step that is running, from 0.
    step: Option<usize>,
    /// Whether that step skips the network.
    skips: bool,
    /// The last computed step's output minus its input, for each row.
    changes: HashMap<usize, Vec<f32>>,
    /// The last computed step of the row that decides for all.
    last: Option<Computed>,
    /// The mean change of the output divided by the mean change of the input.
    rate: Option<f64>,
    /// The sum of estimated errors since the last computed step.
    error: f64,
    /// How much the input has changed since the last computed step.
    moved: Option<f64>,
    /// A running mean of the output's changes.
    usual: Option<f64>,
    /// Steps computed in the range, and steps reused since the last of them.
    counts: (usize, usize),
}

struct Computed {
    row: usize,
    input: Vec<f32>,
    output: Vec<f32>,
}

impl Cache {
    pub(crate) fn new(reuse: Reuse) -> Self {
        Cache {
            reuse,
            step: None,
            skips: false,
            changes: HashMap::new(),
            last: None,
            rate: None,
            error: 0.0,
            moved: None,
            usual: None,
            counts: (0, 0),
        }
    }

    fn is_active(&self, step: usize, steps: usize) -> bool {
        let share = step as f64 / steps.max(1) as f64;
        (self.reuse.start..self.reuse.end).contains(&share)
    }

    /// The outputs of the rows for `input` in step `step` of `steps`, if they may be reused.
    pub(crate) fn outputs(
        &mut self,
        (step, steps): (usize, usize),
        rows: &[usize],
        input: &[f32],
    ) -> Option<Vec<Vec<f32>>> {
        if !self.is_active(step, steps) {
            return None;
        }
        // A sampler may run the network several times in a step; the first time decides for all.
        if self.step != Some(step) {
            self.step = Some(step);
            self.skips = self.decide(rows, input, steps);
        }
        let of = |row| Some(self.changes.get(row)?.iter().zip(input).map(|(change, x)| x + change).collect());
        if self.skips { rows.iter().map(of).collect() } else { None }
    }

    fn decide(&mut self, rows: &[usize], input: &[f32], steps: usize) -> bool {
        self.moved = None;
        let Some(last) = self.last.as_ref().filter(|last| rows.last() == Some(&last.row)) else {
            return false;
        };
        let moved = distance(input, &last.input);
        self.moved = Some(moved);
        let size = mean(last.output.iter().map(|value| value.abs()));
        let Some(rate) = self.rate.filter(|_| moved > 0.0 && size > 0.0) else { return false };
        let (computed, reused) = self.counts;
        let (estimate, threshold) = match self.reuse.mode {
            Mode::EasyCache => (rate * moved / size, self.reuse.threshold),
            Mode::UCache => {
                let usual = self.usual.map_or(size, |usual| usual * 1.6);
                let estimate = rate * moved / (size * usual).sqrt() * (1.0 + 0.5 * reused as f64);
                let factor = match computed as f64 / steps.max(1) as f64 {
                    early if early < 0.2 => 0.5,
                    late if late > 0.8 => 1.5,
                    _ => 1.0,
                };
                (estimate, self.reuse.threshold * factor)
            }
        };
        self.error += estimate;
        let skips = self.error < threshold;
        if skips {
            self.counts.1 += 1;
        } else {
            self.error = 0.0;
        }
        skips
    }

    /// Remembers what the network returned.
    pub(crate) fn computed(
        &mut self,
        (step, steps): (usize, usize),
        rows: &[usize],
        input: &[f32],
        outputs: &[Vec<f32>],
    ) {
        if !self.is_active(step, steps) {
            return;
        }
        for (row, output) in rows.iter().zip(outputs) {
            let change = output.iter().zip(input).map(|(out, x)| out - x).collect();
            self.changes.insert(*row, change);
        }
        let (Some(row), Some(output)) = (rows.last(), outputs.last()) else { return };
        self.counts = (self.counts.0 + 1, 0);
        self.error = 0.0;
        if let Some(last) = self.last.as_ref().filter(|last| last.row == *row) {
            let changed = distance(output, &last.output);
            if changed > 0.0 && changed.is_finite() {
                self.usual = Some(self.usual.map_or(changed, |usual| 0.8 * usual + 0.2 * changed));
                if let Some(moved) = self.moved.filter(|moved| *moved > 0.0) {
                    self.rate = Some(changed / moved);
                }
            }
        }
        self.moved = None;
        self.last = Some(Computed { row: *row, input: input.to_vec(), output: output.clone() });
    }
}

fn mean(values: impl ExactSizeIterator<Item = f32>) -> f64 {
    let count = values.len().max(1) as f64;
    values.map(f64::from).sum::<f64>() / count
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    mean(a.iter().zip(b).map(|(a, b)| (a - b).abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a network whose output is `slope * input` over inputs that fall from 1 by `fall`, and returns the computed steps.
    fn computed(reuse: Reuse, steps: usize, slope: f32, fall: f32) -> Vec<usize> {
        let mut cache = Cache::new(reuse);
        let mut computed = Vec::new();
        for step in 0..steps {
            let input = vec![1.0 - fall * step as f32; 4];
            match cache.outputs((step, steps), &[3, 7], &input) {
                Some(outputs) => assert_eq!(outputs.len(), 2),
                None => {
                    let output: Vec<f32> = input.iter().map(|x| slope * x).collect();
                    cache.computed((step, steps), &[3, 7], &input, &[output.clone(), output]);
                    computed.push(step);
                }
            }
        }
        computed
    }

    #[test]
    fn steps_outside_the_range_are_computed() {
        let slow = computed(Reuse::new(Mode::EasyCache), 20, 2.0, 1e-4);
        // Steps 3 and 4 tell how much the output changes; 19 is the last, after 95 %.
        assert_eq!(slow, [0, 1, 2, 3, 4, 19]);
        assert_eq!(computed(Reuse { start: 0.5, ..Reuse::new(Mode::EasyCache) }, 20, 2.0, 1e-4).len(), 13);
    }

    /// By hand: the input falls by 0.01 a step, the output is twice the input, so the estimate of the `n`th step after a computed one
    /// at `x` is `2 * 0.01 n / 2x`, and their sum reaches 0.2 when `n (n + 1) / 2 * 0.01 / x` does.
    #[test]
    fn the_network_runs_again_when_the_sum_reaches_the_threshold() {
        let steps = computed(Reuse { end: 1.0, ..Reuse::new(Mode::EasyCache) }, 20, 2.0, 0.01);
        // From step 4, at x = 0.96: the sum of n = 1..5 is 0.156, that of n = 1..6 is 0.219.
        assert_eq!(steps, [0, 1, 2, 3, 4, 10, 16]);
    }

    #[test]
    fn a_network_that_changes_fast_runs_in_each_step() {
        for mode in [Mode::EasyCache, Mode::UCache] {
            assert_eq!(computed(Reuse { threshold: 1e-6, ..Reuse::new(mode) }, 20, 2.0, 0.01).len(), 20);
        }
        let all = computed(Reuse::new(Mode::UCache), 20, 2.0, 0.01);
        assert!(all.len() < 20, "{all:?}");
    }

    #[test]
    fn reused_outputs_are_the_input_and_the_last_change() {
        let mut cache = Cache::new(Reuse::new(Mode::EasyCache));
        for (step, input) in [(4, 1.0), (5, 0.99)] {
            assert_eq!(cache.outputs((step, 20), &[0], &[input]), None);
            cache.computed((step, 20), &[0], &[input], &[vec![3.0 * input]]);
        }
        let outputs = cache.outputs((6, 20), &[0], &[0.98]).unwrap();
        assert_eq!(outputs, [[0.98 + (3.0 * 0.99 - 0.99)]]);
        // Another prompt has no output to reuse.
        assert_eq!(cache.outputs((7, 20), &[1], &[0.98]), None);
    }

    #[test]
    fn settings_are_checked() {
        let reuse = Reuse::new(Mode::EasyCache);
        assert_eq!(reuse.check(), Ok(()));
        assert!(Reuse { threshold: f64::NAN, ..reuse }.check().is_err());
        assert!(Reuse { threshold: 0.0, ..reuse }.check().is_err());
        assert!(Reuse { start: 0.9, end: 0.1, ..reuse }.check().is_err());
        assert!(Reuse { end: f64::NAN, ..reuse }.check().is_err());
    }
}
