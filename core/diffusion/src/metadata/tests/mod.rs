use super::*;
use crate::{noise::Variation, pipeline::Content, program::Program, sampler::Sampler, schedule::Schedule};

mod properties;

fn of(key: &str, text: &str) -> Reading {
    read_record(&[(key.into(), text.into())]).unwrap()
}

fn parameters(text: &str) -> Reading {
    of(PARAMETERS, text)
}

fn model(name: &str, hash: &str) -> Option<ModelFile> {
    Some(ModelFile { name: name.into(), hash: Some(hash.into()) })
}

fn lora(name: &str, hash: Option<&str>, strength: f32, text_encoder_strength: f32) -> Lora {
    Lora { name: name.into(), hash: hash.map(str::to_string), strength, text_encoder_strength }
}

/// A text as A1111 1.10 writes it: the order of its settings, its quotes, a second pass and files.
const A1111: &str = "1girl, (red hair:1.2), <lora:ink wash:0.8> <lora:eyes:1:0.5>\nsecond line: yes\n\
    Negative prompt: easynegative, ugly: very\nbad, hands\n\
    Steps: 25, Sampler: DPM++ 2M SDE, Schedule type: Karras, CFG scale: 7.5, Seed: 3310459814, Size: 512x768, \
    Model hash: 4199bcdd14, Model: revAnimated_v122, VAE hash: 735e4c3a44, VAE: vae-ft-mse-840000-ema-pruned, \
    Variation seed: 1847592, Variation seed strength: 0.1, Denoising strength: 0.45, Clip skip: 2, RNG: CPU, \
    ControlNet 0: \"Model: control_v11p_sd15_canny [d14c016b], Weight: 0.75, Guidance Start: 0, Guidance End: 0.8\", \
    Hires upscale: 1.5, Hires steps: 12, Hires upscaler: 4x-UltraSharp, \
    Lora hashes: \"ink wash: 0123456789ab, eyes: ba9876543210\", TI hashes: \"easynegative: c74b4e810b03\", Version: v1.10.1";

#[test]
fn a_text_of_a1111() {
    let Reading { record, unread } = parameters(A1111);
    assert_eq!(unread, Vec::<String>::new());
    let expected = Record {
        program: "v1.10.1".into(),
        prompt: "1girl, (red hair:1.2),  \nsecond line: yes".into(),
        negative: "easynegative, ugly: very\nbad, hands".into(),
        width: Some(512),
        height: Some(768),
        steps: Some(25),
        sampler: Some(Sampler::DpmPp2mSde),
        schedule: Some(Schedule::Karras),
        cfg_scale: Some(7.5),
        seed: Some(3310459814),
        variation: Some(Variation { seed: 1847592, strength: 0.1 }),
        rng: Some(Rng::Cpu),
        seed_like: Some(Program::A1111),
        clip_skip: Some(2),
        model: model("revAnimated_v122", "4199bcdd14"),
        vae: Some(ModelFile::new("vae-ft-mse-840000-ema-pruned", Some("735e4c3a44".into()))),
        // The strength in text encoders comes first.
        loras: vec![
            lora("ink wash", Some("0123456789ab"), 0.8, 0.8),
            lora("eyes", Some("ba9876543210"), 0.5, 1.0),
        ],
        embeddings: model("easynegative", "c74b4e810b03").into_iter().collect(),
        controlnets: vec![ControlNet {
            name: "control_v11p_sd15_canny".into(),
            hash: Some("d14c016b".into()),
            strength: 0.75,
            start: 0.0,
            end: 0.8,
        }],
        hires: Some(Hires {
            scale: Some(1.5),
            steps: Some(12),
            upscaler: Some("4x-UltraSharp".into()),
            denoising_strength: Some(0.45),
            ..Hires::default()
        }),
        ..Record::default()
    };
    assert_eq!(record, expected);
    // Written again, the settings are the same, and the tags follow the prompt.
    let written = record.infotext().to_string();
    assert_eq!(written.lines().last(), A1111.lines().last());
    assert!(written.starts_with(
        "1girl, (red hair:1.2),  \nsecond line: yes <lora:ink wash:0.8> <lora:eyes:1:0.5>\nNegative"
    ));
}

#[test]
fn old_names_and_other_programs_with_the_same_text() {
    let settings = |line: &str| parameters(&format!("a cat\n{line}"));
    let old = settings(
        "Steps: 20, Sampler: DPM++ 2M Karras, CFG scale: 7, Seed: 1, Size: 512x512, Clip skip: 2, ENSD: 31337, Version: v1.3.0",
    );
    let record = &old.record;
    assert_eq!((record.sampler, record.schedule), (Some(Sampler::DpmPp2m), Some(Schedule::Karras)));
    assert_eq!(record.rng, Some(Rng::Nv));
    assert_eq!(old.unread.len(), 2, "{:?}", old.unread);
    assert!(old.unread[0].contains("GPU") && old.unread[1].contains("`ENSD: 31337` is unknown"));
    // Before there were schedules, a name without one meant the plain schedule.
    let plain = settings("Steps: 20, Sampler: DPM++ 2M, CFG scale: 7, RNG: NV, Version: v1.7.0").record;
    assert_eq!((plain.schedule, plain.rng), (Some(Schedule::Normal), Some(Rng::Nv)));
    let automatic =
        settings("Steps: 20, Sampler: DPM++ 2M, Schedule type: Automatic, RNG: CPU, Version: v1.9.0").record;
    assert_eq!(automatic.schedule, Some(Schedule::Karras));
    let unknown = settings("Steps: 20, Sampler: DPM++ 9M, Schedule type: Spiral, CFG scale: x, Seed: -1");
    assert_eq!((unknown.record.sampler, unknown.record.schedule, unknown.record.seed), (None, None, None));
    assert_eq!(unknown.unread.len(), 4, "{:?}", unknown.unread);

    let forge = settings(
        "Steps: 20, Sampler: Euler, Schedule type: Simple, CFG scale: 1, Distilled CFG Scale: 3.5, Seed: 5, Size: 896x1152, \
         Model hash: bea01d51bd, Model: flux1-dev-bnb-nf4-v2, RNG: CPU, Version: f2.0.1v1.10.1-previous-501-g668e87f9",
    );
    assert_eq!((forge.record.guidance, forge.record.cfg_scale), (Some(3.5), Some(1.0)));
    assert_eq!((forge.record.seed_like, forge.unread), (Some(Program::A1111), vec![]));

    // stable-diffusion.cpp: https://github.com/leejet/stable-diffusion.cpp, get_image_params
    let cpp = settings(
        "Steps: 4, CFG scale: 1.000000, Guidance: 3.500000, Seed: 42, Size: 512x768, Model: , RNG: cuda, \
         Sampler: dpm++2m karras, TE: clip_l.safetensors, TE: t5xxl_fp16.safetensors, Unet: flux1-schnell-q8_0.gguf, \
         VAE: ae.safetensors, Version: stable-diffusion.cpp, SDCPP: {\"schema\":1,\"a\":[1,2]}",
    );
    assert_eq!(cpp.unread, Vec::<String>::new());
    let record = cpp.record;
    assert_eq!((record.sampler, record.schedule), (Some(Sampler::DpmPp2m), Some(Schedule::Karras)));
    assert_eq!((record.rng, record.seed_like, record.cfg_scale), (Some(Rng::Nv), None, Some(1.0)));
    assert_eq!(record.model.unwrap().name, "flux1-schnell-q8_0");
    assert_eq!(
        record.text_encoders.iter().map(|file| &*file.name).collect::<Vec<_>>(),
        ["clip_l", "t5xxl_fp16"]
    );

    let civitai = settings(
        "Steps: 30, Sampler: Euler a, CFG scale: 4, Seed: 7, Size: 832x1216, Created Date: 2024-05-02T1815:00.1Z, \
         Civitai resources: [{\"type\":\"checkpoint\",\"modelVersionId\":290640,\"air\":\"urn:air:sdxl:checkpoint:civitai:257749@290640\"}], \
         Civitai metadata: {\"remixOfId\": 1}",
    );
    assert_eq!(civitai.unread, Vec::<String>::new());
    assert_eq!((civitai.record.sampler, civitai.record.seed), (Some(Sampler::EulerAncestral), Some(7)));
}

#[test]
fn inpainting_is_read() {
    let record = |settings: &str| {
        parameters(&format!("a cat\nSteps: 20, Seed: 1, Denoising strength: 0.6, {settings}")).record
    };
    let whole = record("Mask blur: 4");
    assert_eq!(whole.inpaint, Some(Inpaint { blur: 4.0, ..Inpaint::default() }));
    assert_eq!(whole.denoising_strength, Some(0.6));
    let part = record("Inpaint area: Only masked, Masked area padding: 48, Masked content: latent noise");
    assert_eq!(part.inpaint, Some(Inpaint { blur: 0.0, content: Content::Noise, only_masked: Some(48) }));
    assert_eq!(record("Clip skip: 2").inpaint, None);
}

#[test]
fn an_enlargement_is_read() {
    let text = "Postprocess upscale by: 4, Postprocess upscaler: R-ESRGAN 4x+";
    let record = parameters(&format!("a cat\nSteps: 20, Seed: 1, Size: 64x64, {text}")).record;
    assert_eq!(record.upscale, Some(Upscale::new("sub/R-ESRGAN 4x+.pth", None, 4.0)));
    assert_eq!(record.upscale.unwrap().infotext(), text);
    assert_eq!(
        Upscale::new("a: b", None, 2.5).infotext(),
        "Postprocess upscale by: 2.5, Postprocess upscaler: \"a: b\""
    );
}

#[test]
fn adapters_are_told_apart_by_tag_and_hash() {
    let reading = parameters(
        "a <lora:a.b:1> cat <hypernet:x:1>\nSteps: 2, Seed: 1, Size: 8x8, Lora hashes: \"a.b: 01, other: 02\"",
    );
    assert_eq!(reading.record.prompt, "a  cat");
    assert_eq!(reading.record.loras, [lora("a.b", Some("01"), 1.0, 1.0)]);
    assert_eq!(reading.unread.len(), 2);
    assert!(
        reading.unread[0].contains("hypernet") && reading.unread[1].ends_with("adapter other"),
        "{reading:?}"
    );
}

#[test]
fn settings_of_swarmui() {
    let text = r#"{"sui_image_params": {"prompt": "a photo of a cat", "negativeprompt": "dog", "images": 1,
        "model": "OfficialStableDiffusion/sd_xl_base_1.0.safetensors", "seed": 1, "steps": 20, "cfgscale": 7.0, "aspectratio": "1:1",
        "width": 1024, "height": 1024, "sampler": "dpmpp_2m", "scheduler": "karras", "loras": ["styles/ink", "b"],
        "loraweights": ["0.5", "-1"], "clipstopatlayer": -2, "automaticvae": true, "swarm_version": "0.9.3.1"},
        "sui_extra_data": {"date": "2025-01-25"}}"#;
    let Reading { record, unread } = parameters(text);
    assert_eq!(unread, ["`automaticvae: true` is unknown"]);
    let expected = Record {
        program: "SwarmUI 0.9.3.1".into(),
        prompt: "a photo of a cat".into(),
        negative: "dog".into(),
        width: Some(1024),
        height: Some(1024),
        steps: Some(20),
        sampler: Some(Sampler::DpmPp2m),
        schedule: Some(Schedule::Karras),
        cfg_scale: Some(7.0),
        seed: Some(1),
        clip_skip: Some(2),
        model: Some(ModelFile::new("sd_xl_base_1.0", None)),
        loras: vec![lora("ink", None, 0.5, 0.5), lora("b", None, -1.0, -1.0)],
        ..Record::default()
    };
    assert_eq!(record, expected);
}

/// ComfyUI's default workflow with two adapters, clip skip and a ControlNet.
const GRAPH: &str = r#"{
    "3": {"class_type": "KSampler", "inputs": {"seed": ["20", 0], "steps": 20, "cfg": 8, "sampler_name": "dpmpp_2m_sde_gpu",
        "scheduler": "karras", "denoise": 1, "model": ["11", 0], "positive": ["13", 0], "negative": ["13", 1], "latent_image": ["5", 0]}},
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "SD1.5\\v1-5-pruned-emaonly.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 640, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": ["21", 0], "clip": ["12", 0]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "text, watermark", "clip": ["12", 0]}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
    "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "ComfyUI", "images": ["8", 0]}},
    "10": {"class_type": "LoraLoader", "inputs": {"lora_name": "style/ink.safetensors", "strength_model": 0.8, "strength_clip": 1,
        "model": ["4", 0], "clip": ["4", 1]}},
    "11": {"class_type": "LoraLoaderModelOnly", "inputs": {"lora_name": "eyes.safetensors", "strength_model": 0.5, "model": ["10", 0]}},
    "12": {"class_type": "CLIPSetLastLayer", "inputs": {"stop_at_clip_layer": -2, "clip": ["10", 1]}},
    "13": {"class_type": "ControlNetApplyAdvanced", "inputs": {"strength": 0.9, "start_percent": 0.1, "end_percent": 0.7,
        "positive": ["6", 0], "negative": ["7", 0], "control_net": ["14", 0], "image": ["15", 0]}},
    "14": {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "control_canny.pth"}},
    "15": {"class_type": "LoadImage", "inputs": {"image": "edges.png"}},
    "20": {"class_type": "Seed (rgthree)", "inputs": {"seed": 156680208700286}},
    "21": {"class_type": "PrimitiveString", "inputs": {"value": "beautiful scenery, (galaxy:1.2) bottle"}}
}"#;

#[test]
fn a_graph_of_comfyui() {
    let Reading { record, unread } = of("prompt", GRAPH);
    assert_eq!(unread, Vec::<String>::new());
    let expected = Record {
        program: "ComfyUI".into(),
        prompt: "beautiful scenery, (galaxy:1.2) bottle".into(),
        negative: "text, watermark".into(),
        width: Some(512),
        height: Some(640),
        steps: Some(20),
        sampler: Some(Sampler::DpmPp2mSde),
        schedule: Some(Schedule::Karras),
        cfg_scale: Some(8.0),
        seed: Some(156680208700286),
        rng: Some(Rng::Cpu),
        seed_like: Some(Program::ComfyUi),
        clip_skip: Some(2),
        model: Some(ModelFile::new("v1-5-pruned-emaonly", None)),
        loras: vec![lora("ink", None, 0.8, 1.0), lora("eyes", None, 0.5, 0.0)],
        controlnets: vec![ControlNet {
            name: "control_canny".into(),
            hash: None,
            strength: 0.9,
            start: 0.1,
            end: 0.7,
        }],
        ..Record::default()
    };
    assert_eq!(record, expected);
}

#[test]
fn what_a_graph_hides_is_said() {
    let changed = |from: &str, to: &str| {
        assert!(GRAPH.contains(from));
        read_record(&[("prompt".into(), GRAPH.replace(from, to))])
    };
    let notes = |from: &str, to: &str| changed(from, to).unwrap().unread.join("; ");
    assert!(notes("EmptyLatentImage", "VAEEncode").contains("VAEEncode (5) starts from a picture"));
    assert!(notes("\"batch_size\": 1", "\"batch_size\": 2").contains("batch"));
    assert!(notes("\"LoraLoaderModelOnly\"", "\"FreeU\"").contains("FreeU (11) is unknown"));
    assert!(notes("\"karras\"", "\"spiral\"").contains("spiral"));
    assert!(notes("[\"21\", 0]", "[\"22\", 0]").contains("CLIPTextEncode (6)"));
    assert_eq!(changed("\"denoise\": 1,", "\"denoise\": 0.5,").unwrap().record.denoising_strength, Some(0.5));
    // A second pass over the first one's latents.
    let second = r#"{"23": {"class_type": "KSampler", "inputs": {"steps": 5, "latent_image": ["24", 0]}},
        "24": {"class_type": "LatentUpscale", "inputs": {"samples": ["3", 0]}},"#;
    let both = read_record(&[("prompt".into(), GRAPH.replacen('{', second, 1))]).unwrap();
    assert_eq!(both.record.steps, Some(20));
    assert_eq!(both.unread, ["the node KSampler (23) is a further pass, which is not supported"]);

    let error = changed("\"KSampler\"", "\"Custom\"").unwrap_err();
    assert!(error.to_string().contains("ComfyUI") && error.to_string().contains("KSampler"), "{error}");
    // A loop, and links to nowhere.
    let looped = r#"{"1": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "positive": ["1", 0], "latent_image": ["1", 0], "seed": ["1", 0]}}}"#;
    assert!(of("prompt", looped).unread.len() > 3);
}

#[test]
fn settings_of_invokeai() {
    let text = r#"{"generation_mode":"sdxl_txt2img","positive_prompt":"a submarine++","negative_prompt":"blurry","width":1216,"height":832,
        "seed":2718281828,"rand_device":"cpu","cfg_scale":6.0,"cfg_rescale_multiplier":0.0,"steps":28,"scheduler":"dpmpp_2m_sde_k",
        "clip_skip":1,"model":{"key":"3b0f","hash":"blake3:1f2e","name":"Juggernaut XL v9","base":"sdxl","type":"main"},
        "loras":[{"model":{"key":"77aa","name":"cutaway","type":"lora"},"weight":0.85},{"lora":{"model_name":"old"},"weight":1}],
        "vae":{"name":"sdxl-vae-fp16-fix"},"positive_style_prompt":"","controlnets":[{"control_model":{"name":"canny"},"control_weight":0.5,
        "begin_step_percent":0,"end_step_percent":0.75,"image":{"image_name":"a.png"}}],"ipAdapters":[],"app_version":"5.6.0"}"#;
    let Reading { record, unread } = of("invokeai_metadata", text);
    assert_eq!(unread, ["the prompt may weight words in InvokeAI's language, which differs from A1111's"]);
    let expected = Record {
        program: "InvokeAI 5.6.0".into(),
        prompt: "a submarine++".into(),
        negative: "blurry".into(),
        width: Some(1216),
        height: Some(832),
        steps: Some(28),
        sampler: Some(Sampler::DpmPp2mSde),
        schedule: Some(Schedule::Karras),
        cfg_scale: Some(6.0),
        seed: Some(2718281828),
        rng: Some(Rng::Cpu),
        clip_skip: Some(2),
        model: Some(ModelFile::new("Juggernaut XL v9", None)),
        vae: Some(ModelFile::new("sdxl-vae-fp16-fix", None)),
        loras: vec![lora("cutaway", None, 0.85, 0.85), lora("old", None, 1.0, 1.0)],
        controlnets: vec![ControlNet {
            name: "canny".into(),
            strength: 0.5,
            end: 0.75,
            ..ControlNet::default()
        }],
        ..Record::default()
    };
    assert_eq!(record, expected);
    let names = |name: &str| {
        let record = of("invokeai_metadata", &format!("{{\"scheduler\": \"{name}\"}}")).record;
        (record.sampler, record.schedule)
    };
    assert_eq!(names("kdpm_2_a"), (Some(Sampler::Dpm2Ancestral), None));
    assert_eq!(names("euler_a"), (Some(Sampler::EulerAncestral), None));
    assert_eq!(names("lms_k"), (Some(Sampler::Lms), Some(Schedule::Karras)));
}

#[test]
fn settings_of_novelai() {
    let comment = r#"{"prompt": "1girl, {rain}", "steps": 28, "height": 1216, "width": 832, "scale": 5, "uncond_scale": 0.0, "cfg_rescale": 0,
        "seed": 3071474384, "n_samples": 1, "noise_schedule": "karras", "sampler": "k_euler_ancestral", "sm": false, "sm_dyn": true,
        "uc": "lowres", "v4_prompt": {"caption": {"base_caption": "1girl, rain", "char_captions": [{"char_caption": "girl"}]}}}"#;
    let texts = [("Software", "NovelAI"), ("Comment", comment)]
        .map(|(key, text)| (key.to_string(), text.to_string()));
    let Reading { record, unread } = read_record(&texts).unwrap();
    assert_eq!(unread.len(), 4, "{unread:?}");
    let expected = Record {
        program: "NovelAI".into(),
        prompt: "1girl, {rain}".into(),
        negative: "lowres".into(),
        width: Some(832),
        height: Some(1216),
        steps: Some(28),
        sampler: Some(Sampler::EulerAncestral),
        schedule: Some(Schedule::Karras),
        cfg_scale: Some(5.0),
        seed: Some(3071474384),
        ..Record::default()
    };
    assert_eq!(record, expected);
}

#[test]
fn sdruns_own_record_comes_first() {
    let pair = |key: &str, text: &str| (key.to_string(), text.to_string());
    let own = Record { prompt: "mine".into(), steps: Some(3), ..Record::of_sdrun() };
    let texts = [pair(PARAMETERS, A1111), pair("prompt", GRAPH), pair(SDRUN, &own.to_json())];
    assert_eq!(read_record(&texts).unwrap(), Reading { record: own.clone(), unread: vec![] });
    assert!(own.to_json().starts_with("{\"version\":1,\"program\":\"sdrun "), "{}", own.to_json());
    let others = [pair("prompt", GRAPH), pair(PARAMETERS, A1111)];
    assert_eq!(read_record(&others).unwrap().record.steps, Some(25));
    // A damaged one is said, and the next is read.
    let damaged = read_record(&[pair(SDRUN, "{\"prompt\": "), pair(PARAMETERS, A1111)]).unwrap();
    assert_eq!(damaged.record.steps, Some(25));
    assert!(
        damaged.unread[0].starts_with("the picture has settings of sdrun that cannot be read: "),
        "{damaged:?}"
    );
    assert!(matches!(read_record(&[pair(SDRUN, "7")]), Err(Error::Unreadable { program: "sdrun", .. })));
}

#[test]
fn a_record_of_a_later_version_is_read_as_far_as_possible() {
    let text = r#"{"version": 2, "program": "sdrun 9.0.0", "prompt": "a cat", "steps": "many", "sampler": "euler_9", "tea": 1,
        "seed": 18446744073709551615, "model": {"name": "C:\\secret\\model.v1.safetensors", "size": 7}, "loras": [{"name": "../x", "strength": 0.8}]}"#;
    let Reading { record, unread } = of(SDRUN, text);
    let expected = Record {
        program: "sdrun 9.0.0".into(),
        prompt: "a cat".into(),
        seed: Some(u64::MAX),
        model: Some(ModelFile { name: "model.v1".into(), hash: None }),
        loras: vec![lora("x", None, 0.8, 1.0)],
        ..Record::default()
    };
    assert_eq!(record, expected);
    assert_eq!(
        unread,
        [
            "`sampler` is not understood: `euler_9` is unknown",
            "`steps` is not understood: invalid type: string \"many\"",
            "`tea` is not understood: unknown field `tea`",
            "`sdrun 9.0.0` wrote the settings in another format, so that they may mean something else",
        ]
    );
}

#[test]
fn names_are_not_paths() {
    for (path, name) in [
        ("/home/me/models/a b.v2.safetensors", "a b.v2"),
        ("C:\\models\\x.CKPT", "x"),
        ("sub/y.gguf", "y"),
        ("plain", "plain"),
        ("v1.5", "v1.5"),
        ("..", ""),
        ("a/..", ""),
        ("", ""),
    ] {
        assert_eq!(ModelFile::new(path, None).name, name);
        assert_eq!(Lora::new(path, None, 1.0, 1.0).name, name);
    }
}

#[test]
fn pictures_without_settings_are_told() {
    let error = |texts: &[(&str, &str)]| {
        let texts: Vec<_> = texts.iter().map(|(key, text)| (key.to_string(), text.to_string())).collect();
        read_record(&texts).unwrap_err().to_string()
    };
    assert_eq!(error(&[]), "has no settings that sdrun knows: its metadata is empty");
    assert_eq!(
        error(&[("Software", "GIMP"), ("prompt", "a cat"), ("Comment", "hi"), ("parameters", " ")]),
        "has no settings that sdrun knows: its metadata has `Software`, `prompt`, `Comment`, `parameters`"
    );
    assert!(error(&[("invokeai_metadata", "[]")]).contains("InvokeAI"));
    let of_file = read_record(&[]).unwrap_err().of_file(Path::new("a.png"));
    assert_eq!(of_file.code, abi::ErrorCode::NotFound);
    assert_eq!(of_file.message, "a.png has no settings that sdrun knows: its metadata is empty");
}

#[test]
fn all_names_survive() {
    for (sampler, schedule) in Sampler::ALL.iter().flat_map(|s| Schedule::ALL.iter().map(move |t| (*s, *t))) {
        let record = Record {
            sampler: Some(sampler),
            schedule: Some(schedule),
            steps: Some(1),
            seed: Some(1),
            ..Record::of_sdrun()
        };
        assert_eq!(parameters(&record.infotext().to_string()).record, record);
        assert_eq!(of(SDRUN, &record.to_json()).record, record);
    }
}
