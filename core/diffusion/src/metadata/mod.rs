//! Settings in the metadata of pictures: what sdrun writes, and what it reads from its own pictures and from those of other
//! programs.
//!
//! A picture holds texts under keys. sdrun writes two: A1111's [`Infotext`] under [`PARAMETERS`], which other programs and civitai
//! read, and its own [`Record`] as JSON under [`SDRUN`]. Neither holds a path, so that a picture tells nothing about the machine.

mod a1111;
mod by_name;
mod comfyui;
mod fields;
pub mod hash;
mod infotext;
mod invokeai;
mod novelai;
mod record;
mod swarmui;

pub use crate::noise::Rng;
pub use infotext::Infotext;
pub use record::{ControlNet, Hires, Inpaint, Lora, ModelFile, Network, Record, Upscale};

use sdrun::abi;
use serde_json::Value;
use std::path::Path;

/// Key of A1111's text.
pub const PARAMETERS: &str = "parameters";
/// Key of A1111's text about what was done to a finished picture.
pub const POSTPROCESSING: &str = "postprocessing";
/// Key of sdrun's own record.
pub const SDRUN: &str = "sdrun";

const COMFYUI: &str = "prompt";
const INVOKEAI: &str = "invokeai_metadata";
const NOVELAI: &str = "Comment";
/// All keys, the most telling first.
const KEYS: [&str; 5] = [SDRUN, PARAMETERS, COMFYUI, INVOKEAI, NOVELAI];

/// What a picture says about how it was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// The settings that were understood.
    pub record: Record,
    /// The settings that were not understood, and how the result may differ, one sentence each.
    pub unread: Vec<String>,
}

/// Why a picture's settings cannot be read: the end of a sentence that starts with the file's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There are no settings.
    #[error("has no settings that sdrun knows: its metadata {}", listed(keys))]
    Absent {
        /// The keys of the picture's texts.
        keys: Vec<String>,
    },
    /// The settings are damaged, or too unlike any that sdrun knows.
    #[error("has settings of {program} that cannot be read: {why}")]
    Unreadable {
        /// The program that wrote them.
        program: &'static str,
        /// Why.
        why: String,
    },
}

fn listed(keys: &[String]) -> String {
    if keys.is_empty() { "is empty".into() } else { format!("has {}", keys.join(", ")) }
}

impl Error {
    /// The error for a picture file: `NotFound` without settings, `DataLoss` with damaged ones.
    pub fn of_file(self, file: &Path) -> abi::Error {
        let code = match self {
            Error::Absent { .. } => abi::ErrorCode::NotFound,
            Error::Unreadable { .. } => abi::ErrorCode::DataLoss,
        };
        abi::Error::new(code, format!("{} {self}", file.display())).with_file(file)
    }
}

/// Reads settings from a picture's keys and texts: those of sdrun, else of A1111, Forge, stable-diffusion.cpp or SwarmUI, else of
/// ComfyUI, InvokeAI or NovelAI.
///
/// # Errors
/// If no program's settings can be read.
pub fn read_record(texts: &[(String, String)]) -> Result<Reading, Error> {
    let mut failed = Vec::new();
    for (key, text) in KEYS.iter().flat_map(|known| texts.iter().filter(move |(key, _)| key == known)) {
        match read(key, text) {
            None => {}
            Some(Err(error)) => failed.push(error),
            Some(Ok(mut reading)) => {
                reading.unread.extend(failed.iter().map(|error| format!("the picture {error}")));
                return Ok(reading);
            }
        }
    }
    let absent = || Error::Absent { keys: texts.iter().map(|(key, _)| format!("`{key}`")).collect() };
    Err(failed.into_iter().next().unwrap_or_else(absent))
}

/// Reads one text. `None` if it holds no settings.
fn read(key: &str, text: &str) -> Option<Result<Reading, Error>> {
    let json = || serde_json::from_str(text).ok();
    match key {
        SDRUN => Some(record::read(text)),
        PARAMETERS => match json().and_then(|json: Value| json.get("sui_image_params").cloned()) {
            Some(settings) => Some(swarmui::read(settings)),
            None => (!text.trim().is_empty()).then(|| Ok(a1111::read(text))),
        },
        // Other programs have a plain text under this key.
        COMFYUI => comfyui::read(&json()?),
        INVOKEAI => Some(invokeai::read(text)),
        NOVELAI => novelai::read(json()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
