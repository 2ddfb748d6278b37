//! Prompts to conditions, through the text encoders.

use super::{Error, Event, Part, Parts, Resolved, Result, cancelled, network::Opener};
use crate::{
    family::{Encoder, States as Which, Vocabulary},
    prompt::{Pass, schedule, weighted},
    text::{
        chunks::{self, Chunks, Marks, Rules, equalize},
        condition::{self, Condition, Sizes},
        emphasis::Emphasis,
        encode::{Output, States, encode_chunks},
        tokenizer::Tokenizer,
    },
};
use sdrun::{HostTensor, Shapes, Tensors, abi};

/// The conditions of a run.
pub(super) struct Conditions {
    /// For each step, indices into `all`: the prompt's, and the negative prompt's if guidance needs it.
    pub(super) steps: Vec<(usize, Option<usize>)>,
    /// All conditions. They have the same number of places.
    pub(super) all: Vec<Condition>,
}

/// Encodes the prompts. The encoders are dropped afterwards.
pub(super) fn conditions(
    open: &Opener<'_>,
    parts: &Parts,
    request: &Resolved,
    event: &mut dyn FnMut(Event<'_>),
) -> Result<Conditions> {
    let mut texts: Vec<String> = Vec::new();
    let mut index = |text: String| {
        texts.iter().position(|known| *known == text).unwrap_or_else(|| {
            texts.push(text);
            texts.len() - 1
        })
    };
    let [with, without] = [&request.prompt, &request.negative].map(|prompt| {
        let pass = Pass::First { steps: request.steps };
        schedule(prompt, pass)
    });
    let at = |plan: &[(usize, String)], step: usize| {
        let found = plan.iter().find(|(until, _)| step < *until).or(plan.last());
        found.map(|(_, text)| text.clone()).unwrap_or_default()
    };
    let steps: Vec<(usize, Option<usize>)> = (0..request.steps)
        .map(|step| {
            let negative = request.guidance.needs_both().then(|| index(at(&without, step)));
            (index(at(&with, step)), negative)
        })
        .collect();

    let mut states: Vec<Vec<States>> = Vec::new();
    for (encoder, part) in parts.family.encoders.iter().zip(&parts.encoders) {
        let prompts = divided(&texts, &parts.tokenizer, encoder)?;
        states.push(encoded(open, part, encoder, request, &prompts, event)?);
    }
    let all = (0..texts.len()).map(|text| {
        let mut of_text = states.iter().map(|of_encoder| of_encoder[text].clone());
        match (of_text.next(), of_text.next()) {
            (Some(clip_l), Some(big_g)) => {
                let size = Sizes::whole(request.height as u32, request.width as u32);
                Ok(condition::sdxl(&clip_l, big_g, size)?)
            }
            (Some(only), None) => Ok(condition::plain(only)),
            _ => Err(abi::Error::internal("a family has text encoders").into()),
        }
    });
    Ok(Conditions { steps, all: all.collect::<Result<_>>()? })
}

/// Divides all texts into the same number of chunks.
fn divided(texts: &[String], tokenizer: &Tokenizer, encoder: &Encoder) -> Result<Vec<Chunks>> {
    let ends = |ids: &[i64], default| ids.first().copied().unwrap_or(default);
    let (start, end) =
        (ends(tokenizer.before(), Marks::CLIP_L.start), ends(tokenizer.after(), Marks::CLIP_L.end));
    let pad = if encoder.vocabulary == Vocabulary::OpenClip { 0 } else { end };
    let marks = Marks { start, end, pad };
    let divide = |text: &String| chunks::chunks(Rules::A1111, &weighted(text), tokenizer, marks, &[]);
    let mut prompts = texts.iter().map(divide).collect::<Result<Vec<_>, _>>()?;
    equalize(&mut prompts);
    Ok(prompts)
}

/// The states of all prompts. The engine takes one chunk at a time, so one engine serves prompts of any length.
fn encoded(
    open: &Opener<'_>,
    part: &Part,
    encoder: &Encoder,
    request: &Resolved,
    prompts: &[Chunks],
    event: &mut dyn FnMut(Event<'_>),
) -> Result<Vec<States>> {
    let shapes = Shapes::from([("input_ids".into(), vec![1, chunks::LENGTH])]);
    let mut network = open.network(part, shapes, event)?;
    let names = network.outputs();
    let layer = match encoder.states {
        Which::Penultimate => 2,
        Which::None | Which::Last => request.clip_skip,
    };
    let hidden = hidden_output(names, layer, encoder.states).ok_or_else(|| {
        let message =
            format!("its graph gives no states of layer {layer} from the end, only {}", names.join(", "));
        Error::of(&part.name)(abi::Error::unsupported(message).into())
    })?;
    let pooled = encoder
        .pooled
        .then(|| ["text_embeds", "pooler_output"].into_iter().find(|name| names.iter().any(|n| n == name)))
        .flatten();
    let outputs: Vec<&str> = [Some(hidden.as_str()), pooled].into_iter().flatten().collect();
    let mut all = Vec::new();
    for prompt in prompts {
        let states = encode_chunks(prompt, Emphasis::Original, layer, |asked| -> Result<Output> {
            let mut out = Output::default();
            for row in asked.ids.chunks(chunks::LENGTH) {
                cancelled(open.host)?;
                let ids = HostTensor::from_i64(vec![1, row.len()], row)?;
                let inputs = Tensors::from([("input_ids".to_string(), ids)]);
                let mut found = network.run(&inputs, &outputs, open.host)?.into_iter();
                out.hidden.extend(found.next().unwrap_or_default());
                out.pooled.extend(found.next().unwrap_or_default());
            }
            Ok(out)
        })?;
        all.push(states);
    }
    Ok(all)
}

/// The output with the hidden states of a layer, counted from the last, which is 1. Optimum's exports give all layers as
/// `hidden_states.0` (the embeddings) and so on, without the final normalization.
fn hidden_output(names: &[String], layer: usize, states: Which) -> Option<String> {
    let has = |name: &str| names.iter().any(|known| known == name);
    if layer == 1 {
        return has("last_hidden_state").then(|| "last_hidden_state".into());
    }
    // SD 1 with clip skip takes normalized states, which no graph gives.
    if states != Which::Penultimate {
        return None;
    }
    let numbered = (0..).take_while(|i| has(&format!("hidden_states.{i}"))).count();
    match numbered.checked_sub(layer) {
        Some(index) => Some(format!("hidden_states.{index}")),
        None => (layer == 2 && has("penultimate_hidden_state")).then(|| "penultimate_hidden_state".into()),
    }
}
