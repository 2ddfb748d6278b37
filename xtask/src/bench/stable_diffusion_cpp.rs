//! ggml against stable-diffusion.cpp, which is built on ggml too: the SD 1.5 networks at 512x512.

use super::{
    Lab, Line, Outcome, ggml, median,
    runs::{Subject, bench_row},
};
use crate::workspace::output;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{env, ffi::OsString, path::PathBuf, process::Command};

/// Names the executable `sd-cli` of a stable-diffusion.cpp that was built for this machine.
const PROGRAM: &str = "SDRUN_SD_CLI";
/// Names an SD 1.5 checkpoint, or a folder in diffusers' layout. Times do not depend on the weights in it.
const MODEL: &str = "SDRUN_SD_MODEL";

const UNET: Subject =
    Subject { name: "sd15/unet", shapes: &["sample=1,4,64,64", "encoder_hidden_states=1,77,768"], rounds: 2 };
const DECODER: Subject =
    Subject { name: "sd15/vae-decoder", shapes: &["latent_sample=1,4,64,64"], rounds: UNET.rounds };
/// Our precision, the type of its weights, and the target for its time divided by ours.
const PRECISIONS: [(&str, &str, &str); 2] = [("fp32", "f32", "≥ 3.3"), ("bf16", "bf16", "≥ 6")];

/// Runs both in turns. A round is one picture of stable-diffusion.cpp and several runs of ours; our fastest run counts.
pub(super) fn beside(lab: &Lab<'_>) -> Outcome {
    let Some(theirs) = Theirs::find(lab, env::var_os(MODEL)) else { return Ok((Value::Null, Vec::new())) };
    let (mut raw, mut lines) = (Vec::new(), Vec::new());
    for (precision, type_, aim) in PRECISIONS {
        let (mut steps, mut decodes) = (Times::default(), Times::default());
        for round in 1..=UNET.rounds {
            let (step, decode) = theirs.picture(type_)?;
            for (times, subject, seconds) in [(&mut steps, UNET, step), (&mut decodes, DECODER, decode)] {
                let ours = ggml::fastest(&bench_row(lab, &subject, "ggml", precision)?)?.0 / 1e3;
                let name = subject.name;
                println!(
                    "   {name} {precision} round {round}: ggml {ours:.2} s, stable-diffusion.cpp {seconds:.2} s"
                );
                times.ours.push(ours);
                times.theirs.push(seconds);
            }
        }
        for (subject, Times { ours, theirs }) in [(UNET, steps), (DECODER, decodes)] {
            let ratios: Vec<f64> = theirs.iter().zip(&ours).map(|(theirs, ours)| theirs / ours).collect();
            let (a, b, name) = (median(&theirs), median(&ours), subject.name);
            lines.push(Line::new(
                format!("{name} {precision}: stable-diffusion.cpp / ggml, median of {} rounds", ratios.len()),
                format!("{a:.2} s / {b:.2} s = {:.1}", median(&ratios)),
                aim,
            ));
            raw.push(json!({ "model": name, "precision": precision, "ggml_s": ours, "theirs_s": theirs }));
        }
    }
    Ok((json!(raw), lines))
}

#[derive(Default)]
struct Times {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

pub(super) struct Theirs {
    program: OsString,
    model: OsString,
    threads: usize,
    /// Where it writes pictures; nothing reads them.
    picture: PathBuf,
}

impl Theirs {
    /// Steps of its sampler.
    pub(super) const STEPS: usize = 2;

    /// The program, if there is one, with this checkpoint.
    pub(super) fn find(lab: &Lab<'_>, model: Option<OsString>) -> Option<Self> {
        let (Some(program), Some(model)) = (env::var_os(PROGRAM), model) else {
            println!(
                "   not compared with stable-diffusion.cpp: {PROGRAM} names no program, or {MODEL} no checkpoint"
            );
            return None;
        };
        let picture = lab.workspace.target.join("bench/picture.png");
        Some(Theirs { program, model, threads: lab.threads, picture })
    }

    /// Seconds per step, without guidance by a second prompt, and seconds to decode.
    fn picture(&self, type_: &str) -> Result<(f64, f64)> {
        let mut command = Command::new(&self.program);
        self.arguments(&mut command, type_, &["-p", "a cat", "--cfg-scale", "1"]);
        let log = output(&mut command)?;
        Ok((self.step(&log)?, told(&log, "decode_first_stage completed, taking ")?))
    }

    /// Adds a command that draws a picture with guidance.
    pub(super) fn whole(&self, command: &mut Command, type_: &str) {
        command.arg(&self.program);
        let prompt = ["-p", "a lighthouse in the fog", "-n", "blurry", "--cfg-scale", "7"];
        self.arguments(command, type_, &prompt);
    }

    fn arguments(&self, command: &mut Command, type_: &str, prompt: &[&str]) {
        command.arg("-m").arg(&self.model).args(["--type", type_]).args(prompt);
        command.args(["-W", "512", "-H", "512", "-s", "1", "--steps", &Self::STEPS.to_string()]);
        command.args(["-t", &self.threads.to_string(), "-o"]).arg(&self.picture);
    }

    /// Seconds per step in its log.
    pub(super) fn step(&self, log: &str) -> Result<f64> {
        Ok(told(log, "sampling completed, taking ")? / Self::STEPS as f64)
    }
}

/// The number of seconds after `words` in its log.
fn told(log: &str, words: &str) -> Result<f64> {
    let number = log.split(words).nth(1).and_then(|rest| rest.split('s').next());
    number
        .and_then(|number| number.trim().parse().ok())
        .with_context(|| format!("stable-diffusion.cpp did not print `{words}…`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_in_its_log() {
        let log = "[INFO ] x.cpp:1 - sampling completed, taking 86.56s\n[INFO ] decode_first_stage completed, taking 50.41s\n";
        assert_eq!(told(log, "sampling completed, taking ").unwrap(), 86.56);
        assert_eq!(told(log, "decode_first_stage completed, taking ").unwrap(), 50.41);
        assert!(told(log, "upscaling completed, taking ").is_err());
    }
}
