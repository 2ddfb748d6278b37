//! Runs contenders in turns.

use super::{BenchOptions, Turn, contender::Contender, disturbance::Watch, stats};
use crate::{Error, Result};
use sdrun_abi::{Host, TimingPlan};
use std::{
    process,
    time::{Duration, Instant},
};

/// A contender that is ready to run, with its turns.
pub(super) struct Racer<'a> {
    pub(super) contender: Box<dyn Contender + 'a>,
    /// Milliseconds of its last run.
    pub(super) latest: f64,
    pub(super) turns: Vec<Turn>,
    /// Why it dropped out.
    pub(super) error: Option<Error>,
}

/// A turn lasts about this long, or one run. The kernel counts processor time in units of 10 ms, which is short beside it.
const TURN: Duration = Duration::from_millis(300);
/// Runs of less than this begin with one that is not counted, because another contender has emptied the caches.
const SHORT_MS: f64 = 200.0;
/// More runs in one turn add nothing.
const MOST_RUNS: usize = 1000;
/// The interval of a ratio rests on rounds, not on runs.
const LEAST_ROUNDS: usize = 5;

impl<'a> Racer<'a> {
    pub(super) fn new(contender: Box<dyn Contender + 'a>, first_run_ms: f64) -> Self {
        Racer { contender, latest: first_run_ms, turns: Vec::new(), error: None }
    }

    /// Times of all turns of a heat, or only of those that nothing disturbed.
    fn times(&self, heat: usize, all: bool) -> impl Iterator<Item = f64> {
        let counts = move |turn: &&Turn| turn.heat == heat && (all || turn.disturbed.is_none());
        self.turns.iter().filter(counts).flat_map(|turn| turn.times_ms.iter().copied())
    }

    /// Whether it has run often and long enough in a heat. Disturbed turns count half.
    fn is_done(&self, heat: usize, options: &BenchOptions) -> bool {
        let reached = |all: bool, factor: usize| {
            let (count, ms) = self.times(heat, all).fold((0, 0.0), |(n, sum), ms| (n + 1, sum + ms));
            let time = options.min_time.as_secs_f64() * 1e3;
            let rounds =
                self.turns.iter().filter(|turn| turn.heat == heat && (all || turn.disturbed.is_none()));
            count >= options.min_runs.max(TimingPlan::LEAST_RUNS) * factor
                && ms >= time * factor as f64
                && rounds.count() >= LEAST_ROUNDS * factor
        };
        let spent: f64 = self.times(heat, true).sum();
        let runs = self.times(heat, true).count();
        let late = spent >= options.max_time.as_secs_f64() * 1e3 && runs >= TimingPlan::LEAST_RUNS;
        self.error.is_some() || late || reached(false, 1) || reached(true, 2)
    }

    fn turn(&mut self, heat: usize, round: usize, watch: &mut Watch, host: &dyn Host) -> Result<()> {
        let turn_ms = TURN.as_secs_f64() * 1e3;
        let count = ((turn_ms / self.latest.max(1e-3)).ceil() as usize).clamp(1, MOST_RUNS);
        let warmup = usize::from(self.latest < SHORT_MS);
        let processes: Vec<u32> = self.contender.process().into_iter().chain([process::id()]).collect();
        let before = watch.note(&processes);
        let times_ms = self.contender.times(warmup, count, host)?;
        let after = watch.note(&processes);
        self.latest = stats::median(&times_ms).unwrap_or(self.latest);
        let disturbed = watch.disturbance(&before, &after);
        self.turns.push(Turn { heat, round, times_ms, disturbed });
        Ok(())
    }
}

/// Runs all contenders in turns until each has run often enough. The order of turns is reversed every other round, so that nobody
/// always follows the same one.
///
/// # Errors
/// `Cancelled` if `host` cancels. A contender's own error ends its participation.
pub(super) fn heat(
    racers: &mut [&mut Racer<'_>],
    number: usize,
    options: &BenchOptions,
    watch: &mut Watch,
    host: &dyn Host,
) -> Result<()> {
    for racer in &mut *racers {
        let started = Instant::now();
        for _ in 0..options.warmup {
            if racer.error.is_none() && started.elapsed() < options.max_time {
                match racer.contender.times(0, 1, host) {
                    Ok(times) => racer.latest = times.first().copied().unwrap_or(racer.latest),
                    Err(error) => racer.error = Some(error),
                }
            }
            super::go_on(host)?;
        }
    }
    let mut round = 0;
    while racers.iter().any(|racer| !racer.is_done(number, options)) {
        let order: Vec<usize> = match round % 2 {
            0 => (0..racers.len()).collect(),
            _ => (0..racers.len()).rev().collect(),
        };
        for at in order {
            let racer = &mut *racers[at];
            // A contender that is done keeps running beside the others, unless its runs are long.
            let costly = racer.latest > SHORT_MS && racer.is_done(number, options);
            if racer.error.is_some() || (costly && at != 0) {
                continue;
            }
            if let Err(error) = racer.turn(number, round, watch, host) {
                racer.error = Some(error);
            }
            super::go_on(host)?;
        }
        round += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Tensors, bench::Row};
    use sdrun_abi::{Error as AbiError, NoHost};
    use std::{cell::RefCell, rc::Rc};

    struct Fake {
        name: char,
        ms: f64,
        /// Fails at this call; 0 is never.
        fails_at: usize,
        log: Rc<RefCell<String>>,
    }

    impl Contender for Fake {
        fn outputs(&mut self, _: &dyn Host) -> Result<Tensors> {
            Ok(Tensors::new())
        }
        fn times(&mut self, _: usize, count: usize, _: &dyn Host) -> Result<Vec<f64>> {
            self.log.borrow_mut().push(self.name);
            self.fails_at = self.fails_at.wrapping_sub(1);
            match self.fails_at {
                0 => Err(AbiError::internal("crashed").into()),
                _ => Ok(vec![self.ms; count]),
            }
        }
        fn process(&self) -> Option<u32> {
            None
        }
        fn report(&mut self, _: &mut Row) -> Result<()> {
            Ok(())
        }
    }

    fn race(of: &[(char, f64, usize)], options: &BenchOptions) -> (Vec<Racer<'static>>, String) {
        let log = Rc::new(RefCell::new(String::new()));
        let mut racers: Vec<Racer<'_>> = of
            .iter()
            .map(|(name, ms, fails_at)| {
                let fake = Fake { name: *name, ms: *ms, fails_at: *fails_at, log: log.clone() };
                Racer::new(Box::new(fake), *ms)
            })
            .collect();
        let mut watch = Watch::new(1);
        heat(&mut racers.iter_mut().collect::<Vec<_>>(), 0, options, &mut watch, &NoHost).unwrap();
        let log = log.borrow().clone();
        (racers, log)
    }

    #[test]
    fn turns_alternate_and_a_failure_ends_one_alone() {
        let options =
            BenchOptions { warmup: 0, min_runs: 4, min_time: Duration::ZERO, ..BenchOptions::default() };
        let (racers, log) = race(&[('a', 400.0, 0), ('b', 400.0, 3), ('c', 400.0, 0)], &options);
        assert!(log.starts_with("abccbaabcc"), "{log}");
        assert_eq!(log.matches('b').count(), 3);
        assert!(racers[1].error.is_some() && racers[1].turns.len() == 2);
        for racer in [&racers[0], &racers[2]] {
            assert!(racer.error.is_none() && racer.times(0, true).count() >= 4);
            assert!(racer.turns.iter().all(|turn| turn.times_ms.len() == 1));
        }
    }

    #[test]
    fn short_runs_fill_their_turns() {
        let options = BenchOptions { warmup: 1, min_runs: 10, ..BenchOptions::default() };
        let (racers, _) = race(&[('a', 10.0, 0), ('b', 100.0, 0)], &options);
        assert!(racers[0].turns.iter().all(|turn| turn.times_ms.len() == 30));
        assert!(racers[1].turns.iter().all(|turn| turn.times_ms.len() == 3));
        // At least three seconds each, or six of disturbed ones.
        assert!(racers.iter().all(|racer| racer.times(0, true).sum::<f64>() >= 3000.0));
        let both = racers.iter().map(|racer| racer.turns.len()).collect::<Vec<_>>();
        assert_eq!(both[0], both[1], "who is done goes on beside the others");
    }

    #[test]
    fn time_ends_what_is_slow() {
        let options = BenchOptions { warmup: 0, max_time: Duration::from_secs(1), ..BenchOptions::default() };
        let (racers, _) = race(&[('a', 5000.0, 0)], &options);
        assert_eq!(racers[0].times(0, true).count(), TimingPlan::LEAST_RUNS);
    }
}
