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

pub use infotext::Infotext;
pub use record::{ControlNet, Hires, Inpaint, Lora, ModelFile, Network, Record, Rng};

use sdrun::abi;
use serde_json::Value;

/// Key of A1111's text.
pub const PARAMETERS: &str = "parameters";
/// Key of sdrun's own record.
pub const SDRUN: &str = "sdrun";

/// What a picture says about how it was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// The settings that were understood.
    pub record: Record,
    /// The settings that were not understood, and how the result may differ, one sentence each.
    pub unread: Vec<String>,
}

/// Why a picture's settings cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There are no settings.
    #[error("it has no settings that sdrun knows: {}", if .keys.is_empty() { "its metadata is empty".into() } else { format!("its metadata has {}", .keys.join(", ")) })]
    Absent {
        /// The keys of the picture's texts.
        keys: Vec<String>,
    },
    /// The settings are damaged, or too unlike any that sdrun knows.
    #[error("its settings of {program} cannot be read: {why}")]
    Unreadable {
        /// The program that wrote them.
        program: &'static str,
        /// Why.
        why: String,
    },
}

impl From<Error> for abi::Error {
    fn from(error: Error) -> Self {
        let code = match error {
            Error::Absent { .. } => abi::ErrorCode::NotFound,
            Error::Unreadable { .. } => abi::ErrorCode::DataLoss,
        };
        abi::Error::new(code, error.to_string())
    }
}

/// Reads settings from a picture's keys and texts: those of sdrun, else of A1111, Forge, stable-diffusion.cpp or SwarmUI, else of
/// ComfyUI, InvokeAI or NovelAI.
///
/// # Errors
/// If no program's settings can be read.
pub fn read_record(texts: &[(String, String)]) -> Result<Reading, Error> {
    let mut failed = Vec::new();
    for (key, text) in
        texts.iter().filter(|(key, _)| key == SDRUN).chain(texts.iter().filter(|(key, _)| key != SDRUN))
    {
        match read(key, text) {
            None => {}
            Some(Err(error)) => failed.push(error),
            Some(Ok(mut reading)) => {
                reading.unread.extend(failed.iter().map(ToString::to_string));
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
        "prompt" => comfyui::read(&json()?),
        "invokeai_metadata" => Some(invokeai::read(text)),
        "Comment" => novelai::read(json()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
