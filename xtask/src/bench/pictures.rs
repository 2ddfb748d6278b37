//! Whole pictures of SD 1.5 by other programs, from the checkpoint of `bench generate`.

use super::{
    Lab,
    generate::{STEPS, whole},
    stable_diffusion_cpp::Theirs,
};
use crate::{
    python::TORCH_PYTHON,
    workspace::{output, run},
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

const STABLE_DIFFUSION_CPP: &str = "stable-diffusion.cpp";
const GENAI: &str = "OpenVINO GenAI";
const DIFFUSERS: &str = "diffusers on PyTorch";

/// The programs that this machine has.
pub(super) struct Peers {
    /// A Python with torch, diffusers and the others that `pictures.py` names.
    python: Option<OsString>,
    script: PathBuf,
    /// Where the checkpoint is, in all its layouts.
    folder: PathBuf,
    stable_diffusion_cpp: Option<Theirs>,
    threads: usize,
}

/// A measured picture.
pub(super) struct Drawn {
    /// Seconds of a whole picture, as in [`whole`].
    pub(super) seconds: f64,
    pub(super) peak_bytes: f64,
    pub(super) raw: Value,
}

impl Drawn {
    fn new(raw: Value, steps: usize, step: Option<f64>) -> Result<Self> {
        let number = |name: &str| raw[name].as_f64().with_context(|| format!("no {name}"));
        let step = step.map_or_else(|| number("step_s"), Ok)?;
        let seconds = whole(number("seconds")?, steps, step);
        Ok(Drawn { seconds, peak_bytes: number("peak_bytes")?, raw })
    }
}

impl Peers {
    /// Finds programs, and says which are missing. Writes the checkpoint in the layouts they need.
    pub(super) fn find(lab: &Lab<'_>, folder: &Path) -> Self {
        let script = lab.workspace.root.join("xtask/python/pictures.py");
        let mut peers = Peers {
            python: env::var_os(TORCH_PYTHON),
            script,
            folder: folder.to_owned(),
            stable_diffusion_cpp: Theirs::find(lab, Some(folder.join("sd15.safetensors").into())),
            threads: lab.threads,
        };
        if let Err(why) = peers.prepare() {
            println!("   not compared with {GENAI} and {DIFFUSERS}: {why:#}");
            peers.python = None;
        }
        peers
    }

    fn prepare(&self) -> Result<()> {
        let python = self.python.as_ref().with_context(|| format!("{TORCH_PYTHON} names no Python"))?;
        if self.folder.join("openvino/model_index.json").is_file() {
            return Ok(());
        }
        let mut command = Command::new(python);
        command.arg(&self.script).arg("prepare").arg(self.folder.join("sd15.safetensors")).arg(&self.folder);
        run(&mut command)
    }

    /// The targets for their time divided by ours.
    pub(super) fn aims(precision: &str) -> [(&'static str, &'static str); 3] {
        let is_full = precision == "fp32";
        [
            (STABLE_DIFFUSION_CPP, if is_full { "≥ 4" } else { "≥ 6" }),
            (GENAI, "≥ 1"),
            (DIFFUSERS, if is_full { "" } else { "≥ 2" }),
        ]
    }

    /// A picture by each.
    pub(super) fn draw(&self, precision: &str) -> Vec<(&'static str, Drawn)> {
        let all = [
            (STABLE_DIFFUSION_CPP, self.by_stable_diffusion_cpp(precision)),
            (GENAI, self.by_python("genai", precision)),
            (DIFFUSERS, self.by_python("diffusers", precision)),
        ];
        let mut drawn = Vec::new();
        for (name, one) in all {
            match one {
                Some(Ok(one)) => drawn.push((name, one)),
                Some(Err(why)) => println!("   not compared with {name}: {why:#}"),
                None => {}
            }
        }
        drawn
    }

    fn by_python(&self, what: &str, precision: &str) -> Option<Result<Drawn>> {
        let mut command = Command::new(self.python.as_ref()?);
        command.arg(&self.script).arg(what).arg(&self.folder).arg(precision);
        command.args([STEPS, self.threads].map(|number| number.to_string()));
        Some(output(&mut command).and_then(|json| Drawn::new(last_line(&json)?, STEPS, None)))
    }

    /// It runs two steps: they take half a minute each.
    fn by_stable_diffusion_cpp(&self, precision: &str) -> Option<Result<Drawn>> {
        let (theirs, python) = (self.stable_diffusion_cpp.as_ref()?, self.python.as_ref()?);
        let mut command = Command::new(python);
        command.arg(&self.script).arg("watch");
        theirs.whole(&mut command, if precision == "fp32" { "f32" } else { precision });
        let measured = output(&mut command).and_then(|json| last_line(&json));
        Some(measured.and_then(|measured| {
            let step = theirs.step(measured["words"].as_str().unwrap_or_default())?;
            let raw = json!({ "seconds": measured["seconds"], "peak_bytes": measured["peak_bytes"], "step_s": step });
            Drawn::new(raw, Theirs::STEPS, Some(step))
        }))
    }
}

/// The JSON in the last line. Libraries print more before it.
fn last_line(text: &str) -> Result<Value> {
    Ok(serde_json::from_str(text.trim().lines().last().unwrap_or_default())?)
}
