use serde::{Deserialize, Serialize};

/// Statistics of run times in milliseconds. Percentiles are nearest-rank: the smallest time that is not exceeded by
/// at least that share of the runs. So with fewer than 20 runs, p95 is the slowest run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// Number of runs.
    pub runs: usize,
    /// Median (mean of the two middle times for an even number).
    pub median_ms: f64,
    /// Mean.
    pub mean_ms: f64,
    /// Sample standard deviation.
    pub stddev_ms: f64,
    /// Fastest.
    pub min_ms: f64,
    /// Slowest.
    pub max_ms: f64,
    /// 90th percentile.
    pub p90_ms: f64,
    /// 95th percentile.
    pub p95_ms: f64,
    /// 99th percentile; `None` below 100 runs.
    pub p99_ms: Option<f64>,
}

impl Stats {
    /// Statistics of `times`; `None` if empty.
    pub fn of(times: &[f64]) -> Option<Self> {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (first, last) = (*sorted.first()?, *sorted.last()?);
        let n = sorted.len();
        let mean = sorted.iter().sum::<f64>() / n as f64;
        let variance =
            sorted.iter().map(|t| (t - mean).powi(2)).sum::<f64>() / n.saturating_sub(1).max(1) as f64;
        let rank = |share: f64| sorted[((share * n as f64).ceil() as usize).clamp(1, n) - 1];
        Some(Stats {
            runs: n,
            median_ms: median(&sorted),
            mean_ms: mean,
            stddev_ms: variance.sqrt(),
            min_ms: first,
            max_ms: last,
            p90_ms: rank(0.90),
            p95_ms: rank(0.95),
            p99_ms: (n >= 100).then(|| rank(0.99)),
        })
    }
}

/// Median of sorted values; needs at least one.
fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    if n % 2 == 1 { sorted[n / 2] } else { (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0 }
}

/// Warnings about a series of times: outliers (modified Z-score over the median absolute deviation above 14.826, as
/// in hyperfine) and drift (last third compared with the first).
pub(crate) fn warnings(times: &[f64]) -> Vec<String> {
    let mut warnings = Vec::new();
    let Some(stats) = Stats::of(times) else { return warnings };
    let mut deviations: Vec<f64> = times.iter().map(|t| (t - stats.median_ms).abs()).collect();
    deviations.sort_by(f64::total_cmp);
    let mad = median(&deviations);
    if mad > 0.0 {
        let outliers = times.iter().filter(|t| 0.6745 * (*t - stats.median_ms).abs() / mad > 14.826).count();
        if outliers > 0 {
            warnings.push(format!("{outliers} of {} runs are statistical outliers", times.len()));
        }
    }
    let third = times.len() / 3;
    if third >= 3 {
        let of = |part: &[f64]| Stats::of(part).map_or(0.0, |s| s.median_ms);
        let (first, last) = (of(&times[..third]), of(&times[times.len() - third..]));
        if last > first * 1.1 {
            warnings.push(format!(
                "runs slowed down by {:.0} % (heat, or other work)",
                (last / first - 1.0) * 100.0
            ));
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_by_hand() {
        let s = Stats::of(&[3.0, 1.0, 2.0, 10.0]).unwrap();
        assert_eq!(
            (s.median_ms, s.mean_ms, s.min_ms, s.max_ms, s.p95_ms, s.p99_ms),
            (2.5, 4.0, 1.0, 10.0, 10.0, None)
        );
        assert!((s.stddev_ms - (50.0f64 / 3.0).sqrt()).abs() < 1e-12);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        let s = Stats::of(&hundred).unwrap();
        assert_eq!((s.p90_ms, s.p95_ms, s.p99_ms), (90.0, 95.0, Some(99.0)));
        assert!(Stats::of(&[]).is_none());
    }

    #[test]
    fn warns_of_outliers_and_drift() {
        let mut times: Vec<f64> = (0..30).map(|i| 10.0 + f64::from(i % 3) * 0.1).collect();
        assert!(warnings(&times).is_empty());
        times[15] = 50.0;
        assert!(warnings(&times)[0].contains("1 of 30"));
        let slower: Vec<f64> = (0..30).map(|i| 10.0 + f64::from(i) * 0.1).collect();
        assert!(warnings(&slower).iter().any(|w| w.contains("slowed")));
    }
}
