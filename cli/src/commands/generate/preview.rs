//! Rough pictures of what is being drawn.

use super::output::numbered;
use crate::files::{
    self,
    picture::{self, Format, JPEG_QUALITY},
};
use clap::Args;
use sdrun::abi::Error;
use sdrun_diffusion::{family::Family, preview::preview};
use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf, absolute},
    time::{Duration, Instant},
};

#[derive(Args)]
pub(super) struct PreviewArgs {
    /// Show the picture as it is so far in this PNG, JPEG or WebP file, which is replaced while the picture is drawn
    #[arg(long, alias = "preview-path", value_name = "FILE")]
    preview: Option<PathBuf>,

    /// Steps between previews [default: as many as cost one percent of the time]
    #[arg(long, value_name = "N", requires = "preview")]
    preview_interval: Option<NonZeroUsize>,
}

/// The previews of a run.
pub(super) struct Preview {
    file: PathBuf,
    pace: Pace,
}

impl PreviewArgs {
    /// Previews, if the user wants some. They must not replace one of the pictures.
    pub(super) fn open(&self, output: &Path, pictures: usize) -> Result<Option<Preview>, Error> {
        let Some(file) = &self.preview else { return Ok(None) };
        Format::of(file)?;
        let place = absolute(file).ok();
        if (0..pictures).any(|number| absolute(numbered(output, number)).ok() == place) {
            let message = format!("{} is a picture too: give --preview another file", file.display());
            return Err(Error::invalid(message).with_file(file));
        }
        files::check_target(file)?;
        let pace = Pace { interval: self.preview_interval, cost: Duration::ZERO, last: None };
        Ok(Some(Preview { file: file.clone(), pace }))
    }
}

impl Preview {
    /// Shows the state after a step if a preview is due. `clean` is an estimate of the final latents, of the shape
    /// `[channels, height, width]`.
    ///
    /// # Errors
    /// Why there can be no preview.
    pub(super) fn show(
        &mut self,
        family: &Family,
        clean: &[f32],
        shape: [usize; 3],
        step: usize,
    ) -> anyhow::Result<Option<&Path>> {
        let start = Instant::now();
        if !self.pace.is_due(step, start) {
            return Ok(None);
        }
        let Some(picture) = preview(family, clean, shape) else {
            anyhow::bail!("there are no previews of {} yet", family.title);
        };
        let factor = family.latent.factor as u32;
        let (width, height) = (picture.width() * factor, picture.height() * factor);
        let large = image::imageops::resize(&picture, width, height, image::imageops::Nearest);
        picture::write(&self.file, &large, JPEG_QUALITY, &[])?;
        self.pace.took(start, Instant::now());
        Ok(Some(&self.file))
    }
}

/// When to show a preview.
struct Pace {
    /// Steps between previews; `None` is by the time they cost.
    interval: Option<NonZeroUsize>,
    /// What the last one cost.
    cost: Duration,
    /// When it was done.
    last: Option<Instant>,
}

/// The time between previews, in multiples of what one costs.
const PATIENCE: u32 = 100;

impl Pace {
    /// Whether it is time for a preview after a step, counted from 0.
    fn is_due(&self, step: usize, now: Instant) -> bool {
        match (self.interval, self.last) {
            (Some(interval), _) => (step + 1).is_multiple_of(interval.get()),
            (None, Some(last)) => now.saturating_duration_since(last) >= self.cost * PATIENCE,
            (None, None) => true,
        }
    }

    /// A preview was made from `start` to `end`.
    fn took(&mut self, start: Instant, end: Instant) {
        (self.cost, self.last) = (end.saturating_duration_since(start), Some(end));
    }
}

#[cfg(test)]
mod tests {
    use super::{Pace, PreviewArgs};
    use std::{
        path::Path,
        time::{Duration, Instant},
    };

    #[test]
    fn previews_cost_one_percent_of_the_time() {
        let mut pace = Pace { interval: None, cost: Duration::ZERO, last: None };
        let (mut now, start) = (Instant::now(), Instant::now());
        let mut previews = Duration::ZERO;
        for step in 0..10_000 {
            now += Duration::from_millis(50);
            if pace.is_due(step, now) {
                let cost = Duration::from_millis(20);
                pace.took(now, now + cost);
                now += cost;
                previews += cost;
            }
        }
        let share = previews.as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.008..0.011).contains(&share), "{share}");
    }

    #[test]
    fn an_interval_counts_steps() {
        let pace = Pace { interval: 3.try_into().ok(), cost: Duration::MAX, last: None };
        let due = (0..7).filter(|step| pace.is_due(*step, Instant::now())).collect::<Vec<_>>();
        assert_eq!(due, [2, 5]);
    }

    #[test]
    fn a_preview_is_no_picture() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let open = |name: &str| {
            PreviewArgs { preview: Some(at(name)), preview_interval: None }.open(&at("fox.png"), 2)
        };
        assert!(open("preview.png").unwrap().is_some() && open("fox-3.png").unwrap().is_some());
        for name in ["fox.png", "fox-2.png", "preview.gif", "nowhere/preview.png"] {
            assert!(open(name).is_err(), "{name}");
        }
        let none = PreviewArgs { preview: None, preview_interval: None };
        assert!(none.open(Path::new("fox.png"), 2).unwrap().is_none());
    }
}
