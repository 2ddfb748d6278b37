//! Sorts the keys of a file into networks and their spellings.

use super::{ema, harmless, spelling};
use crate::{
    Component,
    keys::{Naming, Network, T5_TOKENS, Table, foreign_network, names::Names},
};
use std::collections::{BTreeMap, HashMap};

/// Prefixes of a network's keys in files that hold several networks, with the text encoder where only the prefix tells it. Sources: LDM and SGM configurations (`model`, `first_stage_model`, `cond_stage_model`,
/// `conditioner`), ComfyUI's saved checkpoints (`text_encoders`, `diffusion_model`), ControlNet (`control_model`), and
/// the folder names of diffusers.
const PREFIXES: &[(&str, Option<Component>)] = {
    use Component::{TextEncoder, TextEncoder2, TextEncoder3};
    &[
        ("model.diffusion_model.", None),
        ("diffusion_model.", None),
        ("first_stage_model.", None),
        ("vae.", None),
        ("control_model.", None),
        ("cond_stage_model.transformer.", Some(TextEncoder)),
        ("cond_stage_model.model.", Some(TextEncoder)),
        // stable-diffusion.cpp's name for the second one of SD XL.
        ("cond_stage_model.1.transformer.", Some(TextEncoder2)),
        ("conditioner.embedders.0.transformer.", Some(TextEncoder)),
        // The refiner has only the larger encoder, which diffusers calls the second too.
        ("conditioner.embedders.0.model.", Some(TextEncoder2)),
        ("conditioner.embedders.1.transformer.", Some(TextEncoder2)),
        ("conditioner.embedders.1.model.", Some(TextEncoder2)),
        ("text_encoders.clip_l.transformer.", Some(TextEncoder)),
        ("text_encoders.clip_l.", Some(TextEncoder)),
        ("text_encoders.clip_h.transformer.", Some(TextEncoder)),
        ("text_encoders.clip_g.transformer.", Some(TextEncoder2)),
        ("text_encoders.clip_g.", Some(TextEncoder2)),
        // Second or third, by the denoiser.
        ("text_encoders.t5xxl.transformer.", None),
        ("text_encoders.t5xxl.", None),
        ("unet.", None),
        ("transformer.", None),
        ("controlnet.", None),
        ("text_encoder.", Some(TextEncoder)),
        ("text_encoder_2.", Some(TextEncoder2)),
        ("text_encoder_3.", Some(TextEncoder3)),
    ]
};

/// One network of a file.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) component: Component,
    pub(super) network: Network,
    pub(super) naming: Naming,
    /// The prefix of its keys.
    pub(super) prefix: &'static str,
    /// Maps names in the table's spelling to keys in the file.
    pub(super) keys: HashMap<String, String>,
    pub(super) table: Table,
    /// Whether these are averaged (EMA) weights.
    pub(super) ema: bool,
}

/// The contents of a file.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) parts: Vec<Part>,
    /// The averaged denoiser beside a trained one.
    pub(super) averaged: Option<Part>,
    /// Recognised networks that sdrun does not read.
    pub(super) foreign: Vec<&'static str>,
    /// Keys that are no weights of a network, or duplicates.
    pub(super) ignored: Vec<String>,
    /// Unknown keys.
    pub(super) unrecognised: Vec<String>,
}

/// Shape of a tensor by key.
pub(super) type Shapes<'a> = &'a dyn Fn(&str) -> Option<Vec<usize>>;

impl Layout {
    /// Sorts the keys of one file. `hint` is the component if the file's folder tells it.
    pub(super) fn new(keys: &[&str], shapes: Shapes, hint: Option<Component>) -> Layout {
        let mut layout = Layout::default();
        let mut averaged = Vec::new();
        let mut rest = Vec::new();
        for key in keys {
            if ema::is_averaged(key) {
                averaged.push(*key);
            } else if harmless::anywhere(key).is_some() {
                layout.ignored.push((*key).to_string());
            } else {
                rest.push(*key);
            }
        }
        let bare = layout.take_prefixed(rest, shapes, hint);
        match layout.part("", &bare, shapes, hint) {
            Some(part) => layout.parts.push(part),
            None => layout.unrecognised = bare.into_iter().map(str::to_string).collect(),
        }
        let (denoiser, others) = ema::denoiser(&averaged, shapes);
        if layout.has(Component::Denoiser) {
            layout.averaged = denoiser;
            layout.ignored.extend(averaged.into_iter().map(str::to_string));
        } else {
            layout.parts.extend(denoiser);
            layout.ignored.extend(others.into_iter().map(str::to_string));
        }
        layout.settle_t5(hint);
        layout
    }

    /// The network of these keys, unless its component is already there. Records networks that are not read.
    fn part(
        &mut self,
        prefix: &'static str,
        keys: &[&str],
        shapes: Shapes,
        hint: Option<Component>,
    ) -> Option<Part> {
        let part = Part::new(prefix, keys, shapes, hint);
        if part.is_none() {
            let names = Names::from_iter(keys.iter().filter_map(|key| key.strip_prefix(prefix)));
            self.foreign.extend(foreign_network(&names));
        }
        part.filter(|part| !self.has(part.component))
    }

    /// Replaces the trained weights by averaged ones. Returns false if there are none.
    pub(super) fn use_averaged(&mut self) -> bool {
        let Some(averaged) = self.averaged.take() else { return self.parts.iter().any(|part| part.ema) };
        self.parts.retain(|part| part.component != averaged.component);
        self.parts.push(averaged);
        true
    }

    fn has(&self, component: Component) -> bool {
        self.parts.iter().any(|part| part.component == component)
    }

    /// Takes the networks whose keys have a prefix and returns the other keys: those without one, and those that only seem to
    /// have one (OpenCLIP's own keys begin with `transformer.`).
    fn take_prefixed<'k>(
        &mut self,
        keys: Vec<&'k str>,
        shapes: Shapes,
        hint: Option<Component>,
    ) -> Vec<&'k str> {
        let (mut groups, mut others) = (BTreeMap::<usize, Vec<&str>>::new(), Vec::new());
        for key in keys {
            // The longest prefix wins: `text_encoders.clip_l.` also matches `text_encoders.clip_l.transformer.`.
            let fitting = PREFIXES.iter().enumerate().filter(|(_, (prefix, _))| key.starts_with(prefix));
            match fitting.max_by_key(|(_, (prefix, _))| prefix.len()) {
                Some((index, _)) => groups.entry(index).or_default().push(key),
                None => others.push(key),
            }
        }
        for (index, keys) in groups {
            let Some((prefix, own)) = PREFIXES.get(index) else { continue };
            match self.part(prefix, &keys, shapes, own.or(hint)) {
                Some(part) => self.parts.push(part),
                None => others.extend(keys),
            }
        }
        others
    }

    /// T5 is the third text encoder of SD 3, the second of Flux and the only one of Chroma and PixArt. Alone it counts as the
    /// third.
    fn settle_t5(&mut self, hint: Option<Component>) {
        let denoiser = self.parts.iter().find(|part| part.component == Component::Denoiser);
        let component = match denoiser.map(|part| part.network) {
            Some(Network::Flux) => Component::TextEncoder2,
            Some(Network::Chroma | Network::PixArt) => Component::TextEncoder,
            _ => return,
        };
        let taken = self.parts.iter().any(|part| part.component == component);
        for part in &mut self.parts {
            if part.network == Network::T5
                && hint.is_none()
                && !taken
                && !part.prefix.starts_with("text_encoder_")
            {
                part.component = component;
            }
        }
    }
}

impl Part {
    /// The network of these keys without `prefix`.
    pub(super) fn new(
        prefix: &'static str,
        keys: &[&str],
        shapes: Shapes,
        hint: Option<Component>,
    ) -> Option<Part> {
        let bare: Vec<&str> = keys.iter().filter_map(|key| key.strip_prefix(prefix)).collect();
        let found = spelling::recognise(&Names::from_iter(bare.iter().copied()))?;
        let named: HashMap<String, String> =
            bare.iter().map(|name| (found.respell(name).into_owned(), format!("{prefix}{name}"))).collect();
        let table = Table::new(found.network, found.naming, named.keys().map(String::as_str));
        // Add-ons such as motion modules share only the outer names of the network they extend.
        let rules = harmless::Rules::new(found.network, std::iter::empty(), std::iter::empty());
        let strange = table.extra.iter().filter(|name| rules.harmless(name).is_none()).count();
        if table.pairs.len() < strange {
            return None;
        }
        let width =
            |name: &str| named.get(name).and_then(|key| shapes(key)).and_then(|shape| shape.get(1).copied());
        let component = match found.network {
            Network::UNet
            | Network::Sd3
            | Network::Flux
            | Network::Chroma
            | Network::PixArt
            | Network::Sana => Component::Denoiser,
            Network::ControlNet => Component::ControlNet,
            Network::Vae | Network::DeepVae | Network::TinyVae => Component::Vae,
            Network::Esrgan => Component::Upscaler,
            _ if hint.is_some_and(is_text) => hint?,
            Network::Gemma2 => Component::TextEncoder,
            Network::T5 => Component::TextEncoder3,
            // OpenCLIP ViT-H is the encoder of SD 2, ViT-bigG the second one of SD XL and SD 3.
            Network::OpenClip => match width("token_embedding.weight") {
                Some(1024) => Component::TextEncoder,
                _ => Component::TextEncoder2,
            },
            Network::Clip => match width("text_model.embeddings.token_embedding.weight") {
                Some(1280) => Component::TextEncoder2,
                _ => Component::TextEncoder,
            },
        };
        let (network, naming) = (found.network, found.naming);
        Some(Part { component, network, naming, prefix, keys: named, table, ema: false })
    }

    /// Its name in messages.
    pub(super) fn title(&self) -> String {
        let prefix = if self.prefix.is_empty() { String::new() } else { format!(" ({}*)", self.prefix) };
        format!("the {}{prefix} of this checkpoint", self.component)
    }

    /// The key in the file of a name in the table's spelling.
    pub(super) fn key<'s>(&'s self, name: &'s str) -> &'s str {
        self.keys.get(name).map_or(name, String::as_str)
    }

    /// Maps other names of tensors to their names in diffusers.
    pub(super) fn aliases(&self) -> HashMap<String, String> {
        match self.network {
            Network::T5 => [(T5_TOKENS[1].to_string(), T5_TOKENS[0].to_string())].into(),
            // Graphs of tiny autoencoders mostly come from the original implementation and keep its numbers.
            Network::TinyVae if self.naming == Naming::Original => {
                let pairs = self.table.pairs.iter().filter_map(|pair| Some((pair, pair.diffusers.first()?)));
                pairs
                    .filter_map(|(pair, name)| Some((self.keys.get(&pair.original)?.clone(), name.clone())))
                    .collect()
            }
            _ => HashMap::new(),
        }
    }
}

/// Whether it is a text encoder.
pub(super) fn is_text(component: Component) -> bool {
    matches!(component, Component::TextEncoder | Component::TextEncoder2 | Component::TextEncoder3)
}
