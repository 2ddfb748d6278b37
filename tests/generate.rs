//! Compares pictures of the small pipeline on every provider with diffusers (tests/generate/sd.safetensors, made by
//! tools/diffusion/pipeline.py).

#![allow(clippy::unwrap_used)]

use sdrun::{Isolation, WeightFiles, abi::NoHost, weights::SafetensorsWeights, worker::Limits};
use sdrun_diffusion::{
    latent::from_bytes,
    pipeline::{Engines, Event, Parts, Picture, Request, Resolved, generate},
    prediction::Time,
    program::Program,
    sampler::Sampler,
    schedule::Schedule,
    text::tokenizer::Tokenizer,
};
use sdrun_tests::{
    lab::{ALL, Lab},
    pipelines::tensor,
};
use std::{path::Path, time::Duration};

/// The small text encoder knows 1000 tokens. These are the ones in tools/diffusion/pipeline.py.
const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
    "truncation": null, "padding": null,
    "post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<start>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "<end>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<start>": {"id": "<start>", "ids": [900], "tokens": ["<start>"]},
                           "<end>": {"id": "<end>", "ids": [901], "tokens": ["<end>"]}}},
    "model": {"type": "WordLevel", "unk_token": "<unknown>",
        "vocab": {"a": 11, "red": 12, "round": 13, "thing": 14, "blue": 21, "<unknown>": 0, "<start>": 900, "<end>": 901}}}"#;

/// The small pipeline with weights B.
fn parts() -> Parts {
    let folder = sdrun_tiny::folder().join("sd");
    let lab = Lab::default();
    let mut parts = Parts::open(&folder.join("onnx"), &lab.paths, &NoHost).unwrap();
    parts.tokenizer = Tokenizer::json(TOKENIZER.as_bytes()).unwrap();
    let checkpoint = WeightFiles::of(folder.join("single_file/tiny_sd_B_fp16.safetensors"));
    let all = parts.encoders.iter_mut().chain([&mut parts.denoiser, &mut parts.vae_decoder]);
    all.for_each(|part| part.weights = checkpoint.clone());
    parts
}

fn request() -> Request {
    Request {
        prompt: "a red round thing".into(),
        negative: "blue".into(),
        width: Some(64),
        height: Some(64),
        steps: Some(5),
        scale: Some(5.0),
        seed: 5,
        program: Program::Diffusers,
        ..Request::default()
    }
}

fn engines(provider: &str) -> Engines {
    let mut engines = Engines::new();
    engines.wishes.order = vec![provider.into()];
    engines.wishes.isolation = Isolation::worker(Limits::all(Duration::from_secs(900)));
    engines
}

/// The pictures of a request, and each picture's latents after every step.
fn draw(parts: &Parts, request: &Resolved, provider: &str) -> (Vec<Picture>, Vec<Vec<Vec<f32>>>) {
    let lab = Lab::default();
    let mut latents: Vec<Vec<Vec<f32>>> = vec![Vec::new(); request.count];
    let mut on_provider = 0;
    let mut hear = |event: Event<'_>| match event {
        Event::Step { picture, latents: state, .. } => latents[picture].push(state.to_vec()),
        Event::Loaded { part, provider: by, .. } => {
            assert_eq!(by, provider, "{part}");
            on_provider += 1;
        }
        _ => {}
    };
    let pictures = generate(&lab.registry, parts, request, &engines(provider), &NoHost, &mut hear).unwrap();
    assert_eq!(on_provider, 3);
    (pictures, latents)
}

/// The largest difference, relative to the largest expected value.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    found.iter().zip(expected).fold(0.0f32, |far, (a, b)| far.max((a - b).abs())) / most
}

#[test]
fn pictures_are_those_of_diffusers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("generate/sd.safetensors");
    let expected = SafetensorsWeights::open(&[file]).unwrap();
    let values = |name: &str| -> Vec<f32> {
        let values = tensor(&expected, name).to_f64().unwrap();
        values.into_iter().map(|value| value as f32).collect()
    };
    let parts = parts();
    let cases = [
        ("euler", Sampler::Euler, Schedule::Linspace, Time::Fraction),
        ("euler_ancestral", Sampler::EulerAncestral, Schedule::Linspace, Time::Fraction),
        ("dpmpp_2m", Sampler::DpmPp2m, Schedule::Trailing, Time::Nearest),
        ("ddim", Sampler::Ddim, Schedule::Leading, Time::Nearest),
    ];
    for provider in ALL.iter() {
        for (name, sampler, schedule, time) in cases {
            let request = Request { sampler: Some(sampler), schedule: Some(schedule), ..request() };
            let mut request = request.resolve(&parts).unwrap();
            request.time = time;
            let (pictures, latents) = draw(&parts, &request, provider);
            let steps = values(&format!("{name}.latents"));
            assert_eq!(latents[0].len(), 5, "{provider} {name}");
            for (step, (found, expected)) in latents[0].iter().zip(steps.chunks(4 * 8 * 8)).enumerate() {
                let far = distance(found, expected);
                println!("{provider} {name} step {step}: {far:e}");
                assert!(far < 1e-4, "{provider} {name} step {step}: {far}");
            }
            let picture = values(&format!("{name}.picture"));
            assert_eq!(pictures[0].bytes.len(), picture.len());
            let off = |(found, expected): (&u8, &f32)| (f32::from(*found) - expected * 255.0).abs();
            let most = pictures[0].bytes.iter().zip(&picture).map(off).fold(0.0, f32::max);
            println!("{provider} {name} picture: {most} of 255");
            // A value that is nearly halfway between two bytes may round either way.
            assert!(most <= 0.6, "{provider} {name}: {most}");
        }
    }
}

/// Each picture has its own seed and noise, so it does not depend on the other pictures in its batch.
#[test]
fn a_batch_has_the_pictures_of_its_seeds() {
    let parts = parts();
    for sampler in [Sampler::EulerAncestral, Sampler::DpmPp2mSde] {
        let of = |seed, count| {
            let request = Request { sampler: Some(sampler), seed, count, steps: Some(3), ..request() };
            draw(&parts, &request.resolve(&parts).unwrap(), "ggml").0
        };
        let batch = of(5, 2);
        assert_eq!(batch.iter().map(|picture| picture.seed).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(batch[1], of(6, 1)[0]);
        assert_ne!(batch[0].bytes, batch[1].bytes);
        assert_eq!(from_bytes(&batch[0].bytes).len(), 3 * 64 * 64);
    }
}

/// The prompt, prompt changes during the steps, long prompts, guidance and adapters have an effect. A prompt change after
/// the last step has none.
#[test]
fn prompts_guidance_and_adapters_count() {
    let parts = parts();
    let of = |change: &dyn Fn(&mut Request)| {
        let mut request = Request { steps: Some(2), ..request() };
        change(&mut request);
        draw(&parts, &request.resolve(&parts).unwrap(), "ggml").0.remove(0).bytes
    };
    let plain = of(&|_| {});
    assert_eq!(plain, of(&|_| {}));
    assert_eq!(plain, of(&|r| r.prompt = "a [red:blue:2] round thing".into()));
    let changed: [&dyn Fn(&mut Request); 6] = [
        &|r| r.prompt = "a blue round thing".into(),
        &|r| r.prompt = "a [red:blue:1] round thing".into(),
        &|r| r.prompt = "a (red:1.5) round thing".into(),
        &|r| r.prompt = format!("a red round thing{}", " red".repeat(80)),
        &|r| r.negative = String::new(),
        &|r| r.scale = Some(1.0),
    ];
    for (index, change) in changed.into_iter().enumerate() {
        assert_ne!(plain, of(change), "{index}");
    }

    let lora = sdrun_tiny::folder().join("sd/lora/kohya.safetensors");
    let with = |strength| {
        let mut parts = self::parts();
        parts.denoiser.weights = parts.denoiser.weights.adapter(&lora, strength);
        let request = Request { steps: Some(2), ..request() }.resolve(&parts).unwrap();
        draw(&parts, &request, "ggml").0.remove(0).bytes
    };
    assert_eq!(with(0.0), plain);
    assert_ne!(with(1.0), plain);
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let parts = parts();
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = request();
        change(&mut request);
        request.resolve(&parts).unwrap_err().to_string()
    };
    assert!(refused(&|r| r.width = Some(60)).contains("take 56 or 64"));
    assert!(refused(&|r| r.steps = Some(0)).contains("0 steps"));
    assert!(refused(&|r| r.scale = Some(f64::NAN)).contains("guidance"));
    let lab = Lab::default();
    let request = Request { clip_skip: Some(2), ..request() }.resolve(&parts).unwrap();
    let error =
        generate(&lab.registry, &parts, &request, &engines("ggml"), &NoHost, &mut |_| {}).unwrap_err();
    assert!(error.to_string().starts_with("text_encoder: its graph gives no states of layer 2"), "{error}");
    assert_eq!(error.code(), sdrun::abi::ErrorCode::Unimplemented);
}
