//! Guidance: combining the predictions with and without the prompt.

use serde::{Deserialize, Serialize};

/// Combines the prediction for the prompt (`with`) and that for the negative prompt (`without`).
///
/// Both are network outputs for one picture, as in diffusers, except that [`Rule::Projected`] expects clean states, as in its
/// paper. Standard guidance gives the same result either way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guidance {
    /// Weight of the prompt ("CFG scale"). At 1 the negative prediction is not needed.
    pub scale: f64,
    /// How far to restore the standard deviation of the prompt's prediction, from 0 to 1 (Lin et al., 2024). 0.7 suits models with
    /// zero terminal SNR.
    pub rescale: f64,
    /// How to combine the two.
    pub rule: Rule,
    /// From which share of the steps to which to guide, at most from 0 to 1. Other steps follow the prompt alone and take half the
    /// time (Kynkäänniemi et al., 2024).
    pub interval: (f64, f64),
}

/// A rule of guidance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Classifier-free guidance (Ho and Salimans, 2022).
    Standard,
    /// CFG-Zero* (Fan et al., 2025): scales the negative prediction to fit the other. Meant for flow models; their first
    /// step is zero.
    ZeroStar,
    /// Adaptive projected guidance (Sadat et al., 2024), without momentum.
    Projected {
        /// The share to keep of the part parallel to the prompt's clean state, from 0 to 1.
        parallel: f64,
        /// Largest norm of the difference; 0 for no limit.
        limit: f64,
    },
}

impl Guidance {
    /// Standard guidance.
    pub fn standard(scale: f64) -> Self {
        Self { scale, rescale: 0.0, rule: Rule::Standard, interval: (0.0, 1.0) }
    }

    /// Whether the negative prediction is needed.
    pub fn needs_both(&self) -> bool {
        self.scale != 1.0
    }

    /// Whether to guide in a step after this share of the steps.
    pub fn applies(&self, share: f64) -> bool {
        let (from, to) = self.interval;
        self.needs_both() && share >= from && share < to
    }

    /// Returns the combined prediction.
    pub fn combine(&self, with: &[f32], without: &[f32]) -> Vec<f32> {
        if !self.needs_both() {
            return with.to_vec();
        }
        let pairs = || with.iter().zip(without).map(|(c, u)| (f64::from(*c), f64::from(*u)));
        let mut out: Vec<f64> = match self.rule {
            Rule::Standard => pairs().map(|(c, u)| u + self.scale * (c - u)).collect(),
            Rule::ZeroStar => {
                let dot: f64 = pairs().map(|(c, u)| c * u).sum();
                let norm: f64 = pairs().map(|(_, u)| u * u).sum();
                let fit = dot / (norm + 1e-8);
                pairs().map(|(c, u)| fit * u + self.scale * (c - fit * u)).collect()
            }
            Rule::Projected { parallel, limit } => {
                let length = pairs().map(|(c, u)| (c - u).powi(2)).sum::<f64>().sqrt();
                let shrink = if limit > 0.0 && length > limit { limit / length } else { 1.0 };
                let dot: f64 = pairs().map(|(c, u)| shrink * (c - u) * c).sum();
                let norm: f64 = pairs().map(|(c, _)| c * c).sum();
                let share = if norm > 0.0 { dot / norm } else { 0.0 };
                pairs()
                    .map(|(c, u)| {
                        let along = share * c;
                        let across = shrink * (c - u) - along;
                        c + (self.scale - 1.0) * (across + parallel * along)
                    })
                    .collect()
            }
        };
        if self.rescale > 0.0 {
            let wanted = deviation(with.iter().map(|c| f64::from(*c)));
            let factor = wanted / deviation(out.iter().copied()).max(f64::MIN_POSITIVE);
            let factor = self.rescale * factor + 1.0 - self.rescale;
            out.iter_mut().for_each(|value| *value *= factor);
        }
        out.into_iter().map(|value| value as f32).collect()
    }
}

/// Whether an interval of the steps lies in 0 to 1.
pub fn is_range((from, to): (f64, f64)) -> bool {
    0.0 <= from && from <= to && to <= 1.0
}

/// The sample standard deviation, as in `torch.std`.
fn deviation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    (values.map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::{Guidance, Rule, deviation};

    const WITH: [f32; 4] = [1.0, -0.5, 2.0, 0.25];
    const WITHOUT: [f32; 4] = [0.5, -1.0, 1.0, 0.75];

    fn close(actual: &[f32], expected: [f32; 4]) {
        assert!(
            actual.iter().zip(expected).all(|(a, e)| (a - e).abs() < 1e-5),
            "{actual:?} for {expected:?}"
        );
    }

    #[test]
    fn standard_guidance() {
        close(&Guidance::standard(3.0).combine(&WITH, &WITHOUT), [2.0, 0.5, 4.0, -0.75]);
        assert!(!Guidance::standard(1.0).needs_both());
        close(&Guidance::standard(1.0).combine(&WITH, &[]), WITH);
    }

    #[test]
    fn full_rescale_keeps_the_deviation() {
        let guidance = Guidance { rescale: 1.0, ..Guidance::standard(7.0) };
        let out = guidance.combine(&WITH, &WITHOUT);
        let of =
            |values: &[f32]| deviation(values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>().into_iter());
        assert!((of(&out) - of(&WITH)).abs() < 1e-6);
    }

    /// Every rule keeps equal predictions as they are.
    #[test]
    fn equal_estimates_stay() {
        for rule in [Rule::Standard, Rule::ZeroStar, Rule::Projected { parallel: 0.0, limit: 5.0 }] {
            let guidance = Guidance { rule, ..Guidance::standard(7.0) };
            close(&guidance.combine(&WITH, &WITH), WITH);
        }
    }

    /// The added part is orthogonal to the prompt's estimate, and no longer than the limit.
    #[test]
    fn projected_guidance() {
        let all = Guidance { rule: Rule::Projected { parallel: 1.0, limit: 0.0 }, ..Guidance::standard(3.0) };
        close(&all.combine(&WITH, &WITHOUT), [2.0, 0.5, 4.0, -0.75]);
        let across =
            Guidance { rule: Rule::Projected { parallel: 0.0, limit: 0.1 }, ..Guidance::standard(3.0) };
        let added: Vec<f64> =
            across.combine(&WITH, &WITHOUT).iter().zip(WITH).map(|(a, c)| f64::from(a - c)).collect();
        let along: f64 = added.iter().zip(WITH).map(|(a, c)| a * f64::from(c)).sum();
        assert!(along.abs() < 1e-5, "{along}");
        assert!(added.iter().map(|a| a * a).sum::<f64>().sqrt() <= 0.2);
    }

    /// A negative prediction that is a multiple of the other changes nothing.
    #[test]
    fn zero_star_ignores_the_length_of_the_negative_estimate() {
        let guidance = Guidance { rule: Rule::ZeroStar, ..Guidance::standard(7.0) };
        close(&guidance.combine(&WITH, &WITH.map(|v| v * 0.3)), WITH);
    }
}
