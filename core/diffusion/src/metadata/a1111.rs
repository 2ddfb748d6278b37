//! Records as A1111's text and back. Names and order of settings are those of A1111 1.10 and, for distilled guidance, of Forge.

use super::{
    ControlNet, Hires, Infotext, Inpaint, Lora, ModelFile, Reading, Record, Rng, Upscale, fields::Fields,
};
use crate::{
    names,
    noise::Variation,
    pipeline::Content,
    program::Program,
    prompt::{self, Tag},
    sampler::Sampler,
    schedule::Schedule,
};
use serde_json::Value;

/// Settings that do not change the picture, or that repeat others.
const IDLE: &[&str] = &[
    "Version",
    "User",
    "Created Date",
    "Hashes",
    "Civitai resources",
    "Civitai metadata",
    "Init image hash",
    "Downcast alphas_cumprod",
    "SDCPP",
];

/// The most units of A1111's ControlNet. Those that were off have no text.
const MOST_CONTROLNETS: usize = 10;

/// A1111's names of the enlargement of a finished picture.
const FACTOR: &str = "Postprocess upscale by";
const UPSCALER: &str = "Postprocess upscaler";

/// A1111's names of what is under a mask at the start. It does not name the original picture.
const CONTENTS: [(Content, &str); 3] =
    [(Content::Surroundings, "fill"), (Content::Noise, "latent noise"), (Content::Nothing, "latent nothing")];

impl Record {
    /// A1111's text of the record. It has no room for guidance rescaling, text encoders and networks. Tags in the prompt tell
    /// the strengths of adapters, as A1111 and civitai expect.
    pub fn infotext(&self) -> Infotext {
        let mut settings = Vec::new();
        let mut set = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                settings.push((name.to_string(), value));
            }
        };
        let text = |number: Option<f64>| number.map(|number| number.to_string());
        let count = |number: Option<usize>| number.map(|number| number.to_string());
        let size = |width: Option<usize>, height| Some(format!("{}x{}", width?, height?));
        set("Steps", count(self.steps));
        set("Sampler", self.sampler.map(|sampler| sampler.label().into()));
        set("Schedule type", self.schedule.map(|schedule| schedule.label().into()));
        set("CFG scale", text(self.cfg_scale));
        set("Distilled CFG Scale", text(self.guidance));
        set("Seed", self.seed.map(|seed| seed.to_string()));
        set("Size", size(self.width, self.height));
        for (name, file) in [("Model", &self.model), ("VAE", &self.vae)] {
            let file = file.as_ref();
            set(&format!("{name} hash"), file.and_then(|file| file.hash.clone()));
            set(name, file.map(|file| file.name.clone()));
        }
        set("Variation seed", self.variation.map(|variation| variation.seed.to_string()));
        set("Variation seed strength", text(self.variation.map(|variation| variation.strength)));
        set("Refiner", self.refiner.as_ref().map(|ModelFile { name, hash }| named(name, hash.as_deref())));
        set("Refiner switch at", text(self.refiner_start));
        let hires = self.hires.as_ref();
        set(
            "Denoising strength",
            text(hires.map_or(self.denoising_strength, |hires| hires.denoising_strength)),
        );
        set("Clip skip", count(self.clip_skip.filter(|&layers| layers > 1)));
        set("RNG", self.rng.map(|rng| if rng == Rng::Nv { "NV".into() } else { "CPU".into() }));
        for (number, net) in self.controlnets.iter().enumerate() {
            let ControlNet { name, hash, strength, start, end } = net;
            let model = named(name, hash.as_deref());
            let unit =
                format!("Model: {model}, Weight: {strength}, Guidance Start: {start}, Guidance End: {end}");
            set(&format!("ControlNet {number}"), Some(unit));
        }
        if let Some(Inpaint { blur, content, only_masked }) = &self.inpaint {
            set("Mask blur", text(Some(*blur).filter(|&blur| blur > 0.0)));
            set("Inpaint area", only_masked.map(|_| "Only masked".into()));
            set("Masked area padding", only_masked.map(|padding| padding.to_string()));
            let name = CONTENTS.iter().find(|(other, _)| other == content);
            set("Masked content", name.map(|(_, name)| (*name).into()));
        }
        if let Some(hires) = hires {
            set("Hires sampler", hires.sampler.map(|sampler| sampler.label().into()));
            set("Hires schedule type", hires.schedule.map(|schedule| schedule.label().into()));
            set("Hires upscale", text(hires.scale));
            set("Hires resize", size(hires.width, hires.height));
            set("Hires steps", count(hires.steps));
            set("Hires upscaler", hires.upscaler.clone());
        }
        for (name, value) in self.upscale.iter().flat_map(Upscale::settings) {
            set(&name, Some(value));
        }
        let hashes = |files: Vec<(&String, &Option<String>)>| {
            let pairs = files
                .into_iter()
                .filter_map(|(name, hash)| Some(format!("{}: {}", plain(name), hash.as_ref()?)));
            Some(pairs.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
        };
        set("Lora hashes", hashes(self.loras.iter().map(|lora| (&lora.name, &lora.hash)).collect()));
        set("TI hashes", hashes(self.embeddings.iter().map(|file| (&file.name, &file.hash)).collect()));
        set("Version", Some(self.program.clone()).filter(|program| !program.is_empty()));
        let tags = self.loras.iter().map(tag);
        let prompt = Some(self.prompt.clone()).filter(|prompt| !prompt.is_empty()).into_iter().chain(tags);
        Infotext { prompt: prompt.collect::<Vec<_>>().join(" "), negative: self.negative.clone(), settings }
    }
}

impl Upscale {
    /// A1111's text about the enlargement of a finished picture, for the key [`POSTPROCESSING`](super::POSTPROCESSING).
    pub fn infotext(&self) -> String {
        Infotext { settings: self.settings().into(), ..Infotext::default() }.to_string().trim().into()
    }

    fn settings(&self) -> [(String, String); 2] {
        [(FACTOR.into(), self.factor.to_string()), (UPSCALER.into(), self.name.clone())]
    }
}

/// The tag of an adapter. A1111 names the strength in text encoders first.
fn tag(lora: &Lora) -> String {
    let Lora { strength, text_encoder_strength, .. } = lora;
    let name = plain(&lora.name);
    match strength == text_encoder_strength {
        true => format!("<lora:{name}:{strength}>"),
        false => format!("<lora:{name}:{text_encoder_strength}:{strength}>"),
    }
}

/// A name without the characters that have a meaning in lists and tags, as A1111 writes it.
fn plain(name: &str) -> String {
    name.replace([':', ',', '<', '>'], "")
}

/// A file as "name [hash]".
fn named(name: &str, hash: Option<&str>) -> String {
    plain(name) + &hash.map(|hash| format!(" [{hash}]")).unwrap_or_default()
}

/// Reads "name [hash]".
fn read_named(text: &str) -> ModelFile {
    let hashed = text.strip_suffix(']').and_then(|text| text.split_once(" ["));
    let (name, hash) = hashed.map_or((text, None), |(name, hash)| (name, Some(hash.to_string())));
    ModelFile::new(name, hash)
}

/// Reads A1111's text, also as Forge, stable-diffusion.cpp and sdrun write it.
pub(super) fn read(text: &str) -> Reading {
    let Infotext { prompt, negative, settings } = Infotext::parse(text);
    let program = settings.iter().find(|(name, _)| name == "Version").map(|(_, version)| version.clone());
    let mut fields = Fields::new(settings.into_iter().map(|(name, value)| (name, Value::from(value))));
    // A1111's versions are like `v1.10.0`, Forge's like `f2.0.1v1.10.1`.
    let from_a1111 = program.as_ref().is_some_and(|version| version.contains("v1."));
    let (sampler, in_name) = fields.sampler("Sampler");
    // Until 1.8, a name without a schedule meant the plain one. Later versions always say the schedule.
    let schedule = match fields.text("Schedule type") {
        Some(name) if name == "Automatic" => sampler.map(Sampler::usual_schedule),
        Some(name) => fields.known("Schedule type", &name, "a schedule that sdrun has", names::schedule),
        None => in_name.or(from_a1111.then_some(Schedule::Normal)),
    };
    let (width, height) = fields.sizes("Size").unzip();
    let strength = fields.real("Denoising strength");
    let hires = hires(&mut fields, strength);
    let (prompt, loras) = loras(&mut fields, &prompt);
    let record = Record {
        prompt,
        negative,
        width,
        height,
        steps: fields.size("Steps"),
        sampler,
        schedule,
        cfg_scale: fields.real("CFG scale"),
        guidance: fields.real("Distilled CFG Scale").or_else(|| fields.real("Guidance")),
        seed: fields.whole("Seed"),
        variation: variation(&mut fields),
        rng: rng(&mut fields, from_a1111),
        seed_like: from_a1111.then_some(Program::A1111),
        clip_skip: fields.size("Clip skip").filter(|&layers| layers > 0),
        denoising_strength: strength.filter(|_| hires.is_none()),
        inpaint: inpaint(&mut fields),
        model: file(&mut fields, &["Model", "Unet"], "Model hash"),
        vae: file(&mut fields, &["VAE"], "VAE hash"),
        refiner: fields.text("Refiner").map(|text| read_named(&text)),
        refiner_start: fields.real("Refiner switch at"),
        text_encoders: std::iter::from_fn(|| fields.text("TE"))
            .map(|name| ModelFile::new(&name, None))
            .collect(),
        loras,
        embeddings: pairs(&fields.text("TI hashes").unwrap_or_default())
            .map(|(name, hash)| ModelFile::new(name, Some(hash.into())))
            .collect(),
        controlnets: (0..MOST_CONTROLNETS)
            .filter_map(|number| controlnet(&mut fields, &format!("ControlNet {number}")))
            .collect(),
        hires,
        upscale: upscale(&mut fields),
        program: program.unwrap_or_default(),
        ..Record::default()
    };
    fields.ignore(IDLE);
    fields.finish(record)
}

/// Where the noise came from. A1111 does not say so if it was the GPU; stable-diffusion.cpp calls NV "cuda".
fn rng(fields: &mut Fields, from_a1111: bool) -> Option<Rng> {
    let found = fields.parse("RNG", "noise that sdrun has", |name| match name {
        "CPU" | "cpu" => Some(Some(Rng::Cpu)),
        "NV" | "cuda" => Some(Some(Rng::Nv)),
        "GPU" => Some(None),
        _ => None,
    });
    match found {
        Some(Some(rng)) => return Some(rng),
        None if !from_a1111 => return None,
        _ => {}
    }
    fields.note("the noise was drawn on a GPU, which `NV` repeats for small pictures and NVIDIA GPUs only");
    Some(Rng::Nv)
}

fn variation(fields: &mut Fields) -> Option<Variation> {
    let (seed, strength) = (fields.whole("Variation seed"), fields.real("Variation seed strength"));
    Some(Variation { seed: seed?, strength: strength? })
}

fn file(fields: &mut Fields, names: &[&str], hash: &str) -> Option<ModelFile> {
    let name = names.iter().find_map(|name| fields.text(name));
    let hash = fields.text(hash);
    (name.is_some() || hash.is_some()).then(|| ModelFile::new(&name.unwrap_or_default(), hash))
}

fn inpaint(fields: &mut Fields) -> Option<Inpaint> {
    let find = |text: &str| CONTENTS.iter().find(|(_, name)| *name == text).map(|(content, _)| *content);
    let content = fields.parse("Masked content", "content that sdrun has", find);
    let only_masked =
        fields.parse("Inpaint area", "an area that sdrun has", |text| (text == "Only masked").then_some(()));
    let padding = fields.whole("Masked area padding").and_then(|padding| u32::try_from(padding).ok());
    let inpaint = Inpaint {
        blur: fields.real("Mask blur").unwrap_or_default(),
        content: content.unwrap_or_default(),
        // A1111's own default.
        only_masked: only_masked.map(|()| padding.unwrap_or(32)),
    };
    (inpaint != Inpaint::default()).then_some(inpaint)
}

fn hires(fields: &mut Fields, denoising_strength: Option<f64>) -> Option<Hires> {
    // stable-diffusion.cpp has the upscaler's name where A1111 has the factor.
    let upscale = fields.text("Hires upscale");
    let factor =
        upscale.as_ref().and_then(|text| text.parse().ok()).filter(|factor: &f64| factor.is_finite());
    let name = upscale.filter(|_| factor.is_none());
    let (width, height) = fields.sizes("Hires resize").filter(|sizes| *sizes != (0, 0)).unzip();
    let (sampler, in_name) = fields.sampler("Hires sampler");
    let hires = Hires {
        scale: factor.or_else(|| fields.real("Hires scale")),
        width,
        height,
        steps: fields.size("Hires steps").filter(|&steps| steps > 0),
        upscaler: fields.text("Hires upscaler").or(name),
        denoising_strength: None,
        sampler,
        schedule: fields.schedule("Hires schedule type").or(in_name),
    };
    (hires != Hires::default()).then_some(Hires { denoising_strength, ..hires })
}

fn upscale(fields: &mut Fields) -> Option<Upscale> {
    let (factor, name) = (fields.real(FACTOR), fields.text(UPSCALER));
    Some(Upscale::new(&name?, None, factor.unwrap_or_default()))
}

/// Takes the tags of adapters out of a prompt, and their hashes out of the settings.
fn loras(fields: &mut Fields, prompt: &str) -> (String, Vec<Lora>) {
    let hashes = fields.text("Lora hashes").unwrap_or_default();
    let hash = |name: &str| {
        pairs(&hashes).find(|(other, _)| *other == plain(name)).map(|(_, hash)| hash.to_string())
    };
    let (text, tags) = prompt::tags(prompt);
    let mut loras = Vec::new();
    for Tag { kind, name, weight, text_weight } in tags {
        if kind == "lora" || kind == "lyco" {
            loras.push(Lora::new(&name, hash(&name), weight as f32, text_weight as f32));
        } else {
            fields.note(format!("`<{kind}:{name}>` is not supported"));
        }
    }
    for (name, _) in pairs(&hashes).filter(|(name, _)| !loras.iter().any(|lora| plain(&lora.name) == *name)) {
        fields.note(format!("the prompt does not tell the strength of the adapter {name}"));
    }
    (text.trim().to_string(), loras)
}

/// Names and hashes of a list such as "a: 0123, b: 4567".
fn pairs(list: &str) -> impl Iterator<Item = (&str, &str)> {
    list.split(',').filter_map(|pair| pair.rsplit_once(':')).map(|(name, hash)| (name.trim(), hash.trim()))
}

/// Reads a ControlNet such as "Module: canny, Model: control_v11p [d14c016b], Weight: 1, Guidance Start: 0, …".
fn controlnet(fields: &mut Fields, field: &str) -> Option<ControlNet> {
    let text = fields.text(field)?;
    let parts = text.split(',').filter_map(|part| part.split_once(':'));
    let mut unit =
        Fields::new(parts.map(|(name, value)| (name.trim().to_string(), Value::from(value.trim()))));
    let ModelFile { name, hash } = read_named(&unit.text("Model")?);
    let strength = unit.real("Weight").unwrap_or(1.0);
    let (start, end) = (unit.real("Guidance Start").unwrap_or(0.0), unit.real("Guidance End").unwrap_or(1.0));
    for sentence in unit.finish(Record::default()).unread {
        fields.note(format!("{field}: {sentence}"));
    }
    Some(ControlNet { name, hash, strength, start, end })
}
