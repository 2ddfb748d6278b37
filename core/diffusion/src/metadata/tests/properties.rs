//! Properties of all records and of all texts.

use super::{GRAPH, lora, of, parameters};
use crate::{
    guidance::Rule,
    metadata::{
        ControlNet, Hires, Inpaint, ModelFile, Network, PARAMETERS, Reading, Record, Rng, SDRUN, Upscale,
        read_record,
    },
    noise::Variation,
    pipeline::{Content, Syntax},
    prediction::Prediction,
    program::Program,
    sampler::Sampler,
    schedule::Schedule,
};
use proptest::{option, prelude::*, sample::select};
use serde_json::Value;

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9][a-zA-Z0-9 ._-]{0,12}[a-zA-Z0-9]".prop_map(|name| ModelFile::new(&name, None).name)
}

fn file() -> impl Strategy<Value = ModelFile> {
    (name(), option::of("[0-9a-f]{10}")).prop_map(|(name, hash)| ModelFile { name, hash })
}

/// A record with every field that A1111's text has.
fn record() -> impl Strategy<Value = Record> {
    // Lines without spaces at their ends, which A1111 removes.
    let texts = (
        "[a-zäß猫(][a-zäß猫 ,.:()\"]{0,30}[a-z猫)](\n[a-z猫)]{1,5})?",
        "([a-z猫]([a-z ,:]{0,20}[a-z])?(\n[a-z][a-z ,:]{0,9}[a-z])?)?",
    );
    let sizes = (1..5000usize, 1..5000usize, 1..200usize, any::<u64>(), option::of(2..12usize));
    let numbers = (0.0..30.0, option::of(0.0..10.0), option::of(0.0..1.0));
    let kinds =
        (select(Sampler::ALL), select(Schedule::ALL), select(vec![None, Some(Rng::Cpu), Some(Rng::Nv)]));
    let lora = (name(), "[0-9a-f]{12}", -2.0f32..2.0, -2.0f32..2.0)
        .prop_map(|(name, hash, strength, text)| lora(&name, Some(&hash), strength, text));
    let embedding = (name(), "[0-9a-f]{12}").prop_map(|(name, hash)| ModelFile { name, hash: Some(hash) });
    let net = (name(), option::of("[0-9a-f]{8}"), 0.0..2.0, 0.0..1.0, 0.0..1.0)
        .prop_map(|(name, hash, strength, start, end)| ControlNet { name, hash, strength, start, end });
    let hires = (1.0..4.0, option::of(1..99usize), name(), option::of(select(Schedule::ALL))).prop_map(
        |(scale, steps, upscaler, schedule)| Hires {
            scale: Some(scale),
            steps,
            upscaler: Some(upscaler),
            schedule,
            ..Hires::default()
        },
    );
    let lists = (
        prop::collection::vec(lora, 0..3),
        prop::collection::vec(embedding, 0..3),
        prop::collection::vec(net, 0..3),
        option::of(hires),
    );
    let contents = vec![Content::Original, Content::Surroundings, Content::Noise, Content::Nothing];
    let inpaint = (0.1..64.0, select(contents), option::of(0..256u32))
        .prop_map(|(blur, content, only_masked)| Inpaint { blur, content, only_masked });
    let upscale = (name(), 1.0..64.0).prop_map(|(name, factor)| Upscale { name, hash: None, factor });
    let refiner = option::of((file(), 0.0..1.0));
    let variation = option::of((any::<u64>(), 0.0..1.0))
        .prop_map(|variation| variation.map(|(seed, strength)| Variation { seed, strength }));
    let files = (option::of(file()), option::of(file()), option::of(inpaint), refiner, option::of(upscale));
    (texts, sizes, variation, numbers, kinds, lists, files).prop_map(
        |(texts, sizes, variation, numbers, kinds, lists, files)| {
            let (loras, embeddings, controlnets, mut hires) = lists;
            if let Some(hires) = &mut hires {
                hires.denoising_strength = numbers.2;
            }
            Record {
                prompt: texts.0,
                negative: texts.1,
                width: Some(sizes.0),
                height: Some(sizes.1),
                steps: Some(sizes.2),
                seed: Some(sizes.3),
                variation,
                clip_skip: sizes.4,
                cfg_scale: Some(numbers.0),
                guidance: numbers.1,
                denoising_strength: numbers.2.filter(|_| hires.is_none()),
                sampler: Some(kinds.0),
                schedule: Some(kinds.1),
                rng: kinds.2,
                loras: unique(loras, |lora| &lora.name),
                embeddings: unique(embeddings, |file| &file.name),
                controlnets,
                hires,
                model: files.0,
                vae: files.1,
                inpaint: files.2,
                refiner: files.3.as_ref().map(|(file, _)| file.clone()),
                refiner_start: files.3.as_ref().map(|(_, start)| *start),
                upscale: files.4,
                ..Record::of_sdrun()
            }
        },
    )
}

/// Names of lists are the keys of hashes.
fn unique<T>(mut list: Vec<T>, name: impl Fn(&T) -> &String) -> Vec<T> {
    list.sort_by(|a, b| name(a).cmp(name(b)));
    list.dedup_by(|a, b| name(a) == name(b));
    list
}

proptest! {
    #[test]
    fn records_survive_as_json(record in record(), precision in name(), prediction in select(vec![
        Prediction::Noise, Prediction::Velocity, Prediction::Flow, Prediction::Edm { data: 0.3 },
    ])) {
        let record = Record {
            cfg_rescale: Some(0.7),
            tile: Some(256),
            guidance_rule: Some(Rule::Projected { parallel: 0.5, limit: 1.0 }),
            guidance_interval: Some((0.1, 0.9)),
            syntax: Some(Syntax::ComfyUi),
            seed_like: Some(Program::Diffusers),
            prediction: Some(prediction),
            text_encoders: vec![ModelFile::new("t5", None)],
            networks: vec![Network { part: "unet".into(), provider: "p".into(), device: "GPU 0: x".into(), precision }],
            ..record
        };
        prop_assert_eq!(of(SDRUN, &record.to_json()), Reading { record, unread: vec![] });
    }

    #[test]
    fn records_survive_as_text(record in record()) {
        let Reading { record: read, unread } = parameters(&record.infotext().to_string());
        prop_assert_eq!(unread, Vec::<String>::new());
        prop_assert_eq!(read, record);
    }

    #[test]
    fn no_text_panics(key in select(vec![SDRUN, PARAMETERS, "prompt", "invokeai_metadata", "Comment"]), text in "\\PC*") {
        let _ = read_record(&[(key.into(), text)]);
    }

    #[test]
    fn no_settings_panic(values in prop::collection::vec(("[A-Z][a-z]{1,9}|Size|Sampler|Hires upscale|ControlNet 0|Lora hashes|RNG", "\\PC{0,20}"), 3..9)) {
        let line: Vec<String> = values.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        parameters(&format!("a <lora:b:1> cat\n{}", line.join(", ")));
    }

    /// JSON of any kind, also with values of the wrong types and links to anywhere.
    #[test]
    fn no_json_panics(at in any::<prop::sample::Index>(), value in json(), which in 0..4usize) {
        let (key, text) = [
            ("prompt", GRAPH),
            ("invokeai_metadata", r#"{"model":{"name":"a"},"loras":[{"model":{"name":"b"},"weight":1}],"controlnets":[{"control_model":{}}],"seed":1}"#),
            ("Comment", r#"{"uc":"","v4_prompt":{"caption":{"char_captions":[]}},"sampler":"k_euler","seed":7}"#),
            (PARAMETERS, r#"{"sui_image_params":{"loras":["a"],"loraweights":[1],"clipstopatlayer":-2,"seed":1}}"#),
        ][which];
        let mut json: Value = serde_json::from_str(text).unwrap();
        let mut places = Vec::new();
        pointers(&json, String::new(), &mut places);
        *json.pointer_mut(&places[at.index(places.len())]).unwrap() = value;
        let _ = read_record(&[(key.into(), json.to_string())]);
    }
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}|[0-9]{1,2}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::hash_map("class_type|inputs|model|[0-9]", inner, 0..3)
                .prop_map(|map| map.into_iter().collect()),
        ]
    })
}

/// The places of all values inside a value.
fn pointers(json: &Value, place: String, places: &mut Vec<String>) {
    match json {
        Value::Object(map) => {
            map.iter().for_each(|(key, value)| pointers(value, format!("{place}/{key}"), places))
        }
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(at, value)| pointers(value, format!("{place}/{at}"), places))
        }
        _ => {}
    }
    places.push(place);
}
