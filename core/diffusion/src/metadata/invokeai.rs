//! InvokeAI's settings: a JSON object in the text `invokeai_metadata`.

use super::{ControlNet, Error, Lora, ModelFile, Reading, Record, Rng, fields::Fields};
use crate::{names, sampler::Sampler, schedule::Schedule};
use serde_json::Value;

/// Reads the object.
pub(super) fn read(text: &str) -> Result<Reading, Error> {
    let json = serde_json::from_str(text)
        .map_err(|why| Error::Unreadable { program: "InvokeAI", why: why.to_string() })?;
    let mut fields = Fields::of_json("InvokeAI", json)?;
    let (sampler, schedule) = fields.parse("scheduler", "a sampler that sdrun has", scheduler).unzip();
    let version = fields.text("app_version").map(|version| format!(" {version}")).unwrap_or_default();
    let list = |value: Option<Value>| value.and_then(|value| value.as_array().cloned()).unwrap_or_default();
    let record = Record {
        program: format!("InvokeAI{version}"),
        prompt: fields.text("positive_prompt").unwrap_or_default(),
        negative: fields.text("negative_prompt").unwrap_or_default(),
        width: fields.size("width"),
        height: fields.size("height"),
        steps: fields.size("steps"),
        sampler,
        schedule: schedule.flatten(),
        cfg_scale: fields.real("cfg_scale"),
        cfg_rescale: fields.real("cfg_rescale_multiplier").filter(|&rescale| rescale != 0.0),
        guidance: fields.real("guidance"),
        seed: fields.whole("seed"),
        rng: fields.parse("rand_device", "noise that sdrun has", |name| (name == "cpu").then_some(Rng::Cpu)),
        // It counts the layers that are left out.
        clip_skip: fields
            .size("clip_skip")
            .filter(|&layers| layers > 0)
            .map(|layers| layers.saturating_add(1)),
        denoising_strength: fields.real("strength"),
        model: fields.take("model").and_then(|model| file(&model)),
        vae: fields.take("vae").and_then(|vae| file(&vae)),
        loras: list(fields.take("loras")).iter().filter_map(|value| lora(value, &mut fields)).collect(),
        controlnets: list(fields.take("controlnets"))
            .iter()
            .filter_map(|value| controlnet(value, &mut fields))
            .collect(),
        ..Record::default()
    };
    for style in ["positive_style_prompt", "negative_style_prompt"] {
        let text = fields.text(style).unwrap_or_default();
        if !text.is_empty() && text != record.prompt && text != record.negative {
            fields.note(format!("`{style}: {text}` is not supported"));
        }
    }
    if [&record.prompt, &record.negative].iter().any(|text| text.contains(['+']) || text.contains(")-")) {
        fields.note("the prompt may weight words in InvokeAI's language, which differs from A1111's");
    }
    fields.ignore(&["generation_mode", "seamless_x", "seamless_y"]);
    Ok(fields.finish(record))
}

/// A sampler and its schedule. `_k` at the end means Karras; without it, the model's own configuration decides.
fn scheduler(name: &str) -> Option<(Sampler, Option<Schedule>)> {
    let (sampler, schedule) = match name.strip_suffix("_k") {
        Some(name) => (name, Some(Schedule::Karras)),
        None => (name, None),
    };
    let sampler = match sampler {
        "kdpm_2" => Some(Sampler::Dpm2),
        "kdpm_2_a" => Some(Sampler::Dpm2Ancestral),
        name => names::sampler(name).map(|(sampler, _)| sampler),
    };
    Some((sampler?, schedule))
}

/// A model's name. InvokeAI's hashes are of another kind.
fn file(model: &Value) -> Option<ModelFile> {
    let name = ["name", "model_name"].iter().find_map(|key| model.get(key)?.as_str())?;
    Some(ModelFile::new(name, None))
}

fn lora(value: &Value, fields: &mut Fields) -> Option<Lora> {
    let found = ["model", "lora"]
        .iter()
        .find_map(|key| file(value.get(key)?))
        .zip(value.get("weight").and_then(Value::as_f64));
    if found.is_none() {
        fields.note(format!("the adapter `{value}` is not understood"));
    }
    let (ModelFile { name, .. }, weight) = found?;
    Some(Lora::new(&name, None, weight as f32, weight as f32))
}

fn controlnet(value: &Value, fields: &mut Fields) -> Option<ControlNet> {
    let number = |name: &str| value.get(name).and_then(Value::as_f64);
    let Some(file) = value.get("control_model").and_then(file) else {
        fields.note(format!("the ControlNet `{value}` is not understood"));
        return None;
    };
    Some(ControlNet {
        name: file.name,
        hash: None,
        strength: number("control_weight").unwrap_or(1.0),
        start: number("begin_step_percent").unwrap_or(0.0),
        end: number("end_step_percent").unwrap_or(1.0),
    })
}
