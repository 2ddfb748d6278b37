//! How far a run is, and how long the rest may take.

use super::{Event, Parts, Resolved};
use std::time::Instant;

/// Counts the steps of a run and measures their time. It hears the events of one or more requests that differ only in prompts and
/// seeds.
#[derive(Clone, Debug)]
pub struct Progress {
    pictures: usize,
    passes: Vec<Pass>,
    drawn: usize,
    /// Seconds to decode a picture.
    decoding: Option<f64>,
    /// When the last event came.
    since: Instant,
}

/// A pass over all pictures.
#[derive(Clone, Debug)]
struct Pass {
    /// Steps for each picture.
    steps: usize,
    pixels: usize,
    done: usize,
    /// Seconds for each step, newer ones count more.
    seconds: Option<f64>,
}

/// How much a new time counts.
const SHARE_OF_NEW: f64 = 0.2;

impl Progress {
    /// Progress towards `pictures` pictures, from `now` on.
    pub fn new(request: &Resolved, parts: &Parts, pictures: usize, now: Instant) -> Self {
        let first = (request.width, request.height, request.start.as_ref().map(|start| start.strength));
        let second = request.hires.map(|hires| (hires.width, hires.height, Some(hires.strength)));
        let sizes = [Some(first), second].into_iter().flatten();
        let passes = request.passes().into_iter().zip(sizes).map(|(pass, (width, height, strength))| {
            // A picture to start from, or the sampler, may change the number of steps.
            let (_, sigmas) = request.levels(parts, [width, height], pass.steps(), strength);
            Pass { steps: sigmas.len().saturating_sub(1), pixels: width * height, done: 0, seconds: None }
        });
        Progress { pictures, passes: passes.collect(), drawn: 0, decoding: None, since: now }
    }

    /// Takes an event that happened `now`.
    pub fn hear(&mut self, event: &Event<'_>, now: Instant) {
        let seconds = now.saturating_duration_since(self.since).as_secs_f64();
        self.since = now;
        match event {
            Event::Step { pass, .. } => {
                if let Some(pass) = self.passes.get_mut(*pass) {
                    pass.done += 1;
                    let old = pass.seconds.unwrap_or(seconds);
                    pass.seconds = Some(old + SHARE_OF_NEW * (seconds - old));
                }
            }
            Event::Picture(_) => {
                self.drawn += 1;
                self.decoding = Some(seconds);
            }
            _ => {}
        }
    }

    /// Steps that are done, in all passes of all pictures.
    pub fn done(&self) -> usize {
        self.passes.iter().map(|pass| pass.done).sum()
    }

    /// Steps of all passes of all pictures.
    pub fn total(&self) -> usize {
        self.passes.iter().map(|pass| pass.steps * self.pictures).sum()
    }

    /// Number of passes.
    pub fn passes(&self) -> usize {
        self.passes.len()
    }

    /// Pictures to draw.
    pub fn pictures(&self) -> usize {
        self.pictures
    }

    /// Pictures that are done.
    pub fn drawn(&self) -> usize {
        self.drawn
    }

    /// Seconds for a step of a pass, once there was one.
    pub fn seconds_per_step(&self, pass: usize) -> Option<f64> {
        self.passes.get(pass)?.seconds
    }

    /// How many seconds the remaining steps and pictures may take, once there was a step. Steps of a pass that has not begun count in
    /// proportion to its pixels.
    pub fn seconds_left(&self) -> Option<f64> {
        let (known, pixels) = self.passes.iter().find_map(|pass| Some((pass.seconds?, pass.pixels)))?;
        let of_pass = |pass: &Pass| {
            let seconds = pass.seconds.unwrap_or(known * pass.pixels as f64 / pixels as f64);
            (pass.steps * self.pictures).saturating_sub(pass.done) as f64 * seconds
        };
        let decoding = self.decoding.unwrap_or_default() * self.pictures.saturating_sub(self.drawn) as f64;
        Some(self.passes.iter().map(of_pass).sum::<f64>() + decoding)
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, Pass, Progress};
    use crate::pipeline::Picture;
    use std::time::{Duration, Instant};

    fn step(pass: usize) -> Event<'static> {
        Event::Step {
            picture: 0,
            pass,
            step: 0,
            steps: 0,
            shape: [0; 3],
            latents: &[],
            clean: &[],
            running: 0.0,
        }
    }

    #[test]
    fn both_passes_count() {
        let start = Instant::now();
        let pass = |steps, pixels| Pass { steps, pixels, done: 0, seconds: None };
        let passes = vec![pass(4, 100), pass(2, 400)];
        let mut progress = Progress { pictures: 2, passes, drawn: 0, decoding: None, since: start };
        let mut now = start;
        let mut after = |progress: &mut Progress, seconds: u64, event: Event<'_>| {
            now += Duration::from_secs(seconds);
            progress.hear(&event, now);
        };
        assert_eq!((progress.done(), progress.total(), progress.seconds_left()), (0, 12, None));
        // Loading is no part of a step's time.
        after(&mut progress, 100, Event::Loading { part: "unet" });
        after(&mut progress, 1, step(0));
        assert_eq!((progress.done(), progress.seconds_per_step(0)), (1, Some(1.0)));
        // 7 steps, and 4 of four times as many pixels.
        assert_eq!(progress.seconds_left(), Some(7.0 + 4.0 * 4.0));
        (1..8).for_each(|_| after(&mut progress, 1, step(0)));
        after(&mut progress, 5, step(1));
        assert_eq!((progress.done(), progress.seconds_left()), (9, Some(15.0)));
        (1..4).for_each(|_| after(&mut progress, 5, step(1)));
        after(&mut progress, 50, Event::Decoding { picture: 0 });
        after(&mut progress, 3, Event::Picture(Picture::default()));
        assert_eq!((progress.done(), progress.drawn(), progress.seconds_left()), (12, 1, Some(3.0)));
        // More steps than planned do not underflow.
        after(&mut progress, 5, step(1));
        after(&mut progress, 5, step(7));
        assert_eq!(progress.seconds_left(), Some(3.0));
    }

    #[test]
    fn newer_steps_count_more() {
        let start = Instant::now();
        let passes = vec![Pass { steps: 50, pixels: 1, done: 0, seconds: None }];
        let mut progress = Progress { pictures: 1, passes, drawn: 0, decoding: None, since: start };
        let mut now = start;
        for seconds in [9, 1, 1, 1, 1, 1, 1, 1, 1, 1] {
            now += Duration::from_secs(seconds);
            progress.hear(&step(0), now);
        }
        let seconds = progress.seconds_per_step(0).unwrap();
        assert!((1.0..2.3).contains(&seconds), "{seconds}");
    }
}
