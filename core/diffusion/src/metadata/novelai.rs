//! NovelAI's settings: a JSON object in the text `Comment`.

use super::{Error, Reading, Record, fields::Fields};
use crate::{names, sampler::Sampler};
use serde_json::Value;

/// Reads the object. `None` if another program wrote it.
pub(super) fn read(comment: Value) -> Option<Result<Reading, Error>> {
    comment.get("uc")?;
    Some(Fields::of_json("NovelAI", comment).map(settings))
}

fn settings(mut fields: Fields) -> Reading {
    // Later models have a structured prompt too, which repeats the plain one and adds those of characters.
    for (name, what) in [("v4_prompt", "prompts"), ("v4_negative_prompt", "negative prompts")] {
        let value = fields.take(name).unwrap_or_default();
        let characters = value.pointer("/caption/char_captions").and_then(Value::as_array);
        if characters.is_some_and(|characters| !characters.is_empty()) {
            fields.note(format!("the {what} of characters are not supported"));
        }
    }
    let record = Record {
        program: "NovelAI".into(),
        prompt: fields.text("prompt").unwrap_or_default(),
        negative: fields.text("uc").unwrap_or_default(),
        width: fields.size("width"),
        height: fields.size("height"),
        steps: fields.size("steps"),
        sampler: fields.parse("sampler", "a sampler that sdrun has", sampler),
        schedule: fields.schedule("noise_schedule"),
        cfg_scale: fields.real("scale"),
        cfg_rescale: fields.real("cfg_rescale").filter(|&rescale| rescale != 0.0),
        seed: fields.whole("seed"),
        denoising_strength: fields.real("strength"),
        ..Record::default()
    };
    if [&record.prompt, &record.negative]
        .iter()
        .any(|text| text.contains(['{', '[', '}', ']']) || text.contains("::"))
    {
        fields.note("the prompt weights words in NovelAI's language, which differs from A1111's");
    }
    fields.note("NovelAI does not say which checkpoint it used");
    fields.ignore(&["n_samples", "signed_hash", "request_type", "version", "uncond_scale"]);
    fields.finish(record)
}

fn sampler(name: &str) -> Option<Sampler> {
    names::sampler(name.strip_prefix("k_").unwrap_or(name)).map(|(sampler, _)| sampler)
}
