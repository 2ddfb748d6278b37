//! Prompts to conditions, through the text encoders.

use super::{
    Error, Event, Parts, Resolved, Result,
    kept::PromptKeys,
    network::{Network, Opener},
    parts::{Part, TextEncoder},
    words::{Divided, Ids, divided},
};
use crate::{
    family::{Conditioning, Encoder, Family, States as Which},
    program::Program,
    prompt::{self, Pass, schedule},
    text::{
        chunks,
        condition::{self, Condition, Sd3, Sizes},
        encode::{Output, Request, States, encode_chunks, encode_sequence},
        sequence::Sequence,
    },
};
use sdrun::{HostTensor, Shapes, Tensors, abi};
use std::fmt;

/// The conditions of a step, as indices into [`Conditions::all`].
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    /// The prompt's parts with their weights: several if `AND` joins them.
    pub(super) with: Vec<(usize, f64)>,
    /// The negative prompt, if guidance needs it.
    pub(super) without: Option<usize>,
}

impl Step {
    /// All conditions, the negative prompt first.
    pub(super) fn rows(&self) -> Vec<usize> {
        self.without.into_iter().chain(self.with.iter().map(|(row, _)| *row)).collect()
    }
}

/// The conditions of a run.
pub(super) struct Conditions {
    /// For each pass, one for each step.
    pub(super) steps: Vec<Vec<Step>>,
    /// All conditions.
    pub(super) all: Vec<Condition>,
}

/// A text to encode.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Text {
    pub(super) words: String,
    /// Whether it is a negative prompt.
    pub(super) is_negative: bool,
}

/// Encodes the prompts for passes of the sampler. The encoders are dropped afterwards.
pub(super) fn conditions(
    open: &Opener<'_>,
    parts: &Parts,
    request: &Resolved,
    passes: &[Pass],
) -> Result<Conditions> {
    let (steps, texts) = steps(request, passes);
    let mut encoded = Vec::new();
    for (encoder, found) in parts.family.encoders.iter().zip(&parts.encoders) {
        encoded.push(match found {
            Some(found) => Some(of_encoder(open, parts, found, encoder, request, &texts)?),
            None => None,
        });
    }
    join(parts, request, steps, &texts, &encoded)
}

/// The texts of all steps, and which ones each step of each pass needs.
pub(super) fn steps(request: &Resolved, passes: &[Pass]) -> (Vec<Vec<Step>>, Vec<Text>) {
    let mut texts = Vec::new();
    let steps = passes.iter().map(|pass| planned(request, *pass, &mut texts)).collect();
    (steps, texts)
}

/// The conditions of all texts from what each encoder of the family returned.
pub(super) fn join(
    parts: &Parts,
    request: &Resolved,
    steps: Vec<Vec<Step>>,
    texts: &[Text],
    encoded: &[Option<Encoded>],
) -> Result<Conditions> {
    let mut all = Vec::new();
    for (text, Text { is_negative, .. }) in texts.iter().enumerate() {
        let states = encoded.iter().map(|of| of.as_ref().map(|of| of.states[text].clone())).collect();
        let sequence = encoded.iter().flatten().find_map(|of| of.sequences.get(text));
        all.push(condition(parts.family, request, states, sequence, *is_negative)?);
    }
    Ok(Conditions { steps, all })
}

/// Which texts each step needs. Adds them to `texts`.
fn planned(request: &Resolved, pass: Pass, texts: &mut Vec<Text>) -> Vec<Step> {
    let mut index = |words: String, is_negative: bool| {
        let text = Text { words, is_negative };
        texts.iter().position(|known| *known == text).unwrap_or_else(|| {
            texts.push(text);
            texts.len() - 1
        })
    };
    let of = |text: &str| -> Vec<(usize, String)> {
        if request.syntax.has_schedules() { schedule(text, pass) } else { vec![(usize::MAX, text.into())] }
    };
    let at = |plan: &[(usize, String)], step: usize| {
        let found = plan.iter().find(|(until, _)| step < *until).or(plan.last());
        found.map(|(_, text)| text.clone()).unwrap_or_default()
    };
    let with: Vec<_> = match request.syntax.has_schedules() {
        true => {
            prompt::parts(&request.prompt).into_iter().map(|part| (of(&part.text), part.weight)).collect()
        }
        false => vec![(of(&request.prompt), 1.0)],
    };
    let without = of(&request.negative);
    (0..pass.steps())
        .map(|step| {
            // The negative prompt comes first, as in diffusers' batches.
            let without = request.guidance.needs_both().then(|| index(at(&without, step), true));
            let with = with.iter().map(|(plan, weight)| (index(at(plan, step), false), *weight)).collect();
            Step { with, without }
        })
        .collect()
}

/// What one encoder returns for all texts.
pub(super) struct Encoded {
    pub(super) states: Vec<States>,
    /// The texts as sequences, if the encoder takes sequences.
    pub(super) sequences: Vec<Sequence>,
}

fn of_encoder(
    open: &Opener<'_>,
    parts: &Parts,
    TextEncoder { part, tokenizer }: &TextEncoder,
    encoder: &Encoder,
    request: &Resolved,
    texts: &[Text],
) -> Result<Encoded> {
    let Divided { ids, tokens, lost, embeddings } = divided(texts, tokenizer, encoder, parts, request)?;
    open.tell(Event::Prompt { part: &part.name, tokens, lost });
    let mut weights = part.weights.clone();
    weights.embeddings.extend(embeddings);
    let shapes = shapes(part, &ids);
    let has_mask = shapes.contains_key(MASK);
    let layer = layer_of(encoder, request);
    let emphasis = match ids {
        Ids::Chunks(_) => request.syntax.emphasis(),
        Ids::Sequences(_) => request.syntax.sequence_emphasis(),
    };
    let kept = open.engines.kept.as_ref();
    let kept = kept.map(|kept| (kept, PromptKeys::new(part.model.name(), &weights, &(emphasis, layer))));
    // The network is loaded for the first prompt whose states are not known.
    let mut run = None;
    let mut states_of = |prompt: &dyn fmt::Debug, encode: &mut dyn FnMut(&mut Run<'_>) -> Result<States>| {
        let known = kept.as_ref().map(|(kept, keys)| (kept, keys.of(prompt)));
        if let Some(states) = known.as_ref().and_then(|(kept, key)| kept.prompt(key)) {
            return Ok(states);
        }
        if run.is_none() {
            let network = open.network_with(part, weights.clone(), shapes.clone().into())?;
            run = Some(Run::new(network, encoder, layer)?);
        }
        let Some(run) = &mut run else { return Err(Error::invalid("the text encoder is not loaded")) };
        let states = encode(run)?;
        if let Some((kept, key)) = known {
            kept.put_prompt(key, &states);
        }
        Ok(states)
    };
    match ids {
        Ids::Chunks(prompts) => {
            let states = prompts.iter().map(|prompt| {
                states_of(prompt, &mut |run| {
                    Ok(encode_chunks(prompt, emphasis, layer, |asked| run.encode(asked))?)
                })
            });
            Ok(Encoded { states: states.collect::<Result<_>>()?, sequences: Vec::new() })
        }
        Ids::Sequences(sequences) => {
            let states = sequences.iter().map(|prompt| {
                states_of(prompt, &mut |run| {
                    Ok(encode_sequence(prompt, emphasis, has_mask, |asked| run.encode(asked))?)
                })
            });
            Ok(Encoded { states: states.collect::<Result<_>>()?, sequences })
        }
    }
}

/// Shapes of an encoder's inputs.
pub(super) fn shapes(part: &Part, ids: &Ids) -> Shapes {
    let length = match ids {
        Ids::Chunks(_) => chunks::LENGTH,
        Ids::Sequences(all) => all.first().map_or(0, |sequence| sequence.ids.len()),
    };
    let inputs = part.model.inputs();
    let has_mask = inputs.iter().any(|(spec, _)| spec.name == MASK);
    let names = [Some(TOKENS), has_mask.then_some(MASK)];
    names.into_iter().flatten().map(|name| (name.into(), vec![1, length])).collect()
}

/// The layer that a family takes of an encoder, counted from the last, which is 1.
pub(super) fn layer_of(encoder: &Encoder, request: &Resolved) -> usize {
    match encoder.states {
        Which::Penultimate => 2,
        Which::None => 1,
        Which::Last => request.clip_skip,
    }
}

const TOKENS: &str = "input_ids";
const MASK: &str = "attention_mask";

/// A loaded encoder. The engine takes one row at a time, so one engine serves prompts of any length.
struct Run<'a> {
    network: Network<'a>,
    /// Hidden states, then pooled ones if they are used.
    outputs: Vec<String>,
}

impl<'a> Run<'a> {
    fn new(network: Network<'a>, encoder: &Encoder, layer: usize) -> Result<Self> {
        let names = network.outputs();
        let hidden = hidden_output(names, layer, encoder.states).ok_or_else(|| {
            let message =
                format!("its graph gives no states of layer {layer} from the end, only {}", names.join(", "));
            Error::of(encoder.component)(abi::Error::unsupported(message).into())
        })?;
        let pooled = pooled_output(names, encoder);
        let outputs = [Some(hidden), pooled.map(str::to_string)].into_iter().flatten().collect();
        Ok(Run { network, outputs })
    }

    fn encode(&mut self, asked: &Request<'_>) -> Result<Output> {
        let mut out = Output::default();
        let length = asked.ids.len() / asked.batch.max(1);
        let names: Vec<&str> = self.outputs.iter().map(String::as_str).collect();
        for row in 0..asked.batch {
            let at = row * length..(row + 1) * length;
            let tensor = |values: &[i64]| HostTensor::from_i64(vec![1, length], &values[at.clone()]);
            let mut inputs = Tensors::from([(TOKENS.to_string(), tensor(asked.ids)?)]);
            if let Some(mask) = asked.mask {
                inputs.insert(MASK.into(), tensor(mask)?);
            }
            let mut found = self.network.run(&inputs, &names)?.into_iter();
            out.hidden.extend(found.next().unwrap_or_default());
            out.pooled.extend(found.next().unwrap_or_default());
        }
        Ok(out)
    }
}

/// The denoiser's inputs for one text. `states` has a place for each encoder of the family.
fn condition(
    family: &Family,
    request: &Resolved,
    states: Vec<Option<States>>,
    sequence: Option<&Sequence>,
    is_negative: bool,
) -> Result<Condition> {
    let mut states = states.into_iter();
    let mut next = || states.next().flatten();
    let absent = || Error::invalid("a text encoder is missing");
    let sequence = || sequence.ok_or_else(|| Error::invalid("the text encoder takes no sequence"));
    Ok(match family.conditioning {
        Conditioning::Plain => condition::plain(next().ok_or_else(absent)?),
        Conditioning::Sdxl => {
            let (clip_l, big_g) = (next().ok_or_else(absent)?, next().ok_or_else(absent)?);
            let sizes = Sizes::whole(request.height as u32, request.width as u32);
            condition::sdxl(&clip_l, big_g, sizes)?
        }
        Conditioning::SdxlRefiner => {
            let sizes = Sizes::whole(request.height as u32, request.width as u32);
            let score = condition::AESTHETIC_SCORES[usize::from(is_negative)];
            condition::sdxl_refiner(next().ok_or_else(absent)?, sizes, score)?
        }
        Conditioning::Sd3 => {
            let like_comfy = request.like == Some(Program::ComfyUi);
            let sizes = Sd3 { without_t5: if like_comfy { 0 } else { 256 }, ..Sd3::STANDARD };
            let (clip_l, big_g, t5) = (next(), next(), next());
            // The width of the sequence is T5's. Small models have their own.
            let joint = t5.as_ref().map_or(sizes.joint, States::width);
            condition::sd3(Sd3 { joint, ..sizes }, clip_l, big_g, t5)?
        }
        Conditioning::Flux => condition::flux(next().ok_or_else(absent)?, next().ok_or_else(absent)?)?,
        Conditioning::Chroma => {
            let tokens = (request.width / 16) * (request.height / 16);
            condition::chroma(sequence()?, next().ok_or_else(absent)?, tokens).without_padding()
        }
        Conditioning::PixArt => condition::pixart(sequence()?, next().ok_or_else(absent)?).without_padding(),
        Conditioning::Sana => condition::sana(sequence()?, next().ok_or_else(absent)?).without_padding(),
    })
}

/// The output with the pooled states, if the family takes them.
pub(super) fn pooled_output(names: &[String], encoder: &Encoder) -> Option<&'static str> {
    let has = |name: &&str| names.iter().any(|known| known == name);
    ["text_embeds", "pooler_output"].into_iter().find(has).filter(|_| encoder.pooled)
}

/// The output with the hidden states of a layer, counted from the last, which is 1. Optimum's exports give all layers as
/// `hidden_states.0` (the embeddings) and so on, without the final normalization.
pub(super) fn hidden_output(names: &[String], layer: usize, states: Which) -> Option<String> {
    let has = |name: &str| names.iter().any(|known| known == name);
    if layer == 1 {
        return has("last_hidden_state").then(|| "last_hidden_state".into());
    }
    // SD 1 takes normalized states with clip skip. Graphs of Optimum lack them.
    if states != Which::Penultimate {
        let name = format!("clip_skip_{layer}");
        return has(&name).then_some(name);
    }
    let numbered = (0..).take_while(|i| has(&format!("hidden_states.{i}"))).count();
    match numbered.checked_sub(layer) {
        Some(index) => Some(format!("hidden_states.{index}")),
        None => (layer == 2 && has("penultimate_hidden_state")).then(|| "penultimate_hidden_state".into()),
    }
}
