//! What `sdrun generate` reports.

use crate::format;
use sdrun_diffusion::{
    family::Family,
    noise::Variation,
    pipeline::{Event, LoadedNetwork, Origin, Plan, Progress, Resolved},
};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

/// What happens, as a line of JSON. Pictures, passes and steps are counted from 1.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Line<'a> {
    /// What will be loaded, with `--explain`.
    Plan(&'a Plan),
    /// The prompts are tokenized for a text encoder: `tokens` in the longest, `lost` of which the encoder will not see.
    Prompt { part: &'a str, tokens: usize, lost: usize },
    /// A network is about to be loaded.
    Loading { part: &'a str },
    /// A network is loaded.
    Loaded(&'a LoadedNetwork),
    /// A network runs in fp32 from now on, because it gave values that are not finite.
    Widened { part: &'a str, from: String },
    /// A network works on tiles of the picture.
    Tiled { part: &'a str, tiles: usize },
    /// A step is done. `done` and `total` count the steps of all passes of all pictures; networks ran for `running`
    /// seconds of it.
    Step {
        picture: usize,
        pass: usize,
        step: usize,
        steps: usize,
        done: usize,
        total: usize,
        running: f64,
        seconds_left: Option<f64>,
    },
    /// The steps of a picture are done.
    Decoding { picture: usize },
    /// An upscaler has enlarged a tile of a picture.
    Tile { picture: usize, tile: usize, tiles: usize },
    /// A preview was written.
    Preview { picture: usize, file: &'a Path },
    /// A picture was written.
    Picture(&'a Drawn),
}

/// The report at the end.
#[derive(Serialize)]
pub(super) struct Report {
    /// `done`, the type of the last line.
    #[serde(rename = "type")]
    kind: &'static str,
    family: &'static str,
    width: usize,
    height: usize,
    steps: usize,
    sampler: &'static str,
    schedule: &'static str,
    cfg_scale: f64,
    /// How many steps skipped the network.
    pub(super) reused: usize,
    pub(super) networks: Vec<LoadedNetwork>,
    pub(super) pictures: Vec<Drawn>,
    pub(super) seconds: f64,
}

/// A picture that was written.
#[derive(Clone, Serialize)]
pub(super) struct Drawn {
    pub(super) file: PathBuf,
    pub(super) seed: u64,
    pub(super) variation: Option<Variation>,
    /// The prompt, with its choices made.
    pub(super) prompt: String,
    /// Whether the user does not know it yet.
    #[serde(skip)]
    pub(super) has_choices: bool,
}

impl Report {
    /// A report without pictures.
    pub(super) fn new(family: &Family, request: &Resolved) -> Self {
        Report {
            kind: "done",
            family: family.title,
            width: request.width,
            height: request.height,
            steps: request.steps,
            sampler: request.sampler.name(),
            schedule: request.schedule.name(),
            cfg_scale: request.guidance.scale,
            reused: 0,
            networks: Vec::new(),
            pictures: Vec::new(),
            seconds: 0.0,
        }
    }

    /// Adds a network, unless it was loaded in the same way before.
    pub(super) fn add(&mut self, network: &LoadedNetwork) {
        if !self.networks.iter().any(|known| known.record() == network.record()) {
            self.networks.push(network.clone());
        }
    }

    /// The report for people.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        for picture in &self.pictures {
            let prompt = if picture.has_choices { format!("  {}", picture.prompt) } else { String::new() };
            let other = picture.variation.map(|v| format!(", {} of it from seed {}", v.strength, v.seed));
            let other = other.unwrap_or_default();
            writeln!(out, "{}  seed {}{other}{prompt}", picture.file.display(), picture.seed)?;
        }
        let Report { family, width, height, steps, sampler, schedule, cfg_scale, reused, seconds, .. } = self;
        let seconds = format::seconds(*seconds);
        writeln!(
            out,
            "{family}, {width} x {height}, {steps} steps of {sampler} ({schedule}), scale {cfg_scale}, {seconds}"
        )?;
        if *reused > 0 {
            writeln!(out, "{reused} steps reused an earlier output of the network (--cache-mode)")?;
        }
        Ok(())
    }
}

/// Logs what happens to a network.
pub(crate) fn log(event: &Event<'_>) {
    match event {
        Event::Widened { part, from } => {
            tracing::warn!("{part} gave values that are not finite in {from}; it runs in fp32 now");
        }
        Event::Loaded(LoadedNetwork { part, provider, device, precision, origin, seconds }) => {
            let how = match origin {
                Origin::Built => "built",
                Origin::Cached => "loaded",
                Origin::Refitted => "refitted",
                Origin::Kept => "still loaded",
            };
            tracing::info!("{part} on {provider} ({device}, {precision}), {how} in {seconds:.1} s");
        }
        _ => {}
    }
}

/// `step 3 of 20, 1.25 it/s, 14 s left`: a step that is done, counted from 0.
pub(super) fn step_line(step: usize, steps: usize, pass: usize, progress: &Progress) -> String {
    let mut line = format!("step {} of {steps}", step + 1);
    if let (Some(each), Some(left)) = (progress.seconds_per_step(pass), progress.seconds_left()) {
        line += &format!(", {}, {} left", rate(each), format::seconds(left));
    }
    line
}

/// Steps for each second if there are several, else seconds for each step.
fn rate(seconds: f64) -> String {
    match seconds {
        s if s <= 0.0 => "no time".into(),
        s if s < 1.0 => format!("{} it/s", format::three_digits(1.0 / s)),
        s => format!("{} s/it", format::three_digits(s)),
    }
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn rates_are_above_one() {
        assert_eq!(rate(0.25), "4.00 it/s");
        assert_eq!(rate(2.5), "2.50 s/it");
        assert_eq!(rate(1.0), "1.00 s/it");
    }
}
