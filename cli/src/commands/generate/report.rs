//! What `sdrun generate` reports.

use crate::format;
use sdrun_diffusion::{
    family::Family,
    metadata,
    pipeline::{Progress, Resolved},
};
use serde::Serialize;
use std::{
    io::{self, Write},
    path::PathBuf,
};

/// The report at the end.
#[derive(Serialize)]
pub(super) struct Report {
    family: &'static str,
    width: usize,
    height: usize,
    steps: usize,
    sampler: &'static str,
    schedule: &'static str,
    cfg_scale: f64,
    networks: Vec<Network>,
    pub(super) pictures: Vec<Drawn>,
    pub(super) seconds: f64,
}

/// A network that was loaded.
#[derive(Clone, Serialize)]
pub(super) struct Network {
    pub(super) part: String,
    pub(super) provider: String,
    pub(super) device: String,
    pub(super) precision: String,
    pub(super) built: bool,
    pub(super) seconds: f64,
}

/// A picture that was written.
#[derive(Clone, Serialize)]
pub(super) struct Drawn {
    pub(super) file: PathBuf,
    pub(super) seed: u64,
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
            family: family.title,
            width: request.width,
            height: request.height,
            steps: request.steps,
            sampler: request.sampler.name(),
            schedule: request.schedule.name(),
            cfg_scale: request.guidance.scale,
            networks: Vec::new(),
            pictures: Vec::new(),
            seconds: 0.0,
        }
    }

    /// Adds a network, unless it was loaded in the same way before.
    pub(super) fn add(&mut self, network: &Network) {
        if !self.networks.iter().any(|known| known.record() == network.record()) {
            self.networks.push(network.clone());
        }
    }

    /// The report for people.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        for picture in &self.pictures {
            let prompt = if picture.has_choices { format!("  {}", picture.prompt) } else { String::new() };
            writeln!(out, "{}  seed {}{prompt}", picture.file.display(), picture.seed)?;
        }
        let Report { family, width, height, steps, sampler, schedule, cfg_scale, seconds, .. } = self;
        let seconds = format::seconds(*seconds);
        writeln!(
            out,
            "{family}, {width} x {height}, {steps} steps of {sampler} ({schedule}), scale {cfg_scale}, {seconds}"
        )
    }
}

impl Network {
    /// What a picture's metadata say about it.
    pub(super) fn record(&self) -> metadata::Network {
        metadata::Network {
            part: self.part.clone(),
            provider: self.provider.clone(),
            device: self.device.clone(),
            precision: self.precision.clone(),
        }
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
