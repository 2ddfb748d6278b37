//! Statistics of run times.

use super::Turn;
use serde::{Deserialize, Serialize};

/// Statistics of run times in milliseconds. Percentiles are nearest-rank: the smallest time that is not exceeded by at least that share
/// of the runs. A percentile is `None` where it would be the slowest run.
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
    /// 90th percentile; `None` below 11 runs.
    pub p90_ms: Option<f64>,
    /// 95th percentile; `None` below 21 runs.
    pub p95_ms: Option<f64>,
    /// 99th percentile; `None` below 101 runs.
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
        let percentile = |percent: usize| {
            let rank = (percent * n).div_ceil(100);
            (rank < n).then(|| sorted[rank.max(1) - 1])
        };
        Some(Stats {
            runs: n,
            median_ms: median_of_sorted(&sorted),
            mean_ms: mean,
            stddev_ms: variance.sqrt(),
            min_ms: first,
            max_ms: last,
            p90_ms: percentile(90),
            p95_ms: percentile(95),
            p99_ms: percentile(99),
        })
    }
}

/// Median of sorted values; needs at least one.
fn median_of_sorted(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    if n % 2 == 1 { sorted[n / 2] } else { (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0 }
}

/// Median; `None` if empty.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    Stats::of(values).map(|stats| stats.median_ms)
}

/// Warnings about a series of times: outliers (modified Z-score over the median absolute deviation above 14.826, as
/// in hyperfine) and drift (last third compared with the first).
pub(crate) fn warnings(times: &[f64]) -> Vec<String> {
    let mut warnings = Vec::new();
    let Some(middle) = median(times) else { return warnings };
    let deviations: Vec<f64> = times.iter().map(|t| (t - middle).abs()).collect();
    let mad = median(&deviations).unwrap_or_default();
    if mad > 0.0 {
        let outliers = deviations.iter().filter(|deviation| 0.6745 * *deviation / mad > 14.826).count();
        if outliers > 0 {
            warnings.push(format!("{outliers} of {} runs are statistical outliers", times.len()));
        }
    }
    let third = times.len() / 3;
    if third >= 3
        && let (Some(first), Some(last)) = (median(&times[..third]), median(&times[times.len() - third..]))
        && last > first * 1.1
    {
        let percent = (last / first - 1.0) * 100.0;
        warnings.push(format!("runs slowed down by {percent:.0} % (heat, or other work)"));
    }
    warnings
}

/// A time as a multiple of the best one, with a 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The ratio of the medians.
    pub ratio: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

impl Ratio {
    /// Whether the interval contains 1, so that neither is known to be faster.
    pub fn is_draw(&self) -> bool {
        self.low <= 1.0 && self.high >= 1.0
    }
}

/// Resamplings of a bootstrap. The ends of a 95 % interval then rest on 25 of them each.
const RESAMPLINGS: usize = 1000;

/// Each system's time as a multiple of the fastest one's, from the turns of each.
///
/// Turns of one round follow each other closely, so that a drift of the machine hits them alike. Systems of different heats never ran
/// at the same time: all are compared with the first one, the anchor, which runs in every heat. The interval is a percentile bootstrap
/// over rounds (B. Efron, "Bootstrap methods: another look at the jackknife", 1979), with each heat's rounds drawn together.
/// Only systems in `can_win` may be the fastest. `None` for a system that shares no round with the anchor.
pub(crate) fn ratios(systems: &[Vec<&Turn>], can_win: &[bool]) -> Vec<Option<Ratio>> {
    let Some(anchor) = systems.first() else { return Vec::new() };
    // For each system, (heat, time / anchor's time) of the rounds it shares with the anchor.
    let shared: Vec<Vec<(usize, usize, f64)>> = systems
        .iter()
        .map(|turns| {
            let ratio = |turn: &&Turn| {
                let same = anchor.iter().find(|own| (own.heat, own.round) == (turn.heat, turn.round))?;
                Some((turn.heat, turn.round, median(&turn.times_ms)? / median(&same.times_ms)?))
            };
            turns.iter().filter_map(ratio).collect()
        })
        .collect();
    let plain: Vec<Option<f64>> = shared
        .iter()
        .map(|rounds| median(&rounds.iter().map(|(_, _, ratio)| *ratio).collect::<Vec<_>>()))
        .collect();
    let candidates = plain.iter().zip(can_win).enumerate().filter(|(_, (_, can_win))| **can_win);
    let fastest =
        candidates.filter_map(|(at, (ratio, _))| Some((at, (*ratio)?))).min_by(|a, b| a.1.total_cmp(&b.1));
    let Some((winner, best)) = fastest else { return vec![None; systems.len()] };
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); systems.len()];
    let mut random = SplitMix(systems.len() as u64);
    for _ in 0..RESAMPLINGS {
        let seed = random.next();
        let drawn: Vec<Option<f64>> = shared.iter().map(|rounds| resampled(rounds, seed)).collect();
        let Some(best) = drawn[winner] else { continue };
        for (samples, drawn) in samples.iter_mut().zip(&drawn) {
            samples.extend(drawn.map(|ratio| ratio / best));
        }
    }
    plain
        .into_iter()
        .zip(&mut samples)
        .map(|(ratio, samples)| {
            samples.sort_by(f64::total_cmp);
            let end = |share: f64| samples.get((share * samples.len() as f64) as usize).copied();
            Some(Ratio { ratio: ratio? / best, low: end(0.025)?, high: end(0.975)? })
        })
        .collect()
}

/// The median of as many rounds, drawn with replacement. With the same seed, systems of a heat draw the same rounds.
fn resampled(rounds: &[(usize, usize, f64)], seed: u64) -> Option<f64> {
    let mut drawn = Vec::with_capacity(rounds.len());
    for part in rounds.chunk_by(|a, b| a.0 == b.0) {
        let last = part.iter().map(|(_, round, _)| *round).max().unwrap_or_default();
        let mut random = SplitMix(seed ^ (part[0].0 as u64) << 32);
        // Rounds that this system skipped are drawn again, for it alone.
        let mut tries = 0;
        let mut count = 0;
        while count < part.len() && tries < 64 * part.len() {
            tries += 1;
            let round = (random.next() % (last as u64 + 1)) as usize;
            if let Some((_, _, ratio)) = part.iter().find(|(_, known, _)| *known == round) {
                drawn.push(*ratio);
                count += 1;
            }
        }
    }
    median(&drawn)
}

/// SplitMix64 (G. Steele, D. Lea, C. Flood, 2014): enough to draw samples, and the same everywhere.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_by_hand() {
        let s = Stats::of(&[3.0, 1.0, 2.0, 10.0]).unwrap();
        assert_eq!(
            (s.median_ms, s.mean_ms, s.min_ms, s.max_ms, s.p90_ms, s.p95_ms, s.p99_ms),
            (2.5, 4.0, 1.0, 10.0, None, None, None)
        );
        assert!((s.stddev_ms - (50.0f64 / 3.0).sqrt()).abs() < 1e-12);
        let of = |n: u32| Stats::of(&(1..=n).map(f64::from).collect::<Vec<_>>()).unwrap();
        assert_eq!((of(100).p90_ms, of(100).p95_ms, of(100).p99_ms), (Some(90.0), Some(95.0), Some(99.0)));
        assert_eq!((of(10).p90_ms, of(20).p95_ms, of(99).p99_ms), (Some(9.0), Some(19.0), None));
        assert_eq!((of(9).p90_ms, of(19).p95_ms), (None, None));
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

    fn turns(heat: usize, times: &[f64]) -> Vec<Turn> {
        let turn = |(round, ms): (usize, &f64)| Turn { heat, round, times_ms: vec![*ms], disturbed: None };
        times.iter().enumerate().map(turn).collect()
    }

    fn all(turns: &[Turn]) -> Vec<&Turn> {
        turns.iter().collect()
    }

    /// The machine becomes three times as slow in the middle; both suffer alike.
    #[test]
    fn drift_hits_all_alike() {
        let pace = |round: usize| if round < 5 { 1.0 } else { 3.0 };
        let noise = |round: usize, seed: usize| 1.0 + 0.01 * ((round * 7 + seed * 3) % 5) as f64;
        let times = |factor: f64, seed| -> Vec<f64> {
            (0..10).map(|round| factor * pace(round) * noise(round, seed)).collect()
        };
        let (a, b) = (turns(0, &times(10.0, 0)), turns(0, &times(12.0, 1)));
        let [Some(a), Some(b)] = ratios(&[all(&a), all(&b)], &[true; 2])[..] else { panic!() };
        assert!(a.ratio == 1.0 && a.is_draw(), "{a:?}");
        assert!((b.ratio - 1.2).abs() < 0.05 && b.low > 1.1 && b.high < 1.3 && !b.is_draw(), "{b:?}");
    }

    /// Two per cent is a draw where rounds differ by ten.
    #[test]
    fn small_differences_are_draws() {
        let mut random = SplitMix(7);
        let mut noisy = |factor: f64| -> Vec<f64> {
            (0..20).map(|_| factor * (1.0 + 0.2 * (random.next() % 1000) as f64 / 1000.0)).collect()
        };
        let (a, b, c) = (turns(0, &noisy(10.0)), turns(0, &noisy(10.2)), turns(0, &noisy(20.0)));
        let found = ratios(&[all(&a), all(&b), all(&c)], &[true; 3]);
        assert!(found[0].unwrap().is_draw() && found[1].unwrap().is_draw(), "{found:?}");
        assert!(!found[2].unwrap().is_draw() && (found[2].unwrap().ratio - 2.0).abs() < 0.3, "{found:?}");
    }

    /// The second heat runs at half the speed; the anchor tells.
    #[test]
    fn heats_are_compared_through_the_anchor() {
        let mut anchor = turns(0, &[10.0; 6]);
        anchor.extend(turns(1, &[20.0; 6]));
        let (early, late) = (turns(0, &[15.0; 6]), turns(1, &[16.0; 6]));
        let found: Vec<f64> = ratios(&[all(&anchor), all(&early), all(&late)], &[true; 3])
            .into_iter()
            .map(|ratio| ratio.unwrap().ratio)
            .collect();
        for (found, wanted) in found.iter().zip([1.25, 1.875, 1.0]) {
            assert!((found - wanted).abs() < 1e-9, "{found} {wanted}");
        }
        assert_eq!(ratios(&[all(&early), all(&late)], &[true; 2])[1], None);
        let found = ratios(&[all(&anchor), all(&early), all(&late)], &[true, true, false]);
        let found: Vec<f64> = found.into_iter().map(|ratio| ratio.unwrap().ratio).collect();
        assert_eq!(found, [1.0, 1.5, 0.8], "the last one cannot win");
    }
}
