//! Compares pictures of the small pipeline on every provider with diffusers (tests/generate/sd.safetensors, made by
//! tools/diffusion/pipeline.py).

#![allow(clippy::unwrap_used)]

#[path = "generate/upscale.rs"]
mod upscale;

use image::{GrayImage, Luma, Rgb, RgbImage};
use sdrun::{
    BuildOptions, HostTensor, Isolation, Model, Tensors, WeightFiles, Wishes,
    abi::{Device, NoHost, Precision},
    graph::{OpenOptions, WeightsPolicy},
    weights::{SafetensorsWeights, WeightStack},
    worker::Limits,
};
use sdrun_diffusion::{
    family::{Family, Vocabulary},
    latent::from_bytes,
    metadata::{Infotext, Record},
    noise::Variation,
    picture::{Fit, Mask},
    pipeline::{
        Content, Control, Engines, Event, Files, Hires, Inpaint, Kept, LoadedNetwork, Origin, Part, Parts,
        Picture, Progress, Request, Resolved, Start, Upscale, generate, plan,
    },
    prediction::{Prediction, Time},
    program::Program,
    sampler::Sampler,
    schedule::Schedule,
    text::tokenizer::Tokenizer,
};
use sdrun_tests::{
    lab::{ALL, Lab, device_of},
    pipelines::tensor,
    place::Place,
};
use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

/// A tokenizer whose ids are those in tools/diffusion/pipeline.py, with marks around the text.
fn tokenizer(before: &str, after: &str) -> String {
    let mark = |id: &str| format!(r#"{{"SpecialToken": {{"id": "{id}", "type_id": 0}}}}"#);
    let text = |name: &str| format!(r#"{{"Sequence": {{"id": "{name}", "type_id": 0}}}}"#);
    let marks = |before: &str| if before.is_empty() { Vec::new() } else { vec![mark(before)] };
    let single = [marks(before), vec![text("A")], marks(after)].concat().join(", ");
    format!(
        r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {{"type": "Whitespace"}}, "decoder": null,
        "truncation": null, "padding": null,
        "post_processor": {{"type": "TemplateProcessing", "single": [{single}], "pair": [{}, {}], "special_tokens": {{
            "<start>": {{"id": "<start>", "ids": [2046], "tokens": ["<start>"]}},
            "<end>": {{"id": "<end>", "ids": [2047], "tokens": ["<end>"]}},
            "</s>": {{"id": "</s>", "ids": [1], "tokens": ["</s>"]}}}}}},
        "model": {{"type": "WordLevel", "unk_token": "<unknown>", "vocab": {{"a": 11, "red": 12, "round": 13, "thing": 14,
            "blue": 21, "<unknown>": 5, "</s>": 1, "<start>": 2046, "<end>": 2047}}}}}}"#,
        text("A"),
        text("B")
    )
}

fn clip_tokenizer() -> String {
    tokenizer("<start>", "<end>")
}

/// A folder of small ONNX models, with the tokenizers of tools/diffusion/pipeline.py.
fn open_tiny(folder: &Path, lab: &Lab) -> Parts {
    let vocabulary = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    fs::write(vocabulary.path(), tokenizer("", "</s>")).unwrap();
    let gemma = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/diffusion/testdata/text/gemma.json");
    let files = Files {
        model: Some(folder.into()),
        t5_vocabulary: Some(vocabulary.path().into()),
        llm_vocabulary: Some(gemma),
        ..Files::default()
    };
    let mut parts = Parts::open(&files, &lab.paths, &NoHost).unwrap();
    let clip = Arc::new(Tokenizer::json(clip_tokenizer().as_bytes()).unwrap());
    for (encoder, found) in parts.family.encoders.iter().zip(&mut parts.encoders) {
        if matches!(encoder.vocabulary, Vocabulary::Clip | Vocabulary::OpenClip) {
            found.as_mut().unwrap().tokenizer = clip.clone();
        }
    }
    parts
}

/// A small pipeline of tests/tiny. Flux has the weights in its graphs, the others those of checkpoint B.
fn parts_of(family: &str) -> Parts {
    let folder = sdrun_tiny::folder().join(family);
    let mut parts = open_tiny(&folder.join("onnx"), &Lab::default());
    if family != "flux" {
        let checkpoint =
            WeightFiles::of(folder.join(format!("single_file/tiny_{family}_B_fp16.safetensors")));
        parts.networks_mut().for_each(|part| part.weights.base = checkpoint.base.clone());
    }
    parts
}

fn parts() -> Parts {
    parts_of("sd")
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
        ..Request::default()
    }
}

fn options(device: Device) -> BuildOptions {
    BuildOptions::new(device)
}

fn engines(provider: &str) -> Engines<'static> {
    let mut wishes = Wishes::new();
    wishes.order = vec![provider.into()];
    wishes.isolation = Isolation::worker(Limits::all(Duration::from_secs(900)));
    Engines { only: None, wishes, options: &options, kept: None }
}

/// Samplers whose last step, to level 0, gives the estimate itself.
const LAST_IS_CLEAN: [Sampler; 2] = [Sampler::Lcm, Sampler::UniPc];

/// The pictures of a request, and each picture's latents after every step.
fn draw(parts: &Parts, request: &Resolved, provider: &str) -> (Vec<Picture>, Vec<Vec<Vec<f32>>>) {
    let lab = Lab::default();
    let mut latents: Vec<Vec<Vec<f32>>> = vec![Vec::new(); request.count];
    let (mut pictures, mut on_provider) = (Vec::new(), 0);
    let mut progress = Progress::new(request, parts, request.count, Instant::now());
    let mut hear = |event: Event<'_>| {
        progress.hear(&event, Instant::now());
        match event {
            Event::Step { picture, step, steps, shape, latents: state, clean, .. } => {
                assert_eq!((clean.len(), shape.iter().product()), (state.len(), state.len()));
                // These end at their estimate.
                assert!(step + 1 < steps || !LAST_IS_CLEAN.contains(&request.sampler) || clean == state);
                latents[picture].push(state.to_vec());
            }
            Event::Loaded(network) => {
                assert_eq!(network.provider, provider, "{}", network.part);
                on_provider += 1;
            }
            Event::Picture(picture) => pictures.push(picture),
            _ => {}
        }
    };
    generate(&lab.registry, parts, request, &engines(provider), &NoHost, &mut hear).unwrap();
    assert_eq!(
        (progress.done(), progress.seconds_left()),
        (progress.total(), Some(0.0)),
        "steps were foreseen"
    );
    assert!(on_provider >= 2 + parts.encoders.len());
    (pictures, latents)
}

/// The largest difference, relative to the largest expected value.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    found.iter().zip(expected).fold(0.0f32, |far, (a, b)| far.max((a - b).abs())) / most
}

/// What tools/diffusion recorded of diffusers.
struct Oracle(SafetensorsWeights);

impl Oracle {
    fn open(name: &str) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("generate/{name}.safetensors"));
        Oracle(SafetensorsWeights::open(&[file]).unwrap())
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let values = tensor(&self.0, name).to_f64().unwrap();
        values.into_iter().map(|value| value as f32).collect()
    }

    /// Compares each step and the picture of a case. `mask` says where; outside, the picture must be that of `original`.
    fn compare(
        &self,
        case: &str,
        parts: &Parts,
        request: &Resolved,
        provider: &str,
        mask: Option<(&Mask, &RgbImage)>,
    ) {
        let what = format!("{} {case} {provider}", parts.family.id);
        let (pictures, latents) = draw(parts, request, provider);
        let [channels, height, width] = parts.family.latent.shape(request.width, request.height);
        let cells = mask.map(|(mask, _)| mask.nearest([height, width]).repeat(channels));
        let steps = self.values(&format!("{case}.latents"));
        let len = channels * height * width;
        assert_eq!(latents[0].len(), steps.len() / len, "{what}");
        for (step, (found, expected)) in latents[0].iter().zip(steps.chunks(len)).enumerate() {
            let under = |values: &[f32]| -> Vec<f32> {
                let counts = |at: usize| cells.as_ref().is_none_or(|cells| cells[at] == 1.0);
                values.iter().enumerate().filter(|(at, _)| counts(*at)).map(|(_, v)| *v).collect()
            };
            let far = distance(&under(found), &under(expected));
            println!("{what} step {step}: {far:e}");
            assert!(far < 1e-4, "{what} step {step}: {far}");
        }
        let picture = self.values(&format!("{case}.picture"));
        assert_eq!(pictures[0].bytes.len(), picture.len());
        for (at, (found, expected)) in pictures[0].bytes.iter().zip(&picture).enumerate() {
            let (x, y) = ((at / 3 % request.width) as u32, (at / 3 / request.width) as u32);
            match mask {
                Some((mask, original)) if mask.grey().get_pixel(x, y).0 == [0] => {
                    assert_eq!(*found, original.as_raw()[at], "{what} outside the mask");
                }
                // A value that is nearly halfway between two bytes may round either way.
                _ => {
                    let far = (f32::from(*found) - expected).abs();
                    assert!(far <= 1.0, "{what} at {x}, {y}: {far}");
                }
            }
        }
    }
}

/// A case of tools/diffusion/pipeline.py: name, sampler, schedule, timesteps.
type Case = (&'static str, Sampler, Schedule, Time);

/// Compares each step and the picture of each case on all providers.
fn compare_with_diffusers(family: &str, cases: &[Case]) {
    let oracle = Oracle::open(family);
    let parts = parts_of(family);
    for provider in ALL.iter() {
        for (name, sampler, schedule, time) in cases.iter().copied() {
            let like = Some(Program::Diffusers);
            let request = Request { sampler: Some(sampler), schedule: Some(schedule), like, ..request() };
            // Flux takes no negative prompt.
            let scale = if family == "flux" { Some(1.0) } else { request.scale };
            let mut request = Request { scale, ..request }.resolve(&parts).unwrap();
            request.time = time;
            oracle.compare(name, &parts, &request, provider, None);
        }
    }
}

#[test]
fn pictures_of_stable_diffusion_are_those_of_diffusers() {
    use Time::{Fraction, Nearest};
    compare_with_diffusers(
        "sd",
        &[
            ("euler", Sampler::Euler, Schedule::Linspace, Fraction),
            ("euler_karras", Sampler::Euler, Schedule::Karras, Fraction),
            ("euler_leading", Sampler::Euler, Schedule::Leading, Fraction),
            ("euler_ancestral", Sampler::EulerAncestral, Schedule::Linspace, Fraction),
            ("heun", Sampler::Heun, Schedule::Trailing, Fraction),
            ("lms", Sampler::Lms, Schedule::Linspace, Fraction),
            ("dpm2", Sampler::Dpm2, Schedule::Trailing, Fraction),
            ("dpmpp_2m", Sampler::DpmPp2m, Schedule::Trailing, Nearest),
            ("dpmpp_2m_leading", Sampler::DpmPp2m, Schedule::Leading, Nearest),
            ("dpmpp_2m_linspace", Sampler::DpmPp2m, Schedule::Linspace, Nearest),
            ("dpmpp_2m_karras", Sampler::DpmPp2m, Schedule::Karras, Nearest),
            ("dpmpp_2m_sde", Sampler::DpmPp2mSde, Schedule::Trailing, Nearest),
            ("dpmpp_3m", Sampler::DpmPp3m, Schedule::Trailing, Nearest),
            ("unipc", Sampler::UniPcBh2, Schedule::Trailing, Nearest),
            ("deis", Sampler::Deis, Schedule::Trailing, Nearest),
            ("ddim", Sampler::Ddim, Schedule::Leading, Nearest),
            ("lcm", Sampler::Lcm, Schedule::Lcm, Nearest),
            ("tcd", Sampler::Tcd, Schedule::Lcm, Nearest),
        ],
    );
}

#[test]
fn pictures_of_sdxl_are_those_of_diffusers() {
    compare_with_diffusers(
        "sdxl",
        &[
            ("euler_leading", Sampler::Euler, Schedule::Leading, Time::Fraction),
            ("dpmpp_2m_karras", Sampler::DpmPp2m, Schedule::Karras, Time::Nearest),
            ("euler_ancestral", Sampler::EulerAncestral, Schedule::Linspace, Time::Fraction),
        ],
    );
}

#[test]
fn pictures_of_flow_models_are_those_of_diffusers() {
    let euler = |schedule| ("euler", Sampler::Euler, schedule, Time::Fraction);
    compare_with_diffusers("sd3", &[euler(Schedule::Linspace)]);
    compare_with_diffusers("flux", &[euler(Schedule::Simple)]);
}

/// The picture and the mask of tools/diffusion/pipeline.py.
fn sample() -> (RgbImage, Mask) {
    let picture = RgbImage::from_fn(64, 64, |x, y| Rgb([(4 * x) as u8, (4 * y) as u8, (2 * (x + y)) as u8]));
    let inside = |x, y| (24..56).contains(&x) && (16..48).contains(&y);
    let mask = GrayImage::from_fn(64, 64, |x, y| Luma([if inside(x, y) { 255 } else { 0 }]));
    (picture, Mask::new(mask))
}

fn start(strength: f64, inpaint: bool) -> Start {
    let (picture, mask) = sample();
    let inpaint =
        inpaint.then_some(Inpaint { mask, blur: 0.0, content: Content::Original, only_masked: None });
    Start { picture, fit: Fit::Crop, strength, inpaint }
}

/// The small pipeline with its ControlNet.
fn controlled() -> Parts {
    let mut parts = parts();
    let folder = sdrun_tiny::folder().join("sd/onnx");
    let options = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..OpenOptions::default() };
    parts.denoiser.model =
        Model::open_with(folder.join("unet_controlnet/model.graph.onnx"), &options).unwrap();
    let model = Model::open(folder.join("controlnet/model.onnx")).unwrap();
    parts.controls.push(Part { name: "controlnet".into(), model, weights: WeightFiles::default() });
    parts
}

/// img2img, inpainting and a ControlNet as in diffusers. Outside the mask, diffusers draws the picture anew; sdrun keeps it.
#[test]
fn edited_pictures_are_those_of_diffusers() {
    let oracle = Oracle::open("sd");
    let (original, mask) = sample();
    let control = Control { hint: original.clone(), strength: 0.8, interval: (0.0, 0.7) };
    let base = Request {
        sampler: Some(Sampler::Euler),
        schedule: Some(Schedule::Linspace),
        like: Some(Program::Diffusers),
        ..request()
    };
    let cases = [
        ("img2img", parts(), Request { start: Some(start(0.6, false)), ..base.clone() }),
        ("inpaint", parts(), Request { start: Some(start(1.0, true)), ..base.clone() }),
        ("inpaint_more", parts(), Request { start: Some(start(0.6, true)), ..base.clone() }),
        ("controlnet", controlled(), Request { controls: vec![control], ..base }),
    ];
    for provider in ALL.iter() {
        for (name, parts, request) in &cases {
            let request = request.resolve(parts).unwrap();
            let mask = name.starts_with("inpaint").then_some((&mask, &original));
            oracle.compare(name, parts, &request, provider, mask);
        }
    }
}

/// A pipeline of ONNX models from tests/tiny: the component of a folder and where it is.
fn assembled(networks: &[(&str, &str)]) -> Parts {
    let lab = Lab::default();
    let (tiny, folder) = (sdrun_tiny::folder(), tempfile::tempdir().unwrap());
    for (component, place) in networks {
        let (family, name) = place.split_once('/').unwrap();
        let to = folder.path().join(component);
        fs::create_dir(&to).unwrap();
        fs::copy(tiny.join(family).join("onnx").join(name).join("model.onnx"), to.join("model.onnx"))
            .unwrap();
    }
    open_tiny(folder.path(), &lab)
}

/// Models that share most networks with another family, each with a denoiser of its own.
#[test]
fn pictures_of_further_models_are_those_of_diffusers() {
    let sd = |unet| {
        assembled(&[
            ("unet", unet),
            ("text_encoder", "sd/text_encoder"),
            ("vae_decoder", "sd/vae_decoder"),
            ("vae_encoder", "sd/vae_encoder"),
        ])
    };
    let sdxl = |unet| {
        assembled(&[
            ("unet", unet),
            ("text_encoder", "sdxl/text_encoder"),
            ("text_encoder_2", "sdxl/text_encoder_2"),
            ("vae_decoder", "sdxl/vae_decoder"),
            ("vae_encoder", "sdxl/vae_encoder"),
        ])
    };
    let refiner = || {
        assembled(&[
            ("unet", "sdxl/unet_refiner"),
            ("text_encoder_2", "sdxl/text_encoder_2"),
            ("vae_decoder", "sdxl/vae_decoder"),
            ("vae_encoder", "sdxl/vae_encoder"),
        ])
    };
    let sd35 = assembled(&[
        ("transformer", "sd3/transformer_35"),
        ("text_encoder", "sd3/text_encoder"),
        ("text_encoder_2", "sd3/text_encoder_2"),
        ("text_encoder_3", "sd3/text_encoder_3"),
        ("vae_decoder", "sd3/vae_decoder"),
    ]);
    let flux = |transformer| {
        assembled(&[
            ("transformer", transformer),
            ("text_encoder", "flux/text_encoder"),
            ("text_encoder_2", "flux/text_encoder_2"),
            ("vae_decoder", "flux/vae_decoder"),
            ("vae_encoder", "flux/vae_encoder"),
        ])
    };
    let chroma = assembled(&[
        ("transformer", "flux/transformer_chroma"),
        ("text_encoder", "flux/text_encoder_masked"),
        ("vae_decoder", "flux/vae_decoder"),
    ]);
    let pixart = assembled(&[
        ("transformer", "sdxl/transformer_pixart"),
        ("text_encoder", "flux/text_encoder_masked"),
        ("vae_decoder", "sdxl/vae_decoder"),
    ]);

    let sana = assembled(&[
        ("transformer", "sana/transformer"),
        ("text_encoder", "sana/text_encoder"),
        ("vae_decoder", "sana/vae_decoder"),
        ("vae_encoder", "sana/vae_encoder"),
    ]);

    // Nothing in the graph tells it from SDXL.
    let playground = Parts {
        family: Family::find("playground").unwrap(),
        noise: Family::find("playground").unwrap().noise,
        ..sdxl("sdxl/unet")
    };
    let mut with_refiner = sdxl("sdxl/unet");
    with_refiner.set_refiner(refiner()).unwrap();
    let (original, mask) = sample();
    let hint = |hint: RgbImage| vec![Control { hint, strength: 1.0, interval: (0.0, 1.0) }];
    let near = RgbImage::from_fn(64, 64, |x, y| Rgb([(2 * (x + y)) as u8; 3]));
    let euler = Request {
        sampler: Some(Sampler::Euler),
        schedule: Some(Schedule::Linspace),
        like: Some(Program::Diffusers),
        ..request()
    };
    let flow = Request { schedule: Some(Schedule::Simple), ..euler.clone() };
    let alone = Request { scale: Some(1.0), ..flow.clone() };
    let begun = |strength, inpaint| Request { start: Some(start(strength, inpaint)), ..euler.clone() };
    let handover = Request { schedule: Some(Schedule::Karras), refiner_start: Some(0.55), ..euler.clone() };
    let reference =
        RgbImage::from_fn(1024, 1024, |x, y| Rgb([(x / 4) as u8, (y / 4) as u8, ((x + y) / 8) as u8]));
    let kontext = Request { references: vec![reference], distilled_guidance: Some(2.5), ..alone.clone() };
    let fill = Request { start: Some(start(1.0, true)), ..alone.clone() };
    let consistent = Request { steps: Some(5), seed: 5, ..Request::default() };
    let consistent = Request {
        width: Some(64),
        height: Some(64),
        like: euler.like,
        prompt: euler.prompt.clone(),
        ..consistent
    };
    let cases = [
        ("inpaint", "sd15-inpainting", sd("sd/unet_inpainting"), begun(1.0, true)),
        ("inpaint_more", "sd15-inpainting", sd("sd/unet_inpainting"), begun(0.6, true)),
        ("lcm", "sd15-lcm", sd("sd/unet_lcm"), consistent),
        ("depth", "sd21-depth", sd("sd/unet_depth"), Request { controls: hint(near), ..begun(0.6, false) }),
        ("sdxl_inpaint", "sdxl-inpainting", sdxl("sdxl/unet_inpainting"), begun(0.6, true)),
        ("refiner", "sdxl-refiner", refiner(), begun(0.6, false)),
        (
            "playground",
            "playground",
            playground,
            Request { schedule: Some(Schedule::Karras), ..euler.clone() },
        ),
        ("handover", "sdxl", with_refiner, handover),
        ("sd35", "sd3", sd35, Request { schedule: Some(Schedule::Linspace), ..flow.clone() }),
        ("fill", "flux-fill", flux("flux/transformer_fill"), fill),
        (
            "control",
            "flux-canny-depth",
            flux("flux/transformer_control"),
            Request { controls: hint(original.clone()), ..alone.clone() },
        ),
        ("kontext", "flux-dev", flux("flux/transformer"), kontext),
        ("chroma", "chroma", chroma, flow.clone()),
        ("pixart", "pixart-sigma", pixart, euler.clone()),
        // With the family's own sampler, schedule and timesteps.
        ("sana", "sana", sana, Request { width: Some(96), like: euler.like, ..request() }),
    ];
    let oracle = Oracle::open("variants");
    for provider in ALL.iter() {
        for (case, family, parts, request) in &cases {
            assert_eq!(parts.family.id, *family);
            let request = request.resolve(parts).unwrap();
            let mask =
                request.start.as_ref().and_then(|start| start.inpaint.as_ref()).map(|_| (&mask, &original));
            oracle.compare(case, parts, &request, provider, mask);
        }
    }
}

/// No pipeline of diffusers starts from a picture with Sana, so this compares its encoder, and checks that it is used.
#[test]
fn the_autoencoder_of_sana_encodes_as_in_diffusers() {
    let lab = Lab::default();
    let expected = Oracle::open("variants").values("sana_encoded");
    let model = Model::open(sdrun_tiny::folder().join("sana/onnx/vae_encoder/model.onnx")).unwrap();
    let picture = from_bytes(sample().0.as_raw());
    let picture = HostTensor::from_f32(vec![1, 3, 64, 64], &picture).unwrap();
    let inputs = Tensors::from([("sample".to_string(), picture)]);
    let parts = assembled(&[
        ("transformer", "sana/transformer"),
        ("text_encoder", "sana/text_encoder"),
        ("vae_decoder", "sana/vae_decoder"),
        ("vae_encoder", "sana/vae_encoder"),
    ]);
    for provider in ALL.iter() {
        let opened = lab.open(provider).unwrap();
        let mut build = BuildOptions::new(device_of(&opened).unwrap());
        build.shapes = [("sample".to_string(), vec![1, 3, 64, 64])].into();
        let weights = WeightStack::of_model(model.binding().unwrap(), model.weights());
        let engine = opened.build(&model, &build, &NoHost).unwrap();
        let mut session = engine.session(&weights, &NoHost).unwrap();
        let outputs = session.run(&inputs, &NoHost).unwrap();
        let found: Vec<f32> =
            outputs["latents"].to_f64().unwrap().into_iter().map(|value| value as f32).collect();
        let far = distance(&found, &expected);
        println!("{provider}: {far:e}");
        assert!(far < 1e-4, "{provider}: {far}");

        let of = |start: Option<Start>| {
            let request = Request { steps: Some(2), start, ..request() };
            draw(&parts, &request.resolve(&parts).unwrap(), provider).0.remove(0).bytes
        };
        assert_ne!(of(Some(start(0.5, false))), of(None));
    }
}

/// What is drawn anew wholly does not depend on the picture; a strength of 0 ControlNet, and one outside its steps, change nothing;
/// the size of a result is that of the request, or of the original if only the masked part is drawn.
#[test]
fn edits_keep_their_promises() {
    let drawn = |parts: &Parts, change: &dyn Fn(&mut Request)| {
        let mut request = Request { steps: Some(2), ..request() };
        change(&mut request);
        draw(parts, &request.resolve(parts).unwrap(), "ggml").0.remove(0)
    };
    let parts = parts();
    let plain = drawn(&parts, &|_| {});
    // One tile is the whole.
    assert_eq!(drawn(&parts, &|r| r.tile = Some(512)), plain);
    assert_eq!(drawn(&parts, &|r| r.start = Some(start(1.0, false))), plain);
    assert_ne!(drawn(&parts, &|r| r.start = Some(start(0.9, false))), plain);

    let (picture, mask) = sample();
    let large = |picture: &RgbImage| Fit::Stretch.picture(picture, 256, 192).unwrap();
    let only = Start {
        picture: large(&picture),
        inpaint: Some(Inpaint {
            mask: Fit::Stretch.mask(&mask, 256, 192).unwrap(),
            blur: 2.0,
            content: Content::Surroundings,
            only_masked: Some(16),
        }),
        ..start(0.7, false)
    };
    let result = drawn(&parts, &|r| r.start = Some(only.clone()));
    assert_eq!((result.width, result.height), (256, 192));
    let before = large(&picture);
    let pairs = result.bytes.chunks(3).zip(before.as_raw().chunks(3));
    let changed: Vec<bool> = pairs.map(|(a, b)| a != b).collect();
    let at = |x: usize, y: usize| changed[y * 256 + x];
    assert!(!at(0, 0) && !at(255, 191) && !at(80, 100) && at(160, 100), "the wrong part changed");

    let hires = |upscale| Hires { width: 128, height: 64, steps: Some(3), strength: 0.5, upscale };
    let wide = drawn(&parts, &|r| r.hires = Some(hires(Upscale::Lanczos)));
    assert_eq!((wide.width, wide.height), (128, 64));
    assert_ne!(drawn(&parts, &|r| r.hires = Some(hires(Upscale::Latent))).bytes, wide.bytes);

    let broad = |tile| drawn(&parts, &|r| (r.width, r.height, r.tile) = (Some(320), Some(128), tile));
    let (whole, tiled) = (broad(None), broad(Some(128)));
    let gaps = whole.bytes.iter().zip(&tiled.bytes).map(|(a, b)| u64::from(a.abs_diff(*b)));
    let mean = gaps.sum::<u64>() as f64 / whole.bytes.len() as f64;
    println!("tiles differ by {mean} on average");
    assert!(mean > 0.0 && mean < 12.0, "{mean}");

    let controlled = controlled();
    let with = |strength, interval| {
        let control = Control { hint: picture.clone(), strength, interval };
        drawn(&controlled, &|r| r.controls = vec![control.clone()])
    };
    let far = |a: &Picture, b: &Picture| a.bytes.iter().zip(&b.bytes).map(|(a, b)| a.abs_diff(*b)).max();
    assert!(far(&with(0.0, (0.0, 1.0)), &plain) <= Some(1));
    assert!(far(&with(1.0, (0.4, 0.6)), &plain) <= Some(1));
    assert!(far(&with(1.0, (0.0, 1.0)), &plain) > Some(1));
    let larger = |strength| {
        let control = Control { hint: picture.clone(), strength, interval: (0.0, 1.0) };
        drawn(&controlled, &|r| {
            r.controls = vec![control.clone()];
            r.hires = Some(hires(Upscale::Lanczos));
        })
    };
    assert_eq!(larger(1.0).width, 128);
    assert!(far(&larger(1.0), &larger(0.0)) > Some(1));
}

/// Layers that only the timestep changes run before the steps, and their network leaves. It is loaded again if the sampler asks for other
/// times than its levels.
#[test]
fn layers_of_the_timestep_run_before_the_steps() {
    let lab = Lab::default();
    for (family, sampler, expected) in
        [("sd3", Sampler::Euler, 1), ("sd3", Sampler::Dpm2, 2), ("flux", Sampler::Heun, 1)]
    {
        let parts = parts_of(family);
        let scale = if family == "flux" { 1.0 } else { 5.0 };
        let request = Request { sampler: Some(sampler), scale: Some(scale), ..request() };
        let request = request.resolve(&parts).unwrap();
        let mut loaded = Vec::new();
        let mut hear = |event: Event<'_>| match event {
            Event::Loaded(network) => loaded.push(network.part.clone()),
            Event::Step { .. } => loaded.push("a step".into()),
            _ => {}
        };
        generate(&lab.registry, &parts, &request, &engines("ggml"), &NoHost, &mut hear).unwrap();
        let of_step = |part: &&String| part.as_str() == "transformer (each step)";
        assert_eq!(loaded.iter().filter(of_step).count(), expected, "{family}: {loaded:?}");
        let place = |name: &str| loaded.iter().position(|part| part == name).unwrap();
        let order = ["transformer (each step)", "transformer", "a step"].map(place);
        assert!(order.is_sorted(), "{family}: {loaded:?}");
    }
}

/// A plan names the networks that the request then loads, in the same order.
#[test]
fn plans_come_true() {
    let lab = Lab::default();
    let hires = Hires { width: 128, height: 64, steps: None, strength: 0.5, upscale: Upscale::Lanczos };
    let by_latents = Hires { upscale: Upscale::Latent, ..hires };
    let inpainting = || {
        assembled(&[
            ("unet", "sd/unet_inpainting"),
            ("text_encoder", "sd/text_encoder"),
            ("vae_decoder", "sd/vae_decoder"),
            ("vae_encoder", "sd/vae_encoder"),
        ])
    };
    let control = Control { hint: sample().0, strength: 1.0, interval: (0.0, 1.0) };
    let cases = [
        (parts(), Request { start: Some(start(0.5, true)), ..request() }),
        (parts(), Request { hires: Some(hires), ..request() }),
        (parts(), Request { hires: Some(by_latents), ..request() }),
        (inpainting(), Request { start: Some(start(0.5, true)), hires: Some(hires), ..request() }),
        (inpainting(), Request { hires: Some(by_latents), ..request() }),
        (controlled(), Request { controls: vec![control], ..request() }),
        (parts_of("sdxl"), request()),
        (parts_of("sd3"), request()),
        (parts_of("flux"), Request { scale: Some(1.0), ..request() }),
    ];
    for provider in ALL.iter() {
        for (parts, request) in &cases {
            let request = Request { steps: Some(1), ..request.clone() }.resolve(parts).unwrap();
            let engines = engines(provider);
            let plan = plan(&lab.registry, parts, &request, &engines, &NoHost).unwrap();
            let mut loaded = Vec::new();
            let mut hear = |event: Event<'_>| {
                if let Event::Loaded(network) = event {
                    let LoadedNetwork { part, provider, device, precision, origin, .. } = network.clone();
                    loaded.push((part, provider, device, precision, origin == Origin::Cached));
                }
            };
            generate(&lab.registry, parts, &request, &engines, &NoHost, &mut hear).unwrap();
            let networks = plan.phases.iter().flat_map(|phase| &phase.networks);
            let planned: Vec<_> = networks
                .map(|n| (n.part.clone(), n.provider.clone(), n.device.clone(), n.precision, n.has_engine))
                .collect();
            assert_eq!(planned, loaded, "{}", parts.family.id);
            let [main, device] = plan.peak();
            assert!(main > 1 << 20 && device == 0, "{main}, {device}");
            assert!(plan.own.is_some_and(|own| own > 1 << 20), "{:?}", plan.own);
        }
    }
}

/// An autoencoder that exceeds the range of fp16: no black picture, but a rerun in fp32. SDXL's has activations beyond it; on a CPU
/// only weights are stored in fp16, so this one has weights beyond it.
#[test]
fn what_overflows_in_fp16_runs_again_in_fp32() {
    let dir = tempfile::tempdir().unwrap();
    let file = sdrun_tiny::folder().join("sd/single_file/tiny_sd_A_fp32.safetensors");
    let mut bytes = fs::read(file).unwrap();
    let (header, tensors) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let weight = tensors.info("first_stage_model.post_quant_conv.weight").unwrap();
    let (start, end) = weight.data_offsets;
    for value in bytes[8 + header + start..8 + header + end].chunks_exact_mut(4) {
        let large = f32::from_le_bytes(value.try_into().unwrap()) * 1e6;
        value.copy_from_slice(&large.to_le_bytes());
    }
    let changed = dir.path().join("changed.safetensors");
    fs::write(&changed, bytes).unwrap();
    let mut parts = parts();
    let base = WeightFiles::of(changed).base;
    parts.networks_mut().for_each(|part| part.weights.base = base.clone());
    let request = Request { steps: Some(2), ..request() }.resolve(&parts).unwrap();
    let lab = Lab::default();
    let draw = |precision: Precision, kept: Option<Kept>| {
        let options = |device| BuildOptions::new(device).precision(precision);
        let mut engines = Engines { options: &options, ..engines("ggml") };
        engines.kept = kept;
        let (mut widened, mut pictures) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let mut hear = |event: Event<'_>| match event {
                Event::Widened { part, from } => widened.push((part.to_string(), from)),
                Event::Picture(picture) => pictures.push(picture.bytes),
                _ => {}
            };
            generate(&lab.registry, &parts, &request, &engines, &NoHost, &mut hear).unwrap();
        }
        assert_eq!(pictures[0], pictures[1]);
        (widened, pictures.remove(0))
    };
    let (none, wide) = draw(Precision::Fp32, None);
    assert_eq!(none, []);
    let decoder = ("vae_decoder".to_string(), Precision::Fp16);
    let (twice, narrow) = draw(Precision::Fp16, None);
    assert_eq!(twice, [decoder.clone(), decoder.clone()]);
    let colours = wide.iter().collect::<std::collections::BTreeSet<_>>().len();
    assert!(colours > 50, "a picture with {colours} values is nearly blank");
    let far = wide.iter().zip(&narrow).filter(|(a, b)| a.abs_diff(**b) > 8).count();
    assert!(far * 20 < wide.len(), "{far} of {} values differ", wide.len());
    // What is kept is the wide network, so the second picture needs no rerun.
    let (once, _) = draw(Precision::Fp16, Some(Kept::default()));
    assert_eq!(once, [decoder]);
}

/// Networks of an earlier request are used again: as they are, or with other weights after a refit. Pictures do not change.
#[test]
fn kept_networks_draw_the_same_pictures() {
    let lab = Lab::default();
    let adapter = sdrun_tiny::folder().join("sd/lora/kohya.safetensors");
    let mut adapted = parts();
    adapted.add_adapter(&adapter, 1.0, 1.0).unwrap();
    let other_words = Request { prompt: "a blue thing".into(), ..request() };
    for provider in ALL.iter() {
        let draw = |parts: &Parts, request: &Request, engines: &Engines<'_>| {
            let request = Request { steps: Some(2), ..request.clone() }.resolve(parts).unwrap();
            let (mut origins, mut picture) = (Vec::new(), None);
            let mut hear = |event: Event<'_>| match event {
                Event::Loaded(network) => origins.push((network.part.clone(), network.origin)),
                Event::Picture(drawn) => picture = Some(drawn.bytes),
                _ => {}
            };
            generate(&lab.registry, parts, &request, engines, &NoHost, &mut hear).unwrap();
            (origins, picture.unwrap())
        };
        let of = |origins: &[(&str, Origin)]| -> Vec<_> {
            origins.iter().map(|(part, origin)| (part.to_string(), *origin)).collect()
        };
        let fresh = engines(provider);
        let [plain, changed, other] =
            [(&parts(), &request()), (&adapted, &request()), (&parts(), &other_words)]
                .map(|(parts, request)| draw(parts, request, &fresh).1);
        assert!(plain != changed && plain != other);
        let engines = Engines { kept: Some(Kept::default()), ..engines(provider) };
        assert_eq!(draw(&parts(), &request(), &engines).1, plain);
        let (origins, picture) = draw(&parts(), &request(), &engines);
        assert_eq!(picture, plain);
        // The prompt's states are kept too, so the text encoder stays where it is.
        assert_eq!(origins, of(&[("unet", Origin::Kept), ("vae_decoder", Origin::Kept)]));
        let (origins, picture) = draw(&adapted, &request(), &engines);
        assert_eq!(picture, changed);
        let all =
            [("text_encoder", Origin::Refitted), ("unet", Origin::Refitted), ("vae_decoder", Origin::Kept)];
        assert_eq!(origins, of(&all));
        let (origins, picture) = draw(&parts(), &other_words, &engines);
        assert_eq!(picture, other);
        assert_eq!(origins, of(&all));
        engines.kept.as_ref().unwrap().clear();
        let (origins, picture) = draw(&parts(), &request(), &engines);
        assert_eq!(picture, plain);
        assert_eq!(origins[1], ("unet".into(), Origin::Cached));
    }
}

/// None of these may change a picture: running both predictions in one batch or one after the other, an adapter at strength 0, a
/// negative prompt without guidance, or starting from a picture at strength 1.
#[test]
fn what_must_not_matter_does_not() {
    let lab = Lab::default();
    let mut idle = parts();
    idle.add_adapter(&sdrun_tiny::folder().join("sd/lora/kohya.safetensors"), 0.0, 0.0).unwrap();
    for provider in ALL.iter() {
        let engines = Engines { kept: Some(Kept::default()), ..engines(provider) };
        let last = |parts: &Parts, request: Request| {
            let request = Request { steps: Some(3), ..request }.resolve(parts).unwrap();
            let mut last = Vec::new();
            let mut hear = |event: Event<'_>| {
                if let Event::Step { latents, .. } = event {
                    last = latents.to_vec();
                }
            };
            generate(&lab.registry, parts, &request, &engines, &NoHost, &mut hear).unwrap();
            last
        };
        let plain = last(&parts(), request());
        let in_two_runs = Request { guidance_interval: Some((0.0, 0.999_999)), ..request() };
        let far = distance(&last(&parts(), in_two_runs), &plain);
        assert!(far < 1e-5, "{provider}: one batch and two runs differ by {far}");
        assert_eq!(last(&idle, request()), plain, "{provider}: an adapter of strength 0");
        let far = distance(&last(&parts(), Request { start: Some(start(1.0, false)), ..request() }), &plain);
        assert!(far < 1e-6, "{provider}: strength 1 differs by {far}");
        let unguided = Request { scale: Some(1.0), ..request() };
        let without = Request { negative: String::new(), ..unguided.clone() };
        assert_eq!(last(&parts(), unguided), last(&parts(), without), "{provider}: the negative prompt");
    }
}

/// Each picture has its own seed and noise, so it does not depend on the other pictures in its batch.
#[test]
fn a_batch_has_the_pictures_of_its_seeds() {
    let parts = parts();
    for sampler in [Sampler::EulerAncestral, Sampler::DpmPp2mSde, Sampler::Lcm] {
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

/// A variation lies between the pictures of two seeds. Its pictures share the seed, and count the other.
#[test]
fn variations_are_between_two_seeds() {
    let parts = parts();
    let of = |seed, variation: Option<(u64, f64)>, count| {
        let variation = variation.map(|(seed, strength)| Variation { seed, strength });
        let request = Request { seed, variation, count, steps: Some(3), ..request() };
        draw(&parts, &request.resolve(&parts).unwrap(), "ggml").0
    };
    let (first, other) = (of(5, None, 1), of(20, None, 1));
    assert_eq!(of(5, Some((20, 0.0)), 1)[0].bytes, first[0].bytes);
    let near = |found: &[u8], expected: &[u8]| found.iter().zip(expected).all(|(a, b)| a.abs_diff(*b) <= 1);
    assert!(near(&of(5, Some((20, 1.0)), 1)[0].bytes, &other[0].bytes));
    let batch = of(5, Some((20, 0.2)), 2);
    let seeds: Vec<_> = batch.iter().map(|p| (p.seed, p.variation.map(|v| (v.seed, v.strength)))).collect();
    assert_eq!(seeds, [(5, Some((20, 0.2))), (5, Some((21, 0.2)))]);
    assert_eq!(batch[1], of(5, Some((21, 0.2)), 1)[0]);
    let far = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| u64::from(a.abs_diff(*b))).sum::<u64>();
    let (to_first, to_other) = (far(&batch[0].bytes, &first[0].bytes), far(&batch[0].bytes, &other[0].bytes));
    assert!(0 < to_first && to_first < to_other, "{to_first} {to_other}");
    let impossible = Request { variation: Some(Variation { seed: 1, strength: 1.5 }), ..request() };
    assert!(impossible.resolve(&parts).unwrap_err().to_string().contains("1.5"));
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
    assert!(refused(&|r| r.width = Some(60)).contains("take 64 or 128"));
    assert!(refused(&|r| r.steps = Some(0)).contains("0 steps"));
    assert!(refused(&|r| r.scale = Some(f64::NAN)).contains("guidance"));
    assert!(refused(&|r| r.start = Some(start(0.0, false))).contains("strength 0"));
    let control = Control { hint: sample().0, strength: 1.0, interval: (0.0, 1.0) };
    assert!(refused(&|r| r.controls = vec![control.clone()]).contains("1 pictures for 0 ControlNets"));
    let mut black = start(0.5, true);
    black.inpaint.as_mut().unwrap().mask = Mask::new(GrayImage::new(64, 64));
    assert!(refused(&|r| r.start = Some(black.clone())).contains("black everywhere"));
    black.inpaint.as_mut().unwrap().mask = Mask::new(GrayImage::new(32, 64));
    assert!(refused(&|r| r.start = Some(black.clone())).contains("32 x 64"));
    assert!(refused(&|r| r.prompt = "a <lora:style:1> thing".into()).contains("<lora:style>"));
    let lab = Lab::default();
    let request = Request { clip_skip: Some(2), ..request() }.resolve(&parts).unwrap();
    let error =
        generate(&lab.registry, &parts, &request, &engines("ggml"), &NoHost, &mut |_| {}).unwrap_err();
    assert!(error.to_string().starts_with("text_encoder: its graph gives no states of layer 2"), "{error}");
    assert_eq!(error.code(), sdrun::abi::ErrorCode::Unimplemented);
}

/// A prediction that the model tells is no setting: with another model it would be wrong.
#[test]
fn a_record_holds_the_prediction_that_the_user_named() {
    let parts = parts();
    for (told, expected) in
        [(None, parts.family.prediction), (Some(Prediction::Velocity), Prediction::Velocity)]
    {
        let resolved = Request { prediction: told, ..request() }.resolve(&parts).unwrap();
        assert_eq!(resolved.prediction, expected);
        assert_eq!(resolved.record(&Record::default(), 5, None).prediction, told);
    }
}

/// The command line on the small pipeline, in a folder as Optimum exports it, with the small tokenizer.
struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let from = sdrun_tiny::folder().join("sd/onnx");
        for part in ["text_encoder", "unet", "vae_decoder", "vae_encoder"] {
            fs::create_dir_all(dir.path().join("model").join(part)).unwrap();
            let file = Path::new(part).join("model.onnx");
            fs::copy(from.join(&file), dir.path().join("model").join(file)).unwrap();
        }
        fs::create_dir(dir.path().join("model/tokenizer")).unwrap();
        fs::write(dir.path().join("model/tokenizer/tokenizer.json"), clip_tokenizer()).unwrap();
        Machine { dir }
    }

    /// `sdrun generate` with the model, a size and two steps. The prompt may be the first argument.
    fn command(&self, arguments: &[&str]) -> Command {
        let defaults = [("-W", "64"), ("-H", "64"), ("--steps", "2")];
        let mut command = self.program("generate");
        command
            .args(["-m", "model"])
            .args(
                match arguments.contains(&"--from") || arguments.first().is_some_and(|a| !a.starts_with('-'))
                {
                    true => None,
                    false => Some("a red round thing, very red"),
                },
            )
            .args(
                defaults
                    .into_iter()
                    .filter(|(name, _)| !arguments.contains(name))
                    .flat_map(|(name, value)| [name, value]),
            )
            .args(arguments);
        command
    }

    /// A command of sdrun, in the folder.
    fn program(&self, name: &str) -> Command {
        let place = |place: Place| place.find().unwrap_or_else(|why| panic!("{why}"));
        let mut command = Command::new(place(Place::Dist).join("sdrun"));
        command
            .arg(name)
            .current_dir(self.dir.path())
            .env("SDRUN_DATA_DIR", place(Place::Data))
            .env("SDRUN_CACHE_DIR", self.dir.path().join("cache"));
        command
    }

    fn generate(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn draws(&self, arguments: &[&str]) -> String {
        let output = self.generate(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn refuses(&self, code: i32, words: &[&str], arguments: &[&str]) {
        let output = self.generate(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        for word in words {
            assert!(stderr.contains(word), "{arguments:?}: {stderr}");
        }
        assert_eq!(self.pictures(), Vec::<String>::new(), "{arguments:?}");
    }

    /// Names of the pictures in the folder, which are taken away.
    fn pictures(&self) -> Vec<String> {
        let files = fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap());
        let mut names: Vec<String> =
            files.filter(|f| f.path().is_file()).map(|f| f.file_name().into_string().unwrap()).collect();
        names.sort();
        names.iter().for_each(|name| fs::remove_file(self.dir.path().join(name)).unwrap());
        names
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.dir.path().join(name)).unwrap()
    }
}

#[test]
fn the_command_line_draws() {
    let machine = Machine::new();
    let text = machine.draws(&["-s", "5", "-p", "ggml"]);
    assert!(text.contains("picture.png  seed 5") && text.contains("Stable Diffusion 1"), "{text}");
    let first = machine.bytes("picture.png");
    let pixels = image::load_from_memory(&first).unwrap().to_rgb8();
    assert_eq!(pixels.dimensions(), (64, 64));
    // The same again, also without the cache.
    machine.draws(&["-s", "5", "-p", "ggml", "-o", "again.png", "--no-cache"]);
    assert_eq!(machine.bytes("again.png"), first);
    // Another source of noise, which the picture remembers.
    machine.draws(&["-s", "5", "-p", "ggml", "--rng", "nv", "-o", "nv.png"]);
    machine.draws(&["--from", "nv.png", "-p", "ggml", "-o", "again.png"]);
    assert!(machine.bytes("nv.png") != first && machine.bytes("again.png") == machine.bytes("nv.png"));

    // What A1111 and civitai read.
    let reader = png::Decoder::new(std::io::Cursor::new(&first)).read_info().unwrap();
    let chunk = &reader.info().uncompressed_latin1_text[0];
    let read = Infotext::parse(&chunk.text);
    assert_eq!((&*chunk.keyword, &*read.prompt), ("parameters", "a red round thing, very red"));
    for (name, value) in [
        ("Steps", "2"),
        ("Sampler", "DPM++ 2M"),
        ("Schedule type", "Karras"),
        ("Seed", "5"),
        ("Size", "64x64"),
    ] {
        assert_eq!(read.get(name), Some(value), "{chunk:?}");
    }
    machine.draws(&["-s", "5", "-p", "ggml", "--no-metadata", "-n", "bläu ☂"]);
    assert!(
        png::Decoder::new(std::io::Cursor::new(machine.bytes("picture.png")))
            .read_info()
            .unwrap()
            .info()
            .uncompressed_latin1_text
            .is_empty()
    );
    machine.pictures();

    // Others get a number, and are the pictures of the next seeds.
    let lines = machine.draws(&["-s", "5", "-b", "2", "-p", "ggml", "--json"]);
    let report: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(report["type"], "done");
    assert_eq!(report["pictures"][1]["seed"], 6);
    assert_eq!(report["networks"].as_array().unwrap().len(), 3);
    assert_eq!(machine.bytes("picture.png"), first);
    machine.draws(&["-s", "6", "-p", "ggml", "-o", "six.png"]);
    assert_eq!(machine.bytes("picture-2.png"), machine.bytes("six.png"));

    // Providers differ by rounding.
    let near = |arguments: &[&str]| {
        machine.draws(&[&["-s", "5", "-o", "other.png"], arguments].concat());
        let other = image::load_from_memory(&machine.bytes("other.png")).unwrap().to_rgb8();
        let most = other.iter().zip(pixels.iter()).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(most <= Some(1), "{arguments:?}: {most:?}");
    };
    for provider in ALL.iter() {
        near(&["-p", provider]);
    }
    near(&["-p", "openvino", "--bake"]);
    near(&[]);
}

/// Files and tags of the command line: a picture that reproduces itself, pictures as inputs, adapters by name.
#[test]
fn the_command_line_edits_and_reproduces() {
    let machine = Machine::new();
    let loras = machine.dir.path().join("loras");
    fs::create_dir(&loras).unwrap();
    let adapter = sdrun_tiny::folder().join("sd/lora/kohya.safetensors");
    fs::copy(&adapter, loras.join("Ink Wash.safetensors")).unwrap();

    machine.draws(&["-s", "5", "-p", "ggml"]);
    let plain = machine.bytes("picture.png");
    let draw = |arguments: &[&str]| {
        machine.draws(&[&["-p", "ggml", "-o", "other.png"], arguments].concat());
        machine.bytes("other.png")
    };
    let pixels = |bytes: &[u8]| image::load_from_memory(bytes).unwrap().to_rgb8();

    // The picture alone says how it was made. Options change it.
    let sampler = ["--sampler", "euler_a", "--cfg-scale", "3.5", "-n", "blue"];
    let first = draw(&[&["-s", "9"], &sampler[..]].concat());
    fs::write(machine.dir.path().join("first.png"), &first).unwrap();
    assert_eq!(draw(&["--from", "first.png"]), first);
    assert_ne!(pixels(&draw(&["--from", "first.png", "-s", "10"])), pixels(&first));

    // So do variations of it.
    let varied = draw(&["--from", "first.png", "--variation-seed", "3", "--variation-strength", "0.3"]);
    assert_ne!(pixels(&varied), pixels(&first));
    fs::write(machine.dir.path().join("varied.png"), &varied).unwrap();
    assert_eq!(draw(&["--from", "varied.png"]), varied);

    // JPEG and WebP hold the same settings.
    machine.draws(&["-s", "5", "-p", "ggml", "-o", "picture.webp"]);
    assert_eq!(pixels(&draw(&["--from", "picture.webp"])), pixels(&plain));

    // An adapter from a file, and the same by its name: the picture's metadata name it.
    let given = draw(&["-s", "5", "--lora", "loras/Ink Wash.safetensors:0.7"]);
    assert_ne!(pixels(&given), pixels(&plain));
    // The hash is there, although a thread finds it out beside the drawing.
    assert!(String::from_utf8_lossy(&given).contains("Lora hashes: \"Ink Wash: "));
    fs::write(machine.dir.path().join("given.png"), &given).unwrap();
    assert_eq!(draw(&["--from", "given.png", "--lora-dir", "loras"]), given);

    // Pixels that are black in the mask stay.
    let (original, mask) = sample();
    original.save(machine.dir.path().join("start.png")).unwrap();
    mask.grey().save(machine.dir.path().join("mask.png")).unwrap();
    let edited = pixels(&draw(&["-s", "5", "-i", "start.png", "--mask", "mask.png", "--mask-blur", "0"]));
    let differ = |x, y| edited.get_pixel(x, y) != original.get_pixel(x, y);
    assert!(differ(40, 30) && !differ(0, 0) && !differ(60, 60) && !differ(23, 30));
    let wide = pixels(&draw(&["-s", "5", "-W", "128", "-i", "start.png", "--outpaint", "32,0,32,0"]));
    assert_eq!((wide.dimensions(), wide.get_pixel(64, 30)), ((128, 64), original.get_pixel(32, 30)));
    assert_eq!(pixels(&draw(&["-s", "5", "--hires", "2", "--hires-steps", "1"])).dimensions(), (128, 128));
}

#[test]
fn the_command_line_refuses() {
    let machine = Machine::new();
    machine.refuses(2, &["dpmpp_2n", "did you mean `dpmpp_2m`"], &["--sampler", "dpmpp_2n"]);
    machine.refuses(4, &["width 60", "take 64 or 128"], &["-W", "60"]);
    machine.refuses(4, &["0 steps"], &["--steps", "0"]);
    machine.refuses(3, &["missing.safetensors"], &["--lora", "missing.safetensors"]);
    machine.refuses(3, &["there is no provider `none`"], &["-p", "none"]);
    machine.refuses(4, &["jpg", "webp"], &["-o", "picture.gif"]);
    machine.refuses(4, &["--control-image"], &["--control-image", "model/tokenizer/tokenizer.json"]);
    machine.refuses(4, &["--outpaint"], &["-i", "model/tokenizer/tokenizer.json", "--outpaint", "1,2"]);
    machine.refuses(4, &["20 times", "at most 8"], &["--hires", "20"]);
    machine.refuses(2, &["cany", "did you mean `canny`"], &["--control-hint", "cany"]);
    machine.refuses(2, &["not a range"], &["--cfg-interval", "0.5,0.2"]);
    machine.refuses(3, &["nowhere"], &["-o", "nowhere/x.png"]);
    let lora = sdrun_tiny::folder().join("flux/lora");
    let lora = fs::read_dir(lora)
        .unwrap()
        .map(|f| f.unwrap().path())
        .find(|f| !f.display().to_string().contains("oracle"));
    machine.refuses(4, &["hint: "], &["--lora", &lora.unwrap().display().to_string()]);
}

/// Each picture of a batch has choices of its own, which its metadata hold.
#[test]
fn the_command_line_chooses() {
    let machine = Machine::new();
    let cards = machine.dir.path().join("cards/shapes");
    fs::create_dir_all(&cards).unwrap();
    fs::write(cards.join("plain.txt"), "# shapes\nround\nround (blue:1.5)\n").unwrap();
    let prompt = "a {red|blue|very red} __shapes/plain__ thing";
    let batch = [prompt, "-n", "{red|blue}", "-p", "ggml", "--wildcard-dir", "cards", "-b", "4", "-s", "5"];
    let text = machine.draws(&batch);
    let prompts: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once(".png  seed ")?.1.split_once("  "))
        .map(|(_, prompt)| prompt)
        .collect();
    assert!(prompts.len() == 4 && prompts.iter().any(|prompt| *prompt != prompts[0]), "{text}");
    assert!(
        prompts.iter().all(|prompt| prompt.ends_with(" thing") && !prompt.contains(['{', '_'])),
        "{text}"
    );
    for (number, name) in ["picture", "picture-2", "picture-3", "picture-4"].iter().enumerate() {
        let picture = machine.bytes(&format!("{name}.png"));
        // The picture alone draws itself, and so does its seed.
        machine.draws(&["--from", &format!("{name}.png"), "-p", "ggml", "-o", "other.png"]);
        assert_eq!(machine.bytes("other.png"), picture, "{name}");
        let seed = (5 + number).to_string();
        machine.draws(&[&batch[..7], &["-s", &seed, "-o", "other.png"]].concat());
        assert_eq!(machine.bytes("other.png"), picture, "{name}");
    }
    machine.pictures();
    // Without a folder, wildcards are text.
    let text = machine.draws(&["a __shapes/plain__ thing", "-p", "ggml", "-s", "5"]);
    assert!(text.starts_with("picture.png  seed 5\n"), "{text}");
    machine.pictures();
    let missing = ["a __shapes/plane__", "--wildcard-dir", "cards"];
    machine.refuses(3, &["shapes/plane", "did you mean `shapes/plain`"], &missing);
}

/// Ctrl-C stops soon. Pictures that were done stay whole, and nothing else stays.
#[cfg(unix)]
#[test]
fn ctrl_c_keeps_the_pictures_that_are_done() {
    let machine = Machine::new();
    let mut command = machine.command(&["-s", "5", "-b", "2000", "-p", "ggml"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !machine.dir.path().join("picture-2.png").exists() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended too early");
        std::thread::sleep(Duration::from_millis(5));
    }
    let at = Instant::now();
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    // After 10 s the process would end in any case.
    assert!(at.elapsed() < Duration::from_secs(8), "{:?}", at.elapsed());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(130) && stderr.contains("error: cancelled"), "{stderr}");
    let first = machine.bytes("picture.png");
    let names: Vec<_> = fs::read_dir(machine.dir.path()).unwrap().map(|file| file.unwrap().path()).collect();
    let pictures = names.iter().filter(|name| name.is_file());
    for picture in pictures.clone() {
        assert_eq!(image::open(picture).unwrap().to_rgb8().dimensions(), (64, 64), "{picture:?}");
    }
    assert!((2..2000).contains(&pictures.count()));
    machine.pictures();
    machine.draws(&["-s", "5", "-p", "ggml"]);
    assert_eq!(machine.bytes("picture.png"), first);
}

#[test]
fn a_preview_is_a_rough_picture() {
    let machine = Machine::new();
    let draw = |more: &[&str]| {
        machine.draws(&[&["-s", "5", "-p", "ggml", "--preview", "preview.png"], more].concat())
    };
    draw(&["--steps", "6"]);
    let preview = image::load_from_memory(&machine.bytes("preview.png")).unwrap().to_rgb8();
    // A picture of blocks: one for each latent cell.
    assert_eq!(preview.dimensions(), (64, 64));
    assert!(preview.enumerate_pixels().all(|(x, y, pixel)| pixel == preview.get_pixel(x / 8 * 8, y / 8 * 8)));
    assert!(preview.pixels().any(|pixel| pixel != preview.get_pixel(0, 0)));
    // The picture does not change, nor do the others.
    let picture = machine.bytes("picture.png");
    assert_eq!(machine.pictures(), ["picture.png", "preview.png"]);
    machine.draws(&["-s", "5", "-p", "ggml", "--steps", "6"]);
    assert_eq!(machine.bytes("picture.png"), picture);
    machine.pictures();
    // No preview before the seventh step.
    draw(&["--steps", "6", "--preview-interval", "7"]);
    assert_eq!(machine.pictures(), ["picture.png"]);
    machine.refuses(4, &["--preview another file"], &["--preview", "picture.png"]);
}

/// A preview that cannot be written is no reason to stop.
#[cfg(target_os = "linux")]
#[test]
fn a_preview_that_cannot_be_written_stops_nothing() {
    let machine = Machine::new();
    let output =
        machine.generate(&["-s", "5", "-p", "ggml", "--preview", "/dev/full", "--preview-interval", "1"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr.matches("no more previews").count(), 1, "{stderr}");
    assert_eq!(machine.pictures(), ["picture.png"]);
}

/// With `--json`, every line is an event, and the last one is the report or the error.
#[test]
fn events_are_lines_of_json() {
    let machine = Machine::new();
    let lines = |arguments: &[&str]| -> Vec<serde_json::Value> {
        let output = machine.generate(&[&["-s", "5", "-p", "ggml", "--json"], arguments].concat());
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
    };
    let all = lines(&["-b", "2", "--hires", "2", "--preview", "preview.png", "--preview-interval", "2"]);
    let types: Vec<&str> = all.iter().map(|line| line["type"].as_str().unwrap()).collect();
    let count = |wanted: &str| types.iter().filter(|found| **found == wanted).count();
    assert_eq!(
        ["prompt", "step", "preview", "picture", "done", "error"].map(count),
        [1, 8, 4, 2, 1, 0],
        "{types:?}"
    );
    assert!(count("loading") == count("loaded") && count("loaded") >= 4, "{types:?}");
    let last = all.last().unwrap();
    assert_eq!((&last["type"], &last["pictures"][1]["file"]), (&"done".into(), &"picture-2.png".into()));
    let steps: Vec<_> = all.iter().filter(|line| line["type"] == "step").collect();
    for (number, step) in steps.iter().enumerate() {
        assert_eq!((&step["done"], &step["total"]), (&(number + 1).into(), &8.into()), "{step}");
        assert!(step["seconds_left"].is_number(), "{step}");
    }
    assert_eq!(["picture", "pass", "step"].map(|name| steps[7][name].as_u64()), [Some(2); 3]);
    machine.pictures();
    // With a file, the text stays, and the file holds the report alone.
    let text = machine.draws(&["-s", "5", "-p", "ggml", "--json=report.json"]);
    assert!(text.starts_with("picture.png  seed 5\n"), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&machine.bytes("report.json")).unwrap();
    assert_eq!(
        (&report["type"], &report["pictures"][0]["prompt"]),
        (&"done".into(), &"a red round thing, very red".into())
    );
    let usage = lines(&["--stepz", "0"]);
    assert_eq!((usage.len(), &usage[0]["error"]["exit_code"]), (1, &2.into()));
    let refused = lines(&["--steps", "0"]);
    assert_eq!(
        (refused.len(), &refused[0]["type"], &refused[0]["error"]["exit_code"]),
        (1, &"error".into(), &4.into())
    );
}
