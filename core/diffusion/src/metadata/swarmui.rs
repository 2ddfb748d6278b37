//! SwarmUI's settings: a JSON object under A1111's key.

use super::{Error, Lora, ModelFile, Reading, Record, fields::Fields};
use crate::noise::Variation;
use serde_json::Value;

/// Reads the object `sui_image_params`.
pub(super) fn read(settings: Value) -> Result<Reading, Error> {
    let mut fields = Fields::of_json("SwarmUI", settings)?;
    let (sampler, in_name) = match fields.sampler("comfyuisampler") {
        (None, _) => fields.sampler("sampler"),
        found => found,
    };
    let schedule = fields.schedule("comfyuischeduler").or_else(|| fields.schedule("scheduler"));
    let record = Record {
        program: fields
            .text("swarm_version")
            .map_or("SwarmUI".into(), |version| format!("SwarmUI {version}")),
        prompt: fields.text("prompt").unwrap_or_default(),
        negative: fields.text("negativeprompt").unwrap_or_default(),
        width: fields.size("width"),
        height: fields.size("height"),
        steps: fields.size("steps"),
        sampler,
        schedule: schedule.or(in_name),
        cfg_scale: fields.real("cfgscale"),
        guidance: fields.real("fluxguidancescale"),
        seed: fields.whole("seed"),
        variation: variation(&mut fields),
        denoising_strength: fields.real("initimagecreativity"),
        // Counted from the end, as in ComfyUI: the last layer is -1.
        clip_skip: fields.parse("clipstopatlayer", "a layer", |text| text.strip_prefix('-')?.parse().ok()),
        model: fields.text("model").map(|name| ModelFile::new(&name, None)),
        vae: fields.text("vae").map(|name| ModelFile::new(&name, None)),
        loras: loras(&mut fields),
        ..Record::default()
    };
    fields.ignore(&["images", "aspectratio", "sidelength", "personalnote"]);
    Ok(fields.finish(record))
}

fn variation(fields: &mut Fields) -> Option<Variation> {
    let (seed, strength) = (fields.whole("variationseed"), fields.real("variationseedstrength"));
    Some(Variation { seed: seed?, strength: strength? })
}

fn loras(fields: &mut Fields) -> Vec<Lora> {
    let (names, weights) = (strings(fields.take("loras")), strings(fields.take("loraweights")));
    let lora = |(at, name): (usize, &String)| {
        let strength = match weights.get(at) {
            None => 1.0,
            Some(weight) => fields.known("loraweights", weight, "a number", |text| {
                text.parse().ok().filter(|w: &f32| w.is_finite())
            })?,
        };
        Some(Lora::new(name, None, strength, strength))
    };
    names.iter().enumerate().filter_map(lora).collect()
}

/// The texts of a list, or of a text with commas.
fn strings(value: Option<Value>) -> Vec<String> {
    match value {
        Some(Value::Array(values)) => values
            .iter()
            .map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_string))
            .collect(),
        Some(Value::String(text)) => {
            text.split(',').map(|part| part.trim().to_string()).filter(|part| !part.is_empty()).collect()
        }
        _ => Vec::new(),
    }
}
